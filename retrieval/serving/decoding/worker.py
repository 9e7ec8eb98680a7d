"""One process that decodes, and the thread that talks with it and replaces it."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
from numpy.typing import NDArray

from retrieval.errors import DataError, RetrievalError
from retrieval.serving.decoding.process import (
    ANSWER,
    BUFFER,
    LONGEST_SENTENCE,
    PNG,
    READY,
    REQUEST,
    SENTENCE,
    THUMBNAIL,
    write,
)
from retrieval.serving.images import Limits, Preprocessing

_STARTING = 60.0
_PIPE = 1 << 20  # bytes: what Linux allows to everyone
_MOMENT = 1.0  # what an image may take outside the slow places
_ABANDONED = 0.2  # what it may still take once nobody waits for it: starting a process anew costs as much
_STARTS = {PNG: b"\x89PNG\r\n\x1a\n", THUMBNAIL: b"\xff\xd8\xff"}
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


class Busy(RetrievalError):
    """Too many images are waiting to be decoded; not the fault of this one."""


class Unstarted(RetrievalError):
    """There is no process to decode with."""


@dataclass(frozen=True)
class Decoded:
    """One decoded image.

    Attributes:
        pixels: uint8 (C, H, W), as `Preprocessing` makes them.
        width: of the image before preprocessing, upright.
        height: likewise.
    """

    pixels: NDArray[np.uint8]
    width: int
    height: int


@dataclass(eq=False)
class Job:
    """One image on its way.

    Attributes:
        preprocessing: what makes pixels of it; None where a PNG or a thumbnail is asked for.
        future: `Decoded`, or a file's bytes. Raises `DataError` for what is wrong with the image, `Busy` when its turn
            did not come.
        begun: when a process was given it, by `time.perf_counter`.
    """

    kind: int
    content: bytes
    name: str
    client: str
    expires: float
    preprocessing: Preprocessing | None = None
    future: Future[Any] = field(default_factory=Future)
    abandoned: bool = False
    begun: float | None = None

    def abandon(self) -> None:
        """Say that nobody waits for the answer any more: it is not begun, or stopped soon."""
        self.abandoned = True
        self.future.cancel()


class Worker(threading.Thread):
    """A process, and the thread that talks with it.

    Args:
        rest: called when it has nothing to do: sooner or later `begin` follows.
        setting: what the process is told, a `Setting` as JSON.
        limits: of images.
        seconds: that one may take.

    Attributes:
        slow: whether its image takes longer than a moment, and has one of the slow places.
    """

    def __init__(
        self,
        rest: Callable[[Worker], None],
        setting: str,
        limits: Limits,
        seconds: float,
    ) -> None:
        super().__init__(name="decode", daemon=True)
        self._rest = rest
        self._limits = limits
        self._seconds = seconds
        self.inbox: SimpleQueue[Job | None] = SimpleQueue()
        self.slow = False
        self._setting = setting
        self._lock = threading.Lock()  # around the process's end and who decides on it
        self._process: subprocess.Popen[bytes] | None = None
        self._job: Job | None = None
        self._since = 0.0
        self._watched: Job | None = None
        self._spent: float | None = None
        self._reason: RetrievalError | None = None
        self._stopped = False

    @property
    def pid(self) -> int | None:
        """Of the process, while it runs."""
        process = self._process
        return None if process is None or process.poll() is not None else process.pid

    def begin(self, job: Job) -> None:
        """Take an image; only when there is nothing else to do."""
        self.inbox.put(job)

    def run(self) -> None:
        """Answer one image after the other until told to stop."""
        answer: Callable[[], None] | None = None
        job: Job | None
        while True:
            if self._process is None:
                with suppress(Unstarted):  # then the next job says so
                    self._have_process()
            self._rest(self)
            if answer is not None:
                answer()  # only now: who asks again at once finds this worker idle
            answer = job = None  # the image and its pixels go now, not with the next one
            job = self.inbox.get()
            if job is None:
                break
            answer = self._do(job)
        self._end()

    def stop(self) -> None:
        """Kill the process and let the thread end, whatever they are at."""
        with self._lock:
            self._stopped = True
            self._kill()
        self.inbox.put(None)

    def watch(self, may_be_slow: bool) -> bool:
        """End the process when its time is over; return whether it takes a slow place now."""
        with self._lock:
            job, taken = self._job, time.monotonic() - self._since
            if self._reason is not None or self._process is None:
                return False
            if job is None:
                if self._since and taken > _STARTING:
                    self._kill()
                return False
            if job.abandoned and taken > _ABANDONED:
                self._give_up(Busy("Nobody waits for this image."))
            elif taken > self._seconds:
                self._give_up(_too_slow(job.name, self._seconds))
            elif not self.slow and self._is_slow(job, taken):
                if may_be_slow:
                    self.slow = True
                    return True
                self._give_up(too_many())
        return False

    def _is_slow(self, job: Job, taken: float) -> bool:
        """Whether an image has had its moment: of CPU time where that is known, since a busy machine is not its fault."""
        spent = _cpu_seconds(self._process.pid) if self._process is not None else None
        if self._watched is not job:
            self._watched, self._spent = job, spent
        if spent is None or self._spent is None:
            return taken > _MOMENT
        return taken > _MOMENT and (spent - self._spent > _MOMENT / 2 or taken > 4 * _MOMENT)

    def _give_up(self, reason: RetrievalError) -> None:
        self._reason = reason
        self._kill()

    def _do(self, job: Job) -> Callable[[], None] | None:
        """Return what gives the answer; None when it was given, since the process ended."""
        if not job.future.set_running_or_notify_cancel():
            return None
        try:
            self._have_process()
        except Unstarted as fault:
            job.future.set_exception(fault)
            return None
        try:
            with self._lock:
                self._job, self._since = job, time.monotonic()
            job.begun = time.perf_counter()
            made = self._ask(job)
        except (OSError, EOFError, ValueError):
            with self._lock:
                reason, self._reason = self._reason, None
                self._job, self._watched, self.slow, self._since = None, None, False, 0.0
            code = self._end()
            job.future.set_exception(reason or _what_ended(code, job, self._seconds))
            return None
        with self._lock:
            # a watch that gave up on it just now has killed the process, and the next job finds it dead
            dead = self._reason is not None
            self._job, self._watched, self.slow, self._since, self._reason = None, None, False, 0.0, None
        if dead:
            self._end()
        if isinstance(made, DataError):
            return partial(job.future.set_exception, made)
        return partial(job.future.set_result, made)

    def _ask(self, job: Job) -> Any:
        """Return what the process makes of the image, or the `DataError` that it found.

        Raises:
            OSError, EOFError: the process ended.
            ValueError: what it answered cannot be.
        """
        name = job.name.encode("utf-8", "backslashreplace")
        told = _told(job.preprocessing)
        assert self._process is not None
        assert self._process.stdin is not None
        head = REQUEST.pack(job.kind, len(name), len(told), len(job.content)) + name + told
        write(self._process.stdin.fileno(), head, job.content)
        kind, width, height, size = ANSWER.unpack(self._read(ANSWER.size))
        if kind == SENTENCE and size <= LONGEST_SENTENCE:
            text = bytes(self._read(size)).decode("utf-8", "replace")
            return DataError("".join(sign if sign.isprintable() else " " for sign in text))
        if kind != job.kind or not width or not height or width * height > self._limits.pixels:
            raise ValueError
        if kind in _STARTS:
            if size > 5 * width * height + 65_536:
                raise ValueError
            content = bytes(self._read(size))
            if not content.startswith(_STARTS[kind]):
                raise ValueError
            return content
        assert job.preprocessing is not None
        shape = job.preprocessing.shape
        if size != math.prod(shape):
            raise ValueError
        return Decoded(np.frombuffer(self._read(size), dtype=np.uint8).reshape(shape), width, height)

    def _have_process(self) -> None:
        if self._process is None or self._process.poll() is not None:
            self._end()
            self._start()

    def _start(self) -> None:
        """Start a process and wait until it is ready.

        Raises:
            Unstarted: it did not start, or not in time.
        """
        try:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "retrieval.serving.decoding.process", self._setting],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                bufsize=BUFFER,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **_ONE_THREAD},
                process_group=0 if os.name == "posix" else None,  # Ctrl-C is for the server, which ends it
            )
            _widen(process)
            with self._lock:
                self._process, self._since = process, time.monotonic()
                if self._stopped:
                    self._kill()
            if ANSWER.unpack(self._read(ANSWER.size)) != (READY, 0, 0, 0):
                raise EOFError
        except (OSError, EOFError) as fault:
            self._end()
            raise Unstarted("The process that decodes images does not start; the log says why.") from fault
        finally:
            self._since = 0.0

    def _kill(self) -> None:
        if self._process is not None and self._process.returncode is None:
            try:
                if os.name == "posix":
                    os.killpg(self._process.pid, signal.SIGKILL)
                else:
                    self._process.kill()
            except OSError:
                self._process.kill()

    def _end(self) -> int:
        """End the process, if there is one, and return its exit code."""
        with self._lock:
            process = self._process
            if process is None:
                return 0
            self._kill()
            self._process = None
        code = process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()
        return code

    def _read(self, size: int) -> bytearray:
        assert self._process is not None
        assert self._process.stdout is not None
        got = bytearray(size)
        if self._process.stdout.readinto(got) < size:  # type: ignore[attr-defined]
            raise EOFError
        return got


@lru_cache(maxsize=16)
def _told(preprocessing: Preprocessing | None) -> bytes:
    """Return what the process is told of what makes pixels: nothing where a file is wanted."""
    return b"" if preprocessing is None else json.dumps(asdict(preprocessing)).encode()


def _widen(process: subprocess.Popen[bytes]) -> None:
    """Have pipes hold a photo, as far as the system lets them: each time that one is full costs two wake-ups."""
    if sys.platform != "linux":
        return
    import fcntl

    for pipe in (process.stdin, process.stdout):
        with suppress(OSError):
            assert pipe is not None
            fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, _PIPE)


def too_many() -> Busy:
    """Return what to say to an image whose turn does not come."""
    return Busy("The server is busy: too many images are waiting. Try again in a moment.")


def _too_slow(name: str, seconds: float) -> DataError:
    return DataError(
        f"{name} takes longer than {seconds:g} seconds to decode. Save it as a plain PNG or JPEG."
    )


def _what_ended(code: int, job: Job, seconds: float) -> RetrievalError:
    """Return what to say about a process that ended by itself, or answered what cannot be."""
    if os.name == "posix" and code == -signal.SIGXCPU:
        return _too_slow(job.name, seconds)
    return DataError(
        f"{job.name} cannot be decoded: it brings its decoder down. Save it as a plain PNG or JPEG."
    )


def _cpu_seconds(pid: int) -> float | None:
    """Return the CPU time that a process has used; None where /proc does not say."""
    try:
        user, system = Path(f"/proc/{pid}/stat").read_text("ascii").rpartition(")")[2].split()[11:13]
        return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, AttributeError):
        return None
