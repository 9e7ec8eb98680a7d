"""What is made of a segment is made of what was written: a flipped byte ends a merge, and never gets a checksum of its own."""

from __future__ import annotations

import mmap
from pathlib import Path

import numpy as np
import pytest
from retrieval.errors import StoreError
from retrieval.serving.bundle import Bundle
from retrieval.serving.local import structures
from retrieval.serving.local.upkeep import Upkeep
from retrieval.serving.store.contract import Item, widths_of
from retrieval.serving.store.local import LocalStore
from retrieval.serving.store.record import ask
from retrieval.serving.store.structure import Wanted
from retrieval.serving.store.writing import create_local

COUNT, LARGE = 8400, 4200
VECTORS = np.random.default_rng(0).normal(size=(COUNT, 16)).astype(np.float32)


def items(numbers: range) -> list[Item]:
    return [Item(f"id{n}", arrays={"vector": VECTORS[n]}) for n in numbers]


@pytest.fixture
def bundle(plain_bundle: Path) -> Bundle:
    return Bundle.open(plain_bundle, threads=1)


def exact(store: LocalStore, bundle: Bundle, ids: list[int]) -> None:
    """Compare searches with brute force."""
    for query in VECTORS[7::1500]:
        apart = ((VECTORS[ids].astype(np.float64) - query) ** 2).sum(axis=1)
        nearest = {f"id{ids[at]}" for at in np.argsort(apart)[:10]}
        assert {one.id for one in store.search(query[None], 10, bundle.sha256)[0]} == nearest


def flip(path: Path, at: int) -> None:
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as content:
        content[at] ^= 0x40


NUMBERS, ARRAY = 4096 + 8 * 5, 4096 + 36_864 + 64 * 100 + 3  # the sign or exponent of a component


@pytest.mark.parametrize("seen", [True, False], ids=["seen", "unseen"])
@pytest.mark.parametrize("at", [NUMBERS, ARRAY], ids=["numbers", "vectors"])
@pytest.mark.parametrize("made", ["merge", "structure"])
def test_a_flipped_byte_ends_what_is_made_of_a_segment(
    made: str, at: int, seen: bool, tmp_path: Path, bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(structures, "LEAST", 1000)
    wanted = {"merge": Wanted("flat"), "structure": Wanted("hnsw", {"ef_search": 4096})}[made]
    create_local(tmp_path / "i", bundle, widths_of(bundle), structure=wanted)
    sizes = {"merge": [range(LARGE), range(LARGE, COUNT)], "structure": [range(LARGE)]}[made]
    with LocalStore(tmp_path / "i", upkeep=False) as store:
        for size in sizes:
            store.upsert(items(size), bundle.sha256)
    ids = list(range(sizes[-1].stop))
    with LocalStore(tmp_path / "i", upkeep=False) as store:
        if seen:
            exact(store, bundle, ids)
        path = sorted((tmp_path / "i" / "segments").glob("*.segment"))[0]
        before = sorted(one.name for one in path.parent.iterdir())
        flip(path, at)
        with pytest.raises(StoreError, match=f"{path.name} was altered"):
            store.compact()
        assert sorted(one.name for one in path.parent.iterdir()) == before
        with pytest.raises(
            StoreError, match="was altered"
        ):  # searches that saw it whole see what became of it
            exact(store, bundle, ids)
    with LocalStore(tmp_path / "i", upkeep=False) as store, pytest.raises(StoreError, match="was altered"):
        exact(store, bundle, ids)
    flip(path, at)  # as if its copy had taken its place
    with LocalStore(tmp_path / "i", upkeep=False) as store:
        exact(store, bundle, ids)
        store.compact()
        (segment,) = store.stats().details["segments"]
        assert segment["structure"] == {"merge": None, "structure": "hnsw"}[made]
        exact(store, bundle, ids)


def test_a_segment_that_cannot_be_read_keeps_its_deletions(tmp_path: Path, bundle: Bundle) -> None:
    """Its numbers say which deletions are still needed: altered ones must not end any."""
    create_local(tmp_path / "i", bundle, widths_of(bundle))
    with LocalStore(tmp_path / "i", upkeep=False) as store:
        store.upsert(items(range(LARGE)), bundle.sha256)
        (path,) = (tmp_path / "i" / "segments").glob("*.segment")
        store.upsert(items(range(LARGE, COUNT)), bundle.sha256)
        store.delete(["id5", f"id{LARGE}"])
    with LocalStore(tmp_path / "i", upkeep=False) as store:
        flip(path, NUMBERS)
        store.writer.hold()
        tending = Upkeep(store.home, store.writer, thread=False)
        (generation,) = store.generations()
        parts = tending._parts(generation)
        tending._merge(generation, parts[1:], COUNT)
        with store.home.record.reading() as connection:
            assert len(ask(connection, "select n from removed")) == 2
        flip(path, NUMBERS)
        exact(store, bundle, [n for n in range(COUNT) if n not in (5, LARGE)])
        store.compact()
        with store.home.record.reading() as connection:
            assert ask(connection, "select n from removed") == []
        exact(store, bundle, [n for n in range(COUNT) if n not in (5, LARGE)])
