"""Whole stores for `scale.py`: ours in a folder, and Milvus behind its address."""
# ruff: noqa: D102  System says what each verb is

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np

from scale_systems import GRAPH, LISTS, K, Rows, System, Vectors, lists_of

STEP = 10_000


class Local(System):
    """Our store in a folder: each item has an id and two fields of metadata, and SQLite is the record."""

    def __init__(self, backend: str, options: Any, points: Any) -> None:
        self.backend, self.options, self.points, self.most = backend, options, points, 1_000_000

    def build(self, vectors: Vectors, folder: Path) -> None:
        from retrieval.serving.bundle import Bundle
        from retrieval.serving.store.contract import Item
        from retrieval.serving.store.local import LocalStore
        from retrieval.serving.store.structure import Wanted
        from retrieval.serving.store.writing import create_local

        from scaled_bundle import make_bundle

        make_bundle(folder / "bundle", vectors.shape[1], 1.0)
        wanted = Wanted(self.backend, self.options(len(vectors)))
        create_local(
            folder / "index",
            Bundle.open(folder / "bundle", threads=1),
            {"vector": vectors.shape[1]},
            structure=wanted,
        )
        store = LocalStore(folder / "index", upkeep=False)
        bundle = store.generations()[0].bundle
        for start in range(0, len(vectors), STEP):
            rows = range(start, min(start + STEP, len(vectors)))
            store.upsert(
                [
                    Item(str(n), metadata={"share": n % 100, "price": n % 997}, arrays={"vector": vectors[n]})
                    for n in rows
                ],
                bundle,
            )
        store.compact()
        store.close()

    def load(self, vectors: Vectors, folder: Path) -> None:
        from retrieval.serving.store.local import LocalStore

        self.store = LocalStore(folder / "index", upkeep=False)
        self.bundle = self.store.generations()[0].bundle
        self.store.search(vectors[:1], 1, self.bundle)

    def search(self, query: Vectors, point: dict[str, int]) -> Rows:
        view = self.store.home.view
        for made in (made for piece in view.pieces for made in piece.structure or ()) if view else ():
            for key, value in point.items():
                setattr(made, key, value)
        (items,) = self.store.search(query, K, self.bundle)
        away = np.array([item.vector for item in items], np.float64) - query
        near = np.argsort((away**2).sum(1), kind="stable")[:K]
        return np.array([int(items[at].id) for at in near], np.int64)


class Milvus(System):
    """Milvus's own index types by pymilvus, without ours: the server that the package `milvus` carries, started for each half, whose CPU and memory count."""

    def __init__(self, kind: str, options: Any, points: Any) -> None:
        self.kind, self.options, self.points, self.most = kind, options, points, 1_000_000
        self.server: Any = None

    def begin(self, folder: Path) -> None:
        from milvus import MilvusServer
        from pymilvus import MilvusClient

        self.server = MilvusServer()
        self.server.set_base_dir(str(folder / "milvus"))
        self.server.start()
        self.client = MilvusClient(f"http://127.0.0.1:{self.server.listen_port}", timeout=600)

    def build(self, vectors: Vectors, folder: Path) -> None:
        self.client.create_collection("c", schema=self.schema(vectors.shape[1]))
        for start in range(0, len(vectors), STEP):
            rows = enumerate(vectors[start : start + STEP], start)
            self.client.insert("c", [{"id": n, "vector": row.tolist()} for n, row in rows])
        self.client.flush("c")
        params = self.client.prepare_index_params()
        params.add_index(
            "vector",
            index_name="v",
            index_type=self.kind,
            metric_type="L2",
            params=self.options(len(vectors)),
        )
        self.client.create_index("c", params)
        while self.client.describe_index("c", "v")["pending_index_rows"]:
            time.sleep(0.2)
        self.client.load_collection("c")
        self.search(np.ascontiguousarray(vectors[:1]), self.points[0])  # the index is there when it answers

    def written(self, folder: Path) -> list[Path]:
        data = folder / "milvus" / "data"
        return [*data.glob("*_log"), data / "index_files"]  # without its message queue and etcd

    def schema(self, width: int) -> Any:
        from pymilvus import DataType, MilvusClient

        made = MilvusClient.create_schema(auto_id=False)
        made.add_field("id", DataType.INT64, is_primary=True)
        made.add_field("vector", DataType.FLOAT_VECTOR, dim=width)
        return made

    def load(self, vectors: Vectors, folder: Path) -> None:
        self.client.load_collection("c")
        self.search(np.ascontiguousarray(vectors[:1]), self.points[0])

    def search(self, query: Vectors, point: dict[str, int]) -> Rows:
        named = {"probes": "nprobe", "ef_search": "ef"}
        params = {"metric_type": "L2", "params": {named[key]: value for key, value in point.items()}}
        (hits,) = self.client.search("c", query.tolist(), limit=K, search_params=params, anns_field="vector")
        return np.array([hit["id"] for hit in hits], np.int64)

    def processes(self) -> list[Any]:
        import psutil

        if self.server is None:
            return []
        first = psutil.Process(self.server.server_proc.pid)
        return [first, *first.children(recursive=True)]

    def cpu(self) -> float:
        times = [process.cpu_times() for process in self.processes()]
        return super().cpu() + sum(one.user + one.system for one in times)

    def beside(self) -> int:
        return sum(process.memory_info().rss - process.memory_info().shared for process in self.processes())

    def close(self) -> None:
        if self.server is not None:
            self.server.stop()


STORES: dict[str, System] = {
    "store ivf": Local("ivf", lambda n: {"lists": lists_of(n)}, LISTS),
    "milvus flat": Milvus("FLAT", lambda n: {}, [{}]),
    "milvus sq8": Milvus("IVF_SQ8", lambda n: {"nlist": lists_of(n)}, LISTS),
    "milvus ivf": Milvus("IVF_FLAT", lambda n: {"nlist": lists_of(n)}, LISTS),
    "milvus ivfpq": Milvus("IVF_PQ", lambda n: {"nlist": lists_of(n), "m": 32, "nbits": 8}, LISTS),
    "milvus hnsw": Milvus("HNSW", lambda n: {"M": 16, "efConstruction": 128}, GRAPH),
    "store hnsw": Local("hnsw", lambda n: {"m": 16, "ef_construction": 128}, GRAPH),
}
