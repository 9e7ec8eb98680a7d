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
    """Ids, distances and diameter of each group, by plain loops over all pairs."""
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
            answer.append((ids, distance[first, group], distance[np.ix_(group, group)].max()))
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
    for group, (_, distances, diameter) in zip(groups, expected, strict=True):
        assert group.radius == max(group.distances) <= within
        np.testing.assert_allclose(group.distances, distances, atol=1e-9)
        assert group.diameter == pytest.approx(diameter, abs=1e-9)


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


@pytest.fixture
def filled(tmp_path, bundle):
    """A function that makes an index of vectors along one axis, by id: (position, stamp)."""

    def make(**rows):
        create_local(tmp_path / "i", bundle, widths_of(bundle))
        with open_index(tmp_path / "i", threads=1) as index:
            vectors = np.zeros((len(rows), 16), np.float32)
            vectors[:, 0] = [position for position, _ in rows.values()]
            items = zip(rows.items(), vectors, strict=True)
            index.upsert(
                [Item(id, stamp=stamp, arrays={"vector": row}) for (id, (_, stamp)), row in items]
            )
        return open_index(tmp_path / "i", threads=1)

    return make


def test_copies_by_content_cost_one_search_and_need_no_equal_vectors(filled, monkeypatch):
    # A model may embed one picture a little differently in another batch. A file's stamp has its
    # size and times too.
    crowd = {f"a{n:03}": (n / 1e6, f"hash {n} {n}") for n in range(600)}
    asked = []
    with filled(**crowd, b=(0.05, "other"), c=(0.2, None), d=(0.2, "third")) as index:
        propose = index.store.propose

        def counted(queries, *arguments, **named):
            asked.append(len(queries))
            return propose(queries, *arguments, **named)

        monkeypatch.setattr(index.store, "propose", counted)
        groups = index.duplicates(0, progress=False)
        assert [group.ids for group in groups] == [tuple(crowd), ("c", "d")]
        assert {*groups[0].distances, *groups[1].distances} == {0}
        near, pair = index.duplicates(0.051, progress=False)
        assert near.ids == (*crowd, "b") and pair.ids == ("c", "d")
        assert near.distances == (*[0] * 600, pytest.approx(0.05))
        # Three originals are compared. Two of them ask for 8, 32, 128, 512 and 2,048 neighbours.
        assert sum(asked) <= 5 + 2 * 11


def test_items_that_were_reviewed_together_are_in_no_group_together(filled):
    near = {"a": (0, "x"), "b": (0, "x"), "c": (1, "y"), "d": (1, "z"), "e": (2, "w")}
    with filled(**near, f=(9, "v"), g=(9, "v")) as index:

        def groups(*reviewed):
            return [group.ids for group in index.duplicates(1, reviewed=reviewed, progress=False)]

        assert groups() == [("c", "a", "b", "d", "e"), ("f", "g")]
        # Exact copies as well; the nearest of a set stays.
        assert groups("ab", "fg") == [("c", "a", "d", "e")]
        assert groups("cd") == [("c", "a", "b", "e"), ("f", "g")]
        assert groups("cda") == [("c", "b", "e"), ("f", "g")]
        # Two sets that share an item are not one set.
        assert groups("ca", "ad") == [("c", "b", "d", "e"), ("f", "g")]
        assert groups("abcde", "fg") == []
        # A copy that was not reviewed is still one.
        assert groups("bcde", "gh") == [("c", "a"), ("f", "g")]
