"""The record of changes: a file with one line before and one line after each change.

The first line is on the disk before the change is made, and the second before the response is
sent. A first line without a second has one of three causes:

- The change is under way.
- The second line could not be written. The server logs this as an error.
- The server was killed, and may or may not have made the change.
"""

from __future__ import annotations

import errno
import logging
import os
import stat
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from fcntl import LOCK_EX, flock
from pathlib import Path
from typing import Any
from uuid import UUID

from retrieval.errors import RetrievalError, printable_json
from retrieval.store.filters import Filter, filter_to_text

log = logging.getLogger(__name__)

MAX_IDS = 100
"""Maximum number of ids in one line."""

_MAX_TEXT = 1000
_MAX_FILTER = 4000
_FLAGS = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK  # opening a pipe does not wait


class AuditUnavailable(RetrievalError):
    """Raised if a change cannot be recorded, and is therefore not made."""


def new_request_id(trace: str = "") -> str:
    """Return a request id: a URN of the W3C trace id, or of a random number without one."""
    return UUID(trace or os.urandom(16).hex()).urn


@dataclass
class Change:
    """A change that a request or a command asks for.

    Attributes:
        what: "put", "change", "delete" or "snapshot", or the verb of `retrieval index`.
        index: name of the index.
        request: id of the request, see `new_request_id`.
        key: name of the sender's API key; empty without a key.
        role: the sender's role; `None` for the command line.
        address: IP address of the sender, or the name of the machine that runs the command.
        ids: ids of the items.
        filter: filter that selects the items, instead of `ids`.
        count: number of changed items, set after the change.
        command: of a change by the command line: the user, the path of the index and the command.
    """

    what: str
    index: str
    request: str
    key: str
    role: str | None
    address: str
    ids: Sequence[str] = ()
    filter: Filter | None = None
    count: int | None = None
    command: Mapping[str, str] | None = None

    def line(self) -> dict[str, Any]:
        """Return what both lines of the change contain; long texts and lists are cut."""
        line: dict[str, Any] = {
            "request": self.request,
            "key": self.key or None,
            "role": self.role,
            "address": self.address[:100],
            "index": self.index,
            "what": self.what,
        }
        if self.command is not None:
            line |= {name: text[:_MAX_FILTER] for name, text in self.command.items()}
        if self.filter is not None:
            line["filter"] = filter_to_text(self.filter)[:_MAX_FILTER]
        elif self.ids:
            line["ids"] = [id[:_MAX_TEXT] for id in self.ids[:MAX_IDS]]
            line["ids_left_out"] = max(0, len(self.ids) - MAX_IDS)
        return line


class Audit:
    """The file of changes: JSON lines that only the file's owner can read.

    Several threads and processes can write to the file. It is opened for each line, so it can be
    renamed or deleted at any time to rotate it.

    Raises:
        RetrievalError: the file cannot be written to.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        try:
            self._append(b"")
        except OSError as error:
            reason = error.strerror or error
            raise RetrievalError(
                f"The record of changes {path} cannot be written to: {reason}."
            ) from None

    @contextmanager
    def recording(self, change: Change) -> Iterator[None]:
        """Context manager that records the change that its block makes.

        Use this in a thread, because it waits for the disk.

        Raises:
            AuditUnavailable: the first line cannot be written; the block then does not run.
        """
        line = change.line()
        if not self._write({**line, "outcome": "begun"}):
            raise AuditUnavailable(
                "The record of changes cannot be written, so nothing is changed. The log says why."
                " Try again in a moment."
            )
        try:
            yield
        except BaseException as error:
            if isinstance(error, RetrievalError):
                reason = str(error)[:_MAX_TEXT]
            else:
                reason = type(error).__name__
            self._write({**line, "outcome": "failed", "reason": reason})
            raise
        # The client gets a success even if this line cannot be written.
        self._write({**line, "outcome": "done", "count": change.count})

    def _write(self, line: dict[str, Any]) -> bool:
        """Append a line, sync it and return True; on failure log the reason and return False."""
        now = datetime.now(UTC).isoformat(timespec="microseconds")
        text = printable_json({"time": now, **line}, separators=(",", ":"))
        try:
            with self._lock:
                self._append(text.encode() + b"\n")
        except OSError as error:
            reason = error.strerror or error
            log.error("The record of changes %s cannot be written: %s", self._path, reason)
            return False
        return True

    def _append(self, content: bytes) -> None:
        """Append to the file and sync it; on failure, leave the file as it was."""
        file = os.open(self._path, _FLAGS, 0o600)
        try:
            if not stat.S_ISREG(os.fstat(file).st_mode):
                raise OSError(errno.EINVAL, "it is not a regular file")
            # Without this lock, cutting off a failed line could cut off another process's line.
            with suppress(OSError):  # some file systems have no locks
                flock(file, LOCK_EX)
            size = os.fstat(file).st_size
            if size and os.pread(file, 1, size - 1) != b"\n":
                content = b"\n" + content  # a power cut left the last line incomplete
            try:
                if os.write(file, content) < len(content):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                os.fsync(file)
            except OSError:
                with suppress(OSError):
                    os.ftruncate(file, size)
                raise
        finally:
            os.close(file)
