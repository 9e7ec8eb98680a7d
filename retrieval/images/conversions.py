"""Convert images between files' bytes, Pillow images, arrays and tensors."""

from __future__ import annotations

import io
import os
from typing import Any, TypeAlias, TypeGuard

import numpy as np
from PIL import Image

from retrieval.base.arrays import Array
from retrieval.errors import DataError
from retrieval.images.colour import to_mode

ImageLike: TypeAlias = "bytes | str | os.PathLike[str] | Image.Image | Array"
_THUMBNAIL = 256  # pixels of the longer side


def to_png(image: Image.Image) -> bytes:
    """Return a decoded image as PNG.

    Raises:
        DataError: the image's colour space cannot be converted.
    """
    out = io.BytesIO()
    if image.mode not in ("1", "L", "LA", "P", "RGB", "RGBA"):
        image = to_mode(image, "RGB")
    image.save(out, "PNG", compress_level=1)  # fast, because it is sent only once
    return out.getvalue()


def thumbnail(image: Image.Image) -> bytes:
    """Return a decoded image as a small JPEG.

    Raises:
        DataError: the image's colour space cannot be converted.
    """
    small = to_mode(image, "RGB").copy()
    small.thumbnail((_THUMBNAIL, _THUMBNAIL))
    out = io.BytesIO()
    small.save(out, "JPEG", quality=85)
    return out.getvalue()


def from_array(array: Array) -> Image.Image:
    """Return a Pillow image of uint8 pixels (H, W), (H, W, 1) or (H, W, 3).

    Raises:
        DataError: the array has another shape or type.
    """
    grey = array.ndim == 2 or (array.ndim == 3 and array.shape[2] == 1)
    colour = array.ndim == 3 and array.shape[2] == 3
    if array.dtype != np.uint8 or not array.size or not (grey or colour):
        kind = f"{array.dtype} {array.shape}"
        raise DataError(f"Pixels must be uint8 of shape (H, W) or (H, W, 3), not {kind}.")
    return Image.fromarray(np.ascontiguousarray(array.reshape(array.shape[:2]) if grey else array))


def from_pixels(array: Array) -> Image.Image:
    """Return a Pillow image of pixels as in `from_array`, or of real numbers from 0 to 1.

    Raises:
        DataError: the array has another shape or type, or numbers beyond that range.
    """
    if array.dtype.kind != "f" or not array.size:
        return from_array(array)
    least = float(array.min())
    most = float(array.max())
    if not (least >= 0 and most <= 1):
        raise DataError(
            f"Pixels that are real numbers must be from 0 to 1, but these are from {least:g} to"
            f" {most:g}. Scale them, leave out a normalisation, or pass uint8."
        )
    return from_array(np.rint(array * 255).astype(np.uint8))


def is_image(item: object) -> TypeGuard[ImageLike]:
    """Return whether an object has a type that `Bundle.preprocess` accepts."""
    return isinstance(item, bytes | str | os.PathLike | Image.Image | np.ndarray)


def as_list(images: Any) -> list[Any]:
    """Return one or several images as a list for `Bundle.preprocess`.

    N images may be one array (N, H, W, channels) or (N, H, W). Tensors have channels first, as in
    torchvision, and become arrays; N images may be one tensor (N, channels, H, W) or (N, H, W).

    Raises:
        DataError: the shape may be that of several grey images, or of one image.
    """
    if isinstance(images, str | bytes | os.PathLike | Image.Image):
        return [images]
    is_tensor = hasattr(images, "detach")
    if is_tensor or isinstance(images, np.ndarray):
        # Four channels are never taken for images 4 pixels wide; `from_array` refuses them.
        ends_with_channels = images.ndim == 3 and 1 <= images.shape[2] <= 4
        if images.ndim < 3 or (ends_with_channels and not is_tensor):
            return [channels_last(images)]
        if images.ndim == 3 and (ends_with_channels or len(images) == 3):
            raise DataError(
                f"Pixels of shape {tuple(images.shape)} may be several grey images or one colour"
                " image. Pass a list: list(images) or [image]."
            )
    return [channels_last(image) for image in images]


def channels_last(image: Any) -> Any:
    """Return a tensor (channels, H, W) or (H, W) as an array (H, W, channels) or (H, W).

    Other objects are returned as they are.
    """
    if not hasattr(image, "detach"):
        return image
    array: Array = image.detach().cpu().numpy()
    if array.ndim == 3:
        return array.transpose(1, 2, 0)
    return array
