"""Exact search by ONNX Runtime on CUDA: the CPU's answers to the last tie, memory that comes back, and sentences."""

from __future__ import annotations

import gc
import shutil
import threading
from typing import Any

import numpy as np
import pytest
from retrieval.errors import StoreError
from retrieval.serving.local import placing
from retrieval.serving.local.exact import nearest
from retrieval.serving.local.on_device import OnDevice
from retrieval.serving.local.placing import Placing, free_memory, placed
from retrieval.serving.runtime import load_libraries, load_onnxruntime


@pytest.fixture(scope="module", autouse=True)
def _cuda() -> None:
    runtime = load_onnxruntime()
    if "CUDAExecutionProvider" not in runtime.get_available_providers():
        pytest.skip(
            "this ONNX Runtime has no CUDAExecutionProvider: pip install 'onnxruntime-gpu[cuda,cudnn]'"
        )
    if shutil.which("nvidia-smi") is None:
        pytest.skip("no CUDA device: nvidia-smi is not there")
    load_libraries(runtime)


def agree(on: OnDevice, queries: Any, k: int, keep: Any = None) -> None:
    found, wanted = on.nearest(queries, k, keep), nearest(queries, on.vectors, k, keep=keep)
    assert np.array_equal(found[1], wanted[1]) and np.array_equal(found[0], wanted[0])


@pytest.mark.parametrize("kind", ["float16", "bfloat16"])
def test_answers_are_those_of_the_cpu(vectors: Any, kind: Any) -> None:
    on = OnDevice(vectors, "cuda", kind)
    queries = vectors[:300] + np.float32(0.05)
    for k in (1, 10, 100):
        agree(on, queries, k)
    agree(on, queries[:1], 10)
    agree(on, queries, 10, np.arange(len(vectors)) % 3 == 0)
    agree(on, vectors[:50], 5)


@pytest.mark.parametrize("what", ["equal", "zeros", "far", "of length 1"])
def test_ties_and_offsets(vectors: Any, what: str) -> None:
    given = {
        "equal": np.repeat(vectors[:20], 1000, axis=0),
        "zeros": np.zeros_like(vectors),
        "far": vectors + np.float32(1e4),
        "of length 1": vectors / np.linalg.norm(vectors, axis=1, keepdims=True),
    }[what]
    on = OnDevice(np.ascontiguousarray(given, np.float32))
    agree(on, on.vectors[::2000], 10)


def test_in_blocks(vectors: Any, monkeypatch: Any) -> None:
    from retrieval.serving.local import on_device

    monkeypatch.setattr(on_device, "_BLOCK_NUMBERS", 64 * 3000)
    on = OnDevice(vectors)
    assert len(on.blocks) == 7
    agree(on, vectors[:100], 10)


def test_threads_get_their_own_and_memory_comes_back(vectors: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(placing, "LEAST", 1)
    made, wrong = Placing(vectors), []
    while made.thread is None:
        assert made.nearest(vectors[:20], 1) is None
    made.thread.join(120)

    def ask(first: int) -> None:
        for at in range(first, first + 50):
            found = made.nearest(vectors[at : at + 1], 1)
            if found is None or found[1][0, 0] != at:
                wrong.append(at)

    threads = [threading.Thread(target=ask, args=(50 * number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not wrong
    before = free_memory()
    gc.disable()  # no collector is needed for it
    try:
        for _ in range(20):
            assert placed(vectors) is not None
    finally:
        gc.enable()
    after = free_memory()
    assert before is not None and after is not None and before - after < 20 * vectors.nbytes // 4


def test_too_little_memory_is_a_sentence(vectors: Any) -> None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("torch, which takes the memory here, sees no CUDA device")
    wide = np.resize(vectors, (1 << 20, 256))  # 0.5 GB there, and 1 GB to put it there
    free, _ = torch.cuda.mem_get_info()
    held = torch.empty(max(1, free - (64 << 20)), dtype=torch.uint8, device="cuda")
    try:
        with pytest.raises(StoreError, match="too little memory for 1,048,576 vectors of 256 numbers"):
            OnDevice(wide)
    finally:
        del held
        torch.cuda.empty_cache()
    OnDevice(vectors)
