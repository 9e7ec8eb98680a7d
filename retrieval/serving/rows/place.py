"""Where the index of an engine is, or may be."""

from __future__ import annotations

import uuid
from abc import abstractmethod
from collections.abc import Mapping

from retrieval.serving.bundle import Bundle
from retrieval.serving.rows.engine import Engine
from retrieval.serving.rows.store import RowStore
from retrieval.serving.store.place import StorePlace


class RowPlace(StorePlace):
    """A place over an engine: a subclass says which engine."""

    wait = 60.0
    """Seconds that another process that writes is waited for."""

    @abstractmethod
    def engine(self) -> Engine:
        """Return the engine of this index, connected.

        Raises:
            StoreUnavailable: nobody answers there.
        """

    def exists(self) -> bool:
        """Return whether there is an index; see `StorePlace`."""
        engine = self.engine()
        try:
            return engine.head() is not None
        finally:
            engine.close()

    def create(self, bundle: Bundle, widths: Mapping[str, int], *, identity: str | None = None) -> RowStore:
        """Make an empty index, which is there once its head is; see `StorePlace`."""
        store = RowStore(self.engine(), str(self.address), self.wait)
        try:
            store.make(bundle, widths, identity or str(uuid.uuid4()))
            store.find()
        except BaseException:
            store.close()
            raise
        return store

    def open(self) -> RowStore:
        """Open the index; see `StorePlace`."""
        store = RowStore(self.engine(), str(self.address), self.wait)
        try:
            store.find()
        except BaseException:
            store.close()
            raise
        return store

    def drop(self) -> None:
        """Delete the index; see `StorePlace`."""
        engine = self.engine()
        try:
            engine.drop()
        finally:
            engine.close()
