"""The peers of `store.py`. Each is imported only in a process of its own environment."""
# ruff: noqa: D101, D102  System says what each verb is

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from store_verbs import Floats, Numbers, System, shares, sync


class Qdrant(System):
    packages = ("qdrant-client",)
    modules = ("qdrant_client",)
    exact = True
    what = "NumPy over all vectors; a row of SQLite for each point, a transaction each"

    def open(self) -> None:
        from qdrant_client import QdrantClient, models

        self.models = models
        self.client = QdrantClient(path=str(self.folder))
        if not self.client.collection_exists("items"):
            vectors = models.VectorParams(size=self.width, distance=models.Distance.EUCLID)
            self.client.create_collection("items", vectors_config=vectors)

    def begin_load(self) -> None:
        # It syncs after every point: a million would take an hour. This is said on the page.
        connection = self.client._client.collections["items"].storage.storage
        connection.execute("pragma synchronous = off")
        connection.execute("pragma journal_mode = memory")

    def add(self, ids: Numbers, vectors: Floats) -> None:
        payloads = [{"share": share} for share in shares(ids).tolist()]
        self.client.upsert(
            "items", self.models.Batch(ids=ids.tolist(), vectors=vectors.tolist(), payloads=payloads)
        )

    def delete(self, ids: Numbers) -> None:
        self.client.delete("items", points_selector=self.models.PointIdsList(points=ids.tolist()))

    def search(self, queries: Floats, count: int, below: int | None) -> Sequence[Sequence[int]]:
        m, only = self.models, None
        if below is not None:
            only = m.Filter(must=[m.FieldCondition(key="share", range=m.Range(lt=below))])
        asked = [m.QueryRequest(query=query.tolist(), limit=count, filter=only) for query in queries]
        return [[point.id for point in one.points] for one in self.client.query_batch_points("items", asked)]

    def count(self) -> int:
        return int(self.client.count("items", exact=True).count)

    def close(self) -> None:
        self.client.close()


class Milvus(System):
    packages = ("pymilvus", "milvus-lite", "faiss-cpu")
    modules = ("pymilvus", "milvus_lite.adapter.grpc.server", "faiss")
    exact = True
    what = "FLAT (NumPy) in segments of 100,000; a log in Arrow, then Parquet"
    index: ClassVar[dict[str, Any]] = {"index_type": "FLAT"}

    def open(self) -> None:
        from pymilvus import DataType, MilvusClient

        self.parameters: dict[str, Any] = {}
        self.client = MilvusClient(str(self.folder / "store.db"))
        if not self.client.has_collection("items"):
            schema = MilvusClient.create_schema(auto_id=False, enable_dynamic_field=False)
            schema.add_field("id", DataType.INT64, is_primary=True)
            schema.add_field("vector", DataType.FLOAT_VECTOR, dim=self.width)
            schema.add_field("share", DataType.INT64)
            index = self.client.prepare_index_params()
            index.add_index("vector", metric_type="L2", **self.index)
            self.client.create_collection("items", schema=schema, index_params=index)
        self.client.load_collection("items")

    def add(self, ids: Numbers, vectors: Floats) -> None:
        rows = zip(ids.tolist(), vectors, shares(ids).tolist(), strict=True)
        self.client.insert(
            "items", [{"id": id, "vector": vector, "share": share} for id, vector, share in rows]
        )

    def delete(self, ids: Numbers) -> None:
        self.client.delete("items", ids=ids.tolist())

    def search(self, queries: Floats, count: int, below: int | None) -> Sequence[Sequence[int]]:
        only = "" if below is None else f"share < {below}"
        found = self.client.search(
            "items", list(queries), filter=only, limit=count,
            search_params={"metric_type": "L2", "params": self.parameters},
        )  # fmt: skip
        return [[hit["id"] for hit in one] for one in found]

    def count(self) -> int:
        return int(self.client.query("items", filter="", output_fields=["count(*)"])[0]["count(*)"])

    def loaded(self) -> None:
        self.client.flush("items")

    def close(self) -> None:
        self.client.close()


class MilvusHNSW(Milvus):
    exact = False
    what = "HNSW (FAISS, M = 16) for each segment of 100,000"
    base = "milvus-lite"

    def loaded(self) -> None:
        self.client.release_collection("items")
        self.client.drop_index("items", "vector")
        index = self.client.prepare_index_params()
        index.add_index(
            "vector", index_type="HNSW", metric_type="L2", params={"M": 16, "efConstruction": 100}
        )
        self.client.create_index("items", index)
        self.client.load_collection("items")

    def tune(self, ef: int) -> None:
        self.parameters = {"ef": ef}


class Lance(System):
    packages = ("lancedb", "pyarrow")
    modules = ("lancedb", "lancedb.index", "pyarrow")
    exact = True
    what = "no index on the vectors, B-trees on id and share; new files for each write"

    def open(self) -> None:
        import lancedb
        import pyarrow

        self.arrow, self.ef = pyarrow, 0
        self.database = lancedb.connect(self.folder)
        self.schema = pyarrow.schema(
            [("id", pyarrow.int64()), ("share", pyarrow.int64()), ("vector", pyarrow.list_(pyarrow.float32(), self.width))]
        )  # fmt: skip
        self.table = self.database.create_table("items", schema=self.schema, exist_ok=True)

    def add(self, ids: Numbers, vectors: Floats) -> None:
        columns = [
            self.arrow.array(ids),
            self.arrow.array(shares(ids)),
            self.arrow.FixedSizeListArray.from_arrays(np.ravel(vectors), self.width),
        ]
        self.table.add(self.arrow.table(columns, schema=self.schema))

    def delete(self, ids: Numbers) -> None:
        self.table.delete(f"id in ({', '.join(map(str, ids.tolist()))})")

    def search(self, queries: Floats, count: int, below: int | None) -> Sequence[Sequence[int]]:
        asked = self.table.search(list(queries) if len(queries) > 1 else queries[0])
        asked = asked.distance_type("l2").limit(count).select(["id", "_distance"])
        if self.ef:
            asked = asked.nprobes(1).ef(self.ef).refine_factor(4)
        if below is not None:
            asked = asked.where(f"share < {below}", prefilter=True)
        found = asked.to_arrow()
        ids = found["id"].to_numpy()
        if len(queries) == 1:
            return [ids.tolist()]
        of = found["query_index"].to_numpy()
        return [ids[of == number].tolist() for number in range(len(queries))]

    def count(self) -> int:
        return int(self.table.count_rows())

    def loaded(self) -> None:
        from lancedb.index import BTree

        self.table.optimize()
        for column in ("id", "share"):
            self.table.create_index(column, config=BTree())

    def close(self) -> None:
        pass


class LanceHNSW(Lance):
    exact = False
    what = "IVF_HNSW_SQ of one partition (M = 20), 40 candidates measured again, so ef of 40 or more"
    base = "lancedb"

    def loaded(self) -> None:
        from lancedb.index import HnswSq

        self.table.create_index("vector", config=HnswSq(distance_type="l2", num_partitions=1))

    def tune(self, ef: int) -> None:
        self.ef = max(ef, 40)  # it wants as many as are measured again


class Chroma(System):
    packages = ("chromadb",)
    modules = ("chromadb", "chromadb.api.rust")
    exact = False
    what = "HNSW (hnswlib, M = 16), its only structure; a log in SQLite"

    def open(self) -> None:
        import chromadb
        from chromadb.config import Settings

        self.client = chromadb.PersistentClient(
            str(self.folder), settings=Settings(anonymized_telemetry=False)
        )
        self.items = self.client.get_or_create_collection(
            "items", configuration={"hnsw": {"space": "l2"}}, embedding_function=None
        )
        self.most = self.client.get_max_batch_size()

    def add(self, ids: Numbers, vectors: Floats) -> None:
        for start in range(0, len(ids), self.most):
            some = ids[start : start + self.most]
            self.items.add(
                ids=[str(id) for id in some.tolist()],
                embeddings=vectors[start : start + self.most],
                metadatas=[{"share": share} for share in shares(some).tolist()],
            )

    def delete(self, ids: Numbers) -> None:
        self.items.delete(ids=[str(id) for id in ids.tolist()])

    def search(self, queries: Floats, count: int, below: int | None) -> Sequence[Sequence[int]]:
        only = None if below is None else {"share": {"$lt": below}}
        found = self.items.query(query_embeddings=queries, n_results=count, where=only, include=[])
        return [[int(id) for id in one] for one in found["ids"]]

    def count(self) -> int:
        return int(self.items.count())

    def tune(self, ef: int) -> None:
        self.items.modify(configuration={"hnsw": {"ef_search": ef}})


class Faiss(System):
    packages = ("faiss-cpu",)
    modules = ("faiss",)
    exact = True
    what = "IndexFlatL2; every write writes the whole index anew, syncs it and renames it"

    def open(self) -> None:
        import faiss

        self.faiss, self.ef, self.lazy = faiss, 0, False
        faiss.omp_set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
        self.files = self.folder / "vectors.faiss", self.folder / "ids.npy"
        if self.files[0].exists():
            self.index, self.ids = faiss.read_index(str(self.files[0])), np.load(self.files[1])
        else:
            self.index, self.ids = self.empty(), np.empty(0, np.int64)
        self.shares = shares(self.ids)

    def empty(self) -> Any:
        return self.faiss.IndexFlatL2(self.width)

    def begin_load(self) -> None:
        self.lazy = True

    def loaded(self) -> None:
        self.lazy = False
        self._write()

    def _write(self) -> None:
        self.shares = shares(self.ids)
        if self.lazy:
            return
        for file, write in zip(
            self.files, (self._index_to, lambda name: np.save(name, self.ids)), strict=True
        ):
            temporary = file.with_suffix(f".tmp{file.suffix}")
            write(str(temporary))
            sync(temporary)
            temporary.replace(file)
        sync(self.folder)

    def _index_to(self, name: str) -> None:
        self.faiss.write_index(self.index, name)

    def add(self, ids: Numbers, vectors: Floats) -> None:
        self.index.add(np.ascontiguousarray(vectors))
        self.ids = np.concatenate([self.ids, ids])
        self._write()

    def delete(self, ids: Numbers) -> None:
        rows = np.flatnonzero(np.isin(self.ids, ids))
        self.index.remove_ids(self.faiss.IDSelectorBatch(rows))
        self.ids = np.delete(self.ids, rows)
        self._write()

    def search(self, queries: Floats, count: int, below: int | None) -> Sequence[Sequence[int]]:
        only = None
        if below is not None:
            bits = np.packbits(self.shares < below, bitorder="little")
            only = self.faiss.IDSelectorBitmap(bits)
        # pytorch-metric-learning, imported elsewhere, has FAISS's own module put a narrower function in the place of `search`
        search = getattr(self.index, "search_numpy", self.index.search)
        rows = search(queries, count, params=self.parameters(only))[1]
        return [self.ids[row[row >= 0]].tolist() for row in rows]

    def parameters(self, only: Any) -> Any:
        return self.faiss.SearchParameters(sel=only)

    def count(self) -> int:
        return int(self.index.ntotal)


class FaissHNSW(Faiss):
    exact = False
    what = "IndexHNSWFlat (M = 32); every write writes the whole index anew; it cannot delete"

    def empty(self) -> Any:
        return self.faiss.IndexHNSWFlat(self.width, 32)

    def parameters(self, only: Any) -> Any:
        return self.faiss.SearchParametersHNSW(sel=only, efSearch=self.ef or 16)

    def tune(self, ef: int) -> None:
        self.ef = ef

    def delete(self, ids: Numbers) -> None:
        raise NotImplementedError
