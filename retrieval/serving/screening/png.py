"""PNG: chunks."""

from __future__ import annotations

from retrieval.serving.screening import tiff
from retrieval.serving.screening.limits import Limits

_HEADER = 8
_TEXTS = 50  # of which Pillow inflates up to 1 MB each


def check(content: bytes, limits: Limits, name: str) -> None:
    """Refuse too many chunks or compressed texts, and an image that is too large."""
    place, chunks, texts = _HEADER, 0, 0
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
        elif kind in (b"zTXt", b"iTXt"):
            texts += 1
            limits.check_count(name, texts, _TEXTS, "compressed texts")
        elif kind == b"eXIf":
            tiff.check_metadata(content[start : start + length], limits, name)
        elif kind == b"IEND":
            break
        place = start + length + 4
