"""The contract of a store: what an index asks of the place where its items are kept.

What not every engine can do is a capability: a store declares those that it has, and refuses the
others in a sentence.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Literal, Self

import numpy as np

from retrieval.errors import StoreError
from retrieval.serving.bundle import Bundle
from retrieval.serving.filters import Filter
from retrieval.serving.store.address import Address
from retrieval.serving.store.items import CODE as CODE
from retrieval.serving.store.items import FEATURES as FEATURES
from retrieval.serving.store.items import VECTOR as VECTOR
from retrieval.serving.store.items import Candidates as Candidates
from retrieval.serving.store.items import Floats as Floats
from retrieval.serving.store.items import Generation as Generation
from retrieval.serving.store.items import Item as Item
from retrieval.serving.store.items import Keep as Keep
from retrieval.serving.store.items import Stats as Stats
from retrieval.serving.store.items import patience as patience
from retrieval.serving.store.items import spans_of as spans_of
from retrieval.serving.store.items import stop_at as stop_at
from retrieval.serving.store.items import widths_of as widths_of

Capability = Literal["atomic", "ordered", "originals", "left_out", "compact", "snapshot"]
"""What a store may be unable to do; see `Store.capabilities`."""

_LACKING: dict[Capability, str] = {
    "atomic": "shows a call in parts while it is written",
    "ordered": "lists items in an order of its own",
    "originals": "keeps no bytes of originals: add the items with keep='reference' or 'nothing'",
    "left_out": "keeps no item without its vector",
    "compact": "gives back room by itself: there is nothing to compact",
    "snapshot": "writes no snapshots: use the backup of the engine that it stands on",
}


class Superseded(StoreError):
    """The index is served with another bundle by now: encode again with that one."""


class StoreUnavailable(StoreError):
    """The store cannot be reached now, and nothing is known to be damaged: try again in a moment.

    A write that was under way may have been made or not. Repeating it changes nothing more.
    """


class TooSlow(StoreError):
    """A question took longer than it may. Nothing is damaged: ask for less."""


class Store(ABC):
    """Keeps items and their arrays, and proposes the nearest ones.

    All methods may be called from several threads at a time, and any process may write: writes
    take turns. **When a method that writes returns, what it wrote survives a power cut, and every
    search that begins afterwards sees it.** What is refused changes nothing. A closed store
    refuses every call but `close` with a `StoreError`. A store that cannot be reached raises
    `StoreUnavailable` from any call, and answers again, without being opened anew, when it can.

    Attributes:
        capabilities: what this store can do beyond the methods that every store has:

            - "atomic": one call is one transaction, visible as a whole or not at all, and all
              answers of one call are of one moment;
            - "ordered": `scan` lists items in the order of their ids' code points;
            - "originals": it keeps the bytes of originals;
            - "left_out": a generation may do without items (`embed`);
            - "compact" and "snapshot": these methods do something.
        structures: back ends, by the names of the built-in ones, that the store can be told to
            search with; none where it chooses by itself.
    """

    capabilities: ClassVar[frozenset[Capability]] = frozenset()
    structures: ClassVar[tuple[str, ...]] = ()

    def refusal(self, capability: Capability) -> StoreError:
        """Return the error of a call that needs a capability which this store lacks."""
        return StoreError(f"This store {_LACKING[capability]}.")

    # Items

    @abstractmethod
    def upsert(self, items: Sequence[Item], bundle: str) -> int:
        """Add items; one whose id is there takes its place, as a whole.

        Args:
            items: with all arrays of the served generation; each id once.
            bundle: SHA-256 of the bundle that embedded them.

        Returns:
            How many took another's place.

        Raises:
            DataError: an item that cannot be kept: an id twice, arrays of another width, NaN,
                metadata that is not JSON. All are named.
            Superseded: another bundle is served.
            StoreError: read-only, another writer holds it for too long, or the disk refuses.
        """

    @abstractmethod
    def delete(self, ids: Iterable[str] = (), *, where: Filter | None = None) -> int:
        """Delete items by id, or all that match; return how many there were.

        Unknown ids are passed over.

        Raises:
            DataError: no item has ever had a field that `where` names.
            StoreError: see `upsert`.
        """

    @abstractmethod
    def get(self, ids: Iterable[str], *, arrays: bool = False) -> dict[str, Item]:
        """Return items by id; unknown ids are left out.

        Args:
            ids: which.
            arrays: with the served generation's arrays; an item that it does without has none.
        """

    @abstractmethod
    def original(self, id: str) -> bytes | None:
        """Return the bytes that are kept of an item's original; None where there are none."""

    @abstractmethod
    def scan(
        self, where: Filter | None = None, *, after: str | None = None, limit: int = 1000
    ) -> list[Item]:
        """Return a page of items without arrays: the first `limit` behind the id `after`.

        Raises:
            DataError: no item has ever had a field that `where` names, or `after` holds what no id
                can: NUL, or half of a surrogate pair.
        """

    @abstractmethod
    def count(self, where: Filter | None = None) -> int:
        """Return how many items there are, or match."""

    @abstractmethod
    def search(
        self, queries: Floats, count: int, bundle: str, *, where: Filter | None = None
    ) -> list[list[Item]]:
        """Propose the nearest items of each query, with arrays.

        The index measures and orders what is proposed; an approximate store may miss some.

        Args:
            queries: (Q, P), finite.
            count: how many in each sub-space, by Euclidean distance; fewer when fewer match.
            bundle: SHA-256 of the bundle that encoded the queries.
            where: only items that match.

        Returns:
            For each query the items among the `count` nearest in at least one sub-space.

        Raises:
            Superseded: another bundle is served.
            DataError: no item has ever had a field that `where` names, or queries of another
                width or with NaN.
            StoreError: what is kept is damaged.
        """

    def propose(
        self, queries: Floats, count: int, bundle: str, *, where: Filter | None = None
    ) -> list[Candidates]:
        """Propose what `search` does, for the index to measure.

        A store overrides this where it needs no object for each item, or measures by itself.
        """
        answers = []
        for items in self.search(queries, count, bundle, where=where):
            items.sort(key=lambda item: item.id)
            names = items[0].arrays if items else ()
            arrays = {name: np.stack([item.arrays[name] for item in items]) for name in names}
            answers.append(Candidates(items, arrays))
        return answers

    # Generations

    @abstractmethod
    def generations(self) -> tuple[Generation, ...]:
        """Return all generations, oldest first; exactly one is served."""

    @abstractmethod
    def bundle(self, generation: Generation) -> Path:
        """Return a folder of this machine that holds a generation's bundle.

        The store keeps the bundle's files, as it keeps items: who opens the index needs nothing
        besides. One that lies elsewhere fetches them into the user's cache
        (`retrieval.stores.kept_bundle`).

        Raises:
            StoreError: the generation was dropped.
        """

    @abstractmethod
    def begin(self, bundle: Bundle, widths: Mapping[str, int]) -> Generation:
        """Begin a generation beside the served one, or return the one of this bundle and widths.

        Args:
            bundle: opened, with the variant that embeds; the store takes a copy.
            widths: width of each array that is kept of an item, by name; see `widths_of`.
        """

    @abstractmethod
    def pending(self, generation: Generation, limit: int) -> list[Item]:
        """Return items that a generation has no arrays of yet.

        They come with the served generation's features where those are kept.
        """

    @abstractmethod
    def embed(
        self, generation: Generation, items: Sequence[Item], left_out: Sequence[str] = ()
    ) -> None:
        """Give a generation arrays of items that `pending` returned.

        An item that has changed since is passed over.

        Args:
            generation: which one.
            items: as `pending` gave them, with the generation's arrays.
            left_out: ids of items that cannot be embedded; the generation does without them. An
                item that `pending` returned last is in `items` or here.

        Raises:
            DataError: arrays that `upsert` would refuse, an item that was not pending, or one
                that is missing.
            StoreError: the generation was dropped; or items are left out, and the store lacks
                that capability.
        """

    @abstractmethod
    def switch(self, generation: Generation) -> bool:
        """Serve another generation from now on, and keep the one that was.

        Returns:
            False when it has items pending: nothing changes.
        """

    @abstractmethod
    def drop(self, generation: Generation) -> None:
        """Delete a generation that is not served."""

    # The whole

    @abstractmethod
    def identity(self) -> str:
        """Return the id that the index got when it was created; a snapshot has the same."""

    def compact(self, report: Callable[[int, int], object] = lambda done, total: None) -> None:
        """Give back the room of what was deleted, and rebuild what speeds searches up.

        Args:
            report: called with how many items are done, of how many.

        Raises:
            StoreError: the store lacks this capability, or it cannot be written to.
        """
        raise self.refusal("compact")

    def take_structure(
        self,
        backend: str,
        options: Mapping[str, Any],
        report: Callable[[int, int], object] = lambda done, total: None,
    ) -> None:
        """Search with another structure from now on.

        Args:
            backend: one of `structures`.
            options: its parameters, as the built-in back end of that name takes them.
            report: called with how many items are done, of how many.

        Raises:
            StoreError: the store has no structures, or it cannot be written to.
        """
        raise StoreError("This store chooses by itself how it searches: there is nothing to tune.")

    def keep_tuned(self, tuned: Mapping[str, Any]) -> None:  # noqa: B027 (a store need not)
        """Keep what was measured before a structure was chosen: `stats` shows it as "tuned".

        Args:
            tuned: as JSON can say it. A store that keeps nothing of it shows nothing of it.

        Raises:
            StoreError: see `upsert`.
        """

    def snapshot(self, target: Path) -> None:
        """Write a copy of one moment to a new folder, while searches and writes go on.

        The copy opens as an index of the local store and holds the served generation.

        Raises:
            StoreError: the store lacks this capability, something is there already, or the disk
                refuses.
        """
        raise self.refusal("snapshot")

    @abstractmethod
    def stats(self) -> Stats:
        """Return what the store holds."""

    def settings(self) -> Mapping[str, Any]:
        """Return how the index is set up, for people.

        `fields` are the names of metadata; the rest is this kind of store's.
        """
        return {}

    def changed(self) -> str | None:
        """Return a sentence when another index stands where this one was, or none; else None."""
        return None

    @abstractmethod
    def close(self) -> None:
        """Let go of everything; searches that run end first."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class StorePlace(ABC):
    """Where one index is, or may be: what an address names. A plugin offers a class as a scheme.

    Its parameters, but `address` and `plugins`, are what an address may say behind `?`; each has a
    type, a default and a line under `Args:`. Making one connects to nothing and writes nothing.
    Tokens come from the environment: an address holds none.

    All that an index needs is where its address says, its bundles too (`Store.bundle`): any number
    of processes on any number of machines search one index and know nothing but the address.

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
    def create(
        self, bundle: Bundle, widths: Mapping[str, int], *, identity: str | None = None
    ) -> Store:
        """Make an empty index whose served generation has this bundle, and open it.

        It is there as a whole, and survives a power cut, when this returns; a call that fails
        leaves nothing.

        Args:
            bundle: opened, with the variant that embeds; the index takes a copy.
            widths: width of each array that is kept of an item, by name; see `widths_of`.
            identity: what tells the index from every other; a new one by default.

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
