"""Decoder processes: images that make them hang or crash, and forged answers."""

from __future__ import annotations

import fcntl
import io
import os
import pickle
import signal
import socket
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest
import wire
from PIL import Image
from retrieval.errors import DataError
from retrieval.images.decoding import decode, full_size
from retrieval.images.preprocessing import Preprocessing

from retrieval_server.decoder_processes import _ANSWER, Decoders, Undecodable

PREPROCESSING = Preprocessing((24, 32), resize=24)


def encoded(image: Image.Image, format: str = "JPEG", **options: object) -> bytes:
    out = io.BytesIO()
    image.save(out, format, **options)
    return out.getvalue()


def photo(height: int = 60, width: int = 80) -> bytes:
    noise = np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return encoded(Image.fromarray(noise))


@pytest.fixture
def pool():
    with closing(Decoders(seconds=60)) as decoders:
        yield decoders


def resident(pid: int) -> int:
    """Return the bytes of memory that a process holds."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_a_process_gives_the_pixels_of_decode(pool):
    content = photo()
    decoded = pool.decode("pixels", content, PREPROCESSING)
    assert np.array_equal(decoded.pixels, PREPROCESSING(decode(content)))
    assert (decoded.width, decoded.height) == (80, 60)
    shown = Image.open(io.BytesIO(pool.decode("png", content)))
    assert np.array_equal(np.asarray(shown), np.asarray(decode(content)))


def test_a_fault_of_an_image_is_a_sentence(pool):
    with pytest.raises(DataError, match=r"^query\.png is not an image in a known format"):
        pool.decode("pixels", b"text", PREPROCESSING, name="query.png")
    with pytest.raises(DataError, match="is damaged"):
        pool.decode("png", photo()[:500])


@pytest.mark.parametrize("code", [signal.SIGKILL, signal.SIGTERM])
def test_an_image_is_decoded_again_if_the_system_kills_its_decoder(pool, code):
    content = photo()

    def killed(times: int) -> bytes:
        ended = set[int]()
        with ThreadPoolExecutor(1) as thread:
            for pid in pool.pids:
                os.kill(pid, signal.SIGSTOP)
            answer = thread.submit(pool.decode, "png", content)
            while len(ended) < times and not answer.done():
                for pid in set(pool.pids) - ended:
                    time.sleep(0.3 if not ended else 0)  # it has the image by now
                    os.kill(pid, code)
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGCONT)
                    ended.add(pid)
                time.sleep(0.001)
            return answer.result(60)

    assert killed(1) == pool.decode("png", content)
    content = photo(3000, 4000)  # takes long enough to be hit
    with pytest.raises(Undecodable, match="were killed"):
        killed(2)
    assert pool.decode("png", photo())


def test_a_hanging_process_is_ended_at_the_deadline_and_others_decode_meanwhile():
    with closing(Decoders(seconds=2)) as pool, ThreadPoolExecutor(2) as threads:
        (stopped,) = pool.pids
        os.kill(stopped, signal.SIGSTOP)
        began = time.monotonic()
        hanging = threads.submit(pool.decode, "pixels", photo(), PREPROCESSING)
        wire.until(lambda: not pool._idle)
        assert pool.decode("pixels", photo(), PREPROCESSING).width == 80
        with pytest.raises(DataError, match="takes longer than 2 seconds"):
            hanging.result(60)
        assert 2 <= time.monotonic() - began < 20
        assert stopped not in pool.pids
        assert pool.decode("pixels", photo(), PREPROCESSING).width == 80


def unread(pipe: socket.socket) -> int:
    """Return the number of bytes that the other end has not read yet."""
    return int.from_bytes(fcntl.ioctl(pipe, termios.TIOCOUTQ, bytes(4)), sys.byteorder)


def test_a_process_that_ends_is_replaced(pool):
    pool.decode("pixels", photo(), PREPROCESSING)
    (pid,) = pool.pids
    os.kill(pid, signal.SIGKILL)
    wire.until(lambda: not pool._idle[0].process.is_alive())
    assert pool.decode("pixels", photo(), PREPROCESSING)  # the end of an idle process is no error
    (pid,) = pool.pids
    (worker,) = pool._idle
    os.kill(pid, signal.SIGSTOP)
    with ThreadPoolExecutor(1) as threads:
        decoding = threads.submit(pool.decode, "pixels", photo(), PREPROCESSING)
        wire.until(lambda: unread(worker.pipe))  # before that, it would end as an idle one
        os.kill(pid, signal.SIGSEGV)
        os.kill(pid, signal.SIGCONT)
        with pytest.raises(DataError, match="crashes its decoder"):
            decoding.result(60)
    assert pool.decode("pixels", photo(), PREPROCESSING)


class Evil:
    """Creates a folder in the process that unpickles it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(self.path),)


@contextmanager
def taken_over(pool: Decoders) -> Iterator[socket.socket]:
    """Context manager: a socket that answers instead of the pool's only process."""
    (worker,) = pool._idle
    own = worker.pipe  # the process lives until this is closed
    worker.pipe, theirs = socket.socketpair()
    with own, theirs:
        yield theirs


SIZE = 24 * 32 * 3
ANSWERS = {
    "empty": b"",
    "too many pixels": _ANSWER.pack(True, 80, 60, SIZE + 1) + bytes(SIZE + 1),
    "a pickle": None,
}


@pytest.mark.parametrize("answer", ANSWERS.values(), ids=ANSWERS)
def test_a_forged_answer_is_refused_and_never_unpickled(pool, tmp_path, answer):
    pids = pool.pids
    sent = pickle.dumps(Evil(tmp_path / "run")) if answer is None else answer
    with taken_over(pool) as theirs, ThreadPoolExecutor(1) as threads:

        def send() -> None:
            with theirs, suppress(OSError):  # the server hangs up
                theirs.recv(65_536)
                theirs.sendall(sent)

        threads.submit(send)
        with pytest.raises(DataError, match="crashes its decoder"):
            pool.decode("pixels", photo(), PREPROCESSING)
    assert not (tmp_path / "run").exists()
    assert not set(pids) & set(pool.pids)
    assert pool.decode("pixels", photo(), PREPROCESSING).width == 80


@pytest.mark.parametrize(
    ("size", "sent", "says"),
    [
        (SIZE, 0, "takes longer than"),
        (SIZE, SIZE // 2, "takes longer than"),
        (1_000_000, 0, "crashes its decoder"),  # too large to wait for
    ],
)
def test_an_incomplete_answer_is_refused_at_the_deadline_and_a_large_one_at_once(size, sent, says):
    with closing(Decoders(seconds=0.5)) as pool, taken_over(pool) as theirs:
        theirs.sendall(_ANSWER.pack(True, 80, 60, size) + bytes(sent))
        with pytest.raises(DataError, match=says):
            pool.decode("pixels", photo(), PREPROCESSING)


def test_the_sentence_of_a_forged_answer_is_cut_and_printable(pool):
    sentence = b"\x1b[31m\xff" + b"x" * 10_000
    with taken_over(pool) as theirs:
        theirs.sendall(_ANSWER.pack(False, 0, 0, len(sentence)) + sentence)
        with pytest.raises(DataError) as error:
            pool.decode("pixels", photo(), PREPROCESSING)
    assert str(error.value).isprintable() and len(str(error.value)) < 5000


def test_closing_ends_every_process(pool):
    pool.decode("pixels", photo(), PREPROCESSING)
    pids = pool.pids
    pool.close()
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    with pytest.raises(Undecodable, match="stopping"):
        pool.decode("pixels", photo(), PREPROCESSING)


def test_a_process_that_cannot_start_names_a_python_that_the_user_may_not_run(tmp_path):
    python = tmp_path / "python"
    python.write_text("")
    code = (
        "import multiprocessing, sys; from retrieval_server.decoder_processes import Decoders; "
        f"sys.executable = {str(python)!r}; multiprocessing.set_executable(sys.executable); "
        "Decoders().decode('png', b'')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60)
    assert b"This user may not run %b." % bytes(python) in done.stderr, done


def test_the_memory_of_a_process_is_limited():
    large = encoded(Image.new("RGB", (5000, 4000)), "PNG")
    code = (
        "import sys; from retrieval_server import decoder_processes as decoding;"
        "decoding._confine(40_000_000); "
        "job = ('png', sys.stdin.buffer.read(), None, 'it'); "
        "print(decoding._answer(decoding.Limits(), job))"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, input=large, capture_output=True, timeout=60)
    assert b"it needs more memory for decoding" in done.stdout, done


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_memory_is_returned_after_large_images(pool):
    small = Image.fromarray(np.random.default_rng(0).integers(0, 256, (40, 50, 3), dtype=np.uint8))
    large = small.resize((5000, 4000), Image.Resampling.NEAREST)
    content = encoded(large, quality=30) + bytes(15_000_000)
    (pid,) = pool.pids
    before = resident(pid)
    for _ in range(4):
        assert pool.decode("pixels", content, PREPROCESSING)
    wire.until(lambda: resident(pid) < before + 16_000_000)
    assert pool.pids == [pid]


def test_a_photo_of_48_megapixels_is_decoded_at_half_its_size(pool):
    photo = Image.new("RGB", (8064, 6048), (200, 30, 40))
    exif = Image.Exif()
    exif[0x0112] = 6
    content = encoded(photo, quality=30, exif=exif.tobytes())
    square = Preprocessing((24, 24), resize=24)
    decoded = pool.decode("pixels", content, square)
    assert (decoded.width, decoded.height) == (6048, 8064)  # the upright size of the file
    assert np.abs(decoded.pixels.astype(int) - np.array([200, 30, 40])[:, None, None]).max() < 4
    image = decode(content)
    assert image.size == (3024, 4032) and full_size(image) == (6048, 8064)
    assert np.array_equal(decoded.pixels, square(image))
    too_large = encoded(Image.new("L", (12_000, 9_000)), quality=30)
    no_jpeg = encoded(Image.new("1", (8064, 6048)), "PNG")  # only a JPEG can be decoded reduced
    for content in (too_large, no_jpeg):
        with pytest.raises(DataError, match=r"the limit is 25,000,000\..*limit on pixels"):
            pool.decode("pixels", content, PREPROCESSING)


SCRIPT = """
from retrieval_server.decoder_processes import Decoders
print("run")
pool = Decoders()
print(pool.pids != [])
pool.close()
"""


def test_a_script_without_a_guard_is_not_run_again_by_each_process(tmp_path, process):
    (tmp_path / "script.py").write_text(SCRIPT)
    assert process(tmp_path / "script.py").out.split() == ["run", "True"]
