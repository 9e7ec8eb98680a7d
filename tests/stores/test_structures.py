"""Structures of segments, and exact search wherever they cannot be used."""

from __future__ import annotations

import logging
import time
from pathlib import Path

import numpy as np
import pytest
from retrieval.errors import StoreError
from retrieval.serving.bundle import Bundle
from retrieval.serving.index.faiss_backends import Hnsw
from retrieval.serving.index.index import Index, open_index
from retrieval.serving.store import masks, structure, upkeep
from retrieval.serving.store.contract import Item, widths_of
from retrieval.serving.store.folder import create_local
from retrieval.serving.store.structure import StructureChoice

COUNT = 6_000


@pytest.fixture(autouse=True)
def small(monkeypatch) -> None:
    monkeypatch.setattr(structure, "MIN_ROWS", 1000)
    monkeypatch.setattr(structure, "COMPANION_MIN_ROWS", 1000)


@pytest.fixture(scope="module")
def vectors() -> np.ndarray:
    """Few directions, as features of images have: a companion is worthwhile."""
    rng = np.random.default_rng(0)
    low = rng.normal(size=(COUNT, 4)) @ rng.normal(size=(4, 16))
    return (low + 0.05 * rng.normal(size=(COUNT, 16))).astype(np.float32)


def created(folder: Path, bundle: Path, vectors: np.ndarray, wanted: StructureChoice) -> Index:
    opened = Bundle.open(bundle, threads=1)
    create_local(folder, opened, widths_of(opened), structure=wanted)
    index = open_index(folder, threads=1)
    index.upsert(
        [
            Item(str(n), str(n % 10), {"price": n % 100}, arrays={"vector": vectors[n]})
            for n in range(len(vectors))
        ]
    )
    index.store.compact()
    index.delete([str(n) for n in range(0, COUNT, 7)])
    return index


def recall(index: Index, vectors: np.ndarray, where: str | None, keep: np.ndarray) -> float:
    ids = np.flatnonzero(keep & (np.arange(COUNT) % 7 > 0))
    found = 0
    for query in vectors[1::300]:
        distances = ((vectors[ids].astype(np.float64) - query) ** 2).sum(axis=1)
        nearest = set(map(str, ids[np.argsort(distances, kind="stable")[:10]]))
        hits = index.search(query, 10, where=where)
        assert [hit.distance for hit in hits] == sorted(hit.distance for hit in hits) and len(
            hits
        ) == 10
        true = {
            str(n): np.sqrt(((vectors[n].astype(np.float64) - query) ** 2).sum())
            for n in map(int, (h.id for h in hits))
        }
        assert all(abs(true[hit.id] - hit.distance) < 1e-6 for hit in hits)
        found += len(nearest & {hit.id for hit in hits})
    return found / (10 * len(vectors[1::300]))


@pytest.mark.parametrize(
    ("wanted", "kept", "least"),
    [
        (StructureChoice("flat"), "companion", 1.0),
        (StructureChoice("hnsw"), "hnsw", 0.95),
        (StructureChoice("ivf", {"probes": 64}), "ivf", 0.95),
        (StructureChoice("ivfpq", {"probes": 64, "bytes": 8}), "ivfpq", 0.95),
        (StructureChoice("ivfpq", {"lists": 1, "bytes": 8, "expand": 20}), "ivfpq", 0.95),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_every_structure_finds(wanted, kept, least, tmp_path, plain_bundle, vectors):
    prices = np.arange(COUNT) % 100
    with created(tmp_path / "i", plain_bundle, vectors, wanted) as index:
        assert index.stats().details["structure"] == kept
        for where, keep in [
            (None, prices >= 0),
            ("price < 50", prices < 50),
            ("price = 3", prices == 3),
        ]:
            assert recall(index, vectors, where, keep) >= least
    with open_index(tmp_path / "i", threads=1) as again:
        assert recall(again, vectors, None, prices >= 0) >= least


@pytest.mark.parametrize(
    "wanted", [StructureChoice("flat"), StructureChoice("hnsw")], ids=["compact", "hnsw"]
)
def test_a_damaged_structure_is_told_and_built_again(
    wanted, tmp_path, plain_bundle, vectors, caplog
):
    created(tmp_path / "i", plain_bundle, vectors, wanted).close()
    (file,) = [path for path in (tmp_path / "i" / "arrays").iterdir() if path.suffix != ".vector"]
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    everything = np.ones(COUNT, bool)
    with open_index(tmp_path / "i", threads=1) as index, caplog.at_level(logging.WARNING):
        assert recall(index, vectors, None, everything) == 1.0
        assert "missing or was altered" in caplog.text
        index.store.compact()
        caplog.clear()
    with open_index(tmp_path / "i", threads=1) as index:
        assert recall(index, vectors, None, everything) >= 0.95 and not caplog.text


def test_a_graph_follows_its_links_over_the_vectors_where_they_lie(tmp_path, vectors):
    wide = np.zeros((COUNT, 20), np.float32)
    wide[:, 4:] = vectors
    wide.tofile(tmp_path / "wide")
    vectors.tofile(tmp_path / "vectors")
    mapped = np.memmap(tmp_path / "vectors", np.float32, "r", shape=vectors.shape)
    columns = np.memmap(tmp_path / "wide", np.float32, "r", shape=wide.shape)[:, 4:]
    first = Hnsw(m=8)
    first.build(vectors, lambda count: None)
    expected = first.search(vectors[:50], 10)
    first.save_beside(tmp_path / "links")
    for where in (mapped, columns):
        again = Hnsw(m=8)
        again.load_beside(tmp_path / "links", where)
        again.check(COUNT, 16)
        found = again.search(vectors[:50], 10)
        assert (found[1] == expected[1]).all() and (found[0] == expected[0]).all()
        del again
    assert mapped.sum() == pytest.approx(
        vectors.sum(), abs=1
    )  # what was let go of is not FAISS's to free
    for other in (vectors[:-1], vectors[:, :8]):
        with pytest.raises(StoreError, match="does not fit it"):
            Hnsw(m=8).load_beside(tmp_path / "links", other)
    with pytest.raises(StoreError, match="it holds no vectors"):
        Hnsw(m=8).load(tmp_path / "links")


def test_codes_find_more_where_more_is_measured_again(tmp_path, plain_bundle, vectors):
    found = []
    for expand in (1, 32):
        wanted = StructureChoice("ivfpq", {"bytes": 2, "lists": 1, "expand": expand})
        with created(tmp_path / f"{expand}", plain_bundle, vectors, wanted) as index:
            found.append(recall(index, vectors, None, np.ones(COUNT, bool)))
    assert found[0] < 0.9 < found[1]


def test_a_graph_that_finds_too_few_matches_gives_way_to_exact_search(
    tmp_path, plain_bundle, vectors, monkeypatch
):
    """A graph's search ends among items that do not match: seven answers for ten."""
    monkeypatch.setattr(structure, "_MAX_CANDIDATES", 0)
    monkeypatch.setattr(structure, "_RARE_SHARE", 0.0)
    monkeypatch.setattr(masks, "_SMALL", COUNT)  # the filter is asked of the record
    prices = np.arange(COUNT) % 100
    with created(
        tmp_path / "i", plain_bundle, vectors, StructureChoice("hnsw", {"m": 4, "ef_search": 8})
    ) as index:
        assert recall(index, vectors, "price = 3", prices == 3) > 0.9


@pytest.mark.parametrize("backend", ["flat", "hnsw"])
def test_the_rows_behind_a_structure_are_found_too(tmp_path, plain_bundle, vectors, backend):
    prices = np.arange(COUNT) % 100
    with created(tmp_path / "i", plain_bundle, vectors, StructureChoice(backend)) as index:
        moved = {n: -vectors[n] for n in range(1, COUNT, 7)}
        index.upsert(
            [
                Item(str(n), "moved", {"price": n % 100}, arrays={"vector": v})
                for n, v in moved.items()
            ]
        )
        now = vectors.copy()
        for n, vector in moved.items():
            now[n] = vector
        for _ in range(2):
            details = index.stats().details
            for where, keep in [
                (None, prices >= 0),
                ("price < 50", prices < 50),
                ("price = 3", prices == 3),
            ]:
                assert recall(index, now, where, keep) >= (0.95 if backend == "hnsw" else 1.0)
            index.store.compact()
        assert details["covered"] == details["rows"] == COUNT - len(range(0, COUNT, 7))


def test_the_background_builds_and_compacts(tmp_path, plain_bundle, vectors, monkeypatch):
    monkeypatch.setattr(upkeep, "_MIN_DEAD_ROWS", 100)
    bundle = Bundle.open(plain_bundle, threads=1)
    create_local(tmp_path / "i", bundle, widths_of(bundle), structure=StructureChoice("ivf"))

    def until(done):
        end = time.monotonic() + 60
        while not done(index.stats().details):
            assert time.monotonic() < end, index.stats().details
            time.sleep(0.05)

    with (
        open_index(tmp_path / "i", threads=1) as index,
        open_index(tmp_path / "i", threads=1) as other,
    ):
        items = [Item(str(n), arrays={"vector": vectors[n]}) for n in range(COUNT)]
        index.upsert(items[:3000])
        until(lambda message: message["structure"] == "ivf" and message["covered"] == 3000)
        assert len(other.search(vectors[1], 5)) == 5
        index.upsert(items[3000:3100])  # few: the structure stays as it is
        index.upsert(items[3100:])
        until(lambda message: message["covered"] == COUNT)
        index.delete([str(n) for n in range(0, COUNT, 2)])
        until(lambda message: message["rows"] == COUNT // 2 == message["covered"])
        for opened in (index, other):
            hits = opened.search(vectors[1], 200)
            assert len(hits) == 200 and hits[0].id == "1"
            assert {hit.id for hit in hits} <= {str(n) for n in range(1, COUNT, 2)}
