"""What merging takes: the rows of a segment that is made of others, a block at a time; and which deletions it ends."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import apsw
import numpy as np

from retrieval.errors import StoreError
from retrieval.serving.local.piece import positions
from retrieval.serving.local.segment import Numbers, Segment
from retrieval.serving.stores.contract import Floats

_ROWS = 16_384


class Stopped(BaseException):
    """The store is being closed: no error, so that nothing on its way makes a sentence of it."""


def forget(connection: apsw.Connection, removed: Numbers, segments: Sequence[Segment]) -> None:
    """Take items out of the record's list of the removed ones that no segment holds any more.

    Args:
        connection: inside a transaction.
        removed: ascending numbers.
        segments: all that the record names.
    """
    try:
        for segment in segments:
            segment.verify_numbers()
    except StoreError:
        return  # nobody can say what that one holds
    held = [segment.numbers[positions(segment.numbers, removed)] for segment in segments]
    left = np.unique(np.concatenate(held)) if held else np.empty(0, np.int64)
    gone = json.dumps(np.setdiff1d(removed, left).tolist())
    connection.execute("delete from removed where n in (select value from json_each(?))", (gone,))


class Rows:
    """Rows of several arrays, some left out, in another order, a block at a time: never all of them in memory."""

    def __init__(
        self, arrays: Sequence[Floats], alive: Sequence[Any], order: Any, stop: threading.Event
    ) -> None:
        self._arrays, self._alive, self._order, self._stop = arrays, alive, order, stop

    def __getitem__(self, at: int) -> Floats:
        return self._arrays[at]

    def __iter__(self) -> Iterator[Floats]:
        if self._order is None:
            for array, alive in zip(self._arrays, self._alive, strict=True):
                for start in range(0, len(array), _ROWS):
                    if self._stop.is_set():
                        raise Stopped
                    block, keep = array[start : start + _ROWS], alive[start : start + _ROWS]
                    yield block if keep.all() else block[keep]
            return
        rows = [np.flatnonzero(alive) for alive in self._alive]
        starts = np.cumsum([0, *map(len, rows)])
        for start in range(0, len(self._order), _ROWS):
            if self._stop.is_set():
                raise Stopped
            wanted = self._order[start : start + _ROWS]
            out = np.empty((len(wanted), self._arrays[0].shape[1]), np.float32)
            source = np.searchsorted(starts, wanted, side="right") - 1
            for at, array in enumerate(self._arrays):
                here = source == at
                out[here] = array[rows[at][wanted[here] - starts[at]]]
            yield out
