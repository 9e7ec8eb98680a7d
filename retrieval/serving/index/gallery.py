"""Which originals of an index may be shown: an index names files of this machine, and may be a stranger's."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from retrieval.errors import StoreError
from retrieval.serving.index.base import Hit, Index
from retrieval.serving.index.built import built_here
from retrieval.serving.index.collection import Collection
from retrieval.serving.index.items import Item as Listed
from retrieval.serving.index.seals import Seals
from retrieval.serving.store.contract import Item

_LOOKED_AT = 100  # items, before the operator is told that no image is shown


KEPT = ("copy", "thumbnail")
"""Of which items the index keeps an original's bytes: nothing of this machine is shown with them."""


class Gallery:
    """Says which originals may be shown.

    Of a folder of format 1, every file that it names may, if this user built exactly this index on this machine. Of a living index,
    each file that this user named, which the item's seal says (`retrieval.serving.index.seals`), and whatever the index itself keeps.
    Files below folders that the operator names may in any case. A link counts as what it leads to.

    Args:
        index: the opened index.
        folders: whose files may be shown.

    Raises:
        StoreError: a folder that is none.

    Attributes:
        own: whether this user built the index, of format 1, here.
    """

    def __init__(self, index: Index, folders: Sequence[Path] = ()) -> None:
        if missing := [str(folder) for folder in folders if not folder.is_dir()]:
            raise StoreError(f"There is no folder {', '.join(missing)}, which --images names.")
        self._folders = [Path(os.path.realpath(folder)) for folder in folders]
        self._index = index
        self._seals = Seals(index.sha256, create=True) if isinstance(index, Collection) else None
        self.own = self._seals is None and index.sha256 in built_here()

    def original(self, path: Path, stamp: str | None = None) -> Path | None:
        """Return where an item's original is, through no link; None if it may not be shown. May wait for the disk.

        Args:
            path: the item's.
            stamp: the item's, where it has one.
        """
        real = Path(os.path.realpath(path))
        own = self.own or self._named(path, stamp)
        return real if own or any(real.is_relative_to(folder) for folder in self._folders) else None

    def shows(self, hit: Hit) -> bool:
        """Whether to offer an item's image; asks no disk, as `original` does."""
        if hit.keep in KEPT:
            return True
        return hit.path is not None and (self.own or bool(self._folders) or self._named(hit.path, hit.stamp))

    def offers(self, item: Item | Listed) -> bool:
        """Whether to offer an item's image; as `shows`."""
        keep, stamp = (item.keep, item.stamp) if isinstance(item, Item) else ("reference", None)
        return self.shows(
            Hit(item.key if isinstance(item, Listed) else item.id, "", None, 0.0, {}, item.path, keep, stamp)
        )

    def _named(self, path: Path, stamp: str | None) -> bool:
        return self._seals is not None and self._seals.hold(stamp, path)

    def note(self) -> str | None:
        """Return how to have images shown, where none are. Reads the index."""
        if self.own or self._folders:
            return None
        if isinstance(self._index, Collection):
            items = self._index.scan(limit=_LOOKED_AT)
            if not items or any(
                one.keep in KEPT or (one.path and self._named(one.path, one.stamp)) for one in items
            ):
                return None
        return (
            "Items' images are not shown: this user did not build this index on this machine. "
            "Name the folders whose files may be shown: --images FOLDER."
        )
