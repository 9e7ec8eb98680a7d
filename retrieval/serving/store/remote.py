"""What stores over an engine have in common: a collection per generation and an alias.

An index `photos` is a few collections of the engine: one per generation with a row for each item,
and a register, which holds notes (what the index and its generations are) and pieces (bundles,
originals). The alias `photos` names the collection of the generation that is served; moving it
is all that `migrate` and `rollback` do at their end.

Each write gives an item a new version. A generation that is built lacks what is served with
another version, so nothing has to be written twice, and any process may write meanwhile.
"""

from __future__ import annotations

import base64
import hashlib
import heapq
import os
import threading
import time
import uuid
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import wraps
from pathlib import Path
from typing import Any, ClassVar, Concatenate, ParamSpec, TypeVar

import numpy as np

from retrieval.errors import DataError, StoreError
from retrieval.serving.bundle import Bundle
from retrieval.serving.filters import And, Filter, matches
from retrieval.serving.store.bundles import bundle_pieces, kept_bundle
from retrieval.serving.store.contract import (
    FEATURES,
    VECTOR,
    Floats,
    Generation,
    Item,
    Stats,
    Store,
    StoreUnavailable,
    Superseded,
    TooSlow,
    spans_of,
    stop_at,
)
from retrieval.serving.store.items import check_queries, checked, refuse_fields, usable
from retrieval.serving.store.local import write_copy
from retrieval.serving.store.place import StorePlace

FORMAT = 1
PAGE = 1000
PIECE_BYTES = 45_000  # 60,000 characters of base64
MARGIN = 8  # an engine measures in float32: it is asked for more, and they are measured again

REGISTER = Generation(0, "", None, {VECTOR: 2}, ((0, 2),), "kept")

P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S", bound="RemoteStore")
_PLAIN = ("id", "label", "stamp", "keep", "bytes", "width", "height", "source")


@dataclass(frozen=True, slots=True)
class Row:
    """One item in a generation's collection.

    Attributes:
        record: the item without its arrays, as JSON, with its "version" and the number of
            "pieces" of its original.
        arrays: float32 by name; none of an item that the generation does without.
    """

    record: Mapping[str, Any]
    arrays: Mapping[str, Floats]

    def split(self, generation: Generation) -> tuple[dict[str, Any], list[Floats]]:
        """Return the record, with arrays that no vector holds, and a vector per sub-space."""
        if not self.arrays:
            return dict(self.record), []
        vectors = [self.arrays[VECTOR][start:stop] for start, stop in generation.spans]
        texts = {
            name: base64.b64encode(self.arrays[name].astype("<f4").tobytes()).decode()
            for name in generation.widths
            if name != VECTOR or len(vectors) > 1
        }
        return {**self.record, "arrays": texts}, vectors

    @classmethod
    def joined(cls, record: Mapping[str, Any], vector: Sequence[float] | None) -> Row:
        """Return a row that was split.

        Args:
            record: as `split` gave it; without "arrays" where none are asked for.
            vector: of the first sub-space, where it is asked for and there is one.
        """
        plain = dict(record)
        arrays = {
            name: np.frombuffer(base64.b64decode(t), "<f4") for name, t in plain.pop("arrays", {}).items()
        }
        if vector is not None and VECTOR not in arrays:
            arrays[VECTOR] = np.asarray(vector, np.float32)
        return cls(plain, arrays)

    def item(self) -> Item:
        """Return the item."""
        path = None if self.record["path"] is None else Path(self.record["path"])
        plain = {name: self.record[name] for name in _PLAIN}
        return Item(**plain, metadata=self.record["metadata"], path=path, arrays=self.arrays)


def _used(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """Make a method refuse a closed store, and `close` wait for it."""

    @wraps(method)
    def call(self: S, /, *given: P.args, **named: P.kwargs) -> R:
        with self._state:
            if self._closed and threading.get_ident() not in self._inside:
                raise StoreError(f"{self.address} was closed.")
            self._inside.append(threading.get_ident())
        try:
            return method(self, *given, **named)
        finally:
            with self._state:
                self._inside.remove(threading.get_ident())
                self._state.notify_all()

    return call


class RemoteStore(Store):
    """A store over an engine; a subclass says how to talk to it, in the methods without a body.

    Collections are those of generations; the register looks like one, `REGISTER`, whose rows have
    no arrays. `where` is a list of the engine's own conditions, all of which must hold.

    Args:
        address: what sentences call the index.
        name: of the index in the engine: the alias.

    Attributes:
        engine: its name.
        errors: what its client raises.
        timeout: seconds that one question may take, with what is asked again meanwhile.
        separator: what stands between the parts of a collection's name; no index's name has it.
        most_found: how many items one search finds at most.
    """

    capabilities = frozenset({"originals", "left_out", "snapshot"})
    engine: ClassVar[str]
    errors: ClassVar[tuple[type[Exception], ...]]
    timeout: float
    separator = "__"
    most_found = 1 << 31

    def __init__(self, address: str, name: str) -> None:
        self.address, self.name = address, name
        self._prefix = ""
        self._fields: set[str] = set()
        self._lists: set[str] = set()
        self._queues: dict[int, list[str]] = {}
        self._asked: dict[int, dict[str, Row]] = {}
        self._turn = threading.RLock()
        self._state, self._inside, self._closed = threading.Condition(), list[int](), False

    # What an engine does

    def _ask(self, question: Callable[..., Any], *given: Any, **named: Any) -> Any:
        """Ask the engine, and again where nobody answers, within `timeout`.

        Everything that is asked can be asked twice.
        """
        began, pause = time.monotonic(), 0.05
        while True:
            now = time.monotonic()
            if now > stop_at():
                raise TooSlow(f"Reading {self.address} takes too long. Ask for less.")
            try:
                left = min(self.timeout - (now - began), stop_at() - now)
                return question(*given, **named, **self._limit(max(0.5, left)))
            except self.errors as error:
                away, text = self._fault(error)
                if not away:
                    raise StoreError(f"{self.address}: {self.engine} refuses: {text}") from None
                if time.monotonic() - began + pause > self.timeout:
                    raise StoreUnavailable(
                        f"{self.engine} does not answer for {self.address}: {text}"
                    ) from None
            time.sleep(pause)
            pause = min(2 * pause, 2.0)

    def _limit(self, seconds: float) -> dict[str, Any]:
        """Return what bounds the time of one question, where the client takes such."""
        return {}

    @abstractmethod
    def _fault(self, error: Exception) -> tuple[bool, str]:
        """Return whether an error means that nobody answers, and what it says, as a sentence."""

    @abstractmethod
    def _alias(self) -> str | None:
        """Return the collection that the alias names; None where there is no alias."""

    @abstractmethod
    def _point(self, number: int | None) -> None:
        """Let the alias name a collection, at once, or none; the first time, where it is free."""

    @abstractmethod
    def _make(self, generation: Generation) -> None:
        """Make the collection of a generation, or the register's."""

    @abstractmethod
    def _remove(self, prefix: str) -> None:
        """Delete all collections whose names begin so."""

    @abstractmethod
    def _note(self, notes: Mapping[str, Any]) -> None:
        """Write notes to the register, each in place of the one of its name."""

    @abstractmethod
    def _notes(self) -> dict[str, Any]:
        """Return all notes; some may be None."""

    def _fit(self, rows: Sequence[Row]) -> None:
        """Refuse rows that are too long for the engine, with a `DataError`."""

    @abstractmethod
    def _put(self, generation: Generation, rows: Sequence[Row]) -> None:
        """Write rows, each in place of the one of its id."""

    @abstractmethod
    def _erase(self, generation: Generation, ids: Sequence[str]) -> None:
        """Delete rows."""

    @abstractmethod
    def _rows(self, generation: Generation, ids: Sequence[str], arrays: bool) -> list[Row]:
        """Return rows by id, in any order."""

    @abstractmethod
    def _page(
        self,
        generation: Generation,
        where: Sequence[Any],
        after: str | None,
        limit: int,
        arrays: bool,
    ) -> list[Row]:
        """Return the first rows behind an id, in an order that stays; fewer at the end."""

    @abstractmethod
    def _count(self, generation: Generation, where: Sequence[Any]) -> int:
        """Return how many rows there are."""

    @abstractmethod
    def _nearest(
        self, generation: Generation, space: int, queries: Floats, count: int, where: Sequence[Any]
    ) -> list[list[str]]:
        """Return the ids of the nearest rows to each query (Q, width) within one sub-space."""

    @abstractmethod
    def _express(self, where: Filter) -> Any | None:
        """Return a filter as the engine's own condition; None if that would mean anything else."""

    @abstractmethod
    def _hang_up(self) -> None:
        """Close the connection."""

    # The whole

    def make(self, bundle: Bundle, widths: Mapping[str, int], identity: str) -> None:
        """Make the index, which is there once the alias is; see `StorePlace.create`."""
        if self._alias() is not None:
            raise StoreError(f"{self.address} exists already.")
        self._prefix = self._prefix_of(identity)
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
        """Return whether there is an index of this name."""
        return self._alias() is not None

    def destroy(self) -> None:
        """Delete the index of this name, the alias first."""
        self._point(None)
        self._remove(f"{self.name}{self.separator}")

    def _prefix_of(self, identity: str) -> str:
        digest = hashlib.sha256(identity.encode()).hexdigest()[:8]
        return f"{self.name}{self.separator}{digest}{self.separator}"

    def collection(self, number: int) -> str:
        """Return the name of a collection by its number."""
        return f"{self._prefix}{number:06}"  # none begins like another

    @_used
    def identity(self) -> str:
        """Return the index's id; see `Store`."""
        return str(self._notes()["index"]["identity"])

    @_used
    def changed(self) -> str | None:
        """Return a sentence when the index was deleted or replaced; see `Store`."""
        if (self._alias() or "").startswith(self._prefix):
            return None
        return f"{self.address} was deleted, or another index stands in its place."

    @_used
    def snapshot(self, target: Path) -> None:
        """Write a copy; see `Store`. What others write meanwhile may be in it or not."""
        write_copy(self, target)

    @_used
    def stats(self) -> Stats:
        """Return what the store holds; see `Store`."""
        generations = self.generations()
        return Stats(self._count(_served(generations), ()), generations, None, self._details())

    def _details(self) -> dict[str, Any]:
        return {"backend": "flat"}

    @_used
    def settings(self) -> Mapping[str, Any]:
        """Return how the index is set up; see `Store`."""
        self._current()
        return {"fields": sorted(self._fields), "backend": self._details()["backend"]}

    def close(self) -> None:
        """Hang up once those that read and write are done; see `Store`."""
        with self._state:
            if self._closed:
                return
            self._closed = True
            self._state.wait_for(lambda: not self._inside)
        self._hang_up()

    # Writing

    def _current(self, notes: Mapping[str, Any] | None = None) -> Generation:
        """Return the generation that is served, and learn of fields."""
        notes = self._notes() if notes is None else notes
        self._fields = {name[6:] for name in notes if name.startswith("field ")}
        self._lists = {name[5:] for name in notes if name.startswith("list ")}
        return _served(self._listed(notes))

    def has_lists(self, field: str) -> bool:
        """Return whether a field of the metadata has ever held a list, itself or within."""
        return field in self._lists

    def _writable(self) -> Generation:
        """Return the generation that is served, after ending a switch that its process did not."""
        notes = self._notes()
        served = self._current(notes)
        if (settling := notes.get("settling")) and settling[1] == served.number:
            self._settle(*settling)
            served = self._current()
        return served

    @_used
    def upsert(self, items: Sequence[Item], bundle: str) -> int:
        """Add items; see `Store`."""
        with self._turn:
            served = self._writable()
            if served.bundle != bundle:
                raise self._superseded()
            checked(items, served.widths)
            if not items:
                return 0
            rows = [_row(item) for item in items]
            self._fit(rows)
            there = {row.record["id"]: row for row in self._rows(served, [item.id for item in items], False)}
            fields = {name for item in items for name in item.metadata} - self._fields
            lists = {
                n for item in items for n, value in item.metadata.items() if _has_list(value)
            } - self._lists
            if fields or lists:
                self._note({f"field {n}": True for n in fields} | {f"list {n}": True for n in lists})
            for row, item in zip(rows, items, strict=True):
                if item.original is not None:
                    self._cut(row.record["version"], [item.original])
            self._put(served, rows)
            for row in there.values():
                self._drop_pieces(row.record["version"], row.record["pieces"])
            if self._current().number != served.number:
                raise self._superseded()  # what was written may have come too late
            return len(there)

    def _cut(self, owner: str, content: Iterable[bytes]) -> int:
        """Keep bytes in pieces, as rows of the register; return their number."""
        count = 0
        for part in content:
            for start in range(0, len(part), PIECE_BYTES):
                text = base64.b64encode(part[start : start + PIECE_BYTES]).decode()
                self._put(REGISTER, [Row({"id": f"{owner}.{count}", "text": text, "version": ""}, {})])
                count += 1
        return count

    def _joined(self, owner: str, count: int) -> Iterator[bytes]:
        """Give the bytes that `_cut` kept."""
        for number in range(count):
            for row in self._rows(REGISTER, [f"{owner}.{number}"], False):
                yield base64.b64decode(row.record["text"])

    def _drop_pieces(self, owner: str, count: int | None) -> None:
        if count:
            self._erase(REGISTER, [f"{owner}.{number}" for number in range(count)])

    @_used
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
                for row in gone.values():
                    self._drop_pieces(row.record["version"], row.record["pieces"])
                if self._current().number == served.number:  # else it may have come too late
                    return len(deleted)

    def _superseded(self) -> Superseded:
        return Superseded(f"The index {self.address} is served with another bundle by now.")

    # Reading

    @_used
    def get(self, ids: Iterable[str], *, arrays: bool = False) -> dict[str, Item]:
        """Return items by id; see `Store`."""
        rows = self._rows(self._current(), usable(dict.fromkeys(ids)), arrays)
        return {row.record["id"]: row.item() for row in rows}

    @_used
    def original(self, id: str) -> bytes | None:
        """Return the bytes of an original; see `Store`."""
        for row in self._rows(self._current(), usable([id]), False):
            if row.record["pieces"] is not None:
                return b"".join(self._joined(row.record["version"], row.record["pieces"]))
        return None

    def _parts(self, where: Filter | None) -> tuple[list[Any], list[Filter]]:
        """Split a filter into the engine's conditions and what is looked at item by item."""
        parts = () if where is None else where.parts if isinstance(where, And) else (where,)
        made = [(part, self._express(part)) for part in parts]
        rest = [part for part, own in made if own is None]
        return [own for _, own in made if own is not None], rest

    def _matching(
        self,
        generation: Generation,
        where: Filter | None = None,
        arrays: bool = False,
        after: str | None = None,
    ) -> Iterator[list[Row]]:
        """Give all rows that match, in pages."""
        own, rest = self._parts(where)
        while True:
            rows = self._page(generation, own, after, PAGE, arrays)
            yield [row for row in rows if all(_matches(part, row.record) for part in rest)]
            if len(rows) < PAGE:
                return
            after = rows[-1].record["id"]

    @_used
    def scan(self, where: Filter | None = None, *, after: str | None = None, limit: int = 1000) -> list[Item]:
        """Return a page of items; see `Store`."""
        if after is not None and not usable([after]):
            raise DataError("A scan goes on after an id; this one is no id of an item.")
        served, found = self._current(), list[Row]()
        refuse_fields(where, self._fields)
        for rows in self._matching(served, where, False, after):
            found += rows
            if len(found) >= limit:
                break
        return [row.item() for row in found[:limit]]

    @_used
    def count(self, where: Filter | None = None) -> int:
        """Return how many items match; see `Store`."""
        served = self._current()
        refuse_fields(where, self._fields)
        own, rest = self._parts(where)
        if not rest:
            return self._count(served, own)
        return sum(map(len, self._matching(served, where, False)))

    @_used
    def search(
        self, queries: Floats, count: int, bundle: str, *, where: Filter | None = None
    ) -> list[list[Item]]:
        """Propose the nearest items; see `Store`."""
        served = self._current()
        try:
            return self._search(served, np.asarray(queries, np.float32), count, bundle, where)
        except StoreError:
            if self._current().number != served.number:  # and the one before was dropped
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
                raise StoreError(f"{self.address} finds at most {self.most_found:,} items. Ask for fewer.")
        if not len(queries) or not count:
            return [[] for _ in queries]
        own, rest = self._parts(where)
        near: list[list[list[str]]] = []  # by sub-space and query
        for space, (start, stop) in enumerate(served.spans):
            part = np.ascontiguousarray(queries[:, start:stop])
            asked = min(count + MARGIN, self.most_found)
            if rest:
                near.append(self._measured(served, (start, stop), part, asked, where))
            else:
                near.append(self._nearest(served, space, part, asked, own))
        ids = list({id: None for found in near for one in found for id in one})
        items = {
            row.record["id"]: row.item()
            for row in self._rows(served, ids, True)
            if row.arrays and (where is None or _matches(where, row.record))
        }
        return [
            self._best(query, [found[at] for found in near], items, served.spans, count)
            for at, query in enumerate(queries)
        ]

    def _measured(
        self,
        served: Generation,
        span: tuple[int, int],
        queries: Floats,
        count: int,
        where: Filter | None,
    ) -> list[list[str]]:
        """Return what `_nearest` does, by looking at each item that matches."""
        best: list[list[tuple[float, str]]] = [[] for _ in queries]
        for rows in self._matching(served, where, True):
            if rows := [row for row in rows if row.arrays]:
                ids = [row.record["id"] for row in rows]
                vectors = np.stack([row.arrays[VECTOR][slice(*span)] for row in rows]).astype(np.float64)
                for at, query in enumerate(queries):
                    distances = np.square(vectors - query).sum(1).tolist()
                    best[at] = heapq.nsmallest(count, [*best[at], *zip(distances, ids, strict=True)])
        return [[id for _, id in one] for one in best]

    def _best(
        self,
        query: Floats,
        near: Sequence[Sequence[str]],
        items: Mapping[str, Item],
        spans: Sequence[tuple[int, int]],
        count: int,
    ) -> list[Item]:
        """Return the `count` nearest in each sub-space, measured in float64."""
        best: dict[str, Item] = {}
        for ids, (start, stop) in zip(near, spans, strict=True):
            there = [items[id] for id in ids if id in items]
            if there:
                vectors = np.stack([item.vector[start:stop] for item in there]).astype(np.float64)
                order = np.argsort(np.square(vectors - query[start:stop]).sum(1), kind="stable")
                best |= {there[at].id: there[at] for at in order[:count]}
        return list(best.values())

    # Generations

    @_used
    def generations(self) -> tuple[Generation, ...]:
        """Return all generations; see `Store`."""
        return self._listed(self._notes())

    def _listed(self, notes: Mapping[str, Any]) -> tuple[Generation, ...]:
        named = self._alias() or ""
        if not named.startswith(self._prefix):
            raise StoreError(f"{self.address} was deleted, or another index stands in its place.")
        served, found = int(named[len(self._prefix) :]), []
        for name, note in notes.items():
            if name.startswith("generation ") and note:
                number = int(name[11:])
                spans = tuple((start, stop) for start, stop in note["spans"])
                state = "served" if number == served else "kept" if note["served"] else "building"
                made = (number, note["bundle"], note["variant"], note["widths"], spans, state)
                found.append(Generation(*made))  # type: ignore[arg-type]
        return tuple(sorted(found, key=lambda generation: generation.number))

    def _there(self, generation: Generation, notes: Mapping[str, Any] | None = None) -> Generation:
        for one in self._listed(self._notes() if notes is None else notes):
            if one.number == generation.number:
                return one
        raise StoreError("This generation is not there any more.")

    def _add(self, number: int, bundle: Bundle, widths: Mapping[str, int], served: bool) -> Generation:
        """Make a generation, which is there once its note is."""
        kept = [note for name, note in self._notes().items() if name.startswith("generation ") and note]
        pieces = next((note["pieces"] for note in kept if note["bundle"] == bundle.sha256), None)
        if pieces is None:
            pieces = self._cut(bundle.sha256, bundle_pieces(bundle))
        spans = spans_of(bundle)
        made = Generation(number, bundle.sha256, bundle.variant, dict(widths), spans, "building")
        self._make(made)
        note = {
            "bundle": made.bundle,
            "variant": made.variant,
            "widths": dict(widths),
            "spans": spans,
        }
        self._note({f"generation {number}": {**note, "served": served, "pieces": pieces}, "last": number})
        return made

    @_used
    def bundle(self, generation: Generation) -> Path:
        """Return the folder of a generation's bundle; see `Store`."""
        notes = self._notes()
        there = self._there(generation, notes)
        pieces = notes[f"generation {there.number}"]["pieces"]
        return kept_bundle(there.bundle, lambda: self._joined(there.bundle, pieces))

    @_used
    def begin(self, bundle: Bundle, widths: Mapping[str, int]) -> Generation:
        """Begin a generation; see `Store`."""
        with self._turn:
            notes = self._notes()
            for one in self._listed(notes):
                same = (one.bundle, one.variant, dict(one.widths))
                if same == (bundle.sha256, bundle.variant, dict(widths)):
                    return one
            return self._add(notes["last"] + 1, bundle, widths, served=False)

    def _lacking(self, generation: Generation, served: Generation) -> tuple[list[str], list[str]]:
        """Return the ids of items that a generation lacks, and of those that it has no more."""
        there, wanted = (
            {row.record["id"]: row.record["version"] for rows in self._matching(one) for row in rows}
            for one in (generation, served)
        )
        lacking = [id for id, version in wanted.items() if there.get(id) != version]
        return lacking, [id for id in there if id not in wanted]

    @_used
    def pending(self, generation: Generation, limit: int) -> list[Item]:
        """Return items that a generation lacks; see `Store`. All are listed when few are known."""
        with self._turn:
            there, served = self._there(generation), self._current()
            queue = self._queues.get(there.number, [])
            if len(queue) < limit:
                queue = [] if there.state == "served" else self._lacking(there, served)[0]
            rows: list[Row] = []
            while queue and not rows:
                rows = self._rows(served, queue[:limit], FEATURES in served.widths)
                queue = queue if rows else queue[limit:]
            self._queues[there.number] = queue
            self._asked[there.number] = {row.record["id"]: row for row in rows}
            features = [{k: v for k, v in row.arrays.items() if k == FEATURES} for row in rows]
            return [replace(row.item(), arrays=kept) for row, kept in zip(rows, features, strict=True)]

    @_used
    def embed(self, generation: Generation, items: Sequence[Item], left_out: Sequence[str] = ()) -> None:
        """Give a generation arrays; see `Store`."""
        with self._turn:
            there = self._there(generation)
            asked = self._asked.get(there.number, {})
            checked(items, there.widths)
            arrays: dict[str, Mapping[str, Floats]] = {id: {} for id in left_out if id in asked}
            faults = [f"{item.id} was not pending." for item in items if item.id not in asked]
            for item in items:
                arrays[item.id] = {name: np.asarray(a, np.float32) for name, a in item.arrays.items()}
            faults += [f"{id} is neither embedded nor left out." for id in asked if id not in arrays]
            if faults:
                raise DataError("\n".join(faults))
            if asked:
                self._put(there, [Row(asked[id].record, arrays[id]) for id in asked])
            queue = self._queues.get(there.number, [])
            self._queues[there.number] = [id for id in queue if id not in asked]
            self._asked.pop(there.number, None)

    @_used
    def switch(self, generation: Generation) -> bool:
        """Serve another generation; see `Store`.

        Others may write until the alias has moved, so the two are compared once more behind it.
        """
        with self._turn:
            notes = self._notes()
            there, served = self._there(generation, notes), self._current(notes)
            if there.state == "served":
                return True
            if self._lacking(there, served)[0]:
                return False
            note = {**notes[f"generation {there.number}"], "served": True}
            self._note({f"generation {there.number}": note, "settling": [served.number, there.number]})
            self._point(there.number)
            return self._settle(served.number, there.number)

    def _settle(self, before: int, number: int) -> bool:
        """End a switch: let go what was deleted, or move the alias back for what came."""
        generations = {generation.number: generation for generation in self.generations()}
        lacking, gone = self._lacking(generations[number], generations[before])
        if gone:
            self._erase(generations[number], gone)
        if lacking:
            self._point(before)
        self._note({"settling": None})
        self._queues.clear()
        return not lacking

    @_used
    def drop(self, generation: Generation) -> None:
        """Delete a generation; see `Store`."""
        with self._turn:
            notes = self._notes()
            there = self._there(generation, notes)
            if there.state == "served":
                raise StoreError("The generation that is served cannot be dropped.")
            note = notes[f"generation {there.number}"]
            self._note({f"generation {there.number}": None})
            self._remove(self.collection(there.number))
            if there.bundle not in {one.bundle for one in self.generations()}:
                self._drop_pieces(there.bundle, note["pieces"])


def _row(item: Item) -> Row:
    """Return an item as a row of a new version."""
    size = None if item.original is None else -(-len(item.original) // PIECE_BYTES)
    record = {
        **{name: getattr(item, name) for name in _PLAIN},
        "metadata": item.metadata,
        "path": None if item.path is None else os.fspath(item.path),
        "version": uuid.uuid4().hex,
        "pieces": size,
    }
    return Row(record, {name: np.asarray(array, np.float32) for name, array in item.arrays.items()})


def _has_list(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(map(_has_list, value.values()))
    return isinstance(value, list | tuple)


def _served(generations: Iterable[Generation]) -> Generation:
    return next(generation for generation in generations if generation.state == "served")


def _matches(where: Filter, record: Mapping[str, Any]) -> bool:
    return matches(where, record["id"], record["label"], record["metadata"])


class RemotePlace(StorePlace):
    """A place over an engine; a subclass says which."""

    @abstractmethod
    def store(self) -> RemoteStore:
        """Return a store that is connected and knows no index yet.

        Raises:
            StoreUnavailable: nobody answers there.
        """

    def exists(self) -> bool:
        """Return whether there is an index; see `StorePlace`."""
        with self.store() as store:
            return store.exists()

    def create(
        self, bundle: Bundle, widths: Mapping[str, int], *, identity: str | None = None
    ) -> RemoteStore:
        """Make an empty index; see `StorePlace`."""
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
