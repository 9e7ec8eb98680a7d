"""Items to index and where their content lies: in a file, at an address that fsspec opens, or
inside a container.
"""

from __future__ import annotations

import io
import math
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, cast
from urllib.parse import quote, unquote, urlsplit

import numpy as np
from numpy.typing import NDArray

from retrieval.errors import DataError, MissingDependency, printable
from retrieval.serving.filters import metadata_text
from retrieval.serving.images import EXTENSIONS
from retrieval.serving.store.items import check_id

ROW_CHARACTERS = 1_000_000
"""Characters of one item's texts: an index gives no longer ones back."""

_ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*(://|::)")
PLAN = "embedding.json"
"""The file that says that a folder holds embeddings, and of what."""
_ARCHIVES = ("zip", "tar", "libarchive")
_BUFFER_BYTES = 1 << 20
_MAX_FILES = 10_000_000
_TAGS = ("ETag", "etag", "md5Hash", "crc32c", "CRC", "sha256", "blob_id", "content_md5")
_TIMES = ("LastModified", "last_modified", "mtime", "modified", "updated", "date_time", "created")


def is_address(text: object) -> bool:
    """Return whether a source is an address and not a local path."""
    return isinstance(text, str) and _ADDRESS.match(text) is not None


def is_table(name: str) -> bool:
    """Return whether a file is a Parquet table, by its name."""
    return name.lower().endswith((".parquet", ".pq"))


def is_shard(name: str) -> bool:
    """Return whether a file is a tar shard, by its name."""
    return name.lower().endswith((".tar", ".tar.gz", ".tgz"))


def is_embedding(place: object) -> bool:
    """Return whether something is a folder that `retrieval embed` writes."""
    return isinstance(place, str | os.PathLike) and (Path(place) / PLAN).is_file()


def shown(path: str | os.PathLike[str]) -> str:
    """Return a path as text that any file can hold: a name that is not UTF-8 shows its bytes."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")


@dataclass(frozen=True, slots=True)
class Location:
    """A file or folder of this machine, or at an address.

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
        return _split(self.text)[1].rpartition("/")[2].partition("?")[0]

    @property
    def stem(self) -> str:
        """The file's name up to its first dot, which begins the ids of its items."""
        return shown(self.file_name).partition(".")[0] or shown(self.file_name)

    def open(self) -> BinaryIO:
        """Open the file for reading.

        Raises:
            DataError: it cannot be opened.
            MissingDependency: a package that the address needs is not installed.
        """
        if self.remote:
            with _sentences(self.text):
                system, path = _file_system(self.text)
                file = _File(system.open(path, "rb"), self.text)
                return cast(BinaryIO, io.BufferedReader(file, _BUFFER_BYTES))
        try:
            return Path(self.text).open("rb")
        except OSError as fault:
            raise DataError(f"{self.name} cannot be read: {fault.strerror or fault}.") from None

    def stamp(self) -> str:
        """Return what changes when the content does; "missing" where there is no file."""
        try:
            if self.remote:
                with _sentences(self.text):
                    system, path = _file_system(self.text)
                    return stamp_of(system.info(path))
            status = Path(self.text).stat()
        except (OSError, DataError):
            return "missing"
        return f"{status.st_size} {status.st_mtime_ns}"

    def below(self, name: str) -> Location:
        """Return a file below this folder at an address."""
        before, link, behind = _split(self.text)
        return Location(f"{before}{link.rstrip('/')}/{name}{behind}")

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
        before, link, behind = _split(self.text)
        return Location(f"{before}{link[: link.rindex('/') + 1]}{name}{behind}")

    def refresh(self) -> None:
        """Have the next look at this address ask its file system anew."""
        _archive.cache_clear()
        with _sentences(self.text):
            _file_system(self.text)[0].invalidate_cache()

    def is_folder(self) -> bool:
        """Return whether this is a folder; the name of an address may tell it without a look.

        Raises:
            DataError: there is nothing at the address, or it cannot be looked at.
        """
        if not self.remote:
            return self.path.is_dir()
        if (
            self.file_name.lower().endswith(".csv")
            or is_table(self.file_name)
            or is_shard(self.file_name)
        ):
            return False
        with _sentences(self.text):
            system, path = _file_system(self.text)
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
        with _sentences(self.text):
            system, root = _file_system(self.text)
            found: dict[str, dict[str, Any]] = system.find(root, detail=True)
        if len(found) > _MAX_FILES:
            raise DataError(f"{self.text} holds {len(found):,} files; {_MAX_FILES:,} are read.")
        images: list[tuple[str, str]] = []
        others = 0
        for name, info in sorted(found.items()):
            inside = PurePosixPath(name.removeprefix(root.rstrip("/")).lstrip("/"))
            if (
                any(part.startswith(".") for part in inside.parts)
                or info.get("type") == "directory"
            ):
                continue
            if inside.suffix.lower() in EXTENSIONS:
                images.append((inside.as_posix(), stamp_of(info)))
            else:
                others += 1
        are = "s are" if others > 1 else " is"
        notes = (
            [f"{self.text}: {others:,} file{are} left out, being no image by name."]
            if others
            else []
        )
        if not images:
            raise DataError(" ".join([f"{self.text} holds no image.", *notes]))
        return images, notes


def stamp_of(info: dict[str, Any]) -> str:
    """Return what changes when a file does, from its file system's entry: the size, and tags or
    times where it has some.
    """
    marks = [f"{name} {info[name]}" for name in (*_TAGS, *_TIMES) if info.get(name) is not None]
    return f"{info.get('size', info.get('file_size'))} {' '.join(marks[:2])}".rstrip()


@contextmanager
def _sentences(address: str, error: type[Exception] = DataError) -> Iterator[None]:
    """Turn what a file system raises, which may be anything, into a sentence."""
    try:
        yield
    except (DataError, MissingDependency):
        raise
    except ImportError as fault:
        raise MissingDependency(
            f"{address} needs a package that is not installed: {printable(str(fault))}"
        ) from None
    except FileNotFoundError:
        raise error(f"{address} does not exist.") from None
    except Exception as fault:
        reason = printable(" ".join(str(fault).split()))[:300].rstrip(".")
        raise error(
            f"{address} cannot be read: {type(fault).__name__}{f': {reason}' if reason else ''}."
        ) from None


def _split(address: str) -> tuple[str, str, str]:
    """Return the link of a chain of addresses that has the path, with what stands before and behind
    it around it.
    """
    links = address.split("::")
    at = next((at for at, link in enumerate(links) if "://" in link), 0)
    before, behind = links[:at], links[at + 1 :]
    return (
        "".join(f"{link}::" for link in before),
        links[at],
        "".join(f"::{link}" for link in behind),
    )


@lru_cache(maxsize=8)
def _archive(address: str) -> Any:
    import fsspec

    return fsspec.core.url_to_fs(address)[0]


def _file_system(address: str) -> tuple[Any, str]:
    """Return the file system of an address, and the path in it."""
    try:
        import fsspec
    except ImportError:
        raise MissingDependency(
            "Addresses need fsspec. Install it with: pip install 'embedding-retrieval[fsspec]'"
        ) from None
    before, link, behind = _split(address)
    scheme, _, path = link.partition("://")
    if urlsplit(link).password:
        raise DataError(
            f"An address with a password would be kept in the index. Configure {scheme} for fsspec"
            " instead."
        )
    if scheme in _ARCHIVES and behind and not before:
        return _archive(f"{scheme}://{behind}"), path  # an archive's table of contents is read once
    system, path = fsspec.core.url_to_fs(address)
    return system, path


class _File(io.RawIOBase):
    """A file of fsspec's that raises OSError, whatever its file system raises."""

    def __init__(self, file: Any, address: str) -> None:
        self._file, self._address = file, address

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return bool(self._file.seekable())

    def readinto(self, buffer: Any) -> int:
        content = self._call(self._file.read, len(buffer))
        buffer[: len(content)] = content
        return len(content)

    def seek(self, offset: int, whence: int = 0) -> int:
        return int(self._call(self._file.seek, offset, whence))

    def tell(self) -> int:
        return int(self._file.tell())

    def _call(self, method: Callable[..., Any], *numbers: int) -> Any:
        with _sentences(self._address, OSError):
            return method(*numbers)

    def close(self) -> None:
        if not self.closed:
            self._file.close()
        super().close()


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
        """The location and the part as one text, which `recorded` reads: the last '#' is what they
        are divided by.
        """
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
                f"{self.location} has more than {most:,} bytes, the limit. Save it smaller, or"
                " raise the limit."
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
