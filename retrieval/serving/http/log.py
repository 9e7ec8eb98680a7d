"""The server's log: one line an event or a request, as text or JSON, and few lines a second, whatever is sent."""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any, Literal, TextIO

from retrieval.errors import printable
from retrieval.serving.stages import current

Format = Literal["text", "json"]

_LINES = 20  # at once
_PER_SECOND = 1.0  # after that
_LONGEST = 500
_KEPT = 10_000  # lines that wait for whatever reads standard error
_PAUSE = (
    0.25  # seconds between two writes of requests' lines: waking a thread for each costs more than the line
)
_WHOLE = 4096  # bytes that a pipe takes at once: several processes may write to one, and no line comes into another
_ENCODE = json.JSONEncoder(separators=(",", ":")).encode
_NAMES = ("retrieval.serving.http", "uvicorn.error", "asyncio")


class Bucket:
    """Lets some lines pass at once, then so many a second; counts the others.

    Args:
        burst: how many at once.
        per_second: after that.
    """

    def __init__(self, burst: float, per_second: float) -> None:
        self._burst, self._per_second = burst, per_second
        self._left = burst
        self._last = time.monotonic()
        self._dropped = 0

    def open(self) -> bool:
        """Whether a line may pass now; one that may not counts as left out."""
        now = time.monotonic()
        self._left = min(self._burst, self._left + (now - self._last) * self._per_second)
        self._last = now
        if self._left < 1:
            self._dropped += 1
            return False
        return True

    def take(self) -> int | None:
        """Return how many lines were left out before this one; None when it is to be left out too."""
        if not self.open():
            return None
        self._left -= 1
        dropped, self._dropped = self._dropped, 0
        return dropped


class FewLines(logging.Filter):
    """Lets a burst of lines pass, then one a second; says how many were left out.

    Args:
        debug: whether tracebacks are kept.
    """

    def __init__(self, debug: bool = False) -> None:
        super().__init__()
        self._debug = debug
        self._bucket = Bucket(_LINES, _PER_SECOND)

    def filter(self, record: logging.LogRecord) -> bool:
        """Shorten a line, or leave it out."""
        dropped = self._bucket.take()
        if dropped is None:
            return False
        text = " ".join(record.getMessage().split())
        if record.exc_info and not self._debug:
            text = f"{text}: {record.exc_info[0].__name__}" if record.exc_info[0] else text
            record.exc_info = None
        text = text[:_LONGEST]
        if dropped:
            text += f" ({dropped:,} lines left out before this one)"
        record.msg, record.args = text, ()
        return True


class Lines:
    """Writes lines from a thread of its own, so that nobody waits for what reads them; beyond some that wait they are dropped.

    Args:
        stream: where to.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream if stream is not None else sys.stderr
        self._lines: deque[str] = deque()
        self._wake = threading.Event()
        self._writing = threading.Lock()
        self._ended = False
        self._thread = threading.Thread(target=self._run, name="log", daemon=True)
        self._thread.start()

    def add(self, line: str, *, now: bool = False) -> None:
        """Write a line soon, or now."""
        if len(self._lines) < _KEPT:
            self._lines.append(line)
        if now:
            self._wake.set()

    def _run(self) -> None:
        while not self._ended:
            self._wake.wait(_PAUSE)
            self._wake.clear()
            self._write()

    def _write(self) -> None:
        with self._writing:
            lines = [self._lines.popleft() for _ in range(len(self._lines))]
            if not lines:
                return
            with suppress(OSError, ValueError):  # nobody reads it any more
                if self._stream is sys.__stderr__ and self._stream is not None:
                    # past the stream's own lock, which would hold up the end of the process while nobody reads
                    for block in _blocks(lines):
                        rest = memoryview(block)
                        while rest:
                            rest = rest[os.write(self._stream.fileno(), rest) :]
                else:
                    self._stream.write("".join(f"{line}\n" for line in lines))
                    self._stream.flush()

    def close(self, seconds: float = 0.5) -> None:
        """Write what is left, within some time."""
        self._ended = True
        self._wake.set()
        self._thread.join(seconds)
        if not self._thread.is_alive():
            self._write()


def _blocks(lines: list[str]) -> Iterator[bytes]:
    """Give lines in blocks that are written at once, of which each holds whole ones."""
    block = b""
    for line in lines:
        content = f"{line}\n".encode("utf-8", "backslashreplace")
        if block and len(block) + len(content) > _WHOLE:
            yield block
            block = b""
        block += content
    yield block


class Log:
    """What the server writes, in one of two formats.

    Args:
        form: "text" for people, "json" for programs.
        debug: whether it holds tracebacks.
        per_second: lines about requests that were answered; refused ones have few, as events do.
        stream: where to; standard error by default.
        process: number of this process, which each line then has; None where there is but one.
    """

    def __init__(
        self,
        form: Format = "text",
        debug: bool = False,
        per_second: int = 200,
        stream: TextIO | None = None,
        process: int | None = None,
    ) -> None:
        self._json, self._process = form == "json", process
        self.lines = Lines(stream)
        self._good = Bucket(max(per_second, 2 * _LINES), per_second)
        self._bad = Bucket(_LINES, _PER_SECOND)
        handler = _Handler(self.lines, self._json, process)
        handler.addFilter(FewLines(debug))
        for name in _NAMES:
            logger = logging.getLogger(name)
            logger.handlers = [handler]
            logger.propagate = False
            logger.setLevel(logging.WARNING)
        logging.getLogger("uvicorn.access").propagate = False
        for name in ("python_multipart", "python_multipart.multipart"):  # its sentence is in the answer
            logging.getLogger(name).setLevel(logging.CRITICAL + 1)

    def room(self, *, good: bool) -> bool:
        """Whether there is room for a line about a request, which is made only then; see `request`. Where there is none, it counts as left out."""
        return (self._good if good else self._bad).open()

    def request(self, said: Mapping[str, Any], *, good: bool) -> None:
        """Write a line about a request that is over, if there is room for it.

        Args:
            said: what is known of it, by name; "stages" are milliseconds by name. What has no value is left out.
            good: whether it was answered, and not refused.
        """
        dropped = (self._good if good else self._bad).take()
        if dropped is None:
            return
        known = {name: value for name, value in said.items() if value not in (None, "", {})}
        if dropped:
            known["left_out"] = dropped
        if self._process is not None:
            known["process"] = self._process
        self.lines.add(_as_json("INFO", known) if self._json else _as_text(known))

    def close(self) -> None:
        """Write what is left."""
        self.lines.close()


class _Handler(logging.Handler):
    """Sends the standard library's records to the same lines."""

    def __init__(self, lines: Lines, as_json: bool, process: int | None) -> None:
        super().__init__()
        self._lines, self._as_json, self._process = lines, as_json, process
        self.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        """Write one; with the id of the request that it is about, if it is."""
        trail = current()
        text = self.format(record)
        if self._as_json:
            said: dict[str, Any] = {"message": record.getMessage(), "logger": record.name}
            if record.exc_info and self.formatter is not None:
                said["traceback"] = self.formatter.formatException(record.exc_info)
            if trail is not None:
                said["request_id"] = trail.id
            if self._process is not None:
                said["process"] = self._process
            text = _as_json(record.levelname, said)
        else:
            about = [] if trail is None else [f"request {trail.id}"]
            about += [] if self._process is None else [f"process {self._process}"]
            text = printable(text) + (f" ({', '.join(about)})" if about else "")
        self._lines.add(text, now=True)


def _as_json(level: str, said: Mapping[str, Any]) -> str:
    now = datetime.now(UTC).isoformat(timespec="milliseconds")
    return _ENCODE({"time": now, "level": level, **said})


def _as_text(said: Mapping[str, Any]) -> str:
    """Return `time INFO POST /v1/search 200 took=3.1 …`; what could end the line or act on a terminal is escaped."""
    now = datetime.now().isoformat(" ", "milliseconds").replace(".", ",")
    head = [str(said.get(name, "-")) for name in ("method", "route", "status")]
    rest = [
        f"{name}={_plain(value)}"
        for name, value in said.items()
        if name not in ("method", "route", "status", "stages")
    ]
    stages = [f"{name}={took}" for name, took in said.get("stages", {}).items()]
    return printable(" ".join([now, "INFO", *head, *rest, *stages]))


def _plain(value: Any) -> str:
    text = str(value)
    return text if text.isprintable() and " " not in text else json.dumps(text)
