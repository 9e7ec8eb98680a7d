"""PNG: chunks."""

from __future__ import annotations

from retrieval.serving.screening import tiff
from retrieval.serving.screening.limits import Limits

_HEADER = 8


def check(content: bytes, limits: Limits, name: str) -> None:
    """Refuse too many chunks, and an image that is too large."""
    place, chunks = _HEADER, 0
    while place + 8 <= len(content):
        length, kind = int.from_bytes(content[place : place + 4], "big"), content[place + 4 : place + 8]
        chunks += 1
        limits.check_count(name, chunks, limits.parts, "chunks")
        start = place + 8
        if kind == b"IHDR" and length >= 8:
            limits.check_size(
                name,
                int.from_bytes(content[start : start + 4], "big"),
                int.from_bytes(content[start + 4 : start + 8], "big"),
            )
        elif kind == b"eXIf":
            tiff.check_metadata(content[start : start + length], limits, name)
        elif kind == b"IEND":
            break
        place = start + length + 4
