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
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from retrieval.bundle.bundle import Bundle
from retrieval.errors import DataError, StoreError
from retrieval.store.contract import (
    MARGIN,
    Candidates,
    Stats,
    StoreUnavailable,
    Superseded,
    TooSlow,
    stacked,
    stop_at,
)
from retrieval.store.copy_store import PAGE, write_copy
from retrieval.store.exact_search import check_queries
from retrieval.store.filters import And, Exists, Filter
from retrieval.store.filters.tree import Condition, fold
from retrieval.store.items import (
    FEATURES,
    Floats,
    Generation,
    Item,
    check_embedded,
    checked,
    refuse_fields,
    spans_of,
    usable,
)
from retrieval.store.kept_bundles import bundle_pieces, kept_bundle

from retrieval_engines.engine_calls import Conditions, EngineCalls
from retrieval_engines.register import REGISTER, RegisterContent, field_notes, generation_of
from retrieval_engines.rows import PIECE_BYTES, Row

ENGINE_FORMAT = 1
# Pieces of bundles and originals in one request, and in memory.
PIECES_AT_ONCE = 64


class RemoteStore(EngineCalls):
    """A store in a database engine; see `EngineCalls` for what a subclass implements.

    Attributes:
        lists: metadata fields that have ever held a list, directly or nested.
    """

    def __init__(
        self, client: Any, address: str, name: str, timeout: float = 30.0, exact: bool = True
    ) -> None:
        super().__init__(client, address, name, timeout, exact)
        self.lists: set[str] = set()
        self._fields: set[str] = set()
        # By the number of a generation: ids that it lacks, and the rows that `pending` returned
        # last. To find what lacks, all rows of two generations are read, so a queue serves many
        # calls of `pending`.
        self._queues: dict[int, list[str]] = {}
        self._pending: dict[int, dict[str, Row]] = {}

    def _conditions(self, filter: Filter | None) -> list[Any]:
        """Return a filter in the engine's form; raise a `DataError` if the engine has none."""
        if filter is None:
            return []
        refuse_fields(filter, self._fields)
        parts: Sequence[Filter] = (filter,)
        if isinstance(filter, And):
            parts = filter.parts
        return [fold(part, self._to_condition, self._join_conditions) for part in parts]

    def _to_condition(self, condition: Condition) -> Any:
        op = "exists"
        if not isinstance(condition, Exists):
            op = condition.op
        elif condition.field == "id":
            # Every item has an id.
            return self._join_conditions("not", [self._condition("id", "=", ())])
        expression = self._condition(condition.field, op, condition.values)
        if expression is None:
            field: Any = condition.field
            if not isinstance(field, str):
                field = ".".join(field)
            raise DataError(
                f"{self.engine} cannot decide on '{field}'. This store supports only =, in, and,"
                " or, not, and <, <=, >, >= on numbers; a folder and Postgres support every filter."
            )
        return expression

    # The whole

    def make(self, bundle: Bundle, widths: Mapping[str, int], identity: str) -> None:
        """Create the index, which exists once its alias does; see `StorePlace.create`."""
        # An index that is deleted and created again has other collections, so that a process which
        # still has the old one open notices: `changed`.
        digest = hashlib.sha256(identity.encode()).hexdigest()[:8]
        prefix = f"{self.name}{self.separator}{digest}{self.separator}"
        with self._writing():
            if self._aliased_collection() is not None:
                raise StoreError(f"{self.address} exists already.")
            self._prefix = prefix
            # A call that was killed may have left collections.
            self._delete_collections(prefix)
            try:
                self._create_collection(REGISTER)
                self._write_notes({"index": {"format": ENGINE_FORMAT, "identity": identity}})
                self._add_generation(1, bundle, widths, served=True)
                self._move_alias(1)
            except BaseException:
                # The first error is the one to report.
                with suppress(StoreError):
                    self._delete_collections(prefix)
                raise

    def find(self) -> None:
        """Find the index; see `StorePlace.open`."""
        alias_target = self._aliased_collection()
        if alias_target is None:
            raise StoreError(f"There is no index at {self.address}.")
        self._prefix = alias_target[: alias_target.rindex(self.separator) + len(self.separator)]
        format_ = self._read_notes()["index"]["format"]
        if format_ != ENGINE_FORMAT:
            raise StoreError(
                f"{self.address} has format {format_} of a newer version. Upgrade retrieval."
            )

    def destroy(self) -> None:
        """Delete the index of this name."""
        with self._writing():
            # Without its alias the index does not exist, so an interrupted call leaves no half
            # index.
            self._move_alias(None)
            self._delete_collections(f"{self.name}{self.separator}")

    def _delete_collections(self, prefix: str) -> None:
        """Delete all collections whose names begin with `prefix`."""
        for name in self._collections():
            if name.startswith(prefix):
                self._delete_collection(name)

    def identity(self) -> str:
        """Return the index's id; see `Store`."""
        return str(self._read_notes()["index"]["identity"])

    def changed(self) -> str | None:
        """Return a sentence if the index was deleted or replaced; see `Store`."""
        alias_target = self._aliased_collection()
        if alias_target and alias_target.startswith(self._prefix):
            return None
        return str(self._lost_error())

    def _lost_error(self) -> StoreError:
        return StoreError(f"{self.address} was deleted, or replaced with another index.")

    def snapshot(self, target: Path) -> None:
        """Write a copy; see `Store`. If the store is not "atomic", it may include later writes."""
        with self._reading():
            write_copy(self, target)

    def stats(self) -> Stats:
        """Return the size and state of the store; see `Store`."""
        with self._reading():
            register = self._read_register()
            count = self._count_rows(register.served, ())
            return Stats(count, register.generations, self._size(register), {})

    def settings(self) -> Mapping[str, Any]:
        """Return the configuration of the index; see `Store`."""
        return {"fields": sorted(self._read_register().names("field "))}

    def close(self) -> None:
        """Close the connection; see `Store`."""
        if not self._closed:
            # This is set first, so that `_request` knows why a running request fails.
            self._closed = True
            self._client.close()

    # The register

    def _read_register(self) -> RegisterContent:
        """Read the register, and update the known metadata fields."""
        # In this order: a generation that is served by now had its note before.
        notes = self._read_notes()
        alias_target = self._aliased_collection() or ""
        if not alias_target.startswith(self._prefix):
            raise self._lost_error()
        served = int(alias_target[len(self._prefix) :])
        by_number = {}
        for name, note in notes.items():
            kind, _, number = name.partition(" ")
            if kind == "generation" and note:
                by_number[int(number)] = generation_of(int(number), note, served)
        generations = tuple(by_number[number] for number in sorted(by_number))
        register = RegisterContent(notes, generations)
        self._fields = set(register.names("field "))
        self.lists = set(register.names("list "))
        return register

    def _writable(self) -> RegisterContent:
        """Read the register, after completing a switch that another process began."""
        register = self._read_register()
        settling = register.notes.get("settling")
        if settling and settling[1] == register.served.number:
            self._complete_switch(*settling)
            return self._read_register()
        return register

    def _was_switched(self, served: Generation) -> bool:
        """Return whether another process has switched meanwhile; an "atomic" store excludes it."""
        if "atomic" in self.capabilities:
            return False
        return self._read_register().served.number != served.number

    def _superseded_error(self) -> Superseded:
        return Superseded(f"The index {self.address} is served with another bundle by now.")

    # Writing

    def upsert(self, items: Sequence[Item], bundle: str) -> int:
        """Add items; see `Store`."""
        return self._put(items, bundle)[0]

    def _put(
        self, items: Sequence[Item], bundle: str, known: Mapping[str, Row] | None = None
    ) -> tuple[int, set[str]]:
        """Write items; return the number of those that existed, and the ids that were left out.

        With the `known` row of each item, those that have another version by now are left out.
        """
        with self._writing():
            register = self._writable()
            served = register.served
            if served.bundle != bundle:
                raise self._superseded_error()
            checked(items, served.widths)
            items = list(items)
            if not items:
                return 0, set()
            rows = [Row.of(item) for item in items]
            self._check_sizes(rows)
            replaced = self._read_rows(served, [item.id for item in items])
            # Readers refuse a filter on an unknown field, and Milvus compares a field that may hold
            # lists in another way. So the notes are written before the items.
            names = dict.fromkeys(name for item in items for name in field_notes(item))
            if new := {name: True for name in names if name not in register.notes}:
                self._write_notes(new)
            # An item must not be visible without its original. The pieces have a new name, because
            # readers may still fetch those of the row that is replaced.
            for row, item in zip(rows, items, strict=True):
                if item.original is not None:
                    self._write_pieces(row.version, [item.original])
            missed: set[str] = set()
            if known is None:
                self._write_rows(served, rows)
                while undone := self._undone(register, {row.id: row.version for row in rows}):
                    self._write_rows(served, [row for row in rows if row.id in undone])
                    self._delete_originals(undone.values())
            else:
                missed = self._exchange_rows(served, rows, known)
            # What had a known version does not have it any more, whoever wrote.
            self._delete_originals(
                row for row in replaced if known is None or known[row.id].version == row.version
            )
            self._delete_originals(row for row in rows if row.id in missed)
            if self._was_switched(served):
                # The new generation may lack the rows.
                raise self._superseded_error()
            return len(replaced), missed

    def update(
        self,
        ids: Iterable[str],
        changes: Mapping[str, Any],
        bundle: str,
        *,
        filter: Filter | None = None,
    ) -> int:
        """Change items; see `Store`. No other thread writes meanwhile."""
        with self._writing():
            return super().update(ids, changes, bundle, filter=filter)

    def _change(self, ids: Sequence[str], changes: Mapping[str, Any], bundle: str) -> int:
        """Change a few items; what others change meanwhile is changed once more."""
        count = 0
        while ids:
            if time.monotonic() > stop_at():
                raise self._slow_error()
            rows = self._read_rows(self._writable().served, ids, arrays=True)
            items = [row.item().changed(changes) for row in rows]
            originals = self.originals(row.id for row in rows if row.pieces is not None)
            items = [replace(item, original=originals.get(item.id)) for item in items]
            missed = self._put(items, bundle, {row.id: row for row in rows})[1]
            count += len(items) - len(missed)
            ids = sorted(missed)
        return count

    def _exchange_rows(
        self, generation: Generation, rows: Sequence[Row], known: Mapping[str, Row]
    ) -> set[str]:
        """Write rows that replace the known versions; return the ids that have another by now.

        Here nobody writes meanwhile, which an "atomic" store excludes.
        """
        self._write_rows(generation, rows)
        return set()

    def _undone(
        self, register: RegisterContent, written: Mapping[str, str | None]
    ) -> dict[str, Row]:
        """Return by id what `_exchange_rows` of another process wrote over rows of this one.

        Args:
            register: the register as it was before the rows were written.
            written: version of each row; None for one that was deleted.
        """
        return {}

    def _write_pieces(self, owner: str, content: Iterable[bytes]) -> int:
        """Store bytes as pieces `owner`.0 and so on; return the number of pieces."""
        pieces = (
            part[start : start + PIECE_BYTES]
            for part in content
            for start in range(0, len(part), PIECE_BYTES)
        )
        count = 0
        while block := list(islice(pieces, PIECES_AT_ONCE)):
            names = (f"{owner}.{number}" for number in range(count, count + len(block)))
            self._write_bytes(dict(zip(names, block, strict=True)))
            count += len(block)
        return count

    def _read_pieces(self, owner: str, count: int) -> Iterator[bytes]:
        """Yield the `count` pieces that `_write_pieces` stored."""
        names = (f"{owner}.{number}" for number in range(count))
        while block := list(islice(names, PIECES_AT_ONCE)):
            pieces = self._read_bytes(block)
            yield from (pieces[name] for name in block if name in pieces)

    def _write_bytes(self, pieces: Mapping[str, bytes]) -> None:
        """Write pieces as rows of the register."""
        rows = [
            Row({"id": name, "text": base64.b64encode(piece).decode()}, {})
            for name, piece in pieces.items()
        ]
        self._write_rows(REGISTER, rows)

    def _read_bytes(self, names: Sequence[str]) -> dict[str, bytes]:
        """Return pieces by name; those that were deleted are left out."""
        rows = self._read_rows(REGISTER, names)
        return {row.id: base64.b64decode(row.record["text"]) for row in rows}

    def _delete_pieces(self, owner: str, count: int) -> None:
        if count:
            self._delete_rows(REGISTER, [f"{owner}.{number}" for number in range(count)])

    def _delete_originals(self, rows: Iterable[Row]) -> None:
        for row in rows:
            self._delete_pieces(row.version, row.pieces or 0)

    def delete(self, ids: Iterable[str] = (), *, filter: Filter | None = None) -> int:
        """Delete items; see `Store`."""
        ids = usable(dict.fromkeys(ids))
        deleted: set[str] = set()
        with self._writing():
            while True:
                register = self._writable()
                served = register.served
                rows = self._read_rows(served, ids)
                if filter is not None:
                    rows += self._all_rows(served, self._conditions(filter))
                matching = {row.id: row for row in rows}
                if matching:
                    self._delete_rows(served, list(matching))
                    while undone := self._undone(register, dict.fromkeys(matching)):
                        self._delete_rows(served, list(undone))
                        rows += undone.values()
                    deleted |= matching.keys()
                self._delete_originals(rows)
                # If another process has switched meanwhile, the new generation has the items.
                if not self._was_switched(served):
                    return len(deleted)

    # Reading

    def get(self, ids: Iterable[str], *, arrays: bool = False) -> dict[str, Item]:
        """Return items by id; see `Store`."""
        with self._reading():
            served = self._read_register().served
            rows = self._read_rows(served, usable(dict.fromkeys(ids)), arrays)
        return {row.id: row.item() for row in rows}

    def original(self, id: str) -> bytes | None:
        """Return the bytes of an original; see `Store`."""
        return self.originals([id]).get(id)

    def originals(self, ids: Iterable[str]) -> dict[str, bytes]:
        """Return the bytes of originals by id; see `Store`."""
        with self._reading():
            rows = self._read_rows(self._read_register().served, usable(dict.fromkeys(ids)))
            return {
                row.id: b"".join(self._read_pieces(row.version, row.pieces))
                for row in rows
                if row.pieces is not None
            }

    def _all_rows(
        self,
        generation: Generation,
        conditions: Conditions = (),
        after: str | None = None,
        page: int = PAGE,
    ) -> Iterator[Row]:
        """Yield all rows after an id that match, without arrays; `page` rows are read at a time."""
        while rows := self._read_page(generation, conditions, after, page):
            yield from rows
            if len(rows) < page:
                return
            after = rows[-1].id

    def scan(
        self, filter: Filter | None = None, *, after: str | None = None, limit: int = 1000
    ) -> list[Item]:
        """Return a page of items; see `Store`."""
        if after is not None and not usable([after]):
            raise DataError(f"{after[:80]!r} is not an id that an item can have.")
        with self._reading():
            served = self._read_register().served
            conditions = self._conditions(filter)
            rows = self._all_rows(served, conditions, after, min(limit, PAGE))
            return [row.item() for row in islice(rows, limit)]

    def count(self, filter: Filter | None = None) -> int:
        """Return the number of items; see `Store`."""
        with self._reading():
            served = self._read_register().served
            return self._count_rows(served, self._conditions(filter))

    def search(
        self, queries: Floats, count: int, bundle: str, *, filter: Filter | None = None
    ) -> list[list[Item]]:
        """Propose the nearest items; see `Store`."""
        served = None
        try:
            with self._reading():
                served = self._read_register().served
                if served.bundle != bundle:
                    raise self._superseded_error()
                queries = np.asarray(queries, np.float32)
                check_queries(queries, served)
                return self._search(served, queries, count, self._conditions(filter))
        except (Superseded, StoreUnavailable, TooSlow):
            raise
        except StoreError:
            # Another process may have switched, and the old generation may be dropped.
            if served and self._read_register().served.number != served.number:
                raise self._superseded_error() from None
            raise

    def _search(
        self, served: Generation, queries: Floats, count: int, conditions: Conditions
    ) -> list[list[Item]]:
        # Fewer items than requested are a complete answer only if there are no more.
        most = min(count, self.most_found)
        if most < count and self._count_rows(served, ()) > most:
            raise StoreError(f"{self.engine} returns at most {most:,} items. Request fewer.")
        if not len(queries) or not count:
            return [[] for _ in queries]
        # Dicts keep the order of ids, and hold each once.
        nearest: list[dict[str, None]] = [{} for _ in queries]
        for space, (start, stop) in enumerate(served.spans):
            part = np.ascontiguousarray(queries[:, start:stop])
            answers = self._nearest_ids(served, space, part, most, conditions)
            for ids, near in zip(nearest, answers, strict=True):
                ids.update(dict.fromkeys(near))
        # Several queries may share an item; its arrays are read once.
        rows = self._read_rows(served, list({id for ids in nearest for id in ids}), arrays=True)
        items = {row.id: row.item() for row in rows}
        # An item that was deleted between the two requests is left out.
        return [[items[id] for id in ids if id in items] for ids in nearest]

    # Generations

    def generations(self) -> tuple[Generation, ...]:
        """Return all generations; see `Store`."""
        return self._read_register().generations

    def _add_generation(
        self, number: int, bundle: Bundle, widths: Mapping[str, int], served: bool
    ) -> Generation:
        """Create a generation; it exists as soon as its note is written."""
        # Generations of one bundle, such as those of its variants, share its pieces.
        pieces = None
        for note in self._read_notes().values():
            if isinstance(note, dict) and note.get("bundle") == bundle.sha256:
                pieces = note["pieces"]
        if pieces is None:
            pieces = self._write_pieces(bundle.sha256, bundle_pieces(bundle))
        note = {
            "bundle": bundle.sha256,
            "variant": bundle.variant,
            "widths": dict(widths),
            "spans": spans_of(bundle),
            "served": False,
            "pieces": pieces,
        }
        generation = generation_of(number, note)
        self._create_collection(generation)
        self._write_notes({f"generation {number}": note | {"served": served}, "last": number})
        return generation

    def bundle(self, generation: Generation) -> Path:
        """Return the folder of a generation's bundle; see `Store`."""
        with self._reading():
            register = self._read_register()
            target = register.latest(generation)
            pieces = register.note(target)["pieces"]
            return kept_bundle(target.bundle, lambda: self._read_pieces(target.bundle, pieces))

    def begin(self, bundle: Bundle, widths: Mapping[str, int]) -> Generation:
        """Begin a generation; see `Store`."""
        with self._writing():
            register = self._read_register()
            for generation in register.generations:
                properties = (generation.bundle, generation.variant, dict(generation.widths))
                if properties == (bundle.sha256, bundle.variant, dict(widths)):
                    return generation
            return self._add_generation(register.notes["last"] + 1, bundle, widths, served=False)

    def _differences(
        self, generation: Generation, served: Generation
    ) -> tuple[list[str], list[str]]:
        """Return ids that `generation` lacks (or has an old version of), and ids only it has."""

        present = self._versions(generation)
        current = self._versions(served)
        lacking = [id for id, version in current.items() if present.get(id) != version]
        return lacking, [id for id in present if id not in current]

    def _versions(self, generation: Generation) -> dict[str, str]:
        """Return the version of each row by its id."""
        return {row.id: row.version for row in self._all_rows(generation)}

    def pending(self, generation: Generation, limit: int) -> list[Item]:
        """Return items that a generation lacks; see `Store`. A queue keeps ids for later calls."""
        with self._writing():
            register = self._read_register()
            target = register.latest(generation)
            served = register.served
            if target.state == "served":
                self._pending.pop(target.number, None)
                return []
            queue = self._queues.get(target.number, [])
            if len(queue) < limit:
                queue = self._differences(target, served)[0]
            rows: list[Row] = []
            # All of these may have been deleted meanwhile.
            while queue and not rows:
                rows = self._read_rows(served, queue[:limit], FEATURES in served.widths)
                if not rows:
                    queue = queue[limit:]
            self._queues[target.number] = queue
            self._pending[target.number] = {row.id: row for row in rows}
            items = []
            for row in rows:
                arrays = {name: row.arrays[name] for name in row.arrays if name == FEATURES}
                items.append(replace(row.item(), arrays=arrays))
            return items

    def embed(
        self, generation: Generation, items: Sequence[Item], left_out: Sequence[str] = ()
    ) -> None:
        """Add arrays to a generation; see `Store`."""
        with self._writing():
            target = self._read_register().latest(generation)
            pending = self._pending.get(target.number, {})
            check_embedded(items, left_out, pending, target.widths)
            arrays = {item.id: Row.of(item).arrays for item in items}
            # The rows keep the versions that `pending` read, so an item that was written since is
            # pending again.
            rows = [Row(row.record, arrays.get(id, {})) for id, row in pending.items()]
            if rows:
                self._write_rows(target, rows)
            queue = self._queues.get(target.number, [])
            self._queues[target.number] = [id for id in queue if id not in pending]
            self._pending.pop(target.number, None)

    def switch(self, generation: Generation) -> bool:
        """Serve another generation; see `Store`."""
        with self._writing():
            register = self._read_register()
            target = register.latest(generation)
            served = register.served
            if target.state == "served":
                return True
            lacking, deleted = self._differences(target, served)
            if lacking:
                return False
            note = register.note(target) | {"served": True}
            if "atomic" in self.capabilities:
                # Nobody writes meanwhile, so nothing is left to complete.
                self._delete_rows(target, deleted)
                self._write_notes({f"generation {target.number}": note})
                self._move_alias(target.number)
                self._queues.clear()
                return True
            settling = [served.number, target.number]
            # If this process dies now, the next writer completes the switch: `_writable`.
            self._write_notes({f"generation {target.number}": note, "settling": settling})
            self._move_alias(target.number)
            return self._complete_switch(*settling)

    def _complete_switch(self, before: int, number: int) -> bool:
        """Complete a switch between two generations; return whether it succeeded.

        Others may write to the old one until the alias has moved. So erase items that were deleted
        meanwhile; if items are missing, move the alias back.
        """
        generations = {generation.number: generation for generation in self.generations()}
        lacking, deleted = self._differences(generations[number], generations[before])
        if deleted:
            self._delete_rows(generations[number], deleted)
        if lacking:
            self._move_alias(before)
        self._write_notes({"settling": None})
        self._queues.clear()
        return not lacking

    def propose_staged(
        self, generation: Generation, queries: Floats, count: int
    ) -> list[Candidates]:
        """Propose items of a generation that is not served yet; see `Store`."""
        with self._reading():
            target = self._read_register().latest(generation)
            check_queries(queries, target)
            return stacked(self._search(target, queries, count + MARGIN, ()))

    def drop(self, generation: Generation) -> None:
        """Delete a generation; see `Store`."""
        with self._writing():
            register = self._read_register()
            target = register.latest(generation)
            if target.state == "served":
                raise StoreError("The generation that is served cannot be dropped.")
            # Without its note the generation does not exist, even if this process dies now.
            self._write_notes({f"generation {target.number}": None})
            self._delete_collections(self.collection(target.number))
            for name in register.names(f"measured {target.number} "):
                self._replace_measured(register, target, name, None)
            if target.bundle not in {generation.bundle for generation in self.generations()}:
                self._delete_pieces(target.bundle, register.note(target)["pieces"])

    def note(self, generation: Generation, name: str) -> bytes | None:
        """Return a note of a generation; see `Store`."""
        with self._reading():
            register = self._read_register()
            target = register.latest(generation)
            pieces = register.notes.get(f"measured {target.number} {name}")
            if pieces is None:
                return None
            return b"".join(self._read_pieces(*pieces))

    def set_note(self, generation: Generation, name: str, content: bytes) -> None:
        """Keep a note of a generation; see `Store`."""
        with self._writing():
            register = self._read_register()
            target = register.latest(generation)
            # A name of their own, because readers may still fetch the earlier pieces.
            owner = str(uuid.uuid4())
            pieces = (owner, self._write_pieces(owner, [content]))
            self._replace_measured(register, target, name, pieces)

    def _replace_measured(
        self,
        register: RegisterContent,
        generation: Generation,
        name: str,
        pieces: tuple[str, int] | None,
    ) -> None:
        """Replace the pieces (owner and count) of a note of a generation."""
        key = f"measured {generation.number} {name}"
        self._write_notes({key: pieces})
        if earlier := register.notes.get(key):
            self._delete_pieces(*earlier)
