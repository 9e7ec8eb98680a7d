"""An open load on a server: requests at a constant rate, each due at its moment, whether or not those before it are answered.

    python benchmarks/serve_open.py PORT PATH TYPE FOLDER RATE SECONDS CONNECTIONS

FOLDER holds the bodies. A request goes to a connection that is free at its moment; one that finds none is not sent, and counted. Prints JSON:
how many were due, sent, answered with 200 and refused within the time, and what was measured of them. The connections come from several addresses
of this machine, so that a server's limit for each of them is not what is measured.
"""

from __future__ import annotations

import json
import re
import select
import socket
import sys
import time
from collections import deque
from contextlib import suppress
from pathlib import Path

_OF_ADDRESS = 200
_LENGTH = re.compile(rb"\r\ncontent-length: (\d+)\r\n", re.IGNORECASE)
_PIECE = 1 << 17


class Connection:
    """One connection, asked for one thing at a time."""

    def __init__(self, port: int, source: str) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), source_address=(source, 0))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket.setblocking(False)
        self.due = 0.0
        self.left = b""
        self._got = b""

    def ask(self, request: bytes, due: float) -> None:
        """Begin to send a request."""
        self.due, self.left, self._got = due, request, b""
        self.send()

    def send(self) -> None:
        """Send as much as goes."""
        with suppress(BlockingIOError):
            self.left = self.left[self.socket.send(self.left) :]

    def answer(self) -> tuple[int, bool] | None:
        """Return the status of an answer that is whole, and whether the connection stays; None while there is none.

        Raises:
            OSError: the connection ended before.
        """
        got = self.socket.recv(_PIECE)
        if not got:
            raise ConnectionResetError
        self._got += got
        head, blank, body = self._got.partition(b"\r\n\r\n")
        if not blank:
            return None
        found = _LENGTH.search(head + b"\r\n")
        if found is None or len(body) < int(found[1]):
            return None
        return int(head[9:12]), b"\r\nconnection: close" not in head.lower()


class Load:
    """Requests at a constant rate over a number of connections."""

    def __init__(self, port: int, requests: list[bytes], rate: float, connections: int) -> None:
        self._port, self._requests, self._rate = port, requests, rate
        self._poll = select.epoll()
        self._all: dict[int, Connection] = {}
        self._free: deque[Connection] = deque()
        for number in range(connections):
            self._connect(f"127.0.0.{2 + number // _OF_ADDRESS}")
        self.sent = self.unsent = self.failed = 0
        self.statuses: dict[int, int] = {}
        self.took: list[float] = []

    def _connect(self, source: str) -> None:
        one = Connection(self._port, source)
        self._all[one.socket.fileno()] = one
        self._poll.register(one.socket, select.EPOLLIN)
        self._free.append(one)

    def __enter__(self) -> Load:
        return self

    def __exit__(self, *_: object) -> None:
        self._poll.close()
        for one in self._all.values():
            one.socket.close()

    def run(self, seconds: float) -> None:
        """Ask for some time."""
        began = time.perf_counter()
        end, due, step = began + seconds, began, 1 / self._rate
        while (now := time.perf_counter()) < end:
            while due <= now:
                self._begin(due)
                due += step
            for number, event in self._poll.poll(max(0.0, due - time.perf_counter())):
                self._attend(self._all[number], event)
        while due < end:  # while this process was kept waiting
            self._begin(due)
            due += step

    def _begin(self, due: float) -> None:
        if not self._free:
            self.unsent += 1
            return
        one = self._free.popleft()
        try:
            one.ask(self._requests[self.sent % len(self._requests)], due)
        except OSError:
            self._again(one)
            return
        self.sent += 1
        if one.left:
            self._poll.modify(one.socket, select.EPOLLIN | select.EPOLLOUT)

    def _attend(self, one: Connection, event: int) -> None:
        try:
            if event & select.EPOLLOUT and one.left:
                one.send()
                if not one.left:
                    self._poll.modify(one.socket, select.EPOLLIN)
            if not event & ~select.EPOLLOUT:
                return
            found = one.answer()
        except OSError:
            self._again(one)
            return
        if found is None:
            return
        status, stays = found
        self.statuses[status] = self.statuses.get(status, 0) + 1
        if status == 200:
            self.took.append(time.perf_counter() - one.due)
        if stays and not one.left:
            self._free.append(one)
        else:
            self._again(one, failed=False)

    def _again(self, one: Connection, *, failed: bool = True) -> None:
        """Connect again after a connection has ended."""
        self.failed += failed
        if one in self._free:
            self._free.remove(one)
        source = one.socket.getsockname()[0]
        del self._all[one.socket.fileno()]
        one.socket.close()
        self._connect(source)


def main() -> None:
    """Ask, and print what came of it."""
    port, path, kind, folder, *numbers = sys.argv[1:]
    rate, seconds, connections = float(numbers[0]), float(numbers[1]), int(numbers[2])
    requests = []
    for file in sorted(Path(folder).iterdir()):
        body = file.read_bytes()
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n\r\n"
        requests.append(head.encode() + body)
    with Load(int(port), requests, rate, connections) as load:
        load.run(seconds)
    took = sorted(load.took) or [0.0]
    found = {
        "due": rate,
        "sent": load.sent / seconds,
        "unsent": load.unsent / seconds,
        "answered": load.statuses.get(200, 0) / seconds,
        "refused": load.statuses.get(503, 0) / seconds,
        "others": sum(count for status, count in load.statuses.items() if status not in (200, 503)),
        "failed": load.failed,
        "p50": 1000 * took[len(took) // 2],
        "p99": 1000 * took[int(0.99 * len(took))],
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
