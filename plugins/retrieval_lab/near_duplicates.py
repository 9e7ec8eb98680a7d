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
"""Number of principal components by which far rows are left out."""
_SAMPLE = 1000
"""Number of rows from which the principal components are computed."""
_ROWS = 512
"""Largest number of rows in a block."""


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

    Principal components leave out rows that are too far. Squared distances in float32, with a
    margin for their rounding error, then select candidate pairs; float64 measures the candidates.

    Args:
        vectors: N finite vectors of P numbers (N, P).
        within: largest distance of a pair.
        same: group numbers (N,); rows of the same group are not a pair.
        what: title of the progress display.
    """
    size, width = vectors.shape
    centred = vectors - vectors.mean(axis=0, dtype=np.float64).astype(np.float32)
    squares = np.square(centred).sum(axis=1)
    # Each row has its own margin, so that one long vector does not make all pairs candidates.
    error = 8 * float(np.finfo(np.float32).eps) * (width + 8)
    shortened = (1 - error) * squares
    parts = [(np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0))]
    total = 0
    with Meter(what, size, "items") as meter:
        for rows, neighbours in _blocks(centred, within, error * np.sqrt(squares)):
            step = max(1, _ENTRIES // len(rows))
            for start in range(0, len(neighbours), step):
                if total > MOST_PAIRS:
                    break
                columns = neighbours[start : start + step]
                squared = shortened[rows, None] + shortened[columns]
                squared -= 2 * (centred[rows] @ centred[columns].T)
                row, column = np.nonzero(squared <= within**2)
                # The block's own rows come first, so this keeps each of their pairs once.
                once = row < start + column
                first = np.minimum(rows[row[once]], columns[column[once]])
                second = np.maximum(rows[row[once]], columns[column[once]])
                if same is not None:
                    kept = same[first] != same[second]
                    first = first[kept]
                    second = second[kept]
                for begin in range(0, len(first), 4096):
                    pair = first[begin : begin + 4096], second[begin : begin + 4096]
                    differences = vectors[pair[0]].astype(np.float64) - vectors[pair[1]]
                    distance = np.linalg.norm(differences, axis=1)
                    near = distance <= within
                    parts.append((pair[0][near], pair[1][near], distance[near]))
                    total += int(near.sum())
                    if total > MOST_PAIRS:
                        break
            meter.update(len(rows))
    first, second, distance = map(np.concatenate, zip(*parts, strict=True))
    order = np.lexsort((second, first, distance))
    return Near(first[order], second[order], distance[order], total <= MOST_PAIRS)


def _blocks(centred: Floats32, within: float, margins: Floats32) -> Iterator[tuple[Ints, Ints]]:
    """Yield blocks of rows, and for each block these and all rows that may be near one of them.

    A pair of rows in different blocks is yielded once. Blocks are the leaves of a k-d tree over the
    first principal components, along which no two rows are farther apart than they are in full.

    Args:
        centred: vectors (N, P) whose mean is 0.
        within: largest distance of near rows.
        margins: largest rounding error (N,) of each row's components.
    """
    size = len(centred)
    sample = centred[:: -(-size // _SAMPLE)]
    axes = np.linalg.svd(sample, full_matrices=False)[2][:_AXES]
    components = axes @ centred.T
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
