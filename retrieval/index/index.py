"""An index: items in a store, and the bundle (an exported model) that embeds and searches them."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import EllipsisType, MappingProxyType
from typing import Any, Self, Unpack, overload

import numpy as np
from PIL.Image import Image

from retrieval.base.arrays import Floats32
from retrieval.base.folder_kinds import StrPath, instead, kind_of
from retrieval.base.progress import Meter, Progress, showing
from retrieval.base.runtime import Device
from retrieval.base.timing import stage
from retrieval.bundle.bundle import Bundle, Encoded
from retrieval.errors import DataError, StoreError, at_least_one
from retrieval.images.decoding import Limits
from retrieval.index.adding import Added, Options, Summary, add_images, add_sources
from retrieval.index.answering import answer
from retrieval.index.calibration import calibrate, calibration
from retrieval.index.creating import create_and_open
from retrieval.index.duplicates import duplicates
from retrieval.index.golden import evaluate
from retrieval.index.identify import identify
from retrieval.index.migrating import migrate, rollback
from retrieval.index.queries_and_hits import Hits
from retrieval.index.query import Query, QueryOptions, plain_query, query_of
from retrieval.store.address import Address, IndexPlace, folder_of, place_of
from retrieval.store.contract import (
    Generation,
    Item,
    Keep,
    Stats,
    Store,
    Superseded,
)
from retrieval.store.filters import FilterLike, as_filter
from retrieval.store.find_store import store_place
from retrieval.store.items import served_of

_MAX_ATTEMPTS = 5  # of a search that a change of the served bundle interrupts


class NoSuchItem(DataError, KeyError):
    """An index has no item with this id; also a KeyError, as users expect of `index[id]`."""

    __str__ = Exception.__str__


class Index:
    """An index of images or vectors that can be changed while it is searched.

    `Index.open` and `Index.create` return an index. Its methods are thread-safe. All arrays that
    one bundle (an exported model) computed for the items form a generation. One generation is
    served: it is searched and written to. As in a dictionary, `index[id]` is an item, `id in index`
    says whether there is one, `len(index)` counts them, and a loop over the index gives the ids.

    Attributes:
        path: folder or address of the index.
        store: store that keeps the items.
        identity: id that the index received when it was created; copies and snapshots keep it.
        generation: the served generation.
        bundle: bundle of this generation; encodes queries and may rescore candidates.
        summary: result of `Index.create`. `None` if the index was only opened.
    """

    summary: Summary | None = None

    create = classmethod(create_and_open)
    calibrate = calibrate
    calibration = calibration
    duplicates = duplicates
    evaluate = evaluate
    identify = identify
    migrate = migrate
    rollback = rollback

    def __init__(
        self, path: IndexPlace, store: Store, threads: int | None = None, device: Device = "auto"
    ) -> None:
        self.path = path
        self.store = store
        self._threads = threads
        self._device = device
        self._lock = threading.Lock()
        self._closed = False
        # Number and bundle of the generation that is about to be served.
        self._expected: tuple[int, Bundle | None] = (0, None)
        try:
            self.identity = store.identity()
            self.generation = served_of(store.generations())
            self.bundle = self._bundle_of(self.generation)
        # Ctrl-C included, because nobody else has the store and could close it.
        except BaseException:
            store.close()
            raise

    @classmethod
    def open(
        cls,
        path: StrPath | Address,
        *,
        threads: int | None = None,
        device: Device = "auto",
        plugins: Iterable[str] = (),
    ) -> Self:
        """Open an index.

        Args:
            path: folder of the index, or an address in a plugin's store, such as
                `milvus://host:19530/photos`.
            threads: threads per call of the encoder. `None` uses `OMP_NUM_THREADS`, or one per
                core.
            device: where the encoder runs: "auto", "cpu" or "cuda".
            plugins: files or modules to load as plugins besides the installed ones.

        Raises:
            StoreError: the index is missing, damaged or of another format.
            BundleError: the bundle of the index cannot be used.
            PluginError: the plugin of the store is missing.
        """
        place = place_of(path)
        return cls(place, open_store(place, plugins), threads, device)

    def follow(self) -> Bundle:
        """Return the bundle of the generation that is served now; open it if it has changed."""
        # Of several threads that notice a change, one opens the new bundle and the others wait.
        with self._lock:
            served = served_of(self.store.generations())
            if served.number != self.generation.number:
                expected, bundle = self._expected
                if expected != served.number or bundle is None:
                    bundle = self._bundle_of(served)
                self.bundle = bundle
                self.generation = served
            return self.bundle

    def prepare(self) -> None:
        """Open the bundle of the generation that is about to be served, if one was announced."""
        generation = self.store.expected()
        if generation is not None and generation.number != self._expected[0]:
            self._expected = generation.number, self._bundle_of(generation)

    def _bundle_of(self, generation: Generation) -> Bundle:
        folder = self.store.bundle(generation)
        variant = generation.variant
        bundle = Bundle.open(folder, variant=variant, threads=self._threads, device=self._device)
        if bundle.sha256 != generation.bundle:
            raise StoreError(
                f"The index {self.path} is damaged: its bundle is not the one that embedded its"
                " items."
            )
        return bundle

    def __len__(self) -> int:
        return self.store.count()

    def __contains__(self, id: object) -> bool:
        return isinstance(id, str) and id in self.get(id)

    def __iter__(self) -> Iterator[str]:
        """Yield the ids of all items, sorted."""
        after = None
        while page := self.scan(after=after):
            yield from (item.id for item in page)
            after = page[-1].id

    def __getitem__(self, id: str) -> Item:
        """Return an item by id.

        Raises:
            NoSuchItem: the item does not exist; also a `KeyError`.
            StoreError: the index is closed or damaged.
        """
        return self._item(id)

    def _item(self, id: str, arrays: bool = False) -> Item:
        item = self.get([id], arrays=arrays).get(id)
        if item is None:
            raise NoSuchItem(f"The index {self.path} has no item {id!r}.")
        return item

    def __repr__(self) -> str:
        manifest = self.bundle.manifest
        return (
            f"Index {self.path}: {len(self):,} items, vectors of {manifest.vector},"
            f" {manifest.distance}"
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the store; later searches raise a `StoreError`."""
        # First, so that a search that begins meanwhile is refused before it encodes its queries.
        self._closed = True
        self.store.close()

    def changed(self) -> str | None:
        """Return a sentence that says how the index was replaced or removed, or `None`."""
        return self.store.changed()

    # Searching

    @overload
    def search(
        self,
        queries: StrPath | bytes | Image | None = None,
        k: int = 10,
        **options: Unpack[QueryOptions],
    ) -> Hits: ...
    @overload
    def search(
        self, queries: Encoded | list[Any], k: int = 10, **options: Unpack[QueryOptions]
    ) -> list[Hits]: ...
    @overload
    def search(self, queries: Any, k: int = 10, **options: Unpack[QueryOptions]) -> list[Any]: ...
    def search(
        self, queries: Any = None, k: int = 10, **options: Unpack[QueryOptions]
    ) -> list[Any]:
        """Return the nearest items of a query, nearest first; ties are ordered by id.

        A bundle may have a rescorer, a model that computes the distance of a query and a candidate.
        Without a rescorer, distances are computed from the stored vectors. They are Euclidean
        unless the bundle defines another distance. If the vectors have sub-spaces, the distances in
        the sub-spaces are merged as in `retrieval.bundle.distances`.

        Args:
            queries: one query or several. One query returns one list of hits:

                - an image: its file's path (text or `Path`), its bytes, a Pillow image, or its
                  pixels as for `add`;
                - a vector: F features if the bundle takes features, otherwise the P numbers that
                  the encoder returns for an image.

                Several queries return a list with one list of hits per query: a list of images or
                of vectors, an array (N, F) or (N, P), or `Encoded` from the bundle's `encode`.
                `None` searches for `text`, or for what `like` names.
            k: number of hits; fewer if the index has fewer items.
            text: a text such as "red mug" instead of `queries`, if the bundle has a text encoder;
                or a list of texts, which returns a list with one list of hits per text.
            words: in a search for a text, how much the words of items count beside the vectors:
                from 0 (vectors alone) to 1 (words alone). If the index keeps words (`keep_words`),
                the default is 0.5, or 1 if the bundle has no text encoder; see
                `retrieval.index.answering`.
            candidates: number of candidates per sub-space that are rescored. Defaults to the number
                that the bundle defines.
            filter: search only items that match this filter: text such as
                `price < 20 and label in ('shoe', 'boot')`, or JSON. See
                `retrieval.store.filters`.
            like: one or more items or pictures that hits should resemble as they do the query. Text
                is the id of an item or else the path of a picture. Items named here or in `dislike`
                are no hits.
            dislike: the same of what hits should not resemble; see
                `retrieval.index.answering.rocchio`.
            group_by: a field such as `label` or `maker.country`: `k` counts its values, and the
                hits of one value follow one another. The value with the nearest hit comes first.
                Items without a value, or with a list or an object, are no hits.
            group_size: largest number of hits per value of `group_by`.
            max_distance: largest distance of a hit.
            offset: number of hits (with `group_by`, of values) to skip.
            diversity: above 0, choose among the `max(100, 2 (offset + k))` nearest hits those that
                also differ from one another: 1 looks at nothing else. See
                `retrieval.index.answering`.
            facets: fields whose values are counted among the hits; see `Hits.facets`.
            order_by: list the same hits by the value of this field (numbers before text), and with
                "-" before it, as in "-price", from the largest. Hits without a value, or with a
                list or an object, come last.
            scores: give each hit a `score`, the share of strangers that come less near, which needs
                `calibrate`.

        Raises:
            DataError: an image cannot be decoded; a vector has another width or holds NaN; a list
                mixes images and vectors; the bundle takes no texts; an option has no such value; or
                the bundle has a rescorer, which compares codes, and a query is a vector, which has
                no code. For a list, the message names the item.
            StoreError: the index is closed.
        """
        if options:
            query = query_of(k, **options)
        else:
            query = plain_query(at_least_one("k", k))
        return self.answer(queries, query)

    def answer(self, queries: Any, query: Query) -> list[Any]:
        """Return what `search` does, for options that are one object."""
        if self._closed:  # before the queries are encoded
            raise StoreError(
                f"The index {self.path} was closed. Open it again with retrieval.Index.open."
            )
        attempts = 0
        while True:
            try:
                return answer(self, queries, query)
            # The vectors of two bundles cannot be compared, so the queries are encoded once more.
            except Superseded:
                attempts += 1
                self.follow()
                # `Encoded` no longer holds the images, so the new bundle cannot encode them.
                if isinstance(queries, Encoded) or attempts == _MAX_ATTEMPTS:
                    raise

    # Items

    def add(
        self,
        sources: StrPath | Sequence[StrPath] = (),
        *,
        images: Any = None,
        ids: Sequence[str] | None = None,
        labels: Sequence[str | None] | None = None,
        metadata: Sequence[Mapping[str, Any]] | None = None,
        keep: Keep = "reference",
        sync: bool = False,
        skip_bad: bool = False,
        batch_size: int = 32,
        limits: Limits | None = None,
        progress: Progress = True,
    ) -> Added:
        """Embed images or features and add them; skip items that have not changed.

        Embedded items are written about once a second, so repeating an interrupted call resumes it.

        Args:
            sources: one or more files, folders, CSV manifests, Parquet tables or
                `.npz` features; see `retrieval.index.sources.collect`.
            images: one or more images in memory instead of `sources`, in the forms that
                `retrieval.Encoder.encode` accepts. If the index's bundle takes features, an array
                of N rows of F features. An item whose id already exists is replaced.
            ids: one id per image in `images`.
            labels: one label per image in `images`.
            metadata: one JSON object per image in `images`.
            keep: what the index keeps of each original: "reference", "copy", "thumbnail" or
                "nothing". Images in memory have no file, so "reference" keeps nothing of them.
            sync: delete items that are not in `sources`.
            skip_bad: skip images that cannot be used. If False, the other images are still added,
                and then an error lists those that cannot be used.
            batch_size: number of items per batch.
            limits: largest images to decode.
            progress: True shows a progress bar. A function is called with (what, done, total)
                instead.

        Raises:
            DataError: there are no items, an id is used twice, or images cannot be used.
            StoreError: the index is read-only or has another writer, or the disk fails.
        """
        batch_size = at_least_one("batch_size", batch_size)
        options = Options(keep, skip_bad, batch_size, limits or Limits())
        with showing(progress):
            if images is not None:
                return add_images(self, images, ids, labels, metadata, options)
            return add_sources(self, sources, options, sync=sync)

    def upsert(self, items: Sequence[Item]) -> int:
        """Add or replace embedded items; return how many were replaced.

        Raises:
            DataError: some items cannot be stored. The message lists them, and nothing is stored.
            StoreError: the index is read-only or has another writer, or the disk fails.
        """
        with stage("write", len(items)):
            return self.store.upsert(items, self.bundle.sha256)

    def update(
        self,
        ids: str | Iterable[str] = (),
        *,
        filter: FilterLike = None,
        label: str | EllipsisType | None = ...,
        metadata: Mapping[str, Any] | None = MappingProxyType({}),
    ) -> int:
        """Change the label or metadata of items by id, or of all that match a filter.

        A store in a folder changes all of them or none.

        Args:
            ids: one or more ids; unknown ids are ignored.
            filter: filter that items must match.
            label: the new label, or `None` for none; `...` leaves the labels as they are.
            metadata: entries that are merged into those of each item (RFC 7396). An entry that is
                `None` is removed; `None` instead of entries removes all.

        Returns:
            The number of items that were changed.

        Raises:
            DataError: a label or metadata cannot be stored, the filter is invalid, or it uses a
                field that no item has ever had.
            StoreError: the index is read-only or has another writer, or the disk fails.
        """
        changes: dict[str, Any] = {"metadata": metadata}
        if label is not ...:
            changes["label"] = label
        with stage("write"):
            return self.store.update(
                [ids] if isinstance(ids, str) else ids,
                changes,
                self.bundle.sha256,
                filter=as_filter(filter),
            )

    def delete(self, ids: str | Iterable[str] = (), *, filter: FilterLike = None) -> int:
        """Delete items by id, or all that match a filter; return how many were deleted.

        Unknown ids are ignored.

        Raises:
            DataError: the filter is invalid, uses a field that no item has ever had, or can never
                match for another reason; see `Store.refuse_impossible`.
            StoreError: the index is read-only or has another writer, or the disk fails.
        """
        filter = as_filter(filter)
        with stage("write"):
            deleted = self.store.delete([ids] if isinstance(ids, str) else ids, filter=filter)
        if not deleted:
            self.store.refuse_impossible(filter)
        return deleted

    def get(self, ids: str | Iterable[str], *, arrays: bool = False) -> dict[str, Item]:
        """Return items by id; unknown ids are left out.

        Args:
            ids: one or more ids.
            arrays: also read the items' vectors.

        Raises:
            StoreError: the index is closed or damaged.
        """
        return self.store.get([ids] if isinstance(ids, str) else ids, arrays=arrays)

    def vector(self, id: str) -> Floats32:
        """Return the stored vector (P,) of an item.

        Raises:
            DataError: the item does not exist, or the served generation has no vector for it.
        """
        item = self._item(id, arrays=True)
        if not item.arrays:
            raise DataError(
                f"The served generation of {self.path} has no vector for the item '{id}': it could"
                " not be embedded when the index was migrated. Add it again."
            )
        return np.array(item.vector)

    def scan(
        self, filter: FilterLike = None, *, after: str | None = None, limit: int = 1000
    ) -> list[Item]:
        """Return up to `limit` matching items with ids after `after`, sorted by id."""
        filter = as_filter(filter)
        items = self.store.scan(filter, after=after, limit=limit)
        if not items and after is None:
            self.store.refuse_impossible(filter)
        return items

    def count(self, filter: FilterLike = None) -> int:
        """Return the number of matching items."""
        filter = as_filter(filter)
        count = self.store.count(filter)
        if not count:
            self.store.refuse_impossible(filter)
        return count

    def stats(self) -> Stats:
        """Return the number of items, the generations and the size of the index."""
        return self.store.stats()

    # The index as a whole

    def keep_words(self, *, progress: Progress = True) -> None:
        """Keep the words of all items from now on, by which searches for a text can find items.

        The words of an item are those of its label, and of the texts and numbers in its metadata.
        Others may search and write meanwhile. To resume an interrupted call, repeat it.

        Raises:
            StoreError: the store is not one in a folder, or it cannot be written to.
        """
        with showing(progress), Meter("reading words", len(self), "items") as meter:
            self.store.keep_words(meter.update)

    def drop_old(self) -> int:
        """Delete all generations except the served one; return how many."""
        generations = [
            generation for generation in self.store.generations() if generation.state != "served"
        ]
        for generation in generations:
            self.store.drop(generation)
        return len(generations)

    def snapshot(self, target: StrPath) -> Path:
        """Write a consistent copy of the index to a new folder; return the folder.

        Raises:
            StoreError: the target already exists, or the disk fails.
        """
        self.store.snapshot(folder_of(target))
        return Path(target)


open_index = Index.open


def create_index(
    output: StrPath | Address,
    bundle: StrPath | Bundle,
    sources: StrPath | Sequence[StrPath] = (),
    **options: Any,
) -> Summary:
    """Create an index, close it and return its summary; see `Index.create`."""
    with Index.create(output, sources, model=bundle, **options) as index:
        assert index.summary is not None
        return index.summary


def open_store(place: IndexPlace, plugins: Iterable[str] = ()) -> Store:
    """Open the store of an index without its bundle.

    Raises:
        StoreError: the index is missing, damaged or of another format.
    """
    if isinstance(place, Path) and kind_of(place) != "index":
        if place.is_dir():
            missing = ""
        else:
            missing = ": there is no such folder"
        raise StoreError(f"{place} is not an index{missing}.{instead(place, 'index')}")
    return store_place(place, plugins).open()
