"""Decoding in processes of their own, with images that hang them, and answers that cannot be."""

from __future__ import annotations

import functools
import io
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from retrieval.errors import DataError
from retrieval.serving.decoding.pool import Busy, Decoders, Job
from retrieval.serving.images import Limits, Preprocessing, decode

PREPROCESSING = Preprocessing((24, 32), resize=24)


def encoded(image: Image.Image, format: str = "JPEG", **options: object) -> bytes:
    out = io.BytesIO()
    image.save(out, format, **options)
    return out.getvalue()


def photo(height: int = 60, width: int = 80) -> bytes:
    noise = np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return encoded(Image.fromarray(noise))


@functools.cache
def hanging(scans: int = 60_000) -> bytes:
    """A progressive JPEG that says the same empty scan again and again: a minute of work in 600 KB."""
    whole = encoded(Image.new("L", (2000, 2000)), progressive=True)
    start = whole.index(b"\xff\xda")
    length = int.from_bytes(whole[start + 2 : start + 4], "big")
    scan = whole[start : start + 2 + length]
    return whole[:-2] + scan * scans + b"\xff\xd9"


ANY = Limits(scans=10**9, parts=10**9)
"""Lets `hanging` through to the decoder."""


@pytest.fixture
def pool() -> Iterator[Decoders]:
    with Decoders(PREPROCESSING, workers=2, seconds=60, limits=ANY) as decoders:
        wait_until(lambda: bool(decoders._idle), 60)
        yield decoders


def processes(pool: Decoders) -> list[int]:
    return [worker._process.pid for worker in pool._workers if worker._process is not None]


def resident(pid: int) -> int:
    """Return the bytes of memory that a process holds."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def page_faults(pid: int) -> int:
    """Return how many pages a process has taken from the system so far."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[7])


def wait_until(what: Callable[[], bool], seconds: float = 30) -> None:
    until = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < until
        time.sleep(0.02)


def test_pixels_are_those_of_the_one_decoder(pool):
    content = photo()
    made = pool.pixels(content).future.result(60)
    assert np.array_equal(made.pixels, PREPROCESSING(decode(content)))
    assert (made.width, made.height) == (80, 60)
    shown = Image.open(io.BytesIO(pool.png(content).future.result(60)))
    assert np.array_equal(np.asarray(shown), np.asarray(decode(content)))


def test_what_is_wrong_with_an_image_is_a_sentence(pool):
    with pytest.raises(DataError, match=r"^query\.png is not an image in a known format"):
        pool.pixels(b"text", name="query.png").future.result(60)
    with pytest.raises(DataError, match="is damaged"):
        pool.png(photo()[:500]).future.result(60)


def test_hanging_images_end_at_their_deadline_and_others_are_answered_meanwhile():
    with Decoders(PREPROCESSING, workers=2, seconds=8, limits=ANY) as pool:
        wait_until(lambda: bool(pool._idle), 60)
        bad = [pool.pixels(hanging()) for _ in range(4)]
        waited, served = [], 0
        for _ in range(8):
            asked = time.monotonic()
            fault = pool.pixels(photo(), client="another").future.exception(60)
            waited.append(time.monotonic() - asked)
            assert fault is None or isinstance(fault, Busy)  # refused in time, where the machine is busy
            served += fault is None
        assert max(waited) < pool.seconds + 4
        assert served
        faults = [job.future.exception(60) for job in bad]
        assert all(isinstance(fault, DataError | Busy) for fault in faults)
        assert any("takes longer than 8 seconds" in str(fault) for fault in faults)


def test_an_abandoned_image_is_not_begun_or_stopped_soon(pool):
    with Decoders(PREPROCESSING, workers=1) as fresh:
        waiting = fresh.pixels(photo())  # no process has started yet
        waiting.abandon()
        assert waiting.future.cancelled()
    running = pool.pixels(hanging())
    wait_until(running.future.running)
    began = time.monotonic()
    running.abandon()
    assert isinstance(running.future.exception(60), Busy)
    assert time.monotonic() - began < 20  # of 60
    assert pool.pixels(photo()).future.result(60)


def test_closing_takes_less_than_a_second_whatever_hangs():
    pool = Decoders(PREPROCESSING, workers=2, seconds=60, limits=ANY)
    jobs = [pool.pixels(hanging()) for _ in range(10)]
    wait_until(lambda: any(job.future.running() for job in jobs))
    wait_until(lambda: bool(processes(pool)))
    pids = processes(pool)
    began = time.monotonic()
    pool.close()
    assert time.monotonic() - began < 1
    assert all(job.future.exception(1) is not None for job in jobs)
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    with pytest.raises(Busy):
        pool.pixels(photo())


def test_processes_are_replaced_when_they_die(pool):
    pool.pixels(photo()).future.result(60)
    (pid,) = processes(pool)
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: ") Z " in Path(f"/proc/{pid}/stat").read_text())
    assert pool.pixels(photo()).future.result(60)  # dead while it was idle: nobody's fault
    job = pool.pixels(hanging())
    wait_until(job.future.running)
    time.sleep(0.3)
    os.kill(processes(pool)[0], signal.SIGSEGV)
    with pytest.raises(DataError, match="brings its decoder down"):
        job.future.result(60)
    assert pool.pixels(photo()).future.result(60)


def test_memory_is_limited():
    large = encoded(Image.new("RGB", (5000, 4000)), "PNG")  # 80 MB once decoded
    with Decoders(PREPROCESSING, workers=1, seconds=60, memory=40_000_000) as pool:
        with pytest.raises(DataError, match="needs more memory"):
            pool.pixels(large).future.result(60)
        assert pool.pixels(photo()).future.result(60)
    with Decoders(PREPROCESSING, workers=1, seconds=60, memory=200_000_000) as pool:
        assert pool.pixels(large).future.result(60).width == 5000


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize("upload", ["jpeg", "ppm"])
def test_memory_comes_back_once_large_images_are_done(upload):
    """A process that is idle after uploads of 15 to 20 MB holds at most 16 MB more than when it was ready."""
    small = Image.fromarray(np.random.default_rng(0).integers(0, 256, (40, 50, 3), dtype=np.uint8))
    if upload == "jpeg":  # 20 megapixels
        content = encoded(small.resize((5000, 4000), Image.Resampling.NEAREST), quality=30) + bytes(
            15_000_000
        )
    else:
        content = encoded(small.resize((2500, 2600)), "PPM")
    with Decoders(PREPROCESSING, workers=1, seconds=60) as pool:
        wait_until(lambda: bool(pool._idle), 60)
        (pid,) = processes(pool)
        before = resident(pid)
        for _ in range(4):
            assert pool.pixels(content).future.result(60)
        wait_until(lambda: resident(pid) < before + 16_000_000)
        assert processes(pool) == [pid]


@pytest.mark.skipif(sys.platform != "linux", reason="/proc and glibc")
def test_memory_of_a_photo_is_there_for_the_next_one():
    """Buffers of photos of 640 × 480 are 800 pages: taken from the system for each photo anew, they cost half as much as decoding."""
    small = Image.fromarray(np.random.default_rng(0).integers(0, 256, (30, 40, 3), dtype=np.uint8))
    photos = [encoded(small.resize((640 + 8 * number, 480))) for number in range(10)]
    with Decoders(Preprocessing((224, 224), resize=256), workers=1, seconds=60) as decoders:
        wait_until(lambda: bool(decoders._idle), 60)
        for content in photos[:3]:
            decoders.pixels(content).future.result(60)
        (pid,) = processes(decoders)
        before = page_faults(pid)
        for content in photos:
            decoders.pixels(content).future.result(60)
        assert processes(decoders) == [pid]
        assert page_faults(pid) - before < 100 * len(photos)


def test_who_waits_is_served_in_turn_and_bounded():
    with Decoders(PREPROCESSING, workers=1, seconds=60, waiting=4) as pool:
        order: list[str] = []

        def ask(client: str) -> Job:
            job = pool.pixels(photo(), client=client)
            job.future.add_done_callback(lambda _: order.append(client))
            return job

        # no process has started yet: all of these wait
        jobs = [ask("many") for _ in range(4)]
        with pytest.raises(Busy):
            ask("many")
        jobs.append(ask("one"))  # in the place of the last of many
        assert isinstance(jobs[3].future.exception(1), Busy)
        for job in (*jobs[:3], jobs[4]):
            job.future.result(60)
        assert order.index("one") < 4
        assert order[-1] == "many"
