"""The calls that a remote engine must implement; `remote.py` builds a store on them."""

from __future__ import annotations

import base64
import os
import threading
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar, cast

import numpy as np

from retrieval.errors import StoreError
from retrieval.serving.filters import And, Exists, Filter, In, Not, Or
from retrieval.serving.filters.tree import Field
from retrieval.serving.store.contract import StoreUnavailable, TooSlow, stop_at
from retrieval.serving.store.items import VECTOR, Floats, Generation, Item

PIECE_BYTES = 45_000  # bytes of an original or bundle per row; 60,000 characters of base64
REGISTER = Generation(0, "", None, {VECTOR: 2}, ((0, 2),), "kept")

T = TypeVar("T", bound=Callable[..., Any])
Where = Sequence[Any]
Joint = Literal["and", "or", "not"]
_PLAIN = ("id", "label", "stamp", "keep", "bytes", "width", "height", "source")


@dataclass(frozen=True, slots=True)
class Row:
    """One item in a generation's collection.

    Attributes:
        record: the item without its arrays, as JSON, with its "version" and the number of
            "pieces" of its original.
        arrays: float32 arrays by name; empty if the generation lacks the item.
    """

    record: Mapping[str, Any]
    arrays: Mapping[str, Floats]

    def split(self, generation: Generation) -> tuple[dict[str, Any], list[Floats]]:
        """Return one vector per sub-space, and the record with all other arrays as base64."""
        if not self.arrays:
            return dict(self.record), []
        vectors = [self.arrays[VECTOR][start:stop] for start, stop in generation.spans]
        texts = {
            name: base64.b64encode(self.arrays[name].astype("<f4").tobytes()).decode()
            for name in generation.widths
            if name != VECTOR or len(vectors) > 1
        }
        return {**self.record, "arrays": texts}, vectors

    @staticmethod
    def batches(
        rows: Sequence[Row], generation: Generation, most_bytes: int, number_bytes: int
    ) -> Iterator[list[tuple[dict[str, Any], list[Floats]]]]:
        """Yield split rows in batches of about `most_bytes`.

        Args:
            rows: the rows to write.
            generation: generation of the rows.
            most_bytes: target size of a batch.
            number_bytes: bytes per vector component in the engine's requests.
        """
        batch, size = [], 0
        for row in rows:
            record, vectors = row.split(generation)
            batch.append((record, vectors))
            size += len(str(record)) * max(1, len(vectors)) + number_bytes * sum(map(len, vectors))
            if size > most_bytes:
                yield batch
                batch, size = [], 0
        if batch:
            yield batch

    @classmethod
    def joined(cls, record: Mapping[str, Any], vector: Sequence[float] | None) -> Row:
        """Return the row that `split` took apart, from its record and, if read, first vector."""
        plain = dict(record)
        arrays = {
            name: np.frombuffer(base64.b64decode(t), "<f4")
            for name, t in plain.pop("arrays", {}).items()
        }
        if vector is not None and VECTOR not in arrays:
            arrays[VECTOR] = np.asarray(vector, np.float32)
        return cls(plain, arrays)

    def item(self) -> Item:
        """Return the row as an item."""
        path = None if self.record["path"] is None else Path(self.record["path"])
        plain = {name: self.record[name] for name in _PLAIN}
        return Item(**plain, metadata=self.record["metadata"], path=path, arrays=self.arrays)


def row_of(item: Item) -> Row:
    """Return an item as a row with a new version."""
    size = None if item.original is None else -(-len(item.original) // PIECE_BYTES)
    record = {
        **{name: getattr(item, name) for name in _PLAIN},
        "metadata": item.metadata,
        "path": None if item.path is None else os.fspath(item.path),
        "version": uuid.uuid4().hex,
        "pieces": size,
    }
    return Row(record, {name: np.asarray(array, np.float32) for name, array in item.arrays.items()})


def finished(method: T) -> T:
    """Decorate a method so that `close` waits until running calls of it have ended."""

    @wraps(method)
    def call(self: Engine, *arguments: Any, **named: Any) -> Any:
        with self._state:
            if self._closed:
                raise self._closed_error()
            self._inside.append(threading.get_ident())
        try:
            return method(self, *arguments, **named)
        finally:
            with self._state:
                self._inside.remove(threading.get_ident())
                self._state.notify_all()

    return cast(T, call)


class Engine(ABC):
    """The engine under a `RemoteStore`; a subclass implements the abstract methods.

    Each generation has one collection. The register is a further collection, described by
    `REGISTER`, whose rows have no arrays. `where` is a list of conditions in the engine's own
    form, all of which must hold.

    Args:
        address: name of the index in messages.
        name: name of the index in the engine, which is its alias.

    Attributes:
        lists: metadata fields that have ever held a list, directly or nested.
        engine: name of the engine.
        errors: exceptions that the engine's client raises.
        timeout: time limit of one request in seconds, including retries.
        separator: separator of the parts of a collection's name; no index name contains it.
        most_found: maximum number of items that one search returns.
    """

    engine: ClassVar[str]
    errors: ClassVar[tuple[type[Exception], ...]]
    timeout: float
    separator = "__"
    most_found = 1 << 31

    def __init__(self, address: str, name: str) -> None:
        self.address, self.name = address, name
        self._prefix = ""
        self.lists: set[str] = set()
        self._state, self._inside, self._closed = threading.Condition(), list[int](), False

    def collection(self, number: int) -> str:
        """Return the name of the collection of a generation's number."""
        return f"{self._prefix}{number:06}"  # fixed width: no name is a prefix of another

    def _ask(self, question: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        """Send a request, and retry within `timeout` if the engine does not answer.

        All requests are idempotent.
        """
        began, pause = time.monotonic(), 0.05
        while True:
            now = time.monotonic()
            if self._closed and threading.get_ident() not in self._inside:
                raise self._closed_error()
            if now > stop_at():
                raise TooSlow(f"Reading {self.address} takes too long. Ask for less.")
            try:
                left = min(self.timeout - (now - began), stop_at() - now)
                return question(*arguments, **named, **self._limit(max(0.5, left)))
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

    def _closed_error(self) -> StoreError:
        return StoreError(f"{self.address} was closed.")

    def _limit(self, seconds: float) -> dict[str, Any]:
        """Return the client's keyword arguments that limit one request to `seconds`."""
        return {}

    @abstractmethod
    def _fault(self, error: Exception) -> tuple[bool, str]:
        """Return whether an error means that the engine is unreachable, and its message."""

    @abstractmethod
    def _alias(self) -> str | None:
        """Return the name of the alias's collection, or None if there is no alias."""

    @abstractmethod
    def _point(self, number: int | None) -> None:
        """Point the alias to a generation's collection atomically, or remove it (`None`)."""

    @abstractmethod
    def _make(self, generation: Generation) -> None:
        """Create the collection of a generation or of the register."""

    @abstractmethod
    def _remove(self, prefix: str) -> None:
        """Delete all collections whose names begin with `prefix`."""

    @abstractmethod
    def _note(self, notes: Mapping[str, Any]) -> None:
        """Write notes to the register; a note replaces the one of the same name."""

    @abstractmethod
    def _notes(self) -> dict[str, Any]:
        """Return all notes by name; values may be None."""

    def _fit(self, rows: Sequence[Row]) -> None:  # noqa: B027 (an engine need not)
        """Raise a `DataError` if a row is too long for the engine."""

    @abstractmethod
    def _put(self, generation: Generation, rows: Sequence[Row]) -> None:
        """Write rows; a row replaces the one of the same id."""

    @abstractmethod
    def _erase(self, generation: Generation, ids: Sequence[str]) -> None:
        """Delete rows by id."""

    @abstractmethod
    def _rows(self, generation: Generation, ids: Sequence[str], arrays: bool) -> list[Row]:
        """Return rows by id, in any order."""

    @abstractmethod
    def _page(
        self, generation: Generation, where: Where, after: str | None, limit: int, arrays: bool
    ) -> list[Row]:
        """Return the next `limit` rows after an id in a stable order; fewer only at the end."""

    @abstractmethod
    def _count(self, generation: Generation, where: Where) -> int:
        """Return the number of rows that match."""

    @abstractmethod
    def _nearest(
        self, generation: Generation, space: int, queries: Floats, count: int, where: Where
    ) -> list[list[str]]:
        """Return, per query (Q, width), the ids of the nearest rows within one sub-space."""

    def _express(self, where: Filter) -> Any | None:
        """Translate a filter to the engine's own condition; None if its meaning would differ."""
        if isinstance(where, Not):
            part = self._express(where.part)
            return None if part is None else self._combined("not", [part])
        if isinstance(where, And | Or):
            parts = [self._express(part) for part in where.parts]
            joint: Joint = "and" if isinstance(where, And) else "or"
            return None if any(part is None for part in parts) else self._combined(joint, parts)
        if isinstance(where, Exists):
            return None
        if isinstance(where, In):
            return self._condition(where.field, "=", where.values)
        return None if where.op == "!=" else self._condition(where.field, where.op, (where.value,))

    @abstractmethod
    def _combined(self, joint: Joint, parts: Sequence[Any]) -> Any:
        """Combine conditions; `not` has one part."""

    @abstractmethod
    def _condition(self, field: Field, op: str, values: Sequence[Any]) -> Any | None:
        """Return the engine's condition that a field compares true with any of the values.

        Args:
            field: "id", "label" or a path through the metadata.
            op: "=", "<", "<=", ">" or ">="; all but "=" have one value.
            values: texts, numbers, True, False or None.

        Returns:
            The condition, or None if the engine would decide differently from `matches`.
        """

    @abstractmethod
    def _hang_up(self) -> None:
        """Close the connection."""
