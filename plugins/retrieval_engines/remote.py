"""Base class of stores in a database engine such as Milvus.

The index `photos` is a set of collections (tables). Each generation, the arrays of all items under
one bundle, has a collection with one row per item. One more collection, the register, holds notes
(on the index and its generations) and pieces (of bundles and originals). The alias `photos` names
the collection of the served generation; `migrate` and `rollback` end by moving it.

Each write gives an item a new version. A generation that is being built still needs every item
whose version it does not have, so processes may keep writing to the served generation only.
"""

from __future__ import annotations

import base64
import hashlib
import threading
import time
import uuid
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from retrieval.bundle.bundle import Bundle
from retrieval.errors import DataError, StoreError
from retrieval.store.bundles import bundle_pieces, kept_bundle
from retrieval.store.contract import (
    Stats,
    Store,
    StorePlace,
    StoreUnavailable,
    Superseded,
    TooSlow,
    stop_at,
)
from retrieval.store.copies import PAGE, write_copy
from retrieval.store.filters import And, Exists, Filter
from retrieval.store.filters.tree import Condition, Field, Joint, fold
from retrieval.store.items import (
    FEATURES,
    VECTOR,
    Floats,
    Generation,
    Item,
    check_embedded,
    check_queries,
    checked,
    refuse_fields,
    served_of,
    spans_of,
    usable,
)

from retrieval_engines.rows import PIECE_BYTES, Row

FORMAT = 1
REGISTER = Generation(0, "", None, {VECTOR: 2}, ((0, 2),), "kept")
"""Stands for the register in calls that take a generation; its rows have no arrays."""

Conditions = Sequence[Any]


class RemoteStore(Store):
    """A store in a database engine.

    A subclass sets `_client`, the engine's client, and implements the abstract methods, whose names
    begin with `_`. These methods take `conditions` as a list in the engine's form; all of them must
    hold.

    Args:
        address: address of the index, for messages.
        name: name of the index in the engine, which is the name of its alias.

    Attributes:
        engine: name of the engine, for messages.
        errors: exceptions that the engine's client raises.
        timeout: time limit of one request in seconds, including retries.
        separator: text between the parts of a collection's name; no index name contains it.
        most_found: maximum number of items that the engine returns for one search.
        lists: metadata fields that have ever held a list, directly or nested.
    """

    engine: ClassVar[str]
    errors: ClassVar[tuple[type[Exception], ...]]
    timeout: float
    _client: Any
    separator = "__"
    most_found = 1 << 31

    def __init__(self, address: str, name: str) -> None:
        self.address, self.name = address, name
        self.lists: set[str] = set()
        self._prefix = ""
        self._fields: set[str] = set()
        self._queues: dict[int, list[str]] = {}
        self._pending: dict[int, dict[str, Row]] = {}
        self._turn, self._closed = threading.RLock(), False

    # What a subclass implements

    @abstractmethod
    def _fault(self, error: Exception) -> tuple[bool, str]:
        """Return whether an error means that the engine is unreachable, and its message."""

    @abstractmethod
    def _alias(self) -> str | None:
        """Return the name of the collection that the alias names, or None without an alias."""

    @abstractmethod
    def _point(self, number: int | None) -> None:
        """Move the alias atomically to a generation's collection; None removes the alias."""

    @abstractmethod
    def _make(self, generation: Generation) -> None:
        """Create the collection of a generation or of the register."""

    @abstractmethod
    def _remove(self, prefix: str) -> None:
        """Delete all collections whose names begin with `prefix`."""

    @abstractmethod
    def _note(self, notes: Mapping[str, Any]) -> None:
        """Write notes to the register; a note replaces an earlier note of the same name."""

    @abstractmethod
    def _notes(self) -> dict[str, Any]:
        """Return all notes by name; values may be None."""

    @abstractmethod
    def _put(self, generation: Generation, rows: Sequence[Row]) -> None:
        """Write rows; a row replaces an earlier row of the same id."""

    @abstractmethod
    def _erase(self, generation: Generation, ids: Sequence[str]) -> None:
        """Delete rows by id."""

    @abstractmethod
    def _rows(self, generation: Generation, ids: Sequence[str], arrays: bool) -> list[Row]:
        """Return rows by id, in any order."""

    @abstractmethod
    def _page(
        self, generation: Generation, conditions: Conditions, after: str | None, limit: int
    ) -> list[Row]:
        """Return up to `limit` rows after an id, without arrays, in a stable order."""

    @abstractmethod
    def _count(self, generation: Generation, conditions: Conditions) -> int:
        """Return the number of rows that match."""

    @abstractmethod
    def _nearest(
        self,
        generation: Generation,
        space: int,
        queries: Floats,
        count: int,
        conditions: Conditions,
    ) -> list[list[str]]:
        """Return, for each query (Q, width), the ids of the `count` nearest rows in a sub-space."""

    @abstractmethod
    def _combined(self, joint: Joint, parts: Sequence[Any]) -> Any:
        """Combine conditions with and, or or not; "not" has one part."""

    @abstractmethod
    def _condition(self, field: Field, op: str, values: Sequence[Any]) -> Any | None:
        """Return the engine's condition that `field op value` holds for any of the values.

        Args:
            field: "id", "label" or a path of names in the metadata.
            op: "=", "<", "<=", ">" or ">="; all but "=" have one value.
            values: strings, numbers, True, False or None.

        Returns:
            The condition, or None if the engine would decide differently from `matches`.
        """

    def _fit(self, rows: Sequence[Row]) -> None:
        """Raise a `DataError` if a row is too long for the engine."""

    def _limit(self, seconds: float) -> dict[str, Any]:
        """Return the client's keyword arguments that limit one request to `seconds`."""
        return {}

    # Requests

    def collection(self, number: int) -> str:
        """Return the name of the collection of generation `number`; 0 is the register."""
        return f"{self._prefix}{number:06}"  # fixed width, so that no name is a prefix of another

    def _ask(self, question: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        """Send a request; retry it for up to `timeout` seconds, which is safe for all requests."""
        began, pause = time.monotonic(), 0.05
        while True:
            now = time.monotonic()
            if self._closed:
                raise self._closed_error()
            if now > stop_at():
                raise TooSlow(f"A call to {self.address} takes too long. Request less.")
            try:
                left = min(self.timeout - (now - began), stop_at() - now)
                return question(*arguments, **named, **self._limit(max(0.5, left)))
            except Exception as error:
                if self._closed:  # a client that is closed meanwhile raises whatever it may
                    raise self._closed_error() from None
                if not isinstance(error, self.errors):
                    raise
                away, text = self._fault(error)
                if not away:
                    raise StoreError(f"{self.address}: {self.engine} refuses: {text}") from None
                if time.monotonic() - began + pause > self.timeout:
                    raise StoreUnavailable(
                        f"{self.engine} does not answer for {self.address}: {text}"
                    ) from None
            time.sleep(pause)
            pause = min(2 * pause, 2.0)

    def _closed_error(self) -> StoreError:
        return StoreError(
            f"The index {self.address} was closed. Open it again with retrieval.Index.open."
        )

    def _conditions(self, filter: Filter | None) -> list[Any]:
        """Return a filter in the engine's form; raise a `DataError` if the engine has none."""
        if filter is None:
            return []
        refuse_fields(filter, self._fields)
        parts = filter.parts if isinstance(filter, And) else (filter,)
        return [fold(part, self._express, self._combined) for part in parts]

    def _express(self, condition: Condition) -> Any:
        expression = None
        if isinstance(condition, Exists):
            if condition.field == "id":  # matches every item
                return self._combined("not", [self._condition("id", "=", ())])
        elif condition.op != "!=":
            expression = self._condition(condition.field, condition.op, condition.values)
        if expression is None:
            name = (
                condition.field if isinstance(condition.field, str) else ".".join(condition.field)
            )
            raise DataError(
                f"{self.engine} cannot decide on '{name}'. This store supports only =, in, and, or,"
                " not, and <, <=, >, >= on numbers; an index in a folder supports every filter."
            )
        return expression

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
                f"{self.address} has format {format_} of a newer version. Upgrade retrieval."
            )

    def destroy(self) -> None:
        """Delete the index of this name, its alias first."""
        self._point(None)
        self._remove(f"{self.name}{self.separator}")

    def identity(self) -> str:
        """Return the index's id; see `Store`."""
        return str(self._notes()["index"]["identity"])

    def changed(self) -> str | None:
        """Return a sentence if the index was deleted or replaced; see `Store`."""
        named = self._alias()
        return None if named and named.startswith(self._prefix) else str(self._lost())

    def _lost(self) -> StoreError:
        return StoreError(f"{self.address} was deleted, or replaced with another index.")

    def snapshot(self, target: Path) -> None:
        """Write a copy; see `Store`. The copy may include a part of concurrent writes."""
        write_copy(self, target)

    def stats(self) -> Stats:
        """Return the size and state of the store; see `Store`."""
        generations = self.generations()
        return Stats(self._count(served_of(generations), ()), generations, None, {})

    def settings(self) -> Mapping[str, Any]:
        """Return the configuration of the index; see `Store`."""
        self._current()
        return {"fields": sorted(self._fields)}

    def close(self) -> None:
        """Close the connection; see `Store`."""
        if not self._closed:
            self._closed = True
            self._client.close()

    # Writing

    def _current(self, notes: Mapping[str, Any] | None = None) -> Generation:
        """Return the served generation, and update the known metadata fields from the notes."""
        notes = self._notes() if notes is None else notes
        self._fields = set(_without_prefix("field ", notes))
        self.lists = set(_without_prefix("list ", notes))
        return served_of(self._listed(notes))

    def _writable(self) -> Generation:
        """Return the served generation, after completing a switch that another process began."""
        notes = self._notes()
        served = self._current(notes)
        if (settling := notes.get("settling")) and settling[1] == served.number:
            self._settle(*settling)
            served = self._current()
        return served

    def upsert(self, items: Sequence[Item], bundle: str) -> int:
        """Add items; see `Store`."""
        with self._turn:
            served = self._writable()
            if served.bundle != bundle:
                raise self._superseded()
            checked(items, served.widths)
            if not items:
                return 0
            rows = [Row.of(item) for item in items]
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
            for row in replaced:
                self._drop_pieces(row.record["version"], row.record["pieces"])
            if self._current().number != served.number:
                raise self._superseded()  # the new generation may lack the rows
            return len(replaced)

    def _cut(self, owner: str, content: Iterable[bytes]) -> int:
        """Store bytes as rows `owner`.0 and so on of the register; return the number of rows."""
        count = 0
        for part in content:
            for start in range(0, len(part), PIECE_BYTES):
                text = base64.b64encode(part[start : start + PIECE_BYTES]).decode()
                self._put(REGISTER, [Row({"id": f"{owner}.{count}", "text": text}, {})])
                count += 1
        return count

    def _joined(self, owner: str, count: int) -> Iterator[bytes]:
        """Yield the `count` pieces that `_cut` stored."""
        for number in range(count):
            for row in self._rows(REGISTER, [f"{owner}.{number}"], False):
                yield base64.b64decode(row.record["text"])

    def _drop_pieces(self, owner: str, count: int | None) -> None:
        if count:
            self._erase(REGISTER, [f"{owner}.{number}" for number in range(count)])

    def delete(self, ids: Iterable[str] = (), *, filter: Filter | None = None) -> int:
        """Delete items; see `Store`."""
        named, deleted = usable(dict.fromkeys(ids)), set[str]()
        with self._turn:
            while True:
                served = self._writable()
                rows = self._rows(served, named, False)
                if filter is not None:
                    rows += self._all_rows(served, self._conditions(filter))
                gone = {row.record["id"]: row for row in rows}
                if gone:
                    self._erase(served, list(gone))
                    deleted |= gone.keys()
                for row in gone.values():
                    self._drop_pieces(row.record["version"], row.record["pieces"])
                if self._current().number == served.number:  # else delete from the new one too
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

    def _all_rows(self, generation: Generation, conditions: Conditions = ()) -> Iterator[Row]:
        """Yield all rows that match, without arrays."""
        after: str | None = None
        while rows := self._page(generation, conditions, after, PAGE):
            yield from rows
            if len(rows) < PAGE:
                return
            after = rows[-1].record["id"]

    def scan(
        self, filter: Filter | None = None, *, after: str | None = None, limit: int = 1000
    ) -> list[Item]:
        """Return a page of items; see `Store`."""
        if after is not None and not usable([after]):
            raise DataError(f"{after[:80]!r} is not an id that an item can have.")
        page: list[Item] = []
        served, conditions = self._current(), self._conditions(filter)
        while limit > len(page):
            most = min(PAGE, limit - len(page))
            rows = self._page(served, conditions, after, most)
            page += [row.item() for row in rows]
            if len(rows) < most:
                break
            after = page[-1].id
        return page

    def count(self, filter: Filter | None = None) -> int:
        """Return the number of items; see `Store`."""
        served = self._current()
        return self._count(served, self._conditions(filter))

    def search(
        self, queries: Floats, count: int, bundle: str, *, filter: Filter | None = None
    ) -> list[list[Item]]:
        """Propose the nearest items; see `Store`."""
        served = self._current()
        if served.bundle != bundle:
            raise self._superseded()
        queries = np.asarray(queries, np.float32)
        check_queries(queries, served)
        try:
            return self._search(served, queries, count, self._conditions(filter))
        except StoreError:
            if self._current().number != served.number:  # the old generation may be dropped
                raise self._superseded() from None
            raise

    def _search(
        self, served: Generation, queries: Floats, count: int, conditions: Conditions
    ) -> list[list[Item]]:
        most = min(count, self.most_found)
        if most < count and self._count(served, ()) > most:
            raise StoreError(f"{self.engine} returns at most {most:,} items. Request fewer.")
        if not len(queries) or not count:
            return [[] for _ in queries]
        names: list[dict[str, None]] = [{} for _ in queries]
        for space, (start, stop) in enumerate(served.spans):
            part = np.ascontiguousarray(queries[:, start:stop])
            answers = self._nearest(served, space, part, most, conditions)
            for known, near in zip(names, answers, strict=True):
                known.update(dict.fromkeys(near))
        rows = self._rows(served, list({id for known in names for id in known}), True)
        items = {row.record["id"]: row.item() for row in rows}
        return [[items[id] for id in known if id in items] for known in names]

    # Generations

    def generations(self) -> tuple[Generation, ...]:
        """Return all generations; see `Store`."""
        return self._listed(self._notes())

    def _listed(self, notes: Mapping[str, Any]) -> tuple[Generation, ...]:
        named = self._alias() or ""
        if not named.startswith(self._prefix):
            raise self._lost()
        served = int(named[len(self._prefix) :])
        generations = [
            _generation(int(number), notes[f"generation {number}"], served)
            for number in _without_prefix("generation ", notes)
            if notes[f"generation {number}"]
        ]
        return tuple(sorted(generations, key=lambda generation: generation.number))

    def _latest(self, generation: Generation, notes: Mapping[str, Any] | None = None) -> Generation:
        for latest in self._listed(self._notes() if notes is None else notes):
            if latest.number == generation.number:
                return latest
        raise StoreError("This generation was dropped.")

    def _add(
        self, number: int, bundle: Bundle, widths: Mapping[str, int], served: bool
    ) -> Generation:
        """Create a generation; it exists as soon as its note is written."""
        notes = [note for note in self._notes().values() if isinstance(note, dict)]
        kept = [note["pieces"] for note in notes if note.get("bundle") == bundle.sha256]
        pieces = kept[0] if kept else self._cut(bundle.sha256, bundle_pieces(bundle))
        note = {
            "bundle": bundle.sha256,
            "variant": bundle.variant,
            "widths": dict(widths),
            "spans": spans_of(bundle),
            "served": False,
            "pieces": pieces,
        }
        generation = _generation(number, note)
        self._make(generation)
        self._note({f"generation {number}": note | {"served": served}, "last": number})
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
        """Return ids that `generation` lacks (or has an old version of), and ids only it has."""

        def versions(source: Generation) -> dict[str, str]:
            return {row.record["id"]: row.record["version"] for row in self._all_rows(source)}

        present, current = versions(generation), versions(served)
        lacking = [id for id, version in current.items() if present.get(id) != version]
        return lacking, [id for id in present if id not in current]

    def pending(self, generation: Generation, limit: int) -> list[Item]:
        """Return items that a generation lacks; see `Store`. A queue keeps ids for later calls."""
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
            return [
                replace(row.item(), arrays={k: v for k, v in row.arrays.items() if k == FEATURES})
                for row in rows
            ]

    def embed(
        self, generation: Generation, items: Sequence[Item], left_out: Sequence[str] = ()
    ) -> None:
        """Add arrays to a generation; see `Store`."""
        with self._turn:
            target = self._latest(generation)
            pending = self._pending.get(target.number, {})
            check_embedded(items, left_out, pending, target.widths)
            arrays = {item.id: Row.of(item).arrays for item in items}
            if pending:
                self._put(
                    target, [Row(row.record, arrays.get(id, {})) for id, row in pending.items()]
                )
            queue = self._queues.get(target.number, [])
            self._queues[target.number] = [id for id in queue if id not in pending]
            self._pending.pop(target.number, None)

    def switch(self, generation: Generation) -> bool:
        """Serve another generation; see `Store`."""
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
        """Complete a switch between two generations; return whether it succeeded.

        Others may write to the old one until the alias has moved. So erase items that were deleted
        meanwhile; if items are missing, move the alias back.
        """
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


def _generation(number: int, note: Mapping[str, Any], served: int | None = None) -> Generation:
    spans = tuple((start, stop) for start, stop in note["spans"])
    plain = note["bundle"], note["variant"], note["widths"]
    if number == served:
        return Generation(number, *plain, spans, "served")
    return Generation(number, *plain, spans, "kept" if note["served"] else "building")


def _without_prefix(prefix: str, names: Iterable[str]) -> list[str]:
    """Return the names that begin with a prefix, without the prefix."""
    return [name.removeprefix(prefix) for name in names if name.startswith(prefix)]


def _has_list(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(map(_has_list, value.values()))
    return isinstance(value, list | tuple)


class RemotePlace(StorePlace):
    """The place of an index in a database engine; a subclass implements `store`."""

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
