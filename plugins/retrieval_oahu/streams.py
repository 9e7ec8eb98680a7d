"""Streams of triplets from labels or a click log, and triplets that other triplets imply.

Gao et al., "Towards Self-Adaptive Metric Learning On the Fly", WWW 2019, §3.1.
"""

from __future__ import annotations

import csv
import math
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime
from itertools import combinations, islice, permutations, product
from pathlib import Path
from typing import NamedTuple, TextIO

import numpy as np
from numpy.typing import ArrayLike
from retrieval.base.arrays import Array, Floats
from retrieval.errors import DataError
from retrieval.helpers import read_labels

# Number of draws of an implied triplet before giving up.
_TRIES = 20
COLUMNS = ("query", "shown", "chosen", "time")


class Triplet(NamedTuple):
    """Three item numbers: `anchor` is similar to `positive` and dissimilar to `negative`."""

    anchor: int
    positive: int
    negative: int


class Closure:
    """Groups of similar items, and the pairs of groups known to be dissimilar.

    Attributes:
        contradictions: number of triplets that were refused because earlier triplets imply the
            opposite.
    """

    def __init__(self) -> None:
        self.contradictions = 0
        self._group: dict[int, int] = {}
        self._members: dict[int, list[int]] = {}
        self._parted: dict[int, set[int]] = {}
        # Pairs of dissimilar groups. A pair that a later join makes invalid is dropped when drawn.
        self._edges: list[tuple[int, int]] = []

    def __len__(self) -> int:
        return len(self._group)

    def similar(self, x: int, y: int) -> bool:
        """Return whether the triplets imply that two items are similar."""
        group = self._group.get(x)
        return x == y or (group is not None and group == self._group.get(y))

    def dissimilar(self, x: int, y: int) -> bool:
        """Return whether the triplets imply that two items are dissimilar."""
        if x not in self._group or y not in self._group:
            return False
        return self._group[y] in self._parted[self._group[x]]

    def add(self, triplet: Triplet) -> bool:
        """Add a triplet unless it contradicts earlier ones; return whether it was added."""
        a, p, n = triplet
        if self.dissimilar(a, p) or self.similar(a, n) or self.similar(p, n):
            self.contradictions += 1
            return False
        for item in triplet:
            if item not in self._group:
                self._group[item] = item
                self._members[item] = [item]
                self._parted[item] = set()
        self._join(self._group[a], self._group[p])
        self._part(self._group[a], self._group[n])
        return True

    def draw(self, rng: np.random.Generator) -> Triplet | None:
        """Return a random implied triplet, or None if there is none or several draws fail.

        Two dissimilar groups are drawn first, then items of these groups.
        """
        for _ in range(32):
            while self._edges:
                number = int(rng.integers(len(self._edges)))
                left, right = self._edges[number]
                if left in self._parted and right in self._parted[left]:
                    break
                # The order of the pairs does not matter, so the last one fills the gap.
                self._edges[number] = self._edges[-1]
                self._edges.pop()
            else:
                return None
            if rng.integers(2):
                left, right = right, left
            similar = self._members[left]
            if len(similar) > 1:
                a = int(rng.integers(len(similar)))
                p = int(rng.integers(len(similar) - 1))
                dissimilar = self._members[right]
                n = int(rng.integers(len(dissimilar)))
                return Triplet(similar[a], similar[p + (p >= a)], dissimilar[n])
        return None

    def _join(self, larger: int, smaller: int) -> None:
        """Join two groups of similar items."""
        if larger == smaller:
            return
        # Each item that moves comes into a group of at least twice the size, so it moves rarely.
        if len(self._members[larger]) < len(self._members[smaller]):
            larger, smaller = smaller, larger
        for item in self._members[smaller]:
            self._group[item] = larger
        self._members[larger] += self._members.pop(smaller)
        for other in self._parted.pop(smaller):
            self._parted[other].discard(smaller)
            self._part(larger, other)

    def _part(self, left: int, right: int) -> None:
        """Record that two groups are dissimilar."""
        if right not in self._parted[left]:
            self._parted[left].add(right)
            self._parted[right].add(left)
            self._edges.append((left, right))


class HeldOut:
    """Pairs of an evaluation set, which streams must not use.

    Args:
        pairs: (M, 2) item numbers, in either order.
    """

    def __init__(self, pairs: ArrayLike) -> None:
        rows = np.asarray(pairs, dtype=np.int64).reshape(-1, 2)
        self._pairs = {(x, y) for pair in rows.tolist() for x, y in permutations(pair)}

    def touches(self, triplet: Triplet) -> bool:
        """Return whether a triplet contains a held-out pair."""
        # Most streams hold nothing out, and ask for every triplet.
        return bool(self._pairs) and not self._pairs.isdisjoint(combinations(triplet, 2))


def from_labels(
    labels: ArrayLike, *, seed: int = 0, held_out: HeldOut | None = None, skip: int = 0
) -> Iterator[Triplet]:
    """Return an endless stream of random triplets: two items of one class and one of another.

    Args:
        labels: (N,) one label per item.
        seed: random seed.
        held_out: pairs that the stream must not use.
        skip: number of triplets to skip at the start, to continue an earlier stream.

    Raises:
        ValueError: a label is missing, there are fewer than two classes, or no class has two
            members.
    """
    codes = np.unique(read_labels(labels), return_inverse=True)[1].ravel()
    # Each class is a range of `order`. If `order` is circular, all other classes are a range too.
    order = np.argsort(codes, kind="stable")
    sizes = np.bincount(codes)
    starts = np.cumsum(sizes) - sizes
    anchors = np.flatnonzero(sizes[codes] > 1)
    if len(sizes) < 2 or not len(anchors):
        raise ValueError(
            "Triplets need at least two classes, one of them with two members. There are"
            f" {len(sizes)} classes with at most {sizes.max(initial=0)} members."
        )
    # The position of each item in `order`.
    position = np.empty(len(order), dtype=np.int64)
    position[order] = np.arange(len(order))
    forbidden = held_out or HeldOut([])

    def draws() -> Iterator[Triplet]:
        rng = np.random.default_rng(seed)
        refused = 0
        while True:
            a = int(anchors[rng.integers(len(anchors))])
            size = sizes[codes[a]]
            start = starts[codes[a]]
            # One to size - 1 steps onwards from the anchor, so never the anchor itself.
            steps = 1 + rng.integers(size - 1)
            p = int(order[start + (position[a] - start + steps) % size])
            n = int(order[(start + size + rng.integers(len(order) - size)) % len(order)])
            triplet = Triplet(a, p, n)
            if not forbidden.touches(triplet):
                refused = 0
                yield triplet
                continue
            refused += 1
            if refused > 10_000:
                raise ValueError(
                    "10,000 random triplets in a row had a pair of the evaluation set, which leaves"
                    " nothing to learn from."
                )

    # The labels are checked now, not when the first triplet is drawn.
    return islice(draws(), skip, None)


class with_closure:
    """Iterator over seed triplets, each followed by triplets that the seeds so far imply (§3.1).

    The iterator ends when the seeds end. Triplets are implied by a window of the latest seeds. When
    the window is full, its older half is dropped.

    Args:
        seeds: an iterable of triplets of item numbers; it may be endless.
        per_seed: number of implied triplets per seed.
        memory: largest number of seeds in the window.
        held_out: pairs of an evaluation set. Seeds and implied triplets with such a pair are
            skipped.
        seed: seed of the random choice of implied triplets.

    Attributes:
        seeds: number of seeds yielded.
        closed: number of implied triplets yielded.
        contradictions: number of seeds skipped because the window implies the opposite.
        duplicates: number of seeds skipped because they are in the window or were yielded as
            implied triplets.
        refused: number of seeds skipped because they contain a held-out pair.
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
                f"per_seed must not be negative, and memory must be at least 2, not {per_seed} and"
                f" {memory}."
            )
        self.seeds = self.closed = self.contradictions = self.duplicates = self.refused = 0
        self.last_contradiction: Triplet | None = None
        self._source = iter(seeds)
        self._per_seed = per_seed
        self._memory = memory
        self._held_out = held_out or HeldOut([])
        self._rng = np.random.default_rng(seed)
        self._window: deque[Triplet] = deque()
        self._closure = Closure()
        self._seen = set[Triplet]()
        # Number of implied triplets to yield before the next seed.
        self._owed = 0.0

    def __iter__(self) -> Iterator[Triplet]:
        return self

    def __next__(self) -> Triplet:
        """Return the next triplet."""
        while True:
            while self._owed >= 1.0:
                self._owed -= 1.0
                drawn = _implied(self._closure, self._rng, self._seen, self._held_out)
                if drawn is not None and drawn not in self._seen:
                    self._seen.add(drawn)
                    self.closed += 1
                    return drawn
            triplet = Triplet(*map(int, next(self._source)))
            if self._take(triplet):
                self.seeds += 1
                self._owed += self._per_seed
                return triplet

    def _take(self, triplet: Triplet) -> bool:
        """Add a seed to the window and return True, or count why it is skipped."""
        if self._held_out.touches(triplet):
            self.refused += 1
            return False
        if triplet in self._seen:
            self.duplicates += 1
            return False
        # `_seen` also has the implied triplets, so it may fill before the window does.
        most_seen = 4 * self._memory * (1 + self._per_seed)
        if len(self._window) >= self._memory or len(self._seen) > most_seen:
            self._forget()
        if not self._closure.add(triplet):
            self.contradictions += 1
            self.last_contradiction = triplet
            return False
        self._window.append(triplet)
        self._seen.add(triplet)
        return True

    def _forget(self) -> None:
        """Drop the older half of the window."""
        while len(self._window) > self._memory // 2:
            self._window.popleft()
        self._closure = Closure()
        self._seen = set(self._window)
        for triplet in self._window:
            self._closure.add(triplet)


def paper_stream(
    labels: ArrayLike, seeds: int, closure: int, *, seed: int = 0, held_out: HeldOut | None = None
) -> Iterator[Triplet]:
    """Yield the stream of OAHU's experiments (§4.3.2): random seeds, then implied triplets."""
    # Independent of the generator of the seeds.
    rng = np.random.default_rng([seed, 1])
    source = from_labels(labels, seed=seed, held_out=held_out)
    closed = Closure()
    seen: set[Triplet] = set()
    for triplet in islice(source, seeds):
        closed.add(triplet)
        seen.add(triplet)
        yield triplet
    for _ in range(closure):
        drawn = _implied(closed, rng, seen, held_out or HeldOut([]))
        if drawn is None:
            return
        seen.add(drawn)
        yield drawn


def _implied(
    closure: Closure, rng: np.random.Generator, seen: set[Triplet], held_out: HeldOut
) -> Triplet | None:
    """Return an implied triplet, preferably one not in `seen`, or None if there is none."""
    last = None
    for _ in range(_TRIES):
        drawn = closure.draw(rng)
        if drawn is None:
            break
        if not held_out.touches(drawn):
            last = drawn
            if drawn not in seen:
                break
    return last


def in_chunks(
    stream: Iterable[tuple[int, int, int]], features: Array, size: int = 256
) -> Iterator[Floats]:
    """Yield the features (≤ size, 3, F) of a stream's triplets in chunks.

    Args:
        stream: triplets of row numbers of `features`.
        features: (N, F), in memory or memory-mapped.
        size: number of triplets per chunk.
    """
    rows: list[tuple[int, int, int]] = []
    for triplet in stream:
        rows.append(triplet)
        if len(rows) == size:
            yield features[np.array(rows)]
            rows = []
    if rows:
        yield features[np.array(rows)]


class ClickLog:
    """A stream of triplets from a CSV file of searches with columns query, shown, chosen, time.

    A line is one search. `shown` and `chosen` are ids separated by `|`; `time` is ISO 8601 or
    seconds. Every pair of a chosen item and an item shown but not chosen makes one triplet (query,
    chosen, not chosen), in the order of the file.

    Args:
        path: the file, UTF-8, with a header.
        ids: row of the features for each id.
        follow: whether to wait for new lines at the end of the file, for a log that a server is
            writing. Then the stream never ends.
        poll: seconds to wait before reading again.

    Attributes:
        lines: number of searches read.
        unknown: number of ids that were skipped because `ids` lacks them.
        unusable: number of searches without a triplet, because nothing was chosen, everything was
            chosen, only the query itself was chosen, or its id is unknown.
        late: number of searches with an earlier time than a search before them.
        malformed: number of lines that were skipped because the number of columns or the time is
            wrong.
    """

    def __init__(
        self, path: str | Path, ids: Mapping[str, int], *, follow: bool = False, poll: float = 1.0
    ) -> None:
        self.path = Path(path)
        self.ids = ids
        self.follow = follow
        self.poll = poll
        self.lines = self.unknown = self.unusable = self.late = self.malformed = 0

    def __iter__(self) -> Iterator[Triplet]:
        """Yield the triplets from the start of the file."""
        try:
            with self.path.open(encoding="utf-8", newline="") as file:
                yield from self._read(file)
        except (OSError, UnicodeDecodeError, csv.Error) as fault:
            reason = getattr(fault, "strerror", None) or str(fault)
            raise DataError(f"{self.path} cannot be read as a click log: {reason}.") from fault

    def _read(self, file: TextIO) -> Iterator[Triplet]:
        first = next(self._text(file), "")
        header = [name.strip() for name in next(csv.reader([first]), [])]
        missing = [name for name in COLUMNS if name not in header]
        if missing:
            raise DataError(
                f"{self.path} has no column {', '.join(missing)}. A click log has the columns"
                f" {', '.join(COLUMNS)}."
            )
        columns = [header.index(name) for name in COLUMNS]
        latest = -math.inf
        for row in csv.reader(self._text(file)):
            if not row:
                continue
            when = None
            if len(row) == len(header):
                when = _seconds(row[columns[3]])
            if when is None:
                self.malformed += 1
                continue
            self.lines += 1
            self.late += when < latest
            latest = max(latest, when)
            yield from self._triplets(*(row[column] for column in columns[:3]))

    def _triplets(self, query: str, shown: str, chosen: str) -> Iterator[Triplet]:
        chosen_rows = self._rows(chosen)
        shown_rows = self._rows(shown)
        queries = self._rows(query)
        positives = [row for row in chosen_rows if row not in queries]
        negatives = [row for row in shown_rows if row not in chosen_rows and row not in queries]
        if not (queries and positives and negatives):
            self.unusable += 1
            return
        for positive, negative in product(positives, negatives):
            yield Triplet(queries[0], positive, negative)

    def _rows(self, text: str) -> list[int]:
        """Return the rows of the ids without duplicates; count unknown ids."""
        rows: dict[int, None] = {}
        for name in filter(None, map(str.strip, text.split("|"))):
            row = self.ids.get(name)
            if row is None:
                self.unknown += 1
            else:
                rows[row] = None
        return list(rows)

    def _text(self, file: TextIO) -> Iterator[str]:
        """Yield complete lines; with `follow`, wait for further lines and for the end of a line."""
        part = ""
        while True:
            line = file.readline()
            part += line
            if part.endswith("\n"):
                yield part
                part = ""
            elif not line:
                if not self.follow:
                    if part:
                        yield part
                    return
                time.sleep(self.poll)


def _seconds(text: str) -> float | None:
    """Return a time in seconds, or None if the text is not a time."""
    try:
        value = float(text)
    except ValueError:
        try:
            return datetime.fromisoformat(text.strip()).timestamp()
        except ValueError:
            return None
    if math.isfinite(value):
        return value
    return None
