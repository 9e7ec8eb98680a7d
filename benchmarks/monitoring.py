"""What metrics, logs and traces of the server cost a request: CPU time of servers with and without them, in turn in one run.

    python benchmarks/monitoring.py --output benchmarks/results/monitoring.md

The bundle is a projection of 8 × 8 pixels and the index holds 200 items: nearly all of a request is the server's own work, so that this is
the largest share that monitoring takes.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import os
import platform
import statistics
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

from retrieval.serving.http.monitoring import Log
from retrieval.serving.http.monitoring import Metrics
from retrieval.serving.http.observer import Observer
from retrieval.serving.stages import following, stage

from serving import ROOT, Server, measure, prepare, requests

WITHOUT = """
import retrieval.serving.http.observer as observer
observer.Observer.finish = lambda self, scope, one: None
"""
"""The same server whose observer gives ids and headers only: nothing is counted, logged or traced."""

SERVERS: dict[str, tuple[str, tuple[str, ...]]] = {
    "nothing": (WITHOUT, ()),
    "metrics": ("", ()),
    "and a log": ("", ("--log-format", "json", "--log-lines", "100000")),
}


def alone(count: int, rounds: int) -> dict[str, float]:
    """Return the microseconds that a request costs in the observer alone, which wraps an application that only notes its stages.

    The least CPU time of many short rounds, in turn: what a busy machine adds falls away.
    """
    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/search",
        "headers": [(b"host", b"localhost")] * 6,
        "client": ("127.0.0.1", 1),
    }
    searcher: Any = None  # asked only when Prometheus asks
    metrics = Metrics({"index": searcher}, ["/v1/search"])
    log = Log("json", per_second=10**9, stream=io.StringIO())

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"x" * 500, "more_body": False}

    async def send(message: dict[str, Any]) -> None:
        pass

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        for name in ("wait", "decode", "encode", "search", "items"):
            with stage(name):
                pass
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"y" * 500})

    patterns = {(app, frozenset[str]()): "/v1/search"}
    contestants = {
        "nothing": app,
        "metrics": _observed(app, Observer(patterns, metrics)),
        "and a log": _observed(app, Observer(patterns, metrics, log)),
    }

    async def run(one: Any) -> float:
        began = time.thread_time()
        for _ in range(count):
            await one({**scope, "endpoint": app}, receive, send)
        return (time.thread_time() - began) / count * 1e6

    least = dict.fromkeys(contestants, float("inf"))
    for _ in range(rounds):
        for name, one in contestants.items():
            least[name] = min(least[name], asyncio.run(run(one)))
            log.lines._lines.clear()
    log.close()
    return least


def _observed(app: Any, observer: Observer) -> Any:
    async def answer(scope: Any, receive: Any, send: Any) -> None:
        one = observer.begin(scope, receive, send)
        with following(one.trail):
            await app(scope, one.receive, one.send)
        observer.finish(scope, one)

    return answer


def main() -> None:
    """Measure, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=1500)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        prepare(ROOT, folder)
        asked = requests(folder / "photos")
        kept = {name: asked[name] for name in ("image, 8 × 8 PNG", "image, 640 × 480 JPEG", "vector of 16")}
        with (folder / "log").open("w") as log:
            servers = {
                name: Server.start(ROOT, folder / "i", before=before, options=more, stderr=log)
                for name, (before, more) in SERVERS.items()
            }
            try:
                found = measure(servers, kept, options.count, options.rounds)
            finally:
                for server in servers.values():
                    server.process.terminate()
                    server.process.wait()
    page = _page(found, alone(50, 500), options.count, options.rounds, load)
    print(page)
    if options.output:
        options.output.write_text(page, encoding="utf-8")


def _page(
    found: dict[str, dict[str, list[float]]], least: dict[str, float], count: int, rounds: int, load: float
) -> str:
    rows = []
    for name, of in found.items():
        base = of["nothing"]
        cells = [f"{statistics.median(base):.3f}"]
        for who in list(SERVERS)[1:]:
            shares = [mine / theirs for mine, theirs in zip(of[who], base, strict=True)]
            more = statistics.median([mine - theirs for mine, theirs in zip(of[who], base, strict=True)])
            cells.append(f"{statistics.median(shares):.3f} × ({1000 * more:+.0f} µs)")
        rows.append(f"| {name} | {' | '.join(cells)} |")
    versions = ", ".join(f"{name} {version(name)}" for name in ("prometheus-client", "starlette", "uvicorn"))
    machine = f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, Python {sys.version.split()[0]}"
    return "\n".join(
        [
            "# What monitoring costs a request",
            "",
            f"The observer alone, around an application that does nothing but note five stages: {least['metrics'] - least['nothing']:.0f} µs "
            f"a request with metrics, {least['and a log'] - least['nothing']:.0f} µs with a JSON line besides: the least CPU time of 500 rounds in turn, "
            "which a busy machine disturbs least.",
            "",
            f"CPU time of the server and its processes, {count:,} requests on one connection, the median of {rounds} rounds in turn. "
            "`nothing` is the same server with what observes requests taken out; the others as shares of it in the same round.",
            "",
            "| request | nothing, ms | metrics | metrics and a JSON line each |",
            "| --- | --- | --- | --- |",
            *rows,
            "",
            f"{machine}; {versions}. Load average {load:.1f} before, {os.getloadavg()[0]:.1f} at the end. `python benchmarks/monitoring.py`.",
            "",
        ]
    )


if __name__ == "__main__":
    main()
