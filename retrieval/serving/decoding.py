"""Images of strangers, decoded in processes of their own: each has a deadline and a memory limit, and is replaced.

An image may hang its decoder, crash it or take all memory. Here that costs one process, and the sender gets a
sentence.
"""

from __future__ import annotations

import io
import multiprocessing
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pebble import ProcessExpired, ProcessPool
from PIL import Image

from retrieval.errors import DataError
from retrieval.serving.images import Limits, Preprocessing, can_open, decode, full_size, thumbnail, to_png
from retrieval.serving.memory import return_large_blocks

SECONDS = 5.0
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
    """No process decodes: none starts, or the pool is closed."""


class Decoders:
    """A pool of processes that decode.

    Args:
        workers: images at a time.
        limits: larger images are refused.
        seconds: that one image may take.
    """

    def __init__(self, workers: int, limits: Limits | None = None, seconds: float = SECONDS) -> None:
        self.limits = limits or Limits()
        self.seconds = seconds
        self._workers, self._lock, self._closed = workers, threading.Lock(), False
        self._pool = self._new_pool()

    def _new_pool(self) -> ProcessPool:
        context: Any = _Context() if os.name == "posix" else multiprocessing.get_context("spawn")
        memory = (self.limits.memory,)
        pool = ProcessPool(self._workers, initializer=_begin, initargs=memory, context=context)
        with suppress(Exception):  # whatever starting a process does; `submit` says so
            assert pool.active  # asked for, it starts its processes: not at the first image
        return pool

    def submit(
        self, kind: Kind, content: bytes, preprocessing: Preprocessing | None = None, name: str = "the file"
    ) -> Future[Any]:
        """Begin to decode an image; `result` says what came of it.

        Args:
            kind: "pixels" as `preprocessing` makes them, a "png" of the image, or a "thumbnail", a small JPEG.
            content: the encoded image.
            preprocessing: for "pixels".
            name: what an error calls the image.

        Raises:
            Undecodable: no process starts.
        """
        try:
            with self._lock:
                if not self._pool.active and not self._closed:  # all its processes were killed while idle
                    self._pool = self._new_pool()
            arguments = (kind, content, preprocessing, name, self.limits)
            future: Future[Any] = self._pool.schedule(_decode, args=arguments, timeout=self.seconds)
        except Exception as error:  # pebble raises RuntimeError, and whatever starting a process does
            raise Undecodable(f"The processes that decode images do not run: {error}") from error
        return future

    def result(self, future: Future[Any], name: str = "the file") -> Any:
        """Return the result of a future that is done: `Decoded`, or a file's bytes.

        Raises:
            DataError: the image cannot be decoded.
            Undecodable: no process decodes.
        """
        try:
            made = future.result(0)
        except TimeoutError:
            raise DataError(
                f"{name} takes longer than {self.seconds:g} seconds to decode. Save it as a plain PNG or JPEG."
            ) from None
        except ProcessExpired:
            raise DataError(
                f"{name} cannot be decoded: it brings its decoder down. Save it as a plain PNG or JPEG."
            ) from None
        except Exception as error:
            raise Undecodable(f"The processes that decode images do not run: {error}") from error
        if isinstance(made, str):
            raise DataError(made)
        return made

    @property
    def pids(self) -> list[int]:
        """The processes that run."""
        workers: dict[int, Any] = dict(self._pool._pool_manager.worker_manager.workers)
        return list(workers)

    def close(self) -> None:
        """Kill every process, whatever it is at."""
        self._closed = True
        self._pool.stop()
        with suppress(TimeoutError):
            self._pool.join(1.0)


def _begin(memory: int) -> None:
    """Prepare a process: its memory is bounded, and what libraries print about a hostile file goes nowhere."""
    return_large_blocks(_KEPT_BYTES)
    _warm()
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):
        os.dup2(nowhere, stream)
    with suppress(ImportError):  # Windows
        import resource

        now = _status("VmSize")
        if now:
            resource.setrlimit(resource.RLIMIT_AS, (now + memory, now + memory))


def _status(field: str) -> int:
    """Return a line of /proc/self/status in bytes; 0 where there is none."""
    with suppress(OSError, StopIteration):
        lines = Path("/proc/self/status").read_text("ascii").splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))
    return 0


def _decode(
    kind: Kind, content: bytes, preprocessing: Preprocessing | None, name: str, limits: Limits
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


_main = threading.Lock()


class _Process(ForkServerProcess):
    @staticmethod
    def _Popen(process: Any) -> Any:
        """Start a process that does not run the user's own script again, as multiprocessing would."""
        with _main:
            kept = sys.modules["__main__"]
            sys.modules["__main__"] = ModuleType("__main__")
            try:
                return ForkServerProcess._Popen(process)  # type: ignore[attr-defined]
            finally:
                sys.modules["__main__"] = kept


class _Context(ForkServerContext):
    """Decoders are forked from one clean process that has loaded Pillow, and so start within milliseconds."""

    Process: Callable[..., Any] = _Process  # type: ignore[assignment]

    def __init__(self) -> None:
        self.set_forkserver_preload([__name__])
