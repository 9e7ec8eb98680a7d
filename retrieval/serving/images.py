"""Bytes to pixels: limits, decoding, resizing. The one decoder that training, indexing and serving share.

Training, indexing and serving must see the same pixels: nobody else decodes.
"""

from __future__ import annotations

import io
import os
import stat
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, get_args

import numpy as np
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError

from retrieval.errors import DataError
from retrieval.serving.image_formats import EXTENSIONS as EXTENSIONS
from retrieval.serving.image_formats import FORMATS as FORMATS
from retrieval.serving.image_formats import HOW, REDUCIBLE, can_open, format_of
from retrieval.serving.image_formats import Limits as Limits

Interpolation = Literal["nearest", "bilinear", "bicubic", "lanczos"]


def _silence() -> None:
    """Ignore Pillow's warnings: metadata that it cannot read changes no pixel, and our own limits are stricter.

    Once for the process: swapping the filters around each image would need a lock around each image.
    """
    warnings.filterwarnings("ignore", module=r"PIL\.")


_silence()


@dataclass(frozen=True)
class Preprocessing:
    """What an image goes through before the encoder: resize the shorter side, crop the centre, normalise.

    Resizing and cropping happen on uint8 pixels, here; `mean` and `std` are applied inside the encoder.

    Attributes:
        size: height and width of the encoder's input, in pixels.
        channels: 1 (grey) or 3 (RGB).
        mean: one number a channel, of pixels scaled to 0–1; a single one is every channel's.
        std: likewise.
        interpolation: how resizing interpolates.
        resize: length of the shorter side before the centre crop; None stretches the image to `size` without a crop.
    """

    size: tuple[int, int]
    channels: int = 3
    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)
    interpolation: Interpolation = "bilinear"
    resize: int | None = None

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}  # as part of a bundle's manifest

    def __post_init__(self) -> None:
        if len(self.size) != 2 or min(self.size) < 1:
            raise ValueError(f"size must be a height and a width of at least 1 pixel, not {self.size}")
        if self.channels not in (1, 3):
            raise ValueError(f"channels must be 1 (grey) or 3 (RGB), not {self.channels}")
        for name in ("mean", "std"):
            numbers = tuple(getattr(self, name))
            if len(numbers) not in (1, self.channels):
                wanted = (
                    "1 number" if self.channels == 1 else f"{self.channels} numbers, or 1 for all of them"
                )
                raise ValueError(f"{name} must be {wanted}, not {len(numbers)}: {numbers}")
            object.__setattr__(self, name, numbers * (self.channels // len(numbers)))
        if self.resize is not None and self.resize < 1:
            raise ValueError(f"resize must be at least 1 pixel, not {self.resize}")
        if self.interpolation not in get_args(Interpolation):
            raise ValueError(
                f"interpolation must be one of {', '.join(get_args(Interpolation))}, not '{self.interpolation}'"
            )

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height, width of one encoder input."""
        return (self.channels, *self.size)

    def __call__(self, image: Image.Image) -> NDArray[np.uint8]:
        """Return the pixels (channels, H, W), uint8, of a decoded image of any size and mode.

        Raises:
            DataError: the image's colour space cannot be converted.
        """
        image = to_mode(image, "L" if self.channels == 1 else "RGB")
        height, width = self.size
        resample = Image.Resampling[self.interpolation.upper()]
        if self.resize is None:
            if image.size != (width, height):
                image = image.resize((width, height), resample)
        else:
            image = _trim(image, self.resize, max(self.size))
            scale = self.resize / min(image.size)
            new = (max(1, round(image.width * scale)), max(1, round(image.height * scale)))
            left, top = (new[0] - width) // 2, (new[1] - height) // 2
            image = _part_of_resized(image, new, (left, top, left + width, top + height), resample)
        # of its bytes: the array interface of Pillow's images takes twice as long
        pixels = np.frombuffer(image.tobytes(), np.uint8).reshape(image.height, image.width, self.channels)
        return np.ascontiguousarray(pixels.transpose(2, 0, 1))


def _part_of_resized(
    image: Image.Image, size: tuple[int, int], part: tuple[int, int, int, int], resample: Image.Resampling
) -> Image.Image:
    """Return a part of a resized image, to the last bit as if the whole were resized and then cropped; most of decoding is resizing.

    Pillow makes the columns first, of every row, and then the rows (of images more than twice as high as wide it is the other way round). So
    columns beyond the part are left out in between; and rows beyond it from the start, where places of rows are exact numbers: of a height that
    is a power of two.
    """
    left, top, right, bottom = part
    width, height = image.size
    if part == (0, 0, *size):
        return image if size == image.size else image.resize(size, resample)
    if size == image.size or resample == Image.Resampling.NEAREST or height > 2 * width:
        return (image if size == image.size else image.resize(size, resample)).crop(part)
    step, first, last = height / size[1], 0, height
    exact = size[1] & (size[1] - 1) == 0 and top >= 0 and bottom <= size[1] and size[1] * height < 1 << 24
    if exact:
        reach = 3 * max(step, 1) + 1  # Lanczos's, the widest
        first, last = max(0, int(top * step - reach)), min(height, int(bottom * step + reach) + 1)
        image = image.crop((0, first, width, last))
    image = image.resize((size[0], last - first), resample).crop((left, 0, right, last - first))
    if exact:
        rows = (0, top * step - first, right - left, bottom * step - first)
        return image.resize((right - left, bottom - top), resample, rows)
    return image.resize((right - left, size[1]), resample).crop((0, top, right - left, bottom))


def _trim(image: Image.Image, shorter: int, crop: int) -> Image.Image:
    """Cut off the far ends of a very long image, which the centre crop would drop anyway.

    Resizing the shorter side of a 1 × 20,000,000 image to 256 would otherwise make five thousand million pixels.
    """
    side = min(image.size)
    keep = max(side, -(-4 * side * max(crop, shorter) // shorter))
    if max(image.size) <= keep:
        return image
    width, height = min(image.width, keep), min(image.height, keep)
    left, top = (image.width - width) // 2, (image.height - height) // 2
    return image.crop((left, top, left + width, top + height))


def to_mode(image: Image.Image, mode: Literal["L", "RGB"]) -> Image.Image:
    """Return the image in grey or RGB; transparency lies on white, 16-bit and float grey are scaled to 8 bits.

    Raises:
        DataError: Pillow has no conversion from the image's colour space.
    """
    if image.mode == mode and "transparency" not in image.info:
        return image
    try:
        if image.mode.startswith("I") or image.mode == "F":
            image = _grey8(image)
        elif image.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in image.info:
            return _on_white(image, mode)
        return image.convert(mode)
    except (ValueError, KeyError, OSError) as error:
        raise DataError(f"an image of mode {image.mode} cannot be converted to {mode}: {error}.") from error


def _on_white(image: Image.Image, mode: Literal["L", "RGB"]) -> Image.Image:
    """Return a transparent image on white, a band of rows at a time: whole, it would be in memory four times over."""
    out = Image.new(mode, image.size)
    rows = max(1, _BAND // image.width)
    for top in range(0, image.height, rows):
        band = image.crop((0, top, image.width, min(top + rows, image.height)))
        if band.mode == "La":
            band = band.convert("LA")
        band = band.convert("RGBA")
        white = Image.new("RGBA", band.size, (255, 255, 255, 255))
        out.paste(Image.alpha_composite(white, band).convert(mode), (0, top))
    return out


def _grey8(image: Image.Image) -> Image.Image:
    """Return 8-bit grey of 16-bit, 32-bit or float grey."""
    values: NDArray[Any] = np.nan_to_num(np.asarray(image, dtype=np.float32), nan=0.0, posinf=0.0, neginf=0.0)
    top = values.max(initial=0)
    if image.mode.startswith("I;16") or top > 255:
        values = values / 257
    elif image.mode == "F" and top <= 1:
        values = values * 255
    return Image.fromarray(values.clip(0, 255).astype(np.uint8))


_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_ORIENTATION = 0x0112
_FIRST_TURNED = 5  # orientations from here on exchange width and height
_FULL_SIZE = "full_size"
_BAND = 1_000_000  # pixels
_PIECE = 65_536  # bytes of a file that grew since it was looked at
_THUMBNAIL = 256  # pixels of the longer side


def decode(
    data: bytes | str | os.PathLike[str], limits: Limits | None = None, name: str | None = None
) -> Image.Image:
    """Return the decoded image (the first frame of several), upright by its EXIF orientation. Safe in threads.

    Args:
        data: an encoded image's bytes, or the path of its file.
        limits: larger images are refused by their header, before a pixel is decoded.
        name: what to call it in an error; a path's own name by default, "the file" for bytes.

    Raises:
        DataError: missing, too large, of no known format, or damaged.
    """
    limits = limits or Limits()
    if isinstance(data, bytes):
        name = name or "the file"
        content = data
    else:
        name = name or os.fspath(data)
        content = read_image(data, limits, name)
    if len(content) > limits.bytes:
        raise _too_many_bytes(name, len(content), limits)
    if not content:
        raise DataError(f"{name} is empty (0 bytes).")
    format = format_of(content)
    if format is None:
        known = ", ".join((*FORMATS, "AVIF", "HEIC"))
        raise DataError(f"{name} is not an image in a known format ({known}).")
    if not can_open(format):
        raise DataError(f"{name} {HOW[format]}")
    try:
        return _open(content, format, limits, name)
    except Warning:  # filters that were set since make errors of warnings: ours goes before them
        _silence()
        return _open(content, format, limits, name)


def _open(content: bytes, format: str, limits: Limits, name: str) -> Image.Image:
    try:
        image: Image.Image = Image.open(io.BytesIO(content), formats=(format,))
        size = image.size
        limits.check_size(name, *size, times=REDUCIBLE if format == "JPEG" else 1)
        if size[0] * size[1] > limits.pixels:
            image.draft(None, (size[0] // 2, size[1] // 2))  # what libjpeg leaves out costs no memory
        image.load()
        orientation = _orientation(image)
        upright = image.transpose(_UPRIGHT[orientation]) if orientation in _UPRIGHT else image
        if image.size != size:
            upright.info[_FULL_SIZE] = size[::-1] if orientation >= _FIRST_TURNED else size
        return upright
    except (DataError, Warning):
        raise
    except MemoryError:
        raise DataError(
            f"{name} needs more memory to be decoded than an image may take. Save it smaller."
        ) from None
    except Image.DecompressionBombError:
        raise DataError(
            f"{name} has far more pixels than the limit of {limits.pixels:,}. Save it smaller."
        ) from None
    except UnidentifiedImageError:
        raise DataError(f"{name} is damaged and cannot be decoded: it cannot be read as {format}.") from None
    except Exception as error:  # Pillow's decoders raise whatever their format's parser does
        raise DataError(f"{name} is damaged and cannot be decoded: {str(error).rstrip('.')}.") from error


def full_size(image: Image.Image) -> tuple[int, int]:
    """Return width and height of the file that `decode` read, upright: larger than the image's where it was reduced."""
    size: tuple[int, int] = image.info.get(_FULL_SIZE, image.size)
    return size


def _orientation(image: Image.Image) -> int:
    """Return the EXIF orientation, 1 when there is none or when it cannot be read."""
    try:
        return int(image.getexif().get(_ORIENTATION, 1))
    except Warning:
        raise
    except Exception:  # broken metadata must not cost us sound pixels
        return 1


def read_image(path: str | os.PathLike[str], limits: Limits, name: str) -> bytes:
    """Return a regular file's content; hardly more than the limit is read of one that grows meanwhile.

    Raises:
        DataError: it cannot be read, is no regular file, or is too large.
    """
    try:
        there = Path(path).stat()
        if stat.S_ISDIR(there.st_mode):
            raise DataError(f"{name} is a folder, not an image.")
        if not stat.S_ISREG(there.st_mode):  # a pipe or a device could go on for ever
            raise DataError(f"{name} is not a regular file.")
        if (size := there.st_size) > limits.bytes:
            raise _too_many_bytes(name, size, limits)
        with open(path, "rb", buffering=0) as file:  # noqa: PTH123 - half the time of a Path's, with a buffer
            content = file.read(size + 1)  # room for the limit would be taken and given back for every file
            while len(content) <= limits.bytes and (more := file.read(_PIECE)):
                content += more
            return content
    except OSError as error:
        raise DataError(f"{name} cannot be read: {error.strerror or error}.") from error
    except ValueError as error:  # a null character in the name
        raise DataError(f"{name!r} cannot be read: {error}.") from error


def _too_many_bytes(name: str, size: int, limits: Limits) -> DataError:
    return DataError(
        f"{name} has {size:,} bytes; the limit is {limits.bytes:,}. Save it smaller, or raise the limit (--max-bytes)."
    )


def to_png(image: Image.Image) -> bytes:
    """Return a decoded image as a PNG, which every browser shows.

    Raises:
        DataError: its colour space cannot be converted.
    """
    out = io.BytesIO()
    shown = image if image.mode in ("1", "L", "LA", "P", "RGB", "RGBA") else to_mode(image, "RGB")
    shown.save(out, "PNG", compress_level=1)  # quick: it goes to one reader, once
    return out.getvalue()


def thumbnail(image: Image.Image) -> bytes:
    """Return a small JPEG of a decoded image.

    Raises:
        DataError: its colour space cannot be converted.
    """
    small = to_mode(image, "RGB").copy()
    small.thumbnail((_THUMBNAIL, _THUMBNAIL))
    out = io.BytesIO()
    small.save(out, "JPEG", quality=85)
    return out.getvalue()


def from_array(array: NDArray[Any]) -> Image.Image:
    """Return a Pillow image of uint8 pixels (H, W), (H, W, 1) or (H, W, 3).

    Raises:
        DataError: another shape or type.
    """
    if (
        array.dtype != np.uint8
        or array.ndim not in (2, 3)
        or (array.ndim == 3 and array.shape[2] not in (1, 3))
        or not array.size
    ):
        raise DataError(
            f"Pixels must be uint8 of shape (H, W) or (H, W, 3), not {array.dtype} {array.shape}."
        )
    if array.ndim == 3 and array.shape[2] == 1:
        array = array[:, :, 0]
    return Image.fromarray(np.ascontiguousarray(array))
