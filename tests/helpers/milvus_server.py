"""The Milvus server of the package `milvus`, which tests start, kill and start again."""

from __future__ import annotations

import os
import random
import shutil
import socket
import subprocess
import time
import urllib.request
import warnings
from collections.abc import Mapping
from contextlib import suppress
from functools import reduce
from pathlib import Path
from typing import Any

import yaml

QUICK = {
    "proxy.timeTickInterval": 50,
    "queryCoord.checkInterval": 100,
    "queryCoord.checkChannelInterval": 50,
    "queryCoord.checkSegmentInterval": 50,
    "queryCoord.checkIndexInterval": 500,
    "queryCoord.distPullInterval": 50,
    "indexCoord.scheduler.interval": 50,
    "common.session.ttl": 3,
    "log.level": "warn",
    "log.stdout": False,
}
"""Settings of a server that tests wait for: short intervals (ms), a short session (s), few logs."""
_SECONDS = 120.0  # time limit of a start


class MilvusServer:
    """A server on free ports, which it keeps when it is started again.

    Args:
        folder: folder of all its files.
        settings: entries of milvus.yaml by their paths, besides `QUICK`.
        programs: folder of another server's programs; unpacking them takes seconds.
    """

    def __init__(
        self, folder: Path, settings: Mapping[str, Any] | None = None, programs: Path | None = None
    ) -> None:
        with warnings.catch_warnings():
            # The package closes no sockets.
            warnings.simplefilter("ignore", ResourceWarning)
            from milvus import MilvusServerConfig, _initialize_data_files

            config = MilvusServerConfig(data_dir=str(folder))
            named = [name for name in config.configurable_items if name.endswith("_port")]
            *ports, self._health, port, peers = _free(len(named) + 3)
            config.update(**dict(zip(named, ports, strict=True)))
            config.resolve()
            if programs is not None:
                (folder / "bin").symlink_to(programs)
            _initialize_data_files(str(folder))
        self.folder = folder
        self.place = f"127.0.0.1:{config.get('proxy_port')}"
        self._settings = folder / "configs" / "milvus.yaml"
        self._write_etcd(port, peers)
        self._write({**QUICK, **(settings or {})})
        self._process: subprocess.Popen[bytes] | None = None

    def _write_etcd(self, port: int, peers: int) -> None:
        """Write the settings of the server's etcd, whose default port another server may use."""
        clients_url, peers_url = f"http://127.0.0.1:{port}", f"http://127.0.0.1:{peers}"
        settings = {
            "name": "default",
            "listen-client-urls": clients_url,
            "advertise-client-urls": clients_url,
            "listen-peer-urls": peers_url,
            "initial-advertise-peer-urls": peers_url,
            "initial-cluster": f"default={peers_url}",
            "log-outputs": [str(self.folder / "logs" / "etcd.log")],
        }
        self._etcd = self.folder / "configs" / "etcd.yaml"
        self._etcd.write_text(yaml.safe_dump(settings))

    def start(self) -> None:
        """Start the server, unless it runs, and wait until it is healthy."""
        if self._process is not None:
            return
        env = {
            **os.environ,
            "DEPLOY_MODE": "STANDALONE",
            "METRICS_PORT": str(self._health),
            "MILVUS_RUN_DIR": str(self.folder / "run"),
            "LD_LIBRARY_PATH": str(self.folder / "bin"),
            "DYLD_LIBRARY_PATH": str(self.folder / "bin"),
            "ETCD_CONFIG_PATH": str(self._etcd),
        }
        command = [str(self.folder / "bin" / "milvus"), "run", "standalone"]
        with (self.folder / "logs" / "output.log").open("ab") as log:
            outputs = {"stdout": log, "stderr": log}
            self._process = subprocess.Popen(command, cwd=self.folder, env=env, **outputs)
        end = time.monotonic() + _SECONDS
        while not self._is_healthy():
            running = self._process.poll() is None and time.monotonic() < end
            assert running, f"Milvus ended or does not start: see {self.folder}/logs"
            time.sleep(0.05)

    def _is_healthy(self) -> bool:
        url = f"http://127.0.0.1:{self._health}/healthz"
        with suppress(OSError), urllib.request.urlopen(url, timeout=10) as answer:
            return b"OK" in answer.read()
        return False

    def kill(self) -> None:
        """End the server by SIGKILL."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def _write(self, settings: Mapping[str, Any]) -> None:
        content = yaml.safe_load(self._settings.read_text())
        for path, value in settings.items():
            *inner, last = path.split(".")
            reduce(lambda table, name: table.setdefault(name, {}), inner, content)[last] = value
        self._settings.write_text(yaml.safe_dump(content))

    def beside(self, folder: Path, settings: Mapping[str, Any]) -> MilvusServer:
        """Return another server with its own settings, not started."""
        return MilvusServer(folder, settings, self.folder / "bin")

    def stop(self) -> None:
        """End the server and delete its files."""
        self.kill()
        shutil.rmtree(self.folder)


def _free(count: int) -> list[int]:
    """Return different ports that nobody listens on.

    The system gives higher ports to outgoing connections, so these stay free while the server is
    down.
    """
    ports: list[int] = []
    for port in random.sample(range(20_000, 32_000), 2000):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            ports.append(port)
        if len(ports) == count:
            break
    return ports
