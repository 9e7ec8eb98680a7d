"""What an engine must do for a store to stand on it: `remote.py` makes a store of this."""

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

PIECE_BYTES = 45_000  # of an original or a bundle in one row: 60,000 characters of base64
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

    @staticmethod
    def batches(
        rows: Sequence[Row], generation: Generation, most_bytes: int, number_bytes: int
    ) -> Iterator[list[tuple[dict[str, Any], list[Floats]]]]:
        """Give rows, split, in batches of about so many bytes.

        Args:
            rows: which.
            generation: theirs.
            most_bytes: of a batch.
            number_bytes: of one number of a vector, as the engine's client writes it.
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
        """Return a row that was split, of its record and the first vector, where asked for."""
        plain = dict(record)
        arrays = {
            name: np.frombuffer(base64.b64decode(t), "<f4")
            for name, t in plain.pop("arrays", {}).items()
        }
        if vector is not None and VECTOR not in arrays:
            arrays[VECTOR] = np.asarray(vector, np.float32)
        return cls(plain, arrays)

    def item(self) -> Item:
        """Return the item."""
        path = None if self.record["path"] is None else Path(self.record["path"])
        plain = {name: self.record[name] for name in _PLAIN}
        return Item(**plain, metadata=self.record["metadata"], path=path, arrays=self.arrays)


def row_of(item: Item) -> Row:
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


def finished(method: T) -> T:
    """Let a call that runs while the store is closed end first."""

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
    """An engine as a client's calls; a subclass of `RemoteStore` says how, in those without a body.

    Collections are those of generations; the register looks like one, `REGISTER`, whose rows have
    no arrays. `where` is a list of the engine's own conditions, all of which must hold.

    Args:
        address: what sentences call the index.
        name: of the index in the engine: the alias.

    Attributes:
        lists: fields of the metadata that have ever held a list, themselves or within.
        engine: its name.
        errors: what its client raises.
        timeout: seconds that one question may take, with what is asked again meanwhile.
        separator: what stands between the parts of a collection's name; no index's name has it.
        most_found: how many items one search finds at most.
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
        """Return the name of a collection by its number."""
        return f"{self._prefix}{number:06}"  # none begins like another

    def _ask(self, question: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        """Ask the engine, and again where nobody answers, within `timeout`.

        Everything that is asked can be asked twice.
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

    def _fit(self, rows: Sequence[Row]) -> None:  # noqa: B027 (an engine need not)
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
        self, generation: Generation, where: Where, after: str | None, limit: int, arrays: bool
    ) -> list[Row]:
        """Return the first rows behind an id, in an order that stays; fewer at the end."""

    @abstractmethod
    def _count(self, generation: Generation, where: Where) -> int:
        """Return how many rows there are."""

    @abstractmethod
    def _nearest(
        self, generation: Generation, space: int, queries: Floats, count: int, where: Where
    ) -> list[list[str]]:
        """Return the ids of the nearest rows to each query (Q, width) within one sub-space."""

    def _express(self, where: Filter) -> Any | None:
        """Return a filter as the engine's own condition; None if that would mean anything else."""
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
        """Return a condition made of conditions; `not` has one part."""

    @abstractmethod
    def _condition(self, field: Field, op: str, values: Sequence[Any]) -> Any | None:
        """Return a comparison with one of the values as the engine's own condition.

        Args:
            field: "id", "label" or a path through the metadata.
            op: "=", "<", "<=", ">" or ">="; with an order there is one value.
            values: texts, numbers, True, False or None.

        Returns:
            The condition; None if the engine's would mean anything else than `matches` says.
        """

    @abstractmethod
    def _hang_up(self) -> None:
        """Close the connection."""
