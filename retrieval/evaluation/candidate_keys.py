"""Candidates of many queries as keys of 64 bits: the half squared distance and the item, 32 bits each.

A key compares as the distance does, from 0 on, and then as the item: so a query's candidates are sorted in place, without an order beside them.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


def parts(keys: Ints) -> tuple[NDArray[np.float32], NDArray[np.int32]]:
    """Return the half squared distances and the items of which keys (..., n) are made, as views of them."""
    near, item = (1, 0) if sys.byteorder == "little" else (0, 1)
    return keys.view(np.float32)[..., near::2], keys.view(np.int32)[..., item::2]


def grouped(found: Sequence[tuple[Ints, Ints]], first: Ints) -> Ints:
    """Return the keys of all pieces, query by query; `first` (B,) is where each query's begin."""
    out, free = np.empty(sum(len(keys) for _, keys in found), np.int64), first.copy()
    for counts, keys in found:
        before = np.cumsum(counts) - counts
        out[np.repeat(free - before, counts) + np.arange(len(keys))] = keys
        free += counts
    return out


def true_places(mask: NDArray[np.bool_], size: int) -> Ints:
    """Return where the first entries of a mask are true; few are. The mask's length is a multiple of 8."""
    whole = -(-size // 8) * 8
    mask[size:whole] = False
    words = mask[:whole].view(np.uint64)
    some = np.flatnonzero(words != 0)
    inside = np.flatnonzero(words[some].view(np.bool_))
    return np.asarray(8 * some[inside >> 3] + (inside & 7))
