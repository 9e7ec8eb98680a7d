"""Base class of places of stores in a database engine: name, client and connection."""

from __future__ import annotations

import math
import re
import uuid
from abc import abstractmethod
from collections.abc import Callable, Mapping
from importlib.util import find_spec

from retrieval.bundle.bundle import Bundle
from retrieval.errors import MissingDependency, StoreError
from retrieval.store.address import Address
from retrieval.store.contract import StorePlace

from retrieval_engines.remote_store import RemoteStore


def check_name(address: Address, pattern: str, rule: str) -> None:
    """Raise a `StoreError` unless a pattern matches the name in an address.

    Args:
        address: address of an index.
        pattern: regular expression of valid names.
        rule: the same in words, as the end of "A name has at most …".
    """
    if not re.fullmatch(pattern, address.name):
        raise StoreError(
            f"{address} names no index. A name has at most {rule}, as in"
            f" {address.scheme}://HOST/photos."
        )


def need_client(module: str, extra: str) -> None:
    """Raise a `MissingDependency` if the package of an engine's client is not installed."""
    if find_spec(module) is None:
        raise MissingDependency(
            f"The store {extra} needs a package. Install it with: pip install"
            f" 'embedding-retrieval[{extra}]'"
        )


class RemotePlace(StorePlace):
    """The place of an index in a database engine; a subclass implements `store`.

    Args:
        address: address of the index.
        timeout: time limit of one request to the server, including retries, in seconds.
        exact: whether to search exactly.
    """

    def __init__(self, address: Address, timeout: float = 30.0, exact: bool = True) -> None:
        super().__init__(address)
        if not (math.isfinite(timeout) and timeout > 0):
            raise StoreError(f"{address}: write timeout=SECONDS with a number above 0.")
        self._timeout = timeout
        self._exact = exact

    @abstractmethod
    def store(self) -> RemoteStore:
        """Return a connected store that has neither created nor opened an index yet.

        Raises:
            StoreUnavailable: the engine cannot be reached.
        """

    def exists(self) -> bool:
        """Return whether the index exists; see `StorePlace`."""
        with self.store() as store:
            return store.changed() is None

    def create(
        self, bundle: Bundle, widths: Mapping[str, int], *, identity: str | None = None
    ) -> RemoteStore:
        """Create an empty index; see `StorePlace`."""
        return self._opened(lambda store: store.make(bundle, widths, identity or str(uuid.uuid4())))

    def open(self) -> RemoteStore:
        """Open the index; see `StorePlace`."""
        return self._opened(lambda store: store.find())

    def _opened(self, prepare: Callable[[RemoteStore], None]) -> RemoteStore:
        store = self.store()
        try:
            prepare(store)
        except BaseException:
            store.close()
            raise
        return store

    def drop(self) -> None:
        """Delete the index; see `StorePlace`."""
        with self.store() as store:
            store.destroy()
