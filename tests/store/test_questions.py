"""Answers to questions with options equal those of all items, ranked by plain arithmetic."""

import itertools
from collections import Counter
from pathlib import Path
from typing import Any

import makers
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from PIL import Image
from retrieval.bundle.bundle import Bundle
from retrieval.errors import DataError
from retrieval.index.answering import DISLIKE_SHARE
from retrieval.index.index import Index, open_index
from retrieval.index.query import DIVERSITY_POOL, Query
from retrieval.store.contract import Item, TooSlow, patience, widths_of
from retrieval.store.filters import as_filter, matches
from retrieval.store.folder import create_local

WIDTH = makers.WIDTH
ABSENT = object()
# Values that Python holds for equal but a filter tells apart, and values that are no group.
KINDS = (0, "0", False, 1, 1.0, True, None, "a", ["a", 1], {"b": 1}, "x" * 10_001, ABSENT)


def items(count: int, *, seed: int = 0, groups: int = 7) -> list[Item]:
    """Return items near a few centres, so that the first hits are mostly of one group."""
    random = np.random.default_rng(seed)
    group = random.integers(groups, size=count) ** 2 // groups
    vectors = random.normal(size=(groups, WIDTH))[group] + 0.3 * random.normal(size=(count, WIDTH))
    made = []
    for number, vector in enumerate(vectors.astype(np.float32)):
        kind = KINDS[random.integers(len(KINDS))]
        metadata: dict[str, Any] = {"part": {"number": number % 5}, "tags": ["all", number % 3]}
        if kind is not ABSENT:
            metadata["kind"] = kind
        label = None if number % 11 == 0 else f"class {group[number]}"
        made.append(Item(f"item {number}", label, metadata, arrays={"vector": vector}))
    return made


def key(value: Any) -> Any:
    return (type(value) is bool, value)


def value(item: Any, field: str) -> Any:
    if field == "label":
        return ABSENT if item.label is None else item.label
    if field == "part.number":
        return item.metadata["part"]["number"]
    return item.metadata.get(field, ABSENT)


def is_group(value: Any) -> bool:
    return (
        value is not ABSENT
        and not isinstance(value, list | dict)
        and (not isinstance(value, str) or len(value) <= 10_000)
    )


def rocchio(likes: Any, dislikes: Any) -> Any:
    wanted = np.mean(likes, axis=0)
    if len(dislikes):
        wanted = wanted - DISLIKE_SHARE * np.mean(dislikes, axis=0)
    return wanted * np.mean(np.linalg.norm(likes, axis=1)) / np.linalg.norm(wanted)


def brute(everything: list[Item], vector: Any, query: Query) -> list[tuple[str, float]]:
    """Rank all items, and only then apply each option as its documentation says."""
    by_id = {item.id: item.vector.astype(np.float64) for item in everything}
    if query.likes or query.dislikes:
        seeds = [np.asarray(vector, np.float64)] if vector is not None else []
        likes = seeds + [by_id[id] for id in query.likes]
        vector = rocchio(likes, [by_id[id] for id in query.dislikes]).astype(np.float32)
    filter = as_filter(query.filter)
    ranked = []
    for item in everything:
        distance = float(np.linalg.norm(by_id[item.id] - vector.astype(np.float64)))
        if item.id in (*query.likes, *query.dislikes):
            continue
        if query.max_distance is not None and distance > query.max_distance:
            continue
        if filter is None or matches(filter, item.id, item.label, item.metadata):
            ranked.append((distance, item.id, item))
    ranked.sort(key=lambda entry: entry[:2])
    groups: dict[Any, list[Any]] = {}
    for entry in ranked:
        if query.group_by is None:
            groups[entry[1]] = [entry]
        elif is_group(value(entry[2], query.group_by)):
            groups.setdefault(key(value(entry[2], query.group_by)), []).append(entry)
    order = list(groups.values())
    last = query.offset + query.k
    if query.diversity:
        pool = order[: max(DIVERSITY_POOL, 2 * last)]
        order = pool[:1]
        while len(order) < min(last, len(pool)):
            rest = [group for group in pool if group not in order]

            def worth(group: Any) -> float:
                gaps = [np.linalg.norm(by_id[group[0][1]] - by_id[one[0][1]]) for one in order]
                return float(query.diversity * min(gaps) - (1 - query.diversity) * group[0][0])

            order.append(max(rest, key=worth))
    hits = [entry for group in order[query.offset : last] for entry in group[: query.group_size]]
    if query.order_by:
        field = query.order_by.removeprefix("-")
        numbers, texts, rest = [], [], []
        for hit in hits:
            found = value(hit[2], field)
            kinds = {int: numbers, float: numbers, bool: numbers, str: texts}
            kinds.get(type(found), rest).append((found, hit))
        for kind in (numbers, texts):
            kind.sort(key=lambda pair: pair[0], reverse=query.order_by != field)
        kinds = [texts, numbers] if query.order_by != field else [numbers, texts]
        hits = [hit for _, hit in [*kinds[0], *kinds[1], *rest]]
    return [(id, distance) for distance, id, _ in hits]


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: Any) -> Bundle:
    return Bundle.open(makers.make_bundle(tmp_path_factory.mktemp("bundle") / "b"), threads=1)


def made(folder: Path, bundle: Bundle, everything: list[Item]) -> Index:
    create_local(folder, bundle, widths_of(bundle))
    index = open_index(folder, threads=1)
    for start in range(0, len(everything), 20_000):
        index.upsert(everything[start : start + 20_000])
    return index


@pytest.fixture(scope="module")
def known(tmp_path_factory: Any, bundle: Bundle) -> Any:
    everything = items(300)
    with made(tmp_path_factory.mktemp("index") / "i", bundle, everything) as index:
        yield index, everything


def agrees(index: Index, everything: list[Item], vector: Any, query: Query) -> None:
    hits = index.answer(vector, query)
    if vector is not None:
        (hits,) = hits
        (vector,) = vector
    expected = brute(everything, vector, query)
    assert [hit.id for hit in hits] == [id for id, _ in expected], query
    np.testing.assert_allclose([hit.distance for hit in hits], [d for _, d in expected], rtol=1e-5)
    by_id = {item.id: item for item in everything}
    for name in query.facets:
        counts: Counter[Any] = Counter()
        for hit in hits:
            entry = value(by_id[hit.id], name)
            elements = entry if isinstance(entry, list) else [entry]
            counts.update(key(one) for one in elements if one is not ABSENT and one != {"b": 1})
        assert {key(one): count for one, count in hits.facets[name]} == counts
        assert [count for _, count in hits.facets[name]] == sorted(counts.values(), reverse=True)


FILTERS = (None, "part.number < 2", "label = 'class 0' or kind = 1", "tags = 2 and exists(kind)")
NAMES = st.lists(st.integers(0, 299).map("item {}".format), max_size=3, unique=True).map(tuple)


@st.composite
def questions(draw: Any) -> Query:
    group_by = draw(st.sampled_from((None, "label", "kind", "part.number")))
    return Query(
        draw(st.integers(1, 12)),
        filter=draw(st.sampled_from(FILTERS)),
        likes=draw(NAMES),
        dislikes=draw(NAMES),
        group_by=group_by,
        group_size=draw(st.sampled_from((1, 2, 60))) if group_by else 1,
        max_distance=draw(st.sampled_from((None, None, 0.0, 2.5, 4.0))),
        offset=draw(st.sampled_from((0, 1, 5, 400))),
        diversity=draw(st.sampled_from((0.0, 0.0, 0.3, 1.0))),
        facets=draw(st.sampled_from(((), ("label",), ("kind", "tags")))),
        order_by=draw(st.sampled_from((None, None, "label", "-part.number", "kind", "-kind"))),
    )


@settings(max_examples=150, deadline=None)
@given(questions(), st.integers(0, 2**32 - 1))
def test_any_options(known: Any, query: Query, seed: int) -> None:
    vector = np.random.default_rng(seed).normal(size=(1, WIDTH)).astype(np.float32)
    agrees(*known, vector, query)


@pytest.mark.parametrize(
    ("filter", "examples", "group_by", "far", "offset", "diversity"),
    list(
        itertools.product(
            (None, "part.number < 3"),
            ((), ("item 3", "item 8")),
            (None, "label", "kind"),
            (None, 3.0),
            (0, 2),
            (0.0, 0.5),
        )
    ),
)
def test_each_combination(
    known: Any, filter: Any, examples: Any, group_by: Any, far: Any, offset: int, diversity: float
) -> None:
    size = 3 if group_by else 1
    query = Query(
        6,
        filter=filter,
        likes=examples[:1],
        dislikes=examples[1:],
        group_by=group_by,
        group_size=size,
        max_distance=far,
        offset=offset,
        diversity=diversity,
        facets=("label",),
    )
    vector = makers.weights(5, 1, WIDTH)
    agrees(*known, vector, query)
    if examples:
        agrees(*known, None, query)


@pytest.mark.scale
def test_groups_in_an_index_of_60_000(tmp_path: Path, bundle: Bundle) -> None:
    everything = items(60_000, seed=1, groups=40)
    with made(tmp_path / "i", bundle, everything) as index:
        vector = everything[77].vector[None]
        for query in (
            Query(100, group_by="label", group_size=3),
            Query(5, group_by="kind", group_size=40, filter="part.number = 1", offset=1),
            Query(12, likes=("item 5",), dislikes=("item 9",), diversity=0.4, facets=("label",)),
        ):
            agrees(index, everything, vector, query)


def test_sub_spaces_and_rescorers_answer_too(tmp_path: Path) -> None:
    for number, options in enumerate(({"subspaces": True}, {"rescorer": True}, {"inner": True})):
        folder = tmp_path / str(number)
        folder.mkdir()
        bundle = Bundle.open(makers.make_bundle(folder / "b", **options), threads=1)
        photos = makers.write_digits(folder / "photos", 60)
        with Index.create(folder / "i", folder / "photos", model=bundle, progress=False) as index:
            hits = index.search(photos[0], 60)
            nearest: dict[Any, list[Any]] = {}
            for hit in hits:
                nearest.setdefault(hit.label, []).append(hit)
            grouped = index.search(photos[0], 20, group_by="label", group_size=2)
            assert grouped == [hit for group in nearest.values() for hit in group[:2]]
            assert index.search(photos[0], 4, offset=3) == hits[3:7]
            assert len(index.search(photos[0], 9, diversity=0.5)) == 9
            if "rescorer" in options:
                with pytest.raises(DataError, match="codes, of which likes"):
                    index.search(like=hits[0].id)
            else:
                assert hits[0].id not in {hit.id for hit in index.search(like=hits[0].id)}


def test_likes_are_ids_or_pictures(tmp_path: Path, bundle: Bundle) -> None:
    photos = makers.write_digits(tmp_path / "photos", 40)
    with Index.create(tmp_path / "i", tmp_path / "photos", model=bundle, progress=False) as index:
        id = next(iter(index))
        same: list[Any] = [id, tmp_path / "photos" / id, Image.open(tmp_path / "photos" / id)]
        by_id, by_path, by_image = (index.search(like=one, k=5) for one in same)
        assert by_path == by_image and by_path[0].id == id
        assert by_id[:4] == by_path[1:]
        one = index.search(photos[:2], like=id, dislike=[photos[9], "1/0001.png"])
        assert len(one) == 2 and all(id not in {hit.id for hit in hits} for hits in one)


def test_a_query_is_no_hit_of_its_own(known: Any) -> None:
    index, everything = known
    ids = ("item 3", "item 40")
    vectors = np.stack([index.vector(id) for id in ids])
    together = index.answer(vectors, Query(5, group_by="label", likes=("item 9",), ids=ids))
    for id, vector, hits in zip(ids, vectors, together, strict=True):
        others = [item for item in everything if item.id != id]
        likes = [vector, index.vector("item 9")]
        wanted = rocchio(np.array(likes, np.float64), []).astype(np.float32)
        query = Query(5, group_by="label", filter="id != 'item 9'")
        assert [hit.id for hit in hits] == [name for name, _ in brute(others, wanted, query)]


def test_a_search_ends_with_its_patience(known: Any) -> None:
    index, _ = known
    vector = makers.weights(5, 1, WIDTH)
    options: list[dict[str, Any]] = [
        {"group_by": "label"},
        {"diversity": 0.5},
        {"max_distance": 3.0},
        {"like": "item 1"},
    ]
    for chosen in options:
        with pytest.raises(TooSlow, match="takes too long"), patience(-1):
            index.search(vector, **chosen)


@pytest.mark.scale
def test_values_that_are_no_groups_end_the_search(tmp_path: Path, bundle: Bundle) -> None:
    vectors = np.random.default_rng(0).normal(size=(50_100, WIDTH)).astype(np.float32)
    everything = [
        Item(f"{number}", None, {"tags": [number % 3]}, arrays={"vector": vector})
        for number, vector in enumerate(vectors)
    ]
    everything.append(Item("far", None, {"tags": "a"}, arrays={"vector": vectors[0] + 100}))
    with made(tmp_path / "i", bundle, everything) as index:
        with pytest.raises(DataError, match="50,000 nearest items have lists"):
            index.search(vectors[0], group_by="tags")
        (hit,) = index.search(vectors[0], group_by="tags", filter="tags = 'a'")
        assert hit.id == "far"


MISTAKES = [
    ({"offset": -1}, "offset must be a whole number from 0"),
    ({"offset": 1.5}, "offset must be a whole number from 0"),
    ({"max_distance": float("nan")}, "max_distance must be a number from 0"),
    ({"max_distance": "3"}, "max_distance must be a number from 0"),
    ({"diversity": 1.1}, "diversity must be a number from 0 to 1"),
    ({"group_size": 2}, "group_size needs group_by"),
    ({"group_by": "label", "group_size": 0}, "group_size must be at least 1"),
    ({"group_by": "colour"}, "colour"),
    ({"group_by": ""}, "is not a field"),
    ({"facets": "colour"}, "colour"),
    ({"facets": "a..b"}, "is not a field"),
    ({"order_by": "-"}, "is not a field"),
    ({"order_by": "-colour"}, "colour"),
    ({"scores": True}, "is not calibrated"),
    ({"like": "item 1000"}, "no item 'item 1000'"),
    ({"queries": None, "dislike": "item 1"}, "something to like"),
    ({"queries": None}, "A query is"),
]


@pytest.mark.parametrize(("options", "message"), MISTAKES)
def test_mistakes(known: Any, options: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        known[0].search(**{"queries": makers.weights(5, 1, WIDTH), **options})
