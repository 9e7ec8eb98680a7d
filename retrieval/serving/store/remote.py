"""Base class of stores over an engine such as Milvus: one collection per generation and an alias.

An index `photos` consists of one collection per generation, with a row per item, and a register,
which holds notes (descriptions of the index and its generations) and pieces (of bundles and
originals). The alias `photos` names the collection of the served generation; `migrate` and
`rollback` end by moving it.

Each write gives an item a new version. A generation that is being built lacks every item whose
served version it does not have, so any process may keep writing without writing twice.
"""

from __future__ import annotations

import base64
import hashlib
import heapq
import threading
import uuid
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from retrieval.errors import DataError, StoreError
from retrieval.host.files import rename_whole, scratch_folder, sync_below
from retrieval.serving.bundle import Bundle
from retrieval.serving.filters import And, Filter, matches
from retrieval.serving.store.bundles import bundle_pieces, kept_bundle
from retrieval.serving.store.contract import Stats, Store, StorePlace, Superseded
from retrieval.serving.store.engine import PIECE_BYTES, REGISTER, Engine, Row, finished, row_of
from retrieval.serving.store.folder import create_local
from retrieval.serving.store.items import (
    FEATURES,
    VECTOR,
    Floats,
    Generation,
    Item,
    check_queries,
    checked,
    refuse_fields,
    spans_of,
    usable,
)
from retrieval.serving.store.local import LocalStore
from retrieval.serving.store.record import insert
from retrieval.serving.store.record import served as served_by

FORMAT = 1
PAGE = 1000
MARGIN = 8  # extra candidates: engines measure in float32, so candidates are measured again


class RemoteStore(Engine, Store):
    """A store over an engine; see `Engine` for its arguments and the methods to implement."""

    capabilities = frozenset({"originals", "left_out", "snapshot"})

    def __init__(self, address: str, name: str) -> None:
        super().__init__(address, name)
        self._fields: set[str] = set()
        self._queues: dict[int, list[str]] = {}
        self._pending: dict[int, dict[str, Row]] = {}
        self._turn = threading.RLock()

    # The whole

    def make(self, bundle: Bundle, widths: Mapping[str, int], identity: str) -> None:
        """Create the index, which exists once its alias does; see `StorePlace.create`."""
        if self._alias() is not None:
            raise StoreError(f"{self.address} exists already.")
        digest = hashlib.sha256(identity.encode()).hexdigest()[:8]
        self._prefix = f"{self.name}{self.separator}{digest}{self.separator}"
        self._remove(self._prefix)
        try:
            self._make(REGISTER)
            self._note({"index": {"format": FORMAT, "identity": identity}})
            self._add(1, bundle, widths, served=True)
            self._point(1)
        except BaseException:
            self._remove(self._prefix)
            raise

    def find(self) -> None:
        """Find the index; see `StorePlace.open`."""
        named = self._alias()
        if named is None:
            raise StoreError(f"There is no index at {self.address}.")
        self._prefix = named[: named.rindex(self.separator) + len(self.separator)]
        format_ = self._notes()["index"]["format"]
        if format_ != FORMAT:
            raise StoreError(
                f"{self.address} has format {format_}: a newer version wrote it. Update this one."
            )

    def exists(self) -> bool:
        """Return whether an index of this name exists."""
        return self._alias() is not None

    def destroy(self) -> None:
        """Delete the index of this name, its alias first."""
        self._point(None)
        self._remove(f"{self.name}{self.separator}")

    def identity(self) -> str:
        """Return the index's id; see `Store`."""
        return str(self._notes()["index"]["identity"])

    def changed(self) -> str | None:
        """Return a sentence if the index was deleted or replaced; see `Store`."""
        if (self._alias() or "").startswith(self._prefix):
            return None
        return f"{self.address} was deleted, or another index stands in its place."

    def snapshot(self, target: Path) -> None:
        """Write a copy; see `Store`. It may or may not include concurrent writes."""
        write_copy(self, target)

    def stats(self) -> Stats:
        """Return the size and state of the store; see `Store`."""
        generations = self.generations()
        return Stats(self._count(_served(generations), ()), generations, None, self._details())

    def _details(self) -> dict[str, Any]:
        return {"backend": "flat"}

    def settings(self) -> Mapping[str, Any]:
        """Return the configuration of the index; see `Store`."""
        self._current()
        return {"fields": sorted(self._fields), "backend": self._details()["backend"]}

    def close(self) -> None:
        """Close the connection after running calls have ended; see `Store`."""
        with self._state:
            if self._closed:
                return
            self._closed = True
            self._state.wait_for(lambda: not self._inside)
        self._hang_up()

    # Writing

    def _current(self, notes: Mapping[str, Any] | None = None) -> Generation:
        """Return the served generation, and update the known fields."""
        notes = self._notes() if notes is None else notes
        self._fields = {name[6:] for name in notes if name.startswith("field ")}
        self.lists = {name[5:] for name in notes if name.startswith("list ")}
        return _served(self._listed(notes))

    def _writable(self) -> Generation:
        """Return the served generation, after completing a switch that another process left."""
        notes = self._notes()
        served = self._current(notes)
        if (settling := notes.get("settling")) and settling[1] == served.number:
            self._settle(*settling)
            served = self._current()
        return served

    @finished
    def upsert(self, items: Sequence[Item], bundle: str) -> int:
        """Add items; see `Store`."""
        with self._turn:
            served = self._writable()
            if served.bundle != bundle:
                raise self._superseded()
            checked(items, served.widths)
            if not items:
                return 0
            rows = [row_of(item) for item in items]
            self._fit(rows)
            replaced = self._rows(served, [item.id for item in items], False)
            values = [pair for item in items for pair in item.metadata.items()]
            fields = {name for name, _ in values} - self._fields
            lists = {name for name, value in values if _has_list(value)} - self.lists
            if notes := [f"field {name}" for name in fields] + [f"list {name}" for name in lists]:
                self._note(dict.fromkeys(notes, True))
            for row, item in zip(rows, items, strict=True):
                if item.original is not None:
                    self._cut(row.record["version"], [item.original])
            self._put(served, rows)
            self._drop_originals(replaced)
            if self._current().number != served.number:
                raise self._superseded()  # the rows may have come too late for the new generation
            return len(replaced)

    def _cut(self, owner: str, content: Iterable[bytes]) -> int:
        """Store bytes in pieces, as rows of the register; return the number of pieces."""
        count = 0
        for part in content:
            for start in range(0, len(part), PIECE_BYTES):
                text = base64.b64encode(part[start : start + PIECE_BYTES]).decode()
                self._put(REGISTER, [Row({"id": f"{owner}.{count}", "text": text}, {})])
                count += 1
        return count

    def _joined(self, owner: str, count: int) -> Iterator[bytes]:
        """Yield the pieces of bytes that `_cut` stored."""
        for number in range(count):
            for row in self._rows(REGISTER, [f"{owner}.{number}"], False):
                yield base64.b64decode(row.record["text"])

    def _drop_originals(self, rows: Iterable[Row]) -> None:
        for row in rows:
            self._drop_pieces(row.record["version"], row.record["pieces"])

    def _drop_pieces(self, owner: str, count: int | None) -> None:
        if count:
            self._erase(REGISTER, [f"{owner}.{number}" for number in range(count)])

    @finished
    def delete(self, ids: Iterable[str] = (), *, where: Filter | None = None) -> int:
        """Delete items; see `Store`."""
        named, deleted = usable(dict.fromkeys(ids)), set[str]()
        with self._turn:
            while True:
                served = self._writable()
                refuse_fields(where, self._fields)
                gone = {row.record["id"]: row for row in self._rows(served, named, False)}
                if where is not None:
                    for rows in self._matching(served, where, False):
                        gone |= {row.record["id"]: row for row in rows}
                if gone:
                    self._erase(served, list(gone))
                    deleted |= gone.keys()
                    self._drop_originals(gone.values())
                if self._current().number == served.number:  # else repeat it for the new one
                    return len(deleted)

    def _superseded(self) -> Superseded:
        return Superseded(f"The index {self.address} is served with another bundle by now.")

    # Reading

    def get(self, ids: Iterable[str], *, arrays: bool = False) -> dict[str, Item]:
        """Return items by id; see `Store`."""
        rows = self._rows(self._current(), usable(dict.fromkeys(ids)), arrays)
        return {row.record["id"]: row.item() for row in rows}

    def original(self, id: str) -> bytes | None:
        """Return the bytes of an original; see `Store`."""
        for row in self._rows(self._current(), usable([id]), False):
            if row.record["pieces"] is not None:
                return b"".join(self._joined(row.record["version"], row.record["pieces"]))
        return None

    def _parts(self, where: Filter | None) -> tuple[list[Any], list[Filter]]:
        """Split a filter into conditions of the engine and parts to check item by item."""
        parts = () if where is None else where.parts if isinstance(where, And) else (where,)
        pairs = [(part, self._express(part)) for part in parts]
        rest = [part for part, own in pairs if own is None]
        return [own for _, own in pairs if own is not None], rest

    def _matching(
        self,
        generation: Generation,
        where: Filter | None = None,
        arrays: bool = False,
        after: str | None = None,
    ) -> Iterator[list[Row]]:
        """Yield all rows that match, in pages."""
        own, rest = self._parts(where)
        while True:
            rows = self._page(generation, own, after, PAGE, arrays)
            yield [row for row in rows if all(_matches(part, row.record) for part in rest)]
            if len(rows) < PAGE:
                return
            after = rows[-1].record["id"]

    @finished
    def scan(
        self, where: Filter | None = None, *, after: str | None = None, limit: int = 1000
    ) -> list[Item]:
        """Return a page of items; see `Store`."""
        if after is not None and not usable([after]):
            raise DataError(
                "A scan continues after an id, but `after` cannot be the id of an item."
            )
        served, page = self._current(), list[Row]()
        refuse_fields(where, self._fields)
        for rows in self._matching(served, where, False, after):
            page += rows
            if len(page) >= limit:
                break
        return [row.item() for row in page[:limit]]

    def count(self, where: Filter | None = None) -> int:
        """Return the number of items; see `Store`."""
        served = self._current()
        refuse_fields(where, self._fields)
        own, rest = self._parts(where)
        if not rest:
            return self._count(served, own)
        return sum(map(len, self._matching(served, where, False)))

    @finished
    def search(
        self, queries: Floats, count: int, bundle: str, *, where: Filter | None = None
    ) -> list[list[Item]]:
        """Propose the nearest items; see `Store`."""
        served = self._current()
        try:
            return self._search(served, np.asarray(queries, np.float32), count, bundle, where)
        except StoreError:
            if self._current().number != served.number:  # the old generation may be dropped
                raise self._superseded() from None
            raise

    def _search(
        self, served: Generation, queries: Floats, count: int, bundle: str, where: Filter | None
    ) -> list[list[Item]]:
        if served.bundle != bundle:
            raise self._superseded()
        check_queries(queries, served)
        refuse_fields(where, self._fields)
        if count + MARGIN > self.most_found:
            count = min(count, self._count(served, ()))
            if count > self.most_found:
                raise StoreError(
                    f"{self.address} finds at most {self.most_found:,} items. Ask for fewer."
                )
        if not len(queries) or not count:
            return [[] for _ in queries]
        own, rest = self._parts(where)
        if rest:
            return _best(queries, self._matching(served, where, True), served.spans, count)
        ids: dict[str, None] = {}
        for space, (start, stop) in enumerate(served.spans):
            part = np.ascontiguousarray(queries[:, start:stop])
            most = min(count + MARGIN, self.most_found)
            for near in self._nearest(served, space, part, most, own):
                ids |= dict.fromkeys(near)
        return _best(queries, [self._rows(served, list(ids), True)], served.spans, count)

    # Generations

    def generations(self) -> tuple[Generation, ...]:
        """Return all generations; see `Store`."""
        return self._listed(self._notes())

    def _listed(self, notes: Mapping[str, Any]) -> tuple[Generation, ...]:
        named = self._alias() or ""
        if not named.startswith(self._prefix):
            raise StoreError(f"{self.address} was deleted, or another index stands in its place.")
        served, generations = int(named[len(self._prefix) :]), []
        for name, note in notes.items():
            if name.startswith("generation ") and note:
                number = int(name[11:])
                spans = tuple((start, stop) for start, stop in note["spans"])
                state = "served" if number == served else "kept" if note["served"] else "building"
                fields = (number, note["bundle"], note["variant"], note["widths"], spans, state)
                generations.append(Generation(*fields))  # type: ignore[arg-type]
        return tuple(sorted(generations, key=lambda generation: generation.number))

    def _latest(self, generation: Generation, notes: Mapping[str, Any] | None = None) -> Generation:
        for latest in self._listed(self._notes() if notes is None else notes):
            if latest.number == generation.number:
                return latest
        raise StoreError("This generation does not exist any more.")

    def _add(
        self, number: int, bundle: Bundle, widths: Mapping[str, int], served: bool
    ) -> Generation:
        """Create a generation, which exists once its note does."""
        notes = [note for note in self._notes().values() if isinstance(note, dict)]
        kept = [note["pieces"] for note in notes if note.get("bundle") == bundle.sha256]
        pieces = kept[0] if kept else self._cut(bundle.sha256, bundle_pieces(bundle))
        spans, variant = spans_of(bundle), bundle.variant
        generation = Generation(number, bundle.sha256, variant, dict(widths), spans, "building")
        self._make(generation)
        note = {
            "bundle": bundle.sha256,
            "variant": variant,
            "widths": dict(widths),
            "spans": spans,
            "served": served,
            "pieces": pieces,
        }
        self._note({f"generation {number}": note, "last": number})
        return generation

    def bundle(self, generation: Generation) -> Path:
        """Return the folder of a generation's bundle; see `Store`."""
        notes = self._notes()
        target = self._latest(generation, notes)
        pieces = notes[f"generation {target.number}"]["pieces"]
        return kept_bundle(target.bundle, lambda: self._joined(target.bundle, pieces))

    def begin(self, bundle: Bundle, widths: Mapping[str, int]) -> Generation:
        """Begin a generation; see `Store`."""
        with self._turn:
            notes = self._notes()
            for generation in self._listed(notes):
                properties = (generation.bundle, generation.variant, dict(generation.widths))
                if properties == (bundle.sha256, bundle.variant, dict(widths)):
                    return generation
            return self._add(notes["last"] + 1, bundle, widths, served=False)

    def _lacking(self, generation: Generation, served: Generation) -> tuple[list[str], list[str]]:
        """Return the ids that a generation lacks and the ids that only it still has."""
        present, current = (
            {
                row.record["id"]: row.record["version"]
                for rows in self._matching(source)
                for row in rows
            }
            for source in (generation, served)
        )
        lacking = [id for id, version in current.items() if present.get(id) != version]
        return lacking, [id for id in present if id not in current]

    def pending(self, generation: Generation, limit: int) -> list[Item]:
        """Return items that a generation lacks; see `Store`. A queue keeps the ids for later."""
        with self._turn:
            target, served = self._latest(generation), self._current()
            queue = self._queues.get(target.number, [])
            if len(queue) < limit:
                queue = [] if target.state == "served" else self._lacking(target, served)[0]
            rows: list[Row] = []
            while queue and not rows:
                rows = self._rows(served, queue[:limit], FEATURES in served.widths)
                queue = queue if rows else queue[limit:]
            self._queues[target.number] = queue
            self._pending[target.number] = {row.record["id"]: row for row in rows}
            features = [{k: v for k, v in row.arrays.items() if k == FEATURES} for row in rows]
            return [
                replace(row.item(), arrays=kept) for row, kept in zip(rows, features, strict=True)
            ]

    @finished
    def embed(
        self, generation: Generation, items: Sequence[Item], left_out: Sequence[str] = ()
    ) -> None:
        """Add arrays to a generation; see `Store`."""
        with self._turn:
            target = self._latest(generation)
            pending = self._pending.get(target.number, {})
            checked(items, target.widths)
            arrays: dict[str, Mapping[str, Floats]] = {id: {} for id in left_out if id in pending}
            faults = [f"{item.id} was not pending." for item in items if item.id not in pending]
            for item in items:
                arrays[item.id] = {
                    name: np.asarray(a, np.float32) for name, a in item.arrays.items()
                }
            faults += [
                f"{id} is neither embedded nor left out." for id in pending if id not in arrays
            ]
            if faults:
                raise DataError("\n".join(faults))
            if pending:
                self._put(target, [Row(pending[id].record, arrays[id]) for id in pending])
            queue = self._queues.get(target.number, [])
            self._queues[target.number] = [id for id in queue if id not in pending]
            self._pending.pop(target.number, None)

    @finished
    def switch(self, generation: Generation) -> bool:
        """Serve another generation; see `Store`.

        Others may write until the alias has moved, so the generations are compared again after it.
        """
        with self._turn:
            notes = self._notes()
            target, served = self._latest(generation, notes), self._current(notes)
            if target.state == "served":
                return True
            if self._lacking(target, served)[0]:
                return False
            note = {**notes[f"generation {target.number}"], "served": True}
            self._note(
                {f"generation {target.number}": note, "settling": [served.number, target.number]}
            )
            self._point(target.number)
            return self._settle(served.number, target.number)

    def _settle(self, before: int, number: int) -> bool:
        """Complete a switch: erase deleted items; if new ones are missing, move the alias back."""
        generations = {generation.number: generation for generation in self.generations()}
        lacking, gone = self._lacking(generations[number], generations[before])
        if gone:
            self._erase(generations[number], gone)
        if lacking:
            self._point(before)
        self._note({"settling": None})
        self._queues.clear()
        return not lacking

    def drop(self, generation: Generation) -> None:
        """Delete a generation; see `Store`."""
        with self._turn:
            notes = self._notes()
            target = self._latest(generation, notes)
            if target.state == "served":
                raise StoreError("The generation that is served cannot be dropped.")
            note = notes[f"generation {target.number}"]
            self._note({f"generation {target.number}": None})
            self._remove(self.collection(target.number))
            if target.bundle not in {generation.bundle for generation in self.generations()}:
                self._drop_pieces(target.bundle, note["pieces"])


def _has_list(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(map(_has_list, value.values()))
    return isinstance(value, list | tuple)


def _best(
    queries: Floats,
    pages: Iterable[Sequence[Row]],
    spans: Sequence[tuple[int, int]],
    count: int,
) -> list[list[Item]]:
    """Return, per query, the items among its `count` nearest in a sub-space, in float64."""
    best = [[list[tuple[float, str]]() for _ in spans] for _ in queries]
    items: dict[str, Item] = {}
    for page in pages:
        if not (rows := [row for row in page if row.arrays]):
            continue
        ids = [row.record["id"] for row in rows]
        vectors = np.stack([row.arrays[VECTOR] for row in rows]).astype(np.float64)
        for query, near in zip(queries, best, strict=True):
            squares = np.square(vectors - query)
            for space, (start, stop) in enumerate(spans):
                distances = zip(squares[:, start:stop].sum(1).tolist(), ids, strict=True)
                near[space] = heapq.nsmallest(count, [*near[space], *distances])
        items |= {row.record["id"]: row.item() for row in rows}
        items = {id: items[id] for near in best for pairs in near for _, id in pairs}
    return [[items[id] for id in {id: 0 for pairs in near for _, id in pairs}] for near in best]


def _served(generations: Iterable[Generation]) -> Generation:
    return next(generation for generation in generations if generation.state == "served")


def _matches(where: Filter, record: Mapping[str, Any]) -> bool:
    return matches(where, record["id"], record["label"], record["metadata"])


class RemotePlace(StorePlace):
    """The place of an index in an engine; a subclass implements `store`."""

    @abstractmethod
    def store(self) -> RemoteStore:
        """Return a connected store that has neither created nor opened an index yet.

        Raises:
            StoreUnavailable: the engine cannot be reached.
        """

    def exists(self) -> bool:
        """Return whether the index exists; see `StorePlace`."""
        with self.store() as store:
            return store.exists()

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


def write_copy(store: Store, target: Path) -> None:
    """Copy the served generation of a store to a new local index, atomically.

    A remote store implements `Store.snapshot` with it. The copy is consistent only if nobody
    writes meanwhile.

    Args:
        store: the store to copy.
        target: the new folder, whose parent must exist.

    Raises:
        StoreError: `target` exists already, or the disk refuses.
    """
    occupied = StoreError(f"{target} exists already. Choose another name for the snapshot.")
    generation = next(known for known in store.generations() if known.state == "served")
    bundle = Bundle.open(store.bundle(generation), variant=generation.variant, device="cpu")
    if target.exists() or target.is_symlink():
        raise occupied
    try:
        with scratch_folder(target.parent, f".{target.name}.", ".part") as beside:
            fresh = beside / target.name
            create_local(fresh, bundle, generation.widths, identity=store.identity())
            with LocalStore(fresh, upkeep=False) as copy:
                copy_items(store, copy, bundle.sha256, bare=lambda items: _add_bare(copy, items))
            sync_below(fresh)
            rename_whole(fresh, target, replace=False, exists_error=occupied)
    except OSError as fault:
        raise StoreError(f"{target} cannot be written: {fault.strerror or fault}.") from None


def copy_items(
    source: Store,
    target: Store,
    bundle: str,
    *,
    bare: Callable[[Sequence[Item]], object],
    report: Callable[[int], object] = lambda count: None,
) -> None:
    """Copy all items of one store to another, with their arrays and originals.

    Args:
        source: the store to read.
        target: the store to write.
        bundle: SHA-256 of the bundle that both stores serve.
        bare: called with items without arrays, which `upsert` refuses.
        report: called with the number of items in each page copied.
    """
    after: str | None = None
    while page := source.scan(after=after, limit=PAGE):
        after = page[-1].id
        items = [
            replace(item, original=source.original(item.id))
            for item in source.get([item.id for item in page], arrays=True).values()
        ]
        target.upsert([item for item in items if item.arrays], bundle)
        if without := [item for item in items if not item.arrays]:
            bare(without)
        report(len(page))


def _add_bare(copy: LocalStore, items: Sequence[Item]) -> None:
    """Write items that the served generation lacks."""
    texts = checked(items, {})
    with copy.record.writing() as (connection, _):
        number = served_by(connection).number
        rows = [(number, n) for n in insert(connection, items, texts)]
        connection.executemany("insert into left_out values (?, ?)", rows)
