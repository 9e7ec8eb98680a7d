"""AVIF and HEIC: the boxes of ISO base media files (ISO/IEC 14496-12, 23008-12)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice

from retrieval.serving.screening import tiff
from retrieval.serving.screening.limits import Limits

_AVIF = {b"avif", b"avis"}
_HEIF = {b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"hevm", b"hevs"}
_EITHER = {b"mif1", b"msf1"}
_DEEPEST = 4
_BRANDS = 64
_FULL = 4  # version and flags
_METADATA = re.compile(rb"II\x2a\0|MM\0\x2a")
_EXIF = 8
_PUT_TOGETHER = {b"grid": 4, b"iovl": 10}  # and where they say how large the whole is


def format_of(content: bytes) -> str | None:
    """Return AVIF or HEIF by the file's brands."""
    if content[4:8] != b"ftyp":
        return None
    length = min(_number(content, 0, 4), 16 + 4 * _BRANDS)
    brands = [content[8:12], *(content[at : at + 4] for at in range(16, length, 4))]
    if brands[0] in _AVIF or (brands[0] in _EITHER and _AVIF.intersection(brands)):
        return "AVIF"
    if brands[0] in _HEIF or (brands[0] in _EITHER and _HEIF.intersection(brands)):
        return "HEIF"
    return None


@dataclass(frozen=True)
class _Box:
    kind: bytes
    start: int
    stop: int


def check(content: bytes, limits: Limits, name: str) -> None:
    """Refuse too many boxes or items, and an image, tile or grid that is too large."""
    boxes = 0
    waiting = [(0, len(content), 0)]
    idat, grids = 0, []
    locations: dict[int, tuple[int, int]] = {}
    while waiting:
        start, stop, depth = waiting.pop()
        for box in _boxes(content, start, stop):
            boxes += 1
            limits.check_count(name, boxes, limits.parts, "boxes")
            body = box.start
            if box.kind in (b"meta", b"iprp", b"ipco", b"moov", b"trak", b"mdia", b"minf", b"stbl"):
                if depth < 2 * _DEEPEST:
                    waiting.append((body + (_FULL if box.kind == b"meta" else 0), box.stop, depth + 1))
            elif box.kind == b"ispe":
                limits.check_size(name, _number(content, body + 4, 4), _number(content, body + 8, 4))
            elif box.kind == b"tkhd":
                wide = 92 if content[body : body + 1] == b"\x01" else 80
                width, height = (_number(content, body + wide - 4 + at, 2) for at in (0, 4))
                if width and height:
                    limits.check_size(name, width, height)
            elif box.kind == b"iinf":
                version = content[body : body + 1]
                items = _number(content, body + _FULL, 4 if version != b"\0" else 2)
                limits.check_count(name, items, limits.items, "items")
                inside = _boxes(content, body + (8 if version != b"\0" else 6), box.stop)
                grids = _grids(content, islice(inside, limits.items))
            elif box.kind == b"iloc":
                locations = _locations(content, box, limits, name)
            elif box.kind == b"idat":
                idat = body
    for number, kind in grids:
        method, place = locations.get(number, (0, len(content)))
        _check_grid(content, place + (idat if method == 1 else 0), kind, limits, name)
    for found, _ in zip(_METADATA.finditer(content), range(_EXIF), strict=False):
        tiff.check_metadata(content[found.start() :], limits, name)


def _boxes(content: bytes, start: int, stop: int) -> Iterator[_Box]:
    """Give the boxes between two places."""
    while start + 8 <= stop:
        size, kind = _number(content, start, 4), content[start + 4 : start + 8]
        body = start + 8
        if size == 1:
            size, body = _number(content, start + 8, 8), start + 16
        elif size == 0:
            size = stop - start
        if size < body - start:
            return
        yield _Box(kind, body, min(start + size, stop))
        start += size


def _grids(content: bytes, boxes: Iterable[_Box]) -> list[tuple[int, bytes]]:
    """Return number and kind of the items that are put together from others."""
    found = []
    for box in boxes:
        version = content[box.start] if box.start < len(content) else 0
        if box.kind == b"infe" and version >= 2:
            wide = 2 if version == 2 else 4
            at = box.start + _FULL
            kind = content[at + wide + 2 : at + wide + 6]
            if kind in _PUT_TOGETHER:
                found.append((_number(content, at, wide), kind))
    return found


def _locations(content: bytes, box: _Box, limits: Limits, name: str) -> dict[int, tuple[int, int]]:
    """Return each item's construction method and the place of its first extent."""
    version = content[box.start] if box.start < len(content) else 0
    at = box.start + _FULL
    sizes = _number(content, at, 2)
    offset, length, base, index = (sizes >> shift & 15 for shift in (12, 8, 4, 0))
    wide = 4 if version == 2 else 2
    count = _number(content, at + 2, wide)
    at += 2 + wide
    limits.check_count(name, count, 2 * limits.items, "places of items")
    found = {}
    extents = 0
    for _ in range(count):
        number = _number(content, at, wide)
        at += wide
        method = 0
        if version in (1, 2):
            method = _number(content, at, 2) & 15
            at += 2
        start = _number(content, at + 2, base)
        at += 2 + base
        pieces = _number(content, at, 2)
        at += 2
        extents += pieces
        limits.check_count(name, extents, limits.parts, "extents of items")
        found[number] = (method, start + _number(content, at + (index if version else 0), offset))
        at += pieces * (offset + length + (index if version else 0))
    return found


def _check_grid(content: bytes, place: int, kind: bytes, limits: Limits, name: str) -> None:
    """Check the size that a grid or overlay says it has, which need not be that of the image."""
    head = content[place : place + 20]
    at = _PUT_TOGETHER[kind]
    if len(head) < at + 4:
        return
    wide = 4 if head[1] & 1 else 2
    if kind == b"grid":
        limits.check_count(name, (head[2] + 1) * (head[3] + 1), limits.items, "tiles in a grid")
    limits.check_size(name, _number(head, at, wide), _number(head, at + wide, wide))


def _number(content: bytes, place: int, length: int) -> int:
    return int.from_bytes(content[place : place + length], "big")
