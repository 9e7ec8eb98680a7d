"""Which indexes this user built on this machine: by their SHA-256, in the user's data folder."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path

from retrieval.host.files import write_bytes

_MOST = 10_000  # the oldest is forgotten first
_RECORD_BYTES = 2_000_000


def remember(sha256: str) -> None:
    """Note that this user built an index here. Where that cannot be kept, its images need `--images`."""
    from filelock import FileLock

    path = _record()
    with suppress(OSError, NotImplementedError):
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with FileLock(path.with_suffix(".lock"), timeout=10):  # Timeout is an OSError
            known = [one for one in built_here() if one != sha256][1 - _MOST :]
            write_bytes(path, json.dumps([*known, sha256]).encode(), private=True)


def built_here() -> list[str]:
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
    from retrieval.host.trust import record_file

    return record_file().with_name("indexes.json")
