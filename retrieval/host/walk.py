"""The one walk through a folder of data: links are followed, circles end, hidden skipped."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from retrieval.errors import DataError

IMAGE_EXTENSIONS = frozenset(
    {
        *(".bmp", ".gif", ".jpeg", ".jpg", ".png", ".ppm", ".pgm", ".tif", ".tiff", ".webp"),
        *(".avif", ".heic", ".heif", ".hif"),
    }
)
"""Of files that are taken for images, in small letters."""
MAX_VISITS = 100
"""How often links may lead to one folder: folders that all link to one another make factorially
many paths.
"""


def files_below(folder: Path) -> Iterator[Path]:
    """Yield the files below a folder in a fixed order, those of a folder before its own folders'.

    Symbolic links to files and folders are followed, as torchvision and timm follow them. A link
    back to a folder that leads to it is not entered again. Two links to one folder are two folders.
    A link that leads nowhere is yielded like a file: see `leads_nowhere`.

    Raises:
        DataError: it is not a folder, a folder below it cannot be read, or links lead to one folder
            more than a hundred times.
    """
    if not folder.is_dir():
        raise DataError(f"{folder} is not a folder.")
    waiting: list[tuple[Path, frozenset[tuple[int, int]]]] = [(folder, frozenset())]
    visits: Counter[tuple[int, int]] = Counter()
    while waiting:
        place, above = waiting.pop()
        try:
            state = place.stat()
            with os.scandir(place) as scan:
                entries = sorted(scan, key=lambda entry: entry.name)
        except OSError as error:
            raise DataError(f"{place} cannot be read: {error.strerror or error}.") from error
        identity = (state.st_dev, state.st_ino)
        if identity in above:
            continue
        visits[identity] += 1
        if visits[identity] > MAX_VISITS:
            raise DataError(
                f"{folder}: links lead to {place.resolve()} more than {MAX_VISITS} times. "
                "Remove links between folders that link to one another."
            )
        inner = []
        for entry in entries:
            if entry.name.startswith("."):
                continue
            if _is_folder(entry):
                inner.append((place / entry.name, above | {identity}))
            else:
                yield place / entry.name
        waiting += reversed(inner)


def leads_nowhere(path: Path) -> bool:
    """Return whether a path is a symbolic link without a target, or in a circle."""
    return path.is_symlink() and not path.exists()


def own_name(folder: Path) -> str:
    """Return a folder's name as the user sees it: a link's own name, and that of "."."""
    return Path(os.path.abspath(folder)).name  # noqa: PTH100 - resolve() would name the link's target


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a circle of links, or a folder that may not be entered: what opens it says so
        return False
