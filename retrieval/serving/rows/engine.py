"""What an engine must do, so that a store can be made of it: keep rows, find them by conditions, keep one text, know one writer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, TypeAlias

from retrieval.serving.store.contract import Floats

RECORDS = "records"
"""The table of items, whatever generations there are; the others are called by `table_of`."""
ALIVE = 1 << 52
"""When a row dies that is alive: exact as a float64, too."""
ITEM, OUT, PIECE, FIELD = "item", "out", "piece", "field"
"""Kinds of rows: an item; one that a generation does without; a piece of bytes; the name of a field that items have had."""

Op: TypeAlias = Literal["<", "<=", ">", ">="]


@dataclass(frozen=True)
class Row:
    """What a table holds.

    Attributes:
        number: tells it from all rows of its table; rows of one item have one number in all tables.
        kind: see `ITEM`.
        born: the moment from which it counts.
        died: the moment from which it does not; `ALIVE` while that has not come.
        digest: 32 hexadecimal digits, by which rows are looked up.
        key: hexadecimal digits, by which rows are ordered.
        terms: what filters look for, 24 hexadecimal digits each.
        orders: texts of hexadecimal digits that filters compare, by name (`n`, `N`, `t` or `T`, and 24 digits).
        body: any text, which the engine only keeps.
        vectors: by name; of a table of vectors.
        part: 24 digits: the term of its value of `Engine.partition`; `LOOSE` where it has none, or several.
    """

    number: int
    kind: str
    born: int
    died: int
    digest: str
    key: str
    terms: tuple[str, ...] = ()
    orders: Mapping[str, str] = field(default_factory=dict)
    body: str = ""
    vectors: Mapping[str, Floats] = field(default_factory=dict)
    part: str = ""


@dataclass(frozen=True)
class Between:
    """A column from `least` to `most`, both included."""

    column: Literal["number", "born", "died"]
    least: int
    most: int


@dataclass(frozen=True)
class OneOf:
    """A column that has one of some values."""

    column: Literal["number", "kind", "digest"]
    values: tuple[Any, ...]


@dataclass(frozen=True)
class Has:
    """At least one of some terms; or none of them. With `path`, the terms are values of the field that has these digits."""

    terms: tuple[str, ...]
    negated: bool = False
    path: str = ""


@dataclass(frozen=True)
class Ordered:
    """A text of `Row.orders` compared, of a row that has it; without a name, the key."""

    name: str
    op: Op
    text: str


@dataclass(frozen=True)
class Every:
    """All of some conditions; without any, true."""

    parts: tuple[Condition, ...]


@dataclass(frozen=True)
class Either:
    """At least one of some conditions; without any, false."""

    parts: tuple[Condition, ...]


Condition: TypeAlias = "Between | OneOf | Has | Ordered | Every | Either"


class Engine(ABC):
    """Rows in tables, for one index. Its methods are called from several threads; those that write, by one at a time.

    Every method but `close` raises `StoreUnavailable` where the engine does not answer, after trying again in what is safe to repeat, which all of
    these are; and `TooSlow` at `stop_at()`. Where a method takes `seen`, it sees all that was written until a call returned that number.

    Attributes:
        text_bytes: the longest body, in bytes of UTF-8; None for any length.
        most_terms: the largest number of terms.
        orders_text: whether `Ordered` goes with the names that begin with `t` and `T`, and with the key.
        most_found: the most rows that `nearest` can find.
        structures: as `Store.structures`.
        partition: a field of metadata by whose values the engine keeps rows apart; empty for none.
    """

    partition: str = ""
    text_bytes: ClassVar[int | None] = None
    most_terms: ClassVar[int] = 4000
    orders_text: ClassVar[bool] = True
    most_found: ClassVar[int] = 1 << 31
    structures: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def head(self) -> str | None:
        """Return the text that `keep` kept last, never an older one; None where there is no index."""

    @abstractmethod
    def keep(self, head: str) -> None:
        """Put another text in the place of the head, at once or not at all; it is on the disk when this returns."""

    @abstractmethod
    def make(self) -> None:
        """Make the table `RECORDS`, empty; what is left of an index without a head goes."""

    @abstractmethod
    def make_table(
        self, table: str, widths: Mapping[str, int], structure: str, options: Mapping[str, Any]
    ) -> None:
        """Make an empty table of rows with vectors, in the place of one that is there.

        Args:
            table: its name: letters and digits.
            widths: numbers of each vector of a row, by name.
            structure: one of `structures`, or "flat".
            options: its parameters.
        """

    @abstractmethod
    def drop_table(self, table: str) -> None:
        """Delete a table; nothing where there is none."""

    @abstractmethod
    def drop(self) -> None:
        """Delete the head, then all tables; nothing where there are none."""

    def restructure(
        self, table: str, widths: Mapping[str, int], structure: str, options: Mapping[str, Any]
    ) -> None:
        """Search a table with another structure from now on; see `make_table`. Engines that name `structures` define it."""
        raise NotImplementedError(f"{type(self).__name__} names structures, so it must define restructure(…)")

    @abstractmethod
    def put(self, table: str, rows: Sequence[Row]) -> int:
        """Write rows, in the place of those with their numbers; return a number for `seen`."""

    @abstractmethod
    def end(self, table: str, where: Condition, moment: int, *, seen: int) -> int:
        """Let rows die at a moment; return a number for `seen`."""

    @abstractmethod
    def erase(self, table: str, where: Condition, *, seen: int) -> int:
        """Delete rows; return a number for `seen`."""

    @abstractmethod
    def fetch(self, table: str, where: Condition, *, seen: int, vectors: bool = False) -> list[Row]:
        """Return all rows that fulfil a condition, in any order."""

    @abstractmethod
    def page(self, table: str, where: Condition, after: str, limit: int, *, seen: int) -> list[Row]:
        """Return the first rows in the order of their keys, behind the key `after`, which may be empty, without vectors.

        Keys are distinct among the rows that fulfil the condition.
        """

    @abstractmethod
    def count(self, table: str, where: Condition, *, seen: int) -> int:
        """Return how many rows fulfil a condition."""

    @abstractmethod
    def nearest(
        self,
        table: str,
        vector: str,
        queries: Floats,
        count: int,
        where: Condition,
        *,
        seen: int,
        options: Mapping[str, Any],
    ) -> list[list[int]]:
        """Return the numbers of the rows nearest to each query (Q, width), by Euclidean distance, nearest first.

        `options` are those that the table's structure has now: such as `probes`, they may be of the search.
        """

    # One writer

    @abstractmethod
    def claim(self, text: str) -> bool:
        """Make a text the one that says who writes, if there is none; of several processes that claim at a time, one succeeds.

        Return whether this one did.
        """

    @abstractmethod
    def holder(self) -> str | None:
        """Return the text that says who writes; None where there is none."""

    @abstractmethod
    def renew(self, text: str) -> None:
        """Put a text in the place of the one that was claimed."""

    @abstractmethod
    def release(self) -> None:
        """Remove the text that says who writes; nothing where there is none."""

    @abstractmethod
    def close(self) -> None:
        """Let go of everything."""


def table_of(generation: int) -> str:
    """Return the name of a generation's table."""
    return f"g{generation}"
