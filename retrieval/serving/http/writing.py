"""Changes of one index: embedded in the pools that searches use, written in turn by one thread, acknowledged when they are durable."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from retrieval.errors import DataError, StoreError
from retrieval.serving.bundle import Bundle, Encoded
from retrieval.serving.decoding.pool import Decoded
from retrieval.serving.filters import Filter, as_filter
from retrieval.serving.http.access.audit import Audit, Change, author, recorded
from retrieval.serving.http.errors import RequestError
from retrieval.serving.http.guard import store_failed
from retrieval.serving.http.models import Keeping
from retrieval.serving.http.pool import Job, Pool
from retrieval.serving.http.searcher import Searcher
from retrieval.serving.index.index import Index
from retrieval.serving.queries import encode_vectors
from retrieval.serving.stages import stage
from retrieval.serving.store.contract import (
    CODE,
    FEATURES,
    VECTOR,
    Floats,
    Item,
    StoreUnavailable,
    Superseded,
)

T = TypeVar("T")

_TRIES = 5
_BYTES = 64_000_000  # of originals that are kept, and copied when only an item's label or metadata change
_EVERY = {"exists": "id"}
_REFUSED = (
    "The index cannot be written to now: another process writes to it, it is read-only, or its disk refuses. "
    "The server's log says which."
)


@dataclass(frozen=True)
class New:
    """What an item is to be: of an image, of a vector, or, with neither, what it is but for its label and metadata."""

    id: str
    label: str | None = None
    metadata: dict[str, Any] = field(default_factory=dict)
    image: bytes | None = None
    vector: Sequence[float] | None = None
    keep: Keeping | None = None


@dataclass(frozen=True)
class Once:
    """A key under which a client may repeat a request, and what tells this request from every other."""

    key: str
    request: str

    @classmethod
    def of(cls, key: str, parts: Sequence[bytes]) -> Once:
        """Return a key with a hash of the request's parts."""
        sum_ = hashlib.sha256()
        for part in parts:
            sum_.update(len(part).to_bytes(8, "big") + part)
        return cls(key, sum_.hexdigest())


class Writing:
    """Writes to one index.

    Args:
        searcher: of the index.
        name: of the index, for the record of changes.
        audit: that record; None for none.
    """

    def __init__(self, searcher: Searcher, name: str = "index", audit: Audit | None = None) -> None:
        self._searcher = searcher
        self._name, self._audit = name, audit
        self._machinery = searcher.machinery
        self._settings = searcher.settings
        waiting = "The server is busy: too many changes are waiting. Try again in a moment."
        self._turns = Pool("write", 1, searcher.settings.writes, waiting)

    async def put(
        self,
        items: Sequence[New],
        finish: Callable[[int, int], bytes],
        client: str,
        once: Once | None = None,
        took: Callable[[int], object] = lambda size: None,
    ) -> bytes:
        """Add items, or put them in the place of others: all of them, or none.

        Args:
            items: each id once.
            finish: makes the answer of how many are new and how many took another's place.
            client: whose they are; clients take turns.
            once: a key that the answer is kept under.
            took: is told the bytes that decoded images take.

        Raises:
            DataError: an image or item cannot be used, or one without an image and a vector is not there.
            RequestError: 422, the key is another request's; 503, too many wait, or the index cannot be written to.
        """
        if once is not None and (known := await self._turn(lambda index: _known(index, once), client)):
            return known
        change = Change("put", self._name, [one.id for one in items], by=author.get())
        for _ in range(_TRIES):
            bundle = self._searcher.index.bundle
            images = [one.image for one in items if one.image is not None]
            decoded = await self._machinery.pixels(bundle, images, client) if images else []
            took(sum(one.pixels.nbytes for one in decoded))
            small = await self._small(items, client)
            made = await self._machinery.searches.run(
                lambda job, decoded=decoded, bundle=bundle, small=small: self._embedded(  # type: ignore[misc]
                    bundle, items, decoded, small
                ),
                client,
            )
            try:
                return await self._turn(
                    lambda index, made=made, bundle=bundle: _written(  # type: ignore[misc]
                        index, items, made, bundle, finish, once
                    ),
                    client,
                    change,
                )
            except Superseded:  # another bundle is served since
                await self._searcher.state(client)
        raise RequestError(503, "The index changes its bundle again and again. Try again in a moment.")

    async def delete(
        self, client: str, ids: Sequence[str] = (), where: Filter | None = None, *, every: bool = False
    ) -> int:
        """Delete items by id, or all that match, or all; return how many there were.

        Raises:
            DataError: the filter names what no item has.
            RequestError: 503, see `put`.
        """
        chosen = as_filter(_EVERY) if every else where
        change = Change("delete", self._name, ids, chosen, author.get())
        return await self._turn(lambda index: index.delete(ids, where=chosen), client, change)

    async def _turn(self, work: Callable[[Index], T], client: str, change: Change | None = None) -> T:
        """Do some work in the one thread that writes; what changes the index is recorded.

        Raises:
            RequestError: 503, too many are waiting, or the index cannot be written to, or the change not be recorded.
        """

        def do(job: Job[T]) -> T:
            with self._searcher.current.use() as index:
                if change is None:
                    return work(index)
                with recorded(self._audit, change) as outcome:
                    made = work(index)
                    outcome.count = made if isinstance(made, int) else len(change.ids)
                return made

        before = self._searcher.index
        try:
            try:
                return await self._turns.run(do, client)
            except StoreError as fault:
                passing = isinstance(fault, Superseded | StoreUnavailable)
                if passing or not await self._searcher.elsewhere(before):
                    raise
                return await self._turns.run(do, client)
        except Superseded:
            raise
        except StoreError as fault:
            raise store_failed(fault, _REFUSED, "", self._settings.debug) from None

    async def _small(self, items: Sequence[New], client: str) -> list[bytes]:
        """Return small pictures of the images of which no more is kept."""
        start = self._machinery.decoders.thumbnail
        return [
            await self._machinery.decoded(start, one.image, client, lambda made, job: made)
            for one in items
            if one.image is not None and one.keep == "thumbnail"
        ]

    def _embedded(
        self, bundle: Bundle, items: Sequence[New], decoded: Sequence[Decoded], small: Sequence[bytes]
    ) -> dict[str, Item]:
        """Return the items that an image or a vector was given of; for a thread.

        Raises:
            DataError: vectors that the index does not take.
        """
        made: dict[str, Item] = {}
        pictured = [one for one in items if one.image is not None]
        if pictured:
            arrays, thumbnails = self._arrays(bundle, np.stack([one.pixels for one in decoded])), iter(small)
            for one, picture, row in zip(pictured, decoded, arrays, strict=True):
                keep = one.keep or "copy"
                original = {"copy": one.image, "nothing": None}.get(keep) or (
                    next(thumbnails) if keep == "thumbnail" else None
                )
                size = len(one.image or b"")
                made[one.id] = Item(one.id, one.label, one.metadata, None, None, keep, original, size, picture.width, picture.height, row)  # fmt: skip
        if numbered := [one for one in items if one.vector is not None]:
            for one, row in zip(numbered, self._of_vectors(bundle, numbered), strict=True):
                made[one.id] = Item(one.id, one.label, one.metadata, keep="nothing", arrays=row)
        return made

    def _arrays(self, bundle: Bundle, inputs: NDArray[Any]) -> list[dict[str, Floats]]:
        """Return the arrays that the index keeps of images or features."""
        index = self._searcher.index
        keeps = FEATURES in index.generation.widths
        with stage("encode", len(inputs)):
            features = bundle.features(inputs) if keeps else None
            encoded = bundle.encode(inputs) if features is None else bundle.encode_features(features)
        return _rows(encoded, features)

    def _of_vectors(self, bundle: Bundle, items: Sequence[New]) -> list[dict[str, Floats]]:
        given, index = bundle.manifest.input, self._searcher.index
        width = given.shape[0] if given.kind == "features" else bundle.manifest.vector
        what = "features" if given.kind == "features" else "numbers"
        if wrong := [one for one in items if len(one.vector or ()) != width]:
            raise DataError(
                f"A vector of this index has {width} {what}, not {len(wrong[0].vector or ())} (item {wrong[0].id[:80]!a})."
            )
        vectors = np.array([one.vector for one in items], np.float64)
        if given.kind == "features":
            return self._arrays(bundle, vectors)
        if set(index.generation.widths) != {VECTOR}:
            raise DataError(
                "This index keeps more of an item than its vector: give the image, or features where it takes them."
            )
        encoded = encode_vectors(bundle, vectors)
        with np.errstate(over="ignore"):
            plain = np.asarray(encoded, np.float32)
        return [{VECTOR: row} for row in plain]

    def close(self, seconds: float) -> bool:
        """Let what is being written end; return whether it has, within the time."""
        return self._turns.close(seconds)


def _rows(encoded: Encoded, features: Floats | None) -> list[dict[str, Floats]]:
    arrays = {VECTOR: encoded.vector}
    if encoded.code is not None:
        arrays[CODE] = encoded.code
    if features is not None:
        arrays[FEATURES] = np.asarray(features, np.float32)
    return [{name: array[at] for name, array in arrays.items()} for at in range(len(encoded.vector))]


def _known(index: Index, once: Once) -> bytes | None:
    """Return the answer that a request under a key was given before.

    Raises:
        RequestError: 422, the key is another request's.
    """
    return None  # stores keep no answers any more: a repeated request is done again


def _written(
    index: Index,
    items: Sequence[New],
    made: dict[str, Item],
    bundle: Bundle,
    finish: Callable[[int, int], bytes],
    once: Once | None,
) -> bytes:
    """Write items in one transaction, with the answer under its key; in the thread that writes."""

    def write() -> bytes:
        whole = [made.get(one.id) or known[one.id] for one in items]
        replaced = index.store.upsert(whole, bundle.sha256)
        return finish(len(whole) - replaced, replaced)

    kept = [one for one in items if one.id not in made]
    there = index.get([one.id for one in kept], arrays=True)
    if missing := [one.id for one in kept if one.id not in there]:
        raise DataError(
            f"There is no item {missing[0][:80]!a}, so that it needs an image or a vector"
            + (f" ({len(missing):,} such items)." if len(missing) > 1 else ".")
        )
    size = sum(there[one.id].bytes or 0 for one in kept if there[one.id].keep == "copy")
    if len(kept) > 1 and size > _BYTES:
        raise DataError(
            f"The originals of these items have more than {_BYTES:,} bytes. Change fewer at a time."
        )
    known = {
        one.id: replace(
            there[one.id],
            label=one.label,
            metadata=one.metadata,
            original=index.store.original(one.id) if there[one.id].keep in ("copy", "thumbnail") else None,
        )
        for one in kept
    }
    if once is not None and (answered := _known(index, once)) is not None:
        return answered
    with stage("write", len(items)):
        return write()
