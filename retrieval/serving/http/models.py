"""What a JSON body may say, as models that check it and describe it, with a sentence for what is wrong."""

from __future__ import annotations

import json
import re
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError

from retrieval.errors import DataError
from retrieval.serving.files.strict_json import strict_loads
from retrieval.serving.filters import Filter, as_filter
from retrieval.serving.http.errors import RequestError

MAX_K = 1000
MAX_CANDIDATES = 10_000
MOST_FIELDS = 100
MOST_CONDITIONS, MOST_VALUES = 100, 1000  # of a filter: a tenth of what Python takes
MOST_IDS = 10_000  # that one request deletes

Vector = Annotated[list[Annotated[float, Field(allow_inf_nan=False)]], Field(min_length=1)]
ItemId = Annotated[str, Field(min_length=1, max_length=1000)]
FilterForm = str | dict[str, JsonValue]
Keeping = Literal["copy", "thumbnail", "nothing"]

_K = "a whole number from 1 to 1000"
_FIELDS = "a list of at most 100 names"
_FILTER = "text or an object"


class Body(BaseModel):
    """A JSON object that a request holds.

    Attributes:
        shape: the sentence for one of another shape.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)
    shape: ClassVar[str] = ""

    @classmethod
    def read(cls, text: bytes) -> Self:
        """Return what a JSON text says.

        Raises:
            RequestError: 400, it says something else; names every field that is wrong.
        """
        return cls.of(loads(text, "The request is not JSON."))

    @classmethod
    def of(cls, content: object) -> Self:
        """Return what a JSON value says; see `read`."""
        try:
            return cls.model_validate(content)
        except ValidationError as fault:
            places = [(one["type"], one["loc"]) for one in fault.errors(include_url=False, include_context=False, include_input=False)]  # fmt: skip
        raise RequestError(400, " ".join(dict.fromkeys(_said(cls, *place) for place in places[:3])))


class Options(Body):
    """How to search."""

    k: Annotated[int, Field(ge=1, le=MAX_K, description=_K)] = 10
    filter: Annotated[FilterForm | None, Field(description=_FILTER)] = None
    candidates: Annotated[
        int | None, Field(ge=1, le=MAX_CANDIDATES, description="a whole number from 1 to 10000")
    ] = None
    fields: Annotated[list[str] | None, Field(max_length=MOST_FIELDS, description=_FIELDS)] = None
    explain: Annotated[bool, Field(description="true or false")] = False


class SearchBody(Options):
    """A search with a vector, or with an item of the index."""

    shape = 'JSON must be {"vector": [numbers], "k": 10, "filter": {"label": "shoe"}}, or "id" in the place of "vector"; see /v1/openapi.json for all fields.'

    vector: Annotated[Vector | None, Field(description="a list of finite numbers")] = None
    id: Annotated[ItemId | int | None, Field(description="the id of an item")] = None


class GivenBody(Body):
    """One of several queries."""

    shape = 'A query must be {"vector": [numbers]} or {"id": "the id of an item"}.'

    vector: Annotated[Vector | None, Field(description="a list of finite numbers")] = None
    id: Annotated[ItemId | int | None, Field(description="the id of an item")] = None


class BatchBody(Options):
    """Several searches."""

    shape = 'JSON must be {"queries": [{"vector": [numbers]}, {"id": "an item"}], "k": 10}; see /v1/openapi.json for all fields.'

    queries: Annotated[list[GivenBody], Field(min_length=1, description="a list of queries")]


class ItemBody(Body):
    """What an item is to be. Without a vector, the item is there, and keeps its image and vector."""

    shape = 'JSON must be {"vector": [numbers], "label": "shoe", "metadata": {"price": 20}}; each may be left out.'

    vector: Annotated[Vector | None, Field(description="a list of finite numbers")] = None
    label: Annotated[str | None, Field(description="text")] = None
    metadata: Annotated[dict[str, JsonValue], Field(description="an object")] = {}


class NamedItemBody(ItemBody):
    """What one of several items is to be."""

    shape = (
        'An item must be {"id": "its id", "vector": [numbers], "label": "shoe", "metadata": {"price": 20}}.'
    )

    id: Annotated[ItemId, Field(description="text of 1 to 1,000 characters")]


class ItemsBody(Body):
    """Several items."""

    shape = 'JSON must be {"items": [{"id": "its id", "vector": [numbers]}]}.'

    items: Annotated[list[NamedItemBody], Field(min_length=1, description="a list of items")]


class DeleteBody(Body):
    """Which items to delete: one of the three."""

    shape = 'JSON must be one of {"ids": ["an id"]}, {"filter": {"label": "shoe"}} and {"all": true}.'

    ids: Annotated[
        list[ItemId] | None, Field(min_length=1, max_length=MOST_IDS, description="a list of 1 to 10,000 ids")
    ] = None
    filter: Annotated[FilterForm | None, Field(description=_FILTER)] = None
    all: Annotated[Literal[True] | None, Field(description="true")] = None


_NOTHING_SAID = Options()  # frozen, as all of these are


def _said(model: type[Body], kind: str, place: tuple[int | str, ...]) -> str:
    """Return the sentence for one fault that pydantic found."""
    where = ""
    while (place and kind not in ("extra_forbidden", "missing")) or len(place) > 2:
        field = model.model_fields.get(str(place[0])) if place else None
        if field is None:
            break
        inner = re.search(r"\.(\w+Body)\b", str(field.annotation))
        if inner and len(place) > 2:
            where += f'"{place[0]}", entry {place[1]}: '
            model, place = globals()[inner[1]], place[2:]
            continue
        return f'{where}"{place[0]}" must be {field.description}.'
    return where + model.shape


def loads(text: bytes | str, sentence: str) -> Any:
    """Return what a JSON text says: no key twice, 64 levels at most, finite numbers.

    Raises:
        RequestError: 400, with the sentence, or one on what is wrong.
    """
    try:
        return strict_loads(text, finite=False)
    except (ValueError, RecursionError):
        raise RequestError(400, sentence) from None


def where_of(given: str | dict[str, Any] | None) -> Filter | None:
    """Return a filter from its text or its JSON form.

    Raises:
        RequestError: 400, it is none, or too large for a server.
    """
    try:
        found = as_filter(given)
    except DataError as fault:
        raise RequestError(400, str(fault)) from None
    if found is not None and (found.size.conditions > MOST_CONDITIONS or found.size.values > MOST_VALUES):
        raise RequestError(
            400,
            f"The filter is too large: the server takes {MOST_CONDITIONS} conditions and {MOST_VALUES:,} values.",
        )
    return found


def filter_of_text(text: str | None) -> str | dict[str, Any] | None:
    """Return the filter that a form or an address gives: as text, or as JSON, which begins with a brace."""
    if text is None or not text.strip():
        return None
    if text.lstrip().startswith("{"):
        found: dict[str, Any] = loads(text, 'The filter is not JSON, though it begins with "{".')
        return found
    return text


def names_of_text(text: str | None) -> list[str] | None:
    """Return the names that a form or an address gives: a JSON list, or divided by commas."""
    if text is None:
        return None
    if text.lstrip().startswith("["):
        found: list[str] = loads(text, '"fields" is not JSON, though it begins with "[".')
        return found
    return [name.strip() for name in text.split(",")] if text.strip() else []


def whole(text: str | None) -> int | str | None:
    """Return a number from its digits; what is none stays text, for the model to refuse."""
    return int(text) if text is not None and text.isascii() and text.isdecimal() and len(text) < 9 else text


def truth(text: str | None) -> bool | str | None:
    """Return true or false from its word; what is neither stays text, for the model to refuse."""
    return {"true": True, "false": False}.get(text, text) if text is not None else None


def options_of(given: dict[str, str | None]) -> Options:
    """Return how to search, from a form's fields or an address's parameters.

    Raises:
        RequestError: 400, one of them is not what it should be.
    """
    read = {
        "k": whole,
        "filter": filter_of_text,
        "candidates": whole,
        "fields": names_of_text,
        "explain": truth,
    }
    content = {name: read[name](text) for name, text in given.items() if text is not None}
    return Options.of(content) if content else _NOTHING_SAID


def dumps(content: object) -> str:
    """Return JSON on one line."""
    return json.dumps(content, ensure_ascii=False)
