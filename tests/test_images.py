"""Decoding and preprocessing of images: limits, damage, bit depths, transparency, resizing."""

from __future__ import annotations

import base64
import io
import os
import struct
import warnings
import zlib
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from retrieval.errors import DataError
from retrieval.images.decoding import Limits, decode
from retrieval.images.image_files import find_images
from retrieval.images.preprocessing import (
    Preprocessing,
    from_array,
    from_pixels,
    thumbnail,
    to_mode,
    to_png,
)

from retrieval_server.client.bodies import image_bytes

MODES = ["1", "L", "P", "LA", "PA", "RGB", "RGBA", "RGBX", "La", "RGBa", "CMYK", "YCbCr", "HSV"]
MODES += ["LAB", "I;16", "I;16B"]


def encoded(image: Image.Image, format: str = "PNG", **options: object) -> bytes:
    out = io.BytesIO()
    image.save(out, format, **options)
    return out.getvalue()


def gradient(height: int = 20, width: int = 30) -> np.ndarray:
    rows, columns = np.mgrid[:height, :width]
    return np.stack([rows * 8, columns * 8, rows + columns], axis=2).astype(np.uint8)


def chunk(kind: bytes, data: bytes) -> bytes:
    """A chunk of a PNG."""
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


DECODE = """
import resource, sys
from retrieval.images.decoding import decode
from retrieval.errors import DataError
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    decode(sys.argv[1])
except DataError as error:
    print(error)
assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 30_000, "memory was used"
"""


@pytest.mark.parametrize("side", [5_008, 20_000])  # just beyond the limit, and far beyond
def test_a_decompression_bomb_is_refused_before_it_is_decoded(side, tmp_path, process):
    path = tmp_path / "bomb.png"
    path.write_bytes(png(1, 0, np.zeros((side, side // 8), np.uint8)))
    done = process("-W", "error", "-c", DECODE, path)
    assert done.code == 0, done.err
    assert "bomb.png" in done.out and "25,000,000" in done.out


def test_a_file_beyond_the_limit_is_not_read(tmp_path):
    path = tmp_path / "large.png"
    with path.open("wb") as file:
        file.truncate(50_000_000_000)  # sparse, and too large to read
    says = r"large\.png has 50,000,000,000 bytes; the limit is 20,000,000"
    with pytest.raises(DataError, match=says):
        decode(path)
    with pytest.raises(DataError, match="the limit is 20,000,000"):
        decode(bytes(Limits.bytes + 1))
    with pytest.raises(DataError, match="the limit is 10"):
        decode(encoded(Image.new("L", (3, 3))), Limits(bytes=10))


def jpeg() -> bytes:
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    return encoded(Image.fromarray(noise), "JPEG")


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("truncated.jpg", jpeg()[:1500], "is damaged and cannot be decoded"),
        ("empty.png", b"", "is empty"),
        ("text.png", b"not an image at all, but text\n" * 20, "is not an image in a known format"),
        ("cut.png", encoded(Image.fromarray(gradient()))[:70], "is damaged and cannot be"),
        ("header.png", encoded(Image.fromarray(gradient()))[:20], "damaged|known format"),
        ("page.eps", b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n", "known format"),
    ],
    ids=["jpeg", "empty", "text", "cut", "header", "eps"],
)
def test_a_bad_image_is_one_sentence_that_names_it(name, content, says, tmp_path):
    path = tmp_path / name
    path.write_bytes(content)
    for source, shown in ((path, str(path)), (str(path), str(path)), (content, "the file")):
        with pytest.raises(DataError, match=says) as caught:
            decode(source)
        assert shown in str(caught.value) and "\n" not in str(caught.value)


def test_every_cut_and_every_flipped_byte_gives_an_image_or_a_sentence():
    images = encoded(Image.fromarray(gradient())), encoded(Image.new("P", (9, 9)), "GIF")
    for whole in (jpeg()[:4000], *images):
        random = np.random.default_rng(0)
        for cut in random.integers(0, len(whole), 40):
            with suppress(DataError):
                decode(whole[:cut])
        for place in random.integers(0, len(whole), 150):
            altered = bytearray(whole)
            altered[place] ^= int(random.integers(1, 256))
            with suppress(DataError):
                Preprocessing((8, 8))(decode(bytes(altered)))


def test_pipes_devices_folders_and_missing_files_are_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe.png")
    for place, says in (
        (tmp_path / "pipe.png", "is not a regular file"),
        ("/dev/zero", "is not a regular file"),
        (tmp_path, "is a folder"),
        (tmp_path / "missing.png", "No such file"),
        ("a\0b.png", "null"),
    ):
        with pytest.raises(DataError, match=says):
            decode(place)


def test_cmyk_becomes_rgb():
    image = decode(encoded(Image.new("CMYK", (4, 4), (0, 255, 255, 0)), "JPEG", quality=100))
    red, green, blue = Preprocessing((4, 4))(image)[:, 0, 0].astype(int)
    assert red > 200 and green < 60 and blue < 60


@pytest.mark.parametrize("top", [1, 1.02, 255, 256])
@pytest.mark.parametrize("dtype", [np.float32, np.int32])
def test_grey_without_a_fixed_range_is_refused_whatever_its_pixels(top, dtype, tmp_path):
    image = Image.fromarray(np.linspace(0, top, 16).reshape(4, 4).astype(dtype))
    path = tmp_path / "microscope.tif"
    image.save(path)
    for channels in (1, 3):
        with pytest.raises(DataError, match=r"an image is .* grey \(mode [FI]\).*save it as 8-bit"):
            Preprocessing((4, 4), channels)(image)
    says = r"microscope\.tif is .* grey \(mode [FI]\).*save it as 8-bit"
    with pytest.raises(DataError, match=says):
        decode(path)


def png(depth: int, colour: int, rows: np.ndarray, transparent: tuple[int, ...] = ()) -> bytes:
    """Return a PNG of rows (H, bytes per row); Pillow does not write all of these depths."""
    width = rows.shape[1] * 8 // depth // (3 if colour == 2 else 1)
    header = struct.pack(">IIBBBBB", width, len(rows), depth, colour, 0, 0, 0)
    key = chunk(b"tRNS", struct.pack(f">{len(transparent)}H", *transparent)) if transparent else b""
    body = zlib.compress(b"".join(b"\0" + row.tobytes() for row in rows))
    head = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + key
    return head + chunk(b"IDAT", body) + chunk(b"IEND", b"")


def big(values: list[int]) -> np.ndarray:
    return np.array([values], ">u2").view(np.uint8)


@pytest.mark.parametrize(
    ("content", "grey"),
    [
        (png(8, 0, np.array([[87, 10]], np.uint8), (87,)), [255, 10]),
        (png(1, 0, np.array([[0b01000000]], np.uint8), (0,)), [255] * 8),
        (png(2, 0, np.array([[0b00011011]], np.uint8), (1,)), [0, 255, 170, 255]),
        (png(4, 0, np.array([[0x1F]], np.uint8), (1,)), [255, 255]),
        (png(16, 0, big([0, 1, 87 * 257, 88 * 257]), (0,)), [255, 0, 87, 88]),
        (png(16, 0, big([0x1234, 0x1235, 0x5634]), (0x1234,)), [255, 0x12, 0x56]),
        (png(16, 2, big([0x1234] * 3 + [0x3412] * 3), (0x1234,) * 3), [255, 0x34]),
    ],
)
def test_the_transparent_value_of_a_png_is_white_at_every_depth(content, grey):
    for mode in ("L", "RGB"):
        pixels = np.asarray(to_mode(decode(content), mode))
        assert pixels.reshape(len(grey), -1)[:, 0].tolist() == grey


def test_sixteen_bits_are_the_same_in_every_format_and_byte_order():
    values = np.array([[0, 255, 256, 4095], [4096, 22_359, 65_279, 65_535]], np.uint16)
    wanted = (values >> 8).tolist()
    tags = [(256, 3, 4), (257, 3, 1), (258, 3, 12), (259, 3, 1), (262, 3, 1), (273, 4, 8)]
    tags += [(277, 3, 1), (278, 3, 1), (279, 4, 6)]
    rows = b"".join(struct.pack("<HHII", tag, kind, 1, value) for tag, kind, value in tags)
    tiff12 = b"II*\0\x14\0\0\0" + bytes.fromhex("0000ff100fff") + bytes(6)
    tiff12 += struct.pack("<H", len(tags)) + rows + bytes(4)
    assert np.asarray(to_mode(decode(tiff12), "L")).tolist() == [[0, 0x0F, 0x10, 0xFF]]
    swapped = Image.frombytes("I;16B", (4, 2), values.astype(">u2").tobytes())
    pgm = b"P5 4 2 65535\n" + values.astype(">u2").tobytes()
    plain = Image.fromarray(values)
    for content in (encoded(plain), encoded(plain, "TIFF"), encoded(swapped, "TIFF"), pgm):
        assert np.asarray(to_mode(decode(content), "L")).tolist() == wanted
        assert np.asarray(to_mode(decode(content), "RGB"))[:, :, 1].tolist() == wanted
    assert np.asarray(to_mode(swapped, "L")).tolist() == wanted
    colour = png(16, 2, np.repeat(values, 3, axis=1).astype(">u2").view(np.uint8))
    assert np.asarray(to_mode(decode(colour), "RGB"))[:, :, 0].tolist() == wanted
    dark = decode(b"P5 2 1 65535\n" + np.array([200, 255], ">u2").tobytes())
    assert np.asarray(to_mode(dark, "L")).max() == 0  # the pixels are not stretched to the range


@pytest.mark.parametrize("mode", [*MODES, "I;16L"])
def test_the_conversion_of_a_pixel_depends_on_no_other_pixel(mode):
    if mode == "LAB":
        pixels = ([0] * 3, [99] * 3)
        images = [Image.frombytes("LAB", (2, 1), bytes([120, 10, 20, *lab])) for lab in pixels]
    else:
        images = [Image.new(mode, (2, 1)) for _ in range(2)]
    if mode == "P":
        for image in images:
            image.putpalette([9, 9, 9, 250, 250, 250])
        images[1].putpixel((1, 0), 1)
    elif mode in ("La", "RGBa"):
        images[1] = Image.frombytes(mode, (2, 1), bytes(images[1].tobytes()[:-1]) + b"\xff")
    elif mode != "LAB":
        bands = len(images[1].getbands())
        images[1].putpixel((1, 0), 255 if bands == 1 else (200,) * bands)
    for to in ("L", "RGB"):
        one, other = (np.asarray(to_mode(image, to)) for image in images)
        assert np.array_equal(one[:, 0], other[:, 0])


@pytest.mark.parametrize("mode", [*MODES, "I", "F"])
def test_an_image_sent_by_a_client_is_converted_like_a_local_image(mode):
    image = Image.new(mode, (2, 1))
    if mode not in ("La", "LAB", "RGBa"):
        image.putpixel((1, 0), 99 if len(image.getbands()) == 1 else (99,) * len(image.getbands()))
    sent = image_bytes(image)
    if mode == "YCbCr":
        with Image.open(io.BytesIO(sent)) as again:
            try:
                again.load()
            except OSError:
                pytest.skip("this release of Pillow cannot read the YCbCr that it writes")
    if mode in ("I", "F"):
        with pytest.raises(DataError, match="save it as 8-bit"):
            decode(sent)
        return
    for to in ("L", "RGB"):
        assert np.array_equal(np.asarray(to_mode(decode(sent), to)), np.asarray(to_mode(image, to)))


def test_an_image_is_shown_with_the_pixels_that_a_model_gets():
    pytest.importorskip("matplotlib")
    from retrieval.data.datasets import ArrayDataset
    from retrieval.evaluation.plot import small_image

    from retrieval_lab.report.write import Thumbnails

    class Sixteen(ArrayDataset):
        def __getitem__(self, index: int) -> Image.Image:
            return image

    image = Image.fromarray(np.array([[0, 87 * 257], [200, 65_535]], np.uint16))
    wanted = np.asarray(to_mode(image, "RGB"))
    assert np.array_equal(np.asarray(small_image(image)), wanted)
    address = Thumbnails(Sixteen(np.zeros((1, 2, 2), np.uint8), ["a"]), 1)(0)
    for content in (base64.b64decode(address.partition(",")[2]), to_png(image)):
        assert np.array_equal(np.asarray(decode(content).convert("RGB")), wanted)
    small_jpeg = np.asarray(decode(thumbnail(image))).astype(int)
    assert np.abs(small_jpeg - wanted).max() < 90


def test_transparent_pixels_become_white():
    palette = Image.new("P", (4, 4), 1)
    palette.putpalette([0, 0, 0, 255, 0, 0])
    palette.putpixel((0, 0), 0)
    for options in ({"transparency": 0}, {"transparency": b"\x00\xff"}):
        pixels = Preprocessing((4, 4))(decode(encoded(palette, **options)))
        assert pixels[:, 0, 0].tolist() == [255, 255, 255]
        assert pixels[:, 1, 1].tolist() == [255, 0, 0]
    half = Preprocessing((1, 1))(decode(encoded(Image.new("RGBA", (1, 1), (0, 0, 0, 128)))))
    assert abs(int(half[0, 0, 0]) - 127) <= 1
    grey = Preprocessing((1, 1), channels=1)(decode(encoded(Image.new("LA", (1, 1), (0, 0)))))
    assert grey[0, 0, 0] == 255
    keyed = decode(encoded(Image.new("RGB", (1, 1), (1, 2, 3)), transparency=(1, 2, 3)))
    assert Preprocessing((1, 1))(keyed)[:, 0, 0].tolist() == [255, 255, 255]


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation_is_applied(orientation):
    pixels = gradient(4, 6)
    exif = Image.Exif()
    exif[0x0112] = orientation
    upright = np.asarray(decode(encoded(Image.fromarray(pixels), exif=exif)))
    # EXIF defines where row 0 and column 0 of the stored pixels are in the upright image.
    expected = {
        1: pixels,
        2: pixels[:, ::-1],
        3: pixels[::-1, ::-1],
        4: pixels[::-1],
        5: pixels.transpose(1, 0, 2),
        6: np.rot90(pixels, -1),
        7: np.rot90(pixels.transpose(1, 0, 2), 2),
        8: np.rot90(pixels, 1),
    }[orientation]
    assert np.array_equal(upright, expected)


def test_an_image_with_broken_exif_is_decoded():
    exif = b"Exif\0\0II*\0\x08\0\0\0\xff\xff\x12\x01"
    good = encoded(Image.fromarray(gradient()), "JPEG", exif=exif)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert decode(good).size == (30, 20)


def test_the_first_frame_of_an_animation():
    frames = [Image.new("RGB", (5, 5), color) for color in ("red", "blue", "green")]
    for format in ("GIF", "WEBP"):
        data = encoded(frames[0], format, save_all=True, append_images=frames[1:], lossless=True)
        middle = Preprocessing((5, 5))(decode(data))[:, 2, 2]
        assert middle.tolist() == pytest.approx([255, 0, 0], abs=2)


def test_resizing_and_cropping_match_a_plain_definition():
    pixels = gradient(40, 60)
    # The shorter side is halved from 40 to 20; then the central 16 × 16 of 20 × 30 are cropped.
    cropped = Preprocessing((16, 16), interpolation="nearest", resize=20)(Image.fromarray(pixels))
    assert np.array_equal(cropped, pixels[1::2, 1::2][2:18, 7:23].transpose(2, 0, 1))
    stretched = Preprocessing((20, 30), interpolation="nearest")(Image.fromarray(pixels))
    assert np.array_equal(stretched, pixels[1::2, 1::2].transpose(2, 0, 1))
    assert stretched.flags.c_contiguous
    assert Preprocessing((7, 9), channels=1)(Image.fromarray(pixels)).shape == (1, 7, 9)


@pytest.mark.parametrize(
    ("interpolation", "resize"),
    [("nearest", 64), ("bilinear", 256), ("bilinear", 37), ("bicubic", 64), ("lanczos", 37)],
)
def test_a_crop_of_a_resized_image_is_exact_to_the_last_bit(interpolation, resize):
    rng = np.random.default_rng(resize)
    resample = Image.Resampling[interpolation.upper()]
    sides = [(640, 480), (480, 640), (300, 256), (61, 64), (40, 90)]
    sides += rng.integers(60, 240, (8, 2)).tolist()
    for number, (width, height) in enumerate(sides):
        image = Image.fromarray(rng.integers(0, 256, (height, width, 3), dtype=np.uint8))
        size = (resize * 7 // 8,) * 2
        if number % 2:
            size = tuple(rng.integers(1, resize * 5 // 4, 2).tolist())
        longer = int(resize * max(image.size) / min(image.size))
        whole = image.resize((resize, longer) if width <= height else (longer, resize), resample)
        left, top = (
            round((long - crop) / 2) if long >= crop else -((crop - long) // 2)
            for long, crop in ((whole.width, size[1]), (whole.height, size[0]))
        )
        expected = np.asarray(whole.crop((left, top, left + size[1], top + size[0])))
        pixels = Preprocessing(size, interpolation=interpolation, resize=resize)(image)
        assert np.array_equal(pixels, expected.transpose(2, 0, 1)), (image.size, size)


def test_a_very_long_image_is_cut_before_it_is_resized():
    strip = Image.fromarray(np.tile(np.arange(256, dtype=np.uint8), 4_000)[None])
    # The whole strip would become 262 million pixels wide.
    pixels = Preprocessing((224, 224), resize=256)(strip)
    assert pixels.shape == (3, 224, 224)
    ordinary = gradient(30, 60)
    centre = Image.fromarray(np.pad(ordinary, ((0, 0), (300, 300), (0, 0))))
    for interpolation in ("nearest", "bilinear", "bicubic", "lanczos"):
        preprocess = Preprocessing((20, 20), resize=24, interpolation=interpolation)
        assert np.array_equal(preprocess(centre), preprocess(Image.fromarray(ordinary)))


@pytest.mark.parametrize(
    "wrong",
    [
        {"size": (0, 8)},
        {"size": (8, 8), "channels": 4},
        {"size": (8, 8), "resize": 0},
        {"size": (8, 8), "interpolation": "best"},
        {"size": (8, 8), "mean": (0.5, 0.5)},
        {"size": (8, 8), "std": ()},
        {"size": (8, 8), "channels": 1, "std": (1.0, 1.0, 1.0)},
    ],
)
def test_invalid_preprocessing_is_refused(wrong):
    with pytest.raises(ValueError, match=r"must be"):
        Preprocessing(**wrong)


@pytest.mark.parametrize("size", [32, np.int64(32)])
def test_one_number_is_a_square(size):
    assert Preprocessing(size=size) == Preprocessing(size=(32, 32))


def test_a_single_mean_or_std_applies_to_every_channel():
    colour = Preprocessing((8, 8), channels=3, mean=(0.5,))
    assert (colour.mean, colour.std) == ((0.5, 0.5, 0.5), (1.0, 1.0, 1.0))
    grey = Preprocessing((8, 8), channels=1, std=(0.25,))
    assert (grey.mean, grey.std) == ((0.0,), (0.25,))


def test_images_from_arrays():
    pixels = gradient()
    assert np.array_equal(np.asarray(from_array(pixels)), pixels)
    assert from_array(pixels[:, :, :1]).mode == "L"
    assert np.array_equal(np.asarray(from_pixels(pixels / 255)), pixels)
    with pytest.raises(DataError, match=r"must be from 0 to 1, but these are from \d+ to \d+"):
        from_pixels(pixels.astype(np.float32))
    with pytest.raises(DataError, match="uint8 of shape"):
        from_array(pixels / 255)
    with pytest.raises(DataError, match="uint8 of shape"):
        from_pixels(pixels[:0])


def test_image_files_below_a_folder(tmp_path):
    for name in ("b/2.PNG", "b/1.jpg", "a.webp", "a.txt", ".hidden/x.png", "b/._1.jpg"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"x")
    (tmp_path / "folder.png").mkdir()
    images = [path.relative_to(tmp_path).as_posix() for path in find_images(tmp_path).images]
    assert images == ["a.webp", "b/1.jpg", "b/2.PNG"]
    with pytest.raises(DataError, match="holds no image"):
        find_images(tmp_path / "folder.png")
    with pytest.raises(DataError, match="is not a folder"):
        find_images(Path("nowhere"))
