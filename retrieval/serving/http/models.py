"""Pydantic models of requests: options, queries and items from JSON, forms and URL parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError, model_validator

from retrieval.errors import DataError
from retrieval.serving.files.strict_json import strict_loads
from retrieval.serving.filters import Filter, as_filter
from retrieval.serving.http.bodies import Body, read_form
from retrieval.serving.http.problems import RequestError

SEARCH_TYPES = (
    'Send multipart/form-data with a field "image", the image itself as image/… or'
    ' application/octet-stream, or application/json with {"vector": [...]}.'
)
BATCH_TYPES = (
    'Send multipart/form-data with files in the field "image", or application/json with {"queries":'
    " [...]}."
)
PUT_TYPES = (
    'Send multipart/form-data with a field "image", or application/json with {"vector": [...]}.'
)
PATCH_TYPES = 'Send application/json with {"label": "shoe", "metadata": {"price": 20}}.'
ADD_TYPES = (
    'Send multipart/form-data with files in the field "image" and their JSON in the field "items", '
    'or application/json with {"items": [...]}.'
)

MAX_K = 1000
MAX_CANDIDATES = 10_000
MAX_PAGE = 1000
MAX_FIELDS = 100
MAX_CONDITIONS, MAX_VALUES = 100, 1000
MAX_DELETED_IDS = 10_000
OPTIONS = ("k", "filter", "candidates", "fields", "explain")

Vector = Annotated[list[Annotated[float, Field(allow_inf_nan=False)]], Field(min_length=1)]
ItemId = Annotated[str, Field(min_length=1, max_length=1000)]
FilterForm = Annotated[str | dict[str, JsonValue] | None, Field(description="text or an object")]
Names = Annotated[
    list[str] | None, Field(max_length=MAX_FIELDS, description="a list of at most 100 names")
]
Keep = Literal["copy", "thumbnail", "nothing"]

_VECTOR = "a list of finite numbers"


class JsonBody(BaseModel):
    """A JSON object of a request, or its form fields or URL parameters."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)
    one_of: ClassVar[tuple[str, ...]] = ()
    """Mutually exclusive members; a request must have exactly one."""

    @model_validator(mode="after")
    def _has_one(self) -> Self:
        if self.one_of and sum(getattr(self, name) is not None for name in self.one_of) != 1:
            raise ValueError("give one")
        return self

    @classmethod
    def of(cls, content: object) -> Self:
        """Return the body of a JSON value.

        Raises:
            RequestError: 400; the message names the first three invalid members.
        """
        try:
            return cls.model_validate(content)
        except ValidationError as error:
            problems = error.errors(include_url=False, include_context=False, include_input=False)
        sentences = (_sentence(cls, problem["type"], problem["loc"]) for problem in problems[:3])
        raise RequestError(400, " ".join(dict.fromkeys(sentences)))

    @classmethod
    def of_texts(cls, texts: Mapping[str, str]) -> Self:
        """Return the body of form fields or URL parameters; see `of`."""
        return cls.of({name: _FROM_TEXT.get(name, str)(text) for name, text in texts.items()})


class Options(JsonBody):
    """Options of a search."""

    k: Annotated[int, Field(ge=1, le=MAX_K, description="a whole number from 1 to 1000")] = 10
    filter: FilterForm = None
    candidates: Annotated[
        int | None, Field(ge=1, le=MAX_CANDIDATES, description="a whole number from 1 to 10000")
    ] = None
    fields: Names = None
    explain: Annotated[bool, Field(description="true or false")] = False


class QueryBody(JsonBody):
    """One query of a batch."""

    one_of = ("vector", "id")

    vector: Annotated[Vector | None, Field(description=_VECTOR)] = None
    id: Annotated[ItemId | None, Field(description="the id of an item")] = None

    def input(self) -> QueryInput:
        """Return the vector or item id to search with."""
        return (
            QueryInput(id=self.id)
            if self.vector is None
            else QueryInput(vector=np.array(self.vector, np.float64))
        )


class SearchBody(Options, QueryBody):
    """A search with a vector or with an item of the index."""


class BatchBody(Options):
    """Several searches."""

    queries: Annotated[list[QueryBody], Field(min_length=1, description="a list of queries")]


class ListParameters(JsonBody):
    """Parameters of a list of items: filter, fields and page."""

    cursor: str | None = None
    limit: Annotated[int, Field(ge=1, le=MAX_PAGE, description="a whole number from 1 to 1000")] = (
        100
    )
    filter: FilterForm = None
    fields: Names = None


class ItemChangeBody(JsonBody):
    """Changes to an item; members that are left out keep their value."""

    label: Annotated[str | None, Field(description="text, or null for none")] = None
    metadata: Annotated[dict[str, JsonValue], Field(description="an object")] = {}


class ItemForm(ItemChangeBody):
    """The form fields of an item with an image."""

    keep: Annotated[Keep, Field(description="copy, thumbnail or nothing")] = "copy"


class ItemBody(ItemChangeBody):
    """An item with a vector."""

    vector: Annotated[Vector, Field(description=_VECTOR)]


class NamedItemBody(ItemChangeBody):
    """One of several items.

    Without a vector or image the item must exist, and members that are left out keep their value.
    """

    id: Annotated[ItemId, Field(description="text of 1 to 1,000 characters")]
    vector: Annotated[Vector | None, Field(description=_VECTOR)] = None


class ItemsBody(JsonBody):
    """Several items."""

    items: Annotated[list[NamedItemBody], Field(min_length=1, description="a list of items")]


class DeleteBody(JsonBody):
    """The items to delete, by exactly one of ids, filter and all."""

    one_of = ("ids", "filter", "all")

    ids: Annotated[
        list[ItemId] | None,
        Field(min_length=1, max_length=MAX_DELETED_IDS, description="a list of 1 to 10,000 ids"),
    ] = None
    filter: FilterForm = None
    all: Annotated[Literal[True] | None, Field(description="true")] = None


_ENTRIES: Mapping[str, type[JsonBody]] = {"queries": QueryBody, "items": NamedItemBody}


def _sentence(model: type[JsonBody], kind: str, place: tuple[int | str, ...]) -> str:
    """Return the error message for one of pydantic's errors."""
    where = ""
    if len(place) > 1 and place[0] in _ENTRIES:
        where, model = f'"{place[0]}", entry {place[1]}: ', _ENTRIES[str(place[0])]
        place = place[2:]
    field = model.model_fields.get(str(place[0])) if place else None
    if field is not None and not (kind in ("extra_forbidden", "missing") and len(place) == 1):
        return f'{where}"{place[0]}" must be {field.description}.'
    names = ", ".join(
        f'"{name}"{" (needed)" * field.is_required()}' for name, field in model.model_fields.items()
    )
    one = f", exactly one of {', '.join(model.one_of)} among them" * bool(model.one_of)
    return f"{where}JSON must be an object of {names}{one}; see /v1/openapi.json."


def loads(text: bytes | str, sentence: str = "The request is not JSON.") -> Any:
    """Parse JSON without duplicate keys and with at most 64 levels.

    Raises:
        RequestError: 400, with `sentence` as its message.
    """
    try:
        return strict_loads(text, finite=False)
    except (ValueError, RecursionError):
        raise RequestError(400, sentence) from None


def filter_of(form: str | Mapping[str, Any] | None) -> Filter | None:
    """Return a filter from its text or its JSON form.

    Raises:
        RequestError: 400 if the filter is invalid or too large for a server.
    """
    try:
        where = as_filter(form)
    except DataError as error:
        raise RequestError(400, str(error)) from None
    if where and (where.size.conditions > MAX_CONDITIONS or where.size.values > MAX_VALUES):
        limits = f"{MAX_CONDITIONS} conditions and {MAX_VALUES:,} values"
        raise RequestError(400, f"The filter is too large: the server takes {limits}.")
    return where


# Text of forms and URLs. Text that cannot be converted is kept, so that the model refuses it.


def _filter(text: str) -> Any:
    if text.lstrip().startswith("{"):
        return loads(text, 'The filter is not JSON, though it begins with "{".')
    return text if text.strip() else None


def _names(text: str) -> Any:
    if text.lstrip().startswith("["):
        return loads(text, '"fields" is not JSON, though it begins with "[".')
    return [name.strip() for name in text.split(",")] if text.strip() else []


def _number(text: str) -> int | str:
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 9 else text


def truth(text: str) -> bool | str:
    """Return True or False for "true" or "false", and any other text unchanged."""
    return {"true": True, "false": False}.get(text, text)


def _metadata(text: str) -> Any:
    return loads(text or "{}", '"metadata" must be a JSON object.')


_FROM_TEXT: Mapping[str, Callable[[str], Any]] = {
    "k": _number,
    "candidates": _number,
    "limit": _number,
    "filter": _filter,
    "fields": _names,
    "explain": truth,
    "metadata": _metadata,
    "keep": lambda text: text or "copy",
}


# Queries and items


class QueryInput(NamedTuple):
    """Input of one query: an image file's bytes, a vector, or the id of an item."""

    image: bytes | None = None
    vector: NDArray[np.float64] | None = None
    id: str | None = None


class Query(NamedTuple):
    """One or several searches with the same options and filter."""

    inputs: tuple[QueryInput, ...]
    options: Options
    where: Filter | None


def query_of(body: Body, parameters: Mapping[str, str], max_bytes: int) -> Query:
    """Parse a body as one search.

    Raises:
        RequestError: 400 if the body is invalid; see also `read_form`.
    """
    if body.kind == "image":
        return _query([QueryInput(body.content)], Options.of_texts(parameters))
    if body.kind == "form":
        form = read_form(body, OPTIONS, max_bytes)
        return _query([QueryInput(form.images[0])], Options.of_texts(form.fields))
    search = SearchBody.of(loads(body.content))
    return _query([search.input()], search)


def batch_of(body: Body, most: int, max_bytes: int) -> Query:
    """Parse a body as a batch of at most `most` searches.

    Raises:
        RequestError: 400 if the body is invalid or has too many searches; see also `read_form`.
    """
    if body.kind == "form":
        form = read_form(body, OPTIONS, max_bytes, most)
        return _query([QueryInput(image) for image in form.images], Options.of_texts(form.fields))
    batch = BatchBody.of(loads(body.content))
    if len(batch.queries) > most:
        raise RequestError(
            400, f"The request has {len(batch.queries):,} queries; {most:,} are the most."
        )
    return _query([query.input() for query in batch.queries], batch)


def _query(inputs: Sequence[QueryInput], options: Options) -> Query:
    return Query(tuple(inputs), options, filter_of(options.filter))


class NewItem(NamedTuple):
    """An item to add or change.

    Without image and vector the item must exist, and only the members in `named` change.
    """

    id: str
    label: str | None = None
    metadata: Mapping[str, Any] = {}
    image: bytes | None = None
    vector: Sequence[float] | None = None
    keep: Keep = "copy"
    named: frozenset[str] = frozenset()


def changed_item(id: str, body: Body) -> NewItem:
    """Parse the body of a PATCH; raise a RequestError 400 if it is invalid."""
    change = ItemChangeBody.of(loads(body.content))
    return NewItem(id, change.label, change.metadata, named=frozenset(change.model_fields_set))


def put_item(id: str, body: Body, max_bytes: int) -> NewItem:
    """Parse the body of a PUT; raise a RequestError 400 if it is invalid."""
    if body.kind == "json":
        item = ItemBody.of(loads(body.content))
        return NewItem(id, item.label, item.metadata, vector=item.vector)
    form = read_form(body, ("label", "metadata", "keep"), max_bytes)
    fields = ItemForm.of_texts(form.fields)
    return NewItem(id, fields.label, fields.metadata, form.images[0], None, fields.keep)


def items_of(body: Body, most: int, max_bytes: int) -> list[NewItem]:
    """Parse a body with at most `most` items; raise a RequestError 400 if it is invalid."""
    if body.kind == "json":
        items = ItemsBody.of(loads(body.content)).items
        images: list[bytes | None] = [None] * len(items)
    else:
        form = read_form(body, ("items",), max_bytes, most)
        content = loads(form.fields.get("items") or "[]", 'The field "items" is not JSON.')
        items, images = ItemsBody.of({"items": content}).items, [*form.images]
        if len(items) != len(images) or any(item.vector is not None for item in items):
            raise RequestError(
                400,
                f'The field "items" must list what each of the {len(images)} images is, in their'
                " order, without vectors.",
            )
    if len(items) > most:
        raise RequestError(400, f"The request has {len(items):,} items; {most:,} are the most.")
    if len({item.id for item in items}) < len(items):
        raise RequestError(400, "The request names an id twice.")
    return [
        NewItem(
            item.id,
            item.label,
            item.metadata,
            image,
            item.vector,
            named=frozenset(item.model_fields_set),
        )
        for item, image in zip(items, images, strict=True)
    ]
