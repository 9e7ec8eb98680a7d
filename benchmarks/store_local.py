"""Our store, for `store.py`."""
# ruff: noqa: D102  System says what each verb is

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from store_verbs import Floats, Numbers, System, shares


class Local(System):
    """Ours: the store itself, without a server or a bundle's encoder; what it proposes is measured and ordered as the index does."""

    packages = ()
    modules = ("faiss", "retrieval.serving.store.local", "retrieval.serving.store.writing")
    exact = True
    what = "flat: exact search of segments that are mapped; SQLite is the record"
    hints: ClassVar[tuple[str, ...]] = ("index/acknowledged",)
    structure: ClassVar[str] = "flat"

    def open(self) -> None:
        from retrieval.serving.bundle import Bundle
        from retrieval.serving.filters import parse_filter
        from retrieval.serving.store.contract import Item
        from retrieval.serving.store.local import LocalStore
        from retrieval.serving.store.structure import Wanted
        from retrieval.serving.store.writing import create_local

        self.item, self.parse = Item, parse_filter
        if not (self.folder / "index").exists():
            from scaled_bundle import make_bundle

            make_bundle(self.folder / "bundle", self.width, 1.0)
            bundle = Bundle.open(self.folder / "bundle")
            create_local(
                self.folder / "index", bundle, {"vector": self.width}, structure=Wanted(self.structure)
            )
        self.store: Any = LocalStore(self.folder / "index")
        self.bundle = self.store.generations()[0].bundle

    def add(self, ids: Numbers, vectors: Floats) -> None:
        rows = zip(ids.tolist(), vectors, shares(ids).tolist(), strict=True)
        items = [
            self.item(str(id), metadata={"share": share}, arrays={"vector": vector})
            for id, vector, share in rows
        ]
        self.store.upsert(items, self.bundle)

    def delete(self, ids: Numbers) -> None:
        self.store.delete(map(str, ids.tolist()))

    def search(self, queries: Floats, count: int, below: int | None) -> Sequence[Sequence[int]]:
        where = None if below is None else self.parse(f"share < {below}")
        answers = []
        for query, items in zip(
            queries, self.store.search(queries, count, self.bundle, where=where), strict=True
        ):
            away = np.array([item.vector for item in items], np.float64).reshape(-1, self.width) - query
            nearest = np.argsort((away**2).sum(axis=1), kind="stable")[:count]
            answers.append([int(items[at].id) for at in nearest])
        return answers

    def count(self) -> int:
        return self.store.count()

    def begin_load(self) -> None:
        self.store.close()
        self.store = type(self.store)(self.folder / "index", upkeep=False)  # `loaded` merges all at once

    def loaded(self) -> None:
        self.store.compact()

    def close(self) -> None:
        self.store.close()


class LocalHNSW(Local):
    """Ours, with FAISS's HNSW for each segment."""

    exact = False
    what = "hnsw: FAISS's for each segment; SQLite is the record"
    structure = "hnsw"

    def tune(self, ef: int) -> None:
        self.search(np.zeros((1, self.width), np.float32), 1, None)  # loads what is searched
        view = self.store.home.view
        for structure in (made for piece in view.pieces if view for made in piece.structure or ()):
            structure.ef_search = ef
