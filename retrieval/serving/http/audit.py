"""The record of changes: a line before and a line after each, synced before the answer leaves.

No change is made whose first line is not on the disk, and none is acknowledged before its second
line is, unless the disk refuses just then, which the server's log says. A first line without a
second is a change that a killed server may or may not have made.
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
_FLAGS = (
    os.O_RDWR | os.O_APPEND | os.O_CREAT | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
)
_REFUSED = (
    "The server cannot record changes now, and so makes none. Its log says why. Try again in a"
    " moment."
)


@dataclass
class Change:
    """A change that a caller asks for.

    Attributes:
        what: "put", "change", "delete" or "snapshot".
        index: its name.
        caller: who asks for it.
        request: the request's id.
        ids: of the items.
        where: the filter in their place.
        count: items that were changed, once they are.
    """

    what: str
    index: str
    caller: Caller
    request: str
    ids: Sequence[str] = ()
    where: Filter | None = None
    count: int | None = None

    def line(self) -> dict[str, Any]:
        """Return what a line says of the change, within bounds."""
        line: dict[str, Any] = {
            "request": self.request,
            "key": self.caller.name or None,
            "role": self.caller.role,
            "address": self.caller.address[:100],
            "index": self.index,
            "what": self.what,
        }
        if self.where is not None:
            line["filter"] = filter_to_text(self.where)[:_MAX_FILTER]
        elif self.what != "snapshot":
            line["ids"] = [id[:_MAX_TEXT] for id in self.ids[:MAX_IDS]]
            line["ids_left_out"] = max(0, len(self.ids) - MAX_IDS)
        return line


class Audit:
    """A file of JSON lines, written by any thread and process; created readable by its owner only.

    Raises:
        RetrievalError: the file cannot be written to.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        try:
            self._file = self._open()
        except OSError as error:
            reason = error.strerror or error
            raise RetrievalError(
                f"The record of changes {path} cannot be written to: {reason}."
            ) from None

    @contextmanager
    def recording(self, change: Change) -> Iterator[None]:
        """Record a change that is made inside the block; for a thread.

        Raises:
            RequestError: 503, the record cannot be written; nothing inside is done then.
        """
        line = change.line()
        if not self._write({**line, "outcome": "begun"}):
            raise RequestError(503, _REFUSED, "audit")
        try:
            yield
        except BaseException as error:
            reason = (
                str(error)[:_MAX_TEXT]
                if isinstance(error, RetrievalError)
                else type(error).__name__
            )
            self._write({**line, "outcome": "failed", "reason": reason})
            raise
        # where the disk refuses this line, the change is made all the same, and its client is told
        # so
        self._write({**line, "outcome": "done", "count": change.count})

    def reopen(self) -> None:
        """Open the file by its name again after a rename; the next change reports a fault."""
        with self._lock, suppress(OSError):
            self._swap()

    def _swap(self) -> None:
        file = self._open()
        os.close(self._file)
        self._file = file

    def _open(self) -> int:
        file = os.open(self._path, _FLAGS, 0o600)
        try:
            state = os.fstat(file)
            if not stat.S_ISREG(state.st_mode):
                raise OSError(errno.EINVAL, "it is not a regular file")
            if state.st_size and os.pread(file, 1, state.st_size - 1) != b"\n":
                os.write(file, b"\n")  # a power cut left a line unfinished
        except OSError:
            os.close(file)
            raise
        return file

    def _write(self, line: dict[str, Any]) -> bool:
        """Append a whole line and sync it, or append nothing, log why, and return False."""
        now = datetime.now(UTC).isoformat(timespec="microseconds")
        text = json.dumps({"time": now, **line}, ensure_ascii=False, separators=(",", ":"))
        content = text.encode("utf-8", "backslashreplace") + b"\n"
        try:
            with self._lock:
                self._append(content)
        except OSError as error:
            log.error("The record of changes %s: %s", self._path, error.strerror or error)
            return False
        return True

    def _append(self, content: bytes) -> None:
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
