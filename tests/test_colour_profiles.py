"""Colour profiles: pixels become sRGB, as the standards' own matrices and curves say."""

from __future__ import annotations

import io
import struct
import zlib
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from PIL import Image, ImageCms
from retrieval.errors import DataError
from retrieval.images.decoding import decode
from retrieval.images.preprocessing import Preprocessing, from_array, thumbnail, to_mode, to_png

D65 = (0.3127, 0.3290)
D50 = (0.34567, 0.35850)
BRADFORD = np.array(
    [[0.8951, 0.2664, -0.1614], [-0.7502, 1.7135, 0.0367], [0.0389, -0.0685, 1.0296]]
)
# Chromaticities of red, green and blue, white point, and gamma (0: the curve of sRGB).
SPACES = {
    "sRGB": ([(0.64, 0.33), (0.30, 0.60), (0.15, 0.06)], D65, 0),
    "Adobe RGB": ([(0.64, 0.33), (0.21, 0.71), (0.15, 0.06)], D65, 563 / 256),
    "Display P3": ([(0.680, 0.320), (0.265, 0.690), (0.150, 0.060)], D65, 0),
    "ProPhoto RGB": ([(0.7347, 0.2653), (0.1596, 0.8404), (0.0366, 0.0001)], D50, 1.8),
    "gamma 2.2": ([(0.64, 0.33), (0.30, 0.60), (0.15, 0.06)], D65, 2.2),
}
PIXELS = np.random.default_rng(0).integers(0, 256, (16, 16, 3), np.uint8)


def xyz(point):
    x, y = point
    return np.array([x / y, 1, (1 - x - y) / y])


def to_xyz(space):
    """The matrix from linear RGB to XYZ, relative to the space's own white."""
    primaries, white, _ = SPACES[space]
    columns = np.stack([xyz(point) for point in primaries], axis=1)
    return columns * np.linalg.solve(columns, xyz(white))


def adapted(before, after):
    """Bradford's matrix from one white point to another."""
    gain = (BRADFORD @ xyz(after)) / (BRADFORD @ xyz(before))
    return np.linalg.inv(BRADFORD) @ np.diag(gain) @ BRADFORD


def linear(values, gamma):
    if gamma:
        return values**gamma
    return np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)


def srgb_of_xyz(values, white):
    """8-bit sRGB of XYZ (…, 3), clipped."""
    light = values @ (np.linalg.inv(to_xyz("sRGB")) @ adapted(white, D65)).T
    light = np.clip(light, 0, 1)
    curved = np.where(light <= 0.0031308, 12.92 * light, 1.055 * light ** (1 / 2.4) - 0.055)
    return np.rint(255 * curved).astype(int)


def expected(pixels, space):
    _, white, gamma = SPACES[space]
    return srgb_of_xyz(linear(pixels / 255, gamma) @ to_xyz(space).T, white)


def profile(space_signature, tags, kind=b"mntr", pcs=b"XYZ "):
    """The bytes of an ICC profile, version 2."""
    table, body = b"", b""
    start = 132 + 12 * len(tags)
    for name, content in tags.items():
        content += bytes(-len(content) % 4)
        table += name + struct.pack(">II", start + len(body), len(content))
        body += content
    header = struct.pack(">I4sI4s4s4s", start + len(body), b"lcms", 0x02400000, kind,
                         space_signature, pcs)  # fmt: skip
    header += struct.pack(">6H4s", 2026, 1, 1, 0, 0, 0, b"acsp") + bytes(28)
    header += struct.pack(">3i", *np.rint(xyz_d50 * 65536).astype(int)) + bytes(48)
    return header + struct.pack(">I", len(tags)) + table + body


xyz_d50 = np.array([0.9642, 1.0, 0.8249])
TEXT = b"desc" + bytes(4) + struct.pack(">I", 5) + b"test\0" + bytes(78)


def numbers(values):
    return b"XYZ " + bytes(4) + struct.pack(">3i", *np.rint(values * 65536).astype(int))


def curve(gamma):
    if gamma:
        return b"curv" + bytes(4) + struct.pack(">IH", 1, round(gamma * 256)) + bytes(2)
    points = np.rint(65535 * linear(np.linspace(0, 1, 4096), 0)).astype(int)
    return b"curv" + bytes(4) + struct.pack(">I4096H", 4096, *points)


def rgb_profile(space):
    _, white, gamma = SPACES[space]
    columns = adapted(white, D50) @ to_xyz(space)
    tags = {b"desc": TEXT, b"wtpt": numbers(xyz_d50)}
    for number, name in enumerate((b"r", b"g", b"b")):
        tags[name + b"XYZ"] = numbers(columns[:, number])
        tags[name + b"TRC"] = curve(gamma)
    return profile(b"RGB ", tags)


def grey_profile(gamma):
    return profile(b"GRAY", {b"desc": TEXT, b"wtpt": numbers(xyz_d50), b"kTRC": curve(gamma)})


LAB_OF_INK = np.random.default_rng(1).uniform([20, -40, -40], [95, 40, 40], (16, 3))
LAB_OF_INK[0] = [100, 0, 0]  # paper
LAB_OF_INK[15] = 0


def cmyk_profile():
    """A printer whose 16 full and empty inks have the colours `LAB_OF_INK`."""
    table = b"mft2" + bytes(4) + bytes([4, 3, 2, 0])
    table += struct.pack(">9i", *(65536 * np.eye(3)).astype(int).ravel())
    table += struct.pack(">HH", 2, 2) + struct.pack(">8H", *[0, 65535] * 4)
    stored = (LAB_OF_INK * [65280 / 100, 256, 256] + [0, 32768, 32768]).round().astype(int)
    table += struct.pack(">48H", *stored.ravel()) + struct.pack(">6H", *[0, 65535] * 3)
    tags = {b"desc": TEXT, b"wtpt": numbers(xyz_d50), b"A2B0": table}
    return profile(b"CMYK", tags, b"prtr", b"Lab ")


def encoded(image, format="PNG", **options):
    out = io.BytesIO()
    image.save(out, format, **options)
    return out.getvalue()


def distance(image, values):
    return np.abs(np.asarray(image).astype(int) - values).max()


@pytest.mark.parametrize("space", SPACES)
@pytest.mark.parametrize(
    ("format", "options"),
    [("PNG", {}), ("TIFF", {}), ("WEBP", {"lossless": True}), ("JPEG", {"quality": 95})],
)
def test_pixels_become_srgb_in_every_format(space, format, options):
    content = encoded(Image.fromarray(PIXELS), format, icc_profile=rgb_profile(space), **options)
    file = np.asarray(Image.open(io.BytesIO(content)).convert("RGB"))
    image = decode(content)
    assert distance(image, expected(file, space)) <= 1
    assert distance(to_mode(image, "RGB"), expected(file, space)) <= 1
    if space != "sRGB":
        assert distance(image, file) > 6


def test_every_way_to_the_pixels_gives_the_same_ones():
    given = Image.fromarray(np.tile(PIXELS, (20, 20, 1)))
    given.info["icc_profile"] = rgb_profile("Display P3")
    image = decode(encoded(given))
    preprocessing = Preprocessing((320, 320))
    pixels = preprocessing(image)
    assert (
        distance(pixels.transpose(1, 2, 0), np.tile(expected(PIXELS, "Display P3"), (20, 20, 1)))
        <= 1
    )
    assert np.array_equal(preprocessing(given), pixels)
    assert "icc_profile" in given.info and np.array_equal(preprocessing(given), pixels)
    for content in (to_png(image), to_png(given)):
        assert np.array_equal(preprocessing(decode(content)), pixels)
    small = to_mode(image, "RGB").resize((256, 256), reducing_gap=2.0)
    shown = Image.open(io.BytesIO(thumbnail(given)))
    assert "icc_profile" not in shown.info
    assert np.abs(np.asarray(shown, float).mean((0, 1)) - np.asarray(small).mean((0, 1))).max() < 1


@pytest.mark.parametrize("gamma", [1.0, 1.8, 2.2])
def test_grey_profiles(gamma):
    ramp = np.tile(np.arange(256, dtype=np.uint8), (2, 1))
    light = (ramp / 255) ** gamma
    right = srgb_of_xyz(light[..., None] * xyz(D50), D50)[..., 0]
    profile = grey_profile(gamma)
    assert distance(decode(encoded(Image.fromarray(ramp), icc_profile=profile)), right) <= 1
    alpha = Image.merge("LA", [Image.fromarray(ramp), Image.new("L", (256, 2), 255)])
    assert distance(to_mode(decode(encoded(alpha, icc_profile=profile)), "L"), right) <= 1
    deep = Image.fromarray(ramp.astype(np.uint16) * 257)
    assert distance(to_mode(decode(encoded(deep, icc_profile=profile)), "L"), right) <= 1


def test_cmyk_profiles():
    inks = np.array([[255 * (n >> 3 & 1), 255 * (n >> 2 & 1), 255 * (n >> 1 & 1), 255 * (n & 1)]
                     for n in range(16)], np.uint8)  # fmt: skip
    image = Image.frombytes("CMYK", (16, 1), inks.tobytes())
    content = encoded(image, "TIFF", icc_profile=cmyk_profile())
    lightness = (LAB_OF_INK[:, 0] + 16) / 116
    roots = np.stack(
        [lightness + LAB_OF_INK[:, 1] / 500, lightness, lightness - LAB_OF_INK[:, 2] / 200], axis=1
    )
    cubes = np.where(roots > 6 / 29, roots**3, 3 * (6 / 29) ** 2 * (roots - 4 / 29))
    right = srgb_of_xyz(cubes * xyz_d50, D50)[None]
    assert distance(to_mode(decode(content), "RGB"), right) <= 2
    assert distance(Image.open(io.BytesIO(content)).convert("RGB"), right) > 50


def test_transparency_and_palettes():
    profile = rgb_profile("Adobe RGB")
    right = expected(PIXELS, "Adobe RGB")
    colours = Image.fromarray(PIXELS)
    clear = colours.copy()
    clear.putalpha(Image.fromarray(np.uint8([[0] * 16] + [[255] * 16] * 15)))
    image = to_mode(decode(encoded(clear, icc_profile=profile)), "RGB")
    assert distance(image, np.concatenate([np.full((1, 16, 3), 255), right[1:]])) <= 1
    key = tuple(map(int, PIXELS[3, 4]))
    keyed = to_mode(decode(encoded(colours, icc_profile=profile, transparency=key)), "RGB")
    right[3, 4] = 255
    assert distance(keyed, right) <= 1
    palette = colours.quantize(64)
    plain = np.asarray(palette.convert("RGB"))
    image = decode(encoded(palette, icc_profile=profile))
    assert distance(to_mode(image, "RGB"), expected(plain, "Adobe RGB")) <= 1


def test_an_upright_photo_has_its_profile_applied_once():
    exif = Image.Exif()
    exif[0x0112] = 6
    content = encoded(Image.fromarray(PIXELS[:8]), exif=exif, icc_profile=rgb_profile("Adobe RGB"))
    image = decode(content)
    right = np.rot90(expected(PIXELS[:8], "Adobe RGB"), -1)
    assert image.size == (8, 16) and distance(to_mode(image, "RGB"), right) <= 1


BAD = {
    "nonsense": b"w" * 3000,
    "an empty one": b"",
    "cut": rgb_profile("Adobe RGB")[:200],
    "only a header": rgb_profile("Adobe RGB")[:128],
    "of grey": grey_profile(1.0),
    "of CMYK": cmyk_profile(),
    "too large": rgb_profile("Adobe RGB") + bytes(5_000_000),
}


@pytest.mark.parametrize("what", BAD)
@pytest.mark.parametrize("format", ["JPEG", "TIFF"])
def test_a_profile_that_does_not_fit_is_ignored(what, format):
    image = Image.fromarray(PIXELS)
    content = encoded(image, format, icc_profile=BAD[what])
    assert np.array_equal(decode(content), decode(encoded(image, format)))


def test_every_flipped_byte_of_a_profile_gives_pixels():
    whole = rgb_profile("Display P3")
    generator = np.random.default_rng(0)
    for position in [*range(140), *generator.integers(140, len(whole), 100)]:
        content = bytearray(whole)
        content[position] ^= 1 << generator.integers(8)
        image = Image.fromarray(PIXELS)
        image.info["icc_profile"] = bytes(content)
        assert to_mode(image, "RGB").size == (16, 16)


def test_a_profile_of_srgb_changes_no_pixel_and_is_not_applied():
    own = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    for content in (own, rgb_profile("sRGB")):
        image = Image.fromarray(PIXELS)
        image.info["icc_profile"] = content
        assert to_mode(image, "RGB") is image


def test_threads_share_a_transform():
    content = encoded(
        Image.fromarray(np.tile(PIXELS, (30, 30, 1))), icc_profile=rgb_profile("ProPhoto RGB")
    )
    right = np.asarray(decode(content))
    with ThreadPoolExecutor(8) as pool:
        assert all(np.array_equal(image, right) for image in pool.map(decode, [content] * 40))


def chunk(kind, data):
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


LONG = zlib.compress(b"w" * 1_500_000)
MEBIBYTE = zlib.compress(b"w" * 1_000_000)
NOTES = {
    "a compressed text": [chunk(b"zTXt", b"workflow\0\0" + LONG)],
    "an international text": [chunk(b"iTXt", b"workflow\0\1\0\0\0" + LONG)],
    "a plain text": [chunk(b"tEXt", b"workflow\0" + b"w" * 1_500_000)],
    "a profile": [chunk(b"iCCP", b"name\0\0" + LONG)],
    "many texts": [chunk(b"zTXt", b"workflow\0\0" + MEBIBYTE)] * 70,
    "a text and a turn": [
        chunk(b"zTXt", b"workflow\0\0" + LONG),
        chunk(b"eXIf", b"MM\0*\0\0\0\x08\0\x01\x01\x12\0\x03\0\0\0\x01\0\x03\0\0\0\0\0\0"),
    ],
}


@pytest.mark.parametrize("where", ["before the pixels", "after the pixels"])
@pytest.mark.parametrize("notes", NOTES)
def test_a_png_with_long_notes_is_decoded(where, notes):
    plain = encoded(from_array(PIXELS))
    start = 33 if where == "before the pixels" else len(plain) - 12
    image = decode(plain[:start] + b"".join(NOTES[notes]) + plain[start:])
    turned = notes == "a text and a turn"
    assert np.array_equal(image, PIXELS[::-1, ::-1] if turned else PIXELS)


def test_a_damaged_png_with_notes_is_still_damaged():
    plain = bytearray(encoded(from_array(PIXELS)))
    plain[60] ^= 255
    for notes in ([], NOTES["a compressed text"]):
        with pytest.raises(DataError, match=r"^a\.png is damaged and cannot be decoded"):
            decode(bytes(plain[:33]) + b"".join(notes) + bytes(plain[33:]), name="a.png")
