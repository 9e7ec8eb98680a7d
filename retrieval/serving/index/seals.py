"""Which originals of a living index this user named: an item's seal, which only this user's key makes.

An index names files of the machine that it lies on, and may be a stranger's, or a copy that a stranger altered. So that a server shows
no other file than those that its user had embedded, each item that comes from a file carries a seal: an HMAC of the index's id
and the file's path, with a key that never leaves the user's data folder. It goes with the item through copies, snapshots and
migrations, and is worth nothing on another item, in another index, or to another user.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import secrets
import stat
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from retrieval.host.files import write_bytes
from retrieval.serving.store.contract import Item

_SEALED = re.compile(r" ?sealed [0-9a-f]{32}$")
_KEY_BYTES = 32
_SEAL_DIGITS = 32


class Seals:
    """Makes and knows the seals of one index.

    Args:
        index: the index's id.
        create: whether to make the user's key where there is none.
    """

    def __init__(self, index: str, *, create: bool = False) -> None:
        self._index = index
        self._key = _key() or (_new_key() if create else None)

    def stamp(self, stamp: str | None, path: Path | None) -> str | None:
        """Return an item's stamp with the seal of its path; where no key can be kept, without one."""
        seal = self._seal(path)
        return plain(stamp) if seal is None else f"{plain(stamp) or ''} sealed {seal}".lstrip()

    def sealed(self, item: Item) -> Item:
        """Return an item whose file this user names."""
        return replace(item, stamp=self.stamp(item.stamp, item.path))

    def hold(self, stamp: str | None, path: Path | None) -> bool:
        """Whether this user named the file of an item."""
        seal = self._seal(path)
        given = (stamp or "").encode("utf-8", "replace")[-_SEAL_DIGITS:]
        return seal is not None and hmac.compare_digest(given, seal.encode())

    def _seal(self, path: Path | None) -> str | None:
        if self._key is None or path is None or not path.is_absolute():
            return None
        text = f"{len(self._index)} {self._index} ".encode() + os.fsencode(path)
        return hmac.new(self._key, text, hashlib.sha256).hexdigest()[:_SEAL_DIGITS]


def plain(stamp: str | None) -> str | None:
    """Return a stamp without its seal."""
    return (_SEALED.sub("", stamp) or None) if stamp else stamp


def _key() -> bytes | None:
    """Return this user's key; None where there is none, or others may read or write it."""
    try:
        with _file().open("rb") as file:
            status = os.fstat(file.fileno())
            if hasattr(os, "getuid") and (
                status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) & 0o077
            ):
                return None
            key = file.read(_KEY_BYTES + 1)
    except OSError:
        return None
    return key if len(key) == _KEY_BYTES else None


def _new_key() -> bytes | None:
    """Make this user's key, unless another process has just done so."""
    from filelock import FileLock

    path = _file()
    with suppress(OSError, NotImplementedError):
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with FileLock(path.with_suffix(".lock"), timeout=10):  # Timeout is an OSError
            if _key() is None:
                write_bytes(path, secrets.token_bytes(_KEY_BYTES), private=True)
    return _key()


def _file() -> Path:
    from retrieval.host.trust import record_file

    return record_file().with_name("seals.key")
