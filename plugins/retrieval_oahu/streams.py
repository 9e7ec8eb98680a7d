"""Streams of triplets: iterators that never end and hold no more than a window of what they gave.

Items are numbers, rows of whatever holds the features; `in_chunks` looks the features up, a chunk
at a time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from retrieval.model.labels import read_labels

from retrieval_oahu.closure import Closure, Triplet

Floats = NDArray[np.floating[Any]]

_TRIES = 20


class HeldOut:
    """Pairs of an evaluation set, which no stream may use.

    Args:
        pairs: (M, 2) numbers of items; their order does not matter.
    """

    def __init__(self, pairs: ArrayLike) -> None:
        given = np.asarray(pairs, dtype=np.int64).reshape(-1, 2)
        self._pairs = {(min(x, y), max(x, y)) for x, y in given.tolist()}

    def touches(self, triplet: Triplet) -> bool:
        """Return whether any two of a triplet's three items are a pair of the set."""
        a, p, n = triplet
        return any((min(x, y), max(x, y)) in self._pairs for x, y in ((a, p), (a, n), (p, n)))


def from_labels(
    labels: ArrayLike, *, seed: int = 0, held_out: HeldOut | None = None, skip: int = 0
) -> Iterator[Triplet]:
    """Return an endless stream of random triplets: any item with company in its class, another of
    the class, any of the others.

    Args:
        labels: (N,) one label per item.
        seed: the same seed gives the same stream.
        held_out: pairs that may not be used.
        skip: how many triplets of the stream were used before.

    Raises:
        ValueError: a label is missing, there are fewer than two classes, or no class has two
            members.
    """
    codes = np.unique(read_labels(labels), return_inverse=True)[1].ravel()
    # items sorted by class: the members of a class are a range, and so are, on a circle, all the
    # others
    order = np.argsort(codes, kind="stable")
    sizes = np.bincount(codes)
    starts = np.cumsum(sizes) - sizes
    anchors = np.flatnonzero(sizes[codes] > 1)
    if len(sizes) < 2 or not len(anchors):
        raise ValueError(
            "Triplets need at least two classes, one of them with two members; there are"
            f" {len(sizes)} classes of at most {sizes.max(initial=0)}."
        )
    place = np.empty(len(order), dtype=np.int64)
    place[order] = np.arange(len(order))
    return _random(order, place, codes, sizes, starts, anchors, seed, held_out, skip)


def _random(
    order: NDArray[Any],
    place: NDArray[Any],
    codes: NDArray[Any],
    sizes: NDArray[Any],
    starts: NDArray[Any],
    anchors: NDArray[Any],
    seed: int,
    held_out: HeldOut | None,
    skip: int,
) -> Iterator[Triplet]:
    rng = np.random.default_rng(seed)
    refused = 0
    while True:
        a = int(anchors[rng.integers(len(anchors))])
        size, start = sizes[codes[a]], starts[codes[a]]
        p = int(order[start + (place[a] - start + 1 + rng.integers(size - 1)) % size])
        n = int(order[(start + size + rng.integers(len(order) - size)) % len(order)])
        triplet = Triplet(a, p, n)
        if held_out is not None and held_out.touches(triplet):
            refused += 1
            if refused > 10_000:
                raise ValueError(
                    "10,000 random triplets in a row held a pair of the evaluation set: the set"
                    " leaves nothing to learn from."
                )
            continue
        refused = 0
        if skip:
            skip -= 1
            continue
        yield triplet


class with_closure:
    """Seed triplets as they come, each followed by triplets that follow from it and those before
    (§3.1).

    An iterator; it ends when the seeds do. It holds a window of seeds, half of which is let go when
    it is full.

    Args:
        seeds: an iterable of triplets of item numbers; it may never end.
        per_seed: how many triplets of the closure come for each seed.
        memory: how many seeds the closure is taken over.
        held_out: pairs of an evaluation set: no seed and no triplet of the closure with any of them
            is given.
        seed: of the closure's random choice.

    Attributes:
        seeds: how many seeds were given on.
        closed: how many triplets of the closure were given.
        contradictions: seeds that were left out because the opposite follows from the window.
        duplicates: seeds that were left out because the window holds them, or they were given as
            part of its closure.
        refused: seeds that were left out because they hold a pair of the evaluation set.
        last_contradiction: the latest contradicting seed, or None.
    """

    def __init__(
        self,
        seeds: Iterable[tuple[int, int, int]],
        *,
        per_seed: float = 1.0,
        memory: int = 10_000,
        held_out: HeldOut | None = None,
        seed: int = 0,
    ) -> None:
        if not per_seed >= 0 or memory < 2:
            raise ValueError(
                f"per_seed is {per_seed} and must not be negative; memory is {memory} and must be"
                " at least 2."
            )
        self.seeds = self.closed = self.contradictions = self.duplicates = self.refused = 0
        self.last_contradiction: Triplet | None = None
        self._source = iter(seeds)
        self._per_seed, self._memory, self._held_out = per_seed, memory, held_out
        self._rng = np.random.default_rng(seed)
        self._window: deque[Triplet] = deque()
        self._closure, self._seen = Closure(), set[Triplet]()
        self._owed, self._present = 0.0, False

    def __iter__(self) -> Iterator[Triplet]:
        return self

    def __next__(self) -> Triplet:
        """Return the next triplet."""
        while True:
            while self._owed >= 1.0:
                self._owed -= 1.0
                drawn = self._draw()
                if drawn is not None:
                    self.closed += 1
                    return drawn
            triplet = Triplet(*map(int, next(self._source)))
            if self._take(triplet):
                self.seeds += 1
                self._owed += self._per_seed
                return triplet

    def _take(self, triplet: Triplet) -> bool:
        if self._held_out is not None and self._held_out.touches(triplet):
            self.refused += 1
            return False
        if triplet in self._seen:
            self.duplicates += 1
            return False
        if len(self._window) >= self._memory or len(self._seen) > 4 * self._memory * (
            1 + self._per_seed
        ):
            self._forget()
        if not self._closure.add(triplet):
            self.contradictions += 1
            self.last_contradiction = triplet
            return False
        self._window.append(triplet)
        self._seen.add(triplet)
        return True

    def _draw(self) -> Triplet | None:
        """Return a triplet that follows and was not given before, or None after some tries."""
        for _ in range(_TRIES):
            triplet = self._closure.draw(self._rng)
            if triplet is None:
                return None
            if triplet in self._seen or (
                self._held_out is not None and self._held_out.touches(triplet)
            ):
                continue
            self._seen.add(triplet)
            return triplet
        return None

    def _forget(self) -> None:
        while len(self._window) > self._memory // 2:
            self._window.popleft()
        self._closure, self._seen = Closure(), set(self._window)
        for triplet in self._window:
            self._closure.add(triplet)


def paper_stream(
    labels: ArrayLike, seeds: int, closure: int, *, seed: int = 0, held_out: HeldOut | None = None
) -> Iterator[Triplet]:
    """Return the experiments' finite stream (§4.3.2): random seeds, then as many triplets of their
    closure, in the order of creation.

    Args:
        labels: (N,).
        seeds: how many random triplets.
        closure: how many that follow from them; new ones as long as some are found.
        seed: the same seed gives the same stream.
        held_out: pairs that may not be used.
    """
    rng = np.random.default_rng([seed, 1])
    source = from_labels(labels, seed=seed, held_out=held_out)
    known, seen = Closure(), set[Triplet]()
    for _ in range(seeds):
        triplet = next(source)
        known.add(triplet)
        seen.add(triplet)
        yield triplet
    for _ in range(closure):
        drawn = _usable(known, rng, seen, held_out)
        if drawn is None:
            return
        seen.add(drawn)
        yield drawn


def _usable(
    known: Closure, rng: np.random.Generator, seen: set[Triplet], held_out: HeldOut | None
) -> Triplet | None:
    """Return a triplet that follows, a new one if some tries find one; None where none may be used."""
    last = None
    for _ in range(_TRIES):
        drawn = known.draw(rng)
        if drawn is None:
            break
        if held_out is not None and held_out.touches(drawn):
            continue
        last = drawn
        if drawn not in seen:
            break
    return last


def in_chunks(
    stream: Iterable[tuple[int, int, int]], features: NDArray[Any], size: int = 256
) -> Iterator[Floats]:
    """Return the features (≤ size, 3, F) of a stream's triplets, a chunk at a time.

    Args:
        stream: triplets of rows.
        features: (N, F), in memory or mapped.
        size: triplets a chunk.
    """
    rows: list[tuple[int, int, int]] = []
    for triplet in stream:
        rows.append(triplet)
        if len(rows) == size:
            yield features[np.array(rows)]
            rows = []
    if rows:
        yield features[np.array(rows)]
