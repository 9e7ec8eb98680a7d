"""Hostile images of every format are refused, or decoded within limits of time and memory."""

import contextlib
import io
import time
from pathlib import Path

import hostile_images as hostile
import numpy as np
import pytest
from PIL import Image
from retrieval.errors import DataError
from retrieval.images.decoding import FORMATS, Limits, can_open, decode, format_of
from retrieval.images.preprocessing import Preprocessing

from retrieval_server.decoder_processes import Decoders

SECONDS = 2.0
PREPROCESSING = Preprocessing((224, 224), resize=256)


@pytest.fixture
def pool():
    decoders = Decoders(seconds=SECONDS)
    yield decoders
    decoders.close()


def peak_bytes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


def test_hostile_images_are_refused_or_decoded_within_limits(pool):
    sound = hostile.sound()["png"]
    pool.decode("pixels", sound, PREPROCESSING)
    (first,) = pool.pids
    small, formats = peak_bytes(first), set()
    for name, content in hostile.worst():
        formats.add(name.partition(":")[0])
        began = time.monotonic()
        with contextlib.suppress(DataError):
            pool.decode("pixels", content, PREPROCESSING, name=name)
        assert time.monotonic() - began < SECONDS + 10, name  # on a busy machine
        for pid in pool.pids:
            assert peak_bytes(pid) < small + Limits().memory, name
        assert pool.decode("pixels", sound, PREPROCESSING).width, name
        assert len(pool.pids) == 1
    assert {"jpeg", "png", "gif", "bmp", "ppm", "webp", "tiff", "avif", "heic"} <= formats


def test_the_pool_survives_damaged_images(pool):
    for name, content in hostile.damaged(seed=1, count=3):
        with contextlib.suppress(DataError):
            pool.decode("pixels", content, PREPROCESSING, name=name)
    assert pool.decode("pixels", hostile.sound()["png"], PREPROCESSING)


def test_sound_images_of_every_format_are_decoded():
    sound = hostile.sound()
    assert {format_of(content) for content in sound.values()} >= {*FORMATS, "AVIF", "HEIF"}
    for name, content in sound.items():
        image = decode(content)
        with Image.open(io.BytesIO(content)) as plain:
            assert sorted(image.size) == sorted(plain.size), name


@pytest.mark.parametrize("format", ["AVIF", "HEIF"])
def test_avif_and_heic_give_the_same_pixels_to_training_and_serving(format, pool, tmp_path):
    if not can_open(format):
        pytest.skip(f"{format} cannot be read here")
    photo = Image.open(io.BytesIO(hostile.sound()["png"])).convert("RGB")
    exif = Image.Exif()
    exif[0x0112] = 6
    out = io.BytesIO()
    photo.save(out, format, quality=95, exif=exif.tobytes())
    path = tmp_path / "photo.jpg"  # the content decides, not the name
    path.write_bytes(out.getvalue())
    image = decode(path)
    assert image.size == (photo.height, photo.width)  # upright
    upright = np.asarray(photo.transpose(Image.Transpose.ROTATE_270), dtype=np.float64)
    assert np.abs(np.asarray(image.convert("RGB"), dtype=np.float64) - upright).mean() < 12
    served = pool.decode("pixels", out.getvalue(), PREPROCESSING).pixels
    assert np.array_equal(served, PREPROCESSING(image))


def test_each_limit_on_the_size_has_its_sentence():
    wide = io.BytesIO()
    Image.new("1", (6000, 5)).save(wide, "PNG")
    with pytest.raises(DataError, match="the limit is 1,000 for the ratio of its sides"):
        decode(wide.getvalue())
    assert decode(wide.getvalue(), Limits(aspect=1200)).size == (6000, 5)
    with pytest.raises(DataError, match="the limit is 5,000 on each side"):
        decode(wide.getvalue(), Limits(aspect=1200, side=5000))
    with pytest.raises(DataError, match=r"the limit is 29,999\. Save it smaller, or raise"):
        decode(wide.getvalue(), Limits(pixels=29_999))
