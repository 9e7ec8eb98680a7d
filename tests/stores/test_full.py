"""A disk that is full at any write: the call is refused with a sentence, nothing is damaged, and the same store writes again once there is room."""

from __future__ import annotations

import resource
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from retrieval.errors import RetrievalError, StoreError
from retrieval.serving.bundle import Bundle
from retrieval.serving.local import structures
from retrieval.serving.local.create import create_local
from retrieval.serving.local.store import LocalStore
from retrieval.serving.local.structures import Wanted
from retrieval.serving.stores.contract import Item, widths_of

VECTORS = np.random.default_rng(0).normal(size=(9000, 16)).astype(np.float32)


def items(numbers: range) -> list[Item]:
    return [Item(f"id{n}", str(n % 10), {"price": n}, arrays={"vector": VECTORS[n]}) for n in numbers]


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """Let this process write no file beyond a size: what a write then gets is what a full disk gives, or near."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)


def holds(store: LocalStore, bundle: Bundle, ids: set[str]) -> None:
    """Compare what a store holds and finds with what it should."""
    assert {one.id for one in store.scan(limit=20_000)} == ids and store.count() == len(ids)
    vectors = {id: VECTORS[int(id[2:])] for id in ids}
    for query in VECTORS[:3]:
        nearest = sorted(ids, key=lambda id: float(((vectors[id] - query) ** 2).sum()))[:5]
        assert {one.id for one in store.search(query[None], 5, bundle.sha256)[0]} == set(nearest)


CALLS: dict[str, Callable[[LocalStore, Bundle, Bundle, Path], Any]] = {
    "upsert": lambda store, bundle, other, folder: store.upsert(items(range(100, 150)), bundle.sha256),
    "large": lambda store, bundle, other, folder: store.upsert(items(range(100, 5000)), bundle.sha256),
    "delete": lambda store, bundle, other, folder: store.delete([f"id{n}" for n in range(40)]),
    "compact": lambda store, bundle, other, folder: store.compact(),
    "snapshot": lambda store, bundle, other, folder: store.snapshot(folder / "copy"),
    "begin": lambda store, bundle, other, folder: store.begin(other, widths_of(other)),
    "create": lambda store, bundle, other, folder: create_local(folder / "new", bundle, widths_of(bundle)),
}
AFTER = {"upsert": range(150), "large": range(5000), "delete": range(40, 100)}


@pytest.mark.parametrize("name", CALLS)
def test_a_write_that_finds_no_room_changes_nothing(
    name: str, tmp_path: Path, plain_bundle: Path, other_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(structures, "LEAST", 60)
    bundle, other = Bundle.open(plain_bundle, threads=1), Bundle.open(other_bundle, threads=1)
    create_local(tmp_path / "i", bundle, widths_of(bundle), structure=Wanted("hnsw"))
    ids = {f"id{n}" for n in range(100)}
    said: list[RetrievalError] = []
    with LocalStore(tmp_path / "i", upkeep=False) as store:
        store.upsert(items(range(60)), bundle.sha256)
        if name != "compact":
            store.compact()
        store.upsert(items(range(60, 100)), bundle.sha256)
        for size in (0, 40, 3000, 4096, 9000, 20_000, 40_000, 90_000, 200_000, 1 << 30):
            try:
                with files_of_at_most(size):
                    CALLS[name](store, bundle, other, tmp_path)
                break
            except RetrievalError as fault:
                said.append(fault)
            holds(store, bundle, ids)
            left = [path.name for path in tmp_path.iterdir()]
            assert sorted(one for one in left if one not in ("i", ".i.lock")) == []
        assert len(said) >= 3
        assert all(isinstance(fault, StoreError) or name == "compact" for fault in said)
        assert all("\n" not in str(fault).strip() and len(str(fault)) > 20 for fault in said)
        ids = {f"id{n}" for n in AFTER.get(name, range(100))}
        holds(store, bundle, ids)
        store.upsert(items(range(8000, 8010)), bundle.sha256)
        ids |= {f"id{n}" for n in range(8000, 8010)}
        holds(store, bundle, ids)
    with LocalStore(tmp_path / "i") as again:
        holds(again, bundle, ids)
