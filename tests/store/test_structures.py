"""Search structures, and exact search where they cannot be used."""

import logging
import threading
import time
from pathlib import Path
from unittest.mock import Mock

import faiss
import numpy as np
import pytest
import wire
from onnx import TensorProto, helper
from retrieval.bundle.bundle import Bundle
from retrieval.errors import PluginError, StoreError
from retrieval.index.adapter_bundles import make_adapter_bundle
from retrieval.index.index import Index, open_index
from retrieval.index.integrity import check_index
from retrieval.store import local, masks, search_structure, snapshot_view, upkeep
from retrieval.store.contract import Item, widths_of
from retrieval.store.faiss_backends import Hnsw
from retrieval.store.folder import create_local
from retrieval.store.local import LocalStore
from retrieval.store.record import ask
from retrieval.store.search_structure import StructureChoice

from retrieval_engines.testing.small_bundles import graph_bytes, linear_head

COUNT = 6_000


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(search_structure, "MIN_ROWS", 1000)
    monkeypatch.setattr(search_structure, "COMPANION_MIN_ROWS", 1000)


@pytest.fixture(scope="module")
def vectors():
    """Few directions, as features of images have: a companion is worthwhile."""
    rng = np.random.default_rng(0)
    low = rng.normal(size=(COUNT, 4)) @ rng.normal(size=(4, 16))
    return (low + 0.05 * rng.normal(size=(COUNT, 16))).astype(np.float32)


def created(folder: Path, bundle: Bundle, vectors: np.ndarray, wanted: StructureChoice) -> Index:
    create_local(folder, bundle, widths_of(bundle), structure=wanted)
    index = open_index(folder, threads=1)
    index.upsert(
        [
            Item(str(n), str(n % 10), {"price": n % 100}, arrays={"vector": vector})
            for n, vector in enumerate(vectors)
        ]
    )
    index.store.compact()
    index.delete([str(n) for n in range(0, COUNT, 7)])
    return index


PRICES = np.arange(COUNT) % 100
FILTERS = [(None, PRICES >= 0), ("price < 50", PRICES < 50), ("price = 3", PRICES == 3)]


def recall(index: Index, vectors: np.ndarray, filter: str | None, keep: np.ndarray) -> float:
    """The share of true neighbours in answers, whose distances are those of plain arithmetic."""
    ids = np.flatnonzero(keep & (np.arange(COUNT) % 7 > 0))
    double, count, queries = vectors.astype(np.float64), 0, vectors[1::300]
    for query in queries:
        apart = np.sqrt(((double - query) ** 2).sum(axis=1))
        nearest = set(map(str, ids[np.argsort(apart[ids], kind="stable")[:10]]))
        hits = index.search(query, 10, filter=filter)
        distances = [hit.distance for hit in hits]
        assert distances == sorted(distances) and len(hits) == 10
        assert all(abs(apart[int(hit.id)] - hit.distance) < 1e-6 for hit in hits)
        count += len(nearest & {hit.id for hit in hits})
    return count / (10 * len(queries))


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
def test_every_structure_finds(wanted, kept, least, tmp_path, bundle, vectors):
    with created(tmp_path / "i", bundle, vectors, wanted) as index:
        assert index.stats().details["structure"] == kept
        for filter, keep in FILTERS:
            assert recall(index, vectors, filter, keep) >= least
    with open_index(tmp_path / "i", threads=1) as again:
        assert recall(again, vectors, *FILTERS[0]) >= least


@pytest.mark.parametrize("backend", ["flat", "hnsw"])
def test_a_damaged_structure_is_told_and_built_again(backend, tmp_path, bundle, vectors, caplog):
    created(tmp_path / "i", bundle, vectors, StructureChoice(backend)).close()
    (file,) = [path for path in (tmp_path / "i" / "arrays").iterdir() if path.suffix != ".vector"]
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    with open_index(tmp_path / "i", threads=1) as index, caplog.at_level(logging.WARNING):
        assert recall(index, vectors, *FILTERS[0]) == 1.0
        assert "missing or was altered" in caplog.text
        index.store.compact()
        caplog.clear()
    with open_index(tmp_path / "i", threads=1) as index:
        assert recall(index, vectors, *FILTERS[0]) >= 0.95 and not caplog.text


@pytest.mark.parametrize(
    ("owner", "name", "says"),
    [(search_structure, "make_backend", "No plugin."), (Hnsw, "load", "The new structure of ")],
)
def test_a_structure_that_cannot_be_used_is_tried_with_pauses(
    owner, name, says, tmp_path, bundle, vectors, caplog, monkeypatch
):
    """Once it was tried hundreds of times a second, with the index locked."""
    created(tmp_path / "i", bundle, vectors, StructureChoice("hnsw")).close()
    before = sorted(path.name for path in (tmp_path / "i" / "arrays").iterdir())
    monkeypatch.setattr(owner, name, Mock(side_effect=PluginError("No plugin.")))
    step = Mock(wraps=upkeep.Upkeep.step)
    monkeypatch.setattr(upkeep.Upkeep, "step", lambda self: step(self))
    with open_index(tmp_path / "i", threads=1) as index:
        assert recall(index, vectors, *FILTERS[0]) == 1.0
        index.delete(["1"])
        wire.until(lambda: f"failed: {says}" in caplog.text)
        time.sleep(1)
        assert step.call_count == caplog.text.count(f"failed: {says}") == 1
        assert sorted(path.name for path in (tmp_path / "i" / "arrays").iterdir()) == before


def test_the_pause_of_work_that_always_fails_has_a_limit(tmp_path, bundle, monkeypatch):
    """After a thousand failures the doubled pause was no float any more, and the thread ended."""
    create_local(tmp_path / "i", bundle, widths_of(bundle))
    step = Mock(side_effect=StoreError("The disk fails."))
    monkeypatch.setattr(upkeep.Upkeep, "step", step)
    monkeypatch.setattr(upkeep, "_LONGEST_PAUSE", 0.0)
    with LocalStore(tmp_path / "i") as store:
        store.upkeep.wake()
        wire.until(lambda: step.call_count > 1100)


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
    first.save(tmp_path / "links")
    for files in (mapped, columns):
        again = Hnsw(m=8)
        again.load(tmp_path / "links", files)
        distances, rows = again.search(vectors[:50], 10)
        assert (rows == expected[1]).all() and (distances == expected[0]).all()
        del again
    assert mapped.sum() == pytest.approx(vectors.sum(), abs=1)  # FAISS did not free the vectors
    for other in (vectors[:-1], vectors[:, :8]):
        with pytest.raises(StoreError, match="It holds 6,000 vectors of 16 numbers instead of"):
            Hnsw(m=8).load(tmp_path / "links", other)


def test_codes_find_more_where_more_is_measured_again(tmp_path, bundle, vectors):
    recalls = []
    for expand in (1, 32):
        wanted = StructureChoice("ivfpq", {"bytes": 2, "lists": 1, "expand": expand})
        with created(tmp_path / f"{expand}", bundle, vectors, wanted) as index:
            recalls.append(recall(index, vectors, *FILTERS[0]))
    assert recalls[0] < 0.9 < recalls[1]


def test_a_graph_that_finds_too_few_matches_gives_way_to_exact_search(
    tmp_path, bundle, vectors, monkeypatch
):
    """Among items that do not match, a graph's search ends with too few hits."""
    monkeypatch.setattr(search_structure, "_MAX_CANDIDATES", 0)
    monkeypatch.setattr(search_structure, "_RARE_SHARE", 0.0)
    monkeypatch.setattr(masks, "_SMALL", COUNT)  # the record evaluates the filter
    poor = StructureChoice("hnsw", {"m": 4, "ef_search": 8})
    with created(tmp_path / "i", bundle, vectors, poor) as index:
        assert recall(index, vectors, *FILTERS[2]) > 0.9


@pytest.mark.parametrize("backend", ["flat", "hnsw"])
def test_the_rows_behind_a_structure_are_found_too(tmp_path, bundle, vectors, backend):
    """Exactly, with a filter and without, until the structure is built over them."""
    with created(tmp_path / "i", bundle, vectors, StructureChoice(backend)) as index:
        now, moved = vectors.copy(), range(1, COUNT, 7)
        now[moved] = -vectors[moved]
        index.upsert(
            [Item(str(n), "moved", {"price": n % 100}, arrays={"vector": now[n]}) for n in moved]
        )
        for _ in range(2):
            details = index.stats().details
            for filter, keep in FILTERS:
                assert recall(index, now, filter, keep) >= (0.95 if backend == "hnsw" else 1.0)
            index.store.compact()
        assert details["covered"] == details["rows"] == COUNT - len(range(0, COUNT, 7))


def test_the_background_builds_and_compacts(tmp_path, bundle, vectors, monkeypatch):
    monkeypatch.setattr(upkeep, "_MIN_DEAD_ROWS", 100)
    create_local(tmp_path / "i", bundle, widths_of(bundle), structure=StructureChoice("ivf"))

    def until(done):
        wire.until(lambda: done(index.stats().details), seconds=60)

    with (
        open_index(tmp_path / "i", threads=1) as index,
        open_index(tmp_path / "i", threads=1) as other,
    ):
        items = [Item(str(n), arrays={"vector": vectors[n]}) for n in range(COUNT)]
        index.upsert(items[:3000])
        until(lambda details: details["structure"] == "ivf" and details["covered"] == 3000)
        assert len(other.search(vectors[1], 5)) == 5
        index.upsert(items[3000:3100])  # too few to build the structure again
        index.upsert(items[3100:])
        until(lambda details: details["covered"] == COUNT)
        index.delete([str(n) for n in range(0, COUNT, 2)])
        until(lambda details: details["rows"] == COUNT // 2 == details["covered"])
        with index.store.record.reading() as connection:
            assert ask(connection, "select * from removed") == []
        for opened in (index, other):
            hits = opened.search(vectors[1], 200)
            assert len(hits) == 200 and hits[0].id == "1"
            assert {hit.id for hit in hits} <= {str(n) for n in range(1, COUNT, 2)}
        monkeypatch.setattr(search_structure, "COMPANION_MIN_ROWS", COUNT)
        other.store.take_structure("flat", {})
        until(lambda details: details["structure"] is None)
        assert [hit.id for hit in index.search(vectors[1], 200)] == [
            hit.id for hit in other.search(vectors[1], 200)
        ]
        wire.until(lambda: not list((tmp_path / "i" / "arrays").glob("*.ivf")))


def near_identity(width: int, seed: int = 0) -> bytes:
    """The head of a metric that was learned a little."""
    random = np.random.default_rng(seed)
    matrix = np.diag(random.uniform(0.8, 1.25, width)).astype(np.float32)
    ends = [end_of("input", width), end_of("vector", width)]
    nodes = [helper.make_node("MatMul", ["input", "matrix"], ["vector"])]
    return graph_bytes(nodes, ends[:1], ends[1:], {"matrix": matrix})


def end_of(name: str, width: int):
    return helper.make_tensor_value_info(name, TensorProto.FLOAT, ["N", width])


@pytest.fixture
def built(monkeypatch):
    """Numbers of vectors over which a graph was built."""
    counts = []
    genuine = Hnsw.build
    monkeypatch.setattr(
        Hnsw,
        "build",
        lambda self, rows, report: (counts.append(len(rows)), genuine(self, rows, report)),
    )
    return counts


def test_a_graph_serves_the_vectors_of_an_adapter(tmp_path, bundle, vectors, built):
    vectors = vectors.copy()
    vectors[51:60] = vectors[50]  # copies
    alive = np.arange(COUNT) % 7 > 0
    with created(tmp_path / "i", bundle, vectors, StructureChoice("hnsw")) as index:
        assert built == [COUNT]
        index.upsert([Item("more", arrays={"vector": vectors[1]})])
        bundle_of = {}
        for seed in (0, 1):
            head = near_identity(16, seed)
            bundle_of[seed] = make_adapter_bundle(bundle, head, tmp_path / f"adapter {seed}")
            index.migrate(bundle_of[seed], progress=False)
            assert built == [COUNT], "the graph was built again"
            stats = index.store.stats().details
            assert stats["structure"] == "hnsw" and stats["covered"] == alive.sum()
            adapted = index.bundle.adapt(vectors).vector
            index.delete("more")
            for filter, keep in FILTERS:
                assert recall(index, adapted, filter, keep) >= 0.95
        assert index.store.recall()[1] > 0.95
    assert check_index(tmp_path / "i") == ([], [])


@pytest.mark.parametrize("why", ["other neighbours", "an original is gone", "other parameters"])
def test_a_graph_that_does_not_fit_is_built_again(why, tmp_path, bundle, vectors, built):
    vectors = vectors.copy()
    vectors[51] = vectors[50]
    head = near_identity(16)
    if why == "other neighbours":
        head = linear_head(16, 2)
    with created(tmp_path / "i", bundle, vectors, StructureChoice("hnsw")) as index:
        if why == "an original is gone":
            index.delete("50")
        elif why == "other parameters":
            index.store.take_structure("hnsw", {"m": 16})
        adapter = make_adapter_bundle(bundle, head, tmp_path / "adapter")
        index.migrate(adapter, progress=False)
        assert len(built) > 1
        adapted = index.bundle.adapt(vectors).vector
        hits = index.search(adapted[51], 1)
        assert hits[0].distance == pytest.approx(0, abs=1e-4)
        assert index.store.recall()[1] > 0.95


def test_a_graph_that_finds_less_is_searched_more_widely(
    tmp_path, bundle, vectors, built, monkeypatch
):
    recalls = iter([0.999, 0.97, 0.992])
    monkeypatch.setattr(upkeep, "recall_at_10", lambda *_: next(recalls))
    head = make_adapter_bundle(bundle, near_identity(16), tmp_path / "adapter")
    with created(tmp_path / "i", bundle, vectors, StructureChoice("hnsw", {"m": 16})) as index:
        index.migrate(head, progress=False)
        with index.store.views.moment() as (_, view):
            assert view.structure.structure.options == {"m": 16, "ef_search": 256}
            assert view.structure.backends[0].ef_search == 256
        assert not index.store.upkeep.step(), "the structure is built again"
        assert built == [COUNT]
        index.store.compact()
        assert len(built) > 1
        with index.store.views.moment() as (_, view):
            assert view.structure.structure.options == {"m": 16}
    assert check_index(tmp_path / "i") == ([], [])


def test_links_of_rows_that_are_left_out_are_gone(tmp_path, vectors):
    """Compare every list of links with one that plain loops make."""
    first = Hnsw(m=6)
    first.build(vectors, lambda count: None)
    first.save(tmp_path / "graph")
    first = Hnsw(m=6)
    first.load(tmp_path / "graph", vectors)
    rows = np.flatnonzero(np.random.default_rng(0).random(COUNT) < 0.8)
    entry = first._index.hnsw.entry_point
    rows = rows[rows != entry]
    second = Hnsw(m=6)
    assert second.adopt(first, rows, vectors[rows][:, :9])
    new_row = {row: number for number, row in enumerate(rows.tolist())}
    for number, row in enumerate(rows.tolist()):
        lists = links_of(first, row)
        expected = [[new_row[link] for link in links if link in new_row] for links in lists]
        assert links_of(second, number) == expected
    graph = second._index.hnsw
    levels = faiss.vector_to_array(graph.levels)
    assert levels[graph.entry_point] == levels.max() == graph.max_level + 1


def links_of(backend: Hnsw, row: int) -> list[list[int]]:
    """Return the links of a row on each level."""
    graph = backend._index.hnsw
    start = graph.offsets.at(row)
    lists = []
    for level in range(graph.levels.at(row)):
        slots = range(
            start + graph.cum_nneighbor_per_level.at(level),
            start + graph.cum_nneighbor_per_level.at(level + 1),
        )
        links = [
            int(faiss.rev_swig_ptr(graph.neighbors.data(), slots.stop)[slot]) for slot in slots
        ]
        lists.append(links[: links.index(-1)] if -1 in links else links)
    return lists


def test_who_searches_loads_a_generation_before_it_is_served(
    tmp_path, bundle, vectors, monkeypatch
):
    monkeypatch.setattr(local, "MIN_ROWS", 1000)
    monkeypatch.setattr(local, "_NOTICE_SECONDS", 3.0)
    created(tmp_path / "i", bundle, vectors, StructureChoice("hnsw")).close()
    adapter = make_adapter_bundle(bundle, near_identity(16), tmp_path / "adapter")
    with Index.open(tmp_path / "i") as server, Index.open(tmp_path / "i") as writer:
        before = server.search(vectors[1], 3)
        assert server.store.expected() is None
        migration = threading.Thread(target=writer.migrate, args=(adapter,))
        migration.start()
        loads = []
        genuine = snapshot_view.load_structure

        def load_structure(*arguments):
            loads.append(threading.current_thread().name)
            return genuine(*arguments)

        while (expected := server.store.expected()) is None:
            time.sleep(0.01)
        monkeypatch.setattr(snapshot_view, "load_structure", load_structure)
        assert [hit.id for hit in server.search(vectors[1], 3)] == [hit.id for hit in before]
        while "loading" not in loads or server.store.views._prepared is None:
            time.sleep(0.01)
        server.prepare()
        assert server.bundle.sha256 == bundle.sha256
        opened = server._expected[1]
        migration.join()
        loads.clear()
        assert server.follow() is opened and server.generation.number == expected.number
        hits = server.search(server.bundle.adapt(vectors[1:2]).vector[0], 3)
        assert hits[0].distance == pytest.approx(0, abs=1e-4)
        assert not loads, "the graph was loaded when it was needed"
        assert server.store.expected() is None
        assert server.rollback(progress=False).embedded == 0
        assert [hit.id for hit in server.search(vectors[1], 3)] == [hit.id for hit in before]
    assert check_index(tmp_path / "i") == ([], [])
