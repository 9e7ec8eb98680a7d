"""Equal vectors, such as thousands of "no photo": the others are found as well as without them."""

import numpy as np
import pytest
from retrieval.index import duplicates
from retrieval.index.index import open_index
from retrieval.store.contract import Item, widths_of
from retrieval.store.faiss_backends import Cagra, Hnsw, originals_of
from retrieval.store.folder import create_local
from retrieval.store.local import LocalStore
from retrieval.store.search_structure import MIN_ROWS, StructureChoice

COUNT, WIDTH = 3_000, 32


@pytest.fixture(scope="module")
def vectors():
    vectors = np.random.default_rng(0).normal(size=(COUNT, WIDTH)).astype(np.float32)
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


@pytest.fixture(scope="module")
def queries():
    return np.random.default_rng(1).normal(size=(200, WIDTH)).astype(np.float32) / WIDTH**0.5


def exact(queries, vectors, k, keep=None):
    squared = np.square(vectors.astype(np.float64)[None] - queries[:, None]).sum(axis=2)
    if keep is not None:
        squared[:, ~keep] = np.inf
    return np.sqrt(np.sort(squared, axis=1)[:, :k])


def loaded(folder, vectors, kind=Hnsw, **options):
    backend, reports = kind(**options), []
    backend.build(vectors, reports.append)
    assert sum(reports) == len(vectors)
    backend.save(folder / "graph")
    read = kind(**options)
    read.load(folder / "graph", vectors)
    (folder / "graph").unlink()
    return read


def recall(backend, queries, vectors, keep=None):
    """The share of hits that are as near as the exact ones; each row is returned only once."""
    limits = exact(queries, vectors, 10, keep)
    if keep is None:
        distances, rows = backend.search(queries, 10)
    else:
        distances, rows = backend.search_selected(queries, 10, keep)
        assert keep[rows].all()
    assert all(len(set(row)) == 10 for row in rows.tolist())
    true = np.linalg.norm(vectors[rows] - queries[:, None], axis=2)
    np.testing.assert_allclose(distances, true, atol=1e-4)
    return (true <= limits[:, -1:] + 1e-4).mean()


@pytest.mark.parametrize("kind", [Hnsw, Cagra])
def test_copies_do_not_lower_the_recall_of_others(tmp_path, vectors, queries, kind):
    options = {"ef_construction": 32, "ef_search": 32}
    plain = recall(loaded(tmp_path, vectors, kind, **options), queries, vectors)
    copies = np.repeat(vectors[:3], 500, axis=0)
    for mixed in (np.concatenate([vectors, copies]), np.concatenate([copies, vectors])):
        assert recall(loaded(tmp_path, mixed, kind, **options), queries, mixed) > plain - 0.01


def test_copies_are_hits_in_plain_and_filtered_searches(tmp_path, vectors):
    near = vectors[:20] + np.float32(1e-3)
    mixed = np.concatenate([vectors, np.repeat(vectors[:20], 3, axis=0)])
    backend = loaded(tmp_path, mixed)
    for query, rows in enumerate(backend.search(near, 4)[1]):
        assert set(rows) == {query, *range(COUNT + 3 * query, COUNT + 3 * query + 3)}
    keep = np.random.default_rng(0).random(len(mixed)) < 0.6
    keep[:20] = False  # the originals
    assert recall(backend, near, mixed, keep) == 1
    narrow = np.zeros(len(mixed), bool)
    narrow[[COUNT + 1, COUNT + 2, 99]] = True
    rows = backend.search_selected(near[:1], 5, narrow)[1]
    assert rows.tolist() == [[COUNT + 1, COUNT + 2, 99, -1, -1]]


def test_all_vectors_equal(tmp_path, queries):
    same = np.ones((300, WIDTH), np.float32)
    rows = loaded(tmp_path, same).search(queries, 100)[1]
    assert rows.min() >= 0
    assert all(len(set(row)) == 100 for row in rows.tolist())


def test_originals_are_the_first_of_equal_rows(vectors):
    rows = np.array([7, 3, 7, 7, 1, 3])
    np.testing.assert_array_equal(originals_of(vectors[rows]), [0, 1, 0, 0, 4, 1])
    signs = np.zeros((2, WIDTH), np.float32)
    signs[1] = -signs[1]
    np.testing.assert_array_equal(originals_of(signs), [0, 0])
    last_bit = np.stack([vectors[0], np.nextafter(vectors[0], np.float32(2))])
    np.testing.assert_array_equal(originals_of(last_bit), [0, 1])


def test_an_index_finds_copies_whose_original_is_deleted(tmp_path, bundle):
    rng = np.random.default_rng(3)
    vectors = rng.normal(size=(MIN_ROWS, 16)).astype(np.float32)
    vectors[100:400] = vectors[0]
    folder = tmp_path / "i"
    create_local(folder, bundle, widths_of(bundle), structure=StructureChoice("hnsw"))
    with LocalStore(folder, upkeep=False) as store:
        store.upsert(
            [Item(str(n), arrays={"vector": row}) for n, row in enumerate(vectors)], bundle.sha256
        )
        store.compact()
        assert store.stats().details["structure"] == "hnsw"
        store.delete([str(n) for n in (0, *range(100, 395))])
        (answer,) = store.propose(vectors[:1], 8, bundle.sha256)
        assert {item.id for item in answer.items[:5]} == {str(n) for n in range(395, 400)}
        kept = np.delete(np.arange(MIN_ROWS), [0, *range(100, 395)])
        true = exact(vectors[:1], vectors[kept], 8)[0]
        np.testing.assert_allclose(answer.distances[:5], true[:5], atol=1e-6)
        assert len(answer.items) == 8


def by_brute_force(vectors, within, most):
    """Ids, radius and diameter of each group, by plain loops over all pairs."""
    distance = np.array(
        [[float(np.linalg.norm(a.astype(np.float64) - b)) for b in vectors] for a in vectors]
    )
    near = {
        a: [b for b in range(len(vectors)) if distance[a, b] <= within] for a in range(len(vectors))
    }
    free = set(near)
    answer = []
    for first in sorted(near, key=lambda a: (-min(len(near[a]) - 1, most), a)):
        group = [first, *(b for b in near[first] if b in free and b != first)]
        if first in free and len(group) > 1:
            free -= set(group)
            ids = tuple(f"{n:03}" for n in group)
            answer.append((ids, distance[first, group].max(), distance[np.ix_(group, group)].max()))
    return sorted(answer, key=lambda group: (-len(group[0]), group[0]))


@pytest.mark.parametrize(("within", "most"), [(0.0, 1024), (0.3, 1024), (0.8, 1024), (0.8, 4)])
def test_duplicates_equal_brute_force(tmp_path, bundle, within, most, monkeypatch):
    monkeypatch.setattr(duplicates, "_MAX_NEIGHBOURS", most)
    rng = np.random.default_rng(4)
    vectors = rng.normal(size=(60, 16)).astype(np.float32)
    vectors[:12] = vectors[0] + rng.normal(size=(12, 16)).astype(np.float32) / 8  # a cloud
    vectors[20:30] = vectors[0]
    vectors[30:45] = vectors[1]
    vectors[45:55, 0] = 9 + 0.25 * np.arange(10)  # a chain
    vectors[45:55, 1:] = 0
    create_local(tmp_path / "i", bundle, widths_of(bundle))
    with open_index(tmp_path / "i", threads=1) as index:
        index.upsert([Item(f"{n:03}", arrays={"vector": row}) for n, row in enumerate(vectors)])
        groups = index.duplicates(within, progress=False)
    expected = by_brute_force(vectors, within, most)
    assert [group.ids for group in groups] == [ids for ids, _, _ in expected]
    assert len(groups) > 1
    for group, (_, radius, diameter) in zip(groups, expected, strict=True):
        assert group.radius <= within
        np.testing.assert_allclose((group.radius, group.diameter), (radius, diameter), atol=1e-9)


def test_two_crowds_of_copies_that_are_neighbours_are_one_group(tmp_path, bundle):
    """Each crowd is larger than the number of neighbours that are requested for an item."""
    vectors = np.zeros((4_400, 16), np.float32)
    vectors[2_200:, 0] = 0.1
    create_local(tmp_path / "i", bundle, widths_of(bundle))
    with open_index(tmp_path / "i", threads=1) as index:
        index.upsert([Item(f"{n:04}", arrays={"vector": row}) for n, row in enumerate(vectors)])
        (group,) = index.duplicates(0.11, progress=False)
        assert len(group.ids) == 4_400
        assert group.radius == group.diameter == pytest.approx(0.1)
        assert [len(group.ids) for group in index.duplicates(0.09, progress=False)] == [2_200] * 2
