"""A folder's files as they were at one moment: what was verified is what is used, whatever happens to them later."""

from __future__ import annotations

import errno
import hashlib
import os
import stat
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

from retrieval.errors import RetrievalError
from retrieval.serving.files.plain import OPEN

T = TypeVar("T")
Signature = tuple[int, int, int, int]
"""What changes when a file does: device, inode, size, time of the last change of its content."""

_TRIES = 100  # a folder that is replaced more often while it is read is not read at all
_BESIDE_DIR = os.open in os.supports_dir_fd and os.stat in os.supports_dir_fd


class Unusable(Exception):
    """Why one file of a folder is not read, as the end of a sentence: "is missing"."""


@dataclass(frozen=True)
class Held:
    """A file's content in this process's memory: what was compared with a checksum is what is used.

    Attributes:
        content: all of it.
    """

    content: bytes

    @cached_property
    def sha256(self) -> str:
        """Of the content."""
        return hashlib.sha256(self.content).hexdigest()


class Snapshot:
    """A folder, opened once: its files are reached from the opened folder, not by its name, which may go to another.

    Only regular files in it or in a folder directly in it are read, never through a link.

    Args:
        path: the folder.

    Raises:
        OSError: no such folder, or not readable.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.signatures: dict[str, Signature] = {}
        self._handle: int | None = None
        if _BESIDE_DIR:
            self._handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
            status = os.fstat(self._handle)
        else:
            status = path.stat()
            if not stat.S_ISDIR(status.st_mode):
                raise NotADirectoryError(errno.ENOTDIR, "Not a directory", str(path))
        self.identity = (status.st_dev, status.st_ino)

    def read(self, name: str, most: int) -> bytes:
        """Return a small file's content.

        Args:
            name: of the file, or "FOLDER/NAME".
            most: bytes that it may have.

        Raises:
            Unusable: missing, no regular file, larger, or not readable.
        """
        handle, _ = self._open(name, most)
        try:
            with os.fdopen(handle, "rb") as file:
                content = file.read(most + 1)
        except OSError as fault:
            raise Unusable(f"cannot be read ({fault.strerror or fault})") from None
        if len(content) > most:
            raise Unusable(f"has more than {most:,} bytes")
        return content

    def size(self, name: str) -> int:
        """Return a file's size in bytes.

        Raises:
            Unusable: see `read`.
        """
        handle, size = self._open(name)
        os.close(handle)
        return size

    def hold(self, name: str) -> Held:
        """Read a whole file.

        Raises:
            Unusable: see `read`.
        """
        return Held(self.read(name, self.size(name)))

    def _open(self, name: str, most: int | None = None) -> tuple[int, int]:
        parent, slash, own = name.rpartition("/")
        if not is_plain(own) or (slash and not is_plain(parent)):
            raise Unusable("is not the name of a file that can be here")
        try:
            handle = self._in_folder(parent, own) if slash else _open_plain(self.path, own, self._handle)
        except FileNotFoundError:
            raise Unusable("is missing") from None
        except OSError as fault:
            if fault.errno in (errno.ELOOP, errno.EMLINK):  # O_NOFOLLOW met a link
                raise Unusable("is a link, not a file") from None
            raise Unusable(f"cannot be read ({fault.strerror or fault})") from None
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode):
            os.close(handle)
            raise Unusable("is not a regular file")
        if most is not None and status.st_size > most:
            os.close(handle)
            raise Unusable(f"has {status.st_size:,} bytes; {most:,} are possible")
        self.signatures[name] = _signature(status)
        return handle, status.st_size

    def _in_folder(self, parent: str, name: str) -> int:
        if self._handle is None:
            return _open_plain(self.path / parent, name, None)
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
        folder = os.open(parent, flags, dir_fd=self._handle)
        try:
            return _open_plain(self.path / parent, name, folder)
        finally:
            os.close(folder)

    def is_current(self) -> bool:
        """Return whether the folder's name still means this folder."""
        try:
            status = self.path.stat()
        except OSError:
            return False
        return (status.st_dev, status.st_ino) == self.identity

    def close(self) -> None:
        """Close the folder; what is held stays."""
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Watch:
    """Tells whether a folder is still what was read from it, by a few looks at the file system and no reading."""

    def __init__(self, folder: Snapshot) -> None:
        self._path = folder.path
        self._identity = folder.identity
        self._files = dict(folder.signatures)

    def changed(self) -> str | None:
        """Return a sentence that says what is no longer as it was read; None while all is."""
        try:
            status = self._path.stat()
        except OSError:
            return f"{self._path} is no longer there."
        if (status.st_dev, status.st_ino) != self._identity:
            return f"{self._path} was replaced by another one."
        names = []
        for name, seen in self._files.items():
            try:
                same = _signature((self._path / name).lstat()) == seen
            except OSError:
                same = False
            if not same:
                names.append(name)
        return f"{', '.join(names)} in {self._path} changed on the disk." if names else None


def at_one_moment(path: Path, load: Callable[[Snapshot], T], error: type[RetrievalError]) -> T:
    """Open a folder and load it from one generation: when it was replaced meanwhile, load the new one instead.

    Args:
        path: the folder.
        load: reads from the snapshot; what it raises counts only if the folder was not replaced.
        error: raised when the folder is replaced again and again.

    Raises:
        Unusable: there is no such folder, or it cannot be read; the end of a sentence.
        RetrievalError: what `load` raises, and of the class `error`.
    """
    for _ in range(_TRIES):
        try:
            folder = Snapshot(path)
        except (FileNotFoundError, NotADirectoryError):
            raise Unusable("there is no such folder") from None
        except (OSError, ValueError) as fault:
            raise Unusable(f"it cannot be read ({getattr(fault, 'strerror', None) or fault})") from None
        with folder:
            try:
                return load(folder)
            except RetrievalError:
                if folder.is_current():
                    raise
    raise error(f"{path} is replaced again and again while it is read. Try again when that has ended.")


def hold_all(
    folder: Snapshot, expected: Mapping[str, tuple[str, int | None]], what: str, error: type[RetrievalError]
) -> tuple[dict[str, Held], list[str]]:
    """Hold files that have the expected SHA-256.

    Args:
        folder: where they are.
        expected: by name, SHA-256 and, if it is known, the size in bytes.
        what: "The bundle /b", for the sentence.
        error: raised when they don't fit into memory together.

    Returns:
        The files by name, and what is wrong with the others, all of it.
    """
    held: dict[str, Held] = {}
    problems = []
    sizes = {}
    for name, (_, size) in expected.items():
        try:
            seen = folder.size(name)
            if size is not None and seen != size:
                raise Unusable(f"has {seen:,} bytes instead of {size:,}")
            sizes[name] = seen
        except Unusable as fault:
            problems.append(f"{name} {fault}")
    check_room(sizes.values(), what, error)
    for name in sizes:
        try:
            held[name] = folder.hold(name)
            if held[name].sha256 != expected[name][0]:
                raise Unusable("was altered (its SHA-256 differs)")
        except Unusable as fault:
            problems.append(f"{name} {fault}")
    return held, problems


def check_room(sizes: Iterable[int], what: str, error: type[RetrievalError]) -> None:
    """Refuse files that do not fit into this machine's memory together, before any is read.

    Raises:
        RetrievalError: of the class `error`.
    """
    total, room = sum(sizes), available_memory()
    if total > room:
        raise error(
            f"{what} has {total / 1e9:,.1f} GB, which are held in memory; {room / 1e9:,.1f} GB are available here."
        )


def available_memory() -> int:
    """Return how many bytes this process may still take: of the machine, or of its container if that has less."""
    room = []
    with suppress(OSError, ValueError, IndexError):
        text = Path("/proc/meminfo").read_text()
        room.append(int(text.split("MemAvailable:")[1].split()[0]) * 1024)
    with suppress(OSError, ValueError):
        room.append(int(Path("/sys/fs/cgroup/memory.max").read_text()))
    with suppress(OSError, ValueError, AttributeError):
        room.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    return min(room, default=1 << 40)


def _open_plain(folder: Path, name: str, handle: int | None) -> int:
    if handle is not None:
        return os.open(name, OPEN, dir_fd=handle)
    if folder.is_symlink() or (folder / name).is_symlink():
        raise OSError(errno.ELOOP, "a link")
    return os.open(folder / name, OPEN)


def is_plain(name: str) -> bool:
    """Return whether a text is the name of a file directly in a folder, and can be shown on a terminal."""
    return (
        0 < len(name) <= 255
        and name.isprintable()
        and name not in {".", ".."}
        and not set("/\\:") & set(name)
    )


def _signature(status: os.stat_result) -> Signature:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns
