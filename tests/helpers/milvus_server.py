"""The server that the package `milvus` carries: started, ended and started again."""

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
"""How often it looks after its work, in milliseconds: tests wait for that.

One that was killed is waited for that many seconds; and a tenth of what it would write to its log.
"""
_SECONDS = 120.0


class MilvusServer:
    """The server in a folder of its own, on free ports of this machine, which it keeps when it is
    started again.

    Args:
        folder: where it keeps everything.
        settings: of milvus.yaml, by their paths, besides `QUICK`.
        programs: the folder of another one's programs, which take seconds to unpack.
    """

    def __init__(
        self, folder: Path, settings: Mapping[str, Any] | None = None, programs: Path | None = None
    ) -> None:
        with warnings.catch_warnings():
            # the package leaves sockets to the collector
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
        """The etcd inside it takes its ports from no other place; without this, two servers of a
        machine would meet at 2379.
        """
        asked_at, peers_at = f"http://127.0.0.1:{port}", f"http://127.0.0.1:{peers}"
        message = {
            "name": "default",
            "listen-client-urls": asked_at,
            "advertise-client-urls": asked_at,
            "listen-peer-urls": peers_at,
            "initial-advertise-peer-urls": peers_at,
            "initial-cluster": f"default={peers_at}",
            "log-outputs": [str(self.folder / "logs" / "etcd.log")],
        }
        self._etcd = self.folder / "configs" / "etcd.yaml"
        self._etcd.write_text(yaml.safe_dump(message))

    def start(self) -> None:
        """Start it where it was, on the same ports, and wait until it is well.

        One that runs is left alone.
        """
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
        until = time.monotonic() + _SECONDS
        while not self._well():
            assert self._process.poll() is None, (
                f"the server of Milvus ended: see {self.folder}/logs"
            )
            assert time.monotonic() < until, (
                f"the server of Milvus does not start: see {self.folder}/logs"
            )
            time.sleep(0.05)

    def _well(self) -> bool:
        url = f"http://127.0.0.1:{self._health}/healthz"
        with suppress(OSError), urllib.request.urlopen(url, timeout=10) as answer:
            return b"OK" in answer.read()
        return False

    def kill(self) -> None:
        """End it at once, by SIGKILL."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def _write(self, settings: Mapping[str, Any]) -> None:
        message = yaml.safe_load(self._settings.read_text())
        for path, value in settings.items():
            *inner, last = path.split(".")
            reduce(lambda table, name: table.setdefault(name, {}), inner, message)[last] = value
        self._settings.write_text(yaml.safe_dump(message))

    def beside(self, folder: Path, settings: Mapping[str, Any]) -> MilvusServer:
        """Return another one, with settings of its own, which is not started."""
        return MilvusServer(folder, settings, self.folder / "bin")

    def stop(self) -> None:
        """End it, and delete what it kept."""
        self.kill()
        shutil.rmtree(self.folder)


def _free(count: int) -> list[int]:
    """Return ports that nobody listens on, all different, below those that the system gives to
    whoever connects: they stay free while the server is down.
    """
    hits: list[int] = []
    for port in random.sample(range(20_000, 32_000), 2000):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            hits.append(port)
        if len(hits) == count:
            break
    return hits
