"""Images of strangers, decoded in processes of their own: each has a deadline and a memory limit, and is replaced.

An image may hang its decoder, crash it or take all memory. Here that costs one process, and the sender gets a
sentence. Each thread that decodes talks with one process over a pipe: a pool with threads of its own (pebble) took
twice the time of a small image's search.
"""

from __future__ import annotations

import io
import multiprocessing
import os
import signal
import sys
import threading
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from retrieval.errors import DataError
from retrieval.serving.image_formats import can_open
from retrieval.serving.images import Limits, Preprocessing, decode, full_size, thumbnail, to_png
from retrieval.serving.memory import Memory, return_large_blocks

SECONDS = 5.0
_STARTING_SECONDS = 60.0
_KEPT_BYTES = 8_000_000
"""Free memory that the next image finds ready."""

Kind = Literal["pixels", "png", "thumbnail"]


class Decoded(NamedTuple):
    """One decoded image.

    Attributes:
        pixels: uint8 (C, H, W), as `Preprocessing` makes them.
        width: of the image before preprocessing, upright.
        height: likewise.
    """

    pixels: NDArray[np.uint8]
    width: int
    height: int


class Undecodable(Exception):
    """No process that decodes starts."""


class Decoders:
    """Processes that decode: as many as threads ask at a time.

    Args:
        limits: larger images are refused.
        seconds: that one image may take.
    """

    def __init__(self, limits: Limits | None = None, seconds: float = SECONDS) -> None:
        self.limits, self.seconds = limits or Limits(), seconds
        self._lock, self._closed = threading.Lock(), False
        self._workers: set[_Worker] = set()
        self._idle: list[_Worker] = []
        with suppress(Undecodable):  # the first image need not wait for it, and says why where none starts
            self._idle.append(self._start())

    def decode(
        self, kind: Kind, content: bytes, preprocessing: Preprocessing | None = None, name: str = "the file"
    ) -> Any:
        """Return a decoded image; for a thread, which waits.

        Args:
            kind: "pixels" as `preprocessing` makes them (`Decoded`), or the bytes of a "png" or of a "thumbnail", a
                small JPEG.
            content: the encoded image.
            preprocessing: for "pixels".
            name: what an error calls the image.

        Raises:
            DataError: the image cannot be decoded.
            Undecodable: no process starts.
        """
        worker = self._take()
        try:
            made = worker.ask((kind, content, preprocessing, name), self.seconds)
        except (OSError, EOFError):
            self._end(worker)
            raise DataError(
                f"{name} cannot be decoded: it brings its decoder down. Save it as a plain PNG or JPEG."
            ) from None
        if made is None:
            self._end(worker)
            raise DataError(
                f"{name} takes longer than {self.seconds:g} seconds to decode. Save it as a plain PNG or JPEG."
            )
        with self._lock:
            self._idle.append(worker)  # the last to have worked is the next: its caches are warm
        if isinstance(made, str):
            raise DataError(made)
        return made

    @property
    def pids(self) -> list[int]:
        """The processes that run."""
        with self._lock:
            return [worker.process.pid for worker in self._workers if worker.process.pid is not None]

    def close(self) -> None:
        """Kill every process, whatever it is at."""
        self._closed = True
        with self._lock:
            workers = list(self._workers)
        for worker in workers:
            self._end(worker)

    def _take(self) -> _Worker:
        while True:
            with self._lock:
                worker = self._idle.pop() if self._idle else None
            if worker is None:
                return self._start()
            if worker.process.is_alive():
                return worker
            self._end(worker)  # the system killed it while it was idle

    def _start(self) -> _Worker:
        if self._closed:
            raise Undecodable("The server is stopping.")
        try:
            worker = _Worker(self.limits)
        except (OSError, EOFError) as error:
            raise Undecodable(f"A process that decodes images does not start: {error}") from error
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
    """One process, and the pipe to it."""

    def __init__(self, limits: Limits) -> None:
        context: Any = _Context() if os.name == "posix" else multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, limits), daemon=True)
        self.process.start()
        theirs.close()
        if self.ask(None, _STARTING_SECONDS) is None:
            self.process.kill()
            raise OSError("it says nothing")

    def ask(self, job: object, seconds: float) -> Any:
        """Return what the process answers; None where it takes longer than so many seconds."""
        self.pipe.send(job)
        return self.pipe.recv() if self.pipe.poll(seconds) else None


def _serve(pipe: Connection, limits: Limits) -> None:
    """Answer jobs until the pipe closes: in the process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the server, which ends this process
    return_large_blocks(_KEPT_BYTES)
    _warm()
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):  # what a library prints about a hostile file helps nobody
        os.dup2(nowhere, stream)
    memory = Memory(_KEPT_BYTES)
    _confine(limits.memory)
    with suppress(EOFError, OSError):
        while True:
            job = pipe.recv()
            pipe.send("ready" if job is None else _decoded(limits, *job))
            del job
            if memory.grown:
                memory.give_back()


def _decoded(
    limits: Limits, kind: Kind, content: bytes, preprocessing: Preprocessing | None, name: str
) -> Decoded | bytes | str:
    """Return what is asked for of an image, or the sentence that says what is wrong with it."""
    try:
        if kind == "pixels":
            assert preprocessing is not None
            image = decode(content, limits, name)
            return Decoded(preprocessing(image), *full_size(image))
        # an item's own picture may be larger than what may be uploaded
        image = decode(content, replace(limits, bytes=max(limits.bytes, len(content))), name)
        return to_png(image) if kind == "png" else thumbnail(image)
    except DataError as error:
        return "".join(sign if sign.isprintable() else " " for sign in str(error))[:4096]
    except MemoryError:
        return f"{name} needs more memory to be decoded than an image may take. Save it smaller."


def _warm() -> None:
    """Load what decoding loads on first use: later there may be no room for it."""
    can_open("AVIF"), can_open("HEIF")
    for format in ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP"):
        kept = io.BytesIO()
        Image.new("RGB", (1, 1)).save(kept, format)
        with suppress(DataError):
            decode(kept.getvalue())


def _confine(memory: int) -> None:
    """Let this process take so many bytes more than it has."""
    with suppress(ImportError, OSError, StopIteration):  # Windows; no /proc
        import resource

        lines = Path("/proc/self/status").read_text("ascii").splitlines()
        now = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmSize:"))
        resource.setrlimit(resource.RLIMIT_AS, (now + memory, now + memory))


_main = threading.Lock()


class _Process(ForkServerProcess):
    @staticmethod
    def _Popen(process: Any) -> Any:
        """Start a process that does not run the user's own script again, as multiprocessing would."""
        with _main:
            kept = sys.modules["__main__"]
            sys.modules["__main__"] = ModuleType("__main__")
            try:
                return ForkServerProcess._Popen(process)
            finally:
                sys.modules["__main__"] = kept


class _Context(ForkServerContext):
    """Decoders are forked from one clean process that has loaded Pillow, and so start within milliseconds."""

    Process = _Process

    def __init__(self) -> None:
        self.set_forkserver_preload([__name__])
