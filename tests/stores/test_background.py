"""What searches feel of the work beside them: they load nothing that somebody else could have loaded, and keep their threads."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from retrieval.serving.bundle import Bundle
from retrieval.serving.index.faiss_backends import Hnsw
from retrieval.serving.local import home, ready, structures
from retrieval.serving.local.aside import aside
from retrieval.serving.runtime import load_faiss
from retrieval.serving.store.contract import Item, widths_of
from retrieval.serving.store.local import LocalStore
from retrieval.serving.store.structure import Wanted
from retrieval.serving.store.writing import create_local

VECTORS = np.random.default_rng(0).normal(size=(9000, 16)).astype(np.float32)


def items(numbers: range) -> list[Item]:
    return [Item(f"id{n}", arrays={"vector": VECTORS[n]}) for n in numbers]


def nearest(store: LocalStore, bundle: Bundle, count: int) -> None:
    for query in VECTORS[3:count:1000]:
        apart = ((VECTORS[:count].astype(np.float64) - query) ** 2).sum(axis=1)
        found = {one.id for one in store.search(query[None], 5, bundle.sha256)[0]}
        assert found == {f"id{at}" for at in np.argsort(apart)[:5]}


def beside(work: Callable[[], Any]) -> None:
    """Do something in a thread called "searching"."""
    failed: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as fault:
            failed.append(fault)

    thread = threading.Thread(target=run, name="searching")
    thread.start()
    thread.join()
    if failed:
        raise failed[0]


def test_no_search_loads_what_was_merged_or_is_served_from_now_on(
    tmp_path: Path, plain_bundle: Path, other_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(structures, "LEAST", 1000)
    bundle, other = (Bundle.open(path, threads=1) for path in (plain_bundle, other_bundle))
    create_local(tmp_path / "i", bundle, widths_of(bundle), structure=Wanted("hnsw", {"ef_search": 4096}))
    by: dict[str, list[str]] = {"load": [], "refresh": []}
    load, refreshed = ready.Ready.load, home.refreshed

    def loaded(*given: Any) -> Any:
        by["load"].append(threading.current_thread().name)
        return load(*given)

    def refreshing(*given: Any, **named: Any) -> Any:
        by["refresh"].append(threading.current_thread().name)
        return refreshed(*given, **named)

    monkeypatch.setattr(ready.Ready, "load", loaded)
    monkeypatch.setattr(home, "refreshed", refreshing)
    with LocalStore(tmp_path / "i", upkeep=False) as store:
        for start in (0, 4500):
            store.upsert(items(range(start, start + 4500)), bundle.sha256)
        beside(lambda: nearest(store, bundle, 9000))
        for made in by.values():
            made.clear()
        store.compact()
        beside(lambda: nearest(store, bundle, 9000))
        generation = store.begin(other, widths_of(other))
        while pending := store.pending(generation, 5000):
            store.embed(
                generation, [Item(one.id, arrays={"vector": VECTORS[int(one.id[2:])]}) for one in pending]
            )
        store.compact()
        beside(lambda: nearest(store, bundle, 9000))
        for made in by.values():
            made.clear()
        assert store.switch(generation)
        beside(lambda: nearest(store, other, 9000))
        assert by["load"] and "searching" not in by["load"]
        assert by["refresh"] and "searching" not in by["refresh"]


def test_building_leaves_searches_a_core_and_their_threads(
    tmp_path: Path, plain_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    faiss = load_faiss()
    monkeypatch.setattr(structures, "LEAST", 1000)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    before, build = faiss.omp_get_max_threads(), Hnsw.build
    seen: list[tuple[int, int]] = []

    def looked(self: Hnsw, *given: Any) -> None:
        seen.append((threading.get_ident(), faiss.omp_get_max_threads()))
        build(self, *given)

    monkeypatch.setattr(Hnsw, "build", looked)
    bundle = Bundle.open(plain_bundle, threads=1)
    create_local(tmp_path / "i", bundle, widths_of(bundle), structure=Wanted("hnsw"))
    with LocalStore(tmp_path / "i", upkeep=False) as store:
        store.upsert(items(range(4500)), bundle.sha256)
        store.compact()  # nobody has searched: a command that was told to
        assert seen.pop() == (threading.get_ident(), before)
        store.search(VECTORS[:1], 5, bundle.sha256)
        faiss.omp_set_num_threads(3)
        try:
            store.upsert(items(range(4500, 9000)), bundle.sha256)
            store.compact()
            ((thread, threads),) = seen
            assert thread != threading.get_ident()
            assert threads == max(1, min(3, cores - 1))
            assert faiss.omp_get_max_threads() == 3
        finally:
            faiss.omp_set_num_threads(before)


def test_what_fails_aside_fails_here() -> None:
    assert aside(lambda: 3) == 3
    with pytest.raises(KeyError, match="gone"):
        aside(lambda: {}["gone"])
