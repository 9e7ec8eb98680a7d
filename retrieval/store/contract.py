"""The contract of a store, which keeps the items of an index in a folder or a database engine."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

import numpy as np

from retrieval.bundle.bundle import Bundle
from retrieval.errors import DataError, StoreError
from retrieval.store.address import Address
from retrieval.store.filters import Compare, Exists, Filter, In, Or, filter_to_text
from retrieval.store.filters.tree import Condition, Field, Joint, fold, type_of
from retrieval.store.items import (
    BASE as BASE,
    CODE as CODE,
    FEATURES as FEATURES,
    VECTOR as VECTOR,
    Candidates as Candidates,
    Floats as Floats,
    Generation as Generation,
    Item as Item,
    Keep as Keep,
    Stats as Stats,
    patience as patience,
    served_of as served_of,
    spans_of as spans_of,
    stop_at as stop_at,
    widths_of as widths_of,
)

Capability = Literal["atomic", "ordered", "filters", "words"]
"""A promise that not every engine can keep; see `Store.capabilities`."""

MARGIN = 8
"""Extra candidates per query: items beyond the requested number may be as near as the last."""

_MAX_CHECKED = 8
"""Largest number of conditions that are examined in a filter that matches nothing."""


_CHANGED_AT_ONCE = 16  # items whose originals `update` holds at a time
_DERIVED_AT_ONCE = 1024  # items whose arrays `derive` holds at a time


class Superseded(StoreError):
    """The index serves another bundle by now; encode items and queries again with that bundle."""


class StoreUnavailable(StoreError):
    """The store cannot be reached now; try again in a moment.

    A write in progress may or may not have been applied. It is safe to repeat it.
    """


class TooSlow(StoreError):
    """A call exceeded the time limit of `patience`; request less. Nothing is damaged."""


def require_time() -> None:
    """Raise `TooSlow` if `patience` has ended; for searches that take many calls."""
    if time.monotonic() > stop_at():
        raise TooSlow("The search takes too long. Ask for fewer hits, or use a simpler filter.")


class Store(ABC):
    """Keeps items and their arrays, and proposes the items nearest to a query.

    The arrays of all items under one bundle (an exported model) are a generation. One generation is
    served: it is searched and written to.

    All methods are thread-safe, and any process may write; writes are serialized. **When a method
    that writes returns, its changes survive a power cut, and every search that begins afterwards
    sees them.** A call that raises changes nothing. A closed store raises `StoreError` from every
    method but `close`. A store that cannot be reached raises `StoreUnavailable`, and works again
    without being reopened once the connection is back.

    Attributes:
        capabilities: further promises that this store keeps:

            - "atomic": a call that writes becomes visible as a whole, and a call that reads sees
              one consistent state;
            - "ordered": `scan` sorts items by the code points of their ids;
            - "filters": the store evaluates every filter; without this capability, some filters
              raise `DataError`;
            - "words": the store can keep the words of items, and rank items by them; see
              `keep_words`.
    """

    capabilities: ClassVar[frozenset[Capability]] = frozenset()

    # Items

    @abstractmethod
    def upsert(self, items: Sequence[Item], bundle: str) -> int:
        """Add items; an item whose id already exists is replaced as a whole.

        Args:
            items: items with all arrays of the served generation; their ids must be unique.
            bundle: SHA-256 of the manifest of the bundle that embedded the items.

        Returns:
            The number of items that were replaced.

        Raises:
            DataError: some items are invalid (duplicate id, wrong array width, NaN, metadata that
                is not JSON); the message names each of them.
            Superseded: the index serves another bundle.
            StoreError: the store is read-only, another process writes to it for too long, or the
                disk fails.
        """

    def update(
        self,
        ids: Iterable[str],
        changes: Mapping[str, Any],
        bundle: str,
        *,
        filter: Filter | None = None,
    ) -> int:
        """Change the label or metadata of items, and keep everything else of them.

        This implementation reads a few items at a time and then writes them, so what another
        process changes in between is lost, and an error leaves the items before it changed. A store
        that can exclude this overrides the method.

        Args:
            ids: ids of the items; unknown ids are ignored.
            changes: a new "label", or a merge patch of the "metadata"; see `Item.changed`.
            bundle: SHA-256 of the manifest of the served bundle.
            filter: change all items that match it, too.

        Returns:
            The number of items that were changed.

        Raises:
            DataError, Superseded, StoreError: see `upsert`.
            TooSlow: `patience` has ended.
        """
        selected = set(ids)
        after: str | None = None
        # All ids are read first, because the change may decide which items match.
        while filter is not None and (page := self.scan(filter, after=after)):
            after = page[-1].id
            selected.update(item.id for item in page)
        names = sorted(selected)
        count = 0
        for start in range(0, len(names), _CHANGED_AT_ONCE):
            if time.monotonic() > stop_at():
                raise TooSlow(f"The change takes too long: {count:,} items were changed.")
            count += self._change(names[start : start + _CHANGED_AT_ONCE], changes, bundle)
        return count

    def _change(self, ids: Sequence[str], changes: Mapping[str, Any], bundle: str) -> int:
        """Change a few items; return how many there were; see `update`."""
        block = self.get(ids, arrays=True)
        originals = self.originals(block)
        items = [
            replace(item.changed(changes), original=originals.get(item.id))
            for item in block.values()
        ]
        self.upsert(items, bundle)
        return len(items)

    @abstractmethod
    def delete(self, ids: Iterable[str] = (), *, filter: Filter | None = None) -> int:
        """Delete items by id and all that match a filter; return how many were deleted.

        Unknown ids are ignored.

        Raises:
            DataError: no item has ever had a field that `where` names.
            StoreError: see `upsert`.
        """

    @abstractmethod
    def get(self, ids: Iterable[str], *, arrays: bool = False) -> dict[str, Item]:
        """Return items by id; unknown ids are left out.

        Args:
            ids: ids of the requested items.
            arrays: whether to read the arrays of the served generation. An item that could not be
                embedded for this generation has no arrays.
        """

    @abstractmethod
    def original(self, id: str) -> bytes | None:
        """Return the stored bytes of an item's original, or None."""

    def originals(self, ids: Iterable[str]) -> dict[str, bytes]:
        """Return the stored originals of items by id; items without one are left out.

        A store in which each request takes time overrides this.
        """
        originals = {id: self.original(id) for id in ids}
        return {id: original for id, original in originals.items() if original is not None}

    @abstractmethod
    def scan(
        self, filter: Filter | None = None, *, after: str | None = None, limit: int = 1000
    ) -> list[Item]:
        """Return a page of items without arrays.

        Args:
            filter: filter that items must match.
            after: id of the last item of the previous page; None starts at the first item.
            limit: most items to return.

        Raises:
            DataError: no item has ever had a field that `where` names, or `after` cannot be an id
                (it holds NUL or half of a surrogate pair).
        """

    def newest(
        self, filter: Filter | None = None, *, before: int | None = None, limit: int = 1000
    ) -> list[tuple[int, Item]]:
        """Return a page of items without arrays, the one that was last added or changed first.

        Args:
            filter: filter that items must match.
            before: number of the last item of the previous page; None starts at the newest item.
            limit: most items to return.

        Returns:
            The items, each after its number; an item that is added or changed gets a larger one.

        Raises:
            DataError: the store cannot tell, or no item has ever had a field of the filter.
        """
        raise DataError("The store of this index cannot tell which items are the newest.")

    @abstractmethod
    def count(self, filter: Filter | None = None) -> int:
        """Return the number of items, or of those that match a filter."""

    def refuse_impossible(self, filter: Filter | None) -> None:
        """Raise a `DataError` if a filter that matches nothing never could, for a wrong field.

        A condition is impossible if items have the object that should hold its field, but none has
        the field, or if their values of the field have other types. Null has no type.
        """
        # Each condition may read all items.
        if filter is None or filter.size.conditions > _MAX_CHECKED:
            return
        faults: list[str] = []

        def is_possible(condition: Condition) -> bool:
            if fault := self._fault(condition):
                faults.append(fault)
            return fault is None

        def join(joint: Joint, parts: list[bool]) -> bool:
            if joint == "and":
                return all(parts)
            return joint == "not" or any(parts)

        if not fold(filter, is_possible, join):
            raise DataError(faults[0])

    def _fault(self, condition: Condition) -> str | None:
        """Return a sentence if no item can match a condition."""
        field = condition.field
        # Id and label are text; a condition refuses other values itself.
        if isinstance(field, str):
            return None
        suitable: list[Filter] = [Exists(field)]
        if not isinstance(condition, Exists) and condition.op != "!=":
            kinds = sorted({type_of(value) for value in condition.values})
            suitable = [_of_type(field, kind) for kind in kinds]
        if any(self.scan(filter, limit=1) for filter in suitable):
            return None
        text = filter_to_text(condition)
        if self.scan(Compare(field, "!=", None), limit=1):
            return (
                f"`{text}` can never match: the items have values of other types in this field."
                " Text needs quotes, a number none."
            )
        parent = field[:-1]
        if parent and self.scan(Exists(parent), limit=1) and not self.scan(Exists(field), limit=1):
            return f"`{text}` can never match: no item has this field."
        return None

    @abstractmethod
    def search(
        self, queries: Floats, count: int, bundle: str, *, filter: Filter | None = None
    ) -> list[list[Item]]:
        """Propose the nearest items of each query, with arrays.

        The index computes the distances of the proposed items and sorts them. An approximate store
        may miss some items.

        Args:
            queries: (Q, P), finite.
            count: number of nearest items, by Euclidean distance. If the vectors have sub-spaces
                (column ranges that are searched separately), the number for each of them.
            bundle: SHA-256 of the manifest of the bundle that encoded the queries.
            filter: filter that items must match.

        Returns:
            One list per query: the items that are among the `count` nearest in at least one
            sub-space.

        Raises:
            Superseded: the index serves another bundle.
            DataError: no item has ever had a field that `where` names, or the queries have the
                wrong width or hold NaN.
            StoreError: the index is damaged.
        """

    def propose(
        self,
        queries: Floats,
        count: int,
        bundle: str,
        *,
        filter: Filter | None = None,
        arrays: bool = True,
    ) -> list[Candidates]:
        """Propose the items of `search` and a few more, with their arrays stacked.

        A store may override this to compute distances itself. Then False for `arrays` lets it leave
        out the arrays of candidates that have distances, which takes a fifth of the time of a
        batch of queries in a small index.
        """
        return stacked(self.search(queries, count + MARGIN, bundle, filter=filter))

    # Words

    def keep_words(self, report: Callable[[int], object] = lambda count: None) -> None:
        """Keep the words of all items from now on, for `search_words`.

        The words of an item are those of its label, and of the texts and numbers in its metadata.
        Other processes may search and write meanwhile. A killed call may be repeated; it continues.

        Args:
            report: called with the number of items of each block that was read.

        Raises:
            StoreError: the store cannot keep words, or it cannot be written to.
        """
        raise StoreError(
            "This store keeps no words of its items; an index in a folder or in Postgres can."
            " Search by vectors."
        )

    def keeps_words(self) -> bool:
        """Return whether the store has the words of all items."""
        return False

    def search_words(
        self, text: str, count: int, *, filter: Filter | None = None, also: Sequence[str] = ()
    ) -> list[tuple[str, float]]:
        """Return the items that fit the words of a text best, the best first.

        An item fits if it has at least one of the first 64 different words. Words are letters and
        digits; neither case nor accents matter.

        Args:
            text: the text.
            count: number of items.
            filter: filter that items must match.
            also: ids of items that match the filter. Those that fit as well as the last of `count`
                items, and are not among these, are returned, too.

        Returns:
            Ids and scores, BM25 with k1 = 1.2 and b = 0.75; larger is better. Ties are ordered by
            the time when the items were added.

        Raises:
            DataError: the store does not keep words, or no item has ever had a field of the filter.
        """
        raise DataError(
            "The store of this index keeps no words of its items. Search by vectors, or keep the"
            " index in a folder or in Postgres."
        )

    # Generations

    @abstractmethod
    def generations(self) -> tuple[Generation, ...]:
        """Return all generations, oldest first; exactly one is served."""

    @abstractmethod
    def bundle(self, generation: Generation) -> Path:
        """Return a local folder that holds a generation's bundle.

        The store keeps the bundle's files beside the items. A remote store fetches them into the
        user's cache (`retrieval.plugin.stores.kept_bundle`).

        Raises:
            StoreError: the generation was dropped.
        """

    @abstractmethod
    def begin(self, bundle: Bundle, widths: Mapping[str, int]) -> Generation:
        """Begin a generation beside the served one.

        If a generation of this bundle, variant and widths exists, it is returned instead.

        Args:
            bundle: bundle opened with the variant that embeds the items; the store copies it.
            widths: width of each array of an item, by name; see `widths_of`.
        """

    @abstractmethod
    def pending(self, generation: Generation, limit: int) -> list[Item]:
        """Return up to `limit` items for which a generation has no arrays yet.

        The items have the features that the served generation stores, and no other arrays.
        """

    @abstractmethod
    def embed(
        self, generation: Generation, items: Sequence[Item], left_out: Sequence[str] = ()
    ) -> None:
        """Add the arrays of pending items to a generation.

        Items that were written after `pending` returned them are skipped.

        Args:
            generation: a generation that is being built.
            items: items that `pending` returned, with the arrays of this generation.
            left_out: ids of items that cannot be embedded; the generation has no arrays for them.
                Each item of the last `pending` must be in `items` or here.

        Raises:
            DataError: an array is invalid (see `upsert`), an item was not pending, or a pending
                item is neither in `items` nor in `left_out`.
            StoreError: the generation was dropped.
        """

    def derive(
        self,
        generation: Generation,
        source: Generation,
        names: Sequence[str],
        compute: Callable[[Mapping[str, Floats]], Mapping[str, Floats]],
        report: Callable[[int], object] = lambda count: None,
    ) -> int:
        """Embed all pending items of a generation from their stored arrays, block by block.

        A pending item that has no arrays in the served generation is left out. A killed call may
        be repeated; it continues.

        Args:
            generation: a generation that is being built, or was kept.
            source: the served generation.
            names: names of the arrays of `source` that `compute` needs.
            compute: takes these arrays (n, width) by name, and returns all arrays (n, width) of
                `generation` by name.
            report: called with the number of items of each block.

        Returns:
            The number of items that were embedded.

        Raises:
            DataError: `compute` returns invalid arrays (see `upsert`).
            Superseded: another generation is served.
            StoreError: a generation was dropped.
        """
        count = 0
        while pending := self.pending(generation, _DERIVED_AT_ONCE):
            stored = self.get([item.id for item in pending], arrays=True)
            if served_of(self.generations()).number != source.number:
                raise superseded_source()
            items = [item for item in pending if item.id in stored and stored[item.id].arrays]
            left_out = {item.id for item in pending} - {item.id for item in items}
            if items:
                rows = [stored[item.id].arrays for item in items]
                arrays = compute({name: np.stack([row[name] for row in rows]) for name in names})
                items = [
                    replace(item, arrays={name: array[row] for name, array in arrays.items()})
                    for row, item in enumerate(items)
                ]
            self.embed(generation, items, sorted(left_out))
            count += len(items)
            report(len(pending))
        return count

    @abstractmethod
    def switch(self, generation: Generation) -> bool:
        """Serve another generation from now on, and keep the previous one.

        A store may announce the generation first and wait some seconds, so that the processes that
        search can load it before it is served; see `expected`.

        Returns:
            True on success. False if items are still pending; then nothing changes.
        """

    def expected(self) -> Generation | None:
        """Return the generation that is about to be served, if another process announced it."""
        return None

    def propose_staged(
        self, generation: Generation, queries: Floats, count: int
    ) -> list[Candidates]:
        """Propose items of a generation that is not served yet, by which `migrate` measures it.

        See `propose`. The items may include some that were deleted since they were embedded. A
        store need not search such generations.

        Raises:
            StoreError: the generation was dropped, or the store cannot search it.
        """
        raise StoreError(
            "This store searches only what it serves, so golden queries cannot be measured before"
            " a migration. Migrate without them, then run 'retrieval index evaluate'."
        )

    @abstractmethod
    def drop(self, generation: Generation) -> None:
        """Delete a generation that is not served, with its notes."""

    def note(self, generation: Generation, name: str) -> bytes | None:
        """Return what `set_note` last wrote under a name, or None.

        Raises:
            StoreError: the generation was dropped.
        """
        return None

    def set_note(self, generation: Generation, name: str, content: bytes) -> None:
        """Keep bytes that were measured on a generation, until it is dropped.

        Snapshots keep the notes of the served generation. A store need not keep notes.

        Args:
            generation: the generation.
            name: a short name, such as "calibration"; an earlier note of this name is replaced.
            content: at most some megabytes.

        Raises:
            StoreError: the generation was dropped, or the store keeps no notes.
        """
        raise StoreError("This store keeps no notes, so its indexes cannot be calibrated.")

    # The whole

    @abstractmethod
    def identity(self) -> str:
        """Return the id that the index received when it was created; snapshots share it."""

    def compact(self, report: Callable[[int, int], object] = lambda done, total: None) -> None:
        """Free the space of deleted items and rebuild search structures.

        Args:
            report: called with the number of items done and the total.

        Raises:
            StoreError: the store has nothing to compact, or it cannot be written to.
        """
        raise StoreError(
            "This store frees the space of deleted items itself: there is nothing to compact."
        )

    @abstractmethod
    def snapshot(self, target: Path) -> None:
        """Write a copy to a new folder, while searches and writes go on.

        The copy is an index in a folder. It holds the served generation. An "atomic" store copies
        one consistent state.

        Raises:
            StoreError: `target` exists, or the disk fails.
        """

    @abstractmethod
    def stats(self) -> Stats:
        """Return the number of items, the generations and the size of the store."""

    def settings(self) -> Mapping[str, Any]:
        """Return the configuration of the index, for people to read.

        The key "fields" lists the names of metadata fields; other keys depend on the store.
        """
        return {}

    def changed(self) -> str | None:
        """Return a sentence that says how this index was replaced or removed, or None."""
        return None

    @abstractmethod
    def close(self) -> None:
        """Close the store. A running call of another thread ends first, or raises `StoreError`."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class StorePlace(ABC):
    """The location of an index, which need not exist yet.

    A plugin registers one class per scheme of an address. The parameters of the constructor other
    than `address` and `plugins` are the options that an address may have after `?`. Each parameter
    needs a type, a default and a line under `Args:`. The constructor connects to nothing and writes
    nothing. Tokens come from the environment, never from the address.

    The store keeps everything that an index needs, including its bundles (`Store.bundle`), so that
    any process on any machine can open the index by its address alone.

    Args:
        address: the address of the index.

    Attributes:
        address: the address of the index; messages and logs show it.
    """

    def __init__(self, address: Address) -> None:
        self.address = address

    @abstractmethod
    def exists(self) -> bool:
        """Return whether the index exists.

        Raises:
            StoreUnavailable: the engine cannot be reached.
        """

    @abstractmethod
    def create(
        self, bundle: Bundle, widths: Mapping[str, int], *, identity: str | None = None
    ) -> Store:
        """Create an empty index that serves this bundle, and open it.

        When this method returns, the index survives a power cut. A call that fails leaves nothing.

        Args:
            bundle: bundle opened with the variant that embeds the items; the index copies it.
            widths: width of each array of an item, by name; see `widths_of`.
            identity: unique id of the index; None creates a new id.

        Raises:
            StoreUnavailable: the engine cannot be reached.
            StoreError: the index exists already, or it cannot be written.
        """

    @abstractmethod
    def open(self) -> Store:
        """Open the index.

        Raises:
            StoreUnavailable: the engine cannot be reached.
            StoreError: the index is missing, damaged or of another format.
        """

    @abstractmethod
    def drop(self) -> None:
        """Delete the index with all its contents, if it exists.

        Raises:
            StoreUnavailable: the engine cannot be reached.
            StoreError: the index cannot be deleted.
        """


def superseded_source() -> Superseded:
    """Return the error of `Store.derive` if another generation is served."""
    return Superseded(
        "Another generation is served by now: another migration has ended. Run the command again."
    )


def stacked(answers: Iterable[list[Item]]) -> list[Candidates]:
    """Return the items of each query sorted by id, with their arrays stacked."""
    candidates = []
    for items in answers:
        items.sort(key=lambda item: item.id)
        arrays: dict[str, Floats] = {}
        if items:
            names = items[0].arrays
            arrays = {name: np.stack([item.arrays[name] for item in items]) for name in names}
        candidates.append(Candidates(items, arrays))
    return candidates


def _of_type(field: Field, kind: str) -> Filter:
    """Return a filter on a field that has a value of a type; null matches any value."""
    if kind == "text":
        return Compare(field, ">=", "")
    if kind == "number":
        return Or((Compare(field, ">=", 0), Compare(field, "<", 0)))
    if kind == "boolean":
        return In(field, (True, False))
    return Exists(field)
