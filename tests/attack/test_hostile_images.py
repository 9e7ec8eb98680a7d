"""Every format's worst cases are refused, or decoded within the limits of time and memory."""

from __future__ import annotations

import importlib.util
import io
import os
import time
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from retrieval.errors import DataError
from retrieval.serving.decoding.pool import Decoders
from retrieval.serving.images import FORMATS, Limits, Preprocessing, can_open, decode
from retrieval.serving.screening import format_of

_spec = importlib.util.spec_from_file_location(
    "hostile_images", Path(__file__).with_name("hostile_images.py")
)
hostile = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(hostile)

CPU_SECONDS = 8.0  # of one image: the slowest needs some three on a quiet machine
SAYS = {
    "jpeg: 20,000 scans in 200 KB": "more than 64 scans",
    "jpeg: 4 million comments": "more than 20,000 segments",
    "png: 1.6 million chunks": "more than 20,000 chunks",
    "bmp: run lengths of one line": "20,000 on each side",
    "tiff: one huge tile": "far more than the image",
    "tiff: strips of nothing": "share its bytes",
    "ppm: a header that never ends": "no size in its first",
    "gif: a comment of single bytes": "blocks before its first frame",
    "heic: a grid larger than its image": "30000 × 30000",
}
"""What was seen in attacks, and how it is refused now: before anything is decoded."""
WRONG = ("takes longer", "brings its decoder down", "needs more memory")


@pytest.fixture
def pool() -> Iterator[Decoders]:
    with Decoders(Preprocessing((224, 224), resize=256), workers=1, seconds=120) as decoders:
        until = time.monotonic() + 60
        while not decoders._idle:
            assert time.monotonic() < until
            time.sleep(0.02)
        yield decoders


def process(pool: Decoders) -> int:
    (worker,) = pool._workers
    return worker._process.pid


def cpu_seconds(pid: int) -> float:
    user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def peak_bytes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


def test_every_worst_case_is_refused_or_decoded_within_its_limits(pool):
    pool.pixels(hostile.sound()["png"]).future.result(60)
    first, small = process(pool), peak_bytes(process(pool))
    formats, says = set(), dict(SAYS)
    for name, content in hostile.worst():
        formats.add(name.partition(":")[0])
        before = cpu_seconds(first)
        fault = pool.pixels(content, name=name).future.exception(120)
        assert fault is None or isinstance(fault, DataError), (name, fault)
        assert not any(words in str(fault) for words in WRONG), (name, fault)
        assert says.pop(name, "") in str(fault)
        assert process(pool) == first, f"{name} ended its process"
        assert cpu_seconds(first) - before < CPU_SECONDS, name
        assert peak_bytes(first) < small + Limits().memory, name
    assert not says
    assert {"jpeg", "png", "gif", "bmp", "ppm", "webp", "tiff", "avif", "heic"} <= formats


def test_damaged_images_are_answered_and_the_process_lives(pool):
    for name, content in hostile.damaged(seed=1, count=3):
        fault = pool.pixels(content, name=name).future.exception(120)
        assert fault is None or isinstance(fault, DataError), (name, fault)
        assert not any(words in str(fault) for words in WRONG), (name, fault)


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
    path = tmp_path / "photo.jpg"  # opened by content, whatever it is called
    path.write_bytes(out.getvalue())
    image = decode(path)
    assert image.size == (photo.height, photo.width)  # upright
    upright = np.asarray(photo.transpose(Image.Transpose.ROTATE_270), dtype=np.float64)
    assert np.abs(np.asarray(image.convert("RGB"), dtype=np.float64) - upright).mean() < 12
    served = pool.pixels(out.getvalue()).future.result(60).pixels
    assert np.array_equal(served, pool.preprocessing(image))


def test_limits_of_size_are_said():
    wide = io.BytesIO()
    Image.new("1", (6000, 5)).save(wide, "PNG")
    with pytest.raises(DataError, match="one side of 1,000 times the other"):
        decode(wide.getvalue())
    assert decode(wide.getvalue(), Limits(aspect=1200)).size == (6000, 5)
    with pytest.raises(DataError, match="the limit is 5,000 on each side"):
        decode(wide.getvalue(), Limits(aspect=1200, side=5000))
    with pytest.raises(DataError, match=r"the limit is 29,999\. Save it smaller, or raise the limit"):
        decode(wide.getvalue(), Limits(pixels=29_999))


def test_compressed_texts_are_counted_before_one_is_inflated():
    whole = hostile.saved(Image.new("L", (8, 8)), "PNG")
    text = hostile._chunk(b"zTXt", b"a\0\0" + zlib.compress(b"x"))
    assert decode(whole[:33] + text * 50 + whole[33:]).size == (8, 8)
    with pytest.raises(DataError, match="compressed texts"):
        decode(whole[:33] + text * 51 + whole[33:])
