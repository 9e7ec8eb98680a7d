"""Read an image file's structure before anything decodes it, and refuse what would cost far more than it should.

A few bytes can ask for seconds of work or gigabytes: scans, chunks, tiles and frames are counted here, without a pixel.
What is merely damaged passes: the decoder says so better.
"""

from __future__ import annotations

from collections.abc import Callable

from retrieval.serving.screening import bmp, boxes, gif, jpeg, png, ppm, tiff, webp
from retrieval.serving.screening.limits import Limits as Limits

_CHECKS: dict[str, Callable[[bytes, Limits, str], None]] = {
    "AVIF": boxes.check,
    "BMP": bmp.check,
    "GIF": gif.check,
    "HEIF": boxes.check,
    "JPEG": jpeg.check,
    "PNG": png.check,
    "PPM": ppm.check,
    "TIFF": tiff.check,
    "WEBP": webp.check,
}
_STARTS = {
    b"\xff\xd8\xff": "JPEG",
    b"\x89PNG\r\n\x1a\n": "PNG",
    b"GIF87a": "GIF",
    b"GIF89a": "GIF",
    b"BM": "BMP",
    **dict.fromkeys(tiff.STARTS, "TIFF"),
    **{b"P" + bytes([sign]): "PPM" for sign in b"0123456fy"},
}


def format_of(content: bytes) -> str | None:
    """Return the format that a file's first bytes name, as Pillow calls it; None for one that is not known."""
    for start, name in _STARTS.items():
        if content.startswith(start):
            return name
    if content[:4] == b"RIFF" and content[8:12] == b"WEBP":
        return "WEBP"
    return boxes.format_of(content)


def screen(content: bytes, format: str, limits: Limits, name: str) -> None:
    """Refuse an encoded image by its structure.

    Args:
        content: the file.
        format: from `format_of`.
        limits: what it may have.
        name: what to call it in an error.

    Raises:
        DataError: decoding the image would cost more than the limits allow.
    """
    _CHECKS[format](content, limits, name)
