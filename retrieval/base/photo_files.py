"""Photos in folders, and at addresses that fsspec reads, such as `s3://bucket/photo.jpg`.

A relative path that begins with a scheme stands for an address: pathlib writes
`s3://bucket/photo.jpg` as `s3:/bucket/photo.jpg`. So an address goes wherever a path goes: through
a command line, a table and an index.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from retrieval.errors import DataError, MissingDependency, RetrievalError, ServerError, valid_text

IMAGE_EXTENSIONS = frozenset(
    {
        *(".bmp", ".gif", ".jpeg", ".jpg", ".png", ".ppm", ".pgm", ".tif", ".tiff", ".webp"),
        *(".avif", ".heic", ".heif", ".hif"),
    }
)
"""Lower-case file name extensions of images."""
MAX_VISITS = 100
"""How often links may lead to one folder: n folders that all link to each other have n! paths."""
_ADDRESS = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/+(.*)", re.DOTALL)
_PACKAGES = {"s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "hf": "huggingface_hub"}
"""The package that reads a scheme's addresses by fsspec."""
_STATES = ("ETag", "md5Hash", "etag", "blob_id", "LastModified", "updated", "mtime", "created")
"""What a file system tells of a file that changes with its content, the best first.

One is enough: a listing may tell fewer of them than a request for a single file.
"""
_REASON_CHARACTERS = 300


def files_below(folder: Path) -> Iterator[Path]:
    """Yield the files below a folder in a fixed order, each folder's own files first.

    Symbolic links are followed, as in torchvision and timm, except to a folder's own parents. A
    broken link is yielded like a file; see `leads_nowhere`.

    Raises:
        DataError: the path is not a folder, a folder below it cannot be read, or links lead to one
            folder more than a hundred times.
    """
    if not folder.is_dir():
        raise DataError(f"{folder} is not a folder.")
    waiting: list[tuple[Path, frozenset[tuple[int, int]]]] = [(folder, frozenset())]
    visits: Counter[tuple[int, int]] = Counter()
    while waiting:
        current, above = waiting.pop()
        try:
            state = current.stat()
            with os.scandir(current) as scan:
                entries = sorted(scan, key=lambda entry: entry.name)
        except OSError as error:
            raise DataError(f"{current} cannot be read: {error.strerror or error}.") from error
        identity = (state.st_dev, state.st_ino)
        if identity in above:
            continue
        visits[identity] += 1
        if visits[identity] > MAX_VISITS:
            raise DataError(
                f"{folder}: links lead to {current.resolve()} more than {MAX_VISITS} times. "
                "Remove links between folders that link to one another."
            )
        inner = []
        for entry in entries:
            if entry.name.startswith("."):
                continue
            if _is_folder(entry):
                inner.append((current / entry.name, above | {identity}))
            else:
                yield current / entry.name
        waiting += reversed(inner)


def leads_nowhere(path: Path) -> bool:
    """Return whether a path is a broken symbolic link, or part of a cycle of links."""
    return path.is_symlink() and not path.exists()


def own_name(folder: Path) -> str:
    """Return the name of a folder, or of the link to it, as valid text; "." is resolved."""
    # `resolve` would name the target of a link
    name = Path(os.path.abspath(folder)).name  # noqa: PTH100
    return valid_text(name)


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:
        # It is a cycle of links, or there is no permission: whoever opens it gets the error.
        return False


def address_of(path: str | os.PathLike[str]) -> str | None:
    """Return the address that a path stands for, or `None` for the path of a local file."""
    match = _ADDRESS.fullmatch(os.fsdecode(path))
    if match is None:
        return None
    return f"{match[1]}://{match[2]}"


def path_text(path: str | os.PathLike[str]) -> str:
    """Return a path or an address as valid UTF-8 text; bytes that are not UTF-8 are escaped."""
    return os.fsencode(address_of(path) or path).decode("utf-8", "backslashreplace")


def whole_path(path: Path) -> Path:
    """Return the absolute path of a local file; an address stays."""
    if address_of(path):
        return path
    return path.absolute()


def path_in(folder: Path, text: str) -> Path:
    """Return the path that a table in a folder names: an address, or a path below the folder."""
    if address_of(text):
        return Path(text)
    return folder / text


@cache
def unreadable(scheme: str) -> str:
    """Return why addresses with a scheme cannot be read, as a sentence, or ""."""
    try:
        import fsspec
    except ImportError:
        return (
            f"Photos at {scheme}:// need fsspec. Install it with: pip install"
            " 'embedding-retrieval[remote]'"
        )
    try:
        fsspec.get_filesystem_class(scheme)
    except ImportError as error:
        package = _PACKAGES.get(scheme)
        if package:
            how = f"Install it with: pip install {package}"
        else:
            how = _reason(error)
        return f"Photos at {scheme}:// need {package or 'a package that is missing'}. {how}"
    except ValueError:
        return f"fsspec reads no photos at {scheme}://. Copy the files, or mount the storage."
    return ""


def exists(path: Path) -> bool:
    """Return whether a local path or an address exists."""
    address = address_of(path)
    if address is None:
        return path.exists()
    with _sentences(address):
        system, inner = _opened(address)
        return bool(system.exists(inner))


def is_folder(path: Path) -> bool:
    """Return whether a local path or an address is a folder."""
    address = address_of(path)
    if address is None:
        return path.is_dir()
    with _sentences(address):
        system, inner = _opened(address)
        return bool(system.isdir(inner))


def remote_files(folder: Path) -> Iterator[Path]:
    """Yield the files below an address, except hidden files and folders.

    Raises:
        DataError: a name is none that a path can have, such as `a//b.png`.
        ServerError, MissingDependency: the address cannot be read.
    """
    address = str(address_of(folder))
    with _sentences(address):
        system, inner = _opened(address)
        system.invalidate_cache(inner)
        names = system.find(inner)
    above = inner.rstrip("/") + "/"
    for name in names:
        below = name.removeprefix(above)
        if any(part.startswith(".") for part in below.split("/")):
            continue
        if Path(below).as_posix() != below:
            raise DataError(f"{address} holds '{below}', which is not the name of a path.")
        yield folder / below


def remote_state(path: Path) -> str:
    """Return text that changes when the file at an address changes, or "missing".

    The text begins with the size.
    """
    address = str(address_of(path))
    try:
        with _sentences(address):
            system, inner = _opened(address)
            info = system.info(inner)
    except DataError:
        return "missing"
    state = next((info[name] for name in _STATES if info.get(name) is not None), "")
    return f"{info.get('size')} {state}"


def too_many_bytes(name: str, size: int, most: int) -> DataError:
    """Return the error of a file that is larger than a limit."""
    return DataError(
        f"{name} has {size:,} bytes; the limit is {most:,}. Save it smaller, or raise the limit on"
        " bytes."
    )


def read_remote(path: str | os.PathLike[str], name: str, most: int) -> bytes:
    """Return the content of the file at an address.

    Raises:
        DataError: the file has more than `most` bytes, does not exist, or may not be read.
        ServerError, MissingDependency: the address cannot be read.
    """
    with _sentences(name):
        system, inner = _opened(str(address_of(path)))
        info = system.info(inner)
        if info.get("type") == "directory":
            raise DataError(f"{name} is a folder, not an image.")
        size = info.get("size")
        # S3 refuses a range of an empty file.
        if size == 0:
            return b""
        if size is not None and size > most:
            raise too_many_bytes(name, size, most)
        # Not the whole file: it may have grown, and a web server may not tell its size.
        content = bytes(system.cat_file(inner, start=0, end=size or most + 1))
    if len(content) > most:
        raise too_many_bytes(name, len(content), most)
    return content


def read_remote_head(path: Path, length: int) -> bytes:
    """Return the first bytes of the file at an address; see `read_remote` for errors."""
    address = str(address_of(path))
    with _sentences(address):
        system, inner = _opened(address)
        if system.info(inner).get("size") == 0:
            return b""
        return bytes(system.cat_file(inner, start=0, end=length))


def _opened(address: str) -> tuple[Any, str]:
    """Return fsspec's file system of an address, and the path in it.

    It is looked up each time, since a forked process may not use the one of its parent.
    """
    scheme = address.partition(":")[0]
    if why := unreadable(scheme):
        raise MissingDependency(why)
    import fsspec

    system, inner = fsspec.core.url_to_fs(address)
    return system, str(inner)


@contextmanager
def _sentences(name: str) -> Iterator[None]:
    """Context manager that turns errors of fsspec into sentences.

    What is wrong with one file is a `DataError`. Any other error stops the work: if the network is
    down, every photo would be called unusable.
    """
    try:
        yield
    except RetrievalError:
        raise
    except FileNotFoundError:
        raise DataError(f"{name} does not exist.") from None
    except (PermissionError, IsADirectoryError) as error:
        raise DataError(f"{name} cannot be read: {_reason(error)}.") from None
    except Exception as error:
        # Each service has error classes of its own.
        raise ServerError(f"{name} cannot be read: {_reason(error)}.") from None


def _reason(error: BaseException) -> str:
    text = " ".join(str(error).split())[:_REASON_CHARACTERS].rstrip(".")
    return text or type(error).__name__
