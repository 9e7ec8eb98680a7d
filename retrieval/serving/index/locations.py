"""Where a file is: on this machine, or at an address that fsspec opens."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from retrieval.errors import DataError
from retrieval.serving.index import remote


@dataclass(frozen=True, slots=True)
class Location:
    """One file.

    Attributes:
        text: its absolute path, or its address.
    """

    text: str

    def __str__(self) -> str:
        return self.name

    @property
    def remote(self) -> bool:
        """Whether it is at an address."""
        return remote.is_address(self.text)

    @property
    def name(self) -> str:
        """What a person reads: a name that is not UTF-8 shows its bytes."""
        return shown(self.text)

    @property
    def file_name(self) -> str:
        """The last part of the path, which tells the kind of file."""
        return remote.file_name(self.text) if self.remote else Path(self.text).name

    @property
    def stem(self) -> str:
        """The file's name up to its first dot: what the ids of its items begin with."""
        return shown(self.file_name).partition(".")[0] or shown(self.file_name)

    def open(self) -> BinaryIO:
        """Open it for reading.

        Raises:
            DataError: it cannot be opened.
            MissingDependency: a package that its address needs is not installed.
        """
        if self.remote:
            return remote.open_address(self.text)
        try:
            return Path(self.text).open("rb")
        except OSError as fault:
            raise DataError(f"{self.name} cannot be read: {fault.strerror or fault}.") from None

    def stamp(self) -> str:
        """Return what changes when the content does."""
        if self.remote:
            return remote.stamp(self.text)
        try:
            status = Path(self.text).stat()
        except OSError:
            return "missing"
        return f"{status.st_size} {status.st_mtime_ns}"

    def beside(self, name: str) -> Location:
        """Return where a file is that this one, a manifest at an address, names; see `retrieval.serving.index.remote.beside`."""
        return Location(remote.beside(self.text, name))


def shown(path: str | os.PathLike[str]) -> str:
    """Return a path as text that any file can hold: a name that is not UTF-8 shows its bytes."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")
