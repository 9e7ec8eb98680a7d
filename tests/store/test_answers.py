"""Answers of a local store against float64 arithmetic, after any sequence of changes."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from retrieval.bundle.bundle import Bundle
from retrieval.bundle.distances import merged_distances
from retrieval.index import near_pairs
from retrieval.index.index import Index, open_index
from retrieval.store import exact_search, masks, search_structure
from retrieval.store.contract import Candidates, Item, Store, widths_of
from retrieval.store.filters import parse_filter
from retrieval.store.folder import create_local
from retrieval.store.local import LocalStore
from retrieval.store.search_structure import StructureChoice
from sklearn.datasets import load_digits

from retrieval_engines.testing.bench import numbered_items, random_vectors
from retrieval_engines.testing.small_bundles import FEATURES, shared_bundle

WIDTH = 16


class Known:
    """An index and its expected content."""

    def __init__(self, folder: Path, bundle: Bundle, structure: StructureChoice) -> None:
        create_local(folder, bundle, widths_of(bundle), structure=structure)
        self.index, self.items = open_index(folder, threads=1), dict[str, tuple[Any, int]]()

    def put(self, ids: Sequence[str], vectors: Any) -> None:
        self.index.upsert(
            [
                Item(id, metadata={"turn": at % 3, "tags": [at]}, arrays={"vector": vectors[at]})
                for at, id in enumerate(ids)
            ]
        )
        self.items |= {id: (vectors[at], at % 3) for at, id in enumerate(ids)}

    def delete(self, ids: Sequence[str]) -> None:
        self.index.delete(ids)
        for id in ids:
            del self.items[id]

    def nearest(self, query: Any, k: int, turn: int | None = None) -> list[tuple[str, float]]:
        """Return the k nearest in float64; equal distances are ordered by id."""
        chosen = sorted(id for id, (_, own) in self.items.items() if turn is None or own == turn)
        if not chosen:
            return []
        vectors = np.stack([self.items[id][0] for id in chosen])
        far = merged_distances(query, vectors, k, [], "min")
        return [(chosen[at], float(far[at])) for at in np.argsort(far, kind="stable")[:k]]

    def agrees(self, queries: Any, k: int = 10) -> None:
        store, sha256 = self.index.store, self.index.bundle.sha256
        for turn, filter in ((None, None), (1, "turn = 1")):
            count = sum(turn in (None, own) for _, own in self.items.values())
            chosen = None if filter is None else parse_filter(filter)
            proposed = store.propose(queries, k, sha256, filter=chosen)
            assert {len(entry.items) for entry in proposed} == {min(k, count)}
            answers = self.index.search(queries, k, filter=filter)
            assert answers == [self.index.search(query, k, filter=filter) for query in queries]
            for query, hits in zip(queries, answers, strict=True):
                assert [(hit.id, hit.distance) for hit in hits] == self.nearest(query, k, turn)
                assert all(hit.metadata["turn"] == self.items[str(hit.id)][1] for hit in hits)


propose = LocalStore.propose


def unmeasured(store: LocalStore, *arguments: Any, **named: Any) -> list[Candidates]:
    """Propose as a store that computes no distances does."""
    answers = []
    for nearest in propose(store, *arguments, **named | {"arrays": True}):
        order = sorted(range(len(nearest.items)), key=lambda row: nearest.items[row].id)
        arrays = {name: array[order] for name, array in nearest.arrays.items()}
        answers.append(Candidates([nearest.items[row] for row in order], arrays))
    return answers


def vectors(count: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).normal(size=(count, WIDTH)).astype(np.float32)


def names(numbers: range, seed: int = 0) -> list[str]:
    """Ids whose order is not that of the rows."""
    return [f"id{(n * 7919 + seed) % 100_003:06}" for n in numbers]


@pytest.mark.parametrize("wanted", ["flat", "hnsw"])
@pytest.mark.parametrize("large", [False, True])
def test_items_come_change_and_go(wanted, large, tmp_path, bundle, monkeypatch):
    monkeypatch.setattr(search_structure, "MIN_ROWS", 500)
    monkeypatch.setattr(exact_search, "_BLOCK_PAIRS", 5000 if large else 1 << 21)
    monkeypatch.setattr(masks, "_SMALL", 100 if large else 20_000)
    options = {"ef_search": 4096, "m": 64} if wanted == "hnsw" else {}
    known = Known(tmp_path / "i", bundle, StructureChoice(wanted, options))
    base = vectors(300)
    queries = np.concatenate([base[::60], vectors(4, seed=2)])
    with known.index as index:
        ids, fresh = names(range(1200)), names(range(1200, 1500))
        known.put(ids, np.tile(base, (4, 1)))  # each vector four times
        index.store.compact()
        known.agrees(queries)
        known.delete(ids[5:300:9])
        known.agrees(queries)
        known.put(fresh, base)  # and once more, fresh
        known.agrees(queries, k=25)
        known.put(ids[300:330], base[100:130])  # others take their places
        known.delete(fresh[::4])
        known.agrees(queries)
        known.agrees(queries[:1], k=2000)
        index.store.compact()
        known.agrees(queries)


def test_a_pair_has_one_distance_whoever_measures_it():
    random = np.random.default_rng(0)
    for width in (1, 2, 3, 7, 8, 16, 31, 128, 300):
        some = random.normal(size=(50, width)).astype(np.float32)
        query = random.normal(size=(3, width)).astype(np.float32)
        pairs = np.repeat(np.arange(3), 50), np.tile(np.arange(50), 3)
        squared = exact_search.squared_distances(query.astype(np.float64), some, *pairs)
        own = np.sqrt(squared).reshape(3, 50)
        for at in range(3):
            assert np.array_equal(merged_distances(query[at], some, 5, [], "min"), own[at])
            assert merged_distances(query[at], some[7:8], 5, [], "min")[0] == own[at, 7]
        assert np.array_equal(
            merged_distances(np.repeat(query, 50, 0), np.tile(some, (3, 1)), 5, [], "min"),
            own.ravel(),
        )
        squared, rows = exact_search.nearest(query, some, 50)
        assert np.array_equal(np.sqrt(squared), np.take_along_axis(own, rows, 1))


@pytest.mark.parametrize(
    "options",
    [{"rescorer": True}, {"subspaces": True}, {"inner": True}, {}],
    ids=["rescorer", "sub-spaces", "inner", "plain"],
)
def test_whatever_a_bundle_measures(options, tmp_path, makers):
    bundle = Bundle.open(makers.make_bundle(tmp_path / "b", kind="features", **options), threads=1)
    features = np.random.default_rng(3).normal(size=(40, 64)).astype(np.float32)
    encoded = bundle.encode(np.tile(features, (3, 1)))
    arrays = {"vector": encoded.vector, "code": encoded.code}
    items = [
        Item(id, arrays={name: rows[n] for name, rows in arrays.items() if rows is not None})
        for n, id in enumerate(names(range(120)))
    ]
    create_local(tmp_path / "i", bundle, widths_of(bundle))
    with Index.open(tmp_path / "i", threads=1) as index:
        index.upsert(items)
        index.store.compact()
        queries = features[:6] + np.float32(0.01)
        measured = [index.search(queries, k) for k in (1, 4, 50)]
        with pytest.MonkeyPatch.context() as patch:  # the index measures instead
            patch.setattr(type(index.store), "propose", unmeasured)
            assert [index.search(queries, k) for k in (1, 4, 50)] == measured


# Near-duplicates, on handwritten digits.


@pytest.fixture
def digits(tmp_path, bundle):
    """1,797 digits; the first twenty have an equal copy and a slightly different one."""
    images, labels = load_digits(return_X_y=True)
    pixels = (images.reshape(-1, 1, 8, 8) * 15.9).astype(np.uint8)
    vectors = bundle.encode(pixels).vector
    apart = vectors[:20].copy()
    apart[:, 0] += 1e-3
    create_local(tmp_path / "i", bundle, widths_of(bundle))
    with open_index(tmp_path / "i", threads=1) as index:
        for end, rows in (("", vectors), ("-again", vectors[:20]), ("-apart", apart)):
            index.upsert(
                [
                    Item(f"{n:04}{end}", str(labels[n]), arrays={"vector": row})
                    for n, row in enumerate(rows)
                ]
            )
        yield index, vectors


def test_duplicates_are_all_found(digits):
    index, vectors = digits
    limit = 0.002
    squared = ((vectors[:, None, :] - vectors[None, :20, :]) ** 2).sum(-1)
    assert (squared > limit**2).sum() == squared.size - 20  # different digits are farther apart
    groups = index.duplicates(limit, progress=False)
    assert [group.ids for group in groups] == [
        (f"{n:04}", f"{n:04}-again", f"{n:04}-apart") for n in range(20)
    ]
    assert all(group.radius == pytest.approx(1e-3, rel=1e-3) for group in groups)
    exact = index.duplicates(0, progress=False)
    assert [group.ids for group in exact] == [(f"{n:04}", f"{n:04}-again") for n in range(20)]
    only = index.duplicates(limit, filter="label = '3'", progress=False)
    assert len(only) == 2 and all(group.ids[0] in ("0003", "0013") for group in only)


def test_too_many_near_pairs_are_searched_for_one_item_at_a_time(digits, monkeypatch):
    index, vectors = digits
    scattered = vectors[:300] + np.random.default_rng(0).normal(size=(300, 1)) * 0.2
    index.upsert([Item(f"near-{n:03}", arrays={"vector": x}) for n, x in enumerate(scattered)])
    limits = (0, 0.5, 2.0)
    by_pairs = [index.duplicates(limit, progress=False) for limit in limits]
    monkeypatch.setattr(near_pairs, "MAX_PAIRS", -1)
    assert [index.duplicates(limit, progress=False) for limit in limits] == by_pairs
    assert len(by_pairs[0]) == 20 < len(by_pairs[1])


def test_a_chain_is_many_groups_and_many_equal_ones_are_one(digits):
    index, vectors = digits
    chain = np.repeat(10 + vectors[:1], 60, axis=0)
    chain[:, 0] += np.arange(60) * 0.01
    index.upsert([Item(f"chain-{n:02}", arrays={"vector": chain[n]}) for n in range(60)])
    index.upsert([Item(f"equal-{n:02}", arrays={"vector": vectors[0] - 10}) for n in range(40)])
    groups = {group.ids[0]: group for group in index.duplicates(0.0101, progress=False)}
    # All but the ends have two neighbours, so the smallest ids represent the groups.
    first = groups.pop("chain-01")
    assert first.ids == ("chain-01", "chain-00", "chain-02")
    assert first.radius == pytest.approx(0.01, rel=1e-3)
    assert first.diameter == pytest.approx(0.02, rel=1e-3)
    for n in range(3, 59, 2):
        assert groups.pop(f"chain-{n:02}").ids[1:] == (f"chain-{n + 1:02}",)
    equal = groups.pop("equal-00")
    assert len(equal.ids) == 40 and equal.radius == equal.diameter == 0
    assert not any(id.startswith("chain") for group in groups.values() for id in group.ids)


def test_a_rescorer_gets_the_same_candidates_from_every_store(tmp_path, monkeypatch):
    bundle, queries = shared_bundle(rescorer=True), random_vectors(60, FEATURES, 3)
    create_local(tmp_path / "i", bundle, widths_of(bundle))
    with open_index(tmp_path / "i", threads=1) as index:
        index.upsert(numbered_items(300, bundle=bundle))

        def answers():
            hits = index.search(queries, 1, candidates=1)
            return [[(hit.id, hit.distance) for hit in group] for group in hits]

        of_a_folder = answers()
        monkeypatch.setattr(LocalStore, "propose", Store.propose)  # as engines propose
        assert answers() == of_a_folder
