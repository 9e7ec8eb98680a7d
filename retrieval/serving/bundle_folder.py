"""Consistent reads of a bundle's folder, so that the files used are the files verified."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from retrieval.errors import BundleError, RetrievalError
from retrieval.serving.files.places import instead
from retrieval.serving.files.plain import open_plain
from retrieval.serving.memory import available_memory

if TYPE_CHECKING:
    from retrieval.serving.manifest import FileRecord

T = TypeVar("T")
FILE = "manifest.json"
MANIFEST_BYTES = 4_000_000
"""Size limit of a manifest."""
_TRIES = 100
"""Give up on a folder that is replaced this often while it is read."""


class Unusable(Exception):
    """Raised for a file that cannot be read; the message ends a sentence: "is missing"."""


class BundleFolder:
    """A folder whose regular files are read, never through a link.

    Raises:
        OSError: the folder does not exist.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._identity = _identity(path)
        self._signatures: dict[str, tuple[int, ...]] = {}

    def read(self, name: str, *, size: int | None = None, most: int | None = None) -> bytes:
        """Return a file's content.

        Raises:
            Unusable: it is missing, not a regular file, of another size, or unreadable.
        """
        if not is_plain(name):
            raise Unusable("is not the name of a file that can be here")
        try:
            with open_plain(self.path / name) as file:
                status = os.fstat(file.fileno())
                if size is not None and status.st_size != size:
                    raise Unusable(f"has {status.st_size:,} bytes instead of {size:,}")
                if most is not None and status.st_size > most:
                    raise Unusable(f"has {status.st_size:,} bytes; the limit is {most:,}")
                self._signatures[name] = _signature(status)
                return file.read(-1 if most is None else most)
        except FileNotFoundError:
            raise Unusable("is missing") from None
        except OSError as fault:
            reason = fault.strerror or str(fault)
            about_the_kind = reason.startswith("it is")
            raise Unusable(
                reason.removeprefix("it ") if about_the_kind else f"cannot be read ({reason})"
            ) from None

    def is_current(self) -> bool:
        """Return whether the path still leads to this folder."""
        with suppress(OSError):
            return _identity(self.path) == self._identity
        return False

    def changed(self) -> str | None:
        """Return a sentence on files changed since they were read, or `None`; reads no content."""
        try:
            if _identity(self.path) != self._identity:
                return f"{self.path} was replaced by another one."
        except OSError:
            return f"{self.path} is no longer there."
        names = []
        for name, signature in self._signatures.items():
            try:
                same = _signature((self.path / name).lstat()) == signature
            except OSError:
                same = False
            if not same:
                names.append(name)
        return f"{', '.join(names)} in {self.path} changed on the disk." if names else None


def opened_whole(path: Path, load: Callable[[BundleFolder], T]) -> T:
    """Load a bundle from its folder; if the folder is replaced meanwhile, load the new one.

    Raises:
        BundleError: the folder does not exist or is replaced again and again, or `load` raises it.
    """
    for _ in range(_TRIES):
        try:
            folder = BundleFolder(path)
        except (FileNotFoundError, NotADirectoryError):
            reason = "there is no such folder"
            raise BundleError(
                f"{path} is not a bundle: {reason}.{instead(path, 'bundle')}"
            ) from None
        except (OSError, ValueError) as fault:
            reason = f"it cannot be read ({getattr(fault, 'strerror', None) or fault})"
            raise BundleError(
                f"{path} is not a bundle: {reason}.{instead(path, 'bundle')}"
            ) from None
        try:
            return load(folder)
        except RetrievalError:
            if folder.is_current():
                raise
    raise BundleError(
        f"{path} is replaced again and again while it is read. Try again when that has ended."
    )


def manifest_text(folder: BundleFolder) -> bytes:
    """Return the text of an opened bundle's manifest.

    Raises:
        BundleError: the manifest is missing or cannot be read.
    """
    try:
        return folder.read(FILE, most=MANIFEST_BYTES)
    except Unusable as fault:
        raise BundleError(
            f"{folder.path} is not a bundle: {FILE} {fault}.{instead(folder.path, 'bundle')}"
        ) from None


def read_files(folder: BundleFolder, files: Mapping[str, FileRecord]) -> dict[str, bytes]:
    """Read all recorded files of an opened bundle and check their sizes and SHA-256.

    Raises:
        BundleError: files are missing or were altered (the message lists them), or do not fit into
            memory.
    """
    total, room = 0, available_memory()
    for name in files:
        with suppress(OSError):
            total += (folder.path / name).stat().st_size
    if total > room:
        raise BundleError(
            f"The bundle {folder.path} needs {total / 1e9:,.1f} GB of memory;"
            f" {room / 1e9:,.1f} GB are available here."
        )
    contents: dict[str, bytes] = {}
    problems = []
    for name, record in files.items():
        try:
            content = folder.read(name, size=record.bytes)
            if hashlib.sha256(content).hexdigest() != record.sha256:
                raise Unusable("was altered (its SHA-256 differs)")
            contents[name] = content
        except Unusable as fault:
            problems.append(f"{name} {fault}")
    if problems:
        raise BundleError(
            f"The bundle {folder.path} is damaged: {'; '.join(problems)}. Make it again, or copy it"
            " again."
        )
    return contents


def is_plain(name: str) -> bool:
    """Return whether a text is a printable file name without a folder."""
    return (
        0 < len(name) <= 255
        and name.isprintable()
        and name not in {".", ".."}
        and not set("/\\:") & set(name)
    )


def _signature(status: os.stat_result) -> tuple[int, ...]:
    """Return values that change when a file does."""
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _identity(path: Path) -> tuple[int, int]:
    """Return values that change when another folder takes this path."""
    status = path.stat()
    if not stat.S_ISDIR(status.st_mode):
        raise NotADirectoryError(f"{path} is no folder")
    return status.st_dev, status.st_ino
