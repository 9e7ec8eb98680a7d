"""Responses of the server as frozen dataclasses; unknown members of newer servers are ignored.

The server's OpenAPI document is generated from the same classes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from pydantic import TypeAdapter, ValidationError

from retrieval.errors import printable

T = TypeVar("T")


class NotUnderstood(Exception):
    """The response does not match the /v1 API."""


@dataclass(frozen=True)
class Hit:
    """One search result; a smaller distance is closer."""

    id: str
    key: str
    label: str | None
    distance: float
    metadata: dict[str, Any]
    image_url: str | None
    thumbnail_url: str | None = None


def hit_table(hits: Iterable[Any]) -> str:
    """Return the hits of a query as a table: distance, label and id."""
    rows = [(f"{hit.distance:.4f}", printable(hit.label or ""), printable(hit.id)) for hit in hits]
    if not rows:
        return "no hits"
    rows.insert(0, ("distance", "label", "id"))
    first, second = (max(len(row[column]) for row in rows) for column in (0, 1))
    return "\n".join(f"{row[0]:>{first}}  {row[1]:{second}}  {row[2]}" for row in rows)


@dataclass(frozen=True, repr=False)
class Results:
    """Results of one search of a batch, nearest first; read as a list and printed as a table."""

    results: tuple[Hit, ...]

    def __len__(self) -> int:
        return len(self.results)

    def __iter__(self) -> Iterator[Hit]:
        return iter(self.results)

    def __getitem__(self, index: int) -> Hit:
        return self.results[index]

    def __repr__(self) -> str:
        return hit_table(self.results)


@dataclass(frozen=True, repr=False)
class SearchAnswer(Results):
    """Results of a search, and the server's time in milliseconds."""

    took_ms: float
    explain: dict[str, Any] | None = None


@dataclass(frozen=True)
class BatchAnswer:
    """Results of several searches, in the order of the queries."""

    answers: tuple[Results, ...]
    took_ms: float
    explain: dict[str, Any] | None = None


@dataclass(frozen=True)
class ItemAnswer:
    """An item with its original's size in bytes and pixels and, if requested, its vector."""

    id: str
    key: str
    label: str | None
    metadata: dict[str, Any]
    bytes: int | None
    width: int | None
    height: int | None
    keep: Literal["reference", "copy", "thumbnail", "nothing"]
    image_url: str | None
    thumbnail_url: str | None
    vector: tuple[float, ...] | None = None


@dataclass(frozen=True)
class Page:
    """One page of a list of items, and the cursor of the next page."""

    items: tuple[ItemAnswer, ...]
    cursor: str | None


@dataclass(frozen=True)
class PutAnswer:
    """Confirms that an item is on the server's disk, and whether it replaced another."""

    id: str
    replaced: bool


@dataclass(frozen=True)
class AddAnswer:
    """Confirms that items are on the server's disk: numbers of new and of replaced ones."""

    added: int
    replaced: int


@dataclass(frozen=True)
class Deleted:
    """Number of deleted items."""

    deleted: int


@dataclass(frozen=True)
class Snapshot:
    """Name of a snapshot in the operator's folder."""

    snapshot: str


@dataclass(frozen=True)
class Indexes:
    """Names of a server's indexes."""

    indexes: tuple[str, ...]


@dataclass(frozen=True)
class Problem:
    """Error description in the form of RFC 9457; `instance` is the request's id."""

    type: str
    title: str
    status: int
    detail: str
    instance: str


@dataclass(frozen=True)
class Input:
    """Input of the encoder: its kind, "image" or "features", and its shape."""

    kind: Literal["image", "features"]
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Limits:
    """Limits of a server: bytes and pixels per image, images and bytes per request."""

    bytes: int
    pixels: int
    batch: int
    batch_bytes: int


@dataclass(frozen=True)
class IndexAnswer:
    """Description of an index, and the role that the request's key has in it."""

    index: str
    name: str
    items: int
    bundle: str
    input: Input
    vector: int
    distance: str
    rescores: bool
    format: int
    limits: Limits
    generation: int | None = None
    generations: tuple[dict[str, Any], ...] | None = None
    bytes: int | None = None
    fields: tuple[str, ...] | None = None
    role: Literal["read", "write", "admin"] | None = None


def reader(answer: type[T]) -> Callable[[bytes], T]:
    """Return a function that parses JSON into `answer`, or raises `NotUnderstood`."""
    adapter = TypeAdapter(answer)

    def read(content: bytes) -> T:
        try:
            return adapter.validate_json(content)
        except ValidationError:
            raise NotUnderstood from None

    return read


read_search = reader(SearchAnswer)
read_batch = reader(BatchAnswer)
read_item = reader(ItemAnswer)
read_page = reader(Page)
read_put = reader(PutAnswer)
read_add = reader(AddAnswer)
read_deleted = reader(Deleted)
read_snapshot = reader(Snapshot)
read_index = reader(IndexAnswer)
