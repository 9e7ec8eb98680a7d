"""CAGRA: a graph that a GPU builds and searches, and a CPU searches as HNSW does, from the same file."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Annotated, Any

import numpy as np
from pydantic import Field

from retrieval.errors import StoreError
from retrieval.serving.index.contract import Floats, Rows
from retrieval.serving.index.faiss_backends import Hnsw
from retrieval.serving.index.on_gpu import REFUSALS, Gpus, OnGpu, device, gpus_found, refused
from retrieval.serving.runtime import load_faiss

_ENTRIES = 32
"""Vectors at random at which a CPU begins in a graph without upper levels, as FAISS does by default."""


class Cagra(Hnsw):
    """Approximate search in a graph that a GPU builds (CAGRA; Ootomo et al., ICDE 2024). Without one it is built as HNSW is.

    What a GPU has built a CPU searches too, from the same file: its one level as HNSW's lowest. FAISS keeps its vectors in 32 bits.

    Args:
        degree: links of a vector; more find better and need more memory (4 × degree bytes a vector).
        ef_construction: candidates for each vector's links: on a GPU its twice as many links that are thinned out, at most so many; on a CPU as in `hnsw`.
        ef_search: how many candidates a search follows; more find better and take longer.
        gpus: where FAISS finds several GPUs: `one` of them, or `replicas` (all on each, more searches at once).
    """

    on_gpu = True
    most_on_gpu = 512
    kinds = ("IndexHNSWCagra",)

    def __init__(
        self,
        degree: Annotated[int, Field(ge=8, le=256, multiple_of=2)] = 64,
        ef_construction: Annotated[int, Field(ge=8, le=4096)] = 128,
        ef_search: Annotated[int, Field(ge=1, le=65536)] = 256,
        gpus: Gpus = "one",
    ) -> None:
        super().__init__(degree // 2, ef_construction, ef_search)
        if gpus == "shards":
            raise StoreError("cagra has one graph over all vectors: gpus is one or replicas, not shards.")
        self.degree, self.gpus = degree, gpus

    def build(self, vectors: Floats, report: Callable[[int], object]) -> None:
        """Build the graph, on a GPU where FAISS finds one."""
        if gpus_found() == 0 or len(vectors) <= self.degree:
            index = load_faiss().IndexHNSWCagra(vectors.shape[1], self.m)
            index.hnsw.efConstruction = self.ef_construction
            self._index = index
            self._add(vectors, report)
            return
        self._index = self._built(vectors)
        report(len(vectors))

    def _built(self, vectors: Floats) -> Any:
        """Return the graph that a GPU builds, as a CPU has it."""
        faiss, gpu = load_faiss(), device(0)
        config = self.config()
        index = faiss.IndexHNSWCagra()
        with gpu.lock:
            try:
                graph = faiss.GpuIndexCagra(gpu.resources, vectors.shape[1], faiss.METRIC_L2, config)
                graph.train(np.ascontiguousarray(vectors))
                index.base_level_only, index.num_base_level_search_entrypoints = True, _ENTRIES
                graph.copyTo(index)
            except REFUSALS as fault:
                raise StoreError(
                    f"The index back end cagra cannot build it: {refused(_Wanted(*vectors.shape), fault)}."
                ) from fault
        return index

    def config(self) -> Any:
        """Return FAISS's description of the graph that a GPU builds."""
        faiss = load_faiss()
        config = faiss.GpuIndexCagraConfig()
        config.device = 0
        config.graph_degree = self.degree
        config.intermediate_graph_degree = max(self.degree, min(2 * self.degree, self.ef_construction))
        config.build_algo = faiss.graph_build_algo_NN_DESCENT
        return config

    def _fits_gpu(self, index: Any) -> bool:
        """One that a CPU has built has gaps among its links, which CAGRA's kernels do not expect."""
        return bool(index.base_level_only)

    def _placed(self, index: Any) -> OnGpu:
        width = min(self.ef_search, self.most_on_gpu)
        search = None if self.gpus == "replicas" else partial(followed, width)
        return OnGpu(index, self.gpus, False, {}, search)


def followed(width: int, index: Any, queries: Floats, k: int) -> tuple[Floats, Rows]:
    """Search CAGRA's graph on a GPU with some candidates, which are counted by 32."""
    parameters = load_faiss().SearchParametersCagra()
    parameters.itopk_size = -(-max(width, k) // 32) * 32
    found: tuple[Floats, Rows] = index.search(queries, k, params=parameters)
    return found


class _Wanted:
    """What is said of an index that is not there yet: so many vectors of so many numbers."""

    def __init__(self, ntotal: int, d: int) -> None:
        self.ntotal, self.d = ntotal, d
