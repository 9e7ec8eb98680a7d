"""GPU back ends without a GPU: CAGRA's file on a CPU, limits of a GPU, and its errors."""

import numpy as np
import pytest
from retrieval.base.runtime import load_faiss
from retrieval.errors import StoreError
from retrieval.store.faiss_backends import (
    Cagra,
    FaissBackend,
    Flat,
    IvfPq,
    gpus_found,
    on_the_gpu,
)

VECTORS = np.random.default_rng(0).normal(size=(1500, 16)).astype(np.float32)


def silent(count: int) -> None:
    pass


def built(backend: FaissBackend) -> FaissBackend:
    backend.build(VECTORS, silent)
    return backend


def test_cagra_is_searched_on_a_cpu_from_the_same_file_whoever_built_it(tmp_path):
    """A graph that a GPU builds has no upper levels."""
    faiss = load_faiss()
    _, exact = built(Flat()).search(VECTORS[:100], 10)
    for by_gpu in (False, True):
        created = built(Cagra(degree=32))
        if by_gpu:
            created._index.base_level_only = True
            created._index.num_base_level_search_entrypoints = 32
        path = tmp_path / f"{by_gpu}"
        created.save(path)
        again = Cagra(degree=32)
        again.load(path, VECTORS)
        assert again._gpu_index is None or gpus_found()
        assert again._index.base_level_only == by_gpu and again._fits_gpu(again._index) == by_gpu
        _, rows = again.search(VECTORS[:100], 10)
        assert np.mean([len(set(a) & set(b)) for a, b in zip(rows, exact, strict=True)]) > 9.5
        keep = np.zeros(len(VECTORS), bool)
        keep[::3] = True
        _, rows = again.search_selected(VECTORS[:5], 4, keep)
        assert keep[rows[rows >= 0]].all() and (rows[:, 0] >= 0).all()
    assert faiss.downcast_index(again._index.storage).ntotal == len(VECTORS)


def test_which_codes_a_gpu_takes():
    four_bits = built(IvfPq(bytes=8))._index  # too few vectors for 8 bits
    assert not IvfPq()._fits_gpu(four_bits)
    faiss = load_faiss()
    for parts, fits in ((8, True), (16, True), (6, False)):
        index = faiss.IndexIVFPQ(faiss.IndexFlatL2(96), 96, 4, parts, 8)
        assert IvfPq()._fits_gpu(index) == fits


ALLOCATION = (
    "Error in allocMemory(const AllocRequest&) at /project/x.cpp:518: CUDA memory allocation"
)
INVALID = "'config_.device < getNumDevices()' failed: Invalid GPU device 0"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (f"{ALLOCATION} error", "too little memory for 1,500 vectors of 16 numbers"),
        ("alloc fail (cudaMalloc error out of memory [2])", "too little memory for 1,500 vectors"),
        (f"Error in GpuIndex at /project/x.cu:65: Error: {INVALID}", f"use the GPU: {INVALID}"),
    ],
)
def test_what_a_gpu_refuses_is_a_sentence(text, words):
    with pytest.raises(StoreError) as refused, on_the_gpu(1500, 16):
        raise RuntimeError(text)
    text = str(refused.value)
    assert words in text and "project" not in text and ".cpp" not in text


def test_a_search_for_more_than_a_gpu_selects_is_the_cpus():
    flat = built(Flat())

    class Gpu:
        def search(self, queries, k):
            assert k <= 5
            return np.zeros((len(queries), k), np.float32), np.zeros((len(queries), k), np.int64)

    flat._gpu_index = Gpu()
    flat.most_on_gpu = 5
    assert (flat.search(VECTORS[:1], 5)[1] == 0).all()
    assert sorted(flat.search(VECTORS[:1], 6)[1][0])[-1] > 0
    assert flat.selective
