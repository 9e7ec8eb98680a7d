"""PPM, PGM, PBM: the header, and what Pillow decodes in Python."""

from __future__ import annotations

import re

from retrieval.errors import DataError
from retrieval.serving.screening.limits import Limits

_HEADER = 4096
_COMMENTS = 1000
# possessive throughout: nothing is tried twice, however many spaces a header has
_TOKEN = re.compile(rb"(?:[ \t\n\v\f\r]++|#[^\r\n]*+[\r\n])*+([^ \t\n\v\f\r#]++)")
_PLAIN = {b"P1": 1, b"P2": 1, b"P3": 3}
_RAW = {b"P5": 1, b"P6": 3, b"P0CMYK": 4}


def check(content: bytes, limits: Limits, name: str) -> None:
    """Refuse a header without an end, and an image that is too large, or too large for its kind."""
    head = content[:_HEADER]
    tokens: list[bytes] = []
    place = 0
    while len(tokens) < 4 and (found := _TOKEN.match(head, place)):
        tokens.append(found[1])
        place = found.end()
    kind = tokens[0] if tokens else b""
    if len(tokens) < (3 if kind in (b"P1", b"P4") else 4) or not all(map(bytes.isdigit, tokens[1:3])):
        if len(content) > _HEADER:
            raise DataError(f"{name} has no size in its first {_HEADER:,} bytes, or is not an image.")
        return
    if max(map(len, tokens[1:3])) > 10:
        raise DataError(f"{name} has a size that is not a number of pixels.")
    width, height = int(tokens[1]), int(tokens[2])
    limits.check_size(name, width, height)
    if kind in _PLAIN:
        limits.check_interpreted(name, _PLAIN[kind] * width * height, "PPM of decimal numbers")
        limits.check_count(name, len(content), _HEADER + 16 * _PLAIN[kind] * width * height, "bytes a pixel")
        limits.check_count(name, content.count(b"#"), _COMMENTS, "comments")
    elif kind in _RAW and tokens[3] not in (b"255", b"65535"):
        limits.check_interpreted(
            name, _RAW[kind] * width * height, "PPM with an unusual number of grey levels"
        )
