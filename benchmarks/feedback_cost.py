"""The cost of taking feedback: the same searches with and without it, in one process, in turns.

    python benchmarks/feedback_cost.py # writes results/feedback_cost.md
    python benchmarks/feedback_cost.py --only vector --rounds 5 # a part, which is not kept

Two applications of the server, one with --feedback, answer the same requests in blocks. A block
ends when its searches are written, so it pays for all of its work. The measure is the CPU time of
the process (user and system). The requests do not pass a socket, so a search costs less than over
HTTP, and the share of feedback is larger. On a busy machine other processes slow some blocks, so
the figure of a contestant is the mean of the fastest quarter of its blocks. The indexes are those
of serve.py, in benchmarks/work/serve, without its large photos, whose decoding takes most of their
time.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np

from bench import WORK, arguments, finish, half_width, machine_of, markdown, one_thread, page
from serve import TASKS, Task

BLOCK = 200
"""Requests of a block: about as many as a busy process answers between two writes."""
PARTS = 6
"""Parts of the blocks, for an interval."""


def scope_and_body(request: bytes) -> tuple[dict[str, Any], bytes]:
    """Return the ASGI scope of a complete HTTP request, and its body."""
    head, _, body = request.partition(b"\r\n\r\n")
    first, *lines = head.split(b"\r\n")
    method, path, _ = first.decode().split()
    headers = [tuple(line.split(b": ", 1)) for line in lines]
    return {
        "type": "http",
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [(name.lower(), value) for name, value in headers],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 80),
    }, body


async def answer(app: Any, request: bytes) -> bytes:
    """Return the body of an application's answer, which must be 200."""
    scope, body = scope_and_body(request)
    status, content = 0, b""

    async def receive() -> Any:
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Any) -> None:
        nonlocal status, content
        status = message.get("status", status)
        content += message.get("body", b"")

    await app(scope, receive, send)
    assert status == 200, content
    return content


def applications(task: Task, work: Path) -> dict[str, Any]:
    """Return the application without and with feedback."""
    from retrieval_server.server import Parts
    from retrieval_server.settings import Settings

    copy = work / "with feedback" / task.folder.name
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(task.folder / "index", copy)
    folders = {"off": (task.folder / "index", False), "on": (copy, True)}
    return {
        title: Parts({"index": folder}, Settings(feedback=feedback)).application()
        for title, (folder, feedback) in folders.items()
    }


async def measure(task: Task, work: Path, rounds: int) -> dict[str, list[float]]:
    """Return the CPU milliseconds per search of each block, off and on."""
    requests = (task.requests() * BLOCK)[:BLOCK]
    running = applications(task, work)
    blocks: dict[str, list[float]] = {title: [] for title in running}
    for number in range(rounds + 2):
        for title in sorted(running, reverse=bool(number % 2)):
            app = running[title]
            (served,) = app.served.values()
            began = time.process_time()
            for request in requests:
                content = await answer(app, request)
            if served.feedback is not None:
                served.feedback.write()
            spent = 1000 * (time.process_time() - began) / BLOCK
            assert ("search_id" in json.loads(content)) == (title == "on")
            if number >= 2:
                blocks[title].append(round(spent, 4))
    for app in running.values():
        app.workers.close()
    return blocks


def fastest(blocks: list[float]) -> float:
    """Return the mean of the fastest quarter of blocks."""
    return float(np.mean(sorted(blocks)[: max(1, len(blocks) // 4)]))


def summary(blocks: dict[str, list[float]]) -> tuple[float, float, float, float]:
    """Return the milliseconds off and on, their ratio, and the half-width of its 95 % interval."""
    ratios = [
        fastest(blocks["on"][part::PARTS]) / fastest(blocks["off"][part::PARTS])
        for part in range(PARTS)
    ]
    return fastest(blocks["off"]), fastest(blocks["on"]), float(np.mean(ratios)), half_width(ratios)


def render(raw: dict[str, Any]) -> str:
    lines = []
    for name, blocks in raw["tasks"].items():
        off, on, ratio, half = summary(blocks)
        change = f"{100 * (ratio - 1):+.1f} ± {100 * half:.1f} %"
        lines.append([name, f"{off:.3f}", f"{on:.3f}", change])
    return page(f"""
        # The cost of taking feedback

        `python benchmarks/feedback_cost.py`: CPU milliseconds (user and system) per search of the
        server's application without and with `--feedback`, in one process, in turns:
        {raw["rounds"]} blocks of {BLOCK} searches each, of which the fastest quarter counts. A
        block ends when its searches are written. Requests do not pass a socket, and the process
        that decodes images is not counted: over HTTP a search costs more, and feedback the same.
        *On ÷ off* is the mean of {PARTS} parts of the blocks with its 95 % interval.
        {raw["machine"]}, {raw["versions"]}; load average {raw["load"]} at the end:
        other programs share the cores.

        {markdown(["query", "off", "on", "on ÷ off"], lines)}
    """)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument(
        "--work", type=Path, default=WORK / "serve", help="folder of indexes and queries"
    )
    parser.add_argument("--only", help="a word of the task's name; the results are not kept")
    parser.add_argument("--rounds", type=int, default=240, help="blocks of each contestant")
    options = parser.parse_args()
    one_thread()
    options.work.mkdir(parents=True, exist_ok=True)
    took: dict[str, dict[str, list[float]]] = {}
    for name, make in TASKS.items():
        if (options.only or "") in name and "JPEG" not in name:
            task = make(options.work)
            took[name] = asyncio.run(measure(task, options.work, options.rounds))
            print(name, summary(took[name]), flush=True)
    raw = machine_of("faiss-cpu", "onnxruntime", "starlette")
    raw |= {"rounds": options.rounds, "tasks": took}
    finish("feedback_cost", raw, render(raw), keep=not options.only)


if __name__ == "__main__":
    main()
