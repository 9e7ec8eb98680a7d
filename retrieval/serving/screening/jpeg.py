"""JPEG: segments before the first scan, and the scans."""

from __future__ import annotations

import re

from retrieval.errors import DataError
from retrieval.serving.screening import tiff
from retrieval.serving.screening.limits import Limits

_MARKER = re.compile(rb"\xff([^\x00\x01\xff\xd0-\xd8])")  # neither stuffed, nor filled, nor a restart
_SIZES = frozenset({*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC})  # start of frame, of any coding
_ARITHMETIC = 0xC9
_SCAN, _END, _APP1 = 0xDA, 0xD9, 0xE1
_JUNK = 65_536  # bytes between segments: Pillow reads them one at a time
_EXIF = 16  # segments, which Pillow joins


def check(content: bytes, limits: Limits, name: str) -> None:
    """Refuse too many scans, segments, or bytes between segments, and an image that is too large."""
    place, segments, scans, exif, pixels, junk = 2, 0, 0, 0, 0, 0
    while found := _MARKER.search(content, place):
        kind = found[1][0]
        if not scans:
            junk += found.start() - place
            if junk > _JUNK:
                raise DataError(f"{name} has {junk:,} bytes that are no part of the image. Save it anew.")
        if kind == _END:
            break
        length = int.from_bytes(content[found.end() : found.end() + 2], "big")
        body = content[found.end() + 2 : found.end() + length]
        place = found.end() + max(length, 2)
        segments += 1
        limits.check_count(name, segments, limits.parts, "segments")
        if kind in _SIZES and len(body) >= 6:
            height, width = int.from_bytes(body[1:3], "big"), int.from_bytes(body[3:5], "big")
            limits.check_size(name, width, height)
            # arithmetic coding takes some four times as long
            pixels = max(pixels, width * height * (4 if kind >= _ARITHMETIC else 1))
        elif kind == _APP1 and body.startswith(b"Exif\0\0") and not scans:
            exif += 1
            limits.check_count(name, exif, _EXIF, "EXIF segments")
            tiff.check_metadata(body[6:], limits, name)
        elif kind == _SCAN:
            scans += 1
            limits.check_count(name, scans, limits.scans, "scans")
            if (
                scans * pixels > limits.scans * limits.pixels // 3
            ):  # eighteen scans of the largest, with four colours
                raise DataError(
                    f"{name} has too many scans for an image of its size. Save it as a plain JPEG or PNG."
                )
