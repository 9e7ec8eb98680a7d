"""What an index asks of the place where its items are kept: the contract of every store."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Literal, Self

import numpy as np
from numpy.typing import NDArray

from retrieval.errors import StoreError
from retrieval.serving.bundle import Bundle
from retrieval.serving.filters import Filter
from retrieval.serving.stores.faults import StoreUnavailable as StoreUnavailable
from retrieval.serving.stores.faults import Superseded as Superseded
from retrieval.serving.stores.faults import TooSlow as TooSlow
from retrieval.serving.stores.patience import patience as patience
from retrieval.serving.stores.patience import stop_at as stop_at

Floats = NDArray[np.float32]

Keep = Literal["reference", "copy", "thumbnail", "nothing"]
"""What an index keeps of an original: its path, all its bytes, a small picture of it, or nothing."""

VECTOR, CODE, FEATURES = "vector", "code", "features"


@dataclass(frozen=True, slots=True)
class Item:
    """What is found.

    Attributes:
        id: its name, unique in the index: any text of 1 to 1,000 characters.
        label: None when it has none.
        metadata: a JSON object.
        path: its original file, absolute; None for what came as bytes or features, or has a `source`.
        stamp: what changes when that file does, and the seal of the user who named it: see `retrieval.serving.index.seals`.
        keep: what the index keeps of the original.
        original: the bytes that are kept, when an item is written; `Store.original` reads them.
        bytes: size of the original.
        width: of the original image, in pixels, upright.
        height: see `width`.
        arrays: float32, by name: "vector" (P,), "code" (C,) where the bundle rescores, "features" (F,) where they are kept.
        source: where its original is that is no local file of its own, such as `/data/table.parquet#12`. Only the index's owner opens it, to embed again: never what a client sends.
    """

    id: str
    label: str | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    path: Path | None = None
    stamp: str | None = None
    keep: Keep = "reference"
    original: bytes | None = None
    bytes: int | None = None
    width: int | None = None
    height: int | None = None
    arrays: Mapping[str, Floats] = field(default_factory=dict)
    source: str | None = None

    @property
    def vector(self) -> Floats:
        """The vector (P,), of an item that was read with it."""
        return self.arrays[VECTOR]


@dataclass(frozen=True)
class Candidates:
    """What a store proposes to one query. A store may keep the items for other answers: whoever gives one away copies its metadata.

    Attributes:
        items: in the order of their ids; with `distances` the nearest first, and equally near ones in that order.
        arrays: (n, width) of them, by name; they may be read when they are first asked for.
        distances: (n,) Euclidean, in double precision, to each item's vector within the only sub-space, as `serving.merging.merged` has them; None: the store has not measured these.
    """

    items: Sequence[Item]
    arrays: Mapping[str, Floats]
    distances: NDArray[np.float64] | None = None


@dataclass(frozen=True)
class Generation:
    """All items of an index under one bundle.

    Attributes:
        number: counts up.
        bundle: SHA-256 of the bundle's manifest.
        variant: which variant of its encoder ran.
        widths: numbers of each array of an item, by name.
        spans: first and last-but-one column of each sub-space of the vector.
        state: "served" (searched and written to), "building" (items are still being embedded) or "kept" (for `rollback`).
    """

    number: int
    bundle: str
    variant: str | None
    widths: Mapping[str, int]
    spans: tuple[tuple[int, int], ...]
    state: Literal["served", "building", "kept"]


@dataclass(frozen=True)
class Stats:
    """What a store holds.

    Attributes:
        count: items.
        generations: oldest first.
        bytes: on the disk, where the store knows.
        details: what only this kind of store has, such as segments.
    """

    count: int
    generations: tuple[Generation, ...]
    bytes: int | None
    details: Mapping[str, Any]


def widths_of(bundle: Bundle, *, features: int | None = None) -> dict[str, int]:
    """Return the numbers of each array that an index keeps of an item under a bundle, by name.

    Args:
        bundle: the one that embeds.
        features: numbers of the backbone's features, where they are to be kept for the next head.
    """
    said = bundle.manifest
    codes = {CODE: said.code} if bundle.has_code and said.code else {}
    return {VECTOR: said.vector, **codes, **({FEATURES: features} if features else {})}


def spans_of(bundle: Bundle) -> tuple[tuple[int, int], ...]:
    """Return the columns of each sub-space of a bundle's vectors; without sub-spaces, all columns as one."""
    said = bundle.manifest
    return tuple((space.start, space.stop) for space in said.subspaces) or ((0, said.vector),)


class Store(ABC):
    """Keeps items and their arrays, and proposes the nearest ones.

    All methods may be called from several threads at a time; writes take turns. **When a method that writes returns, what it wrote survives a power cut,
    and every search that begins afterwards sees it.** One call is one transaction: all of it is visible, or nothing. What is refused changes nothing. A store that is
    closed refuses every call with a `StoreError` but `close`. One that cannot be reached raises `StoreUnavailable`, from any call, and answers again when it can be:
    whoever has it open need not open it anew.
    """

    # Writing

    @abstractmethod
    def upsert(self, items: Sequence[Item], bundle: str) -> int:
        """Add items; one whose id is there takes its place, as a whole.

        Args:
            items: with all arrays of the served generation; each id once.
            bundle: SHA-256 of the bundle that embedded them.

        Returns:
            How many took another's place.

        Raises:
            DataError: an item that cannot be kept: an id twice, arrays of another width, NaN, metadata that is not JSON. All are named.
            Superseded: another bundle is served.
            StoreError: read-only, another writer holds it, or the disk refuses.
        """

    @abstractmethod
    def delete(self, ids: Iterable[str] = (), *, where: Filter | None = None) -> int:
        """Delete items by id, or all that match; return how many there were. Unknown ids are passed over.

        Raises:
            StoreError: see `upsert`.
        """

    def answered(self, key: str) -> tuple[str, bytes] | None:
        """Return the request and the answer that `once` keeps under a key; None where there is none, or no more."""
        return None

    def once(self, key: str, request: str, write: Callable[[], bytes]) -> bytes:
        """Do what `write` does with this store, and keep its answer under a client's key, with what tells the request from every other, in the
        same transaction; return it. A store that keeps no answers, as this default, does a repeated request again."""
        return write()

    # Reading

    @abstractmethod
    def get(self, ids: Iterable[str], *, arrays: bool = False) -> dict[str, Item]:
        """Return items by id; unknown ids are left out.

        Args:
            ids: which.
            arrays: with the served generation's arrays; an item that it was made without has none.
        """

    @abstractmethod
    def original(self, id: str) -> bytes | None:
        """Return the bytes that are kept of an item's original; None where there are none."""

    @abstractmethod
    def scan(self, where: Filter | None = None, *, after: str | None = None, limit: int = 1000) -> list[Item]:
        """Return items in the order of their ids, without arrays: a page of them, the first ones behind `after`.

        Raises:
            DataError: no item has ever had a field that `where` names, or `after` holds what no id can: NUL, or half of a surrogate pair.
        """

    @abstractmethod
    def count(self, where: Filter | None = None) -> int:
        """Return how many items there are, or match."""

    @abstractmethod
    def search(
        self, queries: Floats, count: int, bundle: str, *, where: Filter | None = None
    ) -> list[list[Item]]:
        """Propose the nearest items of each query, with arrays: those among the `count` nearest in at least one sub-space.

        All answers of one call are of one moment. The index measures and orders what is proposed; a store of an approximate structure may miss some.

        Args:
            queries: (Q, P), finite.
            count: how many in each sub-space, by Euclidean distance; fewer when fewer items match.
            bundle: SHA-256 of the bundle that encoded the queries.
            where: only items that match.

        Raises:
            Superseded: another bundle is served.
            DataError: no item has ever had a field that `where` names, or queries of another width or with NaN.
            StoreError: what is kept is damaged.
        """

    def propose(
        self, queries: Floats, count: int, bundle: str, *, where: Filter | None = None
    ) -> list[Candidates]:
        """Propose what `search` does, for the index to measure. A store may override this where it needs no object for each item."""
        found = []
        for items in self.search(queries, count, bundle, where=where):
            items.sort(key=lambda item: item.id)
            names = items[0].arrays if items else ()
            arrays = {name: np.stack([one.arrays[name] for one in items]) for name in names}
            found.append(Candidates(items, arrays))
        return found

    # Generations

    @abstractmethod
    def generations(self) -> tuple[Generation, ...]:
        """Return all generations, oldest first; exactly one is served."""

    @abstractmethod
    def bundle(self, generation: Generation) -> Path:
        """Return a folder of this machine that holds a generation's bundle.

        The store keeps the bundle's files, as it keeps items: who opens the index needs nothing besides. One that lies elsewhere fetches them into the user's cache (`retrieval.stores.kept_bundle`).

        Raises:
            StoreError: the generation was dropped.
        """

    @abstractmethod
    def begin(self, bundle: Bundle, widths: Mapping[str, int]) -> Generation:
        """Begin a generation beside the served one, or return the one of this bundle that is there; it takes a copy of the bundle.

        Args:
            bundle: opened, with the variant that embeds.
            widths: numbers of each array that is kept of an item, by name; see `widths_of`.
        """

    @abstractmethod
    def pending(self, generation: Generation, limit: int) -> list[Item]:
        """Return items that a generation has no arrays of yet, with the served generation's features where they are kept."""

    @abstractmethod
    def embed(self, generation: Generation, items: Sequence[Item], left_out: Sequence[str] = ()) -> None:
        """Give a generation arrays of items that `pending` returned; an item that has changed since is passed over.

        Args:
            generation: which one.
            items: as `pending` gave them, with the generation's arrays.
            left_out: ids of items that cannot be embedded; the generation does without them. An item that `pending` returned last is
                in `items` or here.

        Raises:
            DataError: arrays that `upsert` would refuse, an item that was not pending, or one that is missing.
            StoreError: the generation was dropped.
        """

    def derive(
        self,
        source: Generation,
        generation: Generation,
        apply: Callable[[Floats], Mapping[str, Floats]],
        report: Callable[[int], object] = lambda count: None,
    ) -> int:
        """Give a generation arrays of the items whose features the served one keeps; return how many.

        All of it becomes visible at once. Items that come meanwhile are pending afterwards, and so is every item in a store that has no
        faster way than `pending` and `embed`, which is this default. What `source` does without, `generation` does without.

        Args:
            source: the served generation, which keeps features.
            generation: which one.
            apply: from features (n, F) to arrays (n, width) by name.
            report: is told how many items more are done.

        Raises:
            StoreError: another generation is served by now, what is kept is damaged, or the disk refuses.
        """
        return 0

    @abstractmethod
    def switch(self, generation: Generation) -> bool:
        """Serve another generation from now on, and keep the one that was; False when it has items pending, and nothing changes."""

    @abstractmethod
    def drop(self, generation: Generation) -> None:
        """Delete a generation that is not served."""

    # The whole

    @abstractmethod
    def identity(self) -> str:
        """Return what tells this index from every other: a text that it got when it was created, and keeps. A snapshot has the same."""

    def compact(self, report: Callable[[int, int], object] = lambda done, total: None) -> None:
        """Give back the room of what was deleted, and put in order what speeds searches up.

        Args:
            report: is told how many items are done, of how many.

        Raises:
            StoreError: the store does so by itself, which is this default; or it cannot be written to.
        """
        raise StoreError("This store gives back room by itself: there is nothing to compact.")

    structures: ClassVar[tuple[str, ...]] = ()
    """Back ends, by the names of the built-in ones, that a store can be told to search with; none where it chooses by itself."""

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
            report: is told how many items are done, of how many.

        Raises:
            StoreError: the store chooses by itself, which is this default; or it cannot be written to.
        """
        raise StoreError("This store chooses by itself how it searches: there is nothing to tune.")

    def keep_tuned(self, tuned: Mapping[str, Any]) -> None:  # noqa: B027 (a store need not)
        """Keep what was measured before a structure was chosen, for people: `stats` has it as the detail `tuned` from now on, and a copy of the index likewise.

        Args:
            tuned: as JSON can say it. A store that keeps nothing of it, which is this default, shows nothing of it.

        Raises:
            StoreError: see `upsert`.
        """

    @abstractmethod
    def snapshot(self, target: Path) -> None:
        """Write a copy of one moment to a new folder, while searches and writes go on; it opens as an index of the local store.

        The served generation is in it, whole; others may be.

        Raises:
            StoreError: there is something already, or the disk refuses.
        """

    @abstractmethod
    def stats(self) -> Stats:
        """Return what the store holds."""

    def settings(self) -> Mapping[str, Any]:
        """Return how the index is set up, for people: `fields` are the names of metadata; the rest is this kind of store's."""
        return {}

    def changed(self) -> str | None:
        """Return a sentence when what was opened is not there any more, or another stands in its place; None where that cannot be."""
        return None

    @abstractmethod
    def close(self) -> None:
        """Let go of everything; searches that run end first."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
