"""A folder as the place of an index."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from retrieval.errors import StoreError
from retrieval.serving.bundle import Bundle
from retrieval.serving.files.locks import hold
from retrieval.serving.local.create import create_local
from retrieval.serving.local.home import INDEX
from retrieval.serving.local.record import FILE
from retrieval.serving.local.store import LocalStore
from retrieval.serving.stores.address import Address
from retrieval.serving.stores.place import StorePlace


class LocalPlace(StorePlace):
    """A folder on a local disk: SQLite is the record of items, FAISS speeds up what is large. Its path alone names it, too.

    Args:
        address: `local:///data/photos.index`.
        plugins: files or modules of index back ends that are not installed.
    """

    def __init__(self, address: Address, plugins: Sequence[str] = ()) -> None:
        super().__init__(address)
        self.folder = Path(address.path)
        self._plugins = plugins

    def exists(self) -> bool:
        """Return whether there is an index; see `StorePlace`."""
        return (self.folder / INDEX).is_file() and (self.folder / FILE).is_file()

    def create(self, bundle: Bundle, widths: Mapping[str, int], *, identity: str | None = None) -> LocalStore:
        """Make an empty index; see `StorePlace`."""
        create_local(self.folder, bundle, widths, identity=identity)
        return self.open()

    def open(self) -> LocalStore:
        """Open the index; see `StorePlace`."""
        return LocalStore(self.folder, plugins=self._plugins)

    def drop(self) -> None:
        """Delete the folder; see `StorePlace`."""
        if not self.exists():
            return
        try:
            with hold(self.folder, "deleting this index", StoreError):
                shutil.rmtree(self.folder)
        except OSError as fault:
            raise StoreError(
                f"The index {self.folder} cannot be deleted: {fault.strerror or fault}."
            ) from None
