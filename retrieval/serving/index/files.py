"""Folders that appear whole or not at all, and checksums that notice every altered bit."""

from __future__ import annotations

import errno
import hashlib
import re
import sqlite3
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from retrieval.errors import StoreError
from retrieval.host.files import rename_whole, sync_below
from retrieval.serving.files.places import instead
from retrieval.serving.files.snapshot import Held, Snapshot, Unusable, close_all, hold_all

SUMS = "SHA256SUMS"
_SUMS_BYTES = 1_000_000
_LINE = re.compile(r"([0-9a-f]{64})  ([^\x00-\x1f]+)")


@contextmanager
def storage_errors(output: Path) -> Iterator[None]:
    """Turn what the disk refuses into a sentence.

    Raises:
        StoreError: in place of an OSError or SQLite's own error while writing.
    """
    try:
        yield
    except (OSError, sqlite3.Error) as fault:
        code = getattr(fault, "errno", None)
        full = isinstance(fault, sqlite3.Error) and "full" in str(fault)
        if full or code in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            reason = "the disk is full (or a quota or limit on file sizes is reached). Free some space and try again"
        else:
            reason = str(getattr(fault, "strerror", None) or fault).rstrip(".")
        raise StoreError(
            f"The index {output} cannot be written: {reason}. Nothing was left behind."
        ) from fault


def files_below(folder: Path) -> list[str]:
    """Return the relative names of all files in a folder, sorted, without the checksums' own."""
    return sorted(
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*")
        if path.is_file() and path.relative_to(folder).as_posix() != SUMS
    )


def write_sums(folder: Path) -> None:
    """Write `SHA256SUMS` over every file, as `sha256sum --check` reads it, then sync everything."""
    lines = [f"{_sha256(folder / name)}  {name}\n" for name in files_below(folder)]
    (folder / SUMS).write_text("".join(lines), encoding="utf-8")
    sync_below(folder)


def read_sums(folder: Snapshot) -> tuple[dict[str, str], bytes]:
    """Return the SHA-256 by name that an opened index lists, and the list's text.

    Raises:
        StoreError: there is no list, or it is damaged.
    """
    try:
        content = folder.read(SUMS, _SUMS_BYTES)
        text = content.decode("utf-8")
    except Unusable as fault:
        raise StoreError(
            f"{folder.path} is not an index: {SUMS} {fault}.{instead(folder.path, 'index')}"
        ) from None
    except UnicodeDecodeError:
        raise damaged(folder.path, [f"{SUMS} was altered"]) from None
    sums: dict[str, str] = {}
    for line in text.split("\n")[:-1]:
        match = _LINE.fullmatch(line)
        if match is None or match[2] in sums:
            raise damaged(folder.path, [f"{SUMS} was altered"])
        sums[match[2]] = match[1]
    if not text.endswith("\n"):
        raise damaged(folder.path, [f"{SUMS} was altered"])
    return sums, content


def hold_listed(folder: Snapshot, sums: Mapping[str, str]) -> dict[str, Held]:
    """Hold every file that an opened index lists, compared with its SHA-256.

    Raises:
        StoreError: naming every file that is missing or was altered; or they do not fit into memory.
    """
    expected = {name: (sha256, None) for name, sha256 in sums.items()}
    held, problems = hold_all(folder, expected, f"The index {folder.path}", StoreError)
    if problems:
        close_all(held)
        raise damaged(folder.path, problems)
    return held


def damaged(folder: Path, problems: Iterable[str]) -> StoreError:
    """Return the error for an index whose files are not what was written."""
    return StoreError(
        f"The index {folder} is damaged: {'; '.join(problems)}. Build it again with 'retrieval index create --replace'."
    )


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def refuse_existing(output: Path, replace: bool) -> None:
    """Refuse to overwrite, unless the user asked for it and it is an index.

    Raises:
        StoreError: something is there already, or the folder to write to does not exist.
    """
    if not output.parent.is_dir():
        raise StoreError(f"{output} cannot be written: there is no folder {output.parent}.")
    if not (output.exists() or output.is_symlink()):
        return
    if not output.is_dir():
        raise StoreError(f"{output} is a file, and an index is a folder. Choose another name.")
    if not replace:
        raise exists_already(output)
    record = any((output / name).is_file() for name in (SUMS, "items.sqlite"))
    if output.is_symlink() or not record or not (output / "index.json").is_file():
        raise StoreError(f"{output} is not an index, so --replace does not touch it. Choose another name.")


def put_in_place(finished: Path, output: Path, *, replace: bool) -> None:
    """Rename a finished, synced folder to its place; an index that is there gives way in the same instant.

    Args:
        finished: on the same file system as `output`.
        output: where it goes.
        replace: whether an older index that is there is removed.

    Raises:
        StoreError: something has appeared there, and `replace` was not asked for.
    """
    rename_whole(finished, output, replace=replace, taken=exists_already(output))


def exists_already(output: Path) -> StoreError:
    """Return the error for an output that is there and was not to be replaced."""
    return StoreError(
        f"{output} exists already. Choose another name, or pass --replace (in Python replace=True) to put the new index there."
    )
