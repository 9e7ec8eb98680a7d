"""A real HTTP server of the shape of OpenAI's embeddings, which embeds pixels, or attacks."""

from __future__ import annotations

import base64
import io
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
from PIL import Image


def embedding(url: str) -> list[float]:
    """Return the pixels of a data URL's image in grey, 8 × 8, from 0 to 1."""
    head, _, content = url.partition(",")
    assert head == "data:image/png;base64"
    image = Image.open(io.BytesIO(base64.b64decode(content, validate=True)))
    assert image.mode == "RGB"
    values = np.asarray(image.convert("L").resize((8, 8)), float) / 255
    return [float(value) for value in values.ravel()]


def answer(body: dict[str, Any]) -> dict[str, Any]:
    """Return a good answer; its entries are not in order."""
    rows = [{"index": i, "embedding": embedding(url)} for i, url in enumerate(body["input"])]
    return {"object": "list", "model": body["model"], "data": rows[::-1]}


class Server:
    """What the server was asked, and its address."""

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}/v1/embeddings"
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []


@contextmanager
def serving(
    reply: Callable[[BaseHTTPRequestHandler, dict[str, Any]], None] | None = None,
) -> Iterator[Server]:
    """Serve good answers, or those that `reply` writes to the handler."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            server.bodies.append(body)
            server.headers.append(dict(self.headers))
            try:
                if reply is None:
                    send(self, json.dumps(answer(body)).encode())
                else:
                    reply(self, body)
            except (BrokenPipeError, ConnectionResetError):
                pass  # the client has seen enough

        def log_message(self, *_: Any) -> None:
            pass

    httpd = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server = Server(httpd.server_address[1])
    thread = threading.Thread(target=httpd.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        httpd.shutdown()
        httpd.server_close()
        thread.join()


def send(handler: BaseHTTPRequestHandler, content: bytes, status: int = 200, **more: str) -> None:
    """Send an answer with further headers, whose names have "_" for "-"."""
    handler.send_response(status)
    for name, value in {"Content_Length": str(len(content)), **more}.items():
        handler.send_header(name.replace("_", "-"), value)
    handler.end_headers()
    handler.wfile.write(content)
