"""The device on which a graph runs: the attempts, the fallback to the CPU, and who reports it."""

import asyncio
import contextlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from retrieval.base.runtime import load_libraries, load_onnxruntime
from retrieval.bundle import bundle as bundle_module
from retrieval.bundle.bundle import Bundle
from retrieval.errors import BundleError
from retrieval.index.index import open_index

from retrieval_server.readiness import Readiness
from retrieval_server.served_index import Served, Workers
from retrieval_server.settings import Settings

GPU = ["CUDAExecutionProvider", "CPUExecutionProvider"]


class WithoutDriver:
    """ONNX Runtime as `onnxruntime-gpu` 1.31 behaves on a machine without a driver.

    It offers CUDA, but its sessions run on the CPU. `tests/gpu` tests a real GPU.
    """

    def __init__(self) -> None:
        self._real = load_onnxruntime()
        self.requested: list[list[str]] = []

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
        assert enable_fallback == 0  # ONNX Runtime's own fallback prints on standard output
        self.requested.append([name for name, _ in providers])
        return self._real.InferenceSession(content, options, providers=[GPU[-1]])


@pytest.fixture
def without_driver(monkeypatch):
    runtime = WithoutDriver()
    monkeypatch.setattr(bundle_module, "load_onnxruntime", lambda: runtime)
    load_libraries.cache_clear()
    return runtime


def test_auto_falls_back_to_the_cpu_and_cuda_is_refused(without_driver, bundle_path, makers, capfd):
    bundle = Bundle.open(bundle_path)
    assert bundle.device == "cpu"
    assert "runs on the CPU. `retrieval doctor` says" in str(bundle.fallback)
    assert without_driver.requested == [GPU] * len(without_driver.requested)
    assert bundle.encode(makers.digits()[0][:3, None]).vector.shape[0] == 3
    assert Bundle.open(bundle_path, device="cpu").fallback is None
    with pytest.raises(BundleError, match=r"could not start on the CUDA device.*retrieval doctor"):
        Bundle.open(bundle_path, device="cuda")
    assert capfd.readouterr().out == ""


def test_a_graph_that_no_device_can_load_is_named(without_driver, split_path, monkeypatch):
    def refused(*_, **__):
        raise RuntimeError("[ONNXRuntimeError] : 10 : INVALID_GRAPH")

    monkeypatch.setattr(without_driver, "InferenceSession", refused, raising=False)
    with pytest.raises(BundleError, match=r"cannot load .*\.onnx: .*INVALID_GRAPH"):
        Bundle.open(split_path)


@pytest.fixture
def split_path(makers, tmp_path):
    path: Path = makers.cut_in_two(makers.make_bundle(tmp_path / "b"))
    return path


def test_an_error_of_a_run_is_a_sentence(split_path):
    split = Bundle.open(split_path, threads=1)._sessions.split
    assert split is not None
    with pytest.raises(BundleError, match=r"ONNX Runtime cannot run .*\.onnx: "):
        split.backbone(["features"], {"input": np.zeros((1, 2), np.uint8)})


def test_the_log_reports_the_fallback_once(without_driver, index_path, caplog):
    with open_index(index_path, threads=1) as index, contextlib.closing(Workers(Settings())) as w:
        readiness = Readiness(Served("i", index, Settings(), w))
        for _ in range(3):
            asyncio.run(readiness.probe())
        assert readiness.reason() is None
        assert readiness.state()["fallback"] == index.bundle.fallback
    messages = [record for record in caplog.records if "runs on the CPU" in record.message]
    assert len(messages) == 1
