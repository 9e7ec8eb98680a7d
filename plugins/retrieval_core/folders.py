"""A folder of images, with one folder per class."""

from __future__ import annotations

import logging
from pathlib import Path

from retrieval.data.datasets import FileDataset
from retrieval.data.error_lists import some
from retrieval.data.readable import ADVICE, report_left_out, skip_unreadable
from retrieval.data.splits import SIDES
from retrieval.errors import DataError
from retrieval.plugin import Dataset
from retrieval.serving.image_files import find_images

log = logging.getLogger(__name__)


def image_folder(folder: Path, skip_bad: bool = False) -> Dataset:
    """Read a folder with one folder of images for each class: `folder/CLASS/*.jpg`.

    Where all of its folders are called `train`, `validation` (or `val`), `test`, `query` or
    `gallery` and hold the classes' folders (`folder/train/CLASS/*.jpg`), that is the data's own
    split. An item's key is its path below `folder`.

    Args:
        folder: the folder; a relative path starts where the command runs.
        skip_bad: whether images that cannot be read are named and left out; otherwise the first one
            ends the run.

    Raises:
        DataError: the folder does not exist, holds no image, or holds images outside the classes'
            folders.
    """
    if not folder.is_dir():
        raise DataError(
            f"[data] folder: {folder} is not a folder. Relative paths start at {Path.cwd()}."
        )
    top = _folders(folder)
    split = bool(top) and all(place.name.lower() in SIDES and _folders(place) for place in top)
    depth = 2 if split else 1  # folders above an image, its class the last of them
    found = find_images(folder)
    files, notes = found.images, report_left_out(found, folder, skip_bad)
    keys = [file.relative_to(folder) for file in files]
    stray = [key for key in keys if len(key.parts) <= depth]
    if stray:
        several = len(stray) > 1
        raise DataError(
            f"{folder}: {len(stray):,} image{'s lie' if several else ' lies'} in no class's folder,"
            f" so there is no label: {some(stray)}. Move {'them' if several else 'it'}."
        )
    classes = [inner for place in top for inner in _folders(place)] if split else top
    filled = {folder.joinpath(*key.parts[:depth]) for key in keys}
    empty = [place.relative_to(folder) for place in classes if place not in filled]
    if empty:
        log.warning("%s: no image in %s.", folder, some(empty))
    if skip_bad:
        kept, unread = skip_unreadable(files, str(folder))
        notes += unread
        files, keys = [files[i] for i in kept], [keys[i] for i in kept]
    sides = [SIDES[key.parts[0].lower()] for key in keys] if split else None
    roles = [role for _, role in sides] if sides else []
    return FileDataset(
        files,
        [key.parts[depth - 1] for key in keys],
        [key.as_posix() for key in keys],
        splits=[side for side, _ in sides] if sides else None,
        roles=roles if any(roles) else None,
        advice=ADVICE,
        notes=notes,
    )


def _folders(folder: Path) -> list[Path]:
    """Return the folders in a folder, hidden ones left out."""
    try:
        return sorted(
            place for place in folder.iterdir() if place.is_dir() and not place.name.startswith(".")
        )
    except OSError as error:
        raise DataError(f"{folder} cannot be read: {error.strerror or error}.") from error
