"""What tells that two items are the same, or nearly: hashes of bytes and of pixels, and a small
picture that survives being saved again.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from retrieval.errors import DataError
from retrieval.serving.images import to_mode

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
    """Return the fingerprint of an image, or of a vector (F,).

    Raises:
        DataError: the image's colour space cannot be converted; the vector holds NaN or infinity.
    """
    if isinstance(item, Image.Image):
        whole = to_mode(item, "RGB")
        size = f"{whole.width} {whole.height} ".encode()
        return Fingerprint(digest(size + whole.tobytes()), picture(whole))
    vector = np.ascontiguousarray(item, dtype=np.float32)
    if not np.isfinite(vector).all():
        raise DataError("holds NaN, infinity or a number beyond float32.")
    return Fingerprint(digest((vector + np.float32(0)).tobytes()))  # −0 and 0 are one number


def picture(image: Image.Image) -> NDArray[np.float32] | None:
    """Return an RGB image shrunk to its brightness, less the mean, and its colours, at unit length
    (WIDTH,); None where it is of one colour.

    A difference hash (Krawetz, "Kind of Like That", 2013) keeps the sign of each difference between
    neighbours. Here are the numbers themselves: in a flat area a sign is noise, which JPEG brings,
    and a hash has copies as far apart as different images.
    """
    small = image.resize((SIDE, SIDE), Image.Resampling.BILINEAR, reducing_gap=3.0).convert("YCbCr")
    values = np.asarray(small, dtype=np.float32)
    part = SIDE // COLOURS
    colours = values[..., 1:].reshape(COLOURS, part, COLOURS, part, 2).mean((1, 3)) - 128
    brightness = values[..., 0] - values[..., 0].mean()
    both = np.concatenate(
        [brightness.ravel(), part * colours.ravel()]
    )  # each colour stands for so many pixels
    if float(brightness.std()) < _FLAT:
        return None
    unit: NDArray[np.float32] = (both / np.linalg.norm(both)).astype(np.float32)
    return unit
