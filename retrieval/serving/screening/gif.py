"""GIF: blocks up to the first frame, which is the one that is decoded."""

from __future__ import annotations

from retrieval.serving.screening.limits import Limits

_COMMENT_BYTES = 1_000_000


def check(content: bytes, limits: Limits, name: str) -> None:
    """Refuse too many blocks before the first frame, too long a comment, and a canvas that is too large."""
    if len(content) < 13:
        return
    width, height = _short(content, 6), _short(content, 8)
    limits.check_size(name, width, height)
    place = 13 + _colours(content[10])
    blocks = comment = 0
    while place < len(content):
        kind = content[place]
        if kind == 0x2C:  # a frame, which may be larger than the canvas
            right = _short(content, place + 1) + _short(content, place + 5)
            bottom = _short(content, place + 3) + _short(content, place + 7)
            limits.check_size(name, max(width, right), max(height, bottom))
            return
        if kind == 0x3B:
            return
        if kind != 0x21:  # no block starts here: Pillow goes on a byte at a time
            place += 1
            blocks += 1
            limits.check_count(name, blocks, limits.parts, "blocks before its first frame")
            continue
        is_comment = content[place + 1 : place + 2] == b"\xfe"
        place += 2
        while True:
            blocks += 1
            limits.check_count(name, blocks, limits.parts, "blocks before its first frame")
            length = content[place] if place < len(content) else 0
            place += 1 + length
            comment += length if is_comment else 0
            if not length:
                break
        limits.check_count(name, comment, _COMMENT_BYTES, "bytes of comment")


def _short(content: bytes, place: int) -> int:
    return int.from_bytes(content[place : place + 2], "little")


def _colours(flags: int) -> int:
    """Return the bytes of a colour table."""
    return 3 << ((flags & 7) + 1) if flags & 0x80 else 0
