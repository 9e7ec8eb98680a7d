"""A server's answers as frozen dataclasses; unknown members, of a later server, are ignored.

The server describes its answers with them too, in its OpenAPI document.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from pydantic import TypeAdapter, ValidationError

T = TypeVar("T")


class NotUnderstood(Exception):
    """An answer that /v1 does not have."""


@dataclass(frozen=True)
class Hit:
    """An item that was found; smaller distance is closer."""

    id: str
    key: str
    label: str | None
    distance: float
    metadata: dict[str, Any]
    image_url: str | None
    thumbnail_url: str | None = None


@dataclass(frozen=True)
class SearchAnswer:
    """What a search found, nearest first, and the server's time in milliseconds."""

    results: tuple[Hit, ...]
    took_ms: float
    explain: dict[str, Any] | None = None


@dataclass(frozen=True)
class Results:
    """What one of several searches found, nearest first."""

    results: tuple[Hit, ...]


@dataclass(frozen=True)
class BatchAnswer:
    """What several searches found, in their order."""

    answers: tuple[Results, ...]
    took_ms: float
    explain: dict[str, Any] | None = None


@dataclass(frozen=True)
class ItemAnswer:
    """An item, its original's size in bytes and pixels, and its vector when asked for."""

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
    """Some items of a list, and the cursor of the next page."""

    items: tuple[ItemAnswer, ...]
    cursor: str | None


@dataclass(frozen=True)
class PutAnswer:
    """An item is on the server's disk, in the place of another or not."""

    id: str
    replaced: bool


@dataclass(frozen=True)
class AddAnswer:
    """Items are on the server's disk: how many are new, and how many took another's place."""

    added: int
    replaced: int


@dataclass(frozen=True)
class Deleted:
    """How many items are gone."""

    deleted: int


@dataclass(frozen=True)
class Snapshot:
    """The name of a copy in the operator's folder."""

    snapshot: str


@dataclass(frozen=True)
class Indexes:
    """The names of a server's indexes."""

    indexes: tuple[str, ...]


@dataclass(frozen=True)
class Problem:
    """Why a request failed, as RFC 9457 has it; `instance` is the request's id."""

    type: str
    title: str
    status: int
    detail: str
    instance: str


@dataclass(frozen=True)
class Input:
    """What the encoder takes: "image" or "features", and the shape of one."""

    kind: Literal["image", "features"]
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Limits:
    """A server's limits: bytes and pixels of an image, images and bytes of one request."""

    bytes: int
    pixels: int
    batch: int
    batch_bytes: int


@dataclass(frozen=True)
class IndexAnswer:
    """An index, what it holds, and what the request's sender may do with it."""

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
    """Return what reads an answer's JSON; it raises `NotUnderstood`."""
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
