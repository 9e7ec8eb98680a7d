"""The server beside ONNX Runtime and FAISS called by hand, a bare ASGI application, and two other shapes of server, in one run.

    python benchmarks/image_vectors.py --cache FOLDER/vectors
    python benchmarks/serve.py --cache FOLDER/serve --vectors FOLDER/vectors --output benchmarks/results/serve.md

The client is wrk. Contestants run in processes of their own, in turn in each round; a figure is the median over rounds of CPU time, user and
system, of the server's processes a request, or of a loop's own. `serve_contestants.py` holds the others, `serve_data.py` what is searched.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from serve_data import Work, works
from serve_load import Contestant
from serve_report import render

CONNECTIONS = (1, 8, 32)
SAMPLE = 20
DEADLINE = 2.5  # seconds: a boundary of the histograms
OVERLOAD = 10
OVERLOADED = 6.0  # seconds, of which the queue takes one to fill
USERS = 1000  # connections that the overload comes from: more than may wait


class Raw:
    """The loop by hand."""

    def __init__(self, work: Work) -> None:
        given = [str(work.bundle)] if work.bundle else []
        script = str(Path(__file__).parent / "serve_contestants.py")
        self.process = subprocess.Popen(
            [sys.executable, script, "raw", str(work.folder), *given],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.ids = json.loads(self._line().removeprefix("ready "))

    def _line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    def run(self, seconds: float) -> dict[str, float]:
        """Search for some time; return milliseconds a query."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{seconds}\n")
        self.process.stdin.flush()
        cpu, wall = map(float, self._line().split())
        return {"cpu": cpu, "p50": wall}

    def close(self) -> None:
        """End it."""
        self.process.kill()
        self.process.wait()


def measure(work: Work, seconds: float, rounds: int, options: tuple[str, ...]) -> dict[str, Any]:
    """Return what each contestant did, by its name and number of connections, a figure for each round."""
    raw = Raw(work)
    names = ["ours", "bare", "flask", *(["qdrant"] if work.bundle is None else [])]
    servers = {name: Contestant(name, work, options if name == "ours" else ()) for name in names}
    found: dict[str, list[dict[str, float]]] = {}
    try:
        for name, server in servers.items():
            if name != "bare":
                same = sum(map(str.__eq__, server.ids(work, SAMPLE), raw.ids))
                print(f"  {name}: {same} of {len(raw.ids)} as by hand", flush=True)
                assert same >= 0.9 * len(raw.ids), "a contestant answers something else"
            server.load(8, 1.0)
        for _ in range(rounds):
            found.setdefault("raw", []).append(raw.run(seconds))
            print(f"  raw: {found['raw'][-1]['cpu']:.3f} ms CPU", flush=True)
            for name, server in servers.items():
                for connections in CONNECTIONS:
                    seen = asdict(server.load(connections, seconds))
                    found.setdefault(f"{name} {connections}", []).append(seen)
                    print(f"  {name} {connections}: {_short(seen)}", flush=True)
    finally:
        raw.close()
        for server in servers.values():
            server.close()
    return found


def strained(work: Work, seconds: float, options: tuple[str, ...]) -> dict[str, Any]:
    """Return what our server does at its peak, at 70 % of that, and when it is asked for ten times as much."""
    limits = ("--connections", str(2 * USERS), "--deadline", str(DEADLINE))
    server = Contestant("ours", work, (*limits, *options))
    try:
        server.load(8, 1.0)
        peak = max((server.load(each, seconds) for each in (8, 24)), key=lambda seen: seen.answered)
        steady = server.load(32, 2 * seconds, 0.7 * peak.answered, peak.p50 / 8)
        level = server.open_load(
            peak.answered, OVERLOADED, USERS
        )  # its client takes more of the cores than wrk
        time.sleep(2 * DEADLINE)
        before = server.metrics()
        over = server.open_load(OVERLOAD * peak.answered, OVERLOADED, USERS)
        time.sleep(2 * DEADLINE)
        after = server.metrics()
    finally:
        server.close()
    grown = {name: value - before.get(name, 0.0) for name, value in after.items()}
    waited = {
        limit: grown.get(f'retrieval_stage_seconds_bucket{{le="{limit}",stage="wait"}}', 0.0)
        for limit in (str(DEADLINE), "+Inf")
    }
    refused = {
        name.split('"')[1]: value
        for name, value in grown.items()
        if name.startswith("retrieval_refused_total") and value
    }
    return {
        "peak": asdict(peak),
        "at 70 %": asdict(steady),
        "at the peak": level,
        "overload": over,
        "begun late": waited["+Inf"] - waited[str(DEADLINE)],
        "begun": waited["+Inf"],
        "refused": refused,
    }


def _short(seen: dict[str, float]) -> str:
    return f"{seen['cpu']:.3f} ms CPU, {seen['answered']:.0f}/s, p50 {seen['p50']:.2f}, p99 {seen['p99']:.2f}"


def about(seconds: float, rounds: int) -> dict[str, Any]:
    """Return what the page says of the machine and the run."""
    names = ("faiss-cpu", "onnxruntime", "uvicorn", "uvloop", "httptools", "flask")
    return {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, Python {sys.version.split()[0]}",
        "load": round(os.getloadavg()[0]),
        "versions": ", ".join(f"{name} {version(name)}" for name in names),
        "seconds": f"{seconds:g}",
        "rounds": rounds,
        "deadline": DEADLINE,
    }


def parts_of(made: dict[str, Callable[[], Work]]) -> dict[str, Any]:
    """Return what parts of queries cost, each work in a process of its own."""
    photos = made["EfficientNet-Lite0, JPEG of 640 × 480"]()
    given = {
        "small": [made["vector among 900 × 32"]().folder],
        "large": [made["vector among 100,000 × 128"]().folder],
        "photo": [photos.folder, photos.bundle],
    }
    script = str(Path(__file__).parent / "serve_parts.py")
    found: dict[str, Any] = {"load": round(os.getloadavg()[0])}
    for name, folders in given.items():
        line = [sys.executable, script, name, *map(str, folders)]
        found[name] = json.loads(subprocess.run(line, capture_output=True, text=True, check=True).stdout)
    return found


def main() -> None:
    """Measure, and write the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cache", type=Path, required=True, help="folder for indexes and queries")
    parser.add_argument("--vectors", type=Path, required=True, help="folder of image_vectors.py")
    parser.add_argument("--only", action="append", help="a word of the works' names; repeatable")
    parser.add_argument("--seconds", type=float, default=3.0, help="of each measurement")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--option", action="append", default=[], help="of our server, as --option=--batching=off"
    )
    parser.add_argument("--raw", type=Path, help="where to keep every round as JSON")
    parser.add_argument(
        "--strained",
        action="store_true",
        help="only measure 70 %% and overload again; as --only, put into --raw",
    )
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    options = tuple(part for one in given.option for part in one.split("="))
    made = works(given.cache, given.vectors)
    found: dict[str, Any] = {"about": about(given.seconds, given.rounds), "works": {}}
    if given.raw and given.raw.is_file() and (given.strained or given.only):
        found = json.loads(given.raw.read_text(encoding="utf-8"))
    for name, make in made.items():
        if given.only and not any(word in name for word in given.only):
            continue
        work = make()
        print(name, flush=True)
        one = found["works"].setdefault(name, {"items": work.many})
        if not given.strained:
            one["rounds"] = measure(work, given.seconds, given.rounds, options)
        one["strained"] = strained(work, given.seconds, options)
        print(json.dumps(one["strained"]), flush=True)
    found["parts"] = parts_of(made)
    text = render(found)
    print(text)
    if given.raw:
        given.raw.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    if given.output:
        given.output.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
