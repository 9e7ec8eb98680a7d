"""What requests say: their bodies read within limits, as forms or JSON, and their options, with a sentence for what is wrong."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError
from starlette.datastructures import Headers, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import Request

from retrieval.errors import DataError
from retrieval.serving.files.strict_json import strict_loads
from retrieval.serving.filters import Filter, as_filter
from retrieval.serving.http.problems import RequestError
from retrieval.serving.http.settings import BODY_MEMORY, BODY_SECONDS

Kind = Literal["form", "json", "image"]

MAX_K = 1000
MAX_CANDIDATES = 10_000
MAX_FIELDS = 100
MAX_CONDITIONS, MAX_VALUES = 100, 1000
MAX_DELETED_IDS = 10_000
OPTIONS = ("k", "filter", "candidates", "fields", "explain")

_ENVELOPE = 65_536
"""Bytes of a form besides its images."""

_DRAINED = 4
"""Times its limit that a body is read and thrown away, so that its sender sees the answer."""


# Reading


class BodyMemory:
    """The bytes that the bodies of all requests under way take together; for the event loop."""

    def __init__(self) -> None:
        self.held = 0

    async def read(self, request: Request, limits: Mapping[Kind, int], types: str) -> Body:
        """Return a request's body; `release` gives its memory back.

        Args:
            request: whose body it is.
            limits: the largest content of each kind that is taken.
            types: the sentence for a body of another type.

        Raises:
            RequestError: 408, 413, 415 or 503: too slow, too large, of another type, or no memory is left.
        """
        content_type = request.headers.get("content-type", "")
        kind = _kind_of(content_type)
        if kind is None or kind not in limits:
            raise RequestError(415, types)
        limit = limits[kind] + (_ENVELOPE if kind == "form" else 0)
        parts: list[bytes] = []
        held = received = 0
        try:
            async with asyncio.timeout(BODY_SECONDS):
                async for chunk in request.stream():
                    received += len(chunk)
                    if received > _DRAINED * limit:
                        break
                    if received <= limit:
                        if self.held + len(chunk) > BODY_MEMORY:
                            sentence = (
                                "The server is busy: uploads take all its memory. Try again in a moment."
                            )
                            raise RequestError(503, sentence, "memory")
                        self.held += len(chunk)
                        held += len(chunk)
                        parts.append(chunk)
            if received > limit:
                raise RequestError(413, f"The request is too large; the limit is {limits[kind]:,} bytes.")
        except TimeoutError:
            self.held -= held
            raise RequestError(
                408, f"The request took longer than {BODY_SECONDS:g} seconds to arrive."
            ) from None
        except BaseException:
            self.held -= held
            raise
        return Body(kind, content_type, parts[0] if len(parts) == 1 else b"".join(parts))

    def release(self, body: Body) -> None:
        """Give a body's memory back."""
        self.held -= len(body.content)


class Body(NamedTuple):
    """A request's body: its kind, the header that says so, and its bytes."""

    kind: Kind
    content_type: str
    content: bytes


def _kind_of(content_type: str) -> Kind | None:
    kind = content_type.partition(";")[0].strip().lower()
    if kind == "multipart/form-data":
        return "form"
    if kind == "application/json":
        return "json"
    return "image" if kind.startswith("image/") or kind == "application/octet-stream" else None


class _Parser(MultiPartParser):
    """Starlette's, which knows whether the form's end came."""

    ended = False

    def on_end(self) -> None:
        """Note the end."""
        self.ended = True


class Form:
    """The fields of a form, and nothing else.

    Args:
        body: `multipart/form-data`.
        fields: names of fields that the form may have besides images.
        max_bytes: of an image.
        max_images: files that its field `image` may hold.

    Attributes:
        images: the content of each file in the field `image`, in order.

    Raises:
        RequestError: the body is no form, has other fields, or one of them too often.
    """

    def __init__(self, body: Body, fields: Sequence[str], max_bytes: int, max_images: int = 1) -> None:
        self.images: list[bytes] = []
        self._values: dict[str, str] = {}
        for name, value in self._parts(body, max_images, len(fields)):
            if isinstance(value, str):
                if name == "image":
                    raise RequestError(400, 'The form needs a file in its field "image".')
                if name not in fields:
                    names = ", ".join(f'"{known}"' for known in ("image", *fields))
                    raise RequestError(400, f"The form has an unknown field; it takes {names}.")
                if name in self._values:
                    raise RequestError(400, f'The form repeats its field "{name}".')
                self._values[name] = value
            elif name != "image":
                sentence = 'The form needs a file in its field "image", and takes no other file.'
                raise RequestError(400, sentence)
            else:
                content = value.file.read()
                if len(content) > max_bytes:
                    sentence = (
                        f"The image has {len(content):,} bytes; the limit is {max_bytes:,} (--max-bytes)."
                    )
                    raise RequestError(413, sentence)
                self.images.append(content)
        if not self.images:
            raise RequestError(400, 'The form needs a file in its field "image".')

    @staticmethod
    def _parts(body: Body, max_images: int, max_fields: int) -> list[tuple[str, str | UploadFile]]:
        async def stream() -> AsyncIterator[bytes]:
            yield body.content

        headers = Headers({"content-type": body.content_type})
        parser = _Parser(
            headers, stream(), max_files=max_images, max_fields=max_fields + 1, max_part_size=_ENVELOPE
        )
        parser.spool_max_size = len(body.content) + 1  # nothing of it is written to a disk
        reason = "its end is missing"
        try:
            parser.parse().send(None)  # all of the body is here, so that it ends without waiting
        except StopIteration as done:
            parts: list[tuple[str, str | UploadFile]] = done.value.multi_items()
            if parser.ended:
                return parts
        except MultiPartException as error:
            if error.message.startswith("Too many files"):
                few = "one" if max_images == 1 else f"{max_images:,} at most"
                raise RequestError(400, f'Too many files: give {few}, in the field "image".') from None
            reason = error.message.rstrip(".")
        except UnicodeError:
            reason = "a field is not text of its charset"
        raise RequestError(400, f"The form cannot be read: {reason}.")

    def get(self, name: str) -> str | None:
        """Return a field's text; None where there is none."""
        return self._values.get(name)


# JSON

Vector = Annotated[list[Annotated[float, Field(allow_inf_nan=False)]], Field(min_length=1)]
ItemId = Annotated[str, Field(min_length=1, max_length=1000)]
FilterForm = str | dict[str, JsonValue]
Keep = Literal["copy", "thumbnail", "nothing"]

_FILTER = "text or an object"
_VECTOR = "a list of finite numbers"


class JsonBody(BaseModel):
    """A JSON object that a request holds; `shape` is the sentence for one of another shape."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)
    shape: ClassVar[str] = ""

    @classmethod
    def of(cls, content: object) -> Self:
        """Return what a JSON value says.

        Raises:
            RequestError: 400, it says something else; names the fields that are wrong.
        """
        try:
            return cls.model_validate(content)
        except ValidationError as error:
            problems = error.errors(include_url=False, include_context=False, include_input=False)
        sentences = (_sentence(cls, each["type"], each["loc"]) for each in problems[:3])
        raise RequestError(400, " ".join(dict.fromkeys(sentences)))


class Options(JsonBody):
    """How to search."""

    k: Annotated[int, Field(ge=1, le=MAX_K, description="a whole number from 1 to 1000")] = 10
    filter: Annotated[FilterForm | None, Field(description=_FILTER)] = None
    candidates: Annotated[
        int | None, Field(ge=1, le=MAX_CANDIDATES, description="a whole number from 1 to 10000")
    ] = None
    fields: Annotated[
        list[str] | None, Field(max_length=MAX_FIELDS, description="a list of at most 100 names")
    ] = None
    explain: Annotated[bool, Field(description="true or false")] = False


class GivenBody(JsonBody):
    """One of several queries."""

    shape = 'A query must be {"vector": [numbers]} or {"id": "the id of an item"}.'

    vector: Annotated[Vector | None, Field(description=_VECTOR)] = None
    id: Annotated[ItemId | None, Field(description="the id of an item")] = None


class SearchBody(Options, GivenBody):
    """A search with a vector, or with an item of the index."""

    shape = (
        'JSON must be {"vector": [numbers], "k": 10, "filter": {"label": "shoe"}}, or "id" in the place of "vector"; '
        "see /v1/openapi.json for all fields."
    )


class BatchBody(Options):
    """Several searches."""

    shape = (
        'JSON must be {"queries": [{"vector": [numbers]}, {"id": "an item"}], "k": 10}; '
        "see /v1/openapi.json for all fields."
    )

    queries: Annotated[list[GivenBody], Field(min_length=1, description="a list of queries")]


class ItemChangeBody(JsonBody):
    """What of an item is to be changed; what is not named stays."""

    shape = 'JSON must be {"label": "shoe", "metadata": {"price": 20}}; what is left out stays as it is.'

    label: Annotated[str | None, Field(description="text, or null for none")] = None
    metadata: Annotated[dict[str, JsonValue], Field(description="an object")] = {}


class ItemBody(ItemChangeBody):
    """What an item is to be."""

    shape = (
        'JSON must be {"vector": [numbers], "label": "shoe", "metadata": {"price": 20}}. PUT replaces an item as a '
        "whole; PATCH changes its label or metadata."
    )

    vector: Annotated[Vector, Field(description=_VECTOR)]


class NamedItemBody(ItemChangeBody):
    """What one of several items is to be. Without a vector the item is there, and what is not named stays."""

    shape = (
        'An item must be {"id": "its id", "vector": [numbers], "label": "shoe", "metadata": {"price": 20}}.'
    )

    id: Annotated[ItemId, Field(description="text of 1 to 1,000 characters")]
    vector: Annotated[Vector | None, Field(description=_VECTOR)] = None


class ItemsBody(JsonBody):
    """Several items."""

    shape = 'JSON must be {"items": [{"id": "its id", "vector": [numbers]}]}.'

    items: Annotated[list[NamedItemBody], Field(min_length=1, description="a list of items")]


class DeleteBody(JsonBody):
    """Which items to delete: one of the three."""

    shape = 'JSON must be one of {"ids": ["an id"]}, {"filter": {"label": "shoe"}} and {"all": true}.'

    ids: Annotated[
        list[ItemId] | None,
        Field(min_length=1, max_length=MAX_DELETED_IDS, description="a list of 1 to 10,000 ids"),
    ] = None
    filter: Annotated[FilterForm | None, Field(description=_FILTER)] = None
    all: Annotated[Literal[True] | None, Field(description="true")] = None


_ENTRIES: Mapping[str, type[JsonBody]] = {"queries": GivenBody, "items": NamedItemBody}


def _sentence(model: type[JsonBody], kind: str, place: tuple[int | str, ...]) -> str:
    """Return the sentence for one fault that pydantic found."""
    where = ""
    if len(place) > 2 and place[0] in _ENTRIES:
        where, model, place = f'"{place[0]}", entry {place[1]}: ', _ENTRIES[str(place[0])], place[2:]
    field = model.model_fields.get(str(place[0])) if place else None
    whole = kind in ("extra_forbidden", "missing") and len(place) == 1
    if field is None or whole:
        return where + model.shape
    return f'{where}"{place[0]}" must be {field.description}.'


def loads(text: bytes | str, sentence: str) -> Any:
    """Return what a JSON text says: no key twice, 64 levels at most.

    Raises:
        RequestError: 400, with the sentence.
    """
    try:
        return strict_loads(text, finite=False)
    except (ValueError, RecursionError):
        raise RequestError(400, sentence) from None


def json_of(body: Body) -> Any:
    """Return what a JSON body says.

    Raises:
        RequestError: 400, it is not JSON.
    """
    return loads(body.content, "The request is not JSON.")


# Options as text


def filter_of(given: str | Mapping[str, Any] | None) -> Filter | None:
    """Return a filter from its text or its JSON form.

    Raises:
        RequestError: 400, it is none, or too large for a server.
    """
    try:
        found = as_filter(given)
    except DataError as error:
        raise RequestError(400, str(error)) from None
    if found and (found.size.conditions > MAX_CONDITIONS or found.size.values > MAX_VALUES):
        sentence = f"The filter is too large: the server takes {MAX_CONDITIONS} conditions and {MAX_VALUES:,} values."
        raise RequestError(400, sentence)
    return found


def filter_form(text: str) -> Any:
    """Return the filter that a form or an address gives: as text, or as JSON, which begins with a brace."""
    if text.lstrip().startswith("{"):
        return loads(text, 'The filter is not JSON, though it begins with "{".')
    return text if text.strip() else None


def names_form(text: str) -> Any:
    """Return the names that a form or an address gives: a JSON list, or divided by commas."""
    if text.lstrip().startswith("["):
        return loads(text, '"fields" is not JSON, though it begins with "[".')
    return [name.strip() for name in text.split(",")] if text.strip() else []


def number_form(text: str) -> int | str:
    """Return a number from its digits; what is none stays text, for the model to refuse."""
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 9 else text


def truth_form(text: str) -> bool | str:
    """Return true or false from its word; what is neither stays text, for the model to refuse."""
    return {"true": True, "false": False}.get(text, text)


_READ: Mapping[str, Callable[[str], Any]] = {
    "k": number_form,
    "filter": filter_form,
    "candidates": number_form,
    "fields": names_form,
    "explain": truth_form,
}


def options_of(get: Callable[[str], str | None]) -> Options:
    """Return how to search, from a form's fields or an address's parameters.

    Args:
        get: returns a field's text, or None.

    Raises:
        RequestError: 400, one of them is not what it should be.
    """
    texts = {name: get(name) for name in OPTIONS}
    return Options.of({name: _READ[name](text) for name, text in texts.items() if text is not None})


# Queries and items


class Given(NamedTuple):
    """One thing that is searched for: an encoded image's bytes, a vector, or the id of an item."""

    image: bytes | None = None
    vector: NDArray[np.float64] | None = None
    id: str | None = None


class Query(NamedTuple):
    """What is searched for, and how.

    Attributes:
        given: one, or several.
        options: how many answers, which fields, whether to explain.
        where: which items.
    """

    given: tuple[Given, ...]
    options: Options
    where: Filter | None


def query_of(body: Body, parameters: Mapping[str, str], max_bytes: int) -> Query:
    """Return the one search of a body; for a thread.

    Args:
        body: of the request.
        parameters: of the address, which stand for a form's fields where the image is the whole body.
        max_bytes: of an image.

    Raises:
        RequestError: 400, the body is not what it should be.
    """
    if body.kind == "image":
        return _query([Given(body.content)], options_of(parameters.get))
    if body.kind == "form":
        form = Form(body, OPTIONS, max_bytes)
        return _query([Given(form.images[0])], options_of(form.get))
    said = SearchBody.of(json_of(body))
    return _query([_given(said, SearchBody.shape)], said)


def batch_of(body: Body, most: int, max_bytes: int) -> Query:
    """Return the searches of a body; for a thread.

    Raises:
        RequestError: 400, the body is not what it should be, or the searches are too many.
    """
    if body.kind == "form":
        form = Form(body, OPTIONS, max_bytes, most)
        return _query([Given(image) for image in form.images], options_of(form.get))
    said = BatchBody.of(json_of(body))
    if len(said.queries) > most:
        raise RequestError(400, f"The request has {len(said.queries):,} queries; {most:,} are the most.")
    return _query([_given(one, GivenBody.shape) for one in said.queries], said)


def _given(one: SearchBody | GivenBody, shape: str) -> Given:
    if (one.vector is None) == (one.id is None):
        raise RequestError(400, shape)
    return Given(id=one.id) if one.vector is None else Given(vector=np.array(one.vector, np.float64))


def _query(given: Sequence[Given], options: Options) -> Query:
    return Query(tuple(given), options, filter_of(options.filter))


class NewItem(NamedTuple):
    """What an item is to be. Without image and vector it is there already, and changes only in what `named` lists."""

    id: str
    label: str | None = None
    metadata: Mapping[str, Any] = {}
    image: bytes | None = None
    vector: Sequence[float] | None = None
    keep: Keep = "copy"
    named: frozenset[str] = frozenset()


def changed_item(id: str, body: Body) -> NewItem:
    """Return what PATCH makes of an item; for a thread.

    Raises:
        RequestError: 400, the body is not what it should be.
    """
    said = ItemChangeBody.of(json_of(body))
    return NewItem(id, said.label, said.metadata, named=frozenset(said.model_fields_set))


def put_item(id: str, body: Body, max_bytes: int) -> NewItem:
    """Return what PUT makes of an item; for a thread.

    Raises:
        RequestError: 400, the body is not what it should be.
    """
    if body.kind == "json":
        said = ItemBody.of(json_of(body))
        return NewItem(id, said.label, said.metadata, vector=said.vector)
    form = Form(body, ("label", "metadata", "keep"), max_bytes)
    metadata = loads(form.get("metadata") or "{}", '"metadata" must be a JSON object.')
    if not isinstance(metadata, dict):
        raise RequestError(400, '"metadata" must be a JSON object.')
    keep: Any = form.get("keep") or "copy"
    if keep not in ("copy", "thumbnail", "nothing"):
        raise RequestError(400, '"keep" must be copy, thumbnail or nothing.')
    return NewItem(id, form.get("label"), metadata, form.images[0], None, keep)


def several_items(body: Body, most: int, max_bytes: int) -> list[NewItem]:
    """Return the items of a body; for a thread.

    Raises:
        RequestError: 400, the body is not what it should be.
    """
    if body.kind == "json":
        said = ItemsBody.of(json_of(body)).items
        images: list[bytes | None] = [None] * len(said)
    else:
        form = Form(body, ("items",), max_bytes, most)
        listed = loads(form.get("items") or "[]", 'The field "items" is not JSON.')
        said, images = ItemsBody.of({"items": listed}).items, [*form.images]
        if len(said) != len(images) or any(one.vector is not None for one in said):
            raise RequestError(
                400,
                f'The field "items" must list what each of the {len(images)} images is, in their order, without vectors.',
            )
    if len(said) > most:
        raise RequestError(400, f"The request has {len(said):,} items; {most:,} are the most.")
    if len({one.id for one in said}) < len(said):
        raise RequestError(400, "The request names an id twice.")
    return [
        NewItem(one.id, one.label, one.metadata, image, one.vector, named=frozenset(one.model_fields_set))
        for one, image in zip(said, images, strict=True)
    ]
