"""What each further process of a server takes of memory, and how connections spread over them.

    python benchmarks/processes.py      # writes results/processes.md

An index of 200,000 vectors is served by 1, 2 and 4 processes; each process has searched it before it is looked at. Resident memory counts what processes
share once for each of them; the proportional set size (PSS, /proc/PID/smaps_rollup) divides it among them, so that its sum is what the machine has less.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

import numpy as np
from retrieval.serving.bundle import Bundle
from retrieval.serving.index.creating import create_index
from retrieval.serving.index.index import Index
from retrieval.serving.store.contract import VECTOR, Item
from retrieval.serving.store.testing.bundles import FEATURES, make_bundle

RESULTS = Path(__file__).parent / "results"
WIDTH = 128
PARTS = ("Rss", "Pss", "Private_Clean", "Private_Dirty")
BURST = 64


def make(folder: Path, count: int) -> Path:
    """Make an index of random vectors."""
    bundle, path = make_bundle(folder / "bundle", width=WIDTH), folder / "i"
    create_index(path, bundle, progress=False)
    opened, drawn = Bundle.open(bundle, threads=1), np.random.default_rng(0)
    with Index.open(path, threads=1) as index:
        for start in range(0, count, 50_000):
            features = drawn.normal(size=(min(50_000, count - start), FEATURES)).astype(np.float32)
            vectors = opened.encode(features).vector
            index.upsert(
                [
                    Item(f"{start + at}", keep="nothing", arrays={VECTOR: row})
                    for at, row in enumerate(vectors)
                ]
            )
        index.store.compact()
    return path


def memory(pid: int) -> dict[str, int]:
    """Return what a process has of memory, in bytes."""
    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    rows = dict(line.split(":") for line in text.splitlines() if ":" in line and line.rstrip().endswith("kB"))
    return {name: int(rows[name].split()[0]) * 1024 for name in PARTS}


def members(pid: int) -> list[int]:
    """Return the processes that answer: the server's children, or itself where it has none that serve."""
    found = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in path.read_text().split():
            if "processes.child" in Path(f"/proc/{child}/cmdline").read_text():
                found.append(int(child))
    return found or [pid]


def owners(port: int, pids: list[int], connections: list[http.client.HTTPConnection]) -> Counter[int]:
    """Return how many connections each process has."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    inodes = {(row[1][-4:], row[2][-4:]): row[9] for row in rows}
    wanted = {f"socket:[{inodes[f'{port:04X}', f'{one.sock.getsockname()[1]:04X}']}]" for one in connections}
    found: Counter[int] = Counter(dict.fromkeys(pids, 0))
    for pid in pids:
        for each in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                found[pid] += str(each.readlink()) in wanted
    return found


def measure(index: Path, processes: int) -> tuple[list[dict[str, int]], dict[str, int], Counter[int]]:
    """Return the memory of each process and of the supervisor, and who has the connections of a burst."""
    words = [
        "serve",
        str(index),
        "--port",
        "0",
        "--workers",
        "4",
        "--idle-seconds",
        "300",
        "--processes",
        str(processes),
    ]
    server = subprocess.Popen(
        [sys.executable, "-m", "retrieval.cli", *words], stdout=subprocess.PIPE, text=True, cwd=index.parent
    )
    with server:
        try:
            assert server.stdout is not None
            port = int(server.stdout.readline().split(" at ")[1].split("/ ")[0].rpartition(":")[2])
            said = {"processes": {"ready": 0}}
            while said.get("processes", {"ready": 1})["ready"] < processes or said.get("status") != "ready":
                time.sleep(0.1)
                asking = http.client.HTTPConnection("127.0.0.1", port)
                asking.request("GET", "/readyz")
                said = json.loads(asking.getresponse().read())
                asking.close()
            pids = members(server.pid)
            spread: Counter[int] = Counter()
            for _ in range(4):  # more than enough for each process to have searched all segments
                burst = [http.client.HTTPConnection("127.0.0.1", port) for _ in range(BURST)]
                for one in burst:
                    one.connect()
                body = json.dumps({"vector": [1.0] * FEATURES, "k": 3})
                for one in burst:
                    one.request("POST", "/v1/search", body, {"Content-Type": "application/json"})
                    one.getresponse().read()
                spread += owners(port, pids, burst)
                for one in burst:
                    one.close()
            return [memory(pid) for pid in pids], memory(server.pid), spread
        finally:
            server.terminate()


def main() -> None:
    """Measure, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=200_000)
    parser.add_argument("--output", type=Path, default=RESULTS)
    given = parser.parse_args()
    rows, spreads = [], []
    with tempfile.TemporaryDirectory() as folder:
        path = make(Path(folder), given.count)
        size = sum(each.stat().st_size for each in (path / "segments").iterdir())
        for processes in (1, 2, 4):
            found, supervisor, spread = measure(path, processes)
            own = [one["Private_Clean"] + one["Private_Dirty"] for one in found]
            above = supervisor["Pss"] if processes > 1 else 0
            numbers = (
                sum(one["Rss"] for one in found),
                sum(one["Pss"] for one in found),
                sum(own) // len(own),
                above,
            )
            rows.append(f"| {processes} | " + " | ".join(f"{number / 1e6:,.0f}" for number in numbers) + " |")
            spreads.append(f"| {processes} | {', '.join(str(count) for count in sorted(spread.values()))} |")
    text = f"""# Memory of several processes

`python benchmarks/processes.py --count {given.count}`; {platform.system()}, Python {platform.python_version()}, {os.cpu_count()} cores.

An index of {given.count:,} vectors of {WIDTH} numbers, whose segments are {size / 1e6:,.0f} MB on the disk, served by 1, 2 and 4 processes that have all searched it. In MB; without the
processes that decode.

| processes | resident, added up | PSS, added up | own of each, shared with nobody | PSS of the supervisor |
|--:|--:|--:|--:|--:|
{chr(10).join(rows)}

Resident memory counts the segments' maps once for each process; PSS divides them. So PSS added up is what the server takes. The maps of a single process are shared with nobody.

Connections that were made in four bursts of {BURST}, by process:

| processes | connections |
|--:|---|
{chr(10).join(spreads)}
"""
    (given.output / "processes.md").write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
