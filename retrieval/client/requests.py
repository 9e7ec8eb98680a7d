"""What is sent to a server: one `Call` for each thing that it can be asked, for both clients."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypedDict, TypeVar
from urllib.parse import quote

from retrieval.client import answers
from retrieval.client.images import image_bytes
from retrieval.errors import DataError

if TYPE_CHECKING:
    from retrieval.client.images import Image

T = TypeVar("T")

Filter = str | Mapping[str, Any]
"""Which items, as text or as JSON: `"price < 20"`, `{"price": {"<": 20}}`."""


class SearchOptions(TypedDict, total=False):
    """How to search: how many answers (10), only which items, candidates for the rescorer, which metadata, whether to explain."""

    k: int
    filter: Filter | None
    candidates: int | None
    fields: Sequence[str] | None
    explain: bool


@dataclass(frozen=True)
class NewItem:
    """What an item is to be: of an image, of a vector (P numbers), or, with neither, an item that is there, with another label and metadata."""

    id: str
    image: Image | None = None
    vector: Iterable[float] | None = None
    label: str | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Call(Generic[T]):
    """A request that may be sent more than once.

    Attributes:
        method: of HTTP.
        path: below the index's own.
        read: makes the answer of its body.
        repeats: whether it may be sent again when nobody knows what came of it.
        gone_is_done: whether a repetition that finds nothing has done what was asked for.
        seconds: to wait for the answer, in the place of the client's time-outs.
        content: `params`, `data`, `files`, `content` and `headers`, as httpx takes them.
    """

    method: str
    path: str
    read: Callable[[bytes], T]
    repeats: bool = True
    gone_is_done: bool = False
    seconds: float | None = None
    content: Mapping[str, Any] = field(default_factory=dict)


def search(
    image: Image | None, vector: Iterable[float] | None, id: str | int | None, options: SearchOptions
) -> Call[answers.SearchAnswer]:
    """Ask for the neighbours of one thing."""
    if sum(one is not None for one in (image, vector, id)) != 1:
        raise DataError("A search takes an image, a vector or an id: one of them.")
    if image is not None:
        content = _form([image_bytes(image)], _texts(options))
    else:
        given = {"id": id} if vector is None else {"vector": _numbers(vector)}
        content = _json({**given, **options})
    return Call("POST", "/search", answers.read_search, content=content)


def search_batch(
    images: Iterable[Image],
    vectors: Iterable[Iterable[float]],
    ids: Iterable[str | int],
    options: SearchOptions,
) -> Call[answers.BatchAnswer]:
    """Ask for the neighbours of several things of one kind."""
    pictures = [image_bytes(image) for image in images]
    queries: list[dict[str, Any]] = [{"vector": _numbers(vector)} for vector in vectors]
    named = [{"id": id} for id in ids]
    if sum(map(bool, (pictures, queries, named))) != 1:
        raise DataError("A batch takes images, vectors or ids: some of one of them.")
    if pictures:
        content = _form(pictures, _texts(options))
    else:
        content = _json({"queries": queries or named, **options})
    return Call("POST", "/search/batch", answers.read_batch, content=content)


def put(item: NewItem, keep: str | None) -> Call[answers.PutAnswer]:
    """Add or replace an item."""
    if item.image is not None and item.vector is not None:
        raise DataError("An item takes an image or a vector, not both.")
    if item.image is not None:
        said = {"label": item.label, "metadata": _dumps(dict(item.metadata)), "keep": keep}
        told = {name: text for name, text in said.items() if text is not None}
        content = _form([image_bytes(item.image)], told)
    elif keep is not None:
        raise DataError('"keep" says what is kept of an image; the item has none.')
    else:
        content = _json(_described(item, named=False))
    return Call("PUT", "/item", answers.read_put, content={**content, **_id(item.id)})


def add(items: Iterable[NewItem], key: str | None) -> Call[answers.AddAnswer]:
    """Add or replace several items, all of them or none, under a key that lets the request be repeated."""
    items = list(items)
    pictures = [image_bytes(item.image) for item in items if item.image is not None]
    if not items or len(pictures) not in (0, len(items)):
        raise DataError(
            "Give one item at least; and of the items of one request all have images, or none has."
        )
    if pictures and any(item.vector is not None for item in items):
        raise DataError("An item takes an image or a vector, not both.")
    described = [_described(item, named=True) for item in items]
    content = _form(pictures, {"items": _dumps(described)}) if pictures else _json({"items": described})
    headers = {**content.get("headers", {}), "Idempotency-Key": key or str(uuid.uuid4())}
    return Call("POST", "/items", answers.read_add, content={**content, "headers": headers})


def get(id: str | int, vector: bool) -> Call[answers.ItemAnswer]:
    """Ask for an item."""
    content = _id(id, **({"vector": "true"} if vector else {}))
    return Call("GET", "/item", answers.read_item, content=content)


def page(
    filter: Filter | None, fields: Sequence[str] | None, limit: int, cursor: str | None
) -> Call[answers.Page]:
    """Ask for a page of items."""
    said = _texts({"filter": filter, "fields": fields}) | {"limit": str(limit)}
    params = said if cursor is None else said | {"cursor": cursor}
    return Call("GET", "/items", answers.read_page, content={"params": params})


def delete(id: str) -> Call[None]:
    """Delete an item."""
    return Call("DELETE", "/item", lambda content: None, gone_is_done=True, content=_id(id))


def delete_where(filter: Filter) -> Call[int]:
    """Delete all that match; never repeated, since other items may match by then."""
    content = _json({"filter": filter})
    return Call("POST", "/delete", lambda said: answers.read_deleted(said).deleted, False, content=content)


def picture(id: str | int, kind: str) -> Call[bytes]:
    """Ask for an item's image or thumbnail."""
    return Call("GET", f"/item/{kind}", lambda content: content, content=_id(id))


def index() -> Call[answers.IndexAnswer]:
    """Ask what the index is."""
    return Call("GET", "/index", answers.read_index)


def snapshot(seconds: float) -> Call[str]:
    """Have a snapshot written."""
    return Call(
        "POST",
        "/snapshots",
        lambda said: answers.read_snapshot(said).snapshot,
        repeats=False,
        seconds=seconds,
    )


def path_of(index: str | None) -> str:
    """Return where an index's routes are."""
    return "/v1" if index is None else f"/v1/indexes/{quote(index, safe='')}"


def _described(item: NewItem, *, named: bool) -> dict[str, Any]:
    said: dict[str, Any] = {"id": item.id} if named else {}
    if item.label is not None:
        said["label"] = item.label
    if item.metadata:
        said["metadata"] = dict(item.metadata)
    if item.vector is not None:
        said["vector"] = _numbers(item.vector)
    return said


def _id(id: str | int, **others: str) -> dict[str, Any]:
    if str(id) == "":
        raise DataError("An id has one character at least.")
    return {"params": {"id": str(id), **others}}


def _texts(options: Mapping[str, Any]) -> dict[str, str]:
    """Return options as fields of a form or parameters of an address."""
    return {
        name: value if isinstance(value, str) else _dumps(value)
        for name, value in options.items()
        if value is not None
    }


def _form(images: Sequence[bytes], fields: Mapping[str, str]) -> dict[str, Any]:
    return {"files": [("image", ("image", content)) for content in images], "data": fields}


def _json(said: Mapping[str, Any]) -> dict[str, Any]:
    try:
        content = _dumps(said).encode()
    except UnicodeEncodeError:
        raise DataError("Text that is sent must be Unicode without lone surrogates.") from None
    return {"content": content, "headers": {"Content-Type": "application/json"}}


def _dumps(said: object) -> str:
    try:
        return json.dumps(said, ensure_ascii=False, allow_nan=False, default=_plain)
    except (TypeError, ValueError, RecursionError) as fault:
        raise DataError(f"This cannot be sent as JSON: {fault}.") from None


def _plain(value: object) -> object:
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"it holds a {type(value).__name__}")


def _numbers(vector: Iterable[float]) -> list[float]:
    try:
        return [float(number) for number in vector]
    except (TypeError, ValueError):
        raise DataError("A vector is a sequence of numbers.") from None
