"""BMP: its header. Run lengths are decoded in Python by Pillow."""

from __future__ import annotations

from retrieval.serving.screening.limits import Limits

_RUN_LENGTHS = (1, 2)
_OLD = 12  # bytes of the oldest header


def check(content: bytes, limits: Limits, name: str) -> None:
    """Refuse an image that is too large, or too large for run lengths."""
    if len(content) < 34:
        return
    header = _number(content, 14)
    if header == _OLD:
        limits.check_size(name, _number(content, 18, 2), _number(content, 20, 2))
        return
    width, height = _number(content, 18), _number(content, 22)
    if content[25] == 0xFF:  # from top to bottom
        height = 2**32 - height
    limits.check_size(name, width, height)
    if _number(content, 30) in _RUN_LENGTHS:
        limits.check_interpreted(name, width * height, "BMP with run lengths")
        # two bytes a pixel is the longest way to write them, without those that write none
        limits.check_count(name, len(content), 70_000 + 9 * width * height // 4, "bytes of run lengths")


def _number(content: bytes, place: int, length: int = 4) -> int:
    return int.from_bytes(content[place : place + length], "little")
