"""What a plugin brings to the hook `retrieval_stores`: where the items of one index are kept, or may be."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

from retrieval.serving.bundle import Bundle
from retrieval.serving.stores.address import Address
from retrieval.serving.stores.contract import Store


class StorePlace(ABC):
    """Where one index is, or may be: what an address names. A plugin offers a class of it as a scheme.

    Its parameters, but `address` and `plugins`, are what an address may say behind `?`; each has a type, a default and a line under
    `Args:`. Making one connects to nothing and writes nothing. Tokens come from the environment: an address holds none.

    All that an index needs is where its address says, its bundles too (`Store.bundle`). So any number of processes on any number of
    machines search one index and are told nothing but the address; what they keep besides is a cache that may be deleted.

    Args:
        address: what the user named.

    Attributes:
        address: see above. Sentences and logs call the index so.
    """

    def __init__(self, address: Address) -> None:
        self.address = address

    @abstractmethod
    def exists(self) -> bool:
        """Return whether there is an index.

        Raises:
            StoreUnavailable: nobody answers there.
        """

    @abstractmethod
    def create(self, bundle: Bundle, widths: Mapping[str, int], *, identity: str | None = None) -> Store:
        """Make an empty index whose first generation, which is served, has this bundle, and open it.

        It is there as a whole, and survives a power cut, when this returns; a call that fails leaves nothing.

        Args:
            bundle: opened, with the variant that embeds; the index takes a copy.
            widths: numbers of each array that is kept of an item, by name; see `widths_of`.
            identity: what tells the index from every other; a new one by default. See `Store.identity`.

        Raises:
            StoreUnavailable: nobody answers there.
            StoreError: there is one already, or it cannot be written.
        """

    @abstractmethod
    def open(self) -> Store:
        """Open the index.

        Raises:
            StoreUnavailable: nobody answers there.
            StoreError: there is none, or it is damaged or of another format.
        """

    @abstractmethod
    def drop(self) -> None:
        """Delete the index with all that is in it; nothing where there is none.

        Raises:
            StoreUnavailable: nobody answers there.
            StoreError: it cannot be deleted.
        """
