"""Folders that appear whole or not at all, and checksums that notice every altered bit."""

from __future__ import annotations

import ctypes
import errno
import hashlib
import os
import re
import shutil
import sqlite3
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from retrieval.errors import StoreError

SUMS = "SHA256SUMS"
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


def sync_file(path: Path) -> None:
    """Have the file, or the folder's list of names, on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


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
    for path in folder.rglob("*"):
        sync_file(path)
    sync_file(folder)


def check_sums(folder: Path) -> frozenset[str]:
    """Compare every file that `SHA256SUMS` lists with it, and return their names.

    Raises:
        StoreError: naming every file that is missing or was altered, or the damaged list itself.
    """
    try:
        text = (folder / SUMS).read_bytes().decode("utf-8")
    except FileNotFoundError:
        raise StoreError(
            f"{folder} is not an index: it has no {SUMS}. Make one with 'retrieval index'."
        ) from None
    except OSError as fault:
        raise StoreError(f"The index {folder} cannot be read: {fault.strerror or fault}.") from None
    except UnicodeDecodeError:
        raise damaged(folder, [f"{SUMS} was altered"]) from None
    sums: dict[str, str] = {}
    for line in text.split("\n")[:-1]:
        match = _LINE.fullmatch(line)
        if match is None or match[2] in sums or ".." in match[2].split("/") or match[2].startswith("/"):
            raise damaged(folder, [f"{SUMS} was altered"])
        sums[match[2]] = match[1]
    problems = [f"{SUMS} was altered"] if not text.endswith("\n") else []
    for name, expected in sums.items():
        try:
            if _sha256(folder / name) != expected:
                problems.append(f"{name} was altered (its SHA-256 differs)")
        except FileNotFoundError:
            problems.append(f"{name} is missing")
        except OSError as fault:
            problems.append(f"{name} cannot be read ({fault.strerror or fault})")
    if problems:
        raise damaged(folder, problems)
    return frozenset(sums)


def damaged(folder: Path, problems: Iterable[str]) -> StoreError:
    """Return the error for an index whose files are not what was written."""
    return StoreError(
        f"The index {folder} is damaged: {'; '.join(problems)}. Build it again with 'retrieval index --replace'."
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
    if not replace:
        raise StoreError(
            f"{output} exists already. Choose another --output, or pass --replace to put the new index there."
        )
    if output.is_symlink() or not (output / SUMS).is_file() or not (output / "index.json").is_file():
        raise StoreError(
            f"{output} is not an index, so --replace does not touch it. Choose another --output."
        )


def put_in_place(finished: Path, output: Path) -> None:
    """Rename a finished, synced folder to its place; an index that is there gives way in the same instant.

    Args:
        finished: on the same file system as `output`.
        output: absent, or an older index, which is removed.
    """
    if not output.exists():
        finished.rename(output)
    elif _exchange(finished, output):
        shutil.rmtree(finished)
    else:  # no such system call here: a moment without an index, and the old one survives a crash in it
        old = output.with_name(f".{output.name}.old")
        output.rename(old)
        try:
            finished.rename(output)
        except OSError:
            old.rename(output)
            raise
        shutil.rmtree(old)
    with suppress(OSError):  # a folder that cannot be opened for syncing does not undo the rename
        sync_file(output.parent)


def _exchange(one: Path, other: Path) -> bool:
    """Swap two folders atomically by Linux's renameat2; False where that does not exist."""
    if not sys.platform.startswith("linux"):
        return False
    try:
        rename = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError):
        return False
    here, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    return bool(rename(here, os.fsencode(one), here, os.fsencode(other), exchange) == 0)
