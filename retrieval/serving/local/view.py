"""What is searched: the segments and the fresh items of one moment, in memory, never changed; the next moment's view shares what stayed."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import apsw
import numpy as np

from retrieval.errors import StoreError
from retrieval.serving.local.piece import Mask, Piece, damaged, positions, search_exact, search_piece
from retrieval.serving.local.ready import Ready, Row
from retrieval.serving.local.record import ask
from retrieval.serving.local.segment import Numbers, Segment
from retrieval.serving.stores.contract import CODE, FEATURES, VECTOR, Floats, Generation

ARRAYS = (VECTOR, CODE, FEATURES)
_TIDY = 1024  # fresh items in memory of which half may be gone
_MANY = (
    1 / 64
)  # share of a piece's items that match, from which a table of all numbers is faster than to look each one up
_ROOM = 8  # numbers in such a table for each item


class Fresh:
    """Items that are in no segment yet; grows in place, and a view sees the first `count` of them."""

    def __init__(self, widths: dict[str, int]) -> None:
        self.widths = widths
        self.last = 0  # number of the last item
        self.count = 0
        self.numbers: Numbers = np.empty(64, np.int64)
        self.arrays: dict[str, Floats] = {
            name: np.empty((64, width), np.float32) for name, width in widths.items()
        }

    def append(self, rows: Sequence[tuple[Any, ...]]) -> None:
        """Add rows (number, one blob for each of `ARRAYS`), in the order of their numbers."""
        end = self.count + len(rows)
        if end > len(self.numbers):
            room = max(end, 2 * len(self.numbers))
            self.numbers = np.concatenate([self.numbers, np.empty(room - len(self.numbers), np.int64)])
            for name, array in self.arrays.items():
                more = np.empty((room - len(array), array.shape[1]), np.float32)
                self.arrays[name] = np.concatenate([array, more])
        if rows:
            self.numbers[self.count : end] = [row[0] for row in rows]
            for at, name in enumerate(ARRAYS, 1):
                if name in self.arrays:
                    joined = np.frombuffer(b"".join(row[at] for row in rows), "<f4")
                    self.arrays[name][self.count : end] = joined.reshape(len(rows), -1)
            self.last = rows[-1][0]
        self.count = end


class Matches:
    """The items of one view that match a filter.

    Args:
        numbers: of them, ascending.
    """

    def __init__(self, numbers: Numbers) -> None:
        self._numbers = numbers
        self._masks: dict[int, Mask] = {}

    def among(self, piece: int, numbers: Numbers, alive: Mask | None) -> Mask:
        """Return which items of a piece match and are alive; looked up once a piece."""
        mask = self._masks.get(piece)
        if mask is None:
            mask = _members(numbers, self._numbers)
            if alive is not None:
                mask &= alive
            self._masks[piece] = mask
        return mask


def _members(numbers: Numbers, wanted: Numbers) -> Mask:
    """Return which of ascending numbers are among other ascending ones (N,)."""
    first, last = (int(numbers[0]), int(numbers[-1])) if len(numbers) else (0, -1)
    own, room = wanted[slice(*np.searchsorted(wanted, [first, last + 1]))], last + 1 - first
    if len(own) < _MANY * len(numbers) or room > _ROOM * len(numbers):
        mask = np.zeros(len(numbers), bool)
        mask[positions(numbers, own)] = True
        return mask
    table = np.zeros(room, bool)
    table[own - first] = True
    return table if room == len(numbers) else table[numbers - first]


class Near(NamedTuple):
    """The items that a search found.

    Attributes:
        numbers: (Q, n), -1 for none.
        squared: (Q, n) squared distances within the only sub-space, as `distances.measured` has them; infinity for none. Each query's
            nearest comes first, and of equally near ones the smaller number. None where there are several sub-spaces.
    """

    numbers: Numbers
    squared: Any


@dataclass(frozen=True)
class View:
    """One moment of a generation.

    Attributes:
        seq: counts the record's transactions.
        epoch: counts the changes of the list of segments.
        generation: whose arrays these are.
        pieces: segments.
        numbers: (F,) of fresh items.
        arrays: (F, width) of them.
        alive: (F,) of them; None where all are alive.
        fresh: what `numbers` and `arrays` are the beginning of.
        waits: whether segments or structures of this moment are still being made ready, and older ones stand in for them.
        matched: the items that match a filter, by filter, once they were looked up.
    """

    seq: int
    epoch: int
    generation: Generation
    pieces: tuple[Piece, ...]
    numbers: Numbers
    arrays: dict[str, Floats]
    alive: Mask | None
    fresh: Fresh
    waits: bool = False
    matched: dict[Any, Matches] = field(default_factory=dict)

    @cached_property
    def count(self) -> int:
        """Items alive."""
        fresh = len(self.numbers) if self.alive is None else int(np.count_nonzero(self.alive))
        return fresh + sum(len(piece.segment) - piece.dead for piece in self.pieces)

    def search(self, queries: Floats, count: int, only: Matches | None = None) -> Near:
        """Return the items among the `count` nearest of each query in a sub-space.

        Args:
            queries: (Q, P).
            count: how many in each sub-space.
            only: what to choose from; None: all.
        """
        found = [self._nearest(space, queries, count, only) for space in range(len(self.generation.spans))]
        if len(found) == 1:
            return found[0]
        # each once; what a sub-space proposes twice is none
        numbers = np.sort(np.hstack([one.numbers for one in found]), axis=1)
        numbers[:, 1:][numbers[:, 1:] == numbers[:, :-1]] = -1
        return Near(numbers, None)

    def _nearest(self, space: int, queries: Floats, count: int, only: Matches | None) -> Near:
        """Return the `count` nearest of each query in one sub-space."""
        span, parts = self.generation.spans[space], []
        for piece in self.pieces:
            keep = (
                piece.alive if only is None else only.among(piece.number, piece.segment.numbers, piece.alive)
            )
            if keep is None or keep.any():
                squared, rows = search_piece(
                    piece, space, queries, span, count, keep, filtered=only is not None
                )
                parts.append((squared, _numbers_of(piece.segment.numbers, rows)))
        if len(self.numbers):
            keep = self.alive if only is None else only.among(0, self.numbers, self.alive)
            if keep is None or keep.any():
                squared, _, rows = search_exact(self.numbers, self.arrays[VECTOR], queries, span, count, keep)
                parts.append((squared, _numbers_of(self.numbers, rows)))
        if not parts:
            return Near(np.full((len(queries), 0), -1, np.int64), np.empty((len(queries), 0)))
        if len(parts) == 1:
            squared, numbers = parts[0]
            return Near(numbers, squared)
        squared, numbers = (np.hstack(every) for every in zip(*parts, strict=True))
        order = np.lexsort((numbers, squared))[:, :count]
        return Near(np.take_along_axis(numbers, order, 1), np.take_along_axis(squared, order, 1))

    def rows(self, numbers: Numbers, names: Iterable[str]) -> tuple[dict[str, Floats], Mask]:
        """Return arrays (n, width) of items by number, and which of the items have them (n,): what a generation leaves out has none."""
        names = self.generation.widths.keys() & set(names)
        out = {name: np.empty((len(numbers), self.generation.widths[name]), np.float32) for name in names}
        there = np.zeros(len(numbers), bool)
        parts = [(one.segment, one.segment.numbers, one.segment.arrays) for one in self.pieces]
        for segment, held, arrays in [*parts, (None, self.numbers, self.arrays)]:
            if not len(held):
                continue
            at = np.minimum(np.searchsorted(held, numbers), len(held) - 1)
            here = held[at] == numbers
            there |= here
            if segment and FEATURES in names:
                try:
                    segment.verify_rows(FEATURES, at[here])
                except StoreError as fault:
                    raise damaged(segment.path, fault) from None
            if here.all():
                return {name: arrays[name][at] for name in names}, here
            for name in names if here.any() else ():
                out[name][here] = arrays[name][at[here]]
        return out, there

    def verify(self) -> None:
        """Compare what is mapped with its checksums, where that was not done before.

        Raises:
            StoreError: naming the segment that was altered.
        """
        for piece in self.pieces:
            try:
                piece.segment.verify()
            except StoreError as fault:
                raise damaged(piece.segment.path, fault) from None


def _numbers_of(numbers: Numbers, rows: Numbers) -> Numbers:
    """Return the numbers of rows, of which -1 is none."""
    found: Numbers = numbers.take(rows, mode="clip")
    if (rows < 0).any():
        found[rows < 0] = -1
    return found


def refreshed(
    connection: apsw.Connection,
    ready: Ready,
    old: View | None,
    generation: Generation,
    seq: int,
    epoch: int,
    *,
    whole: bool = False,
    anew: bool = False,
) -> View:
    """Return the view of a moment of the record, from an older one.

    Args:
        connection: inside that moment.
        ready: opens segments.
        old: what to begin with.
        generation: the served one.
        seq: of that moment.
        epoch: of that moment.
        whole: load everything now, and let nothing stand in.
        anew: something that was waited for is ready.

    Raises:
        FileNotFoundError: a segment's file is gone: the moment is over.
        StoreError: a segment is damaged.
    """
    if old is not None and old.generation.number != generation.number:
        old = None
    if old is not None and old.epoch == epoch and not (old.waits and (whole or anew)):
        removed = _numbers(connection, "select n from removed where seq > ?", (old.seq,))
        fresh = old.fresh
        pieces = tuple(piece.without(removed) for piece in old.pieces) if len(removed) else old.pieces
        alive, waits = old.alive, old.waits
    else:
        removed = _numbers(connection, "select n from removed", ())
        pieces, waits = _pieces(connection, ready, old, generation, removed, whole=whole)
        fresh, alive = _kept(connection, old, generation)
    if alive is not None and len(alive) > _TIDY and 2 * np.count_nonzero(alive) < len(alive):
        fresh, alive = Fresh(dict(generation.widths)), None  # most of it is gone
    fresh.append(
        ask(
            connection,
            "select n, vector, code, features from fresh where g = ? and n > ? order by n",
            (generation.number, fresh.last),
        )
    )
    numbers = fresh.numbers[: fresh.count]
    if alive is not None and len(alive) < len(numbers):
        alive = np.concatenate([alive, np.ones(len(numbers) - len(alive), bool)])
    if len(rows := positions(numbers, removed)):
        alive = np.ones(len(numbers), bool) if alive is None else alive.copy()
        alive[rows] = False
    arrays = {name: array[: fresh.count] for name, array in fresh.arrays.items()}
    return View(seq, epoch, generation, pieces, numbers, arrays, alive, fresh, waits)


def _kept(connection: apsw.Connection, old: View | None, generation: Generation) -> tuple[Fresh, Mask | None]:
    """Return fresh items that are in memory and still fresh, and which of them are alive; none once all became a segment."""
    if old is not None:
        sql = "select n from fresh where g = ? and n <= ?"
        there = _numbers(connection, sql, (generation.number, old.fresh.last))
        alive = np.isin(old.fresh.numbers[: old.fresh.count], there)
        if alive.any():
            return old.fresh, None if alive.all() else alive
    return Fresh(dict(generation.widths)), None


def _pieces(
    connection: apsw.Connection,
    ready: Ready,
    old: View | None,
    generation: Generation,
    removed: Numbers,
    *,
    whole: bool,
) -> tuple[tuple[Piece, ...], bool]:
    """Return the segments of a moment, and whether some wait to be replaced.

    A segment that another process has merged holds what older ones held. While it is verified and its structure loaded, in the
    background, those that the older view has open stand in for it; which of their items count, its numbers say. A segment with an item
    that the older view has in no segment is taken at once: what was written has to be found.
    """
    sql = "select s, file, sum, count, structure from segments where g = ? order by s"
    rows = [Row(*row) for row in ask(connection, sql, (generation.number,))]
    ready.keep({row.file for row in rows})
    held = {piece.number: piece for piece in old.pieces} if old else {}
    taken, waiting, waits = [], [], False
    for row in rows:
        known = held.pop(row.number, None)
        piece = known if known is not None and known.said == row.structure else ready.take(row)
        if (
            piece is None
            and known is not None
            and not whole
            and row.structure is not None
            and ready.sound(row)
        ):
            ready.ask(row, known.segment, generation)
            piece, waits = known, True
        elif piece is None:
            segment = ready.open(row, generation) if known is None else known.segment
            if known is None and held and not whole and ready.sound(row):
                waiting.append((row, segment))
                continue
            piece = ready.load(row, segment, generation)
        taken.append(replace(piece, alive=None).without(removed))
    for row, segment in waiting:
        standing = _standing(held.values(), segment, removed)
        if standing is None:
            taken.append(ready.load(row, segment, generation).without(removed))
        else:
            ready.ask(row, segment, generation)
            taken += standing
            waits = True
    return tuple(taken), waits


def _standing(held: Iterable[Piece], segment: Segment, removed: Numbers) -> list[Piece] | None:
    """Return pieces that together have all items of a segment that are alive, and no others; None if one is in none of them."""
    try:
        segment.verify_numbers()
    except StoreError as fault:
        raise damaged(segment.path, fault) from None
    wanted = segment.numbers
    if len(rows := positions(wanted, removed)):
        wanted = np.delete(wanted, rows)
    found = []
    for piece in held:
        alive = np.isin(piece.segment.numbers, wanted)
        if piece.alive is not None:
            alive &= piece.alive
        if alive.any():
            found.append(replace(piece, alive=alive))
    there = sum(len(piece.segment) - piece.dead for piece in found)
    return found if there == len(wanted) else None


def _numbers(connection: apsw.Connection, sql: str, bindings: tuple[Any, ...]) -> Numbers:
    """Return a question's column as ascending numbers."""
    found = connection.execute(f"select json_group_array(n) from ({sql} order by n)", bindings).get
    return np.array(json.loads(found), np.int64)
