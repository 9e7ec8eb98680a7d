"""Which preferences are learned from marks."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from retrieval.feedback.feedback_record import CLICKED, DISLIKED, LIKED, JudgedSearch, Search

from retrieval_feedback import triplets
from retrieval_feedback.triplets import preferences, query_key, triplet_vectors


def searched(
    n: int, marks: Mapping[str, Mapping[str, int]], hits: str = "abcde", item: str = "q"
) -> JudgedSearch:
    search = Search(f"s{n}", 0.0, "", "base", "served", None, item, tuple(hits))
    return JudgedSearch(n, search, marks)


def pairs(*searches: JudgedSearch) -> list[str]:
    return [p.preferred + p.other for p in preferences(searches)][::-1]


def test_a_click_is_preferred_to_what_was_skipped():
    assert pairs(searched(1, {"v": {"b": CLICKED, "d": LIKED}})) == ["ba", "bc", "da", "dc"]


def test_a_dislike_is_seen_and_what_is_below_the_last_mark_is_not():
    assert pairs(searched(1, {"v": {"a": LIKED, "c": DISLIKED}})) == ["ab", "ac"]
    assert pairs(searched(1, {"v": {"c": DISLIKED}})) == []
    assert pairs(searched(1, {"v": {"a": CLICKED}})) == []


def test_contradictions_cancel_for_the_same_query_only():
    first = searched(1, {"v": {"b": CLICKED}, "w": {"b": CLICKED}}, "ab")
    second = searched(2, {"x": {"a": CLICKED}}, "ba")
    assert pairs(first, second) == ["ba"]
    assert pairs(first, searched(2, {"x": {"a": CLICKED}}, "ba", "other")) == ["ba", "ba", "ab"]


def test_a_voter_and_an_item_teach_a_bounded_number(monkeypatch):
    monkeypatch.setattr(triplets, "MAX_TRIPLETS_OF_VOTER", 3)
    monkeypatch.setattr(triplets, "MAX_TRIPLETS_OF_ITEM", 4)
    one = [searched(n, {"v": {"b": CLICKED}}, "ab", f"q{n}") for n in range(10)]
    assert [p.entry.n for p in preferences(one)] == [9, 8, 7]
    many = [searched(n, {f"v{n}": {"b": CLICKED}}, "ab", f"q{n}") for n in range(10)]
    assert [p.entry.n for p in preferences(many)] == [9, 8, 7, 6]


def test_vectors_of_queries_and_items():
    vectors = {name: np.full(2, place, np.float32) for place, name in enumerate("abcq")}
    item = searched(1, {"v": {"b": CLICKED}})
    query = np.array([7, 8], np.float32)
    photo = JudgedSearch(2, Search("s", 0.0, "", "", "", query, None, ("a", "b")), item.marks)
    gone = searched(3, {"v": {"d": CLICKED}}, "ad")
    found, voters = triplet_vectors(preferences([item, photo, gone]), vectors)
    assert voters == ["v", "v"]
    np.testing.assert_array_equal(found[:, 0], [[7, 8], [3, 3]])
    np.testing.assert_array_equal(found[:, 1:, 0], [[1, 0], [1, 0]])


def test_a_forgotten_hit_is_nobody():
    search = Search("s", 0.0, "", "", "", None, "q", ("", "b", "c"))
    assert pairs(JudgedSearch(1, search, {"v": {"c": CLICKED}})) == ["cb"]


def test_queries_are_told_apart():
    query = np.arange(2, dtype=np.float32)
    photos = [
        JudgedSearch(n, Search("", 0.0, "", "", "", query + shift, None, ()), {})
        for n, shift in enumerate((0, 0, 1))
    ]
    keys = [query_key(photo) for photo in photos]
    assert keys[0] == keys[1] != keys[2]
    assert query_key(searched(1, {})) == "q"
