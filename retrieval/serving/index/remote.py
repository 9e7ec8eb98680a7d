"""Files at addresses that fsspec opens: `s3://…`, `gs://…`, `hf://…`, `memory://…`, `zip://…::file`."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, cast
from urllib.parse import urlsplit

from retrieval.errors import DataError, MissingDependency, printable
from retrieval.host.walk import files_below
from retrieval.serving.images import EXTENSIONS

_ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*(://|::)")
_ARCHIVES = ("zip", "tar", "libarchive")
_BUFFER = 1 << 20
_FILES = 10_000_000
_TOLD = ("ETag", "etag", "md5Hash", "crc32c", "CRC", "sha256", "blob_id", "content_md5")
_TIMES = ("LastModified", "last_modified", "mtime", "modified", "updated", "date_time", "created")


def is_address(text: object) -> bool:
    """Whether a source is an address, not a local path."""
    return isinstance(text, str) and _ADDRESS.match(text) is not None


@contextmanager
def _sentences(address: str, of: type[Exception] = DataError) -> Iterator[None]:
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
        raise of(f"{address} does not exist.") from None
    except Exception as fault:
        said = printable(" ".join(str(fault).split()))[:300].rstrip(".")
        raise of(f"{address} cannot be read: {type(fault).__name__}{f': {said}' if said else ''}.") from None


def _parts(address: str) -> tuple[str, str, str]:
    """Return the link of a chain of addresses that has the path, and what stands before and behind it."""
    links = address.split("::")
    at = next((at for at, link in enumerate(links) if "://" in link), 0)
    return (
        "".join(f"{one}::" for one in links[:at]),
        links[at],
        "".join(f"::{one}" for one in links[at + 1 :]),
    )


def file_name(address: str) -> str:
    """Return the last part of an address's path."""
    return _parts(address)[1].rpartition("/")[2].partition("?")[0]


def below(address: str, name: str) -> str:
    """Return the address of a file below a folder's."""
    before, link, behind = _parts(address)
    return f"{before}{link}{'' if link.endswith('/') else '/'}{name}{behind}"


def beside(address: str, name: str) -> str:
    """Return the address of a file that a manifest at an address names, relative to itself.

    Raises:
        DataError: it is not below the manifest's folder: a stranger's manifest may not choose what is read here.
    """
    if name.startswith(("/", "\\")) or is_address(name) or "::" in name or ".." in PurePosixPath(name).parts:
        raise DataError(
            f"{address} names '{printable(name)[:100]}'; a manifest at an address names files below its own folder."
        )
    before, link, behind = _parts(address)
    return f"{before}{link[: link.rindex('/') + 1]}{name}{behind}"


@lru_cache(maxsize=8)
def _archive(address: str) -> Any:
    import fsspec

    return fsspec.core.url_to_fs(address)[0]


def _system(address: str) -> tuple[Any, str]:
    """Return the file system of an address, and the path in it."""
    try:
        import fsspec
    except ImportError:
        raise MissingDependency(
            "Addresses need fsspec. Install it with: pip install 'embedding-retrieval[fsspec]'"
        ) from None
    before, link, behind = _parts(address)
    scheme, _, path = link.partition("://")
    if urlsplit(link).password:
        raise DataError(
            f"An address with a password would be kept in the index. Configure {scheme} for fsspec instead."
        )
    if scheme in _ARCHIVES and behind and not before:
        return _archive(f"{scheme}://{behind}"), path  # its table of contents is read once
    system, path = fsspec.core.url_to_fs(address)
    return system, path


def forget(address: str) -> None:
    """Have the next look at an address be a fresh one."""
    _archive.cache_clear()
    with _sentences(address):
        _system(address)[0].invalidate_cache()


def stamp_of(info: dict[str, Any]) -> str:
    """Return what changes when a file does, of what its file system tells: size, and a tag or time where there is one."""
    told = [f"{name} {info[name]}" for name in (*_TOLD, *_TIMES) if info.get(name) is not None]
    return f"{info.get('size', info.get('file_size'))} {' '.join(told[:2])}".rstrip()


def stamp(address: str) -> str:
    """Return the stamp of a file; "missing" when there is none."""
    try:
        with _sentences(address):
            system, path = _system(address)
            return stamp_of(system.info(path))
    except DataError:
        return "missing"


def is_folder(address: str) -> bool:
    """Whether there is a folder at an address.

    Raises:
        DataError: there is nothing, or it cannot be looked at.
    """
    with _sentences(address):
        system, path = _system(address)
        if system.isdir(path):
            return True
        system.info(path)
        return False


class _File(io.RawIOBase):
    """A file of fsspec's whose faults are OSErrors, whatever the file system raises."""

    def __init__(self, file: Any, address: str) -> None:
        self._file, self._address = file, address

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return bool(self._file.seekable())

    def readinto(self, buffer: Any) -> int:
        content = self._asked(self._file.read, len(buffer))
        buffer[: len(content)] = content
        return len(content)

    def seek(self, offset: int, whence: int = 0) -> int:
        return int(self._asked(self._file.seek, offset, whence))

    def tell(self) -> int:
        return int(self._file.tell())

    def _asked(self, what: Callable[..., Any], *given: int) -> Any:
        with _sentences(self._address, OSError):
            return what(*given)

    def close(self) -> None:
        if not self.closed:
            self._file.close()
        super().close()


def open_address(address: str) -> BinaryIO:
    """Open a file for reading.

    Raises:
        DataError: it cannot be opened.
        MissingDependency: fsspec, or the package of the address's protocol, is not installed.
    """
    with _sentences(address):
        system, path = _system(address)
        return cast(BinaryIO, io.BufferedReader(_File(system.open(path, "rb"), address), _BUFFER))


def _listing(system: Any, root: str) -> dict[str, dict[str, Any]]:
    """Return what a file system tells of each file below a folder."""
    if "file" in system.protocol:  # fsspec takes a link to a folder of this machine for a file
        return {str(path): system.info(str(path)) for path in files_below(Path(root))}
    found: dict[str, dict[str, Any]] = system.find(root, detail=True)
    return found


def find_images(address: str) -> tuple[list[tuple[str, str]], list[str]]:
    """Return the images below a folder, by their extension, as paths below it with their stamps; and notes on other files.

    Raises:
        DataError: it cannot be listed, or holds no image.
    """
    with _sentences(address):
        system, root = _system(address)
        found = _listing(system, root)
    if len(found) > _FILES:
        raise DataError(f"{address} holds {len(found):,} files; {_FILES:,} are read.")
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
    notes = [
        f"{address}: {others:,} file{'s are' if others > 1 else ' is'} left out, being no image by name."
    ]
    if not images:
        raise DataError(f"{address} holds no image. {notes[0] if others else ''}".rstrip())
    return images, notes if others else []
