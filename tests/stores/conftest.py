from __future__ import annotations

import importlib.util
import os
import subprocess
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest


def _load(name: str, path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


_makers = _load("store_makers", Path(__file__).parents[1] / "serving" / "makers.py")


@pytest.fixture(scope="session")
def plain_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle of images, vectors of 16, without a rescorer. Not to be changed."""
    return _makers.make_bundle(tmp_path_factory.mktemp("bundle") / "bundle")


@pytest.fixture(scope="session")
def other_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another one, whose vectors are as wide. Not to be changed."""
    return _makers.make_bundle(tmp_path_factory.mktemp("other") / "bundle", seed=1)


@pytest.fixture(scope="session")
def makers() -> ModuleType:
    """tests/serving/makers.py: real bundles and images on demand."""
    return _makers


@pytest.fixture(scope="session")
def agree() -> Any:
    """tests/stores/agreeing.py: a store's filters compared with the language."""
    return _load("agreeing", Path(__file__).parent / "agreeing.py").agree


class MilvusServer:
    """The server that the package `milvus` carries, in a folder of its own, on free ports.

    Args:
        folder: where it keeps everything.
    """

    QUICK: ClassVar = {
        "proxy.timeTickInterval": 50,
        "queryCoord.checkInterval": 100,
        "queryCoord.distPullInterval": 50,
    }
    """How often it looks after its work, in milliseconds: a test waits for that again and again."""

    def __init__(self, folder: Path) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)  # the package leaves sockets to the collector
            from milvus import MilvusServer as Server

            self._server: Any = Server()
            self._server.set_base_dir(str(folder))
            for name, value in self.QUICK.items():
                self._server.config.set(name, value)
            self._server.start()
        self.place = f"127.0.0.1:{self._server.listen_port}"

    def kill(self) -> None:
        """End it at once."""
        self._server.server_proc.kill()
        self._server.server_proc.wait()

    def start_again(self) -> None:
        """Start it where it was, on the same ports: with the configuration that it wrote, since the package takes no port that was used a moment ago."""
        base = Path(self._server.config.base_data_dir)
        settings = {"DEPLOY_MODE": "STANDALONE", "METRICS_PORT": str(self._server.webservice_port)}
        folders = {"MILVUS_RUN_DIR": str(base / "run"), "LD_LIBRARY_PATH": str(base / "bin")}
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        command, env = self._server.server_proc.args, {**os.environ, **settings, **folders}
        self._server.server_proc = subprocess.Popen(command, cwd=base, env=env, **quiet)
        self._server.wait_started()

    def stop(self) -> None:
        """End it, and delete what it kept."""
        self._server.stop()
        self._server.cleanup()


@pytest.fixture(scope="session")
def milvus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A real server of Milvus, whose `place` is host and port: the one that MILVUS_URI names, or one started for this session."""
    if uri := os.environ.get("MILVUS_URI"):
        yield SimpleNamespace(place=uri.rpartition("//")[2].rstrip("/"))
        return
    pytest.importorskip("milvus", reason="the package `milvus`, which carries a server, is not installed")
    server = MilvusServer(tmp_path_factory.mktemp("milvus"))
    try:
        yield server
    finally:
        server.stop()
