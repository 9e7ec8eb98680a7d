"""Which originals of an index may be shown: an index names files of this machine, and may be a stranger's."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from retrieval.errors import StoreError
from retrieval.serving.index.base import Index
from retrieval.serving.index.built import built_here


class Gallery:
    """Says which originals may be shown.

    Every file that the index names may, if this user built exactly this index on this machine; files below folders that
    the operator names may in any case. A link counts as what it leads to.

    Args:
        index: the opened index.
        folders: whose files may be shown.

    Raises:
        StoreError: a folder that is none.

    Attributes:
        own: whether this user built the index here.
    """

    def __init__(self, index: Index, folders: Sequence[Path] = ()) -> None:
        if missing := [str(folder) for folder in folders if not folder.is_dir()]:
            raise StoreError(f"There is no folder {', '.join(missing)}, which --images names.")
        self._folders = [Path(os.path.realpath(folder)) for folder in folders]
        self.own = index.sha256 in built_here()

    def original(self, path: Path) -> Path | None:
        """Return where an item's original is, through no link; None if it may not be shown. May wait for the disk."""
        real = Path(os.path.realpath(path))
        return real if self.own or any(real.is_relative_to(folder) for folder in self._folders) else None

    @property
    def empty(self) -> bool:
        """Whether no item's original may be shown; asks no disk, as `original` does."""
        return not self.own and not self._folders

    @property
    def note(self) -> str | None:
        """How to have images shown, where none are."""
        if not self.empty:
            return None
        return (
            "Items' images are not shown: this user did not build this index on this machine. "
            "Name the folders whose files may be shown: --images FOLDER."
        )
