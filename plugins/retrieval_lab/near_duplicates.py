"""Search for duplicate and near-duplicate items.

`fingerprint` hashes an item and shrinks an image to a small picture that hardly changes when the
image is saved again. `near_pairs` finds all pairs of rows that are near each other.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from PIL import Image
from retrieval.base.arrays import Array, Floats32, Floats64, Ints
from retrieval.base.progress import Meter
from retrieval.data.cache import checksum
from retrieval.errors import DataError
from retrieval.images.preprocessing import to_mode

SIDE = 16
COLOURS = 4
"""Height and width of a picture's brightness channel, and of each of its two colour channels."""
WIDTH = SIDE * SIDE + 2 * COLOURS * COLOURS
_EVEN = 2.0
"""Brightness, from 0 to 255, with a smaller standard deviation than this counts as even."""


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """What an item is compared by.

    Attributes:
        values: hash of an image's size and RGB pixels, or of a vector's numbers.
        picture: see `picture`; `None` for a vector or an image of even brightness.
    """

    values: bytes
    picture: Floats32 | None = None


def fingerprint(item: Image.Image | Array) -> Fingerprint:
    """Return the fingerprint of an image, or of a vector (F,)."""
    if isinstance(item, Image.Image):
        whole = to_mode(item, "RGB")
        size = f"{whole.width} {whole.height} ".encode()
        return Fingerprint(checksum(size + whole.tobytes()), picture(whole))
    vector = np.ascontiguousarray(item, dtype=np.float32)
    if not np.isfinite(vector).all():
        raise DataError("holds NaN, infinity or a number beyond float32.")
    return Fingerprint(checksum((vector + np.float32(0)).tobytes()))  # + 0 turns −0 into 0


def picture(image: Image.Image) -> Floats32 | None:
    """Return an RGB image's small picture (WIDTH,) at unit length; None for even brightness.

    The picture keeps brightness and colour values. A difference hash (Krawetz, "Kind of Like That",
    2013) keeps only the signs of differences between neighbours. In flat areas these signs are JPEG
    noise, so two copies of an image can differ as much as two images.
    """
    small = image.resize((SIDE, SIDE), Image.Resampling.BILINEAR, reducing_gap=3.0).convert("YCbCr")
    values = np.asarray(small, dtype=np.float32)
    part = SIDE // COLOURS
    colours = values[..., 1:].reshape(COLOURS, part, COLOURS, part, 2).mean((1, 3)) - 128
    brightness = values[..., 0] - values[..., 0].mean()
    # A colour value counts as much as the part × part brightness values of its area.
    whole_picture = np.concatenate([brightness.ravel(), part * colours.ravel()])
    if float(brightness.std()) < _EVEN:
        return None
    unit: Floats32 = (whole_picture / np.linalg.norm(whole_picture)).astype(np.float32)
    return unit


MOST_PAIRS = 1_000_000
"""The search stops when it has more pairs than this."""
_ENTRIES = 1 << 18
"""Number of squared distances that are computed at a time."""
_AXES = 8
"""Number of principal components by which blocks of far rows are left out."""
_COMPONENTS = 32
"""Number of principal components by which far pairs are left out."""
_MANY = 1 / 16
"""If a larger share of pairs may be near by their components, all numbers are compared."""
_SAMPLE = 1000
"""Number of rows from which the principal components are computed."""
_ROWS = 512
"""Largest number of rows in a block."""
_PART = 10_000
"""Number of rows whose components are computed at a time."""


@dataclass(frozen=True)
class Near:
    """Pairs of rows that are near each other.

    Attributes:
        first: the lower row (n,) of each pair.
        second: the higher row (n,) of each pair.
        distance: the distance (n,) of each pair.
        complete: False if there are too many pairs, so that some may be missing.
    """

    first: Ints
    second: Ints
    distance: Floats64
    complete: bool


def near_pairs(
    vectors: Floats32,
    within: float,
    *,
    same: Ints | None = None,
    what: str = "comparing",
) -> Near:
    """Return pairs of rows within a Euclidean distance of each other, the nearest first.

    Along some principal components no two rows are farther apart than they are in full: a few
    components leave out blocks of far rows, some more leave out far pairs. Both are computed in
    float32, with a margin for the rounding error; float64 measures the pairs that are left.

    Args:
        vectors: N finite vectors of P numbers (N, P).
        within: largest distance of a pair.
        same: group numbers (N,); rows of the same group are not a pair.
        what: title of the progress display.
    """
    size, width = vectors.shape
    mean = vectors.mean(axis=0, dtype=np.float64).astype(np.float32)
    axes = np.linalg.svd(vectors[:: -(-size // _SAMPLE)] - mean, full_matrices=False)[2]
    axes = axes[:_COMPONENTS]
    components = np.empty((size, len(axes)), np.float32)
    lengths = np.empty(size, np.float32)
    for start in range(0, size, _PART):
        centred = vectors[start : start + _PART] - mean
        components[start : start + _PART] = centred @ axes.T
        lengths[start : start + _PART] = np.linalg.norm(centred, axis=1)
    # Each row has its own margin, so that one long vector does not make all pairs candidates.
    error = 8 * float(np.finfo(np.float32).eps) * (width + 8)
    margins = error * lengths
    squares = (1 - error) * np.square(lengths)
    # (w + a + b)² ≤ w² + 2wa + 2wb + 2a² + 2b², where a and b are the errors of two rows.
    errors = len(axes) ** 0.5 * margins
    shortened = (1 - error) * np.square(components).sum(axis=1) - 2 * errors * (within + errors)
    left, right = _factors(components, shortened)
    parts = [(np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0))]
    total = 0
    with Meter(what, size, "items") as meter:
        for rows, neighbours in _blocks(components[:, :_AXES], within, margins):
            step = max(1, _ENTRIES // len(rows))
            for start in range(0, len(neighbours), step):
                if total > MOST_PAIRS:
                    break
                columns = neighbours[start : start + step]
                near = left[rows] @ right[columns].T <= within**2 / 2
                if np.count_nonzero(near) > _MANY * near.size:
                    wide_left = _factors(vectors[rows] - mean, squares[rows])[0]
                    wide_right = _factors(vectors[columns] - mean, squares[columns])[1]
                    near = wide_left @ wide_right.T <= within**2 / 2
                row, column = np.nonzero(near)
                # The block's own rows come first, so this keeps each of their pairs once.
                once = row < start + column
                first = np.minimum(rows[row[once]], columns[column[once]])
                second = np.maximum(rows[row[once]], columns[column[once]])
                if same is not None:
                    differ = same[first] != same[second]
                    first = first[differ]
                    second = second[differ]
                for begin in range(0, len(first), 4096):
                    pair = first[begin : begin + 4096], second[begin : begin + 4096]
                    differences = vectors[pair[0]].astype(np.float64) - vectors[pair[1]]
                    distance = np.linalg.norm(differences, axis=1)
                    inside = distance <= within
                    parts.append((pair[0][inside], pair[1][inside], distance[inside]))
                    total += int(inside.sum())
                    if total > MOST_PAIRS:
                        break
            meter.update(len(rows))
    first, second, distance = map(np.concatenate, zip(*parts, strict=True))
    order = np.lexsort((second, first, distance))
    return Near(first[order], second[order], distance[order], total <= MOST_PAIRS)


def _factors(vectors: Floats32, squares: Floats32) -> tuple[Floats32, Floats32]:
    """Return A and B (N, P + 2), where A Bᵀ has half the squared distances of N vectors (N, P)."""
    ones = np.ones_like(squares)
    left = np.column_stack([vectors, squares / 2, ones])
    right = np.column_stack([-vectors, ones, squares / 2])
    return left, right


def _blocks(components: Floats32, within: float, margins: Floats32) -> Iterator[tuple[Ints, Ints]]:
    """Yield blocks of rows, and for each block these and all rows that may be near one of them.

    A pair of rows in different blocks is yielded once. Blocks are the leaves of a k-d tree.

    Args:
        components: principal components (N, A) of the rows.
        within: largest distance of near rows.
        margins: largest rounding error (N,) of each row's components.
    """
    size = len(components)
    components = np.ascontiguousarray(components.T)
    lower = components - margins
    upper = components + margins
    done = np.zeros(size, bool)
    unfinished = [(np.arange(size), np.arange(size))]
    while unfinished:
        rows, neighbours = unfinished.pop()
        neighbours = neighbours[~done[neighbours]]
        for low, high in zip(lower, upper, strict=True):
            least = low[rows].min() - within
            most = high[rows].max() + within
            neighbours = neighbours[(high[neighbours] >= least) & (low[neighbours] <= most)]
        if len(rows) > _ROWS:
            widest = components[:, rows].var(axis=1).argmax()
            half = len(rows) // 2
            ordered = rows[np.argpartition(components[widest, rows], half)]
            unfinished += [(ordered[half:], neighbours), (ordered[:half], neighbours)]
        else:
            done[rows] = True
            yield rows, np.concatenate([rows, neighbours[~done[neighbours]]])
