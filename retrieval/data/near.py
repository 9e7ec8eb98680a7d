"""Search for duplicate and near-duplicate items.

`fingerprint` hashes an item and shrinks an image to a small picture that hardly changes when the
image is saved again. `near_pairs` finds pairs of rows that are near each other, exactly and without
a matrix of all pairs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
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
"""Height and width of a picture's brightness, and of each of its two colour channels."""
WIDTH = SIDE * SIDE + 2 * COLOURS * COLOURS
_FLAT = 2.0  # of 255: an image whose brightness deviates less than this has no picture


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """The data by which an item is compared with others.

    Attributes:
        values: hash of an image's size and RGB pixels, or of a vector's numbers.
        picture: (WIDTH,), unit length; `None` for a vector or an image of even brightness.
    """

    values: bytes
    picture: NDArray[np.float32] | None = None


def digest(content: Any) -> bytes:
    """Return a hash of 16 bytes."""
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
    return Fingerprint(digest((vector + np.float32(0)).tobytes()))  # + 0 turns −0 into 0


def picture(image: Image.Image) -> NDArray[np.float32] | None:
    """Return an RGB image's small picture (WIDTH,) at unit length; None for even brightness.

    A difference hash (Krawetz, "Kind of Like That", 2013) keeps only the signs of differences
    between neighbours. In flat areas these signs are JPEG noise, so copies can differ as much
    as different images. This picture keeps the values themselves.
    """
    small = image.resize((SIDE, SIDE), Image.Resampling.BILINEAR, reducing_gap=3.0).convert("YCbCr")
    values = np.asarray(small, dtype=np.float32)
    part = SIDE // COLOURS
    colours = values[..., 1:].reshape(COLOURS, part, COLOURS, part, 2).mean((1, 3)) - 128
    brightness = values[..., 0] - values[..., 0].mean()
    # Each colour value stands for part × part pixels.
    whole_picture = np.concatenate([brightness.ravel(), part * colours.ravel()])
    if float(brightness.std()) < _FLAT:
        return None
    unit: NDArray[np.float32] = (whole_picture / np.linalg.norm(whole_picture)).astype(np.float32)
    return unit


Rows = NDArray[np.int64]
Doubles = NDArray[np.float64]

_FIRST, _MOST = 8, 2048  # a row's candidates in the first step, and in the last
_PAGE = 1024  # rows that are searched at a time
MOST_PAIRS = 1_000_000


@dataclass(frozen=True)
class Near:
    """Pairs of rows that are near each other.

    Attributes:
        first: the lower row (n,) of each pair.
        second: the higher row (n,) of each pair.
        distance: the distance (n,) of each pair.
        complete: False if there are too many pairs, so that some may be missing.
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
    what: str = "comparing",
) -> Near:
    """Return pairs of rows within a Euclidean distance of each other, the nearest first.

    Each row is compared with its eight nearest rows, then with four times as many, and so on, until
    one of them is too far or 2,048 have been compared. The search stops after more than
    `MOST_PAIRS` pairs.

    Args:
        vectors: N finite vectors of P numbers (N, P).
        within: largest distance of a pair.
        same: group numbers (N,); rows of the same group are not a pair.
        what: title of the progress display.
    """
    threads, size = cores(), len(vectors)
    parts: list[tuple[Rows, Rows, Doubles]] = []
    total, done, cut = 0, 0, 0
    with Meter(what, size, "items") as meter:
        while done < size and total <= MOST_PAIRS:
            queries, count = np.arange(done, min(done + _PAGE, size)), _FIRST
            done += len(queries)
            meter.update(len(queries))
            while len(queries):
                squared, rows = nearest(
                    vectors[queries], vectors, min(count, size), threads=threads
                )
                distances = np.sqrt(squared)
                close = np.less_equal(distances, within)
                more = np.all(close, axis=1)
                if count >= min(_MOST, size):  # stop; the rows in `cut` may have further pairs
                    cut += int(np.count_nonzero(more)) if count < size else 0
                    more[:] = False
                row, place = np.nonzero(close & ~more[:, None])
                item, neighbor = queries[row], rows[row, place]
                kept = item != neighbor if same is None else same[item] != same[neighbor]
                parts.append((item[kept], neighbor[kept], distances[row, place][kept]))
                total += int(kept.sum())
                queries, count = queries[more], 4 * count
    # A pair is missing only if the search was cut short for both of its rows.
    return _once(parts, done == size and total <= MOST_PAIRS and cut < 2)


def _once(parts: Sequence[tuple[Rows, Rows, Doubles]], complete: bool) -> Near:
    """Return each pair once, with the smaller of its two distances."""
    empty = np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0)
    first, second, distance = map(np.concatenate, zip(empty, *parts, strict=True))
    low, high = np.minimum(first, second), np.maximum(first, second)
    order = np.lexsort((distance, high, low))
    low, high, distance = low[order], high[order], distance[order]
    is_new = np.ones(len(low), bool)
    is_new[1:] = (low[1:] != low[:-1]) | (high[1:] != high[:-1])
    low, high, distance = low[is_new], high[is_new], distance[is_new]
    order = np.argsort(distance, kind="stable")
    return Near(low[order], high[order], distance[order], complete)
