"""CPU time of one request to `retrieval serve`, this checkout's and another's, in turn in one run.

    python benchmarks/serving.py --against ../older-checkout --output benchmarks/results/serving.md

Counts user and system time of the server and its processes over many requests on one kept connection, so a busy machine
disturbs it little. The bundle is a projection of 8 × 8 pixels: nearly all of a request is the server's own work.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np
from PIL import Image

ROOT = Path(__file__).parents[1]
TICK = os.sysconf("SC_CLK_TCK")


def requests(folder: Path) -> dict[str, bytes]:
    """Return the requests that are compared, as they go over the wire."""
    digit = next(folder.rglob("*.png")).read_bytes()
    noise = np.random.default_rng(0).integers(0, 256, (224, 224, 3), dtype=np.uint8)
    jpeg = io.BytesIO()
    Image.fromarray(noise).resize((640, 480)).save(jpeg, "JPEG")
    vector = json.dumps({"vector": [0.25] * 16, "k": 10}).encode()

    def post(kind: str, body: bytes) -> bytes:
        head = f"POST /v1/search HTTP/1.1\r\nHost: localhost\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n\r\n"
        return head.encode() + body

    def form(image: bytes) -> bytes:
        part = b'--b\r\nContent-Disposition: form-data; name="image"; filename="q.png"\r\n\r\n'
        return post("multipart/form-data; boundary=b", part + image + b"\r\n--b--\r\n")

    return {
        "image, 8 × 8 PNG": form(digit),
        "image, 640 × 480 JPEG": form(jpeg.getvalue()),
        "vector of 16": post("application/json", vector),
        "item's image": b"GET /v1/items/3/image HTTP/1.1\r\nHost: localhost\r\n\r\n",
        "the page's style": b"GET /page.css HTTP/1.1\r\nHost: localhost\r\n\r\n",
    }


def prepare(sources: Path, folder: Path) -> None:
    """Have one checkout make an index of 200 digits, in its own format."""
    code = (
        "import sys, pathlib, importlib.util as u\n"
        "sources, folder = map(pathlib.Path, sys.argv[1:])\n"
        "sys.path[:0] = [str(sources)]\n"
        "spec = u.spec_from_file_location('makers', sources / 'tests' / 'serving' / 'makers.py')\n"
        "makers = u.module_from_spec(spec); spec.loader.exec_module(makers)\n"
        "import retrieval\n"
        "makers.write_digits(folder / 'photos', 200)\n"
        "retrieval.build_index(makers.make_bundle(folder / 'bundle'), [folder / 'photos'], folder / 'i', progress=False)\n"
    )
    subprocess.run([sys.executable, "-c", code, str(sources), str(folder)], check=True)


@dataclass
class Server:
    """A server in a process of its own, from the sources in one folder."""

    process: subprocess.Popen[str]
    port: int

    @classmethod
    def start(
        cls,
        sources: Path,
        index: Path,
        hidden: tuple[str, ...] = (),
        before: str = "",
        options: tuple[str, ...] = (),
        stderr: IO[str] | None = None,
    ) -> Server:
        """Start it, and wait until it is ready.

        Args:
            sources: of the checkout.
            index: what it serves.
            hidden: modules that it must do without.
            before: code that runs first.
            options: further ones, of the command line.
            stderr: where its log goes.
        """
        hide = "".join(f"sys.modules[{name!r}] = None; " for name in hidden)
        code = f"import sys, runpy; {hide}sys.path[:0] = [{str(sources)!r}]; exec({before!r}); runpy.run_module('retrieval.cli', run_name='__main__')"
        process = subprocess.Popen(
            [sys.executable, "-c", code, "serve", str(index), "--port", "0", "--workers", "2", *options],
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        assert process.stdout is not None
        line = process.stdout.readline()
        server = cls(process, int(line.split("/ ")[0].rsplit(":", 1)[1]))
        for turn in range(400):
            path = (b"/readyz", b"/v1/health/ready")[turn % 2]  # an older checkout has it elsewhere
            if b" 200 " in server.ask(b"GET " + path + b" HTTP/1.1\r\nHost: localhost\r\n\r\n", 1)[:20]:
                return server
            time.sleep(0.1)
        process.terminate()
        raise SystemExit(f"The server from {sources} did not become ready.")

    def ask(self, request: bytes, count: int) -> bytes:
        """Send a request `count` times on one connection; return the last answer."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=30) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for _ in range(count):
                connection.sendall(request)
                answer = b""
                while b"\r\n\r\n" not in answer:
                    answer += connection.recv(65536)
                head, _, body = answer.partition(b"\r\n\r\n")
                length = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
                while len(body) < length:
                    body += connection.recv(65536)
        return answer

    def cpu_seconds(self) -> float:
        """Return the CPU time of the server and of its processes so far."""
        return cpu_seconds(self.process.pid)


def cpu_seconds(pid: int) -> float:
    """Return the CPU time of a process and of its children so far."""
    total, todo = 0.0, [pid]
    while todo:
        pid = todo.pop()
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
        total += (int(fields[11]) + int(fields[12])) / TICK
        for task in Path(f"/proc/{pid}/task").iterdir():
            with suppress(FileNotFoundError):  # a thread that has just ended
                todo += map(int, (task / "children").read_text().split())
    return total


def measure(servers: dict[str, Server], asked: dict[str, bytes], count: int, rounds: int) -> dict:
    """Return CPU milliseconds a request, by request and server, a figure for each round."""
    found = {name: {who: [] for who in servers} for name in asked}
    for _ in range(rounds):
        for name, request in asked.items():
            for who, server in servers.items():
                answer = server.ask(request, 20)
                assert b" 200 " in answer[:20], answer
                before = server.cpu_seconds()
                server.ask(request, count)
                found[name][who].append((server.cpu_seconds() - before) / count * 1000)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--against", type=Path, help="another checkout")
    parser.add_argument("--note", default="", help="what the other checkout is, for the page")
    parser.add_argument("--count", type=int, default=400, help="requests a round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    contestants = {"this checkout": (ROOT, ())}
    if arguments.against:
        older = arguments.against.resolve()
        contestants["the older one"] = (older, ())
        contestants["the older one, h11 and asyncio"] = (older, ("httptools", "uvloop"))
    with tempfile.TemporaryDirectory() as name:
        servers, folder = {}, Path(name)
        for who, (sources, hidden) in contestants.items():
            prepare(sources, folder / who)
            servers[who] = Server.start(sources, folder / who / "i", hidden)
        photos = folder / "this checkout" / "photos"
        try:
            found = measure(servers, requests(photos), arguments.count, arguments.rounds)
        finally:
            for server in servers.values():
                server.process.terminate()
                server.process.wait(15)
    lines = [
        "# CPU time of a request",
        "",
        f"`benchmarks/serving.py`: milliseconds of CPU (the server and its processes), mean ± standard deviation over "
        f"{arguments.rounds} rounds of {arguments.count} requests on one connection, contestants in turn. "
        f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}. {arguments.note}".rstrip(),
        "",
        "| request | " + " | ".join(servers) + " |",
        "| --- |" + " --- |" * len(servers),
    ]
    for name, row in found.items():
        cells = [f"{statistics.mean(v):.2f} ± {statistics.stdev(v):.2f}" for v in row.values()]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    text = "\n".join(lines) + "\n"
    print(text)
    if arguments.output:
        arguments.output.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
