"""The formats of images, each known by a file's first bytes."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable

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
