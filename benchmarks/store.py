"""Our local store beside other embedded stores: time, memory and disk of the same few operations.

    python benchmarks/store.py       # about five minutes; writes results/store.md
    # a part, which is not kept
    python benchmarks/store.py --rows 2000 --only "local flat" FAISS
    pip install qdrant-client lancedb chromadb # the others; a missing one is left out

Vectors are Fashion-MNIST's training images as 64 principal components of their pixels; queries are
test images. Each item has a number as its id, and one field, `share`, evenly spread over 0 to 99.
Each system runs with its defaults in a new process on one thread. Writes are measured in wall time,
because they wait for the disk, and searches in CPU time, because other programs may share the
cores.
"""

# ruff: noqa: D102  (System documents the methods)

from __future__ import annotations

import importlib.util
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench import alone, arguments, finish, machine_of, markdown, one_thread, page, status
from search import vectors_of

WIDTH, K, QUERIES, STEP = 64, 10, 200, 10_000
REPEATS = 9
"""How often durable adds of one item are measured: up to 200 of them, for at most a second."""
Floats, Numbers = NDArray[np.float32], NDArray[np.int64]


def shares(ids: Numbers) -> Numbers:
    """Return each item's field; `share < 10` matches a tenth of all items."""
    return ids * 61 % 100


class System:
    """A store of vectors in a folder.

    `open` opens or creates the store, `add` adds items and returns when the system says that they
    are written, and `delete` deletes items. `search` returns the ids nearest to each query, among
    all items or among those whose share is below a number.
    """

    open: Callable[[], None]
    add: Callable[[Numbers, Floats], None]
    delete: Callable[[Numbers], None]
    search: Callable[[Floats, int | None], Sequence[Sequence[int]]]

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def begin_load(self) -> None:
        """Prepare for a load whose steps need not be durable."""

    def loaded(self) -> None:
        """Prepare a loaded store for searches."""

    def close(self) -> None:
        """Close it."""


class Local(System):
    """Our store, without a server or an encoder."""

    structure = "flat"

    def open(self) -> None:
        from retrieval.bundle.bundle import Bundle
        from retrieval.store.contract import Item
        from retrieval.store.filters import parse_filter
        from retrieval.store.folder import create_local
        from retrieval.store.local import LocalStore
        from retrieval.store.search_structure import StructureChoice

        self.item, self.parse = Item, parse_filter
        if not (self.folder / "index").exists():
            from scaled_bundle import make_bundle

            make_bundle(self.folder / "bundle", WIDTH, 1.0)
            bundle = Bundle.open(self.folder / "bundle")
            structure = StructureChoice(self.structure)
            create_local(self.folder / "index", bundle, {"vector": WIDTH}, structure=structure)
        self.store: Any = LocalStore(self.folder / "index")
        self.bundle = self.store.generations()[0].bundle

    def add(self, ids: Numbers, vectors: Floats) -> None:
        items = [
            self.item(str(id), metadata={"share": share}, arrays={"vector": vector})
            for id, vector, share in zip(ids.tolist(), vectors, shares(ids).tolist(), strict=True)
        ]
        self.store.upsert(items, self.bundle)

    def delete(self, ids: Numbers) -> None:
        self.store.delete(map(str, ids.tolist()))

    def search(self, queries: Floats, below: int | None) -> Sequence[Sequence[int]]:
        chosen = None if below is None else self.parse(f"share < {below}")
        found = self.store.search(queries, K, self.bundle, filter=chosen)
        return [[int(item.id) for item in items][:K] for items in found]

    def loaded(self) -> None:
        self.store.compact()

    def close(self) -> None:
        self.store.close()


class LocalHNSW(Local):
    """Our store with FAISS's HNSW."""

    structure = "hnsw"


class Faiss(System):
    """FAISS's flat index in one file, which every write writes anew, syncs and renames."""

    def open(self) -> None:
        import faiss

        self.faiss, self.file = faiss, self.folder / "vectors.faiss"
        self.index = faiss.IndexIDMap2(faiss.IndexFlatL2(WIDTH))
        if self.file.exists():
            self.index = faiss.read_index(str(self.file))

    def _write(self) -> None:
        temporary = self.file.with_suffix(".tmp")
        self.faiss.write_index(self.index, str(temporary))
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.replace(self.file)

    def add(self, ids: Numbers, vectors: Floats) -> None:
        self.index.add_with_ids(np.ascontiguousarray(vectors), ids)
        self._write()

    def delete(self, ids: Numbers) -> None:
        self.index.remove_ids(ids)
        self._write()

    def search(self, queries: Floats, below: int | None) -> Sequence[Sequence[int]]:
        only = None
        if below is not None:
            ids = self.faiss.vector_to_array(self.index.id_map)
            chosen = self.faiss.IDSelectorBatch(ids[shares(ids) < below])
            only = self.faiss.SearchParameters(sel=chosen)
        return self.index.search(queries, K, params=only)[1].tolist()  # type: ignore[no-any-return]


class Qdrant(System):
    """qdrant-client's local mode: NumPy over all vectors, a row of SQLite for each point."""

    def open(self) -> None:
        from qdrant_client import QdrantClient, models

        self.models, self.client = models, QdrantClient(path=str(self.folder))
        if not self.client.collection_exists("items"):
            vectors = models.VectorParams(size=WIDTH, distance=models.Distance.EUCLID)
            self.client.create_collection("items", vectors_config=vectors)

    def begin_load(self) -> None:
        # A sync after each of 50,000 points would take half an hour. The page says so.
        connection = self.client._client.collections["items"].storage.storage
        connection.execute("pragma synchronous = off")
        connection.execute("pragma journal_mode = memory")

    def add(self, ids: Numbers, vectors: Floats) -> None:
        payloads = [{"share": share} for share in shares(ids).tolist()]
        batch = self.models.Batch(ids=ids.tolist(), vectors=vectors.tolist(), payloads=payloads)
        self.client.upsert("items", batch)

    def delete(self, ids: Numbers) -> None:
        self.client.delete("items", points_selector=self.models.PointIdsList(points=ids.tolist()))

    def search(self, queries: Floats, below: int | None) -> Sequence[Sequence[int]]:
        m, only = self.models, None
        if below is not None:
            only = m.Filter(must=[m.FieldCondition(key="share", range=m.Range(lt=below))])
        asked = [m.QueryRequest(query=query.tolist(), limit=K, filter=only) for query in queries]
        found = self.client.query_batch_points("items", asked)
        return [[int(point.id) for point in one.points] for one in found]

    def close(self) -> None:
        self.client.close()


class Lance(System):
    """LanceDB: no index on the vectors, B-trees on id and share, new files for each write."""

    def open(self) -> None:
        import lancedb
        import pyarrow as pa

        self.arrow = pa
        vector = pa.list_(pa.float32(), WIDTH)
        fields = [("id", pa.int64()), ("share", pa.int64()), ("vector", vector)]
        database = lancedb.connect(self.folder)
        self.table = database.create_table("items", schema=pa.schema(fields), exist_ok=True)

    def add(self, ids: Numbers, vectors: Floats) -> None:
        flat = self.arrow.FixedSizeListArray.from_arrays(np.ravel(vectors), WIDTH)
        columns = [self.arrow.array(ids), self.arrow.array(shares(ids)), flat]
        self.table.add(self.arrow.table(columns, schema=self.table.schema))

    def delete(self, ids: Numbers) -> None:
        self.table.delete(f"id in ({', '.join(map(str, ids.tolist()))})")

    def search(self, queries: Floats, below: int | None) -> Sequence[Sequence[int]]:
        asked = self.table.search(list(queries) if len(queries) > 1 else queries[0])
        asked = asked.distance_type("l2").limit(K).select(["id", "_distance"])
        if below is not None:
            asked = asked.where(f"share < {below}", prefilter=True)
        found = asked.to_arrow()
        ids = found["id"].to_numpy()
        of = found["query_index"].to_numpy() if len(queries) > 1 else np.zeros(len(ids), int)
        return [ids[of == number].tolist() for number in range(len(queries))]

    def loaded(self) -> None:
        from lancedb.index import BTree

        self.table.optimize()
        for column in ("id", "share"):
            self.table.create_index(column, config=BTree())


class Chroma(System):
    """Chroma: HNSW (hnswlib, M = 16), its only structure, and a log in SQLite."""

    def open(self) -> None:
        import chromadb
        from chromadb.config import Settings

        settings = Settings(anonymized_telemetry=False)
        self.client = chromadb.PersistentClient(str(self.folder), settings=settings)
        self.items = self.client.get_or_create_collection(
            "items", configuration={"hnsw": {"space": "l2"}}, embedding_function=None
        )

    def add(self, ids: Numbers, vectors: Floats) -> None:
        most = self.client.get_max_batch_size()
        for start in range(0, len(ids), most):
            some = ids[start : start + most]
            self.items.add(
                ids=[str(id) for id in some.tolist()],
                embeddings=vectors[start : start + most],
                metadatas=[{"share": share} for share in shares(some).tolist()],
            )

    def delete(self, ids: Numbers) -> None:
        self.items.delete(ids=[str(id) for id in ids.tolist()])

    def search(self, queries: Floats, below: int | None) -> Sequence[Sequence[int]]:
        only = None if below is None else {"share": {"$lt": below}}
        found = self.items.query(query_embeddings=queries, n_results=K, where=only, include=[])
        return [[int(id) for id in one] for one in found["ids"]]


SYSTEMS: dict[str, tuple[type[System], str, str]] = {
    "local flat": (Local, "apsw", "apsw"),
    "local hnsw": (LocalHNSW, "apsw", "faiss"),
    "FAISS flat": (Faiss, "faiss-cpu", "faiss"),
    "qdrant-client": (Qdrant, "qdrant-client", "qdrant_client"),
    "LanceDB": (Lance, "lancedb", "lancedb"),
    "Chroma": (Chroma, "chromadb", "chromadb"),
}
"""Each system's class, its package, and its module."""


def timed(call: Callable[[int], Any], seconds: float, most: int) -> dict[str, float]:
    """Call a function with 0, 1, … for some seconds; return wall and CPU milliseconds per call."""
    count, wall, cpu = 0, time.perf_counter(), time.process_time()
    while count < most and (not count or time.perf_counter() - wall < seconds):
        call(count)
        count += 1
    spent = (time.perf_counter() - wall, time.process_time() - cpu)
    return {"wall": 1000 * spent[0] / count, "cpu": 1000 * spent[1] / count, "calls": count}


def measure(folder: Path, name: str, rows: int, seconds: float) -> dict[str, Any]:
    """Return the cost of a system's operations in an empty folder."""
    one_thread()
    vectors, queries = vectors_of(rows, WIDTH, power=0.0)
    queries = np.ascontiguousarray(queries[: 10 * QUERIES], np.float32)
    ids, kind = np.arange(rows), SYSTEMS[name][0]
    system = kind(folder)
    system.open()
    system.begin_load()
    parts = [slice(start, start + STEP) for start in range(0, rows, STEP)]
    row: dict[str, Any] = {}
    row["load"] = timed(lambda n: system.add(ids[parts[n]], vectors[parts[n]]), 1e9, len(parts))
    system.loaded()
    system.close()
    row["MB"] = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) / 2**20
    system = kind(folder)
    before = status("VmRSS")
    row["open and search"] = timed(
        lambda _: (system.open(), system.search(queries[:1], None)), 0, 1
    )
    row["memory"] = (status("VmRSS") - before) / 2**20

    def search(batch: int, below: int | None) -> dict[str, float]:
        parts = lambda n: queries[n * batch % QUERIES :][:batch]  # noqa: E731
        return timed(lambda n: system.search(parts(n), below), seconds, QUERIES)

    system.search(queries[:1], 10)  # the first filter reads the fields
    row["search 1"], row["search 32"] = search(1, None), search(32, None)
    row["search 1, filtered"] = search(1, 10)
    away = ((vectors[:, None] - queries[None, :20]) ** 2).sum(2)
    answers = system.search(queries[:20], None)
    limit = np.sort(away, axis=0)[K - 1] * (1 + 1e-5)
    row["recall"] = float(np.mean([away[one, n] <= limit[n] for n, one in enumerate(answers)]))
    new = vectors[::-1]
    for count in (1, 100):
        start = 10**6 * count
        row[f"add {count}"] = timed(
            lambda n, c=count, s=start: system.add(np.arange(s + n * c, s + n * c + c), new[:c]),
            seconds,
            50,
        )  # type: ignore[misc]
    start = 2 * 10**8

    def add_one(n: int) -> None:
        system.add(np.arange(start + n, start + n + 1), new[:1])

    row["adds of one"] = []
    for _ in range(REPEATS):
        row["adds of one"].append(timed(add_one, seconds, 200))
        start += 200
    row["delete 100"] = timed(
        lambda n: system.delete(ids[n * 100 :][:100]), seconds, min(10, rows // 200)
    )
    system.close()
    return row


COLUMNS: dict[str, Callable[[dict[str, Any]], str]] = {
    "10,000 added, s": lambda row: f"{row['load']['wall'] / 1000:.2f}",
    "folder, MB": lambda row: f"{row['MB']:.0f}",
    "opened, first search, ms": lambda row: f"{row['open and search']['wall']:.0f}",
    "memory added, MB": lambda row: f"{row['memory']:.0f}",
    "1 query, CPU ms": lambda row: f"{row['search 1']['cpu']:.2f}",
    "32 queries": lambda row: f"{row['search 32']['cpu']:.2f}",
    "1, a tenth matches": lambda row: f"{row['search 1, filtered']['cpu']:.2f}",
    "recall": lambda row: f"{row['recall']:.3f}",
    "add 1, ms": lambda row: f"{row['add 1']['wall']:.1f}",
    "add 100": lambda row: f"{row['add 100']['wall']:.1f}",
    "delete 100": lambda row: f"{row['delete 100']['wall']:.1f}",
}


def adds_of_one(row: dict[str, Any]) -> list[str]:
    """Return CPU and wall milliseconds of a durable add: the least, median and most of repeats."""
    cells = []
    for clock in ("cpu", "wall"):
        times = sorted(repeat[clock] for repeat in row["adds of one"])
        cells.append(f"{times[0]:.2f}, **{statistics.median(times):.2f}**, {times[-1]:.2f}")
    return cells


def render(raw: dict[str, Any]) -> str:
    lines = [
        [name, *(cell(row) for cell in COLUMNS.values())] for name, row in raw["systems"].items()
    ]
    systems = raw["systems"].items()
    return page(f"""
        # The local store and others that are embedded

        `python benchmarks/store.py`. {raw["rows"]:,} vectors of images with {WIDTH} numbers, {K}
        nearest, one thread, each system with its defaults in a new process. {raw["machine"]},
        {raw["versions"]}; load average {raw["load"]} at the start: other programs share the cores
        and the disk, so compare ratios. Searches are CPU milliseconds of a call; the rest is wall
        time. Our store returns whole items with their vectors, the others return ids. FAISS keeps
        no fields and rewrites its file with every write. qdrant-client syncs after every point,
        which was turned off for the load.

        {markdown(["", *COLUMNS], lines)}

        ## A durable add of one item

        Milliseconds of one call that returns when the item is on the disk: the least, median and
        most of {REPEATS} measurements of up to 200 calls each, after the adds above. Wanted: at
        most 0.60 ms of CPU time.

        {markdown(["", "CPU ms", "wall ms"], [[name, *adds_of_one(row)] for name, row in systems])}
    """)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--rows", type=int, default=50_000)
    parser.add_argument(
        "--only", nargs="*", help="systems whose names have these words; nothing is kept"
    )
    parser.add_argument(
        "--seconds", type=float, default=1.0, help="most seconds for each kind of call"
    )
    options = parser.parse_args()
    one_thread()
    names = [
        name
        for name, (_, _, module) in SYSTEMS.items()
        if importlib.util.find_spec(module)
        and (not options.only or any(word in name for word in options.only))
    ]
    packages = dict.fromkeys(SYSTEMS[name][1] for name in names)
    raw: dict[str, Any] = {**machine_of(*packages), "rows": options.rows, "systems": {}}
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            job = Path(folder), name, options.rows, options.seconds
            raw["systems"][name] = alone(measure, *job)
        print(name, raw["systems"][name], file=sys.stderr, flush=True)
    finish("store", raw, render(raw), keep=not options.only)


if __name__ == "__main__":
    main()
