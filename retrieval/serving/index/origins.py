"""What is to be indexed, item by item, and where the content of each is."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

import numpy as np
from numpy.typing import NDArray

from retrieval.errors import DataError
from retrieval.serving.index.locations import Location, shown


class Container(ABC):
    """A file that holds many originals, opened. It is read fastest in the order of its parts."""

    @abstractmethod
    def read(self, part: str, most: int) -> bytes:
        """Return an original.

        Args:
            part: which one; see `Origin`.
            most: bytes; a larger one is refused.

        Raises:
            DataError: there is no such part, it is too large, or the file is damaged.
        """

    @abstractmethod
    def close(self) -> None:
        """Close the file."""


@dataclass(frozen=True, slots=True)
class Origin:
    """Where an original is that is not a local file of its own.

    Attributes:
        location: the file that holds it.
        part: which part of that file; None for all of it.
        file_stamp: what changes when that file does, as it was when the item was found.
    """

    location: Location
    part: str | None
    file_stamp: str

    @property
    def address(self) -> str:
        """The location and the part as one text, which `recorded` reads: the last '#' is what they are divided by."""
        if self.part is None:
            return f"{self.location.text}#" if "#" in self.location.text else self.location.text
        return f"{self.location.text}#{quote(self.part, safe='/@+ ', errors='surrogateescape')}"

    def stamp(self) -> str:
        """Return what changes when the original does."""
        return f"{os.fsencode(self.address)!r} {self.file_stamp}"

    def read(self, most: int) -> bytes:
        """Return the content of a whole file.

        Raises:
            DataError: it cannot be read, or has more than `most` bytes.
        """
        try:
            with self.location.open() as file:
                content = file.read(most + 1)
        except OSError as fault:
            raise DataError(f"{self.location}: {str(fault).rstrip('.')}.") from None
        if len(content) > most:
            raise DataError(
                f"{self.location} has more than {most:,} bytes, the limit. Save it smaller, or raise the limit."
            )
        return content

    @classmethod
    def recorded(cls, address: str, stamp: str | None) -> Origin:
        """Return the origin that an index has recorded, by its address and stamp."""
        text, sign, part = address.rpartition("#")
        head = f"{os.fsencode(address)!r} "
        inside = unquote(part, errors="surrogateescape") if sign and part else None
        return cls(Location(text if sign else address), inside, (stamp or "").removeprefix(head))


@dataclass(frozen=True, slots=True)
class Source:
    """One item to encode: an image, or a row of the collected features.

    Attributes:
        key: its name.
        label: None when none was given.
        path: the image, or the `.npz` file; None for what has an `origin`.
        metadata: further columns of a manifest.
        row: of `Sources.features`; None for an image.
        origin: where the content is, when it is not a local file of its own.
        recorded: its stamp when it was embedded, of what comes with its vector.
    """

    key: str
    label: str | None
    path: Path | None
    metadata: dict[str, Any] = field(default_factory=dict)
    row: int | None = None
    origin: Origin | None = None
    recorded: str | None = None

    @property
    def name(self) -> str:
        """What a person reads: the path, or the address."""
        return shown(self.origin.address if self.path is None and self.origin else str(self.path))

    def stamp(self) -> str:
        """Return what changes when the item does: path, row, size and time of its file."""
        if self.recorded is not None:
            return self.recorded
        if self.path is None:
            assert self.origin is not None
            return self.origin.stamp()
        try:
            status = self.path.stat()
        except OSError:
            return f"{os.fsencode(self.path)!r} {self.row} missing"
        return f"{os.fsencode(self.path)!r} {self.row} {status.st_size} {status.st_mtime_ns}"


@dataclass(frozen=True)
class Sources:
    """Everything to encode, in order.

    Attributes:
        items: one an item.
        features: (N, F) for a bundle of features, else None.
        repeated: how many files were named more than once; each is taken once.
        left_out: a sentence on what is left out of folders, tables and archives, for each reason.
    """

    items: list[Source]
    features: NDArray[np.float32] | None = None
    repeated: int = 0
    left_out: tuple[str, ...] = ()
