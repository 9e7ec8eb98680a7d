"""What is to be indexed, item by item: where the content of each is, and what an index can keep of its text."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, field
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

import numpy as np
from numpy.typing import NDArray

from retrieval.errors import DataError
from retrieval.serving.filters import metadata_text
from retrieval.serving.index.locations import Location, shown
from retrieval.serving.store.items import check_id

ROW_CHARACTERS = 1_000_000
"""Of one item's texts: an index gives no longer ones back."""


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


def label_text(label: str | int | float | None) -> str | None:
    """Return a label as text: true and false as JSON writes them, None for an empty one or NaN."""
    if isinstance(label, bool):
        return str(label).lower()
    if isinstance(label, float) and math.isnan(label):
        return None
    return None if label is None or label == "" else str(label)


def text_problem(key: str, label: str | None, metadata: dict[str, Any]) -> str | None:
    """Return why an item cannot be kept, as the end of a sentence; None for nothing."""
    if fault := check_id(key):
        return fault
    try:
        length = len(metadata_text(metadata)) + len(metadata_text({"": label}))
    except DataError as fault:
        return str(fault).rstrip(".")
    except RecursionError:
        return "its metadata nest too deeply"
    return f"has more than {ROW_CHARACTERS:,} characters" if length > ROW_CHARACTERS else None


def plain(value: Any) -> Any:
    """Return a value as JSON has it: NaN and infinity as null, times and decimal numbers as text."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, datetime | date | time):
        return value.isoformat()
    if isinstance(value, Decimal | timedelta):
        return str(value)
    if isinstance(value, dict):
        return {str(name): plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    return value
