"""The place of a local index: a folder, which need not exist yet."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from retrieval.bundle.bundle import Bundle
from retrieval.errors import StoreError
from retrieval.store.address import Address
from retrieval.store.contract import StorePlace
from retrieval.store.folder import INDEX_FILE, create_local
from retrieval.store.local import LocalStore
from retrieval.store.record import RECORD_FILE


class LocalPlace(StorePlace):
    """A folder on a local disk: SQLite stores the items, FAISS speeds up large indexes.

    The path of the folder is also a valid address.

    Args:
        address: `local:///data/photos.index`.
        plugins: files or modules of index back ends that are not installed.
    """

    def __init__(self, address: Address, plugins: Sequence[str] = ()) -> None:
        super().__init__(address)
        self.folder = Path(address.path)
        self._plugins = plugins

    def exists(self) -> bool:
        """Return whether the index exists; see `StorePlace`."""
        return (self.folder / INDEX_FILE).is_file() and (self.folder / RECORD_FILE).is_file()

    def create(
        self, bundle: Bundle, widths: Mapping[str, int], *, identity: str | None = None
    ) -> LocalStore:
        """Create an empty index; see `StorePlace`."""
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
            shutil.rmtree(self.folder)
        except OSError as fault:
            raise StoreError(
                f"The index {self.folder} cannot be deleted: {fault.strerror or fault}."
            ) from None
