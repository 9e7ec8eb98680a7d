"""Hashes of items, and small pictures of images that hardly change when an image is saved again."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from PIL import Image
from retrieval.base.arrays import Array, Floats32
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
