"""The record of changes: a line before each and a line after, both on the disk before the answer leaves.

What it promises: no change is made whose first line is not on the disk, and none is acknowledged before its second line was written there, unless the disk refused just
then, which the server's log says. A first line without a second is a change that a killed server may or may not have made.
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
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from retrieval.errors import RetrievalError
from retrieval.serving.filters import Filter, filter_to_text
from retrieval.serving.http.access.roles import Caller
from retrieval.serving.http.errors import RequestError

log = logging.getLogger("retrieval.serving.http")

MOST_IDS = 100  # of a line
_LONGEST = 1000  # characters of an id or a reason
_FILTER = 4000  # of a filter
_FLAGS = os.O_RDWR | os.O_APPEND | os.O_CREAT | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
_REFUSED = "The server cannot record changes now, and so makes none. Its log says why. Try again in a moment."


@dataclass(frozen=True)
class Author:
    """Whose request is being answered, and its id."""

    caller: Caller
    request: str


author: ContextVar[Author | None] = ContextVar("author", default=None)
"""Of the request that this task answers."""


@dataclass(frozen=True)
class Change:
    """What is to be changed.

    Attributes:
        what: "put", "delete" or "snapshot".
        index: its name.
        ids: of the items.
        where: the filter in their place.
        by: whose request it is.
    """

    what: str
    index: str
    ids: Sequence[str] = ()
    where: Filter | None = None
    by: Author | None = None

    def said(self) -> dict[str, Any]:
        """Return what a line says of it, within bounds."""
        caller = None if self.by is None else self.by.caller
        said: dict[str, Any] = {
            "request": None if self.by is None else self.by.request,
            "key": (caller.name or None) if caller else None,
            "role": caller.role if caller else None,
            "address": caller.address[:100] if caller else None,
            "index": self.index,
            "what": self.what,
        }
        if self.where is not None:
            said["filter"] = filter_to_text(self.where)[:_FILTER]
        elif self.what != "snapshot":
            said["ids"] = [id[:_LONGEST] for id in self.ids[:MOST_IDS]]
            said["ids_left_out"] = max(0, len(self.ids) - MOST_IDS)
        return said


@dataclass
class Outcome:
    """How a change ended; `count` is set by whoever makes it."""

    count: int | None = None


class Audit:
    """A file of JSON lines, written by any thread.

    Args:
        path: made where there is none, for its owner only.

    Raises:
        RetrievalError: it cannot be written to.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        try:
            self._file = self._open()
        except OSError as fault:
            raise RetrievalError(
                f"The record of changes {path} cannot be written to: {fault.strerror or fault}."
            ) from None

    @contextmanager
    def change(self, change: Change) -> Iterator[Outcome]:
        """Record a change that is made inside; for a thread.

        Raises:
            RequestError: 503, the record cannot be written; nothing inside is done then.
        """
        said, outcome = change.said(), Outcome()
        try:
            self._write({**said, "outcome": "begun"})
        except OSError as fault:
            log.error("The record of changes %s: %s", self._path, fault.strerror or fault)
            raise RequestError(503, _REFUSED, "audit") from None
        try:
            yield outcome
        except BaseException as fault:
            reason = str(fault)[:_LONGEST] if isinstance(fault, RetrievalError) else type(fault).__name__
            self._ended({**said, "outcome": "failed", "reason": reason})
            raise
        self._ended({**said, "outcome": "done", "count": outcome.count})

    def again(self) -> None:
        """Open the file by its name again, after it was renamed; a fault is the next change's."""
        with self._lock, suppress(OSError):
            made = self._open()
            os.close(self._file)
            self._file = made

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            os.close(self._file)

    def _open(self) -> int:
        handle = os.open(self._path, _FLAGS, 0o600)
        try:
            known = os.fstat(handle)
            if not stat.S_ISREG(known.st_mode):
                raise OSError(errno.EINVAL, "it is not a regular file")
            if known.st_size and os.pread(handle, 1, known.st_size - 1) != b"\n":
                os.write(handle, b"\n")  # a line that a power cut left unfinished
        except OSError:
            os.close(handle)
            raise
        return handle

    def _ended(self, said: dict[str, Any]) -> None:
        try:
            self._write(said)
        except OSError as fault:  # the change is made: its client is told so
            log.error("The record of changes %s: %s", self._path, fault.strerror or fault)

    def _write(self, said: dict[str, Any]) -> None:
        """Append a line whole and synced, or not at all.

        Raises:
            OSError: the disk refuses.
        """
        now = datetime.now(UTC).isoformat(timespec="microseconds")
        line = json.dumps({"time": now, **said}, ensure_ascii=False, separators=(",", ":"))
        content = line.encode("utf-8", "backslashreplace") + b"\n"
        with self._lock:
            known = os.fstat(self._file)
            if not known.st_nlink:  # rotated, and removed since
                made = self._open()
                os.close(self._file)
                self._file, known = made, os.fstat(made)
            try:
                if os.write(self._file, content) < len(content):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                os.fsync(self._file)
            except OSError:
                with suppress(OSError):
                    os.ftruncate(self._file, known.st_size)
                raise


@contextmanager
def recorded(audit: Audit | None, change: Change) -> Iterator[Outcome]:
    """Record a change where there is a record; see `Audit.change`."""
    if audit is None:
        yield Outcome()
        return
    with audit.change(change) as outcome:
        yield outcome
