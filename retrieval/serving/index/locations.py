"""Items to index, and the location of their content: a file, a table row or an address."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, TypeAlias, cast
from urllib.parse import unquote, urlsplit

import numpy as np
from numpy.typing import NDArray

from retrieval.errors import DataError, MissingDependency, RetrievalError, printable
from retrieval.host.walk import IMAGE_EXTENSIONS

Floats = NDArray[np.float32]

PLAN = "embedding.json"
"""File that marks a folder of embeddings and records its plan."""
_ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*(://|::)")
_MOST_FILES = 10_000_000
_TAGS = ("ETag", "etag", "md5Hash", "crc32c", "CRC", "sha256", "blob_id", "content_md5")
_TIMES = ("LastModified", "last_modified", "mtime", "modified", "updated", "date_time", "created")


def is_address(text: object) -> bool:
    """Return whether a source is an address, not a local path."""
    return isinstance(text, str) and _ADDRESS.match(text) is not None


def is_table(name: str) -> bool:
    """Return whether a file's name is that of a Parquet table."""
    return name.lower().endswith((".parquet", ".pq"))


def is_embedding(place: object) -> bool:
    """Return whether a path is a folder written by `retrieval embed`."""
    return isinstance(place, str | os.PathLike) and (Path(place) / PLAN).is_file()


def shown(path: str | os.PathLike[str]) -> str:
    """Return a path as valid UTF-8 text; bytes that are not UTF-8 are escaped."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")


@dataclass(frozen=True, slots=True)
class Location:
    """A local file or folder, or one at an address that fsspec opens.

    Attributes:
        text: its path or address.
    """

    text: str

    @classmethod
    def of(cls, source: object) -> Location:
        """Return the location of a path, or of an address given as text.

        Raises:
            DataError: `source` is neither.
        """
        if not isinstance(source, str | os.PathLike):
            raise DataError(
                "What is indexed is named by its path: a file or a folder, not an object of type "
                f"{type(source).__name__}."
            )
        text = os.fsdecode(source)
        if text.startswith("file://"):
            return cls(text.removeprefix("file://"))
        if is_address(text) and not isinstance(source, str):
            text = os.path.join(".", text)  # noqa: PTH118 - pathlib would drop the dot
        return cls(text)

    def __str__(self) -> str:
        return self.name

    @property
    def remote(self) -> bool:
        """Whether this is an address."""
        return is_address(self.text)

    @property
    def path(self) -> Path:
        """The absolute path of a local file."""
        return Path(self.text).absolute()

    def absolute(self) -> Location:
        """Return this location with an absolute path; an address stays as it is."""
        return self if self.remote else Location(os.fspath(self.path))

    @property
    def name(self) -> str:
        """Path or address to show; bytes that are not UTF-8 are escaped."""
        return shown(self.text)

    @property
    def file_name(self) -> str:
        """The last part of the path."""
        if not self.remote:
            return Path(self.text).name
        return self.text.rpartition("/")[2].partition("?")[0]

    @property
    def stem(self) -> str:
        """The file's name up to its first dot; prefix of the ids of its items."""
        return shown(self.file_name).partition(".")[0] or shown(self.file_name)

    def open(self) -> BinaryIO:
        """Open the file for reading; errors while reading depend on the file system.

        Raises:
            DataError: it cannot be opened.
            MissingDependency: a package for this kind of address is not installed.
        """
        if self.remote:
            with readable(self.text):
                system, path = file_system(self.text)
                return cast(BinaryIO, system.open(path, "rb"))
        try:
            return Path(self.text).open("rb")
        except OSError as fault:
            raise DataError(f"{self.name} cannot be read: {fault.strerror or fault}.") from None

    def read(self, most: int) -> bytes:
        """Return the content of the file.

        Raises:
            DataError: the file cannot be read or has more than `most` bytes.
        """
        with self.open() as file, readable(self.name):
            content = file.read(most + 1)
        if len(content) > most:
            raise DataError(
                f"{self} has more than {most:,} bytes, the limit. Save it smaller, or raise the"
                " limit."
            )
        return content

    def stamp(self) -> str:
        """Return a text that changes when the file does; "missing" if the file does not exist."""
        try:
            if self.remote:
                with readable(self.text):
                    system, path = file_system(self.text)
                    return stamp_of(system.info(path))
            status = Path(self.text).stat()
        except (OSError, DataError):
            return "missing"
        return f"{status.st_size} {status.st_mtime_ns}"

    def beside(self, name: str) -> Location:
        """Return a file that this manifest names relative to itself.

        Raises:
            DataError: a manifest at an address names a file outside its own folder. A stranger's
                manifest must not choose which files are read here.
        """
        if not self.remote:
            return Location(os.fspath((self.path.parent / name).absolute()))
        climbs = ".." in PurePosixPath(name).parts
        if name.startswith(("/", "\\")) or is_address(name) or "::" in name or climbs:
            raise DataError(
                f"{self.text} names '{printable(name)[:100]}'; a manifest at an address names files"
                " below its own folder."
            )
        return Location(f"{self.text.rpartition('/')[0]}/{name}")

    def is_folder(self) -> bool:
        """Return whether this is a folder; an address ending in a table's extension is not checked.

        Raises:
            DataError: the address does not exist or cannot be accessed.
        """
        if not self.remote:
            return self.path.is_dir()
        if self.file_name.lower().endswith(".csv") or is_table(self.file_name):
            return False
        with readable(self.text):
            system, path = file_system(self.text)
            if system.isdir(path):
                return True
            system.info(path)
            return False

    def images(self) -> tuple[list[tuple[str, str]], list[str]]:
        """Return the images below this folder at an address, by their extension.

        Returns:
            Pairs of relative path and stamp, and notes on files that were left out.

        Raises:
            DataError: the folder cannot be listed or contains no image.
        """
        with readable(self.text):
            system, root = file_system(self.text)
            files: dict[str, dict[str, Any]] = system.find(root, detail=True)
        if len(files) > _MOST_FILES:
            raise DataError(
                f"{self.text} holds {len(files):,} files; the limit is {_MOST_FILES:,}."
            )
        images: list[tuple[str, str]] = []
        count = 0
        for name, info in sorted(files.items()):
            inside = PurePosixPath(name.removeprefix(root.rstrip("/")).lstrip("/"))
            hidden = any(part.startswith(".") for part in inside.parts)
            if hidden or info.get("type") == "directory":
                continue
            if inside.suffix.lower() in IMAGE_EXTENSIONS:
                images.append((inside.as_posix(), stamp_of(info)))
            else:
                count += 1
        are = "s are" if count > 1 else " is"
        note = f"{self.text}: {count:,} file{are} left out, being no image by name."
        notes = [note] if count else []
        if not images:
            raise DataError(" ".join([f"{self.text} holds no image.", *notes]))
        return images, notes


def stamp_of(info: dict[str, Any]) -> str:
    """Return a text that changes when a file does: its size and its file system's tags or times."""
    marks = [f"{name} {info[name]}" for name in (*_TAGS, *_TIMES) if info.get(name) is not None]
    return f"{info.get('size', info.get('file_size'))} {' '.join(marks[:2])}".rstrip()


@contextmanager
def readable(name: str) -> Iterator[None]:
    """Context manager that turns any exception of a file system into a sentence."""
    try:
        yield
    except RetrievalError:
        raise
    except ImportError as fault:
        raise MissingDependency(
            f"{name} needs a package that is not installed: {printable(str(fault))}"
        ) from None
    except FileNotFoundError:
        raise DataError(f"{name} does not exist.") from None
    except Exception as fault:
        reason = printable(" ".join(str(fault).split()))[:300].rstrip(".")
        raise DataError(
            f"{name} cannot be read: {type(fault).__name__}{f': {reason}' if reason else ''}."
        ) from None


def file_system(address: str) -> tuple[Any, str]:
    """Return the file system of an address and the path in it."""
    try:
        import fsspec
    except ImportError:
        raise MissingDependency(
            "Addresses need fsspec. Install it with: pip install 'embedding-retrieval[fsspec]'"
        ) from None
    if "::" in address:
        raise DataError(
            f"{address} is a chain of addresses; one address is read. Unpack an archive first."
        )
    if urlsplit(address).password:
        raise DataError(
            "An address with a password would be kept in the index. Configure"
            f" {address.partition(':')[0]} for fsspec instead."
        )
    system, path = fsspec.core.url_to_fs(address)
    return system, path


@dataclass(frozen=True, slots=True)
class Origin:
    """Location of an original that is not a local file of its own.

    Attributes:
        location: file that contains the original.
        part: place of the original within that file, such as a row number. `None` for the whole
            file.
        file_stamp: stamp of that file when the item was collected.
    """

    location: Location
    part: str | None
    file_stamp: str

    @property
    def address(self) -> str:
        """Location and part joined by '#'; `recorded` splits them again."""
        if self.part is None:
            return f"{self.location.text}#" if "#" in self.location.text else self.location.text
        return f"{self.location.text}#{self.part}"

    def stamp(self) -> str:
        """Return a text that changes when the original does."""
        return f"{os.fsencode(self.address)!r} {self.file_stamp}"

    @classmethod
    def recorded(cls, address: str, stamp: str | None) -> Origin:
        """Return the origin for an address and stamp that an index recorded."""
        text, sign, part = address.rpartition("#")
        head = f"{os.fsencode(address)!r} "
        inside = unquote(part) if sign and part else None
        return cls(Location(text if sign else address), inside, (stamp or "").removeprefix(head))


Original: TypeAlias = "Path | Origin | bytes | Floats | DataError"
"""An item's content or its location: a path, an origin, bytes, or finite features (F,).

A `DataError` says why the content is missing.
"""


@dataclass(frozen=True, slots=True)
class Source:
    """One item to encode: an image, or a row of the collected features.

    Attributes:
        key: id of the item.
        label: its label, or `None`.
        path: path of the image or `.npz` file. `None` if the item has an `origin`.
        metadata: further columns of a manifest.
        row: its row in `Sources.features`. `None` for an image.
        origin: location of content that is not a local file of its own.
        recorded: stamp from when the item was embedded, if it comes with its vector.
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
        """Path or address to show in messages."""
        return shown(self.origin.address if self.path is None and self.origin else str(self.path))

    def stamp(self) -> str:
        """Return a text that changes when the item does: path, row, size and time of its file."""
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
        items: the items.
        features: features (N, F), or `None` for images.
        repeated: number of files named more than once; each is used once.
        left_out: one sentence per reason why files or columns were left out.
    """

    items: list[Source]
    features: Floats | None = None
    repeated: int = 0
    left_out: tuple[str, ...] = ()
