"""What follows from similar and dissimilar pairs: the paper's four rules of transitive closure
(§3.1, footnote 1).

Similar pairs join items into groups; a dissimilar pair parts two groups. So a similar pair follows
from two items of a group, and a dissimilar one from two items of groups that are parted: the four
rules, and no others, in near-constant time a pair.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class Triplet(NamedTuple):
    """Numbers of items: `anchor` is like `positive` and unlike `negative`."""

    anchor: int
    positive: int
    negative: int


class Closure:
    """Groups of items that pairs have joined, and which groups are parted.

    Attributes:
        contradictions: pairs that were refused because the opposite follows from what came before.
    """

    def __init__(self) -> None:
        self.contradictions = 0
        self._group: dict[int, int] = {}
        self._members: dict[int, list[int]] = {}
        self._parted: dict[int, set[int]] = {}
        # parted pairs of groups, to draw from; those that a later join made stale are dropped when
        # they are drawn
        self._edges: list[tuple[int, int]] = []

    def __len__(self) -> int:
        return len(self._group)

    def similar(self, x: int, y: int) -> bool:
        """Return whether it follows that two items are alike."""
        return x == y or (x in self._group and self._group[x] == self._group.get(y))

    def dissimilar(self, x: int, y: int) -> bool:
        """Return whether it follows that two items are unlike."""
        return (
            x in self._group and y in self._group and self._group[y] in self._parted[self._group[x]]
        )

    def add(self, triplet: Triplet) -> bool:
        """Take a triplet in, unless it contradicts what follows already; then nothing of it is
        taken.

        Returns:
            Whether it was taken.
        """
        a, p, n = triplet
        contradicts = self.dissimilar(a, p) or self.similar(a, n) or self.similar(p, n)
        if contradicts:
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
        """Return a random triplet that follows, or None where only single items are parted: two
        parted groups, then the items.
        """
        for _ in range(32):
            while self._edges:
                place = int(rng.integers(len(self._edges)))
                one, other = self._edges[place]
                if one in self._parted and other in self._parted[one]:
                    break
                self._edges[place] = self._edges[-1]
                self._edges.pop()
            else:
                return None
            if rng.integers(2):
                one, other = other, one
            own = self._members[one]
            if len(own) > 1:
                a = int(rng.integers(len(own)))
                p = int(rng.integers(len(own) - 1))
                away = self._members[other]
                return Triplet(own[a], own[p + (p >= a)], away[int(rng.integers(len(away)))])
        return None

    def _join(self, one: int, other: int) -> None:
        if one == other:
            return
        if len(self._members[one]) < len(self._members[other]):
            one, other = other, one
        for item in self._members[other]:
            self._group[item] = one
        self._members[one] += self._members.pop(other)
        for away in self._parted.pop(other):
            self._parted[away].discard(other)
            self._part(one, away)

    def _part(self, one: int, other: int) -> None:
        if other not in self._parted[one]:
            self._parted[one].add(other)
            self._parted[other].add(one)
            self._edges.append((one, other))
