"""Feedback as triplets: a query, a hit that was preferred, and another hit that was not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import product
from typing import NamedTuple

import numpy as np
from retrieval.base.arrays import Floats32
from retrieval.feedback.feedback_record import DISLIKED, JudgedSearch

MOST_OF_VOTER = 500
"""Triplets of one voter that are learned."""
MOST_OF_ITEM = 500
"""Triplets in which one item is preferred that are learned, and in which it is the other."""
MOST_TRIPLETS = 200_000


class Preference(NamedTuple):
    """A voter preferred one hit of a search to another."""

    searched: JudgedSearch
    voter: str
    preferred: str
    other: str


def query_key(searched: JudgedSearch) -> str | bytes:
    """Return a value that searches with the same query share."""
    query = searched.search.query
    if query is None:
        return searched.search.item or ""
    return query.tobytes()


def preferences(searches: Iterable[JudgedSearch]) -> list[Preference]:
    """Return what voters preferred to what, the latest search first.

    A liked or clicked hit is preferred to each disliked hit, and to each unmarked hit above the
    last mark. Hits below it may not have been seen, so they count as nothing: this is the
    correction for places (after Joachims, "Optimizing search engines using clickthrough data", KDD
    2002, who compares a click with the hits above it; those between two clicks were skipped as
    well).

    Preferences of two items in opposite directions cancel one another if their queries are the
    same. The number of each voter's preferences is bounded, and of those with each item on a side.
    """
    every = [pair for searched in searches for pair in _of_search(searched)][::-1]
    votes = Counter((query_key(p.searched), p.preferred, p.other) for p in every)
    cancelled: Counter[tuple[str | bytes, str, str]] = Counter()
    counts: Counter[tuple[str, str]] = Counter()
    kept = []
    for preference in every:
        searched, voter, preferred, other = preference
        key = query_key(searched)
        if cancelled[key, preferred, other] < votes[key, other, preferred]:
            cancelled[key, preferred, other] += 1
            continue
        sides = (("preferred", preferred), ("other", other))
        if counts["voter", voter] == MOST_OF_VOTER or any(
            counts[side] == MOST_OF_ITEM for side in sides
        ):
            continue
        counts.update((*sides, ("voter", voter)))
        kept.append(preference)
    return kept[:MOST_TRIPLETS]


def sides(hits: Sequence[str], marks: Mapping[str, int]) -> tuple[list[str], list[str]]:
    """Return the hits that were liked or clicked, and the others down to the last mark."""
    last = max((place for place, hit in enumerate(hits) if hit in marks), default=-1)
    preferred = [hit for hit in hits if marks.get(hit, DISLIKED) != DISLIKED]
    return preferred, [hit for hit in hits[: last + 1] if hit not in preferred]


def _of_search(searched: JudgedSearch) -> Iterator[Preference]:
    hits = [hit for hit in searched.search.hits if hit]
    for voter, marks in sorted(searched.marks.items()):
        for preferred, other in product(*sides(hits, marks)):
            yield Preference(searched, voter, preferred, other)


def query_vector(searched: JudgedSearch, vectors: Mapping[str, Floats32]) -> Floats32 | None:
    """Return the base vector of a query, or None if its item is gone."""
    if searched.search.query is not None:
        return searched.search.query
    return vectors.get(searched.search.item or "")


def triplet_vectors(
    pairs: Sequence[Preference], vectors: Mapping[str, Floats32]
) -> tuple[Floats32, list[str]]:
    """Return triplets (T, 3, F) of base vectors, and the voter of each.

    Args:
        pairs: preferences.
        vectors: base vector of each item by id; preferences with items that it lacks are left out.
    """
    rows = []
    voters = []
    for searched, voter, preferred, other in pairs:
        query = query_vector(searched, vectors)
        if query is not None and preferred in vectors and other in vectors:
            rows.append((query, vectors[preferred], vectors[other]))
            voters.append(voter)
    return np.array(rows, np.float32), voters
