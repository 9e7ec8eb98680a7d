"""On which device a graph runs: what is tried, what stands in for it, who says so; values that stay
where they are computed.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pytest
from retrieval.errors import BundleError
from retrieval.serving import providers, sessions
from retrieval.serving.bundle import Bundle
from retrieval.serving.http.readiness import Readiness
from retrieval.serving.http.served import Served
from retrieval.serving.http.server import serve
from retrieval.serving.http.settings import Settings
from retrieval.serving.http.turns import Workers
from retrieval.serving.index.index import open_index
from retrieval.serving.providers import ROWS, checked_device
from retrieval.serving.runtime import load_libraries, load_onnxruntime
from retrieval.serving.sessions import Graph

GPU = ["TensorrtExecutionProvider", "CUDAExecutionProvider", "CPUExecutionProvider"]


class WithoutDriver:
    """This ONNX Runtime as `onnxruntime-gpu` 1.31 is on a machine without a driver: it offers CUDA,
    and its sessions come up on the CPU.

    With TensorRT's libraries missing it raises; `tests/gpu` has the real thing.
    """

    def __init__(self) -> None:
        self._real = load_onnxruntime()
        self.asked: list[list[tuple[str, dict[str, str]]]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    @staticmethod
    def get_available_providers() -> list[str]:
        return list(GPU)

    def preload_dlls(self) -> None:
        print("Failed to load libcudnn.so.9")

    def InferenceSession(
        self, content: bytes, options: Any, providers: Any, enable_fallback: int
    ) -> Any:
        assert enable_fallback == 0  # its own way prints on standard output
        self.asked.append(providers)
        if providers[0][0] == GPU[0]:
            raise RuntimeError("Please install TensorRT libraries")
        return self._real.InferenceSession(content, options, providers=[GPU[-1]])


@pytest.fixture
def without_driver(monkeypatch: Any) -> WithoutDriver:
    runtime = WithoutDriver()
    monkeypatch.setattr(sessions, "load_onnxruntime", lambda: runtime)
    load_libraries.cache_clear()
    return runtime


def test_auto_falls_back_and_says_so_and_a_named_device_is_refused(
    without_driver: WithoutDriver, bundle_path: Path, makers: Any, capfd: Any
) -> None:
    bundle = Bundle.open(bundle_path)
    assert bundle.device == "cpu" and "runs on the CPU. `retrieval doctor` says" in str(
        bundle.fallback
    )
    names = [[name for name, _ in each] for each in without_driver.asked]
    assert names == [GPU[1:]] * len(names)
    assert bundle.encode(makers.digits()[0][:3, None]).vector.shape[0] == 3
    assert Bundle.open(bundle_path, device="cpu").fallback is None
    with pytest.raises(BundleError, match=r"could not start on the CUDA device.*retrieval doctor"):
        Bundle.open(bundle_path, device="cuda")
    with pytest.raises(BundleError, match="could not start on the device with TensorRT"):
        Bundle.open(bundle_path, device="tensorrt")
    assert capfd.readouterr().out == ""


def test_a_graph_that_no_device_can_load_is_the_graphs_fault(
    without_driver: WithoutDriver, split_path: Path, monkeypatch: Any
) -> None:
    def refused(*_: Any, **__: Any) -> Any:
        raise RuntimeError("[ONNXRuntimeError] : 10 : INVALID_GRAPH")

    monkeypatch.setattr(without_driver, "InferenceSession", refused, raising=False)
    with pytest.raises(BundleError, match=r"cannot load .*\.onnx: .*INVALID_GRAPH"):
        Bundle.open(split_path)


@pytest.fixture
def split_path(makers: Any, tmp_path: Path) -> Path:
    path: Path = makers.cut_in_two(makers.make_bundle(tmp_path / "b"))
    return path


def test_what_is_tried_for_which_device() -> None:
    gpu = SimpleNamespace(get_available_providers=lambda: GPU)
    cpu = SimpleNamespace(get_available_providers=lambda: GPU[2:])
    plain = SimpleNamespace(get_available_providers=lambda: GPU[1:])
    assert checked_device(gpu, "auto") == checked_device(gpu, "cuda") == ["cuda", "cpu"]
    assert checked_device(gpu, "tensorrt") == ["tensorrt", "cuda", "cpu"]
    assert checked_device(cpu, "auto") == checked_device(gpu, "cpu") == ["cpu"]
    with pytest.raises(BundleError, match="has no TensorRT"):
        checked_device(plain, "tensorrt")
    with pytest.raises(BundleError, match="it is 'auto', 'cpu', 'cuda' or 'tensorrt'"):
        checked_device(gpu, "tpu")  # type: ignore[arg-type]


def test_options_that_batches_of_any_size_need(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("RETRIEVAL_CACHE", str(tmp_path))
    cuda = providers._options("cuda", {"input": (3, 8, 8)})
    assert cuda["cudnn_conv_algo_search"] == "HEURISTIC"
    tensorrt = providers._options("tensorrt", {"input": (3, 8, 8)})
    assert tensorrt["trt_profile_min_shapes"] == "input:1x3x8x8"
    assert tensorrt["trt_profile_max_shapes"] == f"input:{ROWS}x3x8x8"
    assert tensorrt["trt_engine_cache_path"] == str(tmp_path / "tensorrt")
    assert providers._options("cpu", {"input": (3,)}) == {}


def test_libraries_are_loaded_in_silence(without_driver: WithoutDriver, capfd: Any) -> None:
    assert load_libraries(without_driver) == "Failed to load libcudnn.so.9"
    assert capfd.readouterr().out == ""


def test_an_engine_is_given_no_more_rows_than_it_is_built_for(
    bundle_path: Path, makers: Any
) -> None:
    seen: list[int] = []
    real = Bundle.open(bundle_path, threads=1)._sessions.encoder
    assert isinstance(real, Graph)

    class Engine:
        def run(self, outputs: Any, feeds: Any, options: Any) -> Any:
            seen.append(len(feeds["input"]))
            return real.session.run(outputs, feeds, options)

    graph = Graph(bundle_path, Engine(), "tensorrt")
    given = np.resize(makers.digits()[0], (2 * ROWS + 3, 1, 8, 8))
    (found,) = graph(["vector"], {"input": given})
    assert seen == [ROWS, ROWS, 3]
    np.testing.assert_allclose(found, real(["vector"], {"input": given})[0], rtol=0, atol=1e-6)


def test_a_fault_of_a_run_is_a_sentence(split_path: Path) -> None:
    split = Bundle.open(split_path, threads=1)._sessions.split
    assert split is not None
    with pytest.raises(BundleError, match=r"ONNX Runtime cannot run .*\.onnx: "):
        split.backbone(["features"], {"input": np.zeros((1, 2), np.uint8)})


def test_the_log_says_once_that_the_cpu_stands_in(
    without_driver: WithoutDriver, index_path: Path, caplog: Any
) -> None:
    with open_index(index_path, threads=1) as index:
        workers = Workers(Settings())
        with contextlib.closing(workers):
            readiness = Readiness(Served("i", index, Settings(), workers))
            for _ in range(3):
                asyncio.run(readiness.probe())
            assert readiness.reason() is None
            assert readiness.state()["fallback"] == index.bundle.fallback
    said = [
        record.message
        for record in caplog.records
        if "so the encoder runs on the CPU" in record.message
    ]
    assert len(said) == 1


def test_readyz_says_that_the_cpu_stands_in(
    without_driver: WithoutDriver, index_path: Path
) -> None:
    for device in ("auto", "cpu"):
        with serve(index_path, port=0, wait=False, device=device) as serving:  # type: ignore[union-attr, arg-type]
            until = time.monotonic() + 60
            while (
                answer := httpx.get(f"{serving.url}readyz")
            ).status_code != 200 and time.monotonic() < until:
                time.sleep(0.05)
        found = answer.json()
        assert found["status"] == "ready"
        assert ("fallback" in found) == (device == "auto")
