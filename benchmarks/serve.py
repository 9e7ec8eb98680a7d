"""The server beside ONNX Runtime and FAISS called directly, and beside a minimal ASGI application.

    python benchmarks/serve.py # indexes in benchmarks/work/serve; writes results/serve.md
    python benchmarks/serve.py --only PNG --seconds 1 --rounds 1 # a part, which is not kept

Each contestant is a new process; they take turns in each round. The measure is the CPU time (user
and system) of all processes of a server per request, the median over rounds. "By hand" is a loop
without a server that decodes with Pillow. "Bare" is an ASGI application under the same uvicorn that
reads the upload and answers with as many bytes. This process sends the requests over kept
connections.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import io
import json
import multiprocessing
import re
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import onnxruntime
import psutil
from PIL import Image
from retrieval.bundle.bundle import Bundle

from bench import WORK, arguments, finish, machine_of, markdown, one_thread, page
from scaled_bundle import make_bundle, make_index

K, QUERIES, ANSWER = 10, 200, 1400
CONNECTIONS = (1, 8)
HEAD = b'--q\r\nContent-Disposition: form-data; name="image"; filename="q"\r\n\r\n'


@dataclass(frozen=True)
class Task:
    """The work of every contestant.

    Attributes:
        folder: has `index` (ours), `vectors.npy` (the same vectors, for FAISS) and `queries`.
        bundle: the encoder's folder; None if the queries are vectors.
    """

    folder: Path
    bundle: Path | None

    def queries(self) -> list[bytes]:
        """Return encoded images, or vectors as JSON lists."""
        return [path.read_bytes() for path in sorted((self.folder / "queries").iterdir())]

    def requests(self) -> list[bytes]:
        """Return complete HTTP requests."""
        texts = []
        for query in self.queries():
            body, kind = b'{"vector":%s,"k":%d}' % (query, K), "application/json"
            if self.bundle is not None:
                body, kind = HEAD + query + b"\r\n--q--\r\n", "multipart/form-data; boundary=q"
            head = f"POST /v1/search HTTP/1.1\r\nHost: localhost\r\nContent-Type: {kind}\r\n"
            texts.append(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        return texts


def command(*words: object) -> None:
    subprocess.run([sys.executable, "-m", "retrieval.cli", *map(str, words)], check=True)


def prepared(folder: Path, bundle: Path, vectors: Any, queries: list[bytes]) -> None:
    """Write an index of vectors, the vectors as a matrix, and the queries."""
    make_index(folder / "index", bundle, vectors)
    np.save(folder / "vectors.npy", vectors)
    (folder / "queries").mkdir(exist_ok=True)
    for number, query in enumerate(queries):
        (folder / "queries" / f"{number:04}").write_bytes(query)


def of_images(folder: Path, bundle: Path, items: list[Path], queries: list[Path]) -> Task:
    """Write an index of images."""
    if not (folder / "queries").is_dir():
        vectors = Bundle.open(bundle).encode_images([str(path) for path in items], progress=False)
        prepared(folder, bundle, vectors, [path.read_bytes() for path in queries])
    return Task(folder, bundle)


def digits(work: Path) -> Task:
    """Return the demo's small net on its digits; queries are PNGs of 16 × 16."""
    demo = work / "demo"
    if not demo.is_dir():
        command("demo", "--output", demo)
    images, queries = (sorted((demo / name).rglob("*.png")) for name in ("images", "queries"))
    return of_images(work / "digits", demo / "bundle", images, queries[:QUERIES])


def photos(work: Path) -> Task:
    """Return EfficientNet-Lite0 on crops of scikit-learn's photographs; queries are JPEGs."""
    from sklearn.datasets import load_sample_images

    crops, bundle = work / "crops", work / "lite0"
    if not crops.is_dir():
        crops.mkdir()
        random = np.random.default_rng(0)
        whole = list(map(Image.fromarray, load_sample_images().images))
        for number in range(600):
            spans = ((0, 80), (0, 7), (200, 560))
            left, top, width = (int(random.integers(low, high)) for low, high in spans)
            part = whole[number % 2].crop((left, top, left + width, top + width * 3 // 4))
            part.resize((640, 480)).save(crops / f"{number:04}.jpg", quality=85)
    paths = sorted(crops.iterdir())
    if not bundle.is_dir():
        model = ("--model", "core.efficientnet_lite0")
        command("export", *model, "--output", bundle, "--photos", crops)
    return of_images(work / "photos", bundle, paths[QUERIES:], paths[:QUERIES])


def vectors(work: Path) -> Task:
    """Return 50,000 vectors; queries are vectors."""
    from search import vectors_of

    folder = work / "vectors"
    if not (folder / "queries").is_dir():
        rows, test_rows = vectors_of(50_000, 64, power=0.0)
        make_bundle(work / "identity", 64, 1.0)
        lists = [[round(float(number), 6) for number in row] for row in test_rows[:QUERIES]]
        prepared(folder, work / "identity", rows, [json.dumps(row).encode() for row in lists])
    return Task(folder, None)


TASKS: dict[str, Callable[[Path], Task]] = {
    "small net, PNG of 16 × 16": digits,
    "EfficientNet-Lite0, JPEG of 640 × 480": photos,
    "vector among 50,000 × 64": vectors,
}


def pixels(image: bytes, shape: dict[str, Any]) -> Any:
    """Return an image (1, C, H, W) after a manifest's `preprocessing`, by Pillow alone."""
    opened = Image.open(io.BytesIO(image)).convert("L" if shape["channels"] == 1 else "RGB")
    (height, width), method = shape["size"], Image.Resampling[shape["interpolation"].upper()]
    if shape["resize"] is None:
        opened = opened.resize((width, height), method)
    else:
        shorter, (wide, high) = shape["resize"], opened.size
        longer = int(shorter * max(wide, high) / min(wide, high))
        opened = opened.resize((shorter, longer) if wide <= high else (longer, shorter), method)
        left, top = round((opened.width - width) / 2), round((opened.height - height) / 2)
        opened = opened.crop((left, top, left + width, top + height))
    array = np.atleast_3d(np.asarray(opened)).transpose(2, 0, 1)
    return np.ascontiguousarray(array)[None]


@functools.cache
def by_hand(task: Task) -> tuple[Any, Callable[[Any], Any], list[Any]]:
    """Return FAISS's index, a function that encodes a query, and the queries."""
    rows = np.load(task.folder / "vectors.npy")
    index = faiss.IndexFlatL2(rows.shape[1])
    index.add(rows)
    if task.bundle is None:
        queries = [np.array(json.loads(query), np.float32) for query in task.queries()]
        return index, lambda vector: vector[None], queries
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    session = onnxruntime.InferenceSession(task.bundle / "encoder.onnx", options)
    manifest = json.loads((task.bundle / "manifest.json").read_text())["input"]["preprocessing"]
    name = session.get_inputs()[0].name
    encode = lambda image: session.run(["vector"], {name: pixels(image, manifest)})[0]  # noqa: E731
    return index, encode, task.queries()


def nearest_by_hand(task: Task) -> list[str]:
    """Return the ids nearest to the first queries."""
    one_thread()
    index, encode, queries = by_hand(task)
    return [f"{int(index.search(encode(query), 1)[1][0, 0]):07}" for query in queries[:20]]


def cpu_by_hand(task: Task, seconds: float) -> float:
    """Search in a loop for some seconds; return CPU milliseconds per query."""
    index, encode, queries = by_hand(task)
    end, count, cpu = time.monotonic() + seconds, 0, time.process_time()
    while time.monotonic() < end:
        index.search(encode(queries[count % len(queries)]), K)
        count += 1
    return 1000 * (time.process_time() - cpu) / count


def run_bare() -> None:
    """Serve an application that reads the upload and answers with as many bytes as our server."""
    import uvicorn

    content = json.dumps({"read": "x" * (ANSWER - 12)}).encode()
    length = str(len(content)).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", length)]

    async def app(scope: Any, receive: Any, send: Any) -> None:
        while (await receive()).get("more_body"):
            pass
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": content})

    listener = socket.create_server(("127.0.0.1", 0), backlog=2048)
    config = uvicorn.Config(
        app, http="httptools", loop="uvloop", lifespan="off", access_log=False, log_level="warning"
    )
    print(f"http://127.0.0.1:{listener.getsockname()[1]}/", flush=True)
    uvicorn.Server(config).run(sockets=[listener])


@contextmanager
def started(*words: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """Run a server in a new process of Python; yield it and the port that it prints."""
    process = subprocess.Popen([sys.executable, *words], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        port = re.search(r":(\d+)/", line)
        if port is None:
            raise SystemExit(f"{' '.join(words)} did not start.")
        yield process, int(port[1])
    finally:
        process.terminate()
        process.wait(30)


def cpu_of(process: subprocess.Popen[str]) -> float:
    """Return the CPU seconds of a process and its child processes."""
    top = psutil.Process(process.pid)
    times = [member.cpu_times() for member in (top, *top.children(recursive=True))]
    return sum(own.user + own.system for own in times)


async def ask(port: int, requests: list[bytes], connections: int, seconds: float) -> int:
    """Send requests over some connections; return how many were answered.

    Raises:
        RuntimeError: an answer is not 200.
    """
    end = time.monotonic() + seconds

    async def client(number: int) -> int:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        count = 0
        while time.monotonic() < end:
            writer.write(requests[number % len(requests)])
            head = await reader.readuntil(b"\r\n\r\n")
            length = re.search(rb"content-length: (\d+)", head, re.I)
            if length is None or b" 200 " not in head[:20]:
                raise RuntimeError(head.decode(errors="replace"))
            await reader.readexactly(int(length[1]))
            count += 1
            number += connections
        writer.close()
        return count

    return sum(await asyncio.gather(*map(client, range(connections))))


def nearest(port: int, request: bytes) -> str:
    """Return the id of the nearest hit."""
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(request.replace(b"Host", b"Connection: close\r\nHost", 1))
        body = b"".join(iter(lambda: connection.recv(65536), b"")).partition(b"\r\n\r\n")[2]
    return str(json.loads(body)["results"][0]["id"])


def measure(
    name: str, work: Path, seconds: float, rounds: int
) -> dict[str, list[dict[str, float]]]:
    """Return the measurements of each contestant, a row per round."""
    task = TASKS[name](work)
    requests, results = task.requests(), dict[str, list[dict[str, float]]]()
    with ExitStack() as stack:
        hand = stack.enter_context(ProcessPoolExecutor(1, multiprocessing.get_context("spawn")))
        expected = hand.submit(nearest_by_hand, task).result()
        serve = ("-m", "retrieval.cli", "serve", str(task.folder / "index"), "--port", "0")
        servers = {"`retrieval serve`": serve, "bare ASGI application": (__file__, "--bare")}
        running = {}
        for title, words in servers.items():
            running[title] = stack.enter_context(started(*words))
            asyncio.run(ask(running[title][1], requests, 8, 1.0))
        port = running["`retrieval serve`"][1]
        pairs = zip(requests, expected, strict=False)
        same = sum(nearest(port, request) == id for request, id in pairs)
        assert same >= 0.9 * len(expected), f"only {same} of {len(expected)} answers are as by hand"
        for _ in range(rounds):
            cpu = hand.submit(cpu_by_hand, task, seconds).result()
            results.setdefault("by hand", []).append({"cpu": cpu})
            for title, (process, port) in running.items():
                for connections in CONNECTIONS:
                    before = cpu_of(process)
                    count = asyncio.run(ask(port, requests, connections, seconds))
                    row = {"cpu": 1000 * (cpu_of(process) - before) / count}
                    results.setdefault(f"{title}, {connections}", []).append(row)
    print(name, {title: round(median(rows), 3) for title, rows in results.items()})
    return results


def median(rows: list[dict[str, float]]) -> float:
    return statistics.median(row["cpu"] for row in rows)


def render(raw: dict[str, Any]) -> str:
    lines = []
    for name, contestants in raw["tasks"].items():
        hand = median(contestants["by hand"])
        for title, rows in contestants.items():
            cpu, (contestant, _, connections) = median(rows), title.partition(", ")
            lines.append([name, contestant, connections, f"{cpu:.3f}", f"{cpu / hand:.2f} ×"])
    head = ["query", "contestant", "connections", "CPU ms", "÷ by hand"]
    return page(f"""
        # The server beside the same work by hand

        `python benchmarks/serve.py`: CPU milliseconds (user and system) of all processes of a
        server per request, the median of {raw["rounds"]} rounds of {raw["seconds"]:g} s; the
        contestants take turns. *By hand* is ONNX Runtime and FAISS in a loop with one thread,
        decoding with Pillow, without a server or JSON. *Bare* is an ASGI application under uvicorn
        that only reads the same upload. {K} nearest by exact search. {raw["machine"]},
        {raw["versions"]}; load average {raw["load"]} at the start: the client and other programs
        share the cores.

        {markdown(head, lines)}
    """)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument(
        "--work", type=Path, default=WORK / "serve", help="folder of indexes and queries"
    )
    parser.add_argument("--only", help="a word of the task's name; the results are not kept")
    parser.add_argument("--seconds", type=float, default=3.0, help="of each measurement")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--bare", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    one_thread()
    options.work.mkdir(parents=True, exist_ok=True)
    tasks = {name: make for name, make in TASKS.items() if not options.only or options.only in name}
    if options.bare:
        run_bare()
    else:
        took = {
            name: measure(name, options.work, options.seconds, options.rounds) for name in tasks
        }
        raw = machine_of("faiss-cpu", "onnxruntime", "uvicorn", "starlette")
        raw |= {"seconds": options.seconds, "rounds": options.rounds, "tasks": took}
        finish("serve", raw, render(raw), keep=not options.only)


if __name__ == "__main__":
    main()
