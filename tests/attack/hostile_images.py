"""Hostile images of each format: small to send, and expensive to decode.

`worst` yields constructed images, and `damaged` yields sound images with cut or flipped bytes. No
image is larger than 20 MB.
"""

from __future__ import annotations

import functools
import random
import struct
import sys
import zlib
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

from PIL import Image, features

sys.path.insert(0, str(Path(__file__).parent))
from hostile_containers import boxes, metadata, saved, tiffs

MOST = 20_000_000


def worst(seed: int = 0) -> Iterator[tuple[str, bytes]]:
    """Yield constructed images of every format by name, such as "jpeg: scans"."""
    noise = random.Random(seed)
    rasters = (save(noise) for save in (_jpegs, _pngs, _gifs, _bmps, _ppms, _webps))
    for name, content in chain(*rasters, tiffs(_with_scans((1000, 1000), 5_000)), boxes(sound())):
        assert len(content) <= MOST, name
        yield name, content


def damaged(seed: int = 0, count: int = 4) -> Iterator[tuple[str, bytes]]:
    """Yield sound images of every format by name, cut off or with flipped bits."""
    noise = random.Random(seed)
    for name, content in sound().items():
        for number in range(count):
            yield f"{name}: cut {number}", content[: noise.randrange(1, len(content))]
            flipped = bytearray(content)
            for _ in range(noise.choice((1, 3, 30))):
                flipped[noise.randrange(len(flipped))] ^= 1 << noise.randrange(8)
            yield f"{name}: flipped {number}", bytes(flipped)


@functools.cache
def sound() -> dict[str, bytes]:
    """Return sound images of each format and variant that this machine can write, by name."""
    photo = Image.effect_noise((320, 240), 60).convert("RGB")
    exif = Image.Exif()
    exif[0x0112], exif[0x010F] = 6, "A camera"
    turned, palette = [photo.rotate(9), photo.rotate(20)], photo.quantize(64)
    quarter = palette.rotate(90)
    images = {
        "jpeg": saved(photo, "JPEG", exif=exif, icc_profile=bytes(200_000), comment="a photograph"),
        "jpeg progressive": saved(photo, "JPEG", progressive=True),
        "jpeg cmyk": saved(photo.convert("CMYK"), "JPEG", progressive=True),
        "png": saved(photo, "PNG", exif=exif, icc_profile=bytes(200_000)),
        "png interlaced": _interlaced(photo.crop((0, 0, 60, 40))),
        "png animated": saved(photo, "PNG", save_all=True, append_images=turned),
        "png palette": saved(palette, "PNG"),
        "gif": saved(palette, "GIF", comment=b"drawn by hand"),
        "gif animated": saved(palette, "GIF", save_all=True, append_images=[quarter] * 30),
        "bmp": saved(photo, "BMP"),
        "bmp run lengths": _run_lengths(64, 64, b"\x40\x05\x00\x00" * 64 + b"\0\1"),
        "ppm": saved(photo, "PPM"),
        "pgm": saved(photo.convert("L"), "PPM"),
        "ppm decimal": b"P3\n# made by hand\n4 2\n255\n" + b"12 200 7\n" * 8,
        "webp": saved(photo, "WEBP", exif=exif, icc_profile=bytes(9000)),
        "webp lossless": saved(photo, "WEBP", lossless=True),
        "webp animated": saved(photo, "WEBP", save_all=True, append_images=turned),
        "tiff": saved(photo, "TIFF", exif=exif),
        **{
            f"tiff {how}": saved(photo, "TIFF", compression=how)
            for how in ("tiff_lzw", "jpeg", "tiff_adobe_deflate")
        },
        "tiff tiles": saved(photo, "TIFF", compression="tiff_deflate", tiffinfo={322: 64, 323: 64}),
        "tiff fax": saved(photo.convert("1"), "TIFF", compression="group4"),
    }
    if features.check("avif"):
        images["avif"] = saved(photo, "AVIF", exif=exif)
        images["avif animated"] = saved(photo, "AVIF", save_all=True, append_images=turned)
    try:
        from pillow_heif import register_heif_opener
    except ImportError:
        return images
    register_heif_opener()
    images["heic"] = saved(photo, "HEIF", exif=exif)
    images["heic grid"] = saved(photo, "HEIF", grid_tile_size=128)
    return images


# JPEG


def _segment(kind: int, content: bytes) -> bytes:
    return bytes((0xFF, kind)) + struct.pack(">H", len(content) + 2) + content


def _with_scans(size: tuple[int, int], scans: int, arithmetic: bool = False) -> bytes:
    """Return a progressive JPEG that repeats the header of its last scan, without any data."""
    whole = bytearray(saved(Image.new("L", size, 90), "JPEG", progressive=True, quality=50))
    if arithmetic:
        whole[whole.index(b"\xff\xc2") + 1] = 0xCA
    last = whole.rindex(b"\xff\xda")
    header = bytes(whole[last : last + 2 + int.from_bytes(whole[last + 2 : last + 4], "big")])
    return bytes(whole[:-2]) + header * scans + b"\xff\xd9"


def _jpegs(noise: random.Random) -> Iterator[tuple[str, bytes]]:
    plain = saved(Image.effect_noise((64, 64), 50), "JPEG")
    start, rest = plain[:20], plain[20:]  # after JFIF's own segment
    yield "jpeg: 1,000 scans in 10 KB", _with_scans((2000, 2000), 1_000)
    yield "jpeg: 20,000 scans in 200 KB", _with_scans((1000, 1000), 20_000)
    yield "jpeg: 25 megapixels, 40 scans", _with_scans((5000, 5000), 40)
    yield "jpeg: arithmetic coding, 60 scans", _with_scans((4000, 4000), 60, arithmetic=True)
    yield "jpeg: 25 megapixels", saved(Image.new("CMYK", (5000, 5000)), "JPEG", progressive=True)
    yield "jpeg: 65,500 × 380", saved(Image.new("L", (65_500, 380)), "JPEG")
    comment = _segment(0xFE, bytes(65_533))
    yield "jpeg: 20 MB of comments", start + comment * 300 + rest
    yield "jpeg: 4 million comments", start + _segment(0xFE, b"") * 4_000_000 + rest
    yield "jpeg: comments between scans", plain[:-2] + _segment(0xFE, b"") * 4_000_000 + b"\xff\xd9"
    yield "jpeg: 20 MB of fill bytes", start + b"\xff" * 19_000_000 + rest
    yield "jpeg: 20 MB of junk", start + noise.randbytes(1000).replace(b"\xff", b"") * 19_000 + rest
    yield "jpeg: 20 MB of EXIF", start + _segment(0xE1, b"Exif\0\0" + bytes(65_000)) * 300 + rest
    exif = _segment(0xE1, b"Exif\0\0" + metadata(1000, 50_000))
    yield "jpeg: EXIF that shares bytes", start + exif + rest
    profile = _segment(0xE2, b"ICC_PROFILE\0\1\xff" + bytes(65_000))
    yield "jpeg: 20 MB of colour profile", start + profile * 300 + rest
    photoshop = _segment(0xED, b"Photoshop 3.0\0" + b"8BIM\0\1\0\0\0\0\0\0" * 5_000)
    yield "jpeg: a million Photoshop blocks", start + photoshop * 300 + rest
    mpf = b"MPF\0" + metadata(500, 1000).replace(b"\xe8\x03\x07\0", b"\x01\xb0\x04\0")
    yield "jpeg: many pictures in one", start + _segment(0xE2, mpf) + rest
    table = plain[plain.index(b"\xff\xc4") : plain.index(b"\xff\xda")]
    yield "jpeg: 20 MB of tables", start + table * (19_000_000 // len(table)) + rest
    yield "jpeg: 20 MB after its end", plain + noise.randbytes(1_000) * 19_000


# PNG


def _chunk(kind: bytes, content: bytes) -> bytes:
    whole = kind + content
    return struct.pack(">I", len(content)) + whole + struct.pack(">I", zlib.crc32(whole))


def _png(width: int, height: int, *chunks: bytes, depth: int = 8, colour: int = 0) -> bytes:
    samples = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}[colour]
    pixels = zlib.compressobj(9)
    row = bytes((width * samples * depth + 7) // 8 + 1)
    body = b"".join(pixels.compress(row) for _ in range(height)) + pixels.flush()
    header = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)
    return _png_of(header, b"".join(chunks) + _chunk(b"IDAT", body))


def _png_of(header: bytes, chunks: bytes) -> bytes:
    return b"\x89PNG\r\n\x1a\n" + _chunk(b"IHDR", header) + chunks + _chunk(b"IEND", b"")


def _interlaced(image: Image.Image) -> bytes:
    """Return a PNG interlaced by Adam7, which Pillow reads but cannot write."""
    rows = []
    for left, top, across, down in (
        *((0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4)),
        *((0, 2, 2, 4), (1, 0, 2, 2), (0, 1, 1, 2)),
    ):
        for y in range(top, image.height, down):
            row = [image.getpixel((x, y)) for x in range(left, image.width, across)]
            rows.append(b"\0" + b"".join(map(bytes, row)) if row else b"")
    header = struct.pack(">IIBBBBB", *image.size, 8, 2, 0, 0, 1)
    return _png_of(header, _chunk(b"IDAT", zlib.compress(b"".join(rows))))


def _pngs(noise: random.Random) -> Iterator[tuple[str, bytes]]:
    bomb = zlib.compress(bytes(100_000_000), 9)
    megabyte = zlib.compress(bytes(1_000_000), 9)
    yield "png: 169 megapixels", _png(13_000, 13_000, depth=1)
    yield "png: 25 megapixels of one bit", _png(5000, 5000, depth=1)
    yield "png: 25 megapixels, transparent", _png(5000, 5000, colour=6)
    yield "png: 25 megapixels of sixteen bits", _png(5000, 5000, depth=16)
    yield "png: one line", _png(24_000_000, 1, depth=1)
    yield "png: 1.6 million chunks", _png(8, 8, _chunk(b"prVt", b"") * 1_600_000)
    whole = _png(8, 8)
    empty = _chunk(b"IDAT", b"") * 1_600_000
    yield "png: 1.6 million chunks of pixels", whole[:33] + empty + whole[33:]
    texts = _chunk(b"tEXt", b"a\0b") * 1_200_000
    yield "png: chunks after the pixels", whole[:-12] + texts + whole[-12:]
    yield "png: text that grows", _png(8, 8, _chunk(b"iTXt", b"a\0\1\0\0\0" + bomb))
    yield "png: many texts that grow", _png(8, 8, _chunk(b"zTXt", b"a\0\0" + megabyte) * 10_000)
    yield "png: a colour profile that grows", _png(8, 8, _chunk(b"iCCP", b"a\0\0" + bomb))
    yield "png: EXIF that shares bytes", _png(8, 8, _chunk(b"eXIf", metadata(4_000, 10_000_000)))
    profile = b"Raw profile type exif\0\nexif\n9\n" + b"0a" * 9_000_000
    yield "png: a profile in text", _png(8, 8, _chunk(b"tEXt", profile))
    frames = _chunk(b"acTL", struct.pack(">II", 0x7FFFFFFF, 0))
    yield "png: two billion frames", _png(8, 8, frames)
    yield "png: pixels that go on", whole[:33] + _chunk(b"IDAT", bomb) + whole[-12:]


# GIF


def _gif(width: int, height: int, blocks: bytes = b"", frame: tuple[int, ...] = ()) -> bytes:
    head = b"GIF89a" + struct.pack("<HHBBB", width, height, 0xF0, 0, 0) + bytes(6)
    picture = b"," + struct.pack("<HHHHB", *(frame or (0, 0, width, height)), 0)
    return head + blocks + picture + b"\2\2\x4c\1\0;"


def _gifs(noise: random.Random) -> Iterator[tuple[str, bytes]]:
    frame = b"!\xf9\4\0\0\0\0\0,\0\0\0\0\1\0\1\0\0\2\2\x4c\1\0"
    yield "gif: a huge canvas", _gif(65_535, 65_535)
    yield "gif: 25 megapixels in 60 bytes", _gif(5000, 5000)
    yield "gif: a frame beyond its canvas", _gif(1, 1, frame=(65_535, 65_535, 65_535, 65_535))
    yield "gif: 800,000 frames", _gif(1, 1, frame * 800_000)
    yield "gif: 20 MB of comment", _gif(1, 1, b"!\xfe" + (b"\xff" + bytes(255)) * 75_000 + b"\0")
    yield "gif: a comment of single bytes", _gif(1, 1, b"!\xfe" + b"\1a" * 9_000_000 + b"\0")
    yield "gif: 6 million extensions", _gif(1, 1, b"!\1\0" * 6_000_000)
    yield "gif: no block at all", _gif(1, 1, b"\1" * 19_000_000)
    codes = (b"\xff" + noise.randbytes(255)) * 75_000
    yield "gif: codes that go on", _gif(100, 100)[:-2] + codes + b"\0;"


# BMP


def _run_lengths(width: int, height: int, codes: bytes, bits: int = 8) -> bytes:
    count, kind = 1 << bits, {8: 1, 4: 2}[bits]
    colours = b"".join(bytes((n, 255 - n, n, 0)) for n in range(count))
    sizes = (40, width, height, 1, bits, kind, len(codes))
    header = struct.pack("<IiiHHIIiiII", *sizes, 0, 0, count, 0)
    return b"BM" + struct.pack("<IHHI", 0, 0, 0, 54 + len(colours)) + header + colours + codes


def _bmps(noise: random.Random) -> Iterator[tuple[str, bytes]]:
    yield "bmp: run lengths of one line", _run_lengths(25_000_000, 1, b"\1\1\0\0\0\1")
    for size, width, height in (("25", 5000, 5000), ("6", 3000, 2000)):  # refused, and decoded
        name = f"bmp: run lengths of {size} megapixels"
        codes = b"\xff\x12" * (width * height // 252)
        yield name, _run_lengths(width, height, b"\1\1\0\0" * height)
        yield f"{name} in four bits", _run_lengths(width, height, codes, bits=4)
    yield "bmp: run lengths that write nothing", _run_lengths(100, 100, b"\0\2\0\0" * 4_900_000)
    yield "bmp: run lengths beyond their line", _run_lengths(2400, 2400, b"\xff\1" * 6_000_000)
    for name, width, height, bits in (
        ("wide", 2**31 - 1, 1, 24),
        ("negative", -5000, -5000, 32),
        ("large", 20_000, 20_000, 1),
    ):
        header = struct.pack("<IiiHHIIiiII", 40, width, height, 1, bits, 0, 0, 0, 0, 0, 0)
        yield f"bmp: {name}", b"BM" + struct.pack("<IHHI", 0, 0, 0, 54) + header + bytes(1000)
    header = struct.pack("<IiiHHIIiiII", 2**32 - 1, 9, 9, 1, 8, 0, 0, 0, 0, 2**31, 0)
    yield "bmp: a header of 4 GB", b"BM" + struct.pack("<IHHI", 0, 0, 0, 54) + header


# PPM


def _ppms(noise: random.Random) -> Iterator[tuple[str, bytes]]:
    yield "ppm: a header that never ends", b"P6\n#" + b"x" * 19_000_000
    yield "ppm: a header of comments", b"P6\n" + b"#\n" * 9_000_000 + b"2 2 255\n" + bytes(12)
    yield "ppm: a header of spaces", b"P6\n" + b" " * 19_000_000
    yield "ppm: numbers of a million digits", b"P6 " + b"9" * 1_000_000 + b" 1 255\n"
    yield "ppm: 12 megapixels of 100 levels", b"P6 2000 2000 100\n" + bytes(12_000_000)
    yield "ppm: 25 megapixels in ten bytes", b"P5 5000 5000 255\n"
    yield "ppm: 2 megapixels of 100 levels", b"P6 1400 1400 100\n" + bytes(5_880_000)
    yield "ppm: decimal numbers", b"P3 2000 1600 255\n" + b"1 " * 9_600_000
    yield "ppm: 6 million decimal numbers", b"P3 1400 1400 255\n" + b"1 " * 5_880_000
    yield "ppm: comments among the numbers", b"P2 2000 2000 255\n" + b"#\n" * 8_000_000
    yield "ppm: bits", b"P1 5000 4900\n" + b"1" * 19_000_000
    yield "ppm: spaces among the numbers", b"P2 10 10 255\n" + b" " * 19_000_000
    yield "ppm: floats", b"Pf 5000 5000 -1.0\n" + bytes(1000)


# WebP


def _riff(*chunks: tuple[bytes, bytes]) -> bytes:
    body = b"".join(kind + struct.pack("<I", len(c)) + c + bytes(len(c) & 1) for kind, c in chunks)
    return b"RIFF" + struct.pack("<I", len(body) + 4) + b"WEBP" + body


def _vp8x(width: int, height: int, flags: int = 0) -> tuple[bytes, bytes]:
    sizes = b"".join((side - 1).to_bytes(3, "little") for side in (width, height))
    return b"VP8X", bytes((flags, 0, 0, 0)) + sizes


def _webps(noise: random.Random) -> Iterator[tuple[str, bytes]]:
    small = saved(Image.new("RGB", (8, 8)), "WEBP", lossless=True)
    picture = (b"VP8L", small[20 : 20 + int.from_bytes(small[16:20], "little")])
    header = b"\x2f" + struct.pack("<I", 16_382 | 1_524 << 14)
    yield "webp: 25 megapixels in 34 bytes", _riff((b"VP8L", header + b"\x88\x88\x08\0\0\0\0\0"))
    plain = Image.new("RGBA", (5000, 5000), (1, 2, 3, 4))
    yield "webp: 25 megapixels, lossless", saved(plain, "WEBP", lossless=True)
    yield "webp: 25 megapixels", saved(Image.new("RGB", (5000, 5000)), "WEBP", method=0)
    yield "webp: a canvas of 2 ** 24", _riff(_vp8x(1 << 24, 1 << 24), picture)
    yield "webp: a canvas larger than its picture", _riff(_vp8x(5000, 5000), picture)
    yield "webp: 2 million chunks", _riff(_vp8x(8, 8, 0x2C), picture, *[(b"JUNK", b"")] * 2_000_000)
    size = struct.pack("<I", len(picture[1]))
    frame = bytes(6) + b"\x07\0\0\x07\0\0\x01\0\0\0VP8L" + size + picture[1]
    frames = [(b"ANMF", frame + bytes(len(frame) & 1))] * 200_000
    yield "webp: many frames", _riff(_vp8x(8, 8, 2), (b"ANIM", bytes(6)), *frames)
    exif = (b"EXIF", metadata(4_000, 9_000_000))
    yield "webp: EXIF that shares bytes", _riff(_vp8x(8, 8, 8), picture, exif)
    yield "webp: sizes beyond the file", b"RIFF\xff\xff\xff\xffWEBPVP8L\xff\xff\xff\xff" + header
