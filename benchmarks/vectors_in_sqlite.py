"""Why vectors lie in files beside SQLite and not in it, and what SQLite's checksums notice: both ways side by side, in one run.

    python benchmarks/vectors_in_sqlite.py        # writes results/vectors_in_sqlite.md and results/raw/vectors_in_sqlite.json; 1 GB of disk in the temporary folder, some minutes

The vectors are pixels of Fashion-MNIST (Debian's package dataset-fashion-mnist) by random projection to 128 numbers, each image with pixels shifted as often as it takes.
Blobs: a table of SQLite with the checksums of `cksumvfs`, as an index's record has them. File: a segment, as an index writes it. Each opening is in a process of its own.
"""

from __future__ import annotations

import argparse
import gzip
import itertools
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import apsw
import numpy as np
from numpy.typing import NDArray
from retrieval.serving.local.exact import nearest
from retrieval.serving.local.segment import Segment, write_segment
from retrieval.serving.store.record import FILE, Record, _register

RESULT = Path(__file__).parent / "results" / "vectors_in_sqlite.md"
RAW = RESULT.parent / "raw" / "vectors_in_sqlite.json"
IMAGES = Path("/usr/share/datasets/fashion-mnist/train-images-idx3-ubyte.gz")
QUERIES, ROWS, MORE = 32, 40, 10_000
Vectors = NDArray[np.float32]

CHILD = """
import json, resource, sys, time
import numpy as np
import vectors_in_sqlite as own
way, folder, sum_ = sys.argv[1:]
queries = np.load(f"{folder}/queries.npy")
ids = np.load(f"{folder}/ids.npy")
def memory():
    text = open("/proc/self/status").read()
    return {name: int(text.split(name + ":")[1].split()[0]) / 1024 for name in ("RssAnon", "RssFile")}
before, out = memory(), {}
def timed(name, work):
    began = time.perf_counter()
    made = work()
    out[name] = time.perf_counter() - began
    return made
opened = timed("open", lambda: own.OPEN[way](folder, sum_))
after = memory()
out["private"] = after["RssAnon"] - before["RssAnon"]
out["shared"] = after["RssFile"] - before["RssFile"]
own.nearest(queries, opened, 10)  # both are in memory from here on
timed("search", lambda: own.nearest(queries, opened, 10))
timed("rows", lambda: own.READ[way](folder, sum_, ids))
if way == "blobs":
    timed("streamed", lambda: own.streamed(folder, queries))
print(json.dumps(out))
"""


def make_vectors(count: int, width: int) -> Vectors:
    """Return projected images (count, width), the first 60,000 as they are, the others shifted."""
    with gzip.open(IMAGES) as file:
        pixels = np.frombuffer(file.read(), np.uint8, offset=16).reshape(-1, 28, 28)
    matrix = np.random.default_rng(0).normal(size=(784, width)).astype(np.float32) / np.float32(784)
    parts = []
    for turn in range(-(-count // len(pixels))):
        moved = np.roll(pixels, (turn % 3, turn // 3), axis=(1, 2)).reshape(len(pixels), -1)
        parts.append(moved.astype(np.float32) @ matrix)
    return np.concatenate(parts)[:count]


def connect(path: Path | str, vfs: str = "cksmvfs") -> apsw.Connection:
    """Open a SQLite file; with the file system of that name."""
    _register()
    connection = apsw.Connection(str(path), vfs=vfs)
    connection.execute("pragma synchronous = full; pragma cache_size = -65536")
    return connection


def write_blobs(folder: Path, vectors: Vectors) -> None:
    """Write vectors as blobs of a record of their own."""
    folder.mkdir()
    Record.create(folder)
    connection = connect(folder / FILE)
    with connection:
        connection.execute("create table vectors (n integer primary key, vector blob not null)")
        insert_blobs(connection, vectors, 0)
    connection.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_TRUNCATE)
    connection.close()


def insert_blobs(connection: apsw.Connection, vectors: Vectors, first: int) -> None:
    """Insert vectors; inside a transaction."""
    rows = ((number, row.tobytes()) for number, row in enumerate(vectors, first))
    connection.executemany("insert into vectors values (?, ?)", rows)


def open_blobs(folder: str, sum_: str) -> Vectors:
    """Read all vectors into one array."""
    connection = connect(Path(folder, "blobs", FILE))
    sql = "select n + 1, length(vector) / 4 from vectors order by n desc limit 1"
    (found,) = connection.execute(sql).fetchall()
    count, width = map(int, found)  # type: ignore[arg-type]
    out = np.empty((count, width), np.float32)
    for number, (blob,) in enumerate(connection.execute("select vector from vectors order by n")):
        out[number] = np.frombuffer(blob, np.float32)
    return out


def open_file(folder: str, sum_: str) -> Vectors:
    """Map the segment and compare it with its checksums."""
    segment = Segment(Path(folder, "one.segment"), sum_)
    segment.verify()
    return segment.arrays["vector"]


def read_blobs(folder: str, sum_: str, ids: NDArray[np.int64]) -> Vectors:
    """Read some rows."""
    connection = connect(Path(folder, "blobs", FILE))
    sql = "select vector from vectors where n in (select value from json_each(?))"
    return np.stack(
        [np.frombuffer(blob, np.float32) for (blob,) in connection.execute(sql, (json.dumps(ids.tolist()),))]
    )


def read_file(folder: str, sum_: str, ids: NDArray[np.int64]) -> Vectors:
    """Read some rows of the mapped segment."""
    return Segment(Path(folder, "one.segment"), sum_).arrays["vector"][ids]


def streamed(folder: str, queries: Vectors) -> None:
    """Search through blobs in blocks, without holding them all."""
    connection = connect(Path(folder, "blobs", FILE))
    found = connection.execute("select vector from vectors order by n")
    while rows := list(itertools.islice(found, 8192)):
        nearest(
            queries, np.frombuffer(b"".join(blob for (blob,) in rows), np.float32).reshape(len(rows), -1), 10
        )


OPEN: dict[str, Callable[[str, str], Vectors]] = {"blobs": open_blobs, "file": open_file}
READ: dict[str, Callable[[str, str, NDArray[np.int64]], Vectors]] = {"blobs": read_blobs, "file": read_file}


def adding(folder: Path, more: Vectors, first: int) -> dict[str, float]:
    """Return how long it takes to add vectors durably, in one transaction of blobs, or as a segment."""
    connection = connect(folder / "blobs" / FILE)
    began = time.perf_counter()
    with connection:
        insert_blobs(connection, more, first)
    middle = time.perf_counter()
    connection.close()
    numbers = np.arange(first, first + len(more), dtype=np.int64)
    start = time.perf_counter()
    write_segment(folder / "more.segment", numbers, {"vector": [more]})
    return {"blobs": middle - began, "file": time.perf_counter() - start}


def noticed(folder: Path, vectors: Vectors, flips: int) -> dict[str, int]:
    """Flip one bit of a small file's pages at a time and read everything; return how often SQLite said something, with checksums and without."""
    out = {}
    for name, vfs in (("cksmvfs", "cksmvfs"), ("plain", "unix")):
        path = folder / f"flip-{name}.sqlite"
        if name == "cksmvfs":
            write_blobs(folder / "flips", vectors)
            (folder / "flips" / FILE).rename(path)
        else:
            connection = connect(path, vfs)
            with connection:
                connection.execute("create table vectors (n integer primary key, vector blob not null)")
                insert_blobs(connection, vectors, 0)
            connection.close()
        content, rng, out[name] = path.read_bytes(), np.random.default_rng(1), 0
        for place, bit in zip(
            rng.integers(4096, len(content), flips), rng.integers(0, 8, flips), strict=True
        ):
            changed = bytearray(content)
            changed[place] ^= 1 << int(bit)
            path.write_bytes(changed)
            try:
                connection = connect(path, vfs)
                connection.execute("select * from vectors").fetchall()
                checked = connection.execute("pragma integrity_check").fetchall()
                out[name] += checked != [("ok",)]
                connection.close()
            except apsw.Error:
                out[name] += 1
    return out


def child(way: str, folder: Path, sum_: str) -> dict[str, float]:
    """Measure one way in a process of its own."""
    found = subprocess.run([sys.executable, "-c", CHILD, way, str(folder), sum_], capture_output=True, text=True, check=True,
                           cwd=Path(__file__).parent)  # fmt: skip
    made: dict[str, float] = json.loads(found.stdout)
    return made


def render(raw: dict[str, Any]) -> str:
    """Return the page of what `main` measured."""
    said, sizes, added, flips = raw["machine"], raw["sizes"], raw["added"], raw["flips"]
    blobs, file = (
        {key: statistics.median(run[key] for run in runs) for key in runs[0]}
        for runs in (raw["runs"]["blobs"], raw["runs"]["file"])
    )

    def row(name: str, key: str, unit: float, form: str) -> str:
        ratio = blobs[key] / max(file[key], 1e-9)
        return (
            f"| {name} | {form.format(blobs[key] * unit)} | {form.format(file[key] * unit)} | {ratio:.1f} |"
        )

    lines = [
        "# Vectors in SQLite, or in a file beside it",
        "",
        f"`python benchmarks/vectors_in_sqlite.py`, {said['date']}. {said['machine']}, {said['cores']} cores, load average at the end {said['load']:.1f}; "
        f"Python {said['python']}, NumPy {said['numpy']}, SQLite {said['sqlite']}. {raw['count']:,} × {raw['width']}, images of Fashion-MNIST by random "
        f"projection; medians of {len(raw['runs']['file'])} processes, one thread, files in the system's cache.",
        "",
        "| | blobs | segment | blobs / segment |",
        "| --- | --- | --- | --- |",
        row("searchable, checksums compared, ms", "open", 1e3, "{:.0f}"),
        f"| memory of its own, MB | {blobs['private']:.0f} | {file['private']:.0f} | |",
        f"| memory shared with other processes, MB | {blobs['shared']:.0f} | {file['shared']:.0f} | |",
        row(f"exact search of {QUERIES} queries once that is done, ms", "search", 1e3, "{:.0f}"),
        f"| the same through blobs, without holding them, ms | {blobs['streamed'] * 1e3:.0f} | {file['search'] * 1e3:.0f} | {blobs['streamed'] / file['search']:.1f} |",
        row(f"{ROWS} random rows, opening included, ms", "rows", 1e3, "{:.1f}"),
        f"| adding {MORE:,}, synced, ms | {added['blobs'] * 1e3:.0f} | {added['file'] * 1e3:.0f} | {added['blobs'] / added['file']:.1f} |",
        f"| on the disk, MB | {sizes['blobs']:.1f} | {sizes['file']:.1f} | {sizes['blobs'] / sizes['file']:.2f} |",
        "",
        f"One bit flipped behind the first page, {flips['times']} times, everything read and `integrity_check` asked after each: with the checksums of `cksumvfs` "
        f"SQLite noticed {flips['cksmvfs']} of {flips['times']}, without them {flips['plain']}.",
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure both, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=200_000)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--times", type=int, default=3)
    parser.add_argument("--flips", type=int, default=200)
    parser.add_argument("--output", type=Path, default=RESULT)
    parser.add_argument("--raw", type=Path, default=RAW)
    given = parser.parse_args()
    vectors = make_vectors(given.count + MORE, given.width)
    base, more = vectors[: given.count], vectors[given.count :]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        np.save(folder / "queries.npy", base[:: given.count // QUERIES][:QUERIES] + np.float32(0.01))
        np.save(
            folder / "ids.npy", np.sort(np.random.default_rng(2).choice(given.count, ROWS, replace=False))
        )
        write_blobs(folder / "blobs", base)
        sum_ = write_segment(
            folder / "one.segment", np.arange(given.count, dtype=np.int64), {"vector": [base]}
        )
        sizes = {
            "blobs": (folder / "blobs" / FILE).stat().st_size / 1e6,
            "file": (folder / "one.segment").stat().st_size / 1e6,
        }
        runs: dict[str, list[dict[str, float]]] = {"blobs": [], "file": []}
        for _ in range(given.times):
            for way, kept in runs.items():
                kept.append(child(way, folder, sum_))
        added = adding(folder, more, given.count)
        flips = noticed(folder, base[:2000], given.flips)
    machine = {
        "date": time.strftime("%Y-%m-%d"),
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0],
        "python": platform.python_version(),
        "numpy": np.__version__,
        "sqlite": apsw.sqlite_lib_version(),
    }
    raw = {
        "machine": machine,
        "count": given.count,
        "width": given.width,
        "runs": runs,
        "sizes": sizes,
        "added": added,
        "flips": {"times": given.flips, **flips},
    }
    given.raw.write_text(json.dumps(raw, indent=1) + "\n", encoding="utf-8")
    text = render(raw)
    given.output.write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
