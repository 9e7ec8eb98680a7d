"""The k smallest of each row, in one fixed order: by value, and equal values by column.

One int64 holds a value and its column, so that a single partition and a single sort, both vectorised in NumPy, give the
order with its tie rule, and the columns with it. A float64 whose last 29 bits are taken for the column keeps the 24
significant bits of a float32: values are rounded to those (halves away from zero) before they are compared.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

MAX_COLUMNS = 2**29
_COLUMN = MAX_COLUMNS - 1
_HALF = MAX_COLUMNS // 2
# All of a value's bits but its sign: to invert them makes negative numbers compare as integers.
_MAGNITUDE = 2**63 - MAX_COLUMNS
_LAST = np.iinfo(np.int64).max
# Entries worked on at once: 512 KB of keys stay in a core's cache through all passes over them.
_AT_ONCE = 2**16

Again = Callable[[NDArray[np.int64], NDArray[np.int64]], NDArray[np.float64]]
"""Rows (M,) and columns (M,) to their values (M,), measured more exactly."""


def make_keys(
    values: NDArray[np.float64], columns: NDArray[np.int64], *, signed: bool = False
) -> NDArray[np.int64]:
    """Turn values into int64 that compare by value, then by column, in the same memory.

    Args:
        values: overwritten.
        columns: broadcast against the values.
        signed: negative values have an order; otherwise they are only below all others.
    """
    keys = values.view(np.int64)
    keys += _HALF
    keys &= ~_COLUMN
    if signed:
        np.copyto(values, 0.0, where=values == 0)  # −0
        np.bitwise_xor(keys, _MAGNITUDE, out=keys, where=keys < 0)
    keys |= columns
    return keys


def split_keys(
    keys: NDArray[np.int64], *, signed: bool = False
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Return the columns and values that `make_keys` put together."""
    bits = keys & ~_COLUMN
    if signed:
        np.bitwise_xor(bits, _MAGNITUDE, out=bits, where=bits < 0)
    with np.errstate(over="ignore"):
        return keys & _COLUMN, bits.view(np.float64).astype(np.float32)


def smallest(
    values: NDArray[np.float64], k: int, *, signed: bool = False
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Return columns and values (B, k) of the k smallest of each row, smallest first.

    Args:
        values: (B, N), no NaN; overwritten with each row's keys.
        k: 1 to N.
        signed: see `make_keys`.
    """
    rows, size = values.shape
    every = np.arange(size, dtype=np.int64)
    columns, nearest = np.empty((rows, k), np.int64), np.empty((rows, k), np.float32)
    step = max(1, _AT_ONCE // size)
    for start in range(0, rows, step):
        part = slice(start, start + step)
        keys = make_keys(values[part], every, signed=signed)
        if k < size:
            keys.partition(k - 1, axis=1)
        first = keys[:, :k]
        first.sort(axis=1)
        columns[part], nearest[part] = split_keys(first, signed=signed)
    return columns, nearest


def smallest_remeasured(
    values: NDArray[np.float64], k: int, floor: NDArray[np.float32], again: Again
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Return what `smallest` does, where values below `floor` (B,) are wrong in their last digits.

    However many they are, all of them are measured `again`, and take part with their new values.
    """
    columns, nearest = smallest(values, k)
    doubtful = nearest[:, 0] < floor
    crowded = doubtful & (nearest[:, -1] < floor)

    def settle(rows: NDArray[np.int64], at: NDArray[np.int64], found: NDArray[np.float32]) -> None:
        row, place = np.nonzero(found < floor[rows, None])
        better = found.astype(np.float64)
        better[row, place] = again(rows[row], at[row, place])
        keys = make_keys(better, at)
        keys.sort(axis=1)
        columns[rows], nearest[rows] = split_keys(keys[:, :k])

    rows = np.flatnonzero(doubtful & ~crowded)
    if len(rows):
        settle(rows, columns[rows], nearest[rows])
    rest = np.flatnonzero(crowded)
    step = max(1, 8 * _AT_ONCE // values.shape[1])
    for start in range(0, len(rest), step):
        rows = rest[start : start + step]
        keys = values.view(np.int64)[rows]
        wide = int(np.count_nonzero(split_keys(keys)[1] < floor[rows, None], axis=1).max())
        if wide < keys.shape[1]:
            keys.partition(wide - 1, axis=1)
        settle(rows, *split_keys(keys[:, :wide]))
    return columns, nearest


def smallest_on_device(values: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return what `smallest` does of signed float64, on any device; `values` stay as they are."""
    keys = ((values + 0.0).view(torch.int64) + _HALF) & ~_COLUMN
    keys = torch.where(keys < 0, keys ^ _MAGNITUDE, keys)
    keys = keys | torch.arange(values.shape[1], device=values.device)
    columns = keys.topk(k, dim=1, largest=False, sorted=True).values & _COLUMN
    return columns, values.gather(1, columns)


def order_ragged(
    counts: NDArray[np.int64], columns: NDArray[np.int64], values: NDArray[np.float64], k: int
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Return the first `k` columns and values (B, k) of each row of a ragged list, smallest first.

    Args:
        counts: (B,) how many entries each row has, each at least `k`.
        columns: (M,) rows one after another, M the sum of `counts`.
        values: (M,) what to order by; overwritten.
        k: how many to keep of each row.
    """
    keys = np.full((len(counts), int(counts.max(initial=k))), _LAST)
    keys[np.arange(keys.shape[1]) < counts[:, None]] = make_keys(values, columns, signed=True)
    keys.sort(axis=1)
    return split_keys(keys[:, :k], signed=True)


def direct(
    queries: Tensor,
    gallery: Tensor,
    rows: NDArray[np.int64],
    columns: NDArray[np.int64],
    scale: float = 1.0,
) -> NDArray[np.float64]:
    """Return scale² |q − g|² (M,) of pairs (row of `queries`, row of `gallery`), in float64 from their differences."""
    out = np.empty(len(rows))
    step = max(1, 2**18 // max(queries.shape[1], 1))
    for start in range(0, len(rows), step):
        part = slice(start, start + step)
        apart = gallery.index_select(0, torch.from_numpy(columns[part])).double()
        apart -= queries.index_select(0, torch.from_numpy(rows[part]))
        if scale != 1:
            apart *= scale
        out[part] = apart.square_().sum(1).numpy()
    return out
