"""The built-in back ends: FAISS on the CPU, or on the first GPU that faiss-gpu finds.

A back end that compresses vectors only proposes candidates. The store computes their distances
again from the uncompressed vectors.
"""

from __future__ import annotations

import hashlib
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import Field, NonNegativeInt

from retrieval.base.arrays import Bools, Floats32, Ints
from retrieval.base.memory_map import FileMap
from retrieval.base.runtime import load_faiss
from retrieval.errors import StoreError
from retrieval.store.index_backend import IndexBackend

# From this many queries on, FAISS computes distances by a matrix product (BLAS). For fewer queries,
# that is slower. FAISS's threshold is the number of queries times their width.
_BLAS_QUERIES = 8
Expand = Annotated[int, Field(ge=1, le=1000)]
_GPU_PARTS = {1, 2, 3, 4, 8, 12, 16, 20, 24, 28, 32, 40, 48, 56, 64}
"""Numbers of parts per code that FAISS's GPU kernels support (`GpuIndexIVFPQ.cu`)."""
_GPU_WIDTHS = {1, 2, 3, 4, 6, 8, 10, 12, 16, 20, 24, 28, 32}
"""Widths of a part that FAISS's GPU kernels support."""
_ENTRY_POINTS = 32
"""Number of random vectors from which a CPU starts to search a graph without upper levels."""
_MAX_EF = 65536
_ADDED_AT_ONCE = 8192
_loading_lock = threading.Lock()
_gpu_lock = threading.Lock()
"""Lets one thread at a time use the GPU."""
_MAX_ON_GPU = 2048
"""Most candidates that a GPU can select; searches for more run on the CPU."""
_OUT_OF_MEMORY = re.compile("out.of.memory|alloc fail|cudaMalloc|memory allocation error|bad_alloc")


def gpus_found() -> int:
    """Return the number of GPUs that FAISS can use; 0 if it was built without GPU support."""
    faiss = load_faiss()
    if hasattr(faiss, "StandardGpuResources"):
        return int(faiss.get_num_gpus())
    return 0


@cache
def _gpu_memory() -> Any:
    """Return FAISS's GPU resources, which all indexes share."""
    return load_faiss().StandardGpuResources()


@contextmanager
def on_the_gpu(count: int, width: int) -> Iterator[None]:
    """Context manager in which no other thread uses the GPU.

    Error messages say that the index has `count` vectors of `width` numbers.

    Raises:
        StoreError: the GPU has too little memory, or FAISS fails.
    """
    try:
        with _gpu_lock:
            yield
    except (RuntimeError, MemoryError) as fault:
        # cuVS raises MemoryError.
        text = str(fault)
        if isinstance(fault, MemoryError) or _OUT_OF_MEMORY.search(text):
            raise StoreError(
                f"The GPU has too little memory for {count:,} vectors of {width} numbers. To search"
                " on the CPU, set the environment variable CUDA_VISIBLE_DEVICES to nothing."
            ) from fault
        # Drop the names of FAISS's source files.
        reason = text.strip().splitlines()[-1].strip().rpartition("Error: ")[2][:300]
        raise StoreError(f"FAISS cannot use the GPU: {reason.rstrip('.')}.") from fault


class FaissBackend(IndexBackend):
    """Base class of the FAISS back ends: reads and writes files, and searches on CPU or GPU."""

    on_gpu = True
    """Whether a GPU can search this kind of index."""
    most_on_gpu = _MAX_ON_GPU
    room = 1 << 20
    """Most bytes that FAISS may allocate for one array, unless the file is larger."""
    kinds: tuple[str, ...] = ()
    """Names of the FAISS classes that `save` writes."""
    flags = 0
    """Flags with which FAISS writes the index."""

    def __init__(self) -> None:
        self._index: Any = None
        self._gpu_index: Any = None
        self._mapped: FileMap | None = None

    def build(self, vectors: Floats32, report: Callable[[int], object]) -> None:
        """Train on a sample that FAISS draws, then add all vectors; see `IndexBackend`."""
        self._build(vectors, np.arange(len(vectors)), report)

    def _build(self, vectors: Floats32, rows: Ints, report: Callable[[int], object]) -> None:
        """Build over some rows of the vectors."""
        faiss = load_faiss()
        faiss.cvar.distance_compute_blas_threshold = _BLAS_QUERIES * vectors.shape[1]
        self._index = self._empty(*vectors.shape)
        if (lists := faiss.try_extract_index_ivf(self._index)) is not None:
            # Silences a warning on standard output.
            lists.cp.min_points_per_centroid = 1
            lists.train(vectors)
        # Add the vectors in pieces, so that progress is shown and Ctrl-C works in between.
        for start in range(0, len(rows), _ADDED_AT_ONCE):
            piece = vectors[rows[start : start + _ADDED_AT_ONCE]]
            self._index.add(piece)
            report(len(piece))

    def _empty(self, count: int, width: int) -> Any:
        """Return an empty FAISS index for `count` vectors of `width` numbers."""
        raise NotImplementedError

    def search(self, queries: Floats32, k: int) -> tuple[Floats32, Ints]:
        """Search on the GPU if possible, else on the CPU; see `IndexBackend`."""
        if self._gpu_index is not None and k <= self.most_on_gpu:
            with on_the_gpu(self._index.ntotal, self._index.d):
                squared, rows = self._searched_on_gpu(queries, k)
            return np.sqrt(np.maximum(squared, 0)), rows
        return self._searched(queries, k)

    def search_selected(self, queries: Floats32, k: int, keep: Bools) -> tuple[Floats32, Ints]:
        """Search the vectors that `keep` selects, always on the CPU; see `IndexBackend`."""
        return self._searched(queries, k, keep)

    def _searched(
        self, queries: Floats32, k: int, keep: Bools | None = None
    ) -> tuple[Floats32, Ints]:
        """Search on the CPU; with `keep` (N,), search only the vectors that it selects."""
        parameters = self._parameters(k)
        if keep is not None:
            faiss = load_faiss()
            bits = np.packbits(keep, bitorder="little")
            parameters = parameters or faiss.SearchParameters()
            parameters.sel = faiss.IDSelectorBitmap(len(keep), faiss.swig_ptr(bits))
        # Training libraries import faiss.contrib.torch_utils, whose `search` lacks `params`.
        search = getattr(self._index, "search_numpy", self._index.search)
        squared, rows = search(queries, k, params=parameters)
        return np.sqrt(np.maximum(squared, 0)), rows

    def _searched_on_gpu(self, queries: Floats32, k: int) -> tuple[Floats32, Ints]:
        hits: tuple[Floats32, Ints] = self._gpu_index.search(queries, k)
        return hits

    def _parameters(self, k: int) -> Any:
        return None

    def save(self, path: Path) -> None:
        """Write the index with Python's file, because FAISS's may miss that the disk is full."""
        faiss = load_faiss()
        failure: list[OSError] = []
        with path.open("xb") as file:

            def write(chunk: bytes) -> int:
                try:
                    return file.write(chunk)
                except OSError as fault:
                    failure.append(fault)
                    raise

            try:
                faiss.write_index(self._index, faiss.PyCallbackIOWriter(write, 1 << 20), self.flags)
            except Exception:
                # FAISS would hide the OSError behind its own error.
                if failure:
                    raise failure[0] from None
                raise

    def load(self, path: Path, vectors: Floats32) -> None:
        """Read the index and copy it to a GPU if possible; see `IndexBackend`."""
        faiss = load_faiss()
        index = self._read(path)
        if (index.ntotal, index.d) != vectors.shape:
            count, width = vectors.shape
            raise StoreError(
                f"It holds {index.ntotal:,} vectors of {index.d} numbers instead of {count:,} of"
                f" {width}."
            )
        self._prepare(index, vectors)
        faiss.cvar.distance_compute_blas_threshold = _BLAS_QUERIES * index.d
        self._index = index
        if self.on_gpu and gpus_found() > 0 and self._fits_gpu(index):
            self._gpu_index = self.placed()

    def _read(self, path: Path) -> Any:
        """Return the FAISS index in a file that is not trusted.

        The file could name other files that hold its lists. The flag makes FAISS look for them
        beside the file that it reads. FAISS gets bytes instead of a file's name, so it finds none.
        """
        faiss = load_faiss()
        with _loading_lock, path.open("rb") as file:
            # Without a limit, a damaged length could make FAISS allocate terabytes.
            faiss.set_deserialization_vector_byte_limit(max(path.stat().st_size, self.room))
            try:
                # FAISS uses the links in place, without a copy, so the map must stay referenced.
                # A copy of a graph of a million vectors would take a quarter of a second.
                self._mapped = FileMap(file)
                pointer = faiss.swig_ptr(np.frombuffer(self._mapped, np.uint8))
                reader = faiss.ZeroCopyIOReader(pointer, len(self._mapped))
                index = faiss.read_index(reader, faiss.IO_FLAG_ONDISK_SAME_DIR)
            except Exception as fault:
                # Quote the last line of FAISS's message; the others name its source files.
                reason = str(fault).strip().rpartition("\n")[2].strip() or type(fault).__name__
                raise StoreError(
                    f"FAISS {faiss.__version__} cannot read its file: {reason.rstrip('.')}."
                ) from fault
        if type(index).__name__ not in self.kinds or index.metric_type != faiss.METRIC_L2:
            raise StoreError(f"It is a {type(index).__name__}, which this back end does not write.")
        return index

    def intact(self) -> bool:
        """Return whether the file has kept its content since `load` mapped it."""
        return self._mapped is None or self._mapped.intact()

    def _prepare(self, index: Any, vectors: Floats32) -> None:
        """Raise a `StoreError` for an index that `build` cannot have made; attach its vectors."""

    def _fits_gpu(self, index: Any) -> bool:
        """Return whether FAISS can search this index on a GPU."""
        return True

    def placed(self) -> Any:
        """Return a copy of the index on the GPU."""
        with on_the_gpu(self._index.ntotal, self._index.d):
            return load_faiss().index_cpu_to_gpu(_gpu_memory(), 0, self._index)


class Flat(FaissBackend):
    """Exact search: compares a query with every vector. "auto" uses it for small indexes."""

    kinds = ("IndexFlatL2", "IndexFlat")

    def _empty(self, count: int, width: int) -> Any:
        return load_faiss().IndexFlatL2(width)


def originals_of(vectors: Floats32) -> Ints:
    """Return the first row that equals each row of vectors (N, P), often the row itself."""
    # Adding zero turns −0 into 0, since both are the same vector.
    hashes = (hashlib.blake2b(row + 0.0, digest_size=16).digest() for row in vectors)
    table = np.fromiter(hashes, "S16", len(vectors))
    _, first, group = np.unique(table, return_index=True, return_inverse=True)
    originals: Ints = first[group]
    return originals


class Hnsw(FaissBackend):
    """Approximate search in a graph (Malkov and Yashunin 2018): fast, but needs much memory.

    Equal vectors would be one another's only neighbours and hide all others. So only the first of
    them, the original, is part of the graph. No link leads to its copies; all links of a copy lead
    to its original.

    Args:
        m: links per vector. More give higher recall and need more memory (8 × m bytes a vector).
        ef_construction: candidates considered for each vector's links during construction.
        ef_search: candidates that a search follows. More give higher recall and take longer.
    """

    on_gpu = False
    kinds = ("IndexHNSWFlat",)
    flags = 1  # IO_FLAG_SKIP_STORAGE: only the links

    def __init__(
        self,
        m: Annotated[int, Field(ge=4, le=256)] = 32,
        ef_construction: Annotated[int, Field(ge=8, le=4096)] = 128,
        ef_search: Annotated[int, Field(ge=1, le=_MAX_EF)] = 64,
    ) -> None:
        super().__init__()
        self.m = m
        self.ef_construction = ef_construction
        self.ef_search = ef_search
        self._copies = self._originals = np.empty(0, np.int64)
        self._copies_of: dict[int, list[int]] = {}

    def build(self, vectors: Floats32, report: Callable[[int], object]) -> None:
        """Build the graph over all different vectors; see `IndexBackend`."""
        originals = originals_of(vectors)
        rows = np.flatnonzero(originals == np.arange(len(vectors)))
        self._build(vectors, rows, report)
        if len(rows) < len(vectors):
            self._add_copies(rows, originals)
            report(len(vectors) - len(rows))

    def _add_copies(self, rows: Ints, originals: Ints) -> None:
        """Insert the copies of a graph's vectors; see the class.

        Args:
            rows: (n,), row of each vector of the graph, ascending.
            originals: (N,), see `originals_of`.
        """
        faiss = load_faiss()
        hnsw = self._index.hnsw
        count = len(originals)
        levels = np.ones(count, np.int32)
        levels[rows] = faiss.vector_to_array(hnsw.levels)
        sizes = faiss.vector_to_array(hnsw.cum_nneighbor_per_level)[levels]
        offsets = np.append(0, sizes.cumsum()).astype(np.uint64)
        links = np.repeat(originals.astype(np.int32), sizes)
        earlier = faiss.vector_to_array(hnsw.neighbors)
        is_original = np.repeat(originals == np.arange(count), sizes)
        links[is_original] = np.where(earlier < 0, -1, rows[earlier])
        faiss.copy_array_to_vector(levels, hnsw.levels)
        faiss.copy_array_to_vector(offsets, hnsw.offsets)
        faiss.copy_array_to_vector(links, hnsw.neighbors)
        hnsw.entry_point = int(rows[hnsw.entry_point])
        self._index.ntotal = count

    @property
    def wider(self) -> dict[str, Any]:
        """Follow four times as many candidates; see `IndexBackend`."""
        return {"ef_search": min(4 * self.ef_search, _MAX_EF)}

    def adopt(self, other: IndexBackend, rows: Ints, vectors: Floats32) -> bool:
        """Take the links of another graph, without those of rows that are left out.

        Links stay good if neighbours stay neighbours, as they do under a metric that was learned
        over the vectors.
        """
        if not isinstance(other, Hnsw) or getattr(other._index, "base_level_only", False):
            return False
        faiss = load_faiss()
        graph = other._index.hnsw
        new_rows = np.full(other._index.ntotal, -1, np.int32)
        new_rows[rows] = np.arange(len(rows))
        if (new_rows[other._originals[new_rows[other._copies] >= 0]] < 0).any():
            # The links of a copy lead only to an original, which is left out.
            return False
        levels = faiss.vector_to_array(graph.levels)[rows]
        ends = faiss.vector_to_array(graph.cum_nneighbor_per_level)
        old_offsets = faiss.vector_to_array(graph.offsets)[:-1][rows].astype(np.int64)
        offsets = np.append(0, ends[levels].cumsum(dtype=np.int64))
        old_links = faiss.rev_swig_ptr(graph.neighbors.data(), graph.neighbors.size())
        links = np.empty(offsets[-1], np.int32)
        for level in range(int(levels.max())):
            slots = np.arange(ends[level], ends[level + 1])
            nodes = np.flatnonzero(levels > level)
            for start in range(0, len(nodes), _ADDED_AT_ONCE):
                block = nodes[start : start + _ADDED_AT_ONCE]
                targets = old_links[old_offsets[block, None] + slots]
                targets = np.where(targets < 0, -1, new_rows[targets])
                # FAISS reads a list up to its first -1.
                order = np.argsort(targets < 0, axis=1, kind="stable")
                links[offsets[block, None] + slots] = np.take_along_axis(targets, order, axis=1)
        entry = int(new_rows[graph.entry_point])
        if entry < 0:
            entry = int(levels.argmax())
        self._index = self._empty(*vectors.shape)
        hnsw = self._index.hnsw
        faiss.copy_array_to_vector(levels, hnsw.levels)
        faiss.copy_array_to_vector(offsets.astype(np.uint64), hnsw.offsets)
        faiss.copy_array_to_vector(links, hnsw.neighbors)
        hnsw.entry_point = entry
        hnsw.max_level = int(levels[entry]) - 1
        self._index.ntotal = len(rows)
        return True

    def _empty(self, count: int, width: int) -> Any:
        index = getattr(load_faiss(), self.kinds[0])(width, self.m)
        index.hnsw.efConstruction = self.ef_construction
        index.hnsw.efSearch = self.ef_search
        return index

    def _prepare(self, index: Any, vectors: Floats32) -> None:
        """Attach the vectors; the file holds only the links between them."""
        if index.storage is not None:
            raise StoreError("It holds vectors of its own, which this back end does not write.")
        faiss = load_faiss()
        # FAISS reads this array without copying it, so it must stay referenced.
        self._vectors = np.ascontiguousarray(vectors, "<f4")
        content = self._vectors.view(np.uint8).reshape(-1)
        self._storage = faiss.IndexFlatL2(vectors.shape[1])
        # Without an owner, FAISS does not free the array.
        no_owner = self._storage.codes.owner
        view = faiss.MaybeOwnedVectorUInt8.create_view(
            faiss.swig_ptr(content), len(content), no_owner
        )
        self._storage.codes = view
        self._storage.ntotal = len(vectors)
        index.storage = self._storage
        index.own_fields = False
        index.hnsw.efSearch = self.ef_search
        if getattr(index, "base_level_only", False):
            # A graph that a GPU built has no copies.
            return
        links = faiss.rev_swig_ptr(index.hnsw.neighbors.data(), index.hnsw.neighbors.size())
        slots = faiss.vector_to_array(index.hnsw.offsets)[:-1].astype(np.int64)
        first = links[slots]
        slots += 1
        self._copies = np.flatnonzero((first >= 0) & (first == links[slots]))
        self._originals = first[self._copies].astype(np.int64)
        for copy, original in zip(self._copies.tolist(), self._originals.tolist(), strict=True):
            self._copies_of.setdefault(original, []).append(copy)

    def _searched(
        self, queries: Floats32, k: int, keep: Bools | None = None
    ) -> tuple[Floats32, Ints]:
        """Search the graph for originals, and insert their copies after them."""
        wider = keep
        # Also find originals of which only a copy is selected.
        if keep is not None:
            wider = keep.copy()
            wider[self._originals[keep[self._copies]]] = True
        distances, rows = super()._searched(queries, k, wider)
        if not self._copies_of:
            return distances, rows
        for query, originals in enumerate(rows.tolist()):
            if self._copies_of.keys().isdisjoint(originals):
                continue
            pairs = [
                (distance, row)
                for distance, original in zip(distances[query], originals, strict=True)
                for row in (original, *self._copies_of.get(original, ()))
                if keep is None or row < 0 or keep[row]
            ]
            pairs = (pairs + k * [(np.float32(np.inf), -1)])[:k]
            distances[query], rows[query] = zip(*pairs, strict=True)
        return distances, rows

    def _parameters(self, k: int) -> Any:
        if k <= self.ef_search:
            # The index's own `efSearch` is wide enough.
            return None
        return load_faiss().SearchParametersHNSW(efSearch=k)


class Cagra(Hnsw):
    """Approximate search in a graph that a GPU builds (CAGRA; Ootomo et al., ICDE 2024).

    Without a GPU, the graph is built as in `hnsw`. A CPU can search a graph that a GPU built, as
    the lowest level of an HNSW graph. Vectors are stored as float32.

    Args:
        degree: links per vector. More give higher recall and need more memory (4 × degree bytes a
            vector).
        ef_construction: candidates considered for each vector's links. A GPU builds up to twice
            `degree` links, at most `ef_construction`, and prunes them; a CPU works as in `hnsw`.
        ef_search: candidates that a search follows. More give higher recall and take longer.
    """

    on_gpu = True
    most_on_gpu = 512
    kinds = ("IndexHNSWCagra",)

    def __init__(
        self,
        degree: Annotated[int, Field(ge=8, le=256, multiple_of=2)] = 64,
        ef_construction: Annotated[int, Field(ge=8, le=4096)] = 128,
        ef_search: Annotated[int, Field(ge=1, le=_MAX_EF)] = 256,
    ) -> None:
        super().__init__(degree // 2, ef_construction, ef_search)
        self.degree = degree

    def build(self, vectors: Floats32, report: Callable[[int], object]) -> None:
        """Build the graph, on a GPU if FAISS finds one; see `IndexBackend`."""
        if gpus_found() == 0 or len(vectors) <= self.degree:
            super().build(vectors, report)
            return
        faiss = load_faiss()
        index = faiss.IndexHNSWCagra()
        config = faiss.GpuIndexCagraConfig()
        links = max(self.degree, min(2 * self.degree, self.ef_construction))
        config.device = 0
        config.build_algo = faiss.graph_build_algo_NN_DESCENT
        config.graph_degree = self.degree
        config.intermediate_graph_degree = links
        try:
            with on_the_gpu(*vectors.shape):
                width = vectors.shape[1]
                graph = faiss.GpuIndexCagra(_gpu_memory(), width, faiss.METRIC_L2, config)
                graph.train(np.ascontiguousarray(vectors))
                index.base_level_only = True
                index.num_base_level_search_entrypoints = _ENTRY_POINTS
                index.hnsw.efSearch = self.ef_search
                graph.copyTo(index)
        except StoreError as fault:
            raise StoreError(f"The index back end cagra cannot build its graph: {fault}") from fault
        self._index = index
        report(len(vectors))

    def _fits_gpu(self, index: Any) -> bool:
        """Return whether a GPU built the graph; CAGRA refuses the gaps in a CPU's links."""
        return bool(index.base_level_only)

    def _searched_on_gpu(self, queries: Floats32, k: int) -> tuple[Floats32, Ints]:
        parameters = load_faiss().SearchParametersCagra()
        width = max(k, min(self.ef_search, self.most_on_gpu))
        # CAGRA takes only multiples of 32.
        parameters.itopk_size = -(-width // 32) * 32
        hits: tuple[Floats32, Ints] = self._gpu_index.search(queries, k, params=parameters)
        return hits


class ListsBackend(FaissBackend):
    """Base class of back ends with inverted lists: number of lists, and lists per search."""

    def __init__(self, lists: NonNegativeInt = 0, probes: NonNegativeInt = 0) -> None:
        super().__init__()
        self.lists = lists
        self.probes = probes

    def _lists_of(self, count: int) -> int:
        """Return the number of lists for `count` vectors.

        FAISS advises about 4 √N lists, and warns of fewer than 39 training vectors per list.
        """
        return min(self.lists or max(1, min(int(4 * count**0.5), count // 39)), count)

    def _probed(self) -> int:
        lists = load_faiss().extract_index_ivf(self._index).nlist
        return int(min(lists, self.probes or max(8, lists // 16)))

    def _parameters(self, k: int) -> Any:
        return load_faiss().SearchParametersIVF(nprobe=self._probed())

    def placed(self) -> Any:
        """Return a copy of the index on the GPU, which can read at most 2,048 lists per search."""
        index = super().placed()
        index.nprobe = min(self._probed(), _MAX_ON_GPU)
        return index


class Ivf(ListsBackend):
    """Approximate search that reads only the inverted lists (clusters) nearest to the query.

    Args:
        lists: number of lists. 0 stands for four times the square root of the number of vectors,
            but at least 39 vectors per list.
        probes: number of lists that a search reads. 0 stands for a sixteenth of the lists, but at
            least 8.
    """

    kinds = ("IndexIVFFlat",)

    def _empty(self, count: int, width: int) -> Any:
        return load_faiss().index_factory(width, f"IVF{self._lists_of(count)},Flat")

    def _prepare(self, index: Any, vectors: Floats32) -> None:
        check_lists(index, 4 * index.d)


class IvfPq(ListsBackend):
    """Approximate search in inverted lists of product codes (Jégou, Douze and Schmid 2011).

    A code is a compressed vector. It has several parts of 8 bits, or of 4 bits if there are fewer
    than 9,984 vectors. A GPU can search 8-bit codes of at most 64 parts.

    Args:
        lists: number of lists (clusters). 0 stands for four times the square root of the number of
            vectors, but at least 39 vectors per list. 1 stores all codes in one table.
        probes: number of lists that a search reads. 0 stands for a sixteenth of the lists, but at
            least 8.
        bytes: number of parts of a code, lowered to the next divisor of the vector's width. With
            8-bit parts, this is the size of the code in bytes.
        expand: number of candidates per hit whose distances are computed again from the
            uncompressed vectors.
    """

    kinds = ("IndexIVFPQ",)
    # This is FAISS's own limit for its precomputed tables.
    room = 1 << 31
    expand = 8

    def __init__(
        self,
        lists: NonNegativeInt = 0,
        probes: NonNegativeInt = 0,
        bytes: Annotated[int, Field(ge=1, le=4096)] = 32,
        expand: Expand = 8,
    ) -> None:
        super().__init__(lists, probes)
        self.bytes = bytes
        self.expand = expand

    def _empty(self, count: int, width: int) -> Any:
        parts = next(size for size in range(min(self.bytes, width), 0, -1) if width % size == 0)
        if count >= 39 * 256:
            bits = 8
        else:
            bits = 4
        # "np" skips polysemous training, which is slow and of no use to these searches.
        index = load_faiss().index_factory(width, f"IVF{self._lists_of(count)},PQ{parts}x{bits}np")
        index.pq.cp.min_points_per_centroid = 1
        return index

    def _prepare(self, index: Any, vectors: Floats32) -> None:
        check_lists(index, index.pq.code_size)
        if index.pq.d != index.d or index.pq.M * index.pq.dsub != index.d or not index.by_residual:
            raise StoreError("Its codes do not fit the width of its vectors.")
        if index.pq.centroids.size() != index.pq.ksub * index.d or index.pq.nbits not in (4, 8):
            raise StoreError("Its codes are of a kind that this back end does not write.")

    def _fits_gpu(self, index: Any) -> bool:
        return index.pq.nbits == 8 and index.pq.M in _GPU_PARTS and index.pq.dsub in _GPU_WIDTHS


def check_lists(index: Any, code_size: int) -> None:
    """Raise a `StoreError` if the lists do not fit the index or have codes of another size."""
    faiss = load_faiss()
    quantizer = faiss.downcast_index(index.quantizer)
    lists = faiss.downcast_InvertedLists(index.invlists)
    expected = (index.nlist, index.d, faiss.METRIC_L2)
    fits = (quantizer.ntotal, quantizer.d, quantizer.metric_type) == expected
    if type(quantizer).__name__ not in Flat.kinds or not fits:
        raise StoreError(f"It contains a {type(quantizer).__name__} that does not fit it.")
    if type(lists).__name__ != "ArrayInvertedLists" or lists.code_size != code_size:
        raise StoreError("Its lists are of a kind that this back end does not write.")
    if lists.nlist != index.nlist or lists.compute_ntotal() != index.ntotal:
        raise StoreError("Its lists do not hold its vectors.")
