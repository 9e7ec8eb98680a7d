"""Bytes to pixels: formats, limits, decoding and resizing.

Training, indexing and serving must see the same pixels, so no other module decodes images.
"""

from __future__ import annotations

import functools
import io
import math
import os
import re
import stat
import struct
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeAlias, TypeGuard, get_args

import numpy as np
from PIL import Image, UnidentifiedImageError

from retrieval.base.arrays import Array, Pixels
from retrieval.base.remote import address_of, read_remote, too_many_bytes
from retrieval.base.walk import leads_nowhere
from retrieval.errors import DataError

# Pillow reads dozens of formats, some with other programs (EPS runs Ghostscript). Only these are
# allowed.
FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
Interpolation = Literal["nearest", "bilinear", "bicubic", "lanczos"]
ImageLike: TypeAlias = "bytes | str | os.PathLike[str] | Image.Image | Array"


def _silence() -> None:
    """Ignore Pillow's warnings: broken metadata changes no pixel, and `Limits` is stricter on size.

    The filter applies to the whole process, because changing it around each image would need a
    lock.
    """
    warnings.filterwarnings("ignore", module=r"PIL\.")


_silence()


HOW = {  # what to do if a format cannot be decoded; completes a sentence with the image's name
    "AVIF": "is AVIF, which needs a newer Pillow: pip install 'pillow>=11.3'.",
    "HEIF": "is HEIC, which needs pillow-heif: pip install 'embedding-retrieval[heif]'.",
}


def _start(*starts: bytes) -> Callable[[bytes], bool]:
    return lambda head: head.startswith(starts)


def _brand(*brands: bytes) -> Callable[[bytes], bool]:
    """Return a test for AVIF or HEIC: whether the first box of the file lists one of the brands."""
    return lambda head: head[4:8] == b"ftyp" and any(brand in head[8:] for brand in brands)


STARTS: dict[str, Callable[[bytes], bool]] = {
    "JPEG": _start(b"\xff\xd8\xff"),
    "PNG": _start(b"\x89PNG\r\n\x1a\n"),
    "GIF": _start(b"GIF87a", b"GIF89a"),
    "WEBP": lambda head: head[:4] == b"RIFF" and head[8:12] == b"WEBP",
    "TIFF": _start(b"II*\0", b"MM\0*", b"MM*\0", b"II\0*", b"MM\0+", b"II+\0"),
    "BMP": lambda head: head[:2] == b"BM" and head[6:10] == b"\0\0\0\0",
    "PPM": lambda head: re.match(rb"P[1-6]\s+[0-9#]", head) is not None,
    "AVIF": _brand(b"avif", b"avis"),
    "HEIF": _brand(b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"mif1", b"msf1"),
}
"""Tests of a file's first bytes for each format, by Pillow's name."""

HEAD_BYTES = 64
"""Number of first bytes that identify a format."""


def format_of(content: bytes) -> str | None:
    """Return Pillow's name of the format that a file's first bytes identify, or `None`."""
    head = content[:HEAD_BYTES]
    return next((name for name, begins in STARTS.items() if begins(head)), None)


REDUCIBLE = 4
"""A JPEG of up to this many times `Limits.pixels` is accepted, and decoded at half its size."""


@dataclass(frozen=True)
class Limits:
    """Limits on images to decode.

    Attributes:
        pixels: largest width × height. A JPEG with up to four times as many pixels, such as a
            phone's photo of 48 megapixels, is decoded at half its width and height.
        bytes: largest file size in bytes.
        side: largest width or height in pixels.
        aspect: largest ratio of the longer to the shorter side.
    """

    pixels: int = 25_000_000
    bytes: int = 20_000_000
    side: int = 20_000
    aspect: int = 1_000

    @property
    def memory(self) -> int:
        """Memory limit in bytes for decoding one image, from measurements of the largest images."""
        return 64_000_000 + 24 * self.pixels

    def check_size(self, name: str, width: int, height: int, times: int = 1) -> None:
        """Check the size of an image, which may have up to `times` × `pixels` pixels.

        Raises:
            DataError: the image has too many pixels or a side that is too long.
        """
        longer = max(width, height)
        shorter = max(1, min(width, height))
        beyond = f"{name} has {width} × {height} pixels; the limit is"
        if width * height > times * self.pixels:
            advice = "Save it smaller, or raise the limit on pixels."
            raise DataError(f"{beyond} {self.pixels:,}. {advice}")
        if longer > self.side:
            raise DataError(f"{beyond} {self.side:,} on each side. Save it smaller.")
        if longer > self.aspect * shorter:
            raise DataError(
                f"{beyond} {self.aspect:,} for the ratio of its sides. Crop or split it."
            )


@functools.cache
def can_open(format: str) -> bool:
    """Return whether a format can be decoded; for AVIF and HEIF a package may be missing."""
    if format == "AVIF":
        try:
            from PIL import AvifImagePlugin
        except ImportError:
            return False
        AvifImagePlugin.DEFAULT_MAX_THREADS = 1  # images are already decoded in parallel
        return bool(AvifImagePlugin.SUPPORTED)
    if format == "HEIF":
        try:
            from pillow_heif import register_heif_opener
        except ImportError:
            return False
        register_heif_opener(thumbnails=False, decode_threads=1)
    return format in (*FORMATS, "HEIF")


@dataclass(frozen=True)
class Preprocessing:
    """Preprocessing before the encoder: resize, centre crop and normalise.

    Resizing and cropping work on uint8 pixels; the encoder itself applies `mean` and `std`. The
    pixels are exactly those of torchvision's `Resize` and `CenterCrop` on a Pillow image. The only
    exception are images that would have more than 4 million pixels after resizing: their far ends
    are cut off first.

    Attributes:
        size: height and width of the encoder's input in pixels; a single number means both.
        channels: 1 (grey) or 3 (RGB).
        mean: mean of each channel, for pixels scaled to 0–1; a single number applies to all
            channels.
        std: standard deviation of each channel, likewise.
        interpolation: interpolation method for resizing.
        resize: length of the shorter side before the centre crop. `None` stretches the image to
            `size` without a crop.
    """

    size: tuple[int, int]
    channels: int = 3
    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)
    interpolation: Interpolation = "bilinear"
    resize: int | None = None

    # Pydantic reads this class from a bundle's manifest and must refuse unknown keys.
    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    def __post_init__(self) -> None:
        size: Any = self.size
        if isinstance(size, int | np.integer):
            object.__setattr__(self, "size", (int(size), int(size)))
        if len(self.size) != 2 or min(self.size) < 1:
            raise ValueError(
                f"size must be a height and a width of at least 1 pixel, not {self.size}"
            )
        if self.channels not in (1, 3):
            raise ValueError(f"channels must be 1 (grey) or 3 (RGB), not {self.channels}")
        for name in ("mean", "std"):
            numbers = tuple(getattr(self, name))
            if len(numbers) not in (1, self.channels):
                plural = f"{self.channels} numbers, or 1 for all of them"
                count = "1 number" if self.channels == 1 else plural
                raise ValueError(f"{name} must be {count}, not {len(numbers)}: {numbers}")
            object.__setattr__(self, name, numbers * (self.channels // len(numbers)))
        if self.resize is not None and self.resize < 1:
            raise ValueError(f"resize must be at least 1 pixel, not {self.resize}")
        if self.interpolation not in get_args(Interpolation):
            raise ValueError(
                f"interpolation must be one of {', '.join(get_args(Interpolation))}, not"
                f" '{self.interpolation}'"
            )

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height and width of one encoder input."""
        return (self.channels, *self.size)

    def __call__(self, image: Image.Image) -> Pixels:
        """Return the pixels (channels, H, W), uint8, of a decoded image of any size and mode.

        Raises:
            DataError: the image's colour space cannot be converted.
        """
        image = to_mode(image, "L" if self.channels == 1 else "RGB")
        height, width = self.size
        resample = Image.Resampling[self.interpolation.upper()]
        new = (width, height)
        if self.resize is not None:
            if math.prod(_resized(image.size, self.resize)) > _MAX_PIXELS_RESIZED_WHOLE:
                image = _trim(image, self.resize, max(self.size))
            new = _resized(image.size, self.resize)
        left = _centred(new[0], width)
        top = _centred(new[1], height)
        if left > 0 and image.height <= 1.5 * image.width:
            # Pillow resizes such an image along its rows, then along its columns. Cropping between
            # the two gives the same pixels and saves resizing columns that the crop would drop.
            image = image.resize((new[0], image.height), resample)
            image = image.crop((left, 0, left + width, image.height))
            new = (width, new[1])
            left = 0
        if image.size != new:
            image = image.resize(new, resample)
        if image.size != (width, height):
            image = image.crop((left, top, left + width, top + height))
        # `tobytes` takes half as long as Pillow's array interface.
        pixels = np.frombuffer(image.tobytes(), np.uint8).reshape(height, width, self.channels)
        return np.ascontiguousarray(pixels.transpose(2, 0, 1))


def _resized(size: tuple[int, int], shorter: int) -> tuple[int, int]:
    """Return the size of an image whose shorter side becomes `shorter`.

    The longer side is truncated to whole pixels, as in torchvision and timm.
    """
    longer = int(shorter * max(size) / min(size))
    if size[0] <= size[1]:
        return (shorter, longer)
    return (longer, shorter)


def _centred(length: int, crop: int) -> int:
    """Return where a centre crop begins, as in torchvision's `CenterCrop`.

    Half pixels are rounded to even. If the crop is longer than the image, the result is negative:
    the image is padded, and an odd number of padded pixels puts one more at the end.
    """
    if crop <= length:
        return round((length - crop) / 2)
    return -((crop - length) // 2)


def _trim(image: Image.Image, shorter: int, crop: int) -> Image.Image:
    """Cut off the far ends of a very long image, which the centre crop would drop anyway.

    Otherwise, resizing the shorter side of a 1 × 20,000,000 image to 256 would create 1.3 × 10¹²
    pixels.
    """
    side = min(image.size)
    keep = max(side, -(-4 * side * max(crop, shorter) // shorter))
    if max(image.size) <= keep:
        return image
    width = min(image.width, keep)
    height = min(image.height, keep)
    left = (image.width - width) // 2
    top = (image.height - height) // 2
    return image.crop((left, top, left + width, top + height))


def to_mode(image: Image.Image, mode: Literal["L", "RGB"]) -> Image.Image:
    """Return the image in 8-bit grey or RGB, by a fixed rule for each mode.

    A colour profile is applied; see `to_srgb`. 16-bit values keep their upper 8 bits, as in Pillow
    and OpenCV. Transparent images are placed on a white background. 32-bit and floating-point grey
    is refused, because its range is unknown: 0–1 and 0–255 are both common.

    Raises:
        DataError: the image's mode has no fixed range, or Pillow cannot convert it.
    """
    check_range(image, "an image")
    try:
        return _converted(to_srgb(image), mode)
    except (ValueError, KeyError, OSError) as error:
        change = f"an image of mode {image.mode} cannot be converted to {mode}"
        raise DataError(f"{change}: {error}.") from error


def _converted(image: Image.Image, mode: str) -> Image.Image:
    """Return the image in a mode without transparency, whatever its colour profile."""
    if image.mode == mode and "transparency" not in image.info:
        return image
    if image.mode in _SIXTEEN_BITS:
        return _upper_bits(image).convert(mode)
    if image.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in image.info:
        return _on_white(image, mode)
    if image.mode == "LAB":
        image = image.convert("RGB")
    return image.convert(mode)


def to_srgb(image: Image.Image) -> Image.Image:
    """Return the image in sRGB and without its colour profile, on white and in 8 bits.

    An image that has no profile, or that of sRGB, is returned as it is. So is one whose profile is
    damaged, larger than 4 MiB, or for other pixels, such as an RGB profile of a grey image.
    """
    profile = image.info.get(_PROFILE) or b""
    mode = _MODES.get(profile[16:20])
    base = {"CMYK": "CMYK", "P": "RGB"}.get(image.mode) or Image.getmodebase(image.mode)
    if mode != base or len(profile) > _MAX_PROFILE_BYTES:
        return image
    transform = _transform(profile, mode)
    if transform is None:
        return image
    out = _applied(transform, _converted(image, mode))
    out.info = {k: v for k, v in image.info.items() if k not in (_PROFILE, "transparency")}
    return out


@functools.lru_cache(maxsize=8)
def _transform(profile: bytes, mode: str) -> Any:
    """Return a transform to sRGB, or `None` if a profile is unusable or that of sRGB itself."""
    from PIL import ImageCms

    try:
        source = ImageCms.ImageCmsProfile(io.BytesIO(profile))
        target = ImageCms.createProfile("sRGB")
        # LittleCMS's tables for grey are too coarse for dark pixels.
        if mode == "L":
            flags = ImageCms.Flags.NOOPTIMIZE
        else:
            flags = ImageCms.Flags.NONE
        transform = ImageCms.buildTransform(source, target, mode, "RGB", flags=flags)
    except Exception:  # a broken profile must not prevent decoding
        return None
    if mode == "CMYK":
        return transform
    # Each vendor writes another profile of sRGB, so compare what a profile does to many colours.
    colours = np.random.default_rng(0).integers(0, 256, (64, 64, len(mode)), np.uint8)
    image = from_array(colours)
    change = np.asarray(_applied(transform, image), int) - np.asarray(image, int)
    if np.abs(change).max() <= _SRGB_TOLERANCE:
        return None
    return transform


def _applied(transform: Any, image: Image.Image) -> Image.Image:
    """Return an image in L, RGB or CMYK in the colours of sRGB, as L or RGB."""
    out: Image.Image
    if image.mode == "L":
        greys = transform.apply(Image.frombytes("L", (256, 1), bytes(range(256))))
        out = image.point(list(greys.convert("L").tobytes()))
    else:
        out = transform.apply(image)
    return out


def check_range(image: Image.Image, name: str) -> None:
    """Refuse an image whose mode does not define the values of black and white.

    Raises:
        DataError: the image is 32-bit or floating-point grey.
    """
    if image.mode not in _WITHOUT_RANGE:
        return
    raise DataError(
        f"{name} is {_WITHOUT_RANGE[image.mode]} grey (mode {image.mode}), which does not say what"
        " white is: 1, 255 or any other number. Scale it and save it as 8-bit or 16-bit grey. For"
        " values from 0 to 1: Image.fromarray((values * 255).round().clip(0,"
        " 255).astype('uint8'))."
    )


def _on_white(image: Image.Image, mode: str) -> Image.Image:
    """Return a transparent image on white; converts bands of rows to save memory."""
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


def _upper_bits(image: Image.Image) -> Image.Image:
    """Convert 16-bit grey to 8-bit grey; a transparent value becomes white."""
    values = np.asarray(image)
    grey = (values >> 8).astype(np.uint8)
    if (transparent := image.info.get("transparency")) is not None:
        grey[values == transparent] = 255
    return Image.fromarray(grey)


def few_levels(image: Image.Image) -> str | None:
    """Return why a 16-bit image loses most of its levels in 8 bits, or `None` if it does not.

    It loses them if it uses at most a quarter of the 16-bit range, as images of 12-bit cameras do.
    The text completes a sentence that begins with the image's name.
    """
    values = np.asarray(image if image.mode in _SIXTEEN_BITS else image.convert("RGB"))
    top = int(values.max(initial=0))
    if image.mode not in _SIXTEEN_BITS:
        if image.info.get(_BITS) != 16:
            return None
        top = top << 8 | 255  # the largest possible value: Pillow has dropped the lower 8 bits
    if not 0 < top < 1 << 14:
        return None
    if top < 256:
        above = "255, so it is black in 8 bits"
        advice = "Save it as 8 bits"
    else:
        above = f"{top:,} of 65,535, so {(top >> 8) + 1} of 256 levels are left in 8 bits"
        advice = f"Multiply it by {(1 << 16) >> top.bit_length()} before it is saved"
    return f"is a 16-bit image with no value above {above}. {advice}"


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
_FIRST_TURNED = 5  # orientations from 5 on swap width and height
_FULL_SIZE = "full_size"
"""Key of `Image.info` for the size of a file that was decoded at reduced size."""
_BAND = 1_000_000  # pixels
_MAX_PIXELS_RESIZED_WHOLE = 4_000_000
_PIECE = 65_536  # bytes to read at a time from a file that grows
_SIXTEEN_BITS = ("I;16", "I;16L", "I;16B", "I;16N")
_PROFILE = "icc_profile"
"""Key of `Image.info` for the file's colour profile."""
_MAX_PROFILE_BYTES = 1 << 22
_SRGB_TOLERANCE = 1  # largest difference, of 255, between sRGB and a vendor's profile of it
_MODES = {b"GRAY": "L", b"RGB ": "RGB", b"CMYK": "CMYK"}
"""Mode of the pixels to which a profile applies, by the colour space in the profile's header."""
_NOTES = (b"tEXt", b"zTXt", b"iTXt", b"iCCP")
_WITHOUT_RANGE = {"F": "floating-point", "I": "32-bit"}
_BITS = "bits a sample"
"""Key of `Image.info` for the file's bits per sample, if Pillow's 8-bit mode hides them."""
_TIFF_BITS = 258
_THUMBNAIL = 256  # pixels of the longer side


def decode(
    data: bytes | str | os.PathLike[str], limits: Limits | None = None, name: str | None = None
) -> Image.Image:
    """Decode an image's first frame and rotate it by its EXIF orientation. Thread-safe.

    Args:
        data: an encoded image's bytes, or the path of its file.
        limits: limits on the image; its size is checked in the file's header before decoding.
        name: name of the image in error messages; by default the path, or "the file" for bytes.

    Raises:
        DataError: the image is missing, too large, of unknown format, or damaged.
    """
    limits = limits or Limits()
    name = name or ("the file" if isinstance(data, bytes) else os.fspath(data))
    if isinstance(data, bytes):
        content = data
    else:
        content = read_image(data, limits, name)
    if len(content) > limits.bytes:
        raise too_many_bytes(name, len(content), limits.bytes)
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
    except Warning:  # a filter added after ours turns warnings into errors
        _silence()
        return _open(content, format, limits, name)


def _open(content: bytes, format: str, limits: Limits, name: str) -> Image.Image:
    try:
        image: Image.Image = Image.open(io.BytesIO(content), formats=(format,))
        size = image.size
        limits.check_size(name, *size, times=REDUCIBLE if format == "JPEG" else 1)
        if size[0] * size[1] > limits.pixels:  # pixels that libjpeg skips take no memory
            image.draft(None, (size[0] // 2, size[1] // 2))
        image.load()
        orientation = _orientation(image)
        image = _restore_bit_depth(image, content, format)
        check_range(image, name)
        image = to_srgb(image)
        if orientation in _UPRIGHT:
            upright = image.transpose(_UPRIGHT[orientation])
        else:
            upright = image
        if image.size != size:
            upright.info[_FULL_SIZE] = size[::-1] if orientation >= _FIRST_TURNED else size
        return upright
    except (DataError, Warning):
        raise
    except MemoryError:
        fault = "needs more memory for decoding than is allowed. Save it smaller."
    except Image.DecompressionBombError:
        fault = f"has far more pixels than the limit of {limits.pixels:,}. Save it smaller."
    except UnidentifiedImageError:
        fault = f"is damaged and cannot be decoded: it cannot be read as {format}."
    except Exception as error:  # Pillow's decoders raise many kinds of exceptions
        # Pillow refuses a PNG with more than 1 MiB of text or profile, which pixels do not need.
        if format == "PNG" and len(plain := _without_notes(content)) < len(content):
            return _open(plain, format, limits, name)
        reason = str(error).rstrip(".")
        raise DataError(f"{name} is damaged and cannot be decoded: {reason}.") from error
    raise DataError(f"{name} {fault}")


def _without_notes(content: bytes) -> bytes:
    """Return a PNG without its texts and colour profile."""
    chunks = [content[:8]]
    start = 8
    while start + 8 <= len(content):
        size, kind = struct.unpack_from(">I4s", content, start)
        end = start + 12 + size
        if kind not in _NOTES:
            chunks.append(content[start:end])
        start = end
    return b"".join(chunks)


def _restore_bit_depth(image: Image.Image, content: bytes, format: str) -> Image.Image:
    """Correct an image where Pillow's mode hides the file's bits per sample.

    Pillow opens 16-bit PGM in mode I, which has no range, and 12-bit TIFF in a 16-bit mode. It
    scales PNG pixels to 8 bits, but not the transparent value.
    """
    if format == "PPM" and image.mode == "I":
        return image.convert("I;16")
    if format == "TIFF":
        bits = set(image.tag_v2.get(_TIFF_BITS, ()))  # type: ignore[attr-defined]
        if bits == {12} and image.mode in _SIXTEEN_BITS:
            return Image.fromarray(np.asarray(image, np.uint16) << 4)
    elif format == "PNG":
        bits = {content[24]}  # in the header, the first chunk
        if image.mode == "I":  # 16-bit grey in Pillow before 11
            image = image.convert("I;16")
        key = image.info.get("transparency")
        if key is not None and image.mode == "L" and bits & {2, 4}:
            image.info["transparency"] = key * (85 if bits == {2} else 17)
        elif key is not None and image.mode == "RGB" and bits == {16}:
            image.info["transparency"] = tuple(value >> 8 for value in key)
    else:
        return image
    if bits == {16} and image.mode not in _SIXTEEN_BITS:
        image.info[_BITS] = 16
    return image


def full_size(image: Image.Image) -> tuple[int, int]:
    """Return the width and height of the file that `decode` read, rotated but not reduced."""
    size: tuple[int, int] = image.info.get(_FULL_SIZE, image.size)
    return size


def _orientation(image: Image.Image) -> int:
    """Return the EXIF orientation, or 1 if it is missing or unreadable."""
    try:
        return int(image.getexif().get(_ORIENTATION, 1))
    except Warning:
        raise
    except Exception:  # broken metadata must not prevent decoding
        return 1


def read_image(path: str | os.PathLike[str], limits: Limits, name: str) -> bytes:
    """Return a regular file's content; a file that grows meanwhile is read up to about the limit.

    Raises:
        DataError: the file cannot be read, is not a regular file, or is too large.
        ServerError, MissingDependency: `path` stands for an address, which cannot be read.
    """
    if address_of(path):
        return read_remote(path, name, limits.bytes)
    try:
        status = Path(path).stat()
        if stat.S_ISDIR(status.st_mode):
            raise DataError(f"{name} is a folder, not an image.")
        if not stat.S_ISREG(status.st_mode):  # reading a pipe or device might never end
            raise DataError(f"{name} is not a regular file.")
        if (size := status.st_size) > limits.bytes:
            raise too_many_bytes(name, size, limits.bytes)
        with open(path, "rb", buffering=0) as file:  # noqa: PTH123 - half the time of a Path's, with a buffer
            # `file.read(limits.bytes)` would allocate that much memory for every file.
            content = file.read(size + 1)
            while len(content) <= limits.bytes and (more := file.read(_PIECE)):
                content += more
            return content
    except OSError as error:
        if leads_nowhere(Path(path)):
            raise DataError(f"{name} is a link that leads nowhere.") from error
        raise DataError(f"{name} cannot be read: {error.strerror or error}.") from error
    except ValueError as error:  # a null character in the name
        raise DataError(f"{name!r} cannot be read: {error}.") from error


def to_png(image: Image.Image) -> bytes:
    """Return a decoded image as PNG.

    Raises:
        DataError: the image's colour space cannot be converted.
    """
    out = io.BytesIO()
    if image.mode in ("1", "L", "LA", "P", "RGB", "RGBA"):
        shown = image
    else:
        shown = to_mode(image, "RGB")
    shown.save(out, "PNG", compress_level=1)  # fast, because it is sent only once
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
