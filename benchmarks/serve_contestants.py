"""What `retrieval serve` is compared with in `serve.py`, each in a process of its own: what a person would write by hand.

raw      ONNX Runtime and FAISS called in a loop, with no server: it prints its own CPU time a query
bare     an ASGI application under uvicorn that only reads the upload, and answers as many bytes as ours
flask    clip-retrieval's kind of server: Flask's threads, JSON with the image in base64, ONNX Runtime and FAISS
qdrant   Qdrant's HTTP shape: JSON with a vector and a limit, answered over the same FAISS index by an ASGI application
"""

from __future__ import annotations

import base64
import io
import json
import os
import socket
import sys
import time
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import numpy as np

K = 10
ANSWER = 1400  # bytes: what ours answers


class Searcher:
    """ONNX Runtime and FAISS by hand: one thread each, vectors in memory.

    Args:
        folder: with `vectors.npy`.
        bundle: with `encoder.onnx`; None where queries are vectors.
    """

    def __init__(self, folder: Path, bundle: Path | None) -> None:
        import faiss

        faiss.omp_set_num_threads(1)
        vectors = np.load(folder / "vectors.npy")
        self.index = faiss.IndexFlatL2(vectors.shape[1])
        self.index.add(vectors)
        self.session: Any = None
        if bundle is not None:
            import onnxruntime

            options = onnxruntime.SessionOptions()
            options.intra_op_num_threads = options.inter_op_num_threads = 1
            self.session = onnxruntime.InferenceSession(
                bundle / "encoder.onnx", options, providers=["CPUExecutionProvider"]
            )
            self.said = json.loads((bundle / "manifest.json").read_text())["input"]["preprocessing"]
            self.given = self.session.get_inputs()[0].name

    def of_image(self, image: bytes) -> list[dict[str, Any]]:
        """Return what is nearest to an image."""
        from serve_data import pixels

        return self.of_vector(self.session.run(["vector"], {self.given: pixels(image, self.said)})[0][0])

    def of_vector(self, vector: Any) -> list[dict[str, Any]]:
        """Return what is nearest to a vector."""
        distances, rows = self.index.search(np.asarray(vector, np.float32)[None], K)
        return [
            {"id": f"{row:07}", "distance": distance}
            for row, distance in zip(rows[0].tolist(), distances[0].tolist(), strict=True)
        ]


def raw(folder: Path, bundle: Path | None) -> None:
    """Answer queries in a loop for each line of standard input, which says how many seconds; print milliseconds of CPU a query."""
    searcher = Searcher(folder, bundle)
    queries: list[Any] = [path.read_bytes() for path in sorted((folder / "queries").iterdir())]
    search: Any = searcher.of_image
    if bundle is None:
        queries, search = [np.array(json.loads(one), np.float32) for one in queries], searcher.of_vector
    for query in queries[:20]:
        search(query)
    print("ready", json.dumps([search(query)[0]["id"] for query in queries[:20]]), flush=True)
    for line in sys.stdin:
        end, count, cpu = time.monotonic() + float(line), 0, time.process_time()
        began = time.monotonic()
        while time.monotonic() < end:
            search(queries[count % len(queries)])
            count += 1
        print(
            1000 * (time.process_time() - cpu) / count,
            1000 * (time.monotonic() - began) / count,
            flush=True,
        )


def _asgi(app: Any) -> None:
    """Serve an ASGI application under uvicorn with uvloop and httptools."""
    import uvicorn

    listener = socket.create_server(("127.0.0.1", 0), backlog=2048)
    config = uvicorn.Config(app, http="httptools", loop="uvloop", lifespan="off", access_log=False)
    print("ready", listener.getsockname()[1], flush=True)
    uvicorn.Server(config).run(sockets=[listener])


async def _read(receive: Any) -> bytes:
    parts, more = [], True
    while more:
        message = await receive()
        parts.append(message.get("body", b""))
        more = message.get("more_body", False)
    return b"".join(parts)


async def _answer(send: Any, content: bytes) -> None:
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(content)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": content})


def bare() -> None:
    """Read, and answer."""
    content = json.dumps({"read": "x" * (ANSWER - 12)}).encode()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await _read(receive)
        await _answer(send, content)

    _asgi(app)


def qdrant(folder: Path) -> None:
    """Search for a vector in the event loop itself: the cheapest that this shape can be in Python."""
    searcher = Searcher(folder, None)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        began, asked = time.perf_counter(), json.loads(await _read(receive))
        found = searcher.of_vector(asked["vector"])[: asked["limit"]]
        points = [{"id": one["id"], "version": 0, "score": one["distance"]} for one in found]
        said = {"result": points, "status": "ok", "time": time.perf_counter() - began}
        await _answer(send, json.dumps(said).encode())

    _asgi(app)


def flask(folder: Path, bundle: Path | None) -> None:
    """Serve as clip-retrieval's back end does: a thread a connection, JSON in and out."""
    import logging

    from flask import Flask, jsonify, request
    from werkzeug.serving import WSGIRequestHandler, make_server

    searcher, app = Searcher(folder, bundle), Flask(__name__)
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    WSGIRequestHandler.protocol_version = "HTTP/1.1"  # connections are kept, as with all others

    @app.post("/knn-service")
    def search() -> Any:
        asked = request.get_json(force=True)
        if "image" in asked:
            image = io.BytesIO(base64.b64decode(asked["image"])).getvalue()
            return jsonify(searcher.of_image(image))
        return jsonify(searcher.of_vector(asked["embedding_input"]))

    server = make_server("127.0.0.1", 0, app, threaded=True)
    print("ready", server.server_port, flush=True)
    server.serve_forever()


def main() -> None:
    """Run the contestant that the command line names."""
    kind, folder = sys.argv[1], Path(sys.argv[2])
    bundle = Path(sys.argv[3]) if len(sys.argv) > 3 else None
    if kind == "raw":
        raw(folder, bundle)
    elif kind == "bare":
        bare()
    elif kind == "qdrant":
        qdrant(folder)
    else:
        flask(folder, bundle)


if __name__ == "__main__":
    main()
