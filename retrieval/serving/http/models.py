"""What requests say: options, queries and items, from JSON, forms and addresses, with a sentence for what is wrong."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError

from retrieval.errors import DataError
from retrieval.serving.files.strict_json import strict_loads
from retrieval.serving.filters import Filter, as_filter
from retrieval.serving.http.bodies import Body, Form
from retrieval.serving.http.problems import RequestError

SEARCH_TYPES = (
    'Send multipart/form-data with a field "image", the image itself as image/… or application/octet-stream, '
    'or application/json with {"vector": [...]}.'
)
BATCH_TYPES = (
    'Send multipart/form-data with files in the field "image", or application/json with {"queries": [...]}.'
)
PUT_TYPES = 'Send multipart/form-data with a field "image", or application/json with {"vector": [...]}.'
PATCH_TYPES = 'Send application/json with {"label": "shoe", "metadata": {"price": 20}}.'
ADD_TYPES = (
    'Send multipart/form-data with files in the field "image" and their JSON in the field "items", '
    'or application/json with {"items": [...]}.'
)

MAX_K = 1000
MAX_CANDIDATES = 10_000
MAX_FIELDS = 100
MAX_CONDITIONS, MAX_VALUES = 100, 1000
MAX_DELETED_IDS = 10_000
OPTIONS = ("k", "filter", "candidates", "fields", "explain")

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
    """Return what a JSON body says; see `loads`."""
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
