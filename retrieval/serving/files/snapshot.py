"""A folder's files as they were at one moment: what was verified is what is used, whatever happens
to them later.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

from retrieval.errors import RetrievalError
from retrieval.serving.files.plain import open_plain

T = TypeVar("T")
Signature = tuple[int, int, int, int]
"""What changes when a file does: device, inode, size, time of the last change of its content."""

_TRIES = 100
"""A folder that is replaced more often while it is read is not read at all."""


class Unusable(Exception):
    """Why one file of a folder is not read, as the end of a sentence: "is missing"."""


class Snapshot:
    """A folder from which regular files are read, never through a link.

    Args:
        path: the folder.

    Raises:
        OSError: no such folder.

    Attributes:
        identity: what changes when another folder takes this one's name: device, inode.
        signatures: of the files that were read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.identity = _identity(path)
        self.signatures: dict[str, Signature] = {}

    def read(self, name: str, most: int | None = None) -> bytes:
        """Return a file's content.

        Args:
            name: of the file.
            most: bytes that it may have; None takes any number.

        Raises:
            Unusable: missing, no regular file, larger, or not readable.
        """
        with _reading(name), open_plain(self.path / name) as file:
            status = os.fstat(file.fileno())
            if most is not None and status.st_size > most:
                raise Unusable(f"has {status.st_size:,} bytes; {most:,} are possible")
            self.signatures[name] = _signature(status)
            return file.read(-1 if most is None else most)

    def size(self, name: str) -> int:
        """Return a file's size in bytes.

        Raises:
            Unusable: see `read`.
        """
        with _reading(name), open_plain(self.path / name) as file:
            return os.fstat(file.fileno()).st_size

    def is_current(self) -> bool:
        """Return whether the folder's name still means this folder."""
        with suppress(OSError):
            return _identity(self.path) == self.identity
        return False


class Watch:
    """Tells whether a folder is still what was read from it, by a few looks at the file system and
    no reading.
    """

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
    """Load a folder from one generation: when it was replaced meanwhile, load the new one instead.

    Args:
        path: the folder.
        load: reads from the snapshot, and compares with checksums; what it raises counts only if
            the folder was not replaced.
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
            raise Unusable(
                f"it cannot be read ({getattr(fault, 'strerror', None) or fault})"
            ) from None
        try:
            return load(folder)
        except RetrievalError:
            if folder.is_current():
                raise
    raise error(
        f"{path} is replaced again and again while it is read. Try again when that has ended."
    )


def read_all(
    folder: Snapshot,
    expected: Mapping[str, tuple[str, int | None]],
    what: str,
    error: type[RetrievalError],
) -> tuple[dict[str, bytes], list[str]]:
    """Read files that have the expected SHA-256.

    Args:
        folder: where they are.
        expected: by name, SHA-256 and, if it is known, the size in bytes.
        what: "The bundle /b", for the sentence.
        error: raised when they do not fit into memory together.

    Returns:
        The files' content by name, and what is wrong with the others, all of it.
    """
    contents: dict[str, bytes] = {}
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
    total, room = sum(sizes.values()), available_memory()
    if total > room:
        raise error(
            f"{what} has {total / 1e9:,.1f} GB, which are held in memory; {room / 1e9:,.1f} GB are"
            " available here."
        )
    for name in sizes:
        try:
            content = folder.read(name)
            if hashlib.sha256(content).hexdigest() != expected[name][0]:
                raise Unusable("was altered (its SHA-256 differs)")
            contents[name] = content
        except Unusable as fault:
            problems.append(f"{name} {fault}")
    return contents, problems


def available_memory() -> int:
    """Return how many bytes this process may still take: of the machine, or of its container if
    that has less.
    """
    room = []
    with suppress(OSError, ValueError, IndexError):
        text = Path("/proc/meminfo").read_text()
        room.append(int(text.split("MemAvailable:")[1].split()[0]) * 1024)
    with suppress(OSError, ValueError):
        room.append(int(Path("/sys/fs/cgroup/memory.max").read_text()))
    with suppress(OSError, ValueError, AttributeError):
        room.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    return min(room, default=1 << 40)


def is_plain(name: str) -> bool:
    """Return whether a text is the name of a file directly in a folder, and can be shown on a
    terminal.
    """
    return (
        0 < len(name) <= 255
        and name.isprintable()
        and name not in {".", ".."}
        and not set("/\\:") & set(name)
    )


def _signature(status: os.stat_result) -> Signature:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _identity(path: Path) -> tuple[int, int]:
    status = path.stat()
    if not stat.S_ISDIR(status.st_mode):
        raise NotADirectoryError(f"{path} is no folder")
    return status.st_dev, status.st_ino


@contextmanager
def _reading(name: str) -> Iterator[None]:
    """Turn what the system says of a file into the end of a sentence."""
    if not is_plain(name):
        raise Unusable("is not the name of a file that can be here")
    try:
        yield
    except FileNotFoundError:
        raise Unusable("is missing") from None
    except OSError as fault:
        reason = fault.strerror or str(fault)
        raise Unusable(
            reason.removeprefix("it ")
            if reason.startswith("it is")
            else f"cannot be read ({reason})"
        ) from None
