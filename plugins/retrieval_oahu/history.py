"""A record of something that changes over an endless stream, in constant memory."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.floating[Any]]

ROWS = 512
"""Most rows that are kept."""


def recorded(
    kept: Floats, at: NDArray[np.int64], stride: int, value: Floats, step: int
) -> tuple[Floats, NDArray[np.int64], int]:
    """Return the record with one more row when its turn has come; when it is full, every second row
    goes and the stride doubles.

    Args:
        kept: (M, W) values.
        at: (M,) after how many steps each was taken, multiples of the stride.
        stride: how many steps lie between two rows.
        value: (W,) the present value.
        step: how many steps were made.
    """
    if step % stride:
        return kept, at, stride
    kept, at = np.concatenate([kept, value[None]]), np.append(at, step)
    if len(kept) > ROWS:
        stride *= 2
        turn = at % stride == 0
        kept, at = kept[turn], at[turn]
    return kept, at, stride
