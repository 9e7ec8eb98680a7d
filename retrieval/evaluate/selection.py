"""The k smallest of each row, in one fixed order: by value, and equal values by column.

One int64 holds a float32 and its column, so that a single partition and a single sort, both vectorised in NumPy, give the
order with its tie rule and the columns with it.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_LAST = np.iinfo(np.int64).max
# Entries worked on at once: 512 KB of keys stay in a core's cache through all passes over them.
_AT_ONCE = 2**16

Floats = NDArray[np.float64] | NDArray[np.float32]
Again = Callable[[NDArray[np.int64], NDArray[np.int64]], NDArray[np.float32]]
"""Rows (M,) and columns (M,) to their values (M,), measured more exactly."""


def ordered_bits(values: NDArray[np.float32]) -> NDArray[np.int32]:
    """Return int32 that compare as the float32 do (no NaN; −0 equals 0)."""
    bits = (values + np.float32(0)).view(np.int32)
    if bits.min(initial=0) < 0:
        bits = np.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return bits


def make_keys(
    values: NDArray[np.float32], columns: NDArray[np.int64], out: NDArray[np.int64] | None = None
) -> NDArray[np.int64]:
    """Return int64 that compare by value, then by column; the columns broadcast against the values."""
    if out is None:
        out = np.empty(values.shape, dtype=np.int64)
    np.copyto(out, ordered_bits(values))
    out <<= 32
    out |= columns
    return out


def split_keys(keys: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Return the columns and values that `make_keys` put together."""
    bits = (keys >> 32).astype(np.int32)
    if bits.min(initial=0) < 0:
        bits = np.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return keys & 0xFFFFFFFF, bits.view(np.float32)


def order_ragged(
    counts: NDArray[np.int64], columns: NDArray[np.int64], values: NDArray[np.float32], k: int
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Return the first `k` columns and values (B, k) of each row of a ragged list, smallest first.

    Args:
        counts: (B,) how many entries each row has, each at least `k`.
        columns: (M,) rows one after another, M the sum of `counts`.
        values: (M,) what to order by; equal values are ordered by column.
        k: how many to keep of each row.
    """
    keys = np.full((len(counts), int(counts.max(initial=k))), _LAST)
    keys[np.arange(keys.shape[1]) < counts[:, None]] = make_keys(values, columns)
    keys.sort(axis=1)
    return split_keys(keys[:, :k])


def smallest(values: Floats, k: int) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Return columns and values (B, k) of the k smallest of each row (B, N), smallest first, 1 ≤ k ≤ N.

    They are rounded to float32 before they are compared.
    """
    rows, size = values.shape
    step = max(1, _AT_ONCE // size)
    every = np.arange(size, dtype=np.int64)
    rounded, keys = np.empty((step, size), np.float32), np.empty((step, size), np.int64)
    columns, nearest = np.empty((rows, k), np.int64), np.empty((rows, k), np.float32)
    for start in range(0, rows, step):
        part = slice(start, min(start + step, rows))
        few, now = rounded[: part.stop - start], keys[: part.stop - start]
        np.copyto(few, values[part], casting="same_kind")
        make_keys(few, every, now)
        if k < size:
            now.partition(k - 1, axis=1)
        first = now[:, :k]
        first.sort(axis=1)
        columns[part], nearest[part] = split_keys(first)
    return columns, nearest


def smallest_remeasured(
    values: Floats, k: int, floor: NDArray[np.float32], again: Again
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Return what `smallest` does, where values below `floor` (B,) are wrong in their last digits.

    However many they are, all of them are measured `again`, and take part with their new values.
    """
    columns, nearest = smallest(values, k)
    doubtful = nearest[:, 0] < floor
    crowded = doubtful & (nearest[:, -1] < floor)

    def settle(rows: NDArray[np.int64], at: NDArray[np.int64], found: NDArray[np.float32]) -> None:
        row, place = np.nonzero(found < floor[rows, None])
        found[row, place] = again(rows[row], at[row, place])
        keys = make_keys(found, at)
        keys.sort(axis=1)
        columns[rows], nearest[rows] = split_keys(keys[:, :k])

    rows = np.flatnonzero(doubtful & ~crowded)
    if len(rows):
        settle(rows, columns[rows], nearest[rows])
    rest = np.flatnonzero(crowded)
    step = max(1, 8 * _AT_ONCE // values.shape[1])
    for start in range(0, len(rest), step):
        rows = rest[start : start + step]
        part = values[rows]
        wide = int(np.count_nonzero(part.astype(np.float32) < floor[rows, None], axis=1).max())
        settle(rows, *smallest(part, max(k, wide)))
    return columns, nearest


def smallest_on_device(values: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return what `smallest` does on any device."""
    values = values.to(torch.float32) + 0.0
    bits = values.view(torch.int32).long()
    bits = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    keys = (bits << 32) | torch.arange(values.shape[1], device=values.device)
    columns = keys.topk(k, dim=1, largest=False, sorted=True).values & 0xFFFFFFFF
    return columns, values.gather(1, columns)
