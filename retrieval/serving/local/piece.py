"""A segment at one moment: which of its items are alive, what speeds up its search, and the search itself."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from retrieval.errors import RetrievalError, StoreError
from retrieval.serving.index.contract import IndexBackend, checked_search, checked_selection
from retrieval.serving.local.compact import Compact
from retrieval.serving.local.distances import measured
from retrieval.serving.local.exact import nearest
from retrieval.serving.local.segment import Numbers, Segment
from retrieval.serving.local.structures import COMPACT, Structure, load_companion, load_structure
from retrieval.serving.stores.contract import VECTOR, Floats, Generation

log = logging.getLogger("retrieval.serving.local")

Mask = NDArray[np.bool_]
SEGMENTS = "segments"
_MARGIN = 16  # beyond what is asked of a structure: for deleted items
_MOST = 4096  # asked of a structure at once, before the segment is searched exactly
_RARE = (
    0.02  # share of a segment that matches a filter, up to which exact search among the matches is the faster
)


@dataclass(frozen=True)
class Piece:
    """A segment as it stands at one moment.

    Attributes:
        number: of the segment in the record.
        segment: the arrays.
        alive: (N,), False where the item was deleted or changed; None where all are alive.
        structure: one back end for each sub-space; None: searched exactly.
        compact: what exact search reads in the vectors' place.
        said: what the record says of the structure.
    """

    number: int
    segment: Segment
    alive: Mask | None
    structure: Sequence[IndexBackend] | None
    compact: Compact | None = None
    said: str | None = None

    def without(self, removed: Numbers) -> Piece:
        """Return the piece after items were removed."""
        rows = positions(self.segment.numbers, removed)
        if not len(rows):
            return self
        alive = np.ones(len(self.segment), bool) if self.alive is None else self.alive.copy()
        alive[rows] = False
        return replace(self, alive=alive)

    @cached_property
    def dead(self) -> int:
        """How many of its items are not alive."""
        return 0 if self.alive is None else len(self.alive) - int(np.count_nonzero(self.alive))


def search_exact(
    numbers: Numbers,
    vectors: Floats,
    queries: Floats,
    span: tuple[int, int],
    count: int,
    keep: Mask | None,
    norms: Floats | None = None,
    compact: Compact | None = None,
) -> tuple[Any, Numbers, Numbers]:
    """Return squared distances (Q, k), the numbers (N,), and rows (Q, k) of the nearest among vectors; -1 where there are fewer."""
    whole = span == (0, vectors.shape[1])
    distances, rows = nearest(
        queries,
        vectors,
        count,
        keep=keep,
        span=None if whole else span,
        norms=norms if whole else None,
        compact=compact if whole else None,
    )
    return distances, numbers, rows


def search_piece(
    piece: Piece,
    space: int,
    queries: Floats,
    span: tuple[int, int],
    count: int,
    keep: Mask | None,
    *,
    filtered: bool,
) -> tuple[Any, Numbers]:
    """Return squared distances and rows (Q, k) of a piece's nearest, nearest first and equally near ones by row; infinity and -1 where there are fewer."""
    segment = piece.segment
    rows = None if piece.structure is None else _proposed(piece, space, queries, span, count, keep, filtered)
    if rows is not None:
        distances = _measured(segment.arrays[VECTOR], queries, span, rows)
        order = np.lexsort((rows, distances))[:, :count]
        return np.take_along_axis(distances, order, 1), np.take_along_axis(rows, order, 1)
    distances, _, rows = search_exact(
        segment.numbers, segment.arrays[VECTOR], queries, span, count, keep, segment.norms(), piece.compact
    )
    return distances, rows


def _proposed(
    piece: Piece,
    space: int,
    queries: Floats,
    span: tuple[int, int],
    count: int,
    keep: Mask | None,
    filtered: bool,
) -> Numbers | None:
    """Return rows (Q, k) that a piece's structure proposes, -1 for none; None where exact search is the better way."""
    assert piece.structure is not None
    backend, size = piece.structure[space], len(piece.segment)
    name = "" if piece.said is None else json.loads(piece.said)["backend"]
    own = np.ascontiguousarray(queries[:, span[0] : span[1]])
    wanted = min(count * backend.expand, size)
    if keep is None:
        return checked_search(backend, name, own, wanted, size)
    if filtered:
        there = np.count_nonzero(keep)
        if there <= max(_MOST, _RARE * size) or not backend.selective:
            return None
        rows = checked_selection(backend, name, own, wanted, keep)
        return rows if (rows >= 0).sum(axis=1).min() >= min(count, there) else None
    wanted += _MARGIN
    while wanted <= min(_MOST, size):
        rows = checked_search(backend, name, own, wanted, size)
        rows = np.where((rows >= 0) & keep[rows], rows, -1)
        if (rows >= 0).sum(axis=1).min() >= count:
            return rows
        wanted *= 4
    return None


def _measured(vectors: Floats, queries: Floats, span: tuple[int, int], rows: Numbers) -> NDArray[np.float64]:
    """Return squared distances (Q, k) of proposed rows, from the vectors themselves; infinity where there is none."""
    out = np.full(rows.shape, np.inf)
    columns = slice(*span)
    query, place = np.nonzero(rows >= 0)
    exact = queries[:, columns].astype(np.float64)
    out[query, place] = measured(exact, vectors, query, rows[query, place], columns)
    return out


def positions(numbers: Numbers, wanted: Numbers) -> NDArray[np.int64]:
    """Return where wanted numbers stand in ascending ones; those that don't are left out."""
    if not len(numbers) or not len(wanted):
        return np.empty(0, np.int64)
    at = np.minimum(np.searchsorted(numbers, wanted), len(numbers) - 1)
    here: NDArray[np.int64] = at[numbers[at] == wanted]
    return here


def structure_of(
    folder: Path,
    said: Structure | None,
    segment: Segment,
    generation: Generation,
    make: Callable[..., IndexBackend],
) -> tuple[Sequence[IndexBackend] | None, Compact | None]:
    """Load a segment's structure; where it cannot be, the vectors themselves are searched, and the log says why."""
    if said is None:
        return None, None
    where, vectors = folder / SEGMENTS, segment.arrays[VECTOR]
    try:
        if said.backend == COMPACT:
            return None, load_companion(where, said, *vectors.shape)
        return load_structure(where, said, vectors, generation.spans, make), None
    except (RetrievalError, OSError) as fault:
        log.warning(
            "The structure of %s cannot be used: %s It is searched exactly until the next writer builds it again.",
            segment.path,
            fault,
        )
        return None, None


def verify_anew(segment: Segment, *, features: bool = False) -> None:
    """Compare a segment with its checksums, though it was before: something is made of it that gets checksums of its own.

    Raises:
        StoreError: it was altered.
    """
    try:
        segment.verify(features=features, anew=True)
    except StoreError as fault:
        raise damaged(segment.path, fault) from None


def damaged(path: Path, fault: Exception) -> StoreError:
    """Return the error for a segment that cannot be used."""
    return StoreError(
        f"The index {path.parent.parent} is damaged: {SEGMENTS}/{path.name} {fault}. "
        "Run 'retrieval index check' on it, and restore a snapshot."
    )
