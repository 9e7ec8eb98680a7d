"""What of a query costs what, beside the same by hand: the least CPU time of many short rounds in turn, in a process of its own.

python benchmarks/serve_parts.py small FOLDER           # of a work of serve_data.py, whose queries are vectors
python benchmarks/serve_parts.py large FOLDER           # likewise
python benchmarks/serve_parts.py photo FOLDER BUNDLE    # whose queries are photographs
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"

import asyncio
import json
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import uvloop
from retrieval.serving.bundle import Bundle
from retrieval.serving.decoding.pool import Decoders
from retrieval.serving.http.app import create_app
from retrieval.serving.http.pool import Job
from retrieval.serving.http.searcher import Searcher
from retrieval.serving.http.settings import Settings
from retrieval.serving.index.index import Index, open_index
from retrieval.serving.store.search import nearest

from serve_contestants import Searcher as ByHand
from serve_data import pixels

COUNT, ROUNDS, K = 20, 25, 10
CLIENT = "127.0.0.1"
Work = dict[str, Callable[[int], Any]]


def least(work: Work, clocks: dict[str, Callable[[], float]], rounds: int = ROUNDS) -> dict[str, float]:
    """Return microseconds of CPU of a query, by what is done."""
    found = dict.fromkeys(work, float("inf"))
    for _ in range(rounds):
        for name, one in work.items():
            clock = clocks.get(name, time.process_time)
            began = clock()
            for at in range(COUNT):
                one(at)
            found[name] = min(found[name], (clock() - began) / COUNT * 1e6)
    return found


def small(folder: Path) -> dict[str, float]:
    """Return the parts of a search with a vector among few; each holds the one before it, but for FAISS.

    "application alone" is over an index that answers at once; "refusal" is what the application answers where the queue is full.
    """
    queries, work, index = _vectors(folder)
    at_once, full = (open_index(folder / "index", threads=1) for _ in range(2))
    answer = at_once.search(np.array(queries[:1], np.float32), K)
    at_once.search = lambda queries, *given, **more: answer * len(queries)  # type: ignore[method-assign]
    ask, ask_at_once = (
        _asker(create_app(Searcher(one, Settings(workers=1))), queries) for one in (index, at_once)
    )
    loop = uvloop.new_event_loop()
    refused = _asker(create_app(_busy(full, loop)), queries, 503)
    work |= {
        "application": lambda at: loop.run_until_complete(ask(at)),
        "application alone": lambda at: loop.run_until_complete(ask_at_once(at)),
        "refusal": lambda at: loop.run_until_complete(refused(at)),
    }
    return least(work, {})


def large(folder: Path) -> dict[str, float]:
    """Return the parts of a search with a vector among many."""
    return least(_vectors(folder)[1], {}, rounds=8)


def _vectors(folder: Path) -> tuple[list[list[float]], Work, Any]:
    faiss.omp_set_num_threads(1)
    queries = [json.loads(path.read_bytes()) for path in sorted((folder / "queries").iterdir())][:COUNT]
    arrays = [np.array(query, np.float32) for query in queries]
    vectors = np.load(folder / "vectors.npy")
    flat = faiss.IndexFlatL2(vectors.shape[1])
    flat.add(vectors)
    index = open_index(folder / "index", threads=1)
    work: Work = {
        "FAISS": lambda at: flat.search(arrays[at][None], K),
        "exact search": lambda at: nearest(arrays[at][None], vectors, K),
        "index": lambda at: index.search(arrays[at], K),
    }
    return queries, work, index


def photo(folder: Path, bundle: Path) -> dict[str, float]:
    """Return the parts of a search with a photograph: by hand, and by ours, whose decoding is work of two processes."""
    images = [path.read_bytes() for path in sorted((folder / "queries").iterdir())][:COUNT]
    by_hand, opened = ByHand(folder, bundle), Bundle.open(bundle, threads=1)
    index = open_index(folder / "index", threads=1)
    decoders = Decoders(opened.manifest.input.preprocessing, workers=1, seconds=60)
    arrays = [pixels(image, by_hand.said) for image in images]
    found = [opened.encode(array) for array in arrays]
    (pid,) = (decoders.pixels(images[0]).future.result(), decoders.pids)[1]
    process = Path(f"/proc/{pid}/schedstat")

    def decoded(at: int) -> Any:
        return decoders.pixels(images[at]).future.result()

    work: Work = {
        "decoding by hand": lambda at: pixels(images[at], by_hand.said),
        "decoding here": decoded,
        "decoding there": decoded,
        "encoder by hand": lambda at: by_hand.session.run(["vector"], {by_hand.given: arrays[at]}),
        "encoder": lambda at: opened.encode(arrays[at]),
        "FAISS": lambda at: by_hand.of_vector(found[at].query[0]),
        "index": lambda at: index.search(found[at], K),
    }
    clock = {"decoding there": lambda: int(process.read_text("ascii").split()[0]) / 1e9}
    return least(work, clock, rounds=5)


def _busy(index: Index, loop: asyncio.AbstractEventLoop) -> Searcher:
    """Return a searcher whose thread is taken, and one search waits for it."""
    searcher, never = Searcher(index, Settings(workers=1, waiting=1)), threading.Event()

    async def hold() -> None:
        for _ in range(2):
            searcher.machinery.searches.add(Job(lambda job: never.wait(), CLIENT))
            await asyncio.sleep(0.1)

    loop.run_until_complete(hold())
    return searcher


def _asker(app: Any, queries: list[list[float]], status: int = 200) -> Callable[[int], Any]:
    """Return what asks the application without a socket."""
    bodies = [json.dumps({"vector": query, "k": K}).encode() for query in queries]

    async def send(message: dict[str, Any]) -> None:
        assert message.get("status", status) == status, message

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
            "client": (CLIENT, 1),
            "server": ("127.0.0.1", 8000),
            "scheme": "http",
            "http_version": "1.1",
            "root_path": "",
        }
        await app(scope, receive, send)

    return ask


if __name__ == "__main__":
    measured = {"small": small, "large": large, "photo": photo}[sys.argv[1]](*map(Path, sys.argv[2:]))
    print(json.dumps(measured), flush=True)
    os._exit(0)  # threads of the server's that nobody waits for
