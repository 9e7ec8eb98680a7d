"""Decode untrusted images in processes with a deadline and a memory limit.

An image may make its decoder hang, crash or exhaust memory. In that case, one process is lost, and
the sender of the image gets an error. An image may even take control of its decoder, so the server
validates every answer of a decoder process and never unpickles an answer.

Each decoding thread talks to one process over a pair of sockets. Two alternatives were measured:
with a small image, the pool of the library pebble took twice as long as the search; with a photo,
multiprocessing's pipes took 0.1 ms more.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import pickle
import resource
import signal
import socket
import struct
import sys
import threading
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from time import monotonic
from types import ModuleType
from typing import Any, Literal, NamedTuple

import numpy as np
from PIL import Image
from retrieval.base.arrays import Pixels
from retrieval.base.machine import return_large_blocks
from retrieval.errors import DataError
from retrieval.images.decoding import Limits, can_open, decode, full_size
from retrieval.images.preprocessing import Preprocessing, thumbnail, to_png

SECONDS = 5.0
"""Default time limit for one image."""
_STARTING_SECONDS = 60.0
_KEPT_BYTES = 8_000_000
"""Largest freed memory blocks that a process keeps for its next image."""
_ATTEMPTS = 2
_ENDING_SECONDS = 1.0
_KILLED = (-signal.SIGKILL, -signal.SIGTERM)
"""Exit codes of a process that the system or a person has ended."""
_LONGEST_SENTENCE = 4096
"""Maximum length of an error message, in characters."""
_ANSWER = struct.Struct("<?III")
"""Header of an answer: whether the image was decoded, width, height, and number of bytes after it.

The bytes are pixels, a file or an error message.
"""

Kind = Literal["pixels", "png", "thumbnail"]
Job = tuple[Kind, bytes, Preprocessing | None, str]
"""Kind, an image file's content, its preprocessing for "pixels", and its name in messages."""


class Decoded(NamedTuple):
    """One decoded image.

    Attributes:
        pixels: pixels (C, H, W), uint8, from `Preprocessing`.
        width: width of the image before preprocessing, after its EXIF rotation.
        height: height of the image, likewise.
    """

    pixels: Pixels
    width: int
    height: int


class Undecodable(Exception):
    """Raised if no decoder process can be started, or if others kill it."""


class Decoders:
    """A pool of decoder processes, one per thread that decodes at the same time.

    Args:
        limits: limits on the images to decode.
        seconds: time limit for one image.
    """

    def __init__(self, limits: Limits | None = None, seconds: float = SECONDS) -> None:
        self.limits = limits or Limits()
        self.seconds = seconds
        self._lock = threading.Lock()
        self._closed = False
        self._workers: set[_Worker] = set()
        self._idle: list[_Worker] = []
        # The first process is started now, so that the first image need not wait. If this fails,
        # decoding the first image reports it.
        with suppress(Undecodable):
            self._idle.append(self._start())

    def decode(
        self,
        kind: Kind,
        content: bytes,
        preprocessing: Preprocessing | None = None,
        name: str = "the file",
    ) -> Any:
        """Decode an image in another process and wait for it.

        Args:
            kind: "pixels" returns `Decoded`; "png" and "thumbnail" (a small JPEG) return bytes.
            content: content of the image's file.
            preprocessing: preprocessing, for kind "pixels".
            name: name of the image in error messages.

        Raises:
            DataError: the image cannot be decoded.
            Undecodable: no process can be started, or others kill it.
        """
        if preprocessing is None:
            # A PNG has up to four channels, and may keep the image's profile of sRGB.
            longest = 5 * self.limits.pixels + len(content)
        else:
            longest = math.prod(preprocessing.shape)
        # UTF-8 has up to 4 bytes per character.
        longest = max(longest, 4 * _LONGEST_SENTENCE)
        for _ in range(_ATTEMPTS):
            worker = self._take()
            try:
                result = worker.ask((kind, content, preprocessing, name), longest)
            except (OSError, EOFError, ValueError) as fault:
                if not isinstance(fault, TimeoutError | ValueError):
                    # The exit code is known only after the system has ended the process.
                    worker.process.join(_ENDING_SECONDS)
                # `_end` kills the process, so its exit code is read before.
                killed = worker.process.exitcode in _KILLED
                self._end(worker)
                if killed:
                    # Whoever killed the process, the image may be sound: try it once more.
                    continue
                reason = "cannot be decoded: it crashes its decoder"
                if isinstance(fault, TimeoutError):
                    reason = f"takes longer than {self.seconds:g} seconds to decode"
                raise DataError(f"{name} {reason}. Save it as a plain PNG or JPEG.") from None
            with self._lock:
                # The last process used is taken first, because its caches are warm.
                self._idle.append(worker)
            if isinstance(result, str):
                raise DataError(result)
            return result
        raise Undecodable("Two decoder processes were killed, perhaps because memory was short.")

    @property
    def pids(self) -> list[int]:
        """Process ids of the running processes."""
        with self._lock:
            pids = [worker.process.pid for worker in self._workers]
        return [pid for pid in pids if pid is not None]

    def close(self) -> None:
        """Kill every process, even if it is decoding."""
        self._closed = True
        with self._lock:
            workers = list(self._workers)
        for worker in workers:
            self._end(worker)

    def _take(self) -> _Worker:
        while True:
            with self._lock:
                if self._idle:
                    worker = self._idle.pop()
                else:
                    worker = None
            if worker is None:
                return self._start()
            if worker.is_alive():
                return worker
            # The system or a person killed it while it was idle.
            self._end(worker)

    def _start(self) -> _Worker:
        if self._closed:
            raise Undecodable("The server is stopping.")
        try:
            worker = _Worker(self.limits, self.seconds)
        except (OSError, EOFError) as error:
            advice = ""
            if "path too long" in str(error):
                advice = " Set TMPDIR to a shorter folder."
            elif not os.access(sys.executable, os.X_OK):
                advice = f" This user may not run {sys.executable}."
            raise Undecodable(f"A decoder process does not start: {error}.{advice}") from error
        with self._lock:
            self._workers.add(worker)
        return worker

    def _end(self, worker: _Worker) -> None:
        with self._lock:
            self._workers.discard(worker)
        worker.process.kill()
        worker.process.join()
        worker.pipe.close()


class _Worker:
    """One decoder process and the socket to it."""

    def __init__(self, limits: Limits, seconds: float) -> None:
        context = multiprocessing.get_context("forkserver")
        # A process starts in milliseconds if it is forked from one that has loaded this module.
        context.set_forkserver_preload([__name__])
        self.pipe, theirs = socket.socketpair()
        self.process = context.Process(target=_serve, args=(theirs, limits), daemon=True)
        _start_without_main(self.process)
        theirs.close()
        try:
            self._read(1, _STARTING_SECONDS)
        except (OSError, EOFError):
            self.process.kill()
            self.pipe.close()
            raise OSError("it does not answer") from None
        self._seconds = seconds

    def __del__(self) -> None:
        # The process ends when its socket closes.
        if hasattr(self, "pipe"):
            self.pipe.close()

    def is_alive(self) -> bool:
        """Whether the idle process still has its end of the socket."""
        # `Process.is_alive` takes as long as the rest of an exchange.
        try:
            self.pipe.setblocking(False)
            return bool(self.pipe.recv(1, socket.MSG_PEEK))
        except BlockingIOError:
            return True
        except OSError:  # this end is closed too
            return False

    def ask(self, job: Job, longest: int) -> Decoded | bytes | str:
        """Send a job and return pixels, a file's bytes, or, as text, an error message.

        Raises:
            TimeoutError: the process takes too long.
            OSError, EOFError: the process has ended.
            ValueError: the answer has more than `longest` bytes, or a wrong number of pixels.
        """
        self.pipe.settimeout(self._seconds)
        # Only this direction is pickled: the process may trust the server, but not vice versa.
        self.pipe.sendall(pickle.dumps(job, 5))
        decoded, width, height, size = _ANSWER.unpack(self._read(_ANSWER.size, self._seconds))
        # A process that its image has taken over could claim any size.
        if size > longest:
            raise ValueError
        answer = self._read(size, self._seconds)
        if not decoded:
            text = answer.decode("utf-8", "replace")[:_LONGEST_SENTENCE]
            return "".join(sign if sign.isprintable() else " " for sign in text)
        if (preprocessing := job[2]) is None:
            return bytes(answer)
        pixels = np.frombuffer(answer, np.uint8).reshape(preprocessing.shape)
        return Decoded(pixels, width, height)

    def _read(self, size: int, seconds: float) -> bytearray:
        """Return the next `size` bytes; raises the same errors as `ask`."""
        end = monotonic() + seconds
        content = bytearray(size)
        start = 0
        with memoryview(content) as rest:
            while start < size:
                self.pipe.settimeout(max(0.001, end - monotonic()))
                count = self.pipe.recv_into(rest[start:])
                if not count:
                    raise EOFError
                start += count
        return content


_MAIN_LOCK = threading.Lock()


def _start_without_main(process: Any) -> None:
    """Start a process that, unlike multiprocessing's default, does not import the main script."""
    # multiprocessing reads the script's path from `__main__`, and no option prevents that. A
    # process of `subprocess` would not import the script either, but would start in 0.3 s instead
    # of a few milliseconds, because it would import NumPy and Pillow again.
    with _MAIN_LOCK:
        script = sys.modules["__main__"]
        sys.modules["__main__"] = ModuleType("__main__")
        try:
            process.start()
        finally:
            sys.modules["__main__"] = script


def _serve(pipe: socket.socket, limits: Limits) -> None:
    """Decode images until the socket closes; runs in the decoder process."""
    # Ctrl-C reaches all processes of the terminal; the server ends its decoders itself.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    return_large_blocks(_KEPT_BYTES)
    # All decoders are loaded before memory is limited.
    Image.init()
    can_open("AVIF"), can_open("HEIF")
    nowhere = os.open(os.devnull, os.O_RDWR)
    # Discard what libraries print about hostile files.
    for stream in range(3):
        os.dup2(nowhere, stream)
    # The libraries that are loaded by now do not count towards the limit.
    _confine(limits.memory)
    with suppress(EOFError, OSError), pipe.makefile("rb") as jobs:
        # This byte tells the server that the process is ready.
        pipe.sendall(b"\0")
        while True:
            pipe.sendall(_answer(limits, pickle.load(jobs)))


def _answer(limits: Limits, job: Job) -> bytes:
    """Return the answer to one job in the format that `_Worker.ask` reads."""
    kind, content, preprocessing, name = job
    try:
        if kind == "pixels":
            assert preprocessing is not None
            image = decode(content, limits, name)
            pixels = preprocessing(image)
            return b"".join((_ANSWER.pack(True, *full_size(image), pixels.nbytes), pixels.data))
        # Stored items may have larger files than the limit on uploads allows.
        image = decode(content, replace(limits, bytes=max(limits.bytes, len(content))), name)
        if kind == "png":
            file = to_png(image)
        else:
            file = thumbnail(image)
        return _ANSWER.pack(True, *image.size, len(file)) + file
    except DataError as error:
        sentence = str(error)
    except MemoryError:
        memory = "more memory for decoding than the server allows"
        sentence = f"{name} needs {memory}. Save it smaller."
    text = sentence[:_LONGEST_SENTENCE].encode("utf-8", "replace")
    return _ANSWER.pack(False, 0, 0, len(text)) + text


def _confine(memory: int) -> None:
    """Limit this process's memory to `memory` bytes more than it uses now."""
    # macOS has no /proc, so memory is not limited there.
    with suppress(OSError, StopIteration):
        lines = Path("/proc/self/status").read_text("ascii").splitlines()
        now = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmSize:"))
        resource.setrlimit(resource.RLIMIT_AS, (now + memory, now + memory))
