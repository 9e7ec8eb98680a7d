"""Searches go on while what another process has merged is verified and loaded beside them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from retrieval.errors import StoreError
from retrieval.serving.bundle import Bundle
from retrieval.serving.filters import parse_filter
from retrieval.serving.local import segment
from retrieval.serving.local.segment import Segment
from retrieval.serving.store.contract import Item, widths_of
from retrieval.serving.store.local import LocalStore
from retrieval.serving.store.structure import Wanted
from retrieval.serving.store.writing import create_local

VECTORS = np.random.default_rng(3).normal(size=(24_000, 16)).astype(np.float32)
QUERIES = np.random.default_rng(4).normal(size=(5, 16)).astype(np.float32)


def items(*numbers: int) -> list[Item]:
    return [Item(f"id{n}", metadata={"price": n % 7}, arrays={"vector": VECTORS[n]}) for n in numbers]


@pytest.fixture
def bundle(plain_bundle: Path) -> Bundle:
    return Bundle.open(plain_bundle, threads=1)


@pytest.fixture
def writer(tmp_path: Path, bundle: Bundle) -> Iterator[LocalStore]:
    create_local(tmp_path / "i", bundle, widths_of(bundle))
    with LocalStore(tmp_path / "i", upkeep=False) as store:
        yield store


@pytest.fixture
def reader(writer: LocalStore) -> Iterator[LocalStore]:
    """The same index, opened as another process does: it trusts nothing that the writer wrote."""
    with LocalStore(writer.folder) as store:
        yield store


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Until this is set, the thread beside the searches gets no further, and a search that verified a merged file itself would fail."""
    go, verify = threading.Event(), Segment.verify

    def slow(self: Segment, **said: bool) -> None:
        if threading.current_thread().name == "opening":
            assert go.wait(60)
        else:
            assert "merged" not in self.path.name or self._verified or go.is_set(), "a search verified it"
        verify(self, **said)

    monkeypatch.setattr(Segment, "verify", slow)
    yield go
    go.set()


def ids(store: LocalStore, bundle: Bundle) -> list[set[str]]:
    return [{item.id for item in found} for found in store.search(QUERIES, 20, bundle.sha256)]


def expected(numbers: list[int]) -> list[set[str]]:
    away = [((VECTORS[numbers].astype(float) - query) ** 2).sum(1) for query in QUERIES]
    return [{f"id{numbers[at]}" for at in np.argsort(one)[:20]} for one in away]


def files(store: LocalStore) -> list[str]:
    view = store.home.view
    assert view is not None
    return [piece.segment.path.name for piece in view.pieces]


def until(done: Callable[[], bool]) -> None:
    for _ in range(600):
        if done():
            return
        threading.Event().wait(0.05)
    raise AssertionError("it never came")


def test_the_older_segments_answer_until_the_merged_one_is_verified(
    writer: LocalStore, reader: LocalStore, bundle: Bundle, held: threading.Event
) -> None:
    for start in (0, 5000, 10_000):
        writer.upsert(items(*range(start, start + 5000)), bundle.sha256)
    assert ids(reader, bundle) == expected(list(range(15_000)))
    near = sorted(set.union(*expected(list(range(15_000)))))[:30]
    writer.delete(near[:15])  # these the merge drops, and the record forgets them
    writer.compact()
    gone = {int(id[2:]) for id in near[:15]}
    left = [n for n in range(15_000) if n not in gone]
    assert ids(reader, bundle) == expected(left)
    assert len(files(reader)) == 3 and not any("merged" in name for name in files(reader))
    writer.delete(near[15:])  # these are masked in segments that the record names no more
    writer.upsert(items(20_000), bundle.sha256)
    gone |= {int(id[2:]) for id in near[15:]}
    left = [n for n in range(15_000) if n not in gone] + [20_000]
    assert ids(reader, bundle) == expected(left)
    assert set(reader.get(["id20000", near[0], near[20]], arrays=True)) == {"id20000"}
    cheap = [n for n in left if n % 7 < 3]
    found = reader.search(QUERIES, 20, bundle.sha256, where=parse_filter("price < 3"))
    assert [{item.id for item in one} for one in found] == expected(cheap)
    held.set()
    until(lambda: len(files(reader)) == 1 and "merged" in files(reader)[0])
    assert ids(reader, bundle) == expected(left)


def test_what_was_written_is_found_at_once_beside_what_waits(
    writer: LocalStore, reader: LocalStore, bundle: Bundle, held: threading.Event
) -> None:
    writer.upsert(items(*range(5000)), bundle.sha256)
    writer.upsert(items(*range(5000, 10_000)), bundle.sha256)
    ids(reader, bundle)
    writer.compact()
    writer.upsert(items(*range(10_000, 15_000)), bundle.sha256)
    writer.upsert(items(*range(100)), bundle.sha256)  # again: new numbers, and the old ones are removed
    assert ids(reader, bundle) == expected(list(range(15_000)))
    assert sorted("merged" in name for name in files(reader)) == [False, False, False]
    assert len(reader.stats().details["segments"]) == 2  # what the record names, whatever answers


def test_a_merged_segment_with_new_items_is_taken_at_once(
    writer: LocalStore, reader: LocalStore, bundle: Bundle
) -> None:
    writer.upsert(items(*range(5000)), bundle.sha256)
    ids(reader, bundle)
    writer.upsert(items(*range(5000, 10_000)), bundle.sha256)
    writer.compact()
    assert ids(reader, bundle) == expected(list(range(10_000)))
    assert "merged" in files(reader)[0]


def test_a_damaged_merged_segment_is_told_and_never_used(
    writer: LocalStore,
    reader: LocalStore,
    bundle: Bundle,
    held: threading.Event,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(segment, "_PIECE", 1 << 16)  # so that the numbers' checksums do not cover the vectors
    writer.upsert(items(*range(5000)), bundle.sha256)
    writer.upsert(items(*range(5000, 10_000)), bundle.sha256)
    right = ids(reader, bundle)
    writer.compact()
    (file,) = (writer.folder / "segments").glob("*merged*.segment")
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    assert ids(reader, bundle) == right  # of the older segments
    held.set()

    until(lambda: any(file.name in key for key in reader.home.ready._failed))
    until(lambda: file.name in files(reader))
    for _ in range(2):
        with pytest.raises(StoreError, match=f"{file.name} was altered"):
            ids(reader, bundle)


def test_altered_numbers_are_told_before_anything_stands_in(
    writer: LocalStore, reader: LocalStore, bundle: Bundle
) -> None:
    writer.upsert(items(*range(5000)), bundle.sha256)
    writer.upsert(items(*range(5000, 10_000)), bundle.sha256)
    ids(reader, bundle)
    writer.compact()
    (file,) = (writer.folder / "segments").glob("*merged*.segment")
    content = bytearray(file.read_bytes())
    content[4096] ^= 1  # the lowest byte of the first number
    file.write_bytes(content)
    with pytest.raises(StoreError, match="was altered"):
        ids(reader, bundle)


def test_a_structure_is_loaded_beside_the_searches(
    writer: LocalStore, reader: LocalStore, bundle: Bundle, held: threading.Event
) -> None:
    writer.upsert(items(*range(24_000)), bundle.sha256)
    assert ids(reader, bundle) == expected(list(range(24_000)))
    writer.restructure(Wanted("hnsw"))
    writer.compact()
    assert ids(reader, bundle) == expected(list(range(24_000)))
    assert reader.home.view is not None and reader.home.view.pieces[0].structure is None
    held.set()
    until(lambda: reader.home.view.pieces[0].structure is not None)  # type: ignore[union-attr]
    found = ids(reader, bundle)
    assert sum(len(one & real) for one, real in zip(found, expected(list(range(24_000))), strict=True)) >= 90


def test_the_writer_itself_searches_what_it_merged(writer: LocalStore, bundle: Bundle) -> None:
    writer.upsert(items(*range(5000)), bundle.sha256)
    writer.upsert(items(*range(5000, 10_000)), bundle.sha256)
    ids(writer, bundle)
    writer.compact()
    assert ids(writer, bundle) == expected(list(range(10_000)))
    assert "merged" in files(writer)[0] and not writer.home.ready._written


def test_fresh_items_stay_in_memory_while_segments_change(
    writer: LocalStore, reader: LocalStore, bundle: Bundle
) -> None:
    writer.upsert(items(*range(5000)), bundle.sha256)
    writer.upsert(items(*range(20_000, 20_300)), bundle.sha256)
    ids(reader, bundle)
    assert reader.home.view is not None
    fresh = reader.home.view.fresh
    writer.upsert(items(*range(5000, 10_000)), bundle.sha256)  # a segment at once
    writer.delete([f"id{n}" for n in range(20_000, 20_100)])
    writer.upsert(items(20_400), bundle.sha256)
    assert ids(reader, bundle) == expected([*range(10_000), *range(20_100, 20_300), 20_400])
    assert reader.home.view.fresh is fresh
    writer.compact()
    assert ids(reader, bundle) == expected([*range(10_000), *range(20_100, 20_300), 20_400])
    assert reader.home.view.fresh is not fresh


def test_items_that_change_again_and_again_take_no_more_memory(writer: LocalStore, bundle: Bundle) -> None:
    for _ in range(30):
        writer.upsert(items(*range(100)), bundle.sha256)
        assert ids(writer, bundle) == expected(list(range(100)))
    assert writer.home.view is not None and writer.home.view.fresh.count <= 1200


def test_closing_ends_the_thread(
    writer: LocalStore, reader: LocalStore, bundle: Bundle, held: threading.Event
) -> None:
    writer.upsert(items(*range(5000)), bundle.sha256)
    writer.upsert(items(*range(5000, 10_000)), bundle.sha256)
    ids(reader, bundle)
    writer.compact()
    ids(reader, bundle)
    held.set()
    reader.close()
    assert reader.home.ready._thread is None
    with pytest.raises(StoreError, match="closed"):
        ids(reader, bundle)
