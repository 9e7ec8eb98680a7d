"""Which originals of an index may be shown: an index names files of this machine, and may be a stranger's."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from retrieval.errors import StoreError
from retrieval.index.items import Item
from retrieval.index.store import Index

_MOST = 10_000  # indexes that are remembered; the oldest is forgotten first
_RECORD_BYTES = 2_000_000


class Gallery:
    """Gives an index's items, with the path of the original only where it may be shown.

    What may: every file that the index names, if this user built exactly this index on this machine; files in folders that
    the operator names, in any case. A link counts as what it leads to.

    Args:
        index: the opened index.
        folders: whose files may be shown.

    Raises:
        StoreError: a folder that is none.

    Attributes:
        own: whether this user built the index here.
        gives: whether any file may be shown.
    """

    def __init__(self, index: Index, folders: Sequence[Path] = ()) -> None:
        for folder in folders:
            if not folder.is_dir():
                raise StoreError(f"--images {folder}: there is no such folder.")
        self._index = index
        self._folders = [Path(os.path.realpath(folder)) for folder in folders]
        self.own = index.sha256 in _built()
        self.gives = self.own or bool(folders)

    def item(self, number: int) -> Item | None:
        """Return an item by its id, or None; its `path` leads to the file itself, through no link. May wait for the disk.

        Raises:
            StoreError: its original may not be shown.
        """
        item = self._index.item(number)
        if item is None or item.path is None:
            return item
        real = Path(os.path.realpath(item.path))
        if not self.own and not any(real.is_relative_to(folder) for folder in self._folders):
            raise StoreError(f"The image of item {number} is in no folder that may be shown.")
        return replace(item, path=real)

    @property
    def note(self) -> str | None:
        """How to have images shown, where none are."""
        if self.gives:
            return None
        return (
            "Images of items are not shown: this index was not built here by this user. "
            "Name the folders whose files may be: --images FOLDER."
        )


def remember(sha256: str) -> None:
    """Note that this user built an index here. Where that cannot be kept, its images need `--images`."""
    from filelock import FileLock

    path = _record()
    with suppress(OSError, NotImplementedError):
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with FileLock(path.with_suffix(".lock"), timeout=10):  # Timeout is an OSError
            known = [one for one in _built() if one != sha256][1 - _MOST :]
            descriptor, temporary = tempfile.mkstemp(prefix=".built-", dir=path.parent)  # made with mode 600
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                json.dump([*known, sha256], file)
            Path(temporary).replace(path)


def _built() -> list[str]:
    """Return the SHA-256 of indexes that this user built here; none where others may write the record."""
    try:
        with _record().open("rb") as file:
            status = os.fstat(file.fileno())
            if hasattr(os, "getuid") and (status.st_uid != os.getuid() or status.st_mode & 0o022):
                return []
            known = json.loads(file.read(_RECORD_BYTES))
    except (OSError, ValueError, RecursionError):
        return []
    return [one for one in known if isinstance(one, str)] if isinstance(known, list) else []


def _record() -> Path:
    from retrieval.trust import record_file

    return record_file().with_name("indexes.json")
