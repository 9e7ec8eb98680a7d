"""What of a small vector query costs what: the least CPU time of many short rounds in turn, in a process of its own.

python benchmarks/serve_parts.py FOLDER      # of a work of serve_data.py, whose queries are vectors
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"

import asyncio
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import uvloop
from retrieval.serving.http.app import create_app
from retrieval.serving.http.searcher import Searcher
from retrieval.serving.http.settings import Settings
from retrieval.serving.index.open import open_index
from retrieval.serving.local.exact import nearest

COUNT, ROUNDS, K = 20, 25, 10


def parts(folder: Path) -> dict[str, float]:
    """Return microseconds of CPU of a query, by what is done; each holds the one before it, but for FAISS."""
    faiss.omp_set_num_threads(1)
    queries = [json.loads(path.read_bytes()) for path in sorted((folder / "queries").iterdir())][:COUNT]
    arrays = [np.array(query, np.float32) for query in queries]
    vectors = np.load(folder / "vectors.npy")
    flat = faiss.IndexFlatL2(vectors.shape[1])
    flat.add(vectors)
    index = open_index(folder / "index", threads=1)
    searcher = Searcher(index, Settings(workers=1))
    ask = _asker(create_app(searcher), queries)
    loop = uvloop.new_event_loop()
    work: dict[str, Callable[[int], Any]] = {
        "FAISS": lambda at: flat.search(arrays[at][None], K),
        "exact search": lambda at: nearest(arrays[at][None], vectors, K),
        "index": lambda at: index.search(arrays[at], K),
        "application": lambda at: loop.run_until_complete(ask(at)),
    }
    least = dict.fromkeys(work, float("inf"))
    for _ in range(ROUNDS):
        for name, one in work.items():
            began = time.process_time()
            for at in range(COUNT):
                one(at)
            least[name] = min(least[name], (time.process_time() - began) / COUNT * 1e6)
    return least


def _asker(app: Any, queries: list[list[float]]) -> Callable[[int], Any]:
    """Return what asks the application without a socket."""
    bodies = [json.dumps({"vector": query, "k": K}).encode() for query in queries]

    async def send(message: dict[str, Any]) -> None:
        assert message.get("status", 200) == 200, message

    async def ask(at: int) -> None:
        asked = False

        async def receive() -> dict[str, Any]:
            nonlocal asked
            if asked:  # the client stays
                await asyncio.Event().wait()
            asked = True
            return {"type": "http.request", "body": bodies[at], "more_body": False}

        headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
        headers.append((b"content-length", str(len(bodies[at])).encode()))
        scope = {
            "type": "http",
            "method": "POST",
            "path": "/v1/search",
            "raw_path": b"/v1/search",
            "query_string": b"",
            "headers": headers,
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 8000),
            "scheme": "http",
            "http_version": "1.1",
            "root_path": "",
        }
        await app(scope, receive, send)

    return ask


if __name__ == "__main__":
    print(json.dumps(parts(Path(sys.argv[1]))), flush=True)
    os._exit(0)  # threads of the server's that nobody waits for
