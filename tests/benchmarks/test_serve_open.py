"""The open load of `benchmarks/serve_open.py`: at its own rate, whatever is answered."""

from __future__ import annotations

import importlib
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="epoll, and addresses of the loopback")
REQUEST = b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 300000\r\n\r\n" + bytes(300_000)


class Every(BaseHTTPRequestHandler):
    """Refuses every second request, and then closes."""

    protocol_version = "HTTP/1.1"
    asked = 0

    def handle(self) -> None:
        with suppress(ConnectionError):  # the load is over
            super().handle()

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        type(self).asked += 1
        refused = self.asked % 2 == 0
        self.send_response(503 if refused else 200)
        self.send_header("Content-Length", "2")
        if refused:
            self.send_header("Connection", "close")
            self.close_connection = True
        self.end_headers()
        self.wfile.write(b"{}")

    def log_message(self, *_: Any) -> None: ...


@pytest.fixture
def port() -> Iterator[int]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Every) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server.server_address[1]
        server.shutdown()
        thread.join()


def test_what_is_answered_and_refused_is_counted(port):
    with importlib.import_module("serve_open").Load(port, [REQUEST], 100, 20) as load:
        load.run(0.5)
    assert load.sent + load.unsent in (49, 50, 51)
    assert load.statuses[200] == len(load.took) > 0
    assert load.statuses[503] > 0 and not load.failed
    assert load.statuses[200] + load.statuses[503] <= load.sent


def test_who_gets_no_answer_does_not_slow_the_others_down():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        with importlib.import_module("serve_open").Load(port, [b"POST / HTTP/1.1\r\n\r\n"], 200, 4) as load:
            load.run(0.25)
    assert load.sent == 4 and load.unsent in (45, 46, 47)
    assert not load.statuses and not load.took
