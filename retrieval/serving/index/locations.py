"""Items to index, and where their content lies: in a file, in a table, or at an address."""

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
"""The file that says that a folder holds embeddings, and of what."""
_ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*(://|::)")
_MOST_FILES = 10_000_000
_TAGS = ("ETag", "etag", "md5Hash", "crc32c", "CRC", "sha256", "blob_id", "content_md5")
_TIMES = ("LastModified", "last_modified", "mtime", "modified", "updated", "date_time", "created")


def is_address(text: object) -> bool:
    """Return whether a source is an address and not a local path."""
    return isinstance(text, str) and _ADDRESS.match(text) is not None


def is_table(name: str) -> bool:
    """Return whether a file is a Parquet table, by its name."""
    return name.lower().endswith((".parquet", ".pq"))


def is_embedding(place: object) -> bool:
    """Return whether something is a folder that `retrieval embed` writes."""
    return isinstance(place, str | os.PathLike) and (Path(place) / PLAN).is_file()


def shown(path: str | os.PathLike[str]) -> str:
    """Return a path as text that any file can hold: a name that is not UTF-8 shows its bytes."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")


@dataclass(frozen=True, slots=True)
class Location:
    """A file or folder of this machine, or at an address that fsspec opens.

    Attributes:
        text: its path, or its address.
    """

    text: str

    @classmethod
    def of(cls, source: object) -> Location:
        """Return the location that a user names: a path, or an address as text.

        Raises:
            DataError: it is neither.
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
            text = os.path.join(".", text)  # noqa: PTH118 - pathlib drops the dot
        return cls(text)

    def __str__(self) -> str:
        return self.name

    @property
    def remote(self) -> bool:
        """Whether it is at an address."""
        return is_address(self.text)

    @property
    def path(self) -> Path:
        """The absolute path of a local file."""
        return Path(self.text).absolute()

    def absolute(self) -> Location:
        """Return the same place by its absolute path, or its address."""
        return self if self.remote else Location(os.fspath(self.path))

    @property
    def name(self) -> str:
        """What a person reads: a name that is not UTF-8 shows its bytes."""
        return shown(self.text)

    @property
    def file_name(self) -> str:
        """The last part of the path, which tells the kind of file."""
        if not self.remote:
            return Path(self.text).name
        return self.text.rpartition("/")[2].partition("?")[0]

    @property
    def stem(self) -> str:
        """The file's name up to its first dot, which begins the ids of its items."""
        return shown(self.file_name).partition(".")[0] or shown(self.file_name)

    def open(self) -> BinaryIO:
        """Open the file for reading; what reading from an address raises depends on its system.

        Raises:
            DataError: it cannot be opened.
            MissingDependency: a package that the address needs is not installed.
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
            DataError: it cannot be read, or has more than `most` bytes.
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
        """Return what changes when the content does; "missing" where there is no file."""
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
        """Return a file that this manifest names, relative to itself.

        Raises:
            DataError: a manifest at an address names a file elsewhere than below its own folder:
                a stranger may not choose what is read here.
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
        """Return whether this is a folder; the name of an address may tell it without a look.

        Raises:
            DataError: there is nothing at the address, or it cannot be looked at.
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
        """Return the images below this folder at an address, known by their extension.

        Returns:
            The path of each below the folder with its stamp, and notes on other files.

        Raises:
            DataError: the folder cannot be listed, or holds no image.
        """
        with readable(self.text):
            system, root = file_system(self.text)
            files: dict[str, dict[str, Any]] = system.find(root, detail=True)
        if len(files) > _MOST_FILES:
            raise DataError(f"{self.text} holds {len(files):,} files; {_MOST_FILES:,} are read.")
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
    """Return what changes when a file does: its size, and tags or times that its system knows."""
    marks = [f"{name} {info[name]}" for name in (*_TAGS, *_TIMES) if info.get(name) is not None]
    return f"{info.get('size', info.get('file_size'))} {' '.join(marks[:2])}".rstrip()


@contextmanager
def readable(name: str) -> Iterator[None]:
    """Turn what a file system raises, which may be anything, into a sentence."""
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
    """Return the file system of an address, and the path in it."""
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
    """Where an original is that is not a local file of its own.

    Attributes:
        location: the file that holds it.
        part: the number of its row in that file, a table; None where it is the whole file.
        file_stamp: what changes when that file does, as it was when the item was found.
    """

    location: Location
    part: str | None
    file_stamp: str

    @property
    def address(self) -> str:
        """The location and the part as one text, divided by its last '#'; `recorded` reads it."""
        if self.part is None:
            return f"{self.location.text}#" if "#" in self.location.text else self.location.text
        return f"{self.location.text}#{self.part}"

    def stamp(self) -> str:
        """Return what changes when the original does."""
        return f"{os.fsencode(self.address)!r} {self.file_stamp}"

    @classmethod
    def recorded(cls, address: str, stamp: str | None) -> Origin:
        """Return the origin that an index has recorded, by its address and stamp."""
        text, sign, part = address.rpartition("#")
        head = f"{os.fsencode(address)!r} "
        inside = unquote(part) if sign and part else None
        return cls(Location(text if sign else address), inside, (stamp or "").removeprefix(head))


Original: TypeAlias = "Path | Origin | bytes | Floats | DataError"
"""An item's content, or where to read it: a file, an address, bytes, finite features (F,), or why
there is none.
"""


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
        left_out: a sentence on what is left out of folders and tables, for each reason.
    """

    items: list[Source]
    features: Floats | None = None
    repeated: int = 0
    left_out: tuple[str, ...] = ()
