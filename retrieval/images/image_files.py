"""Find the image files below a folder."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from retrieval.base.photo_files import (
    IMAGE_EXTENSIONS,
    address_of,
    files_below,
    leads_nowhere,
    read_remote_head,
    remote_files,
)
from retrieval.errors import DataError
from retrieval.images.decoding import FORMATS, HEAD_BYTES, format_of
from retrieval.images.preprocessing import as_list

log = logging.getLogger(__name__)

_MAX_LISTED = 3
"""Largest number of file names in a sentence."""
_UNSUPPORTED = {
    "JPEG 2000": (b"\0\0\0\x0cjP  \r\n\x87\n", b"\xff\x4f\xff\x51"),
    "JPEG XL": (b"\0\0\0\x0cJXL ", b"\xff\x0a"),
    "Photoshop": (b"8BPS",),
    "SVG": (b"<svg",),
}
"""First bytes of files in unsupported formats."""


@dataclass(frozen=True)
class ImageFiles:
    """Images and other files of a folder.

    Attributes:
        images: image files, sorted.
        left_out: other files by reason, such as "not an image".
        nowhere: broken links, sorted. They may have led to images or folders of images.
    """

    images: list[Path]
    left_out: dict[str, list[Path]] = field(default_factory=dict)
    nowhere: list[Path] = field(default_factory=list)

    def notes(self, folder: Path) -> list[str]:
        """Return one sentence per reason, with the number of files and the first names."""
        return [
            f"{folder}: {len(files):,} file{'s are' if len(files) > 1 else ' is'} left out"
            f" ({reason}): {_some(files, folder)}."
            for reason, files in self.left_out.items()
        ]

    def dangling(self, folder: Path) -> str:
        """Return a sentence about the broken links, or "" if there are none."""
        if not self.nowhere:
            return ""
        plural = len(self.nowhere) > 1
        return (
            f"{folder}: {len(self.nowhere):,} link{'s lead' if plural else ' leads'} nowhere: "
            f"{_some(self.nowhere, folder)}. Mend or remove {'them' if plural else 'it'}."
        )


def find_images(folder: Path) -> ImageFiles:
    """Return the image files below a folder or an address, except hidden files and folders.

    Images are recognised by extension, or else by their first bytes. Links are followed; see
    `retrieval.base.photo_files.files_below`.

    Raises:
        DataError: `folder` is not a folder, contains no image, or a subfolder cannot be read.
    """
    images: list[Path] = []
    nowhere: list[Path] = []
    left_out: dict[str, list[Path]] = {}
    if address_of(folder):
        files_in = remote_files
    else:
        files_in = files_below
    for path in sorted(files_in(folder)):
        if leads_nowhere(path):
            nowhere.append(path)
            continue
        reason = _reason(path)
        if reason is None:
            images.append(path)
        else:
            left_out.setdefault(reason, []).append(path)
    files = ImageFiles(images, left_out, nowhere)
    if not images:
        seen = " ".join(filter(None, [*files.notes(folder), files.dangling(folder)]))
        raise DataError(
            f"{folder} holds no image in a known format ({', '.join(FORMATS)})."
            f"{f' {seen}' if seen else ''}"
        )
    return files


def _reason(path: Path) -> str | None:
    """Return why a file is left out, or `None` for an image."""
    is_remote = address_of(path) is not None
    if not is_remote and not path.is_file():
        return "not a regular file"
    if path.suffix.lower() in IMAGE_EXTENSIONS:
        return None
    try:
        if is_remote:
            head = read_remote_head(path, HEAD_BYTES)
        else:
            with path.open("rb") as file:
                head = file.read(HEAD_BYTES)
    except OSError as error:
        return f"cannot be read: {error.strerror or error}"
    kind = format_of(head) or next(
        (name for name, starts in _UNSUPPORTED.items() if head.startswith(starts)), None
    )
    if kind is None:
        return "not an image"
    if kind in FORMATS:
        return None
    return f"{kind}, which is not supported"


def _some(files: Sequence[Path], folder: Path) -> str:
    names = [path.relative_to(folder).as_posix() for path in files[:_MAX_LISTED]]
    return ", ".join(names) + (", …" if len(files) > _MAX_LISTED else "")


def listed_images(images: Any) -> list[Any]:
    """Return one image, several, or those below a folder as a list; see `retrieval.load`."""
    if not isinstance(images, str | os.PathLike) or not Path(images).is_dir():
        return as_list(images)
    folder = Path(images)
    files = find_images(folder)
    for note in filter(None, [*files.notes(folder), files.dangling(folder)]):
        log.warning("%s", note)
    return files.images
