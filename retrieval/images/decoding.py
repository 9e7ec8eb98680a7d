"""Tell the formats of image files, check their limits, and read and decode them.

Training, indexing and serving must see the same pixels, so no other module decodes images.
"""

from __future__ import annotations

import functools
import io
import os
import re
import stat
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image, UnidentifiedImageError

from retrieval.base.photo_files import address_of, leads_nowhere, read_remote, too_many_bytes
from retrieval.errors import DataError
from retrieval.images import ignore_pillow_warnings
from retrieval.images.preprocessing import BITS, SIXTEEN_BITS, check_range, to_srgb

# Pillow reads dozens of formats, some with other programs (EPS runs Ghostscript). Only these are
# allowed.
FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
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
_PIECE = 65_536  # bytes to read at a time from a file that grows
_NOTES = (b"tEXt", b"zTXt", b"iTXt", b"iCCP")
_TIFF_BITS = 258


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
        formats = ", ".join((*FORMATS, "AVIF", "HEIC"))
        raise DataError(f"{name} is not an image in a known format ({formats}).")
    if not can_open(format):
        raise DataError(f"{name} {HOW[format]}")
    try:
        return _open(content, format, limits, name)
    except Warning:  # a filter added after ours turns warnings into errors
        ignore_pillow_warnings()
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
        if bits == {12} and image.mode in SIXTEEN_BITS:
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
    if bits == {16} and image.mode not in SIXTEEN_BITS:
        image.info[BITS] = 16
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
        status = os.stat(path)  # noqa: PTH116  # an eighth of the time of Path.stat
        if stat.S_ISDIR(status.st_mode):
            raise DataError(f"{name} is a folder, not an image.")
        if not stat.S_ISREG(status.st_mode):  # reading a pipe or device might never end
            raise DataError(f"{name} is not a regular file.")
        if (size := status.st_size) > limits.bytes:
            raise too_many_bytes(name, size, limits.bytes)
        # Half the time of opening a Path with a buffer.
        with open(path, "rb", buffering=0) as file:  # noqa: PTH123
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
