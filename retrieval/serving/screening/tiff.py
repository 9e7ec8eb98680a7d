"""TIFF, and EXIF metadata, which is TIFF without pixels: directories, strips and tiles."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from retrieval.errors import DataError
from retrieval.serving.screening.limits import Limits

STARTS = (b"II\x2a\0", b"MM\0\x2a", b"MM\x2a\0", b"II\0\x2a", b"MM\0\x2b", b"II\x2b\0")
_ENTRIES = 4096  # of a directory: those of cameras and microscopes have some hundred
_SIZES = {
    1: 1,
    2: 1,
    3: 2,
    4: 4,
    5: 8,
    6: 1,
    7: 1,
    8: 2,
    9: 4,
    10: 8,
    11: 4,
    12: 8,
    13: 4,
    16: 8,
    17: 8,
    18: 8,
}
_NUMBERS = {1: "u1", 3: "u2", 4: "u4", 13: "u4", 16: "u8"}
_BELOW = (34665, 34853, 40965)  # directories that Pillow follows: EXIF, GPS, interoperability
_REPEATED = 4  # times its own bytes that metadata may be read, where entries share them
_LARGE_TILE = 1 << 22  # pixels that a tile may have in any image
_WIDTH, _HEIGHT, _BITS, _COMPRESSION, _SAMPLES = 256, 257, 258, 259, 277
_STRIPS, _STRIP_BYTES, _TILE_WIDTH, _TILE_HEIGHT, _TILES, _TILE_BYTES = 273, 279, 322, 323, 324, 325
_JPEG = (6, 7)
_MOST_SAMPLES = 64


@dataclass(frozen=True)
class _Entry:
    kind: int
    count: int
    place: int

    def numbers(self, content: bytes, order: Literal["little", "big"], most: int) -> NDArray[Any]:
        """Return the first `most` whole numbers of the entry, as many as the file has."""
        form = _NUMBERS.get(self.kind)
        if form is None:
            return np.empty(0, dtype=np.uint64)
        size = int(form[1])
        there = max(0, min(self.count, most, (len(content) - self.place) // size))
        if not there:
            return np.empty(0, dtype=np.uint64)
        return np.frombuffer(content, ("<" if order == "little" else ">") + form, there, self.place)


@dataclass(frozen=True)
class _Tags:
    """One directory, with as much of it as can be read."""

    content: bytes
    order: Literal["little", "big"]
    entries: dict[int, _Entry]

    def first(self, tag: int, otherwise: int) -> int:
        found = self.all(tag, 1)
        return int(found[0]) if len(found) else otherwise

    def all(self, tag: int, most: int) -> NDArray[Any]:
        entry = self.entries.get(tag)
        return entry.numbers(self.content, self.order, most) if entry else np.empty(0, dtype=np.uint64)


def check(content: bytes, limits: Limits, name: str) -> None:
    """Refuse an image, a tile or a directory that is too large, too many tiles, and tiles that share their bytes."""
    tags = _directories(content, limits, name)
    if tags is None:
        return
    width, height = tags.first(_WIDTH, 0), tags.first(_HEIGHT, 0)
    limits.check_size(name, width, height)
    samples = tags.first(_SAMPLES, 1)
    bits = tags.all(_BITS, _MOST_SAMPLES)
    depth = int(bits.max()) if len(bits) else 1
    limits.check_count(name, samples, _MOST_SAMPLES, "samples a pixel")
    limits.check_count(name, depth, 64, "bits a sample")
    tile = tags.first(_TILE_WIDTH, 0) * tags.first(_TILE_HEIGHT, 0)
    if tile > max(_LARGE_TILE, 4 * width * height):
        raise DataError(f"{name} has tiles of {tile:,} pixels, far more than the image. Save it anew.")
    if max(width * height, tile) * samples * max(depth, 8) // 8 > limits.memory // 2:
        raise DataError(f"{name} takes too much memory: {samples} samples of {depth} bits a pixel.")
    pieces = max(tags.entries[tag].count if tag in tags.entries else 0 for tag in (_STRIPS, _TILES))
    limits.check_count(name, pieces, limits.tiles, "strips or tiles")
    for tag in (_STRIP_BYTES, _TILE_BYTES):
        used = int(tags.all(tag, limits.tiles).sum(dtype=np.float64))
        if used > 2 * len(content) + 65_536 * 8:
            raise DataError(
                f"{name} has strips or tiles that lie beyond the file or share its bytes. Save it anew."
            )
    if tags.first(_COMPRESSION, 1) in _JPEG:
        scans = content.count(b"\xff\xda")
        limits.check_count(name, scans, limits.scans + 4 * pieces, "scans")


def check_metadata(exif: bytes, limits: Limits, name: str) -> None:
    """Refuse EXIF metadata whose entries would be read again and again."""
    _directories(exif, limits, name)


def _directories(content: bytes, limits: Limits, name: str) -> _Tags | None:
    """Return the first directory, and check the size of all that Pillow reads; None for what is not a TIFF."""
    if not content.startswith(STARTS):
        return None
    order: Literal["little", "big"] = "little" if content[:2] == b"II" else "big"
    large = 0x2B in content[2:4]
    waiting = [int.from_bytes(content[8:16] if large else content[4:8], order)]
    seen: set[int] = set()
    first = None
    read = 0
    while waiting:
        place = waiting.pop()
        if place in seen or place >= len(content):
            continue
        seen.add(place)
        tags = _Tags(content, order, _entries(content, place, order, large, limits, name))
        first = first or tags
        read += sum(
            min(entry.count * _SIZES.get(entry.kind, 0), max(0, len(content) - entry.place))
            for entry in tags.entries.values()
        )
        if read > _REPEATED * len(content) + 65_536:
            raise DataError(f"{name} has metadata that lies in the same place many times over. Save it anew.")
        waiting += [tags.first(tag, len(content)) for tag in _BELOW if tag in tags.entries]
    return first


def _entries(
    content: bytes, place: int, order: Literal["little", "big"], large: bool, limits: Limits, name: str
) -> dict[int, _Entry]:
    """Return a directory's entries by tag; the first of two with one tag, as Pillow takes it."""

    def number(at: int, length: int) -> int:
        return int.from_bytes(content[at : at + length], order)

    wide = 8 if large else 4
    step = 20 if large else 12
    count = number(place, 8 if large else 2)
    place += 8 if large else 2
    there = min(count, max(0, len(content) - place) // step)
    limits.check_count(name, there, _ENTRIES, "entries in a directory")
    entries: dict[int, _Entry] = {}
    for at in range(place, place + there * step, step):
        kind, values = number(at + 2, 2), number(at + 4, wide)
        inside = values * _SIZES.get(kind, 0) <= wide
        data = at + 4 + wide
        entries.setdefault(number(at, 2), _Entry(kind, values, data if inside else number(data, wide)))
    return entries
