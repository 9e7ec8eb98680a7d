"""The latest items of a stream, what is known of them, and how each item's neighbours vote.

What is known is what follows from the triplets (the rules of `closure`), as far as the memory
reaches: similar pairs join items into groups, a dissimilar one parts two groups. Where a triplet
contradicts that, it is believed, and its items are known by it alone.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.floating[Any]]
Ints = NDArray[np.int64]

VOTERS = (1, 3, 5, 7, 9)
"""How many neighbours vote: an item is asked with each of these numbers, and its verdict is the
mean.
"""
NEAR, NEAR_TURNED_OVER = 0.01, 0.05
"""Voters are among this share of the memory, the nearest, and among the largest of `VOTERS` where
that is less. The second is for a memory that has let items go: of a stream in which few come back
little is known, and what is known lies farther apart.
"""


class Memory:
    """Working view of a learner's arrays, which are changed in place.

    Args:
        vectors: (m, F) items, centred.
        keys: (m, 2) uint64, digests of the items' bytes, by which one is known again.
        group: (m,) the group of each place, a number below m; that of an empty place is one that no
            other has.
        parted: (m, m) bool, whether two groups are.
        used: (m,) when each place was used last, 0 for never: the one used longest ago is given
            away.
    """

    def __init__(
        self,
        vectors: Floats,
        keys: NDArray[np.uint64],
        group: Ints,
        parted: NDArray[np.bool_],
        used: Ints,
    ) -> None:
        self.vectors, self.keys, self.group, self.parted, self.used = (
            vectors,
            keys,
            group,
            parted,
            used,
        )
        self._clock = int(used.max(initial=0))
        self.size = int((used > 0).sum())  # places are filled in order
        self._place = {keys[place].tobytes(): place for place in range(self.size)}

    def take(self, vector: Floats, key: bytes) -> tuple[int, bool]:
        """Return an item's place and whether it is new there, maybe instead of the oldest."""
        self._clock += 1
        place = self._place.get(key)
        new = place is None
        if place is None:
            if self.size < len(self.used):
                place = self.size
                self.size += 1
            else:
                place = int(self.used.argmin())
                del self._place[self.keys[place].tobytes()]
                self._leave(place)
            self._place[key] = place
            self.vectors[place] = vector
            self.keys[place] = np.frombuffer(key, np.uint64)
        self.used[place] = self._clock
        return place, new

    def learn(self, anchor: int, positive: int, negative: int) -> None:
        """Take a triplet's two pairs in; what they contradict is given up."""
        group, parted = self.group, self.parted
        if parted[group[anchor], group[positive]]:
            self._leave(anchor)
            self._leave(positive)
        kept_group, lost_group = int(group[anchor]), int(group[positive])
        if kept_group != lost_group:
            group[group == lost_group] = kept_group
            parted[kept_group] |= parted[lost_group]
            parted[:, kept_group] |= parted[:, lost_group]
            parted[lost_group] = parted[:, lost_group] = False
        if group[negative] == kept_group:
            self._leave(negative)
        parted[kept_group, group[negative]] = parted[group[negative], kept_group] = True

    def votes(self, anchors: Ints, distances: Floats, share: float = NEAR) -> Floats:
        """Return items' votes (A,): 1 for the own group, 0 for another, ½ for a tie or nobody.

        `distances` (A, size) to every item are changed; for `share` see `NEAR`.
        """
        distances[np.arange(len(anchors)), anchors] = np.inf
        window = min(max(VOTERS[-1], int(share * self.size)), self.size - 1)
        near = np.argpartition(distances, window - 1, axis=1)[:, :window]
        near = np.take_along_axis(
            near, np.argsort(np.take_along_axis(distances, near, 1), axis=1), 1
        )
        groups, own = self.group[near], self.group[anchors][:, None]
        alike, unlike = groups == own, self.parted[own, groups]
        known = alike | unlike
        first = np.argsort(~known, axis=1, kind="stable")[:, : VOTERS[-1]]
        groups, alike, unlike = (
            np.take_along_axis(matrix, first, 1) for matrix in (groups, alike, unlike)
        )
        together = groups[:, :, None] == groups[:, None]
        votes = np.zeros(len(anchors))
        for number in VOTERS:
            against = unlike[:, :number]
            most = (together[:, :number, :number] & against[:, None]).sum(axis=2)
            most = np.where(against, most, 0).max(axis=1)
            for_own = alike[:, :number].sum(axis=1)
            votes += (for_own > most) + 0.5 * (for_own == most)
        return votes / len(VOTERS)

    def _leave(self, place: int) -> None:
        """Make an item a group of its own of which nothing is known."""
        group = int(self.group[place])
        if np.count_nonzero(self.group == group) > 1:
            used_groups = np.zeros(len(self.group), bool)
            used_groups[self.group] = True
            self.group[place] = group = int(used_groups.argmin())
        self.parted[group] = self.parted[:, group] = False


def digest(vector: Floats) -> bytes:
    """Return 16 bytes by which a vector is known again; two zeros of different sign are one."""
    return blake2b((vector + 0.0).tobytes(), digest_size=16).digest()
