"""Calls to a database engine such as Milvus: what a store is made of, and how often it is tried."""

from __future__ import annotations

import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

from retrieval.errors import StoreError
from retrieval.store.contract import Store, StoreUnavailable, TooSlow, stop_at
from retrieval.store.filters.tree import Field, Joint
from retrieval.store.items import Floats, Generation

from retrieval_engines.register import RegisterContent
from retrieval_engines.rows import Row

# The engines' numbers are float64, which represents smaller integers exactly.
EXACT = 1 << 53
Conditions = Sequence[Any]


class EngineCalls(Store):
    """Calls to an engine; see `RemoteStore`.

    A subclass implements the abstract methods, whose names begin with `_`. These methods take
    `conditions` as a list in the engine's form; all of them must hold.

    Args:
        client: the engine's client.
        address: address of the index, for messages.
        name: name of the index in the engine, which is the name of its alias.
        timeout: time limit of one request in seconds, including retries.
        exact: whether to search exactly, and not in a graph.

    Attributes:
        engine: name of the engine, for messages.
        errors: exceptions that the engine's client raises.
        separator: text between the parts of a collection's name; no index name contains it.
        most_found: maximum number of items that the engine returns for one search.
    """

    engine: ClassVar[str]
    errors: ClassVar[tuple[type[Exception], ...]]
    separator = "__"
    most_found = 1 << 31

    def __init__(
        self, client: Any, address: str, name: str, timeout: float = 30.0, exact: bool = True
    ) -> None:
        self._client = client
        self._exact = exact
        self.address = address
        self.name = name
        self.timeout = timeout
        # Prefix of the names of this index's collections.
        self._prefix = ""
        self._turn = threading.RLock()
        self._closed = False

    # What a subclass implements

    @abstractmethod
    def _explain_error(self, error: Exception) -> tuple[bool, str]:
        """Return whether an error means that the engine is unreachable, and a sentence on it."""

    @abstractmethod
    def _collections(self) -> Iterable[str]:
        """Return the names of all collections on the server."""

    @abstractmethod
    def _delete_collection(self, name: str) -> None:
        """Delete a collection."""

    @abstractmethod
    def _aliased_collection(self) -> str | None:
        """Return the name of the collection that the alias names, or None without an alias."""

    @abstractmethod
    def _move_alias(self, number: int | None) -> None:
        """Move the alias atomically to a generation's collection; None removes the alias."""

    @abstractmethod
    def _create_collection(self, generation: Generation) -> None:
        """Create the collection of a generation or of the register."""

    @abstractmethod
    def _write_notes(self, notes: Mapping[str, Any]) -> None:
        """Write notes to the register; a note replaces an earlier note of the same name."""

    @abstractmethod
    def _read_notes(self) -> dict[str, Any]:
        """Return all notes by name; values may be None."""

    @abstractmethod
    def _write_rows(self, generation: Generation, rows: Sequence[Row]) -> None:
        """Write rows; a row replaces an earlier row of the same id."""

    @abstractmethod
    def _delete_rows(self, generation: Generation, ids: Sequence[str]) -> None:
        """Delete rows by id."""

    @abstractmethod
    def _read_rows(
        self, generation: Generation, ids: Sequence[str], arrays: bool = False
    ) -> list[Row]:
        """Return rows by id, in any order."""

    @abstractmethod
    def _read_page(
        self, generation: Generation, conditions: Conditions, after: str | None, limit: int
    ) -> list[Row]:
        """Return up to `limit` rows after an id, without arrays, in a stable order."""

    @abstractmethod
    def _count_rows(self, generation: Generation, conditions: Conditions) -> int:
        """Return the number of rows that match."""

    @abstractmethod
    def _nearest_ids(
        self,
        generation: Generation,
        space: int,
        queries: Floats,
        count: int,
        conditions: Conditions,
    ) -> list[list[str]]:
        """Return, for each query (Q, width), the ids of the `count` nearest rows in a sub-space."""

    @abstractmethod
    def _join_conditions(self, joint: Joint, parts: Sequence[Any]) -> Any:
        """Combine conditions with and, or or not; "not" has one part."""

    @abstractmethod
    def _condition(self, field: Field, op: str, values: Sequence[Any]) -> Any | None:
        """Return the engine's condition that `field op value` holds for any of the values.

        Args:
            field: "id", "label" or a path of names in the metadata.
            op: "=", "!=", "<", "<=", ">", ">=" or "exists"; all but "=" have one value, and
                "exists" has none.
            values: strings, numbers, True, False or None.

        Returns:
            The condition, or None if the engine would decide differently from `matches`.
        """

    def _check_sizes(self, rows: Sequence[Row]) -> None:
        """Raise a `DataError` if a row is too long for the engine."""

    def _time_limit(self, seconds: float) -> dict[str, Any]:
        """Return the client's keyword arguments that limit one request to `seconds`."""
        return {}

    def _writing(self) -> AbstractContextManager[object]:
        """Return a context of calls that write; it may be entered again inside itself.

        An "atomic" store makes it a transaction that excludes other writers. Here it only excludes
        other threads.
        """
        return self._turn

    def _reading(self) -> AbstractContextManager[object]:
        """Return a context of calls that read; an "atomic" store reads one state inside it."""
        return nullcontext()

    def _may_retry(self) -> bool:
        """Return whether a request that failed may be sent again: not inside a transaction."""
        return True

    def _size(self, register: RegisterContent) -> int | None:
        """Return the disk space of the index in bytes, or None if the engine does not tell."""
        return None

    # Requests

    def collection(self, number: int) -> str:
        """Return the name of the collection of generation `number`; 0 is the register."""
        # Fixed width, so that no name is a prefix of another.
        return f"{self._prefix}{number:06}"

    def _request(self, method: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        """Call a method of the client; retry it for up to `timeout` seconds.

        Unless `_may_retry` says otherwise, every request may be sent twice without harm.
        """
        give_up = time.monotonic() + self.timeout
        pause = 0.05
        while True:
            now = time.monotonic()
            if self._closed:
                raise self._closed_error()
            if now > stop_at():
                raise self._slow_error()
            try:
                left = min(give_up, stop_at()) - now
                return method(*arguments, **named, **self._time_limit(max(0.5, left)))
            except Exception as error:
                # A client that is closed meanwhile may raise any error.
                if self._closed:
                    raise self._closed_error() from None
                if not isinstance(error, self.errors):
                    raise
                unreachable, sentence = self._explain_error(error)
                if not unreachable:
                    raise StoreError(f"{self.address}: {self.engine} refuses: {sentence}") from None
                if time.monotonic() > stop_at():
                    raise self._slow_error() from None
                if time.monotonic() + pause > give_up or not self._may_retry():
                    raise StoreUnavailable(
                        f"{self.engine} does not answer for {self.address}: {sentence} Try again in"
                        " a moment."
                    ) from None
            time.sleep(pause)
            pause = min(2 * pause, 2.0)

    def _slow_error(self) -> TooSlow:
        return TooSlow(f"A call to {self.address} takes too long. Request less.")

    def _closed_error(self) -> StoreError:
        return StoreError(
            f"The index {self.address} was closed. Open it again with retrieval.Index.open."
        )


def one_line(message: object) -> str:
    """Return an engine's message as one line of limited length, without a full stop."""
    return " ".join(str(message).split())[:300].rstrip(".")
