"""Read a bundle's folder so that exactly the verified files are used."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from retrieval.base.memory import available_memory
from retrieval.base.places import instead
from retrieval.base.plain import open_plain
from retrieval.errors import BundleError, RetrievalError

if TYPE_CHECKING:
    from retrieval.bundle.manifest import FileRecord

T = TypeVar("T")
FILE = "manifest.json"
MANIFEST_BYTES = 4_000_000
"""Size limit of a manifest."""
_TRIES = 100
"""Maximum number of attempts to read a folder that is being replaced."""


class Unusable(Exception):
    """Raised for a file that cannot be read.

    The message completes a sentence that begins with the file's name, such as "is missing".
    """


def _read(folder: Path, name: str, *, size: int | None = None, most: int | None = None) -> bytes:
    """Return the content of a regular file; links are not followed.

    Args:
        folder: the bundle's folder.
        name: the file's name.
        size: the size that the file must have, in bytes.
        most: the largest size that the file may have, in bytes.

    Raises:
        Unusable: the file is missing, not a regular file, of another size, or unreadable.
        BundleError: the file does not fit into memory.
    """
    if not is_plain_name(name):
        raise Unusable("is not a file name that a bundle may contain")
    try:
        with open_plain(folder / name) as file:
            present = os.fstat(file.fileno()).st_size
            if size is not None and present != size:
                raise Unusable(f"has {present:,} bytes instead of {size:,}")
            if most is not None and present > most:
                raise Unusable(f"has {present:,} bytes; the limit is {most:,}")
            if present > (room := available_memory()):
                raise BundleError(
                    f"{folder / name} needs {present / 1e9:,.1f} GB of memory, but only"
                    f" {room / 1e9:,.1f} GB are available on this machine."
                )
            return file.read(-1 if most is None else most)
    except FileNotFoundError:
        raise Unusable("is missing") from None
    except OSError as fault:
        reason = fault.strerror or str(fault)
        if reason.startswith("it is"):  # `open_plain` worded this reason
            raise Unusable(reason.removeprefix("it ")) from None
        raise Unusable(f"cannot be read ({reason})") from None


def opened_whole(path: Path, load: Callable[[], T]) -> T:
    """Load a bundle from its folder; if the folder is replaced meanwhile, load the new one.

    Raises:
        BundleError: the folder does not exist or keeps being replaced, or `load` raises the error.
    """
    for _ in range(_TRIES):
        try:
            identity = _identity(path)
        except (OSError, ValueError) as fault:
            reason = f"it cannot be read ({getattr(fault, 'strerror', None) or fault})"
            if isinstance(fault, FileNotFoundError | NotADirectoryError):
                reason = "there is no such folder"
            advice = instead(path, "bundle")
            raise BundleError(f"{path} is not a bundle: {reason}.{advice}") from None
        try:
            return load()
        except RetrievalError:
            # In a folder that was replaced meanwhile, files of two bundles may have been read.
            with suppress(OSError):
                if _identity(path) == identity:
                    raise
    raise BundleError(
        f"{path} keeps being replaced while it is read. Try again when nothing writes to it."
    )


def manifest_text(folder: Path) -> bytes:
    """Return the text of a bundle's manifest.

    Raises:
        BundleError: the manifest is missing or cannot be read.
    """
    try:
        return _read(folder, FILE, most=MANIFEST_BYTES)
    except Unusable as fault:
        advice = instead(folder, "bundle")
        raise BundleError(f"{folder} is not a bundle: {FILE} {fault}.{advice}") from None


def read_files(folder: Path, files: Mapping[str, FileRecord]) -> dict[str, bytes]:
    """Read all recorded files of a bundle and check their sizes and SHA-256.

    Raises:
        BundleError: files are missing or were altered (the message lists them), or do not fit into
            memory.
    """
    contents = dict[str, bytes]()
    problems = []
    for name, record in files.items():
        try:
            content = _read(folder, name, size=record.bytes)
            if hashlib.sha256(content).hexdigest() != record.sha256:
                raise Unusable("was altered (its SHA-256 differs)")
            contents[name] = content
        except Unusable as fault:
            problems.append(f"{name} {fault}")
    if problems:
        raise BundleError(
            f"The bundle {folder} is damaged: {'; '.join(problems)}. Export or copy it again."
        )
    return contents


def is_plain_name(name: str) -> bool:
    """Return whether `name` is a printable file name without a folder."""
    return (
        0 < len(name) <= 255
        and name.isprintable()
        and name not in {".", ".."}
        and not set("/\\:") & set(name)
    )


def _identity(path: Path) -> tuple[int, int]:
    """Return values that differ if another folder is at this path later."""
    status = path.stat()
    if not stat.S_ISDIR(status.st_mode):
        raise NotADirectoryError(f"{path} is not a folder")
    return status.st_dev, status.st_ino
