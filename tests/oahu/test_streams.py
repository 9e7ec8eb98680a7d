"""Streams of triplets: the closure against brute force, contradictions, held-out pairs, bounds."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from retrieval_oahu import Closure, Spaces, from_labels, in_chunks, with_closure
from retrieval_oahu.streams import HeldOut, Triplet, paper_stream

LABELS = np.repeat(np.arange(4), [5, 1, 20, 9])[np.random.default_rng(0).permutation(35)]


def brute(triplets: list[Triplet], items: int) -> tuple[set[Any], set[Any]]:
    """Similar and dissimilar pairs by the paper's four rules, applied until nothing changes."""
    s, d = ({frozenset((t[0], t[k])) for t in triplets} for k in (1, 2))
    while True:
        more_s, more_d = set(s), set(d)
        for x, y, z in itertools.permutations(range(items), 3):
            xy, xz, yz = frozenset((x, y)), frozenset((x, z)), frozenset((y, z))
            if xy in s and xz in s:
                more_s.add(yz)
            if xy in s and yz in s:
                more_s.add(xz)
            if xy in s and xz in d:
                more_d.add(yz)
            if xy in s and yz in d:
                more_d.add(xz)
        if (more_s, more_d) == (s, d):
            return s, d
        s, d = more_s, more_d


def test_the_closure_follows_the_four_rules():
    rng = np.random.default_rng(1)
    refused = 0
    for _ in range(15):
        closure, used = Closure(), []
        for _ in range(8):
            triplet = Triplet(*map(int, rng.choice(9, 3, replace=False)))
            similar, dissimilar = brute([*used, triplet], 9)
            consistent = not similar & dissimilar
            assert closure.add(triplet) == consistent
            if consistent:
                used.append(triplet)
            else:
                refused += 1
        s, d = brute(used, 9)
        for x, y in itertools.combinations(range(9), 2):
            assert closure.similar(x, y) == (frozenset((x, y)) in s)
            assert closure.dissimilar(x, y) == (frozenset((x, y)) in d)
        drawn = {closure.draw(rng) for _ in range(300)}
        assert all(frozenset((a, p)) in s and frozenset((a, n)) in d for a, p, n in drawn)
        possible = {
            (a, p, n)
            for a, p, n in itertools.permutations(range(9), 3)
            if frozenset((a, p)) in s and frozenset((a, n)) in d
        }
        if len(possible) < 30:
            assert drawn == possible
    assert refused > 5


def test_triplets_from_labels_are_right_and_decided_by_the_seed():
    first = list(itertools.islice(from_labels(LABELS, seed=3), 5000))
    for a, p, n in first:
        assert LABELS[a] == LABELS[p] != LABELS[n] and a != p
    assert first == list(itertools.islice(from_labels(LABELS, seed=3), 5000))
    assert first[4000:] == list(itertools.islice(from_labels(LABELS, seed=3, skip=4000), 1000))
    assert first != list(itertools.islice(from_labels(LABELS, seed=4), 5000))
    # every possible anchor occurs, and every positive and negative of one anchor
    assert {a for a, _, _ in first} == set(np.flatnonzero(np.bincount(LABELS)[LABELS] > 1).tolist())
    left = first[0][0]
    many = [t for t in itertools.islice(from_labels(LABELS, seed=5), 20_000) if t[0] == left]
    assert {p for _, p, _ in many} == set(np.flatnonzero(LABELS[left] == LABELS).tolist()) - {left}
    assert {n for _, _, n in many} == set(np.flatnonzero(LABELS[left] != LABELS).tolist())


@pytest.mark.parametrize("labels", [[1, 1, 1], [1, 2, 3], []])
def test_labels_without_a_triplet_are_refused(labels):
    with pytest.raises(ValueError, match="two classes"):
        from_labels(labels)


@pytest.mark.parametrize("labels", [["a", "a", float("nan"), "b"], [1, 1, None, 2]])
def test_a_missing_label_is_refused(labels):
    references = Spaces(np.ones((2, 4, 3)), np.full(2, 0.5))
    for call in (lambda: from_labels(labels), lambda: references.classify(references, labels, 1)):
        with pytest.raises(ValueError, match=r"1 of 4 labels is missing .* row 2"):
            call()


def test_no_stream_uses_a_held_out_pair():
    rng = np.random.default_rng(0)
    pairs = rng.integers(0, 35, (150, 2))
    held = HeldOut(pairs)
    forbidden = {frozenset(pair) for pair in pairs.tolist()}

    def clean(triplets: Any) -> bool:
        return not any(
            frozenset(p) in forbidden for t in triplets for p in itertools.combinations(t, 2)
        )

    assert clean(itertools.islice(from_labels(LABELS, held_out=held), 2000))
    assert clean(paper_stream(LABELS, 500, 500, held_out=held))
    stream = with_closure(from_labels(LABELS), held_out=held)
    assert clean(itertools.islice(stream, 1000)) and stream.refused > 100
    assert not clean(itertools.islice(with_closure(from_labels(LABELS)), 1000))
    everything = HeldOut(list(itertools.combinations(range(35), 2)))
    with pytest.raises(ValueError, match="leaves nothing"):
        next(from_labels(LABELS, held_out=everything))


def test_contradictions_and_duplicates_are_skipped_and_counted():
    stream = with_closure([(0, 1, 2), (0, 1, 2), (1, 2, 3), (4, 5, 0), (2, 2, 2)], per_seed=0)
    assert list(stream) == [(0, 1, 2), (4, 5, 0)]
    assert (stream.seeds, stream.duplicates, stream.contradictions) == (2, 1, 2)
    assert stream.last_contradiction == (2, 2, 2)


def test_the_closure_of_labels_is_right_and_has_no_duplicates():
    stream = with_closure(from_labels(LABELS), per_seed=2.0, memory=1000)
    seen = list(itertools.islice(stream, 900))
    assert stream.closed > 400 and len(set(seen)) == 900
    assert all(LABELS[a] == LABELS[p] != LABELS[n] for a, p, n in seen)
    assert stream.contradictions == 0


def test_an_endless_stream_keeps_only_a_window():
    labels = np.arange(200_000) % 1000
    stream = with_closure(from_labels(labels), memory=200)
    for _ in itertools.islice(stream, 5000):
        assert len(stream._window) <= 200 and len(stream._closure) <= 600
        assert len(stream._seen) <= 1600
    assert stream.seeds + stream.closed == 5000 and stream.closed > 2000


def test_the_papers_stream_is_seeds_then_closure():
    labels = np.arange(3000) % 10
    triplets = list(paper_stream(labels, 400, 400, seed=1))
    assert len(triplets) == 800 and len(set(triplets[400:]) - set(triplets[:400])) == 400
    assert all(labels[a] == labels[p] != labels[n] for a, p, n in triplets)
    assert triplets == list(paper_stream(labels, 400, 400, seed=1))
    assert list(paper_stream([0, 0, 1], 1, 3, seed=0))  # almost nothing is implied, so it repeats


def test_chunks_hold_the_features_of_the_rows():
    x = np.arange(40.0).reshape(20, 2)
    chunks = list(in_chunks([(0, 1, 2), (3, 4, 5), (6, 7, 8)], x, 2))
    assert [c.shape for c in chunks] == [(2, 3, 2), (1, 3, 2)]
    assert np.array_equal(chunks[1][0], x[[6, 7, 8]])


def test_parameters_are_checked():
    for wrong in ({"per_seed": -1.0}, {"memory": 1}):
        with pytest.raises(ValueError, match=r"per_seed must .* memory must"):
            with_closure([], **wrong)
