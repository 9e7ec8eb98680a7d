"""Arrays of one generation from the features that another keeps: segment by segment, without a look at the items."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from retrieval.errors import StoreError
from retrieval.serving.local.generation_table import all_of
from retrieval.serving.local.home import Home
from retrieval.serving.local.piece import SEGMENTS, damaged
from retrieval.serving.local.record import ask, value
from retrieval.serving.local.segment import Numbers, Segment, write_segment
from retrieval.serving.local.writer import Writer, remove_files
from retrieval.serving.stores.contract import FEATURES, Floats, Generation

Apply = Callable[[Floats], Mapping[str, Floats]]

_ROWS = 16_384  # at a time: bounds the memory


@dataclass(frozen=True)
class _Made:
    """A segment that was written and that the record does not name yet."""

    file: str
    sum: str
    count: int


def derive(
    home: Home,
    writer: Writer,
    source: Generation,
    target: Generation,
    apply: Apply,
    report: Callable[[int], object],
) -> int:
    """Give `target` arrays of all items that have them in `source`, in one transaction at the end; see `Store.derive`.

    The caller has made a segment of the source's fresh items, so that all items up to the newest one of that moment are in segments.
    Features of a segment whose items are all taken are shared with it.
    """
    writer.hold()
    with writer.turn, home.record.reading() as connection:
        upto = int(value(connection, "select upto from generations where g = ?", (target.number,)))
        fresh = value(connection, "select min(n) from fresh where g = ?", (source.number,))
        last = int(value(connection, "select seq from sqlite_sequence where name = 'items'") or 0)
        last = last if fresh is None else fresh - 1
    made: dict[int, _Made | None] = {}
    try:
        while True:
            for number, segment in _segments(home, source, made):
                made[number] = _applied(home, number, segment, target, (upto, last), apply, report)
            if _named(writer, source, target, made, last):
                return sum(one.count for one in made.values() if one is not None)
    except BaseException:
        remove_files(home.folder, [one.file for one in made.values() if one is not None])
        raise


def _segments(home: Home, source: Generation, known: Mapping[int, object]) -> Iterator[tuple[int, Segment]]:
    """Give the segments of a generation that are not known, opened."""
    with home.record.reading() as connection:
        rows = ask(connection, "select s, file, sum from segments where g = ? order by s", (source.number,))
    for number, file, sum_ in rows:
        if number in known:
            continue
        path = home.folder / SEGMENTS / file
        try:
            segment = Segment(path, sum_)
        except (
            FileNotFoundError
        ):  # merged away meanwhile, or damaged: what the record names then is looked at next
            with home.record.reading() as connection:
                if value(connection, "select 1 from segments where s = ?", (number,)):
                    raise damaged(path, StoreError("is missing")) from None
            continue
        except StoreError as fault:
            raise damaged(path, fault) from None
        yield number, segment


def _applied(
    home: Home,
    number: int,
    segment: Segment,
    target: Generation,
    between: tuple[int, int],
    apply: Apply,
    report: Callable[[int], object],
) -> _Made | None:
    """Write the target's segment of a segment's items that are numbered in (after, last]; None where there are none."""
    whole = bool(segment.numbers[0] > between[0] and segment.numbers[-1] <= between[1])
    if whole:
        rows = np.arange(len(segment))
    else:
        with home.record.reading() as connection:
            removed = np.array([n for (n,) in ask(connection, "select n from removed")], np.int64)
        inside = (segment.numbers > between[0]) & (segment.numbers <= between[1])
        rows = np.flatnonzero(inside & ~np.isin(segment.numbers, removed))
    if not len(rows):
        return None
    try:
        segment.verify(features=True)
    except StoreError as fault:
        raise damaged(segment.path, fault) from None
    features = segment.arrays[FEATURES]
    names = [name for name in target.widths if name != FEATURES]
    arrays: dict[str, Any] = {
        name: _Head(features, rows, name, target.widths[name], apply, report if name == names[0] else _quiet)
        for name in names
    }
    shared = segment.beside if whole and FEATURES in target.widths else None
    if FEATURES in target.widths and shared is None:
        arrays[FEATURES] = _Head(features, rows, FEATURES, features.shape[1], lambda x: {FEATURES: x}, _quiet)
    file = f"{target.number}-of-{number}.segment"
    path = home.folder / SEGMENTS / file
    try:
        with home.record.faults("written"):
            sum_ = write_segment(path, segment.numbers[rows], arrays, shared=shared)
    except BaseException:
        remove_files(home.folder, [file])
        raise
    home.ready.wrote(file, Segment(path, sum_))
    return _Made(file, sum_, len(rows))


def _named(
    writer: Writer, source: Generation, target: Generation, made: dict[int, _Made | None], last: int
) -> bool:
    """Have the record name all that was made, unless segments of the source were merged meanwhile.

    An item that was removed stays masked only while a segment holds it: what was made of a segment that has gone goes too.
    """
    with writer.turn, writer.transaction(segments=True) as (connection, _):
        states = {one.number: one.state for one in all_of(connection)}
        if states.get(source.number) != "served" or states.get(target.number) in (None, "served"):
            raise StoreError("Another generation is served by now. Run the command again.")
        there = {s for (s,) in ask(connection, "select s from segments where g = ?", (source.number,))}
        gone = [made.pop(number) for number in set(made) - there]
        remove_files(writer.folder, [one.file for one in gone if one is not None])
        if there - set(made):
            return False
        for one in made.values():
            if one is not None:
                connection.execute(
                    "insert into segments (g, file, sum, count) values (?,?,?,?)",
                    (target.number, one.file, one.sum, one.count),
                )
        upto = int(value(connection, "select upto from generations where g = ?", (target.number,)))
        connection.execute(
            "insert or ignore into left_out select ?, n from left_out where g = ? and n > ? and n <= ?",
            (target.number, source.number, upto, last),
        )
        connection.execute("update generations set upto = max(upto, ?) where g = ?", (last, target.number))
        return True


def _quiet(count: int) -> None:
    """Report nothing."""


class _Head:
    """One array that a head gives of rows of features, made a block at a time while it is written."""

    def __init__(
        self,
        features: Floats,
        rows: Numbers,
        name: str,
        width: int,
        apply: Apply,
        report: Callable[[int], object],
    ) -> None:
        self._features, self._rows, self._name, self._width = features, rows, name, width
        self._apply, self._report = apply, report

    def __getitem__(self, at: int) -> Floats:
        return np.empty((0, self._width), np.float32)

    def __iter__(self) -> Iterator[Floats]:
        for start in range(0, len(self._rows), _ROWS):
            rows = self._rows[start : start + _ROWS]
            straight = rows[-1] - rows[0] == len(rows) - 1
            block = self._features[rows[0] : rows[-1] + 1] if straight else self._features[rows]
            yield self._apply(block)[self._name]
            self._report(len(rows))
