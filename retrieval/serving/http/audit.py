"""The record of changes: a line before each and a line after, both on the disk before the answer leaves.

No change is made whose first line is not on the disk, and none is acknowledged before its second line is, unless the
disk refuses just then, which the server's log says. A first line without a second is a change that a killed server
may or may not have made.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import stat
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from retrieval.errors import RetrievalError
from retrieval.serving.filters import Filter, filter_to_text
from retrieval.serving.http.access import Caller
from retrieval.serving.http.problems import RequestError

log = logging.getLogger("retrieval.serving.http")

MAX_IDS = 100
"""Ids in one line."""

_MAX_TEXT = 1000
_MAX_FILTER = 4000
_FLAGS = os.O_RDWR | os.O_APPEND | os.O_CREAT | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
_REFUSED = "The server cannot record changes now, and so makes none. Its log says why. Try again in a moment."


@dataclass(frozen=True)
class Change:
    """A change that somebody asks for.

    Attributes:
        what: "put", "change", "delete" or "snapshot".
        index: its name.
        caller: who asks for it.
        request: the request's id.
        ids: of the items.
        where: the filter in their place.
    """

    what: str
    index: str
    caller: Caller
    request: str
    ids: Sequence[str] = ()
    where: Filter | None = None

    def members(self) -> dict[str, Any]:
        """Return what a line says of the change, within bounds."""
        found: dict[str, Any] = {
            "request": self.request,
            "key": self.caller.name or None,
            "role": self.caller.role,
            "address": self.caller.address[:100],
            "index": self.index,
            "what": self.what,
        }
        if self.where is not None:
            found["filter"] = filter_to_text(self.where)[:_MAX_FILTER]
        elif self.what != "snapshot":
            found["ids"] = [id[:_MAX_TEXT] for id in self.ids[:MAX_IDS]]
            found["ids_left_out"] = max(0, len(self.ids) - MAX_IDS)
        return found


@dataclass
class Outcome:
    """How a change ended; whoever makes it sets `count`."""

    count: int | None = None


class Audit:
    """A file of JSON lines, written by any thread and any process.

    Args:
        path: made where there is none, for its owner only.

    Raises:
        RetrievalError: the file cannot be written to.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        try:
            self._file = self._open()
        except OSError as error:
            raise RetrievalError(
                f"The record of changes {path} cannot be written to: {error.strerror or error}."
            ) from None

    @contextmanager
    def recording(self, change: Change) -> Iterator[Outcome]:
        """Record a change that is made inside the block; for a thread.

        Raises:
            RequestError: 503, the record cannot be written; nothing inside is done then.
        """
        said, outcome = change.members(), Outcome()
        try:
            self._write({**said, "outcome": "begun"})
        except OSError as error:
            log.error("The record of changes %s: %s", self._path, error.strerror or error)
            raise RequestError(503, _REFUSED, "audit") from None
        try:
            yield outcome
        except BaseException as error:
            reason = str(error)[:_MAX_TEXT] if isinstance(error, RetrievalError) else type(error).__name__
            self._ended({**said, "outcome": "failed", "reason": reason})
            raise
        self._ended({**said, "outcome": "done", "count": outcome.count})

    def reopen(self) -> None:
        """Open the file by its name again, after it was renamed; the next change reports a fault."""
        with self._lock, suppress(OSError):
            self._swap()

    def _swap(self) -> None:
        made = self._open()
        os.close(self._file)
        self._file = made

    def _open(self) -> int:
        handle = os.open(self._path, _FLAGS, 0o600)
        try:
            known = os.fstat(handle)
            if not stat.S_ISREG(known.st_mode):
                raise OSError(errno.EINVAL, "it is not a regular file")
            if known.st_size and os.pread(handle, 1, known.st_size - 1) != b"\n":
                os.write(handle, b"\n")  # a power cut left a line unfinished
        except OSError:
            os.close(handle)
            raise
        return handle

    def _ended(self, said: dict[str, Any]) -> None:
        try:
            self._write(said)
        except OSError as error:  # the change is made, and its client is told so
            log.error("The record of changes %s: %s", self._path, error.strerror or error)

    def _write(self, said: dict[str, Any]) -> None:
        """Append a whole line and sync it, or append nothing.

        Raises:
            OSError: the disk refuses.
        """
        now = datetime.now(UTC).isoformat(timespec="microseconds")
        line = json.dumps({"time": now, **said}, ensure_ascii=False, separators=(",", ":"))
        content = line.encode("utf-8", "backslashreplace") + b"\n"
        with self._lock:
            if not os.fstat(self._file).st_nlink:  # rotated, and removed since
                self._swap()
            size = os.fstat(self._file).st_size
            try:
                if os.write(self._file, content) < len(content):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                os.fsync(self._file)
            except OSError:
                with suppress(OSError):
                    os.ftruncate(self._file, size)
                raise
