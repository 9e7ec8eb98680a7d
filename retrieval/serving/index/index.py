"""An index: items in a store, searched with the bundle of the served generation."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self, TypeAlias, overload

import numpy as np
from numpy.typing import NDArray
from PIL.Image import Image

from retrieval.errors import DataError, StoreError, at_least_one
from retrieval.serving.bundle import Bundle, Encoded
from retrieval.serving.files.places import StrPath, instead, kind_of
from retrieval.serving.filters import Filter, as_filter
from retrieval.serving.images import Limits
from retrieval.serving.index.adding import Added, Options, Summary, add_images, add_sources
from retrieval.serving.index.creating import create
from retrieval.serving.index.duplicates import Duplicates, find_duplicates
from retrieval.serving.index.hits import Hit, Hits
from retrieval.serving.index.index_backend import Floats
from retrieval.serving.index.migrating import Migrated, migrate, rollback
from retrieval.serving.merging import Distances, measured, measured_alone
from retrieval.serving.progress import Progress, showing
from retrieval.serving.queries import encode_queries
from retrieval.serving.runtime import Device
from retrieval.serving.stages import stage
from retrieval.serving.store.address import Address, IndexPlace, place_of
from retrieval.serving.store.contract import (
    CODE,
    MARGIN,
    VECTOR,
    Candidates,
    Generation,
    Item,
    Keep,
    Stats,
    Store,
    Superseded,
)
from retrieval.serving.store.items import own, served_of
from retrieval.serving.store.place import store_place

Where: TypeAlias = "str | Mapping[str, Any] | Filter | None"

_TRIES = 5
_QUERIES_AT_ONCE = 256  # bounds the memory for measuring candidates


class Index:
    """An index of images or vectors that can be changed while it is searched.

    Its methods may be called from several threads at once. `Index.open` and `Index.create` make
    one.

    Attributes:
        path: folder or address of the index.
        store: store that keeps its items.
        summary: result of `Index.create`. `None` if the index was only opened.
    """

    summary: Summary | None = None

    create = classmethod(create)

    def __init__(
        self, path: IndexPlace, store: Store, threads: int | None = None, device: Device = "auto"
    ) -> None:
        self.path = path
        self.store = store
        self._threads, self._device = threads, device
        self._lock = threading.Lock()
        self._closed = False
        self._served: tuple[Generation, Bundle] | None = None
        try:
            self._identity = store.identity()
            self.follow()
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
            path: its folder, or the address of a plugin's store, such as
                `milvus://host:19530/photos`.
            threads: threads per call of the encoder. `None` is `OMP_NUM_THREADS`, or one per core.
            device: where the encoder runs: "auto", "cpu" or "cuda".
            plugins: files or modules to load as plugins besides the installed ones.

        Raises:
            StoreError: the index is missing, damaged or of another format.
            BundleError: its bundle cannot be used.
            PluginError: the plugin of its back end or store is missing.
        """
        place = place_of(path)
        return cls(place, open_store(place, plugins), threads, device)

    def follow(self) -> Bundle:
        """Open and return the bundle of the generation that is served now."""
        with self._lock:
            served = served_of(self.store.generations())
            if self._served is None or self._served[0].number != served.number:
                bundle = Bundle.open(
                    self.store.bundle(served),
                    variant=served.variant,
                    threads=self._threads,
                    device=self._device,
                )
                if bundle.sha256 != served.bundle:
                    raise StoreError(
                        f"The index {self.path} is damaged: its bundle is not the one that "
                        "embedded its items."
                    )
                self._served = (served, bundle)
            return self._served[1]

    @property
    def bundle(self) -> Bundle:
        """The served generation's bundle, which encodes queries and may rescore candidates."""
        assert self._served is not None
        return self._served[1]

    @property
    def generation(self) -> Generation:
        """The served generation."""
        assert self._served is not None
        return self._served[0]

    @property
    def identity(self) -> str:
        """The index's own id, which copies and snapshots keep."""
        return self._identity

    def __len__(self) -> int:
        return self.store.count()

    def __repr__(self) -> str:
        return f"Index {self.path}: {len(self):,} items, vectors of {self.bundle.manifest.vector}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the store; searches fail from then on."""
        self._closed = True
        self.store.close()

    def require_open(self) -> None:
        """Raise a `StoreError` if the index is closed."""
        if self._closed:
            raise StoreError(
                f"The index {self.path} was closed. Open it again with retrieval.Index.open."
            )

    def changed(self) -> str | None:
        """Return a sentence if the folder was replaced or removed, else `None`."""
        return self.store.changed()

    # Searching

    @overload
    def search(
        self,
        queries: StrPath | bytes | Image,
        k: int = 10,
        *,
        candidates: int | None = None,
        where: Where = None,
    ) -> Hits: ...
    @overload
    def search(
        self,
        queries: Encoded | list[Any],
        k: int = 10,
        *,
        candidates: int | None = None,
        where: Where = None,
    ) -> list[Hits]: ...
    @overload
    def search(
        self, queries: Any, k: int = 10, *, candidates: int | None = None, where: Where = None
    ) -> list[Any]: ...
    def search(
        self, queries: Any, k: int = 10, *, candidates: int | None = None, where: Where = None
    ) -> list[Any]:
        """Return the nearest items of a query, nearest first; ties are ordered by id.

        With a rescorer, distances are the rescorer's. Otherwise they are measured on the stored
        vectors: Euclidean unless the bundle defines another distance, and merged over sub-spaces
        as in `retrieval.serving.merging`.

        Args:
            queries: one query gives one list of hits:

                - an image: its file's path (text or `Path`), its bytes, a Pillow image, or its
                  pixels as for `add`;
                - a vector: features (F,) if the bundle takes features, otherwise an encoder output
                  (P,).

                Several queries give one list of hits each: a list of images or of vectors, an array
                (N, F) or (N, P), or `Encoded` from the bundle's `encode`.
            k: number of hits; fewer if the index has fewer items.
            candidates: number of candidates per sub-space that are rescored. Defaults to the
                bundle's own number.
            where: search only items that match this filter: text such as
                `price < 20 and label in ('shoe', 'boot')`, or JSON. See
                `retrieval.serving.filters`.

        Raises:
            DataError: an image cannot be decoded, a vector has another width or holds NaN, a list
                mixes images and vectors, k is below 1, or the rescorer needs codes but the queries
                are bare vectors. For a list, the message names the item.
            StoreError: the index is closed.
        """
        k = at_least_one("k", k)
        if candidates is not None:
            candidates = at_least_one("The number of candidates", candidates)
        self.require_open()
        where = as_filter(where)
        for attempt in range(_TRIES):
            bundle = self.bundle
            encoded, alone = encode_queries(bundle, queries)
            query, code = _query_arrays(bundle, encoded)
            try:
                hits: list[Hits] = []
                for start in range(0, len(query), _QUERIES_AT_ONCE):
                    rows = slice(start, start + _QUERIES_AT_ONCE)
                    own_code = None if code is None else code[rows]
                    hits += self._nearest(query[rows], own_code, bundle, k, candidates, where)
                return hits[0] if alone else hits
            except Superseded:
                self.follow()
                # Queries that arrived encoded cannot be encoded again for another generation.
                if isinstance(queries, Encoded) or attempt == _TRIES - 1:
                    raise
        raise AssertionError

    def _nearest(
        self,
        query: Floats,
        code: Floats | None,
        bundle: Bundle,
        k: int,
        candidates: int | None,
        where: Filter | None,
    ) -> list[Hits]:
        """Return the hits of each query that `bundle` encoded."""
        count = candidates_of(bundle, k, candidates)
        proposed = self.store.propose(query, count, bundle.sha256, where=where)
        hits, alone = [], measured_alone(bundle)
        for row, near in enumerate(proposed):
            if alone and near.distances is not None:
                hits.append(self._hits(near.items, near.distances[:k].tolist()))
                continue
            if near.distances is not None:
                near = _sorted_by_id(near)
            own_code = None if code is None else code[row]
            distances = _distances(bundle, query[row], own_code, near, k)
            order = np.argsort(distances, kind="stable")[:k]  # ties keep the candidates' order
            nearest = [near.items[place] for place in order.tolist()]
            hits.append(self._hits(nearest, distances[order].tolist()))
        return hits

    def _hits(self, items: Sequence[Item], distances: Sequence[float]) -> Hits:
        """Return one hit per distance; items beyond the number of distances are ignored."""
        pairs = zip(items, distances, strict=False)
        hits = (
            Hit(item.id, item.label, distance, own(item.metadata), item.path, item.keep)
            for item, distance in pairs
        )
        return Hits(hits, self.store.original)

    def duplicates(
        self, within: float, *, where: Where = None, progress: Progress = True
    ) -> list[Duplicates]:
        """Return groups of items within a distance of one another, the largest group first.

        Two items may be connected through others.

        Args:
            within: largest distance between neighbours, on the scale of `Hit.distance`.
            where: compare only items that match this filter.
            progress: show a progress bar; a function is called with (what, done, total) instead.
        """
        with showing(progress):
            return find_duplicates(self, within, as_filter(where))

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
        batch: int = 32,
        workers: int | None = None,
        limits: Limits | None = None,
        progress: Progress = True,
    ) -> Added:
        """Embed images or features and add them; items that have not changed are skipped.

        Items are written about once a second; repeating an interrupted call resumes it.

        Args:
            sources: one or more files, folders, CSV manifests, Parquet tables or
                `.npz` features; see `retrieval.serving.index.sources.collect`.
            images: one or more images from memory instead of `sources`, as
                `retrieval.Encoder.encode` takes them; feature rows (N, F) for an index of features.
                If an id already exists, its image is replaced.
            ids: one id per image in `images`.
            labels: one label per image in `images`.
            metadata: one JSON object per image in `images`.
            keep: what the index keeps of each original: "reference", "copy", "thumbnail" or
                "nothing". Images from memory have no file, so "reference" keeps nothing of them.
            sync: delete items that are not in `sources`.
            skip_bad: skip images that cannot be used. Otherwise the others are added, and an error
                lists the ones that cannot be used.
            batch: number of items per batch.
            workers: number of decoding threads. `None` uses one per core.
            limits: largest images to decode.
            progress: show a progress bar; a function is called with (what, done, total) instead.

        Raises:
            DataError: there are no items, an id is used twice, or images cannot be used.
            StoreError: the index is read-only or has another writer, or the disk fails.
        """
        batch = at_least_one("batch", batch)
        options = Options(keep, skip_bad, batch, workers, limits or Limits())
        with showing(progress):
            if images is not None:
                return add_images(self, images, ids, labels, metadata, options)
            return add_sources(self, sources, options, sync=sync)

    def upsert(self, items: Sequence[Item]) -> int:
        """Add or replace items that are already embedded; return how many were replaced.

        Raises:
            DataError: an item cannot be stored. The message lists all such items; none is stored.
            StoreError: the index is read-only or has another writer, or the disk fails.
        """
        with stage("write", len(items)):
            return self.store.upsert(items, self.bundle.sha256)

    def delete(self, ids: str | Iterable[str] = (), *, where: Where = None) -> int:
        """Delete items by id, or all that match a filter; return how many were deleted.

        Unknown ids are ignored.

        Raises:
            DataError: the filter is invalid or uses a field that no item has ever had.
            StoreError: the index is read-only or has another writer, or the disk fails.
        """
        where = as_filter(where)
        with stage("write"):
            return self.store.delete([ids] if isinstance(ids, str) else ids, where=where)

    def get(self, ids: str | Iterable[str], *, arrays: bool = False) -> dict[str, Item]:
        """Return items by id; unknown ids are left out.

        Args:
            ids: one or more ids.
            arrays: also read the items' vectors.

        Raises:
            StoreError: the index is closed or damaged.
        """
        self.require_open()
        return self.store.get([ids] if isinstance(ids, str) else ids, arrays=arrays)

    def vector(self, id: str) -> Floats:
        """Return the stored vector (P,) of an item.

        Raises:
            DataError: the item does not exist, or the served generation has no vector for it.
        """
        item = self.get([id], arrays=True).get(id)
        if item is None:
            raise DataError(f"The index {self.path} has no item '{id}'.")
        if not item.arrays:
            raise DataError(
                f"The served generation of {self.path} has no vector for the item '{id}': it could"
                " not be embedded when the index was migrated. Add it again."
            )
        return np.array(item.vector)

    def scan(
        self, where: Where = None, *, after: str | None = None, limit: int = 1000
    ) -> list[Item]:
        """Return up to `limit` matching items with ids after `after`, sorted by id."""
        return self.store.scan(as_filter(where), after=after, limit=limit)

    def count(self, where: Where = None) -> int:
        """Return the number of matching items."""
        return self.store.count(as_filter(where))

    def stats(self) -> Stats:
        """Return the number of items, the generations and the size of the index."""
        return self.store.stats()

    # The index as a whole

    def migrate(
        self, bundle: StrPath | Bundle, *, skip_bad: bool = False, progress: Progress = True
    ) -> Migrated:
        """Embed all items with another bundle, then serve it.

        Searches and writes continue meanwhile, and every answer comes from a single bundle. The old
        generation stays for `rollback` until `drop_old`. Repeating an interrupted call resumes it.

        If the index stores features of the same backbone (`Bundle.backbone_sha256`), only the new
        head is applied to them; no original is opened. The same holds for a bundle that takes
        features of their width: it is served behind the index's backbone, so queries are still
        images. You must know that it was trained on these features. In all other cases originals
        are embedded again.

        Args:
            bundle: a bundle, or its folder.
            skip_bad: leave out items whose original is missing or cannot be used. Otherwise an
                error lists them and the old generation stays served.
            progress: show a progress bar; a function is called with (what, done, total) instead.

        Raises:
            DataError: an item's original is missing or cannot be used.
            BundleError: the bundle takes features, but the index stores none of that width.
            StoreError: the index is read-only or has another writer, or the disk fails.
        """
        return migrate(self, bundle, skip_bad=skip_bad, progress=progress)

    def rollback(self, *, progress: Progress = True) -> Migrated:
        """Serve the previous generation again, after embedding items added since for it."""
        return rollback(self, progress=progress)

    def drop_old(self) -> int:
        """Delete all generations except the served one; return how many."""
        superseded = [known for known in self.store.generations() if known.state != "served"]
        for generation in superseded:
            self.store.drop(generation)
        return len(superseded)

    def snapshot(self, target: StrPath) -> Path:
        """Write a consistent copy of the index to a new folder; return the folder.

        Raises:
            StoreError: the target already exists, or the disk fails.
        """
        self.store.snapshot(Path(target))
        return Path(target)


def open_index(
    path: StrPath | Address,
    *,
    threads: int | None = None,
    device: Device = "auto",
    plugins: Iterable[str] = (),
) -> Index:
    """Open an index; see `Index.open`."""
    return Index.open(path, threads=threads, device=device, plugins=plugins)


def create_index(
    output: StrPath | Address,
    bundle: StrPath | Bundle,
    sources: StrPath | Sequence[StrPath] = (),
    **options: Any,
) -> Summary:
    """Create an index without opening it; options and errors are those of `Index.create`."""
    with Index.create(output, sources, model=bundle, **options) as index:
        assert index.summary is not None
        return index.summary


def open_store(place: IndexPlace, plugins: Iterable[str] = ()) -> Store:
    """Open the store of an index without its bundle.

    Raises:
        StoreError: the index is missing, damaged or of another format.
    """
    if isinstance(place, Path) and kind_of(place) != "index":
        missing = "" if place.is_dir() else ": there is no such folder"
        raise StoreError(f"{place} is not an index{missing}.{instead(place, 'index')}")
    return store_place(place, plugins).open()


def _query_arrays(bundle: Bundle, queries: Encoded | NDArray[Any]) -> tuple[Floats, Floats | None]:
    """Return query vectors (Q, P), and codes if the bundle has a rescorer.

    NaN and infinity are left for the store to refuse.
    """
    rescores, width = bundle.manifest.rescorer is not None, bundle.manifest.vector
    if isinstance(queries, Encoded):
        if queries.bundle not in ("", bundle.sha256):
            raise Superseded(
                "The queries were encoded with another bundle than the one that is served. Encode"
                " them again."
            )
        query, code = queries.query, queries.code
    else:
        query, code = np.atleast_2d(np.asarray(queries)), None
        if query.dtype.kind not in "fiu":
            raise DataError(f"A query vector holds real numbers, not {query.dtype}.")
    if query.ndim != 2 or query.shape[1] != width:
        raise DataError(f"A query vector of this index has {width} numbers, not {query.shape[-1]}.")
    if query.dtype != np.float32:
        with np.errstate(over="ignore"):
            query = query.astype(np.float32)
    query = np.ascontiguousarray(query)
    if rescores and code is None:
        raise DataError(
            "This index orders its answers with a rescorer, which needs the query's code: give an "
            "image (or features), not an encoded vector."
        )
    return query, code if rescores else None


def candidates_of(bundle: Bundle, k: int, candidates: int | None) -> int:
    """Return the number of candidates to fetch per sub-space."""
    rescorer = bundle.manifest.rescorer
    least = k if measured_alone(bundle) else k + MARGIN  # the store's order may not be the bundle's
    return max(least, candidates or (rescorer.candidates if rescorer else 0))


def _sorted_by_id(proposed: Candidates) -> Candidates:
    """Return candidates sorted by id, for a distance other than the store's."""
    order = sorted(range(len(proposed.items)), key=lambda row: proposed.items[row].id)
    arrays = {name: array[order] for name, array in proposed.arrays.items()}
    return Candidates([proposed.items[row] for row in order], arrays)


def _distances(
    bundle: Bundle, query: Floats, code: Floats | None, proposed: Candidates, k: int
) -> Distances:
    """Return the distances of a query to its candidates, as the bundle defines them."""
    if not proposed.items:
        return np.empty(0)
    codes = None if code is None else proposed.arrays[CODE]
    k = min(k, len(proposed.items))
    return measured(bundle, query, code, proposed.arrays[VECTOR], codes, k)
