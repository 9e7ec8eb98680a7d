"""The built-in back ends of vectors in fewer bytes: they propose candidates, which the store measures again on the vectors themselves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from retrieval.errors import StoreError
from retrieval.serving.index.contract import Floats, Rows
from retrieval.serving.index.faiss_backends import FaissBackend, ListsBackend, sample_of
from retrieval.serving.index.on_gpu import Gpus
from retrieval.serving.runtime import load_faiss

Lists = Annotated[int, Field(ge=0)]
Expand = Annotated[int, Field(ge=1, le=1000)]
_GPU_PARTS = {1, 2, 3, 4, 8, 12, 16, 20, 24, 28, 32, 40, 48, 56, 64}
_GPU_WIDTHS = {1, 2, 3, 4, 6, 8, 10, 12, 16, 20, 24, 28, 32}
"""Parts of a code and numbers of a part that FAISS's GPU kernels are compiled for (`GpuIndexIVFPQ.cu`)."""
_QUERY_BITS = 4  # of each number of a query of RaBitQ: with 0, which rounds nothing, FAISS goes another way, many times as slow


class IvfPq(ListsBackend):
    """Approximate search in inverted lists of product codes (Jégou, Douze and Schmid 2011): some bytes a vector.

    Args:
        lists: number of clusters; 0 takes four times the square root of the number of vectors, at least 39 a cluster; 1 makes a plain table of codes.
        probes: how many lists a search looks at; 0 takes a sixteenth of them, at least 8.
        bytes: of a vector's code, at most its numbers; it divides them, or the next number that does is taken.
        expand: how many times as many candidates as are wanted an index measures again on the vectors.
        gpus: where FAISS finds several GPUs: `one` of them, `replicas` (all codes on each, more searches at once) or `shards` (a part on each, more vectors). A GPU takes codes of 8 bits in at most 64 parts; others stay on the CPU.
        float16: whether a GPU computes with tables in 16 bits: faster; distances are rounded.
    """

    kinds = ("IndexIVFPQ",)
    room = 1 << 31  # FAISS's own limit on the tables that it computes beforehand
    expand = 8

    def __init__(
        self,
        lists: Lists = 0,
        probes: Lists = 0,
        bytes: Annotated[int, Field(ge=1, le=4096)] = 32,
        expand: Expand = 8,
        gpus: Gpus = "one",
        float16: bool = False,
    ) -> None:
        super().__init__(lists, probes, gpus, float16)
        self.bytes, self.expand = bytes, expand

    def build(self, vectors: Floats, report: Callable[[int], object]) -> None:
        """Cluster a sample of the vectors, learn the codes on it, then sort all of them into the lists."""
        faiss = load_faiss()
        count, width = vectors.shape
        lists = self._lists_of(count)
        codes = next(size for size in range(min(self.bytes, width), 0, -1) if width % size == 0)
        bits = 8 if count >= 39 * 256 else 4
        self._index = faiss.IndexIVFPQ(faiss.IndexFlatL2(width), width, lists, codes, bits)
        self._index.cp.min_points_per_centroid = self._index.pq.cp.min_points_per_centroid = 1
        self._index.train(sample_of(vectors, max(256 * lists, 65_536)))
        self._add(vectors, report)

    def _look(self, index: Any) -> None:
        self._look_at_lists(index, index.pq.code_size)
        if index.pq.d != index.d or index.pq.M * index.pq.dsub != index.d or not index.by_residual:
            raise StoreError("its codes are not of its vectors")
        if index.pq.centroids.size() != index.pq.ksub * index.d or index.pq.nbits not in (4, 8):
            raise StoreError("its codes are not ones that this back end writes")

    def _fits_gpu(self, index: Any) -> bool:
        return index.pq.nbits == 8 and index.pq.M in _GPU_PARTS and index.pq.dsub in _GPU_WIDTHS


class Rabitq(ListsBackend):
    """Approximate search in inverted lists of a bit or a few a number (RaBitQ; Gao and Long, SIGMOD 2024), rotated at random first.

    Codes are not learned, so building costs little more than the lists. A vector of P numbers takes P × bits / 8 bytes and 8 more, 20 more where bits is above 1 (Gao et al., SIGMOD
    2025); FAISS computes them.

    Args:
        lists: number of clusters; 0 takes four times the square root of the number of vectors, at least 39 a cluster; 1 makes a plain table of codes.
        probes: how many lists a search looks at; 0 takes a sixteenth of them, at least 8.
        bits: of each number; more find better and need more memory.
        expand: how many times as many candidates as are wanted an index measures again on the vectors.
    """

    on_gpu = False
    kinds = ("IndexPreTransform",)
    expand = 8

    def __init__(
        self,
        lists: Lists = 0,
        probes: Lists = 0,
        bits: Annotated[int, Field(ge=1, le=8)] = 1,
        expand: Expand = 8,
    ) -> None:
        super().__init__(lists, probes)
        self.bits, self.expand = bits, expand

    def build(self, vectors: Floats, report: Callable[[int], object]) -> None:
        """Cluster a sample of the vectors, rotated, then code all of them in their lists."""
        count, width = vectors.shape
        lists = self._lists_of(count)
        self._hold(load_faiss().index_factory(width, f"RR{width},IVF{lists},RaBitQ{self.bits}"))
        self._index.cp.min_points_per_centroid = 1
        self._whole.train(sample_of(vectors, 256 * lists))
        self._add(vectors, report)

    def search(self, queries: Floats, k: int) -> tuple[Floats, Rows]:
        """Search; see `IndexBackend`."""
        return super().search(self._rotation.apply(queries), k)

    def search_selected(self, queries: Floats, k: int, keep: NDArray[np.bool_]) -> tuple[Floats, Rows]:
        """Search among some of the vectors; see `IndexBackend`."""
        return super().search_selected(self._rotation.apply(queries), k, keep)

    def _hold(self, whole: Any) -> None:
        """Keep the rotation and the lists, which are searched each by itself: FAISS's own chain of both takes no selection."""
        faiss = load_faiss()
        self._whole = whole
        self._rotation = faiss.downcast_VectorTransform(whole.chain.at(0))
        self._index = faiss.downcast_index(whole.index)

    def _add_piece(self, piece: Floats) -> None:
        self._whole.add(piece)

    def _written(self) -> Any:
        return self._whole

    def _take(self, index: Any) -> None:
        self._look(index)
        self._hold(index)

    def _look(self, index: Any) -> None:
        faiss = load_faiss()
        if index.chain.size() != 1:
            raise StoreError("it is not one rotation and its lists")
        turn, lists = faiss.downcast_VectorTransform(index.chain.at(0)), faiss.downcast_index(index.index)
        if (type(turn).__name__, type(lists).__name__) != ("RandomRotationMatrix", "IndexIVFRaBitQ"):
            raise StoreError(
                f"it is a {type(turn).__name__} and a {type(lists).__name__}, which this back end does not write"
            )
        width = index.d
        if (turn.d_in, turn.d_out, turn.A.size(), turn.have_bias) != (width, width, width * width, False):
            raise StoreError("its rotation is not of its vectors")
        coder = lists.rabitq
        if (lists.d, coder.d, lists.metric_type, coder.metric_type) != (width, width, *[faiss.METRIC_L2] * 2):
            raise StoreError("its codes are not of its vectors")
        if not 1 <= coder.nb_bits <= 8 or not lists.by_residual or lists.ntotal != index.ntotal:
            raise StoreError("its codes are not ones that this back end writes")
        size = coder.compute_code_size(width, coder.nb_bits)
        if (coder.code_size, lists.code_size) != (size, size):
            raise StoreError("its codes are not ones that this back end writes")
        self._look_at_lists(lists, size)

    def _parameters(self, k: int) -> Any:
        parameters = load_faiss().IVFRaBitQSearchParameters()
        parameters.nprobe, parameters.qb = self._probed(), _QUERY_BITS
        return parameters


class Sq8(FaissBackend):
    """Search in a table of vectors of one byte a number: a quarter of the memory, and nearly exact.

    Args:
        expand: how many times as many candidates as are wanted an index measures again on the vectors.
    """

    on_gpu = False
    kinds = ("IndexScalarQuantizer",)
    expand = 2

    def __init__(self, expand: Expand = 2) -> None:
        super().__init__()
        self.expand = expand

    def build(self, vectors: Floats, report: Callable[[int], object]) -> None:
        """Learn each number's range on a sample, then round all of them."""
        faiss = load_faiss()
        self._index = faiss.IndexScalarQuantizer(vectors.shape[1], faiss.ScalarQuantizer.QT_8bit)
        self._index.train(sample_of(vectors, 65_536))
        self._add(vectors, report)

    def _look(self, index: Any) -> None:
        faiss = load_faiss()
        quantizer = index.sq
        if quantizer.qtype != faiss.ScalarQuantizer.QT_8bit or quantizer.d != index.d:
            raise StoreError("its table is not one that this back end writes")
        if quantizer.trained.size() != 2 * index.d or index.codes.size() != index.ntotal * index.d:
            raise StoreError("its table does not hold its vectors")
