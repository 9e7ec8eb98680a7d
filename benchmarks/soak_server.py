"""The server of `soak.py`: it is started, killed as a whole or in part, and ended in good order."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from contextlib import suppress
from pathlib import Path


class Server:
    """A server of an index that is killed; what it writes goes to `log`."""

    def __init__(self, index: Path, log: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self._index, self._log = index, log
        self.processes = 1
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, processes: int) -> None:
        """Start it; its clients wait for it by themselves."""
        self.processes = processes
        line = [sys.executable, "-m", "retrieval.cli", "serve", str(self._index)]
        line += ["--port", str(self.port), "--open", "admin", "--workers", "2"]
        line += ["--processes", str(processes)]
        with self._log.open("ab") as log:
            folder = self._index.parent
            self.process = subprocess.Popen(line, stdout=log, stderr=log, cwd=folder)

    def answers(self, end: float) -> None:
        """Wait until it answers, or a time by `time.monotonic`."""
        while time.monotonic() < end:
            with (
                suppress(OSError),
                urllib.request.urlopen(f"http://127.0.0.1:{self.port}/livez", timeout=5),
            ):
                return
            time.sleep(0.05)

    def members(self) -> dict[int, int]:
        """Return its processes' pids by number; decoders end by themselves."""
        assert self.process is not None
        found = {}
        for path in Path(f"/proc/{self.process.pid}/task").glob("*/children"):
            for pid in path.read_text().split():
                with suppress(OSError, IndexError, ValueError):
                    words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
                    if "--multiprocessing-fork" in words:
                        found[len(found)] = int(pid)
        return found

    def kill(self) -> None:
        """Kill all of it at once, and wait until all of it is gone."""
        assert self.process is not None
        pids = [*self.members().values(), self.process.pid]
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()
        while any(_runs(pid) for pid in pids):
            time.sleep(0.01)

    def end(self) -> int:
        """Have it end in good order; return its exit code."""
        assert self.process is not None
        self.process.terminate()
        return self.process.wait(30)


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
