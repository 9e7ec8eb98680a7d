"""The keys that a server knows now: read again when their file changes, and kept when the new file is broken."""

from __future__ import annotations

import asyncio
import logging
import os
from pathlib import Path

from retrieval.errors import RetrievalError
from retrieval.serving.http.access.key_file import parse_keys, read_keys
from retrieval.serving.http.access.keys import Keys
from retrieval.serving.http.pool import Pool

log = logging.getLogger("retrieval.serving.http")

VARIABLE = "RETRIEVAL_KEYS"
_LOOK = 0.5  # seconds

_Stamp = tuple[int, int, int, int]


class KeySource:
    """Keys from a file, or from a text such as an environment variable.

    Args:
        path: the file.
        text: in its place.

    Attributes:
        keys: those that are known now.

    Raises:
        RetrievalError: the file cannot be used.
    """

    def __init__(self, path: Path | None, text: str = "") -> None:
        self.path = path
        self._read = self._seen = None if path is None else _stamp(path)
        self.keys: Keys = parse_keys(text.encode(), VARIABLE) if path is None else read_keys(path)

    def look(self) -> None:
        """Read the file again if it has changed, and twice in a row was the same: it is no longer being written. For a thread.

        A broken one changes nothing, and the log says what is wrong.
        """
        if self.path is None:
            return
        before, self._seen = self._seen, _stamp(self.path)
        if self._seen != before or self._seen == self._read:
            return
        self._read = self._seen
        try:
            self.keys = read_keys(self.path)
        except RetrievalError as fault:
            log.warning("The keys stay as they were. %s", fault)
        else:
            log.warning("Read %s again; it has %s.", self.path, _counted(self.keys))

    def again(self) -> None:
        """Have the next look read the file, changed or not."""
        self._read = None

    async def watch(self) -> None:
        """Look, for ever."""
        pool = Pool("keys", 1, 4)  # of its own: the storage may hang
        while True:
            await asyncio.sleep(_LOOK)
            await pool.run(lambda job: self.look())


def key_source(path: Path | None) -> KeySource | None:
    """Return where keys come from: a file, or what the environment variable RETRIEVAL_KEYS says, a file's path or its text, or nowhere.

    Raises:
        RetrievalError: both are given, or what is given cannot be used.
    """
    text = os.environ.get(VARIABLE, "")
    if path is not None and text:
        raise RetrievalError(
            f"Keys are given twice: by --keys and by the environment variable {VARIABLE}. Give one of them."
        )
    if text and not text.lstrip().startswith(("{", "#")):
        path = Path(text)
    return KeySource(path, text) if path is not None or text else None


def _stamp(path: Path) -> _Stamp | None:
    """Return what changes when the file does; None where there is none."""
    try:
        known = path.stat()
    except OSError:
        return None
    return known.st_dev, known.st_ino, known.st_size, known.st_mtime_ns


def _counted(keys: Keys) -> str:
    return "1 key" if len(keys) == 1 else f"{len(keys):,} keys"
