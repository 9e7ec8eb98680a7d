"""Feedback as triplets: a query, a hit that was preferred, and another hit that was not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import product
from typing import NamedTuple

import numpy as np
from retrieval.base.arrays import Floats32
from retrieval.feedback.feedback_record import DISLIKED, JudgedSearch

MAX_TRIPLETS_OF_VOTER = 500
"""Triplets of one voter that are learned."""
MAX_TRIPLETS_OF_ITEM = 500
"""Triplets in which one item is preferred that are learned, and in which it is the other."""
MAX_TRIPLETS = 200_000


class Preference(NamedTuple):
    """A voter preferred one hit of a search to another."""

    entry: JudgedSearch
    voter: str
    preferred: str
    other: str


def query_key(entry: JudgedSearch) -> str | bytes:
    """Return a value that searches with the same query share."""
    query = entry.search.query
    if query is None:
        return entry.search.item or ""
    return query.tobytes()


def preferences(searches: Iterable[JudgedSearch]) -> list[Preference]:
    """Return what voters preferred to what, the latest search first.

    A liked or clicked hit is preferred to each disliked hit, and to each unmarked hit above the
    last mark. Hits below the last mark may not have been seen, so they count for nothing, which
    corrects for the position of hits (after Joachims, "Optimizing search engines using clickthrough
    data", KDD 2002, who compares a click with the hits above it; hits between two clicks were
    skipped as well).

    Two opposite preferences for the same query cancel each other. Each voter, and each item on
    either side, has a largest number of preferences.
    """
    latest_first = [pair for entry in searches for pair in _of_search(entry)][::-1]
    votes = Counter((query_key(p.entry), p.preferred, p.other) for p in latest_first)
    cancelled: Counter[tuple[str | bytes, str, str]] = Counter()
    counts: Counter[tuple[str, str]] = Counter()
    chosen = []
    for preference in latest_first:
        entry, voter, preferred, other = preference
        key = query_key(entry)
        if cancelled[key, preferred, other] < votes[key, other, preferred]:
            cancelled[key, preferred, other] += 1
            continue
        sides = (("preferred", preferred), ("other", other))
        if counts["voter", voter] == MAX_TRIPLETS_OF_VOTER or any(
            counts[side] == MAX_TRIPLETS_OF_ITEM for side in sides
        ):
            continue
        counts.update((*sides, ("voter", voter)))
        chosen.append(preference)
    return chosen[:MAX_TRIPLETS]


def preferred_and_skipped(
    hits: Sequence[str], marks: Mapping[str, int]
) -> tuple[list[str], list[str]]:
    """Return the hits that were liked or clicked, and the other hits down to the last mark."""
    last = max((row for row, hit in enumerate(hits) if hit in marks), default=-1)
    preferred = [hit for hit in hits if marks.get(hit, DISLIKED) != DISLIKED]
    return preferred, [hit for hit in hits[: last + 1] if hit not in preferred]


def _of_search(entry: JudgedSearch) -> Iterator[Preference]:
    hits = [hit for hit in entry.search.hits if hit]
    for voter, marks in sorted(entry.marks.items()):
        for preferred, other in product(*preferred_and_skipped(hits, marks)):
            yield Preference(entry, voter, preferred, other)


def query_vector(entry: JudgedSearch, vectors: Mapping[str, Floats32]) -> Floats32 | None:
    """Return the base vector of a query, or None if its item is gone."""
    if entry.search.query is not None:
        return entry.search.query
    return vectors.get(entry.search.item or "")


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
    for entry, voter, preferred, other in pairs:
        query = query_vector(entry, vectors)
        if query is not None and preferred in vectors and other in vectors:
            rows.append((query, vectors[preferred], vectors[other]))
            voters.append(voter)
    return np.array(rows, np.float32), voters
