"""Walk a folder of data: follow links, stop at cycles, skip hidden files."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from retrieval.errors import DataError, valid_text

IMAGE_EXTENSIONS = frozenset(
    {
        *(".bmp", ".gif", ".jpeg", ".jpg", ".png", ".ppm", ".pgm", ".tif", ".tiff", ".webp"),
        *(".avif", ".heic", ".heif", ".hif"),
    }
)
"""Lower-case file name extensions of images."""
MAX_VISITS = 100
"""How often links may lead to one folder: n folders that all link to each other have n! paths."""


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
    except OSError:  # a cycle of links, or no permission: whoever opens it gets the error
        return False
