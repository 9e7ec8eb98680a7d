"""Where a file is: on this machine, or at an address that fsspec opens (`s3://…`, `hf://…`, `zip://…::file`)."""

from __future__ import annotations

import io
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, cast
from urllib.parse import urlsplit

from retrieval.errors import DataError, MissingDependency, printable
from retrieval.serving.images import EXTENSIONS

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
    """One file, or one folder at an address.

    Attributes:
        text: its absolute path, or its address.
    """

    text: str

    def __str__(self) -> str:
        return self.name

    @property
    def remote(self) -> bool:
        """Whether it is at an address."""
        return is_address(self.text)

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
        """Return a file that a manifest at this address names, relative to itself.

        Raises:
            DataError: it is not below the manifest's folder: a stranger's manifest may not choose what is read here.
        """
        climbs = ".." in PurePosixPath(name).parts
        if name.startswith(("/", "\\")) or is_address(name) or "::" in name or climbs:
            raise DataError(
                f"{self.text} names '{printable(name)[:100]}'; a manifest at an address names files below its own folder."
            )
        before, link, behind = _split(self.text)
        return Location(f"{before}{link[: link.rindex('/') + 1]}{name}{behind}")

    def refresh(self) -> None:
        """Have the next look at this address ask its file system anew."""
        _archive.cache_clear()
        with _sentences(self.text):
            _file_system(self.text)[0].invalidate_cache()

    def is_folder(self) -> bool:
        """Return whether there is a folder at this address.

        Raises:
            DataError: there is nothing, or it cannot be looked at.
        """
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
            if any(part.startswith(".") for part in inside.parts) or info.get("type") == "directory":
                continue
            if inside.suffix.lower() in EXTENSIONS:
                images.append((inside.as_posix(), stamp_of(info)))
            else:
                others += 1
        are = "s are" if others > 1 else " is"
        notes = [f"{self.text}: {others:,} file{are} left out, being no image by name."] if others else []
        if not images:
            raise DataError(" ".join([f"{self.text} holds no image.", *notes]))
        return images, notes


def stamp_of(info: dict[str, Any]) -> str:
    """Return what changes when a file does, from its file system's entry: the size, and tags or times where it has some."""
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
    """Return the link of a chain of addresses that has the path, with what stands before and behind it around it."""
    links = address.split("::")
    at = next((at for at, link in enumerate(links) if "://" in link), 0)
    before, behind = links[:at], links[at + 1 :]
    return "".join(f"{link}::" for link in before), links[at], "".join(f"::{link}" for link in behind)


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
            f"An address with a password would be kept in the index. Configure {scheme} for fsspec instead."
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
