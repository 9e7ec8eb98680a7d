"""`retrieval serve --processes 2` for tests: whose connection is whose, and when all are ready."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import wire
from retrieval.serving.index.creating import create_index

WIDTH = 16


def until(holds: Callable[[], Any], seconds: float = 60.0) -> Any:
    end = time.monotonic() + seconds
    while not (found := holds()):
        assert time.monotonic() < end, "it never came"
        time.sleep(0.05)
    return found


def children(server: SimpleNamespace) -> dict[int, int]:
    """The pid of each process that serves, by its number."""
    found = {}
    for path in Path(f"/proc/{server.process.pid}/task").glob("*/children"):
        for pid in path.read_text().split():
            with contextlib.suppress(OSError, IndexError, ValueError):  # it ends just now, or begins
                found[int(Path(f"/proc/{pid}/cmdline").read_text().split("\0")[-2])] = int(pid)
    return found


def all_ready(server: SimpleNamespace, of: int) -> dict[int, int]:
    def ready() -> bool:
        answer = wire.ask(server.port, wire.get("/readyz", "Connection: close"))  # by whoever is there
        return answer.status == 200 and json.loads(answer.body)["processes"] == {"ready": of, "of": of}

    until(ready)
    return children(server)


class Line:
    """A connection that stays open, whose process is known."""

    opened: ClassVar[list[Line]] = []

    def __init__(self, port: int) -> None:
        self.opened.append(self)
        self.http = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        self.ask("GET", "/livez")
        ours = self.http.sock.getsockname()[1]
        rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
        (self.socket,) = [
            f"socket:[{row[9]}]"
            for row in rows
            if row[1].endswith(f":{port:04X}") and row[2].endswith(f":{ours:04X}")
        ]

    def ask(self, method: str, path: str, said: Any = None, **headers: str) -> tuple[int, Any]:
        body = None if said is None else json.dumps(said)
        kind = {} if said is None else {"Content-Type": "application/json"}
        self.http.request(method, path, body, {**kind, **headers})
        answer = self.http.getresponse()
        content = answer.read()
        return answer.status, json.loads(content) if content[:1] == b"{" else content

    def owner(self, pids: dict[int, int]) -> int:
        for number, pid in pids.items():
            with contextlib.suppress(OSError):
                if self.socket in {str(each.readlink()) for each in Path(f"/proc/{pid}/fd").iterdir()}:
                    return number
        raise AssertionError("nobody has it")


def to_each(server: SimpleNamespace, pids: dict[int, int]) -> dict[int, Line]:
    """A connection to each process."""
    lines: dict[int, Line] = {}
    spare = []

    def found() -> bool:
        line = Line(server.port)
        spare.append(line)
        lines.setdefault(line.owner(pids), line)
        return len(lines) == len(pids)

    until(found)
    for line in spare:
        if line not in lines.values():
            line.http.close()
    return lines


@contextlib.contextmanager
def two_processes(folder: Path, bundle: Path, photos: Path) -> Iterator[SimpleNamespace]:
    """Two processes over an index of some photos, that are changed and recorded."""
    create_index(folder / "i", bundle, [photos / "1"], progress=False)
    words = [
        "--open",
        "admin",
        "--processes",
        "2",
        "--port",
        "0",
        "--health-port",
        "0",
        "--log-format",
        "json",
    ]
    words += ["--audit", str(folder / "audit"), "--snapshots", str(folder)]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "retrieval.cli", "serve", str(folder / "i"), *words],
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            cwd=folder,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
    with process:
        try:
            line = process.stdout.readline()
            assert "Serving" in line, (folder / "log").read_text()
            port = int(line.split(" at ")[1].split("/ ")[0].rpartition(":")[2])
            server = SimpleNamespace(process=process, port=port, folder=folder)
            server.pids = all_ready(server, 2)
            yield server
        finally:
            process.terminate()
            process.wait(20)


def vector(number: float) -> list[float]:
    return [float(number), *[1.0] * (WIDTH - 1)]


def logged(server: SimpleNamespace) -> list[dict[str, Any]]:
    """The events in the log; each line is whole."""
    lines = map(json.loads, (server.folder / "log").read_text().splitlines())
    return [said for said in lines if "message" in said]
