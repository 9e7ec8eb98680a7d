"""WebP: chunks and the size of the canvas and its frames."""

from __future__ import annotations

from retrieval.serving.screening import tiff
from retrieval.serving.screening.limits import Limits


def check(content: bytes, limits: Limits, name: str) -> None:
    """Refuse too many chunks, and a canvas or frame that is too large."""
    place, chunks = 12, 0
    while place + 8 <= len(content):
        kind, length = content[place : place + 4], _number(content, place + 4, 4)
        body = place + 8
        chunks += 1
        limits.check_count(name, chunks, limits.parts, "chunks")
        if kind == b"VP8X" and length >= 10:
            limits.check_size(name, _number(content, body + 4, 3) + 1, _number(content, body + 7, 3) + 1)
        elif kind == b"VP8L" and content[body : body + 1] == b"\x2f":
            bits = _number(content, body + 1, 4)
            limits.check_size(name, (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1)
        elif kind == b"VP8 " and content[body + 3 : body + 6] == b"\x9d\x01\x2a":
            limits.check_size(
                name, _number(content, body + 6, 2) & 0x3FFF, _number(content, body + 8, 2) & 0x3FFF
            )
        elif kind == b"EXIF":
            exif = content[body : body + length]
            tiff.check_metadata(exif.removeprefix(b"Exif\0\0"), limits, name)
        place = body + length + (length & 1)


def _number(content: bytes, place: int, length: int) -> int:
    return int.from_bytes(content[place : place + length], "little")
