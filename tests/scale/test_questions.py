"""Searches with options among 200,000 items equal the ranking of all of them by NumPy."""

import functools
from collections import Counter
from dataclasses import dataclass
from typing import Any

import makers
import numpy as np
import pytest
from numpy.typing import NDArray
from retrieval.bundle.bundle import Bundle
from retrieval.index.answering import DISLIKE_SHARE
from retrieval.index.index import Index, open_index
from retrieval.index.query import DIVERSITY_POOL, Query
from retrieval.store.contract import Item, widths_of
from retrieval.store.folder import create_local

pytestmark = pytest.mark.scale

COUNT = 200_000
CENTRES = 500
WIDTH = makers.WIDTH


def id_of(row: int) -> str:
    return f"{row:06}"


@dataclass(frozen=True)
class Known:
    """An index, and the vectors and fields of its items in memory."""

    index: Index
    vectors: NDArray[np.float32]
    fields: dict[str, NDArray[np.int64]]

    @functools.cached_property
    def precise(self) -> NDArray[np.float64]:
        return self.vectors.astype(np.float64)

    def expected(self, vector: Any, query: Query, keep: Any) -> list[tuple[int, float]]:
        """Rank all items, and only then apply each option; return rows and distances."""
        examples = [int(id) for id in (*query.likes, *query.dislikes)]
        if examples:
            likes = self.precise[examples[: len(query.likes)]]
            if vector is not None:
                likes = np.vstack([vector, likes])
            vector = likes.mean(axis=0)
            if query.dislikes:
                dislikes = self.precise[examples[len(query.likes) :]]
                vector = vector - DISLIKE_SHARE * dislikes.mean(axis=0)
            vector = vector * np.linalg.norm(likes, axis=1).mean() / np.linalg.norm(vector)
        difference = self.precise - vector.astype(np.float32)
        distances = np.sqrt(np.einsum("ij,ij->i", difference, difference))
        allowed = keep & ~np.isin(np.arange(COUNT), examples)
        if query.max_distance is not None:
            allowed &= distances <= query.max_distance
        rows = np.flatnonzero(allowed)
        rows = rows[np.lexsort((rows, distances[rows]))]
        groups: dict[int, list[int]] = {}
        values = rows if query.group_by is None else self.fields[query.group_by][rows]
        for row, value in zip(rows.tolist(), values.tolist(), strict=True):
            group = groups.setdefault(value, [])
            if len(group) < query.group_size:
                group.append(row)
        order = list(groups.values())
        last = query.offset + query.k
        if query.diversity:
            order = self._diverse(order[: max(DIVERSITY_POOL, 2 * last)], distances, query)
        hits = [row for group in order[query.offset : last] for row in group]
        return [(row, float(distances[row])) for row in hits]

    def _diverse(self, pool: list[list[int]], distances: Any, query: Query) -> list[list[int]]:
        """Choose by maximal marginal relevance, with plain loops."""
        order = pool[:1]
        while len(order) < min(query.offset + query.k, len(pool)):
            chosen = self.precise[[group[0] for group in order]]
            best, worth = None, -np.inf
            for group in pool:
                if group in order:
                    continue
                gap = np.linalg.norm(chosen - self.precise[group[0]], axis=1).min()
                value = query.diversity * gap - (1 - query.diversity) * distances[group[0]]
                if value > worth:
                    best, worth = group, value
            order.append(best)
        return order


@pytest.fixture(scope="module")
def known(tmp_path_factory):
    """Items around centres. Some groups are near the query, some are everywhere, one is rare."""
    folder = tmp_path_factory.mktemp("questions")
    bundle = Bundle.open(makers.make_bundle(folder / "b"), threads=1)
    random = np.random.default_rng(0)
    centre = random.integers(CENTRES, size=COUNT)
    centres = random.normal(size=(CENTRES, WIDTH))
    vectors = centres[centre] + 0.2 * random.normal(size=(COUNT, WIDTH))
    vectors = vectors.astype(np.float32)
    fields = {
        "centre": centre,
        "number": np.arange(COUNT) % 30_000,
        "part": random.integers(7, size=COUNT),
    }
    columns = [values.tolist() for values in fields.values()]
    create_local(folder / "i", bundle, widths_of(bundle))
    with open_index(folder / "i", threads=1) as index:
        for start in range(0, COUNT, 50_000):
            index.upsert(
                [
                    Item(
                        id_of(row),
                        f"part {columns[2][row]}",
                        dict(zip(fields, (column[row] for column in columns), strict=True)),
                        arrays={"vector": vectors[row]},
                    )
                    for row in range(start, start + 50_000)
                ]
            )
        index.store.compact()
        yield Known(index, vectors, fields)


FILTERS = {
    "part = 3": lambda fields: fields["part"] == 3,
    "number < 40 and part != 1": lambda fields: (fields["number"] < 40) & (fields["part"] != 1),
}
QUESTIONS = [
    # The nearest 1,000 items are of few centres, so the index must ask again.
    Query(60, group_by="centre", group_size=3, offset=15, facets=("part", "label")),
    Query(100, group_by="centre", group_size=2),
    Query(20, group_by="part", group_size=50),
    Query(40, group_by="number", group_size=7, filter="part = 3", max_distance=2.5),
    Query(30, filter="number < 40 and part != 1", offset=25, facets=("centre",)),
    Query(4000, max_distance=1.5, offset=100),
    Query(100, likes=(id_of(5), id_of(90_000)), dislikes=(id_of(17),), facets=("part",)),
    Query(25, likes=(id_of(5),), dislikes=(id_of(6), id_of(7)), group_by="part", group_size=9),
    Query(60, diversity=0.5, offset=20, filter="part = 3"),
    Query(15, diversity=0.8, group_by="centre", group_size=2, likes=(id_of(1),)),
]


@pytest.mark.parametrize("query", QUESTIONS, ids=range(len(QUESTIONS)))
def test_options_equal_the_ranking_of_all_items(known, query):
    keep = np.ones(COUNT, bool)
    if query.filter is not None:
        keep = FILTERS[query.filter](known.fields)
    vectors: list[Any] = [known.vectors[77] + np.float32(0.05)]
    if query.likes:
        vectors.append(None)
    for vector in vectors:
        hits = known.index.answer(vector, query)
        expected = known.expected(vector, query, keep)
        assert [hit.id for hit in hits] == [id_of(row) for row, _ in expected]
        distances = [hit.distance for hit in hits]
        np.testing.assert_allclose(distances, [d for _, d in expected], rtol=1e-6)
        for name in query.facets:
            if name == "label":
                values = [f"part {known.fields['part'][row]}" for row, _ in expected]
            else:
                values = [int(known.fields[name][row]) for row, _ in expected]
            assert dict(hits.facets[name]) == Counter(values)
