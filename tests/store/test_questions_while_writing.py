"""Questions with options stay right while another thread adds, changes and deletes items."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import makers
import numpy as np
import pytest
from retrieval.bundle.bundle import Bundle
from retrieval.index.index import Index, open_index
from retrieval.store.contract import Item, widths_of
from retrieval.store.folder import create_local

WIDTH = makers.WIDTH
SIZE = 5
"""Items of a group."""
STABLE, MOVING = 40, 6
"""Numbers of groups. Moving ones come and go as a whole, nearer to the query than any other."""
QUERY = np.zeros(WIDTH, np.float32)


def vector(place: float) -> Any:
    """Return a vector at a distance from the query."""
    values = np.zeros(WIDTH, np.float32)
    values[0] = place
    return values


def group(kind: str, number: int, turn: int = 0) -> list[Item]:
    """Return the items of a group, at distances that its number and their own number tell.

    All groups lie among one another: each item of group 0 is nearer than all of group 1, and so on.
    """
    first = 100.0 if kind == "stable" else 1.0
    return [
        Item(
            f"{kind} {number} {place}",
            kind,
            {"group": f"{kind} {number}", "turn": turn, "place": place},
            arrays={"vector": vector(first + 10 * number + place)},
        )
        for place in range(SIZE)
    ]


@pytest.fixture
def index(tmp_path: Path) -> Iterator[Index]:
    bundle = Bundle.open(makers.make_bundle(tmp_path / "b", normalized=False), threads=1)
    create_local(tmp_path / "i", bundle, widths_of(bundle))
    with open_index(tmp_path / "i", threads=1) as opened:
        for number in range(STABLE):
            opened.upsert(group("stable", number))
        yield opened


@contextmanager
def changing(index: Index) -> Iterator[Callable[[], int]]:
    """Let moving groups come, change and go, each in one transaction, until the block ends."""
    stopped = threading.Event()
    turns = 0
    errors: list[BaseException] = []

    def write() -> None:
        nonlocal turns
        try:
            for turns in count():
                number = turns % MOVING
                items = group("moving", number, turns)
                index.upsert(items)
                if stopped.is_set():
                    return
                index.update([item.id for item in items], metadata={"turn": turns + 1})
                gone = group("moving", (turns + MOVING // 2) % MOVING)
                index.delete([item.id for item in gone])
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=write)
    thread.start()
    try:
        yield lambda: turns
    finally:
        stopped.set()
        thread.join()
    assert not errors
    assert turns > 10


def names(hits: Any) -> list[str]:
    """Return the groups of hits, each once, in their order."""
    return list(dict.fromkeys(hit.metadata["group"] for hit in hits))


def check(hits: Any) -> None:
    """Check what holds for any answer: each hit is one that was written, and was so as a whole."""
    ids = [hit.id for hit in hits]
    assert len(set(ids)) == len(ids)
    for hit in hits:
        kind, number, place = str(hit.id).split()
        first = 100.0 if kind == "stable" else 1.0
        assert hit.distance == first + 10 * int(number) + int(place)
        assert (hit.label, hit.metadata["group"]) == (kind, f"{kind} {number}")
        assert hit.metadata["place"] == int(place)


def test_groups_that_nobody_touches_are_never_missing(index):
    stable = [f"stable {number}" for number in range(STABLE)]
    everything = STABLE + MOVING
    with changing(index) as turns:
        while turns() < 40:
            hits = index.search(
                QUERY, everything, group_by="group", group_size=SIZE, facets="label"
            )
            check(hits)
            found = names(hits)
            assert [name for name in found if name.startswith("stable")] == stable
            # The hits of a group follow one another, nearest first, and no group is larger.
            for name in stable:
                places = [hit.metadata["place"] for hit in hits if hit.metadata["group"] == name]
                assert places == list(range(SIZE))
            assert [hit.metadata["group"] for hit in hits] == [
                name for name in found for hit in hits if hit.metadata["group"] == name
            ]
            # What the answer counts is what the answer has.
            counts = dict(hits.facets["label"])
            assert counts["stable"] == STABLE * SIZE
            assert sum(counts.values()) == len(hits)


def test_groups_come_nearest_first(index):
    with changing(index) as turns:
        while turns() < 40:
            hits = index.search(QUERY, 8, group_by="group", group_size=2)
            check(hits)
            found = names(hits)
            assert len(found) == 8
            nearest = [min(h.distance for h in hits if h.metadata["group"] == n) for n in found]
            assert nearest == sorted(nearest)
            # Without the moving groups, the answer is the one of an index that has none.
            kept = [name for name in found if name.startswith("stable")]
            assert kept == [f"stable {number}" for number in range(len(kept))]
            assert len(kept) >= 8 - MOVING


def test_filtered_questions_do_not_see_what_does_not_match(index):
    questions: list[dict[str, Any]] = [
        {"k": 20, "filter": "label = 'stable'"},
        {"k": 9, "filter": "label = 'stable' and place < 2", "offset": 4},
        {"k": 7, "filter": "label = 'stable'", "group_by": "group", "group_size": 3},
        {"k": 50, "filter": "label = 'stable'", "max_distance": 131.0, "facets": "place"},
        {"k": 10, "filter": "label = 'stable'", "diversity": 0.5},
        {"k": 10, "filter": "label = 'stable'", "like": "stable 3 1", "dislike": "stable 9 0"},
    ]
    before = [index.search(QUERY, **question) for question in questions]
    with changing(index) as turns:
        while turns() < 40:
            for question, expected in zip(questions, before, strict=True):
                hits = index.search(QUERY, **question)
                assert hits == expected
                assert hits.facets == expected.facets


def test_a_transaction_is_seen_as_a_whole(index):
    """A plain filtered search is of one moment: all items of a moving group, or none of them."""
    with changing(index) as turns:
        while turns() < 40:
            hits = index.search(QUERY, 1000, filter="label = 'moving'")
            check(hits)
            for name in names(hits):
                members = [hit for hit in hits if hit.metadata["group"] == name]
                assert len(members) == SIZE
                assert len({hit.metadata["turn"] for hit in members}) == 1
