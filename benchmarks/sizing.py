"""What a server needs: memory, disk and CPU time as the number and width of vectors grow.

    python benchmarks/sizing.py # indexes in benchmarks/work/sizing; writes results/sizing.md
    python benchmarks/sizing.py --write # the page from the kept rows

Queries are vectors, so the encoder costs nothing. Memory is what the server's processes hold for
themselves (anonymous pages) and the pages of files that they map, both after the searches. CPU time
is that of all processes of the server per request, over the connections that the table names.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import time
from pathlib import Path

import httpx
import numpy as np
import psutil

from bench import WORK, Kept, Row, machine, markdown, one_thread, page, resume_arguments
from scaled_bundle import make_bundle, make_index
from serve import ask, cpu_of, started

KEYS = ("vectors", "width", "backend")
JOBS = [
    *((rows, width, "flat") for rows in (10_000, 60_000) for width in (64, 512)),
    (60_000, 64, "hnsw"),
    (60_000, 512, "hnsw"),
    (1_000_000, 64, "flat"),
    (1_000_000, 512, "flat"),
]
SECONDS, QUERIES = 4.0, 100
CONNECTIONS = 8
"""Connections at once; one for the largest index, which would refuse more on two busy cores."""


def measure(rows: int, width: int, backend: str) -> Row:
    """Create an index, serve it, and measure both."""
    folder = WORK / "sizing"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    random = np.random.default_rng(0)
    # clusters, because no index finds neighbours among independent coordinates
    centres = random.standard_normal((1000, width), np.float32)
    vectors = centres[random.integers(1000, size=rows)]
    for start in range(0, rows, 50_000):
        block = vectors[start : start + 50_000]
        block += np.float32(0.3) * random.standard_normal(block.shape, np.float32)
    queries = vectors[random.integers(rows, size=QUERIES)] + np.float32(0.01)
    make_bundle(folder / "bundle", width, 1.0)
    began = time.process_time()
    make_index(folder / "index", folder / "bundle", vectors, backend)
    built = time.process_time() - began
    del vectors
    disk = sum(path.stat().st_size for path in (folder / "index").rglob("*") if path.is_file())
    texts = [json.dumps({"vector": query.round(4).tolist(), "k": 10}) for query in queries]
    bodies = [text.encode() for text in texts]
    head = "POST /v1/search HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    requests = [f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body for body in bodies]
    words = ("-m", "retrieval.cli", "serve", str(folder / "index"), "--port", "0")
    connections = 1 if rows * width > 10**8 else CONNECTIONS
    with started(*words) as (process, port):
        while httpx.get(f"http://127.0.0.1:{port}/readyz", timeout=60).status_code != 200:
            time.sleep(0.5)  # the first search reads the vectors from the disk
        asyncio.run(ask(port, requests, connections, SECONDS))
        before, start = cpu_of(process), time.monotonic()
        count = asyncio.run(ask(port, requests, connections, SECONDS))
        seconds = time.monotonic() - start
        cpu = 1000 * (cpu_of(process) - before) / count
        top = psutil.Process(process.pid)
        pids = [member.pid for member in (top, *top.children(recursive=True))]
        memory = [memory_of(pid) for pid in pids]
    shutil.rmtree(folder)
    return {
        "vectors": rows,
        "width": width,
        "backend": backend,
        "build_cpu": built,
        "disk_mb": disk / 1e6,
        "own_mb": sum(own for own, _ in memory) / 1e6,
        "mapped_mb": sum(mapped for _, mapped in memory) / 1e6,
        "connections": connections,
        "cpu_ms": cpu,
        "per_second": count / seconds,
        "load": os.getloadavg()[0],
        "machine": machine(),
    }


def memory_of(pid: int) -> tuple[int, int]:
    """Return the bytes of a process's own memory, and of its share of mapped files."""
    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    share = {name: 1024 * int(size) for name, size in re.findall(r"(\w+): +(\d+) kB", text)}
    return share["Pss_Anon"], share["Pss_File"] + share["Pss_Shmem"]


def render(rows: list[Row]) -> str:
    """Return the page."""
    order = {job: number for number, job in enumerate(JOBS)}
    rows = sorted(rows, key=lambda row: order[tuple(row[key] for key in KEYS)])
    lines = [
        [
            f"{row['vectors']:,} × {row['width']}",
            f"`{row['backend']}`",
            f"{row['build_cpu']:.1f}",
            f"{row['disk_mb']:,.0f}",
            f"{row['own_mb']:,.0f}",
            f"{row['mapped_mb']:,.0f}",
            f"{row['connections']}",
            f"{row['cpu_ms']:.2f}",
            f"{2000 / row['cpu_ms']:,.0f}",
            f"{row['per_second']:,.0f}",
            f"{row['load']:.0f}",
        ]
        for row in rows
    ]
    head = ["vectors", "back end", "build, CPU s", "disk, MB", "own memory, MB", "mapped, MB"]
    head += [
        "connections",
        "CPU ms a request",
        "requests/s in the CPU time of two cores",
        "measured/s",
        "load",
    ]
    return page(f"""
        # What a server needs

        `python benchmarks/sizing.py`: one server process, ten nearest of a vector, searched for
        {SECONDS:g} s. *Own memory* is what the processes of the server hold for
        themselves; *mapped* is the part of the index's files in memory, which the operating system
        may take back. *Measured* counts the client and other programs on the same two cores; the
        load average says how busy they were. An image also costs its decoding and its encoder.
        {rows[0]["machine"]}.

        {markdown(head, lines)}
    """)


def main() -> None:
    """Measure what is missing, and write the page."""
    one_thread()
    kept = Kept("sizing", resume_arguments(__doc__).parse_args(), KEYS)
    for job in kept.missing(JOBS):
        kept.add(measure(*job))
    kept.finish(render(kept.rows))


if __name__ == "__main__":
    main()
