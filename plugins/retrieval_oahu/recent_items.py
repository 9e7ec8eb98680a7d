"""Memory of a stream's latest items and their relations, and votes of an item's neighbours.

Relations follow the rules of `streams.Closure`: similar pairs join items into groups, and a
dissimilar pair makes two groups dissimilar. If a triplet contradicts earlier triplets, its items
lose their earlier relations.
"""

from __future__ import annotations

from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray
from retrieval.base.arrays import Bools, Floats, Ints

VOTERS = (1, 3, 5, 7, 9)
"""Numbers of neighbours that vote; an item's vote is the mean over these numbers."""
NEAR = 0.01
NEAR_TURNED_OVER = 0.05
"""Share of the memory that may vote on an item: its nearest items, at least `VOTERS[-1]` of them.

The second value applies once the memory has evicted items. Few items of such a stream come back, so
few relations are known, and items with a known relation are farther away.
"""


class Memory:
    """A memory in a learner's arrays, which are changed in place. A slot is a row of the arrays.

    Args:
        vectors: (m, F) centred features of the items.
        keys: (m, 2) uint64 digests of the items' bytes, which identify the items.
        group: (m,) number of each slot's group, below m. An empty slot has a group of its own.
        parted: (m, m) bool, whether two groups are dissimilar.
        used: (m,) time of each slot's last use, or 0. A full memory evicts the item whose last use
            is the earliest.
    """

    def __init__(
        self,
        vectors: Floats,
        keys: NDArray[np.uint64],
        group: Ints,
        parted: Bools,
        used: Ints,
    ) -> None:
        self.vectors = vectors
        self.keys = keys
        self.group = group
        self.parted = parted
        self.used = used
        self._clock = int(used.max(initial=0))
        # Slots are filled in order.
        self.size = int((used > 0).sum())
        self._slot = {keys[slot].tobytes(): slot for slot in range(self.size)}

    def take(self, vector: Floats, key: bytes) -> tuple[int, bool]:
        """Return an item's slot and whether it is new; a new item may evict another."""
        self._clock += 1
        slot = self._slot.get(key)
        new = slot is None
        if slot is None:
            if self.size < len(self.used):
                slot = self.size
                self.size += 1
            else:
                slot = int(self.used.argmin())
                del self._slot[self.keys[slot].tobytes()]
                self._leave(slot)
            self._slot[key] = slot
            self.vectors[slot] = vector
            self.keys[slot] = np.frombuffer(key, np.uint64)
        # An item that comes again stays longer.
        self.used[slot] = self._clock
        return slot, new

    def learn(self, anchor: int, positive: int, negative: int) -> None:
        """Add a triplet's two pairs; drop relations that contradict them."""
        group = self.group
        parted = self.parted
        if parted[group[anchor], group[positive]]:
            self._leave(anchor)
            self._leave(positive)
        joined = int(group[anchor])
        emptied = int(group[positive])
        if joined != emptied:
            group[group == emptied] = joined
            parted[joined] |= parted[emptied]
            parted[:, joined] |= parted[:, emptied]
            parted[emptied] = parted[:, emptied] = False
        if group[negative] == joined:
            self._leave(negative)
        parted[joined, group[negative]] = parted[group[negative], joined] = True

    def votes(self, anchors: Ints, distances: Floats, share: float = NEAR) -> Floats:
        """Return how well neighbours classify items (A,), from 0 to 1.

        For each number v in `VOTERS`, the v nearest items with a known relation vote. The vote is 1
        if more of them are of the item's group than of any dissimilar group, ½ for a tie, and 0
        otherwise. The result is the mean of these votes.

        Args:
            anchors: (A,) slots of the items.
            distances: (A, size) distances to every item. They are changed in place.
            share: share of the memory that may vote; see `NEAR`.
        """
        distances[np.arange(len(anchors)), anchors] = np.inf
        window = max(VOTERS[-1], int(share * self.size))
        # Without the item itself.
        window = min(window, self.size - 1)
        nearest = np.argpartition(distances, window - 1, axis=1)[:, :window]
        order = np.argsort(np.take_along_axis(distances, nearest, 1), axis=1)
        nearest = np.take_along_axis(nearest, order, 1)
        groups = self.group[nearest]
        anchor_group = self.group[anchors][:, None]
        alike = groups == anchor_group
        unlike = self.parted[anchor_group, groups]
        # Neighbours with a known relation come first, the nearest of them first.
        has_relation = alike | unlike
        voters = np.argsort(~has_relation, axis=1, kind="stable")[:, : VOTERS[-1]]
        groups = np.take_along_axis(groups, voters, 1)
        alike = np.take_along_axis(alike, voters, 1)
        unlike = np.take_along_axis(unlike, voters, 1)
        same_group = groups[:, :, None] == groups[:, None]
        total = np.zeros(len(anchors))
        for number in VOTERS:
            against = unlike[:, :number]
            # the size of the largest dissimilar group among the voters
            sizes = (same_group[:, :number, :number] & against[:, None]).sum(axis=2)
            largest = np.where(against, sizes, 0).max(axis=1)
            favouring = alike[:, :number].sum(axis=1)
            total += (favouring > largest) + 0.5 * (favouring == largest)
        return total / len(VOTERS)

    def _leave(self, slot: int) -> None:
        """Move an item into an empty group, which has no known relations."""
        group = int(self.group[slot])
        if np.count_nonzero(self.group == group) > 1:
            used_groups = np.zeros(len(self.group), bool)
            used_groups[self.group] = True
            self.group[slot] = group = int(used_groups.argmin())
        self.parted[group] = self.parted[:, group] = False


def digest(vector: Floats) -> bytes:
    """Return 16 bytes that identify a vector; 0 and −0 give the same bytes."""
    return blake2b((vector + 0.0).tobytes(), digest_size=16).digest()
