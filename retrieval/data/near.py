"""Items that are the same, or nearly.

`fingerprint` hashes an item and shrinks an image to a small picture that survives being saved
again; `near_pairs` finds the rows that are near one another, exactly and without a matrix of all
pairs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from retrieval.errors import DataError
from retrieval.host.cores import cores
from retrieval.serving.images import to_mode
from retrieval.serving.progress import Meter
from retrieval.serving.store.search import nearest

SIDE, COLOURS = 16, 4
"""Rows and columns of a picture's brightness, and of its colours."""
WIDTH = SIDE * SIDE + 2 * COLOURS * COLOURS
_FLAT = 2.0  # of 255: an image whose picture varies less has nothing that could be compared


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """An item, as far as it is compared with others.

    Attributes:
        values: hash of its size and pixels in RGB, or of a vector's numbers.
        picture: (WIDTH,) of unit length; None of a vector, and of an image of one colour.
    """

    values: bytes
    picture: NDArray[np.float32] | None = None


def digest(content: Any) -> bytes:
    """Return the hash of bytes, 16 bytes."""
    return hashlib.blake2b(content, digest_size=16).digest()


def fingerprint(item: Image.Image | NDArray[Any]) -> Fingerprint:
    """Return the fingerprint of an image, or of a vector (F,)."""
    if isinstance(item, Image.Image):
        whole = to_mode(item, "RGB")
        size = f"{whole.width} {whole.height} ".encode()
        return Fingerprint(digest(size + whole.tobytes()), picture(whole))
    vector = np.ascontiguousarray(item, dtype=np.float32)
    if not np.isfinite(vector).all():
        raise DataError("holds NaN, infinity or a number beyond float32.")
    return Fingerprint(digest((vector + np.float32(0)).tobytes()))  # −0 and 0 are one number


def picture(image: Image.Image) -> NDArray[np.float32] | None:
    """Return an RGB image's small picture at unit length (WIDTH,); None for one colour.

    A difference hash (Krawetz, "Kind of Like That", 2013) keeps the sign of each difference between
    neighbours. Here are the numbers themselves: in a flat area a sign is noise, which JPEG brings,
    and a hash has copies as far apart as different images.
    """
    small = image.resize((SIDE, SIDE), Image.Resampling.BILINEAR, reducing_gap=3.0).convert("YCbCr")
    values = np.asarray(small, dtype=np.float32)
    part = SIDE // COLOURS
    colours = values[..., 1:].reshape(COLOURS, part, COLOURS, part, 2).mean((1, 3)) - 128
    brightness = values[..., 0] - values[..., 0].mean()
    whole_picture = np.concatenate(
        [brightness.ravel(), part * colours.ravel()]
    )  # each colour stands for so many pixels
    if float(brightness.std()) < _FLAT:
        return None
    unit: NDArray[np.float32] = (whole_picture / np.linalg.norm(whole_picture)).astype(np.float32)
    return unit


Rows = NDArray[np.int64]
Doubles = NDArray[np.float64]
Measure = Callable[[int, Rows], Doubles]

_FIRST, _MOST = 8, 128
_PAGE = 1024
MOST_PAIRS = 1_000_000


@dataclass(frozen=True)
class Near:
    """What is near to what.

    Attributes:
        first, second: (n,) rows, the first the lower one.
        distance: (n,) how far apart they are.
        complete: False where there are so many that the search was ended.
    """

    first: Rows
    second: Rows
    distance: Doubles
    complete: bool


def near_pairs(
    vectors: NDArray[np.float32],
    within: float,
    *,
    same: Rows | None = None,
    spans: Sequence[tuple[int, int] | None] = (None,),
    measure: Measure | None = None,
    candidates: int = 0,
    what: str = "comparing",
) -> Near:
    """Return pairs of rows that are within a distance of one another, the nearest first.

    Of each row up to 128 others are looked at, or `candidates`, the nearest by Euclidean distance;
    the search ends when there are more than `MOST_PAIRS` in all.

    Args:
        vectors: (N, P), finite.
        within: the largest distance.
        same: (N,) numbers; rows of one number are not a pair.
        spans: columns in each of which candidates are looked for; None is all.
        measure: the distances (n,) of a row to n others, by their numbers; None: Euclidean.
        candidates: how many are measured at least, where `measure` has another order than the
            Euclidean distance.
        what: what is shown to be done.
    """
    threads, size = cores(), len(vectors)
    parts: list[tuple[Rows, Rows, Doubles]] = []
    total, done = 0, 0
    with Meter(what, size, "items") as meter:
        while done < size and total <= MOST_PAIRS:
            queries, count = np.arange(done, min(done + _PAGE, size)), max(_FIRST, candidates)
            done += len(queries)
            meter.update(len(queries))
            while len(queries):
                rows, apart = _candidates(
                    vectors, queries, min(count, size), spans, measure, threads
                )
                close: NDArray[np.bool_] = apart <= within
                more = np.count_nonzero(close | np.isnan(apart), axis=1) == close.shape[1]
                if count >= min(_MOST, size):
                    more[:] = False  # else there may be others
                row, place = np.nonzero(close & ~more[:, None])
                item, neighbor = queries[row], rows[row, place]
                kept = (
                    item != neighbor
                    if same is None
                    else (item != neighbor) & (same[item] != same[neighbor])
                )
                parts.append((item[kept], neighbor[kept], apart[row, place][kept]))
                total += int(kept.sum())
                queries, count = queries[more], 4 * count
    return _once(parts, done == size and total <= MOST_PAIRS)


def _candidates(
    vectors: NDArray[np.float32],
    queries: Rows,
    count: int,
    spans: Sequence[tuple[int, int] | None],
    measure: Measure | None,
    threads: int,
) -> tuple[Rows, Doubles]:
    """Return rows (Q, n) near the queries and their distances; NaN marks a repeated row."""
    searches = [
        nearest(vectors[queries], vectors, count, span=span, threads=threads) for span in spans
    ]
    if measure is None:
        return searches[0][1], np.sqrt(searches[0][0])
    rows = np.sort(np.concatenate([rows_of_span for _, rows_of_span in searches], axis=1), axis=1)
    apart = np.full(rows.shape, np.nan)
    for place, query in enumerate(queries.tolist()):
        unique, first = np.unique(rows[place], return_index=True)
        apart[place, first] = measure(query, unique)
    return rows, apart


def _once(parts: Sequence[tuple[Rows, Rows, Doubles]], complete: bool) -> Near:
    """Return each pair once, at the smaller of its two distances."""
    first, second, apart = (
        (np.concatenate(list(column)) for column in zip(*parts, strict=True)) if parts else _none()
    )
    low, high = np.minimum(first, second), np.maximum(first, second)
    order = np.lexsort((apart, high, low))
    low, high, apart = low[order], high[order], apart[order]
    is_new = np.ones(len(low), bool)
    is_new[1:] = (low[1:] != low[:-1]) | (high[1:] != high[:-1])
    low, high, apart = low[is_new], high[is_new], apart[is_new]
    order = np.argsort(apart, kind="stable")
    return Near(low[order], high[order], apart[order], complete)


def _none() -> Any:
    return np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0)
