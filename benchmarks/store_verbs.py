"""What `store.py` asks of a system: the same few verbs of each. What the peers are is in `store_peers.py`, ours in `store_local.py`."""
# ruff: noqa: B027  what few systems need does nothing in the others

from __future__ import annotations

import contextlib
import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Numbers = NDArray[np.int64]


def shares(ids: Numbers) -> Numbers:
    """Return each item's field `share`, 0 to 99, evenly spread: `share < 10` matches a tenth of all items."""
    return ((ids.astype(np.uint64) * np.uint64(2_654_435_761) % np.uint64(2**32)) * np.uint64(100) >> np.uint64(32)).astype(np.int64)  # fmt: skip


class System(ABC):
    """One store of vectors in a folder: ids are numbers, each item has one field, `share`.

    Attributes:
        packages: what its environment needs besides NumPy; empty: this environment.
        exact: whether its search is.
        what: the structure that is searched, and how it is written to.
        modules: what it imports, so that opening does not include that.
        hints: files that hold nothing of a write, and may be lost.
        base: the system whose folder this one begins with; only its searches are measured.
    """

    packages: ClassVar[tuple[str, ...]]
    modules: ClassVar[tuple[str, ...]]
    exact: ClassVar[bool]
    what: ClassVar[str]
    hints: ClassVar[tuple[str, ...]] = ()
    base: ClassVar[str | None] = None

    def __init__(self, folder: Path, width: int) -> None:
        self.folder = folder
        self.width = width

    @abstractmethod
    def open(self) -> None:
        """Open it, or make it where it is not there."""

    @abstractmethod
    def add(self, ids: Numbers, vectors: Floats) -> None:
        """Add new items; return when the system says that they are written."""

    @abstractmethod
    def delete(self, ids: Numbers) -> None:
        """Delete items."""

    @abstractmethod
    def search(self, queries: Floats, count: int, below: int | None) -> Sequence[Sequence[int]]:
        """Return the nearest items' ids of each query, by Euclidean distance; only items whose share is below a number."""

    @abstractmethod
    def count(self) -> int:
        """Return how many items there are."""

    def begin_load(self) -> None:
        """Prepare for a load, which need not be durable at each step."""

    def loaded(self) -> None:
        """Bring a loaded store into the form that its searches want."""

    def tune(self, ef: int) -> None:
        """Have an approximate search look at `ef` candidates."""

    def close(self) -> None:
        """Let go of it."""


def sync(path: Path) -> None:
    """Have the disk hold a file or folder."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


class Syncing:
    """Syncs whatever files of a folder a call has written: what a caller can do where a system does not."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.seen = self._states()

    def _states(self) -> dict[str, tuple[int, int]]:
        found, todo = {}, [str(self.folder)]
        while todo:
            with os.scandir(todo.pop()) as entries:
                for entry in entries:
                    with contextlib.suppress(FileNotFoundError):
                        state = entry.stat(follow_symlinks=False)
                        found[entry.path] = (state.st_mtime_ns, state.st_size)
                        if entry.is_dir(follow_symlinks=False):
                            todo.append(entry.path)
        return found

    def __call__(self) -> None:
        """Sync what has changed since it was asked last."""
        states = self._states()
        for path, state in states.items():
            if self.seen.get(path) != state:
                with contextlib.suppress(FileNotFoundError):
                    sync(Path(path))
        self.seen = states
