"""Hostile TIFF, AVIF and HEIC files, and metadata in TIFF's form for other formats."""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Collection, Iterator

from PIL import Image


def saved(image: Image.Image, format: str, **options: object) -> bytes:
    """Return an image as a file of a format."""
    out = io.BytesIO()
    image.save(out, format, **options)
    return out.getvalue()


def metadata(entries: int, size: int) -> bytes:
    """Return a TIFF directory whose entries share the same bytes."""
    rows = b"".join(struct.pack("<HHII", 1000 + number, 7, size, 8) for number in range(entries))
    head = b"II*\0" + struct.pack("<I", 8 + size) + bytes(size)
    return head + struct.pack("<H", entries) + rows + bytes(4)


# TIFF

Tags = dict[int, tuple[int, int, int]]
"""Type, count, and value or offset of each tag."""


def _tiff(tags: Tags, tail: bytes = b"", following: int = 0) -> bytes:
    """Return a TIFF of one directory, with `tail` at offset 1024."""
    rows = b"".join(struct.pack("<HHII", tag, *tags[tag]) for tag in sorted(tags))
    head = b"II*\0" + struct.pack("<IH", 8, len(tags)) + rows + struct.pack("<I", following)
    return head.ljust(1024, b"\0") + tail


def _plain(width: int, height: int, **more: tuple[int, int, int]) -> Tags:
    tags = {256: width, 257: height, 258: 8, 259: 1, 262: 1, 277: 1}
    added = {int(tag[1:]): value for tag, value in more.items()}
    return {tag: (4, 1, value) for tag, value in tags.items()} | added


def tiffs(many_scans: bytes) -> Iterator[tuple[str, bytes]]:
    """Yield hostile TIFFs by name; one contains a JPEG of too many scans."""
    zeros = zlib.compress(bytes(1_000_000), 9)
    big = zlib.compress(bytes(100_000_000), 9)
    deflate = {"t259": (3, 1, 8)}

    for name, width, height, data in (
        ("one huge tile", 32_768, 32_768, big),
        ("one huge tile of a gigabyte", 65_536, 16_384, big * 10),
        ("a tile of 4 megapixels", 2048, 2048, big),
    ):
        tile = {"t322": (4, 1, width), "t323": (4, 1, height)}
        places = {"t324": (4, 1, 1024), "t325": (4, 1, len(data))}
        yield f"tiff: {name}", _tiff(_plain(16, 16, **tile, **deflate, **places), data)
    many = 90_000
    tables = struct.pack("<I", 1024 + 8 * many) * many + struct.pack("<I", len(zeros)) * many
    strips = {"t273": (4, many, 1024), "t279": (4, many, 1024 + 4 * many), "t278": (4, 1, 1)}
    shared = _tiff(_plain(100, many, **deflate, **strips), tables + zeros)
    yield "tiff: strips that share their bytes", shared
    slow = struct.pack("<I", 1024 + 8 * 20_000) * 20_000 + struct.pack("<I", 15_000_000) * 20_000
    strips = {"t273": (4, 20_000, 1024), "t279": (4, 20_000, 1024 + 80_000), "t278": (4, 1, 1)}
    empty = b"\x78\x9c" + b"\0\0\0\xff\xff" * 3_000_000
    yield "tiff: strips of nothing", _tiff(_plain(100, 20_000, **deflate, **strips), slow + empty)
    strips = {"t273": (4, 4_000_000, 1024), "t279": (4, 4_000_000, 1024), "t278": (4, 1, 1)}
    yield "tiff: 4 million strips", _tiff(_plain(100, 100, **strips), bytes(16_000_000))
    plain = _plain(8, 8, t273=(4, 1, 1024), t279=(4, 1, 64))
    yield "tiff: a directory that follows itself", _tiff(plain, bytes(64), 8)
    exif = {"t34665": (4, 1, 8), "t34853": (4, 1, 8), "t273": (4, 1, 1024), "t279": (4, 1, 64)}
    yield "tiff: metadata in a circle", _tiff(_plain(8, 8, **exif), bytes(64))
    yield "tiff: entries that share bytes", metadata(60_000, 10_000_000)
    yield "tiff: 4,000 entries that share bytes", metadata(4_000, 10_000_000)
    strip = {"t273": (4, 1, 1024), "t279": (4, 1, len(big))}
    for name, width, height, more in (
        ("25 megapixels", 5000, 5000, deflate),
        ("one line", 24_000_000, 1, deflate),
        ("2 ** 32 pixels wide", 2**32 - 1, 1, deflate),
        ("a thousand samples", 2000, 2000, {"t277": (4, 1, 1000)}),
    ):
        yield f"tiff: {name}", _tiff(_plain(width, height, **strip, **more), big)
    strip = {"t273": (4, 1, 1024), "t279": (4, 1, len(many_scans)), "t278": (4, 1, 1000)}
    jpeg = _plain(1000, 1000, t259=(3, 1, 7), **strip)
    yield "tiff: a JPEG of 5,000 scans", _tiff(jpeg, many_scans)
    entries = b"II+\0\x08\0\0\0" + struct.pack("<QQ", 16, 2**64 - 1)
    yield "tiff: BigTIFF with 2 ** 64 entries", entries + bytes(4000)


# AVIF and HEIC


def _box(kind: bytes, *content: bytes) -> bytes:
    body = b"".join(content)
    return struct.pack(">I", len(body) + 8) + kind + body


def _boxed(
    brand: bytes,
    item: bytes,
    size: tuple[int, int],
    grid: bytes = b"",
    more: bytes = b"",
    tiles: int = 1,
) -> bytes:
    """Return a file with one item of type `item` and this size; `grid` is its content."""
    info = _box(b"infe", b"\2\0\0\0", struct.pack(">HH", 1, 0), item, b"\0")
    count = struct.pack(">H", tiles)
    properties = _box(
        b"iprp",
        _box(b"ipco", _box(b"ispe", bytes(4), struct.pack(">II", *size))),
        _box(b"ipma", bytes(4), struct.pack(">IHBB", 1, 1, 1, 1)),
    )
    place = b"\1\0\0\0\x44\0" + struct.pack(">HHHHHII", 1, 1, 1, 0, 1, 0, len(grid))
    meta = _box(
        b"meta",
        bytes(4),
        _box(b"hdlr", bytes(8), b"pict", bytes(13)),
        _box(b"pitm", bytes(4), b"\0\1"),
        _box(b"iinf", bytes(4), count, info),
        properties,
        _box(b"iloc", place),
        _box(b"idat", grid),
        more,
    )
    return _box(b"ftyp", brand, bytes(4), b"mif1", brand) + meta


def boxes(writable: Collection[str]) -> Iterator[tuple[str, bytes]]:
    """Yield hostile AVIF and HEIC files by name; large ones only of the `writable` formats."""
    grid, overlay = b"\0\1\0\0", b"\0\1" + bytes(8)
    large, huge = struct.pack(">II", 30_000, 30_000), struct.pack(">II", 60_000, 60_000)
    nested = b""
    while len(nested) < 200_000:
        nested = _box(b"meta", bytes(4), nested)
    shared = _box(b"free", metadata(4_000, 9_000_000))
    for name, brand, kind in (("avif", b"avif", b"av01"), ("heic", b"heic", b"hvc1")):
        start, small = _box(b"ftyp", brand, bytes(4), b"mif1", brand), (64, 64)
        for case, content in {
            "a size of 2 ** 31": _boxed(brand, kind, (2**31, 2**31)),
            "a grid of 65,536 tiles": _boxed(
                brand, b"grid", (60_000, 60_000), b"\0\1\xff\xff" + huge
            ),
            "a grid larger than its image": _boxed(brand, b"grid", small, grid + large),
            "an overlay larger than its image": _boxed(brand, b"iovl", small, overlay + large),
            "65,535 items": _boxed(brand, kind, small, tiles=65_535),
            "2 million boxes": _boxed(brand, kind, small, more=_box(b"free") * 2_000_000),
            "boxes in boxes": start + nested,
            "EXIF that shares bytes": _boxed(brand, kind, small, more=shared),
            "a box of size 0": start + b"\0\0\0\0meta" + bytes(1000),
        }.items():
            yield f"{name}: {case}", content
    if "avif" in writable:
        yield "avif: 25 megapixels", saved(Image.new("RGB", (5000, 5000)), "AVIF", speed=10)
    if "heic" in writable:
        tiles = saved(Image.new("RGB", (3000, 3000)), "HEIF", grid_tile_size=512)
        yield "heic: 9 megapixels in tiles", tiles
        yield "heic: small tiles", saved(Image.new("RGB", (1024, 960)), "HEIF", grid_tile_size=64)
