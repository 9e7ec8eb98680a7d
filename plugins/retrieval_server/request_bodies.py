"""Read and validate the bodies and URL parameters of requests."""

from __future__ import annotations

import base64
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Self, TypeVar, get_args

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError
from retrieval.base.arrays import Floats64
from retrieval.base.strict_json import strict_loads
from retrieval.bundle.text import MAX_CHARACTERS, checked_texts
from retrieval.errors import DataError
from retrieval.index import query as questions
from retrieval.store.filters import Filter, as_filter

from retrieval_server.forms import Body, check_size, read_form
from retrieval_server.problems import RequestError, refuse_other_bundle
from retrieval_server.settings import JSON_BATCH_VALUES, JSON_VALUES

MAX_K = 1000
MAX_OFFSET = 10_000
MAX_PHOTOS = 16
MAX_CANDIDATES = 10_000
MAX_PAGE = 1000
MAX_FIELDS = 100
MAX_CONDITIONS = 100
MAX_VALUES = 1000

T = TypeVar("T")
# The first fault ends the reading of a list: an error an element would fill the memory.
List = Annotated[list[T], Field(fail_fast=True)]
Vector = Annotated[List[Annotated[float, Field(allow_inf_nan=False)]], Field(min_length=1)]
ItemId = Annotated[str, Field(min_length=1, max_length=1000)]
FilterForm = Annotated[str | dict[str, Any] | None, Field(description="text or an object")]
Names = Annotated[
    List[str] | None, Field(max_length=MAX_FIELDS, description="a list of at most 100 names")
]
Ids = Annotated[
    List[ItemId] | None, Field(max_length=100, description="a list of at most 100 ids of items")
]
FieldName = Annotated[str | None, Field(max_length=1000, description="the name of a field")]
User = Annotated[
    str | None,
    Field(min_length=1, max_length=64, description="text of 1 to 64 characters that names a user"),
]
BundleName = Annotated[
    str | None,
    Field(
        pattern="^[0-9a-f]{64}$", description="the SHA-256 of a bundle, in 64 hexadecimal digits"
    ),
]
Label = Annotated[str | None, Field(description="text, or null for none")]
Keep = Literal["copy", "thumbnail", "nothing"]

Text = Annotated[str, Field(min_length=1, max_length=MAX_CHARACTERS)]

_VECTOR = "a list of finite numbers"
_TEXT = f"text of 1 to {MAX_CHARACTERS:,} characters"


class JsonBody(BaseModel):
    """A JSON object of a request, or its form fields or URL parameters."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _has_no_other(cls, content: object) -> object:
        if isinstance(content, dict) and not content.keys() <= cls.model_fields.keys():
            # One error for the object: an error for each member would fill the memory.
            raise PydanticCustomError("extra_forbidden", "")
        return content

    @classmethod
    def of(cls, content: object) -> Self:
        """Validate a parsed JSON value; raise a RequestError 400 if it is invalid."""
        try:
            return cls.model_validate(content)
        except ValidationError as error:
            problems = error.errors(include_url=False, include_context=False, include_input=False)
        sentences = (_sentence(cls, problem["type"], problem["loc"]) for problem in problems[:3])
        raise RequestError(400, " ".join(dict.fromkeys(sentences)))

    @classmethod
    def of_texts(cls, texts: Mapping[str, str]) -> Self:
        """Validate form fields or URL parameters; see `of`."""
        return cls.of({name: _FROM_TEXT.get(name, str)(text) for name, text in texts.items()})


class Options(JsonBody):
    """Options of one search or several."""

    k: Annotated[int, Field(ge=1, le=MAX_K, description="a whole number from 1 to 1000")] = 10
    filter: FilterForm = None
    candidates: Annotated[
        int | None, Field(ge=1, le=MAX_CANDIDATES, description="a whole number from 1 to 10000")
    ] = None
    fields: Names = None
    explain: Annotated[bool, Field(description="true or false")] = False
    group_by: FieldName = None
    group_size: Annotated[int, Field(ge=1, le=100, description="a whole number from 1 to 100")] = 1
    max_distance: Annotated[
        float | None, Field(ge=0, allow_inf_nan=False, description="a number from 0")
    ] = None
    offset: Annotated[
        int, Field(ge=0, le=MAX_OFFSET, description="a whole number from 0 to 10000")
    ] = 0
    words: Annotated[
        float | None, Field(ge=0, le=1, description="a number from 0 to 1, beside a text")
    ] = None
    diversity: Annotated[float, Field(ge=0, le=1, description="a number from 0 to 1")] = 0.0
    facets: Annotated[
        List[str] | None, Field(max_length=10, description="a list of at most 10 fields")
    ] = None
    order_by: Annotated[
        str | None,
        Field(max_length=1000, description='the name of a field, for the largest first after "-"'),
    ] = None
    scores: Annotated[bool, Field(description="true or false")] = False
    user: User = None
    bundle: BundleName = None


class SearchOptions(Options):
    """Options of one search."""

    like: Ids = None
    dislike: Ids = None


_QUESTION = SearchOptions.model_fields.keys() - {
    *("k", "filter", "candidates", "fields", "explain", "user", "bundle")
}
"""Names of the options that take more than the search of the nearest items."""


class QueryBody(JsonBody):
    """A vector or an item of the index."""

    vector: Annotated[Vector | None, Field(description=_VECTOR)] = None
    id: Annotated[ItemId | None, Field(description="the id of an item")] = None

    @model_validator(mode="after")
    def _has_one(self) -> Self:
        needed = 1
        if getattr(self, "like", None):
            needed = 0
        sent = (getattr(self, name, None) for name in QueryInput._fields)
        if not needed <= sum(value is not None for value in sent) <= 1:
            # `_sentence` writes the message.
            raise ValueError
        return self

    def input(self) -> QueryInput:
        """Return the vector, item id or text to search with."""
        vector = None
        if self.vector is not None:
            vector = np.array(self.vector, np.float64)
        return QueryInput(vector=vector, id=self.id, text=getattr(self, "text", None))


class TextQueryBody(QueryBody):
    """A vector, an item of the index or a text."""

    text: Annotated[Text | None, Field(description=_TEXT)] = None


class SearchBody(SearchOptions, TextQueryBody):
    """A search with a vector, an item of the index or a text, or for what is like other items."""

    options: ClassVar = SearchOptions


class IdentifyOptions(JsonBody):
    """Options of an identification."""

    far: Annotated[float, Field(gt=0, lt=1, description="a number between 0 and 1")] = 0.01
    fields: Names = None
    bundle: BundleName = None


class IdentifyBody(IdentifyOptions, QueryBody):
    """An identification of a vector or of an item of the index."""

    options: ClassVar = IdentifyOptions


class BatchBody(Options):
    """Several searches."""

    queries: Annotated[List[TextQueryBody], Field(min_length=1, description="a list of queries")]


class ListParameters(JsonBody):
    """Parameters of a list of items: filter, fields and page."""

    cursor: str | None = None
    limit: Annotated[int, Field(ge=1, le=MAX_PAGE, description="a whole number from 1 to 1000")] = (
        100
    )
    filter: FilterForm = None
    fields: Names = None
    order: Annotated[Literal["id", "newest"], Field(description="id or newest")] = "id"


class ItemFields(JsonBody):
    """What a client says of an item, beside its image or vector."""

    label: Label = None
    metadata: Annotated[dict[str, Any], Field(description="an object")] = {}


class ItemPatch(JsonBody):
    """Changes to an item; members that are left out keep their value.

    The metadata are a merge patch (RFC 7396): an entry that is null is removed.
    """

    label: Label = None
    metadata: Annotated[
        dict[str, Any] | None, Field(description="an object, or null for none")
    ] = {}


class ItemForm(ItemFields):
    """The form fields of an item with an image."""

    keep: Annotated[Keep, Field(description="copy, thumbnail or nothing")] = "copy"


class ItemBody(ItemFields):
    """An item with a vector."""

    vector: Annotated[Vector, Field(description=_VECTOR)]
    bundle: BundleName = None


class NamedImage(ItemFields):
    """One of several items with an image."""

    id: Annotated[ItemId, Field(description="text of 1 to 1,000 characters")]


class NamedItem(NamedImage, ItemBody):
    """One of several items with a vector."""


class ImagesForm(JsonBody):
    """Several items with images."""

    items: Annotated[List[NamedImage], Field(description="a list of items")]


class ItemsBody(JsonBody):
    """Several items with vectors."""

    items: Annotated[List[NamedItem], Field(min_length=1, description="a list of items")]


class DeleteBody(JsonBody):
    """A filter of the items to delete."""

    filter: Annotated[str | dict[str, Any], Field(description="text or an object")]


class ItemsPatch(ItemPatch, DeleteBody):
    """Changes to all items that match a filter; see `ItemPatch`."""


class TextsBody(JsonBody):
    """Texts to encode."""

    text: Annotated[
        Text | Annotated[List[Text], Field(min_length=1)],
        Field(description=f"{_TEXT}, or a list of such texts"),
    ]


class EmbeddingsBody(JsonBody):
    """Images to encode, in the shape that clients of OpenAI send."""

    input: Annotated[
        str | Annotated[List[str], Field(min_length=1)],
        Field(description="a data URL or a list of data URLs"),
    ]
    model: Annotated[str, Field(description="the name of the index or the SHA-256 of its bundle")]
    encoding_format: Annotated[Literal["float", "base64"], Field(description="float or base64")] = (
        "float"
    )


def _sentence(model: type[JsonBody], kind: str, path: tuple[int | str, ...]) -> str:
    """Return the error message for a pydantic error of type `kind` at `path` in a `model`."""
    where = ""
    if len(path) > 1 and path[0] in ("queries", "items"):
        (entry,) = get_args(model.model_fields[str(path[0])].annotation)
        where = f'"{path[0]}", entry {path[1]}: '
        model = entry
        path = path[2:]
    field = None
    if path:
        field = model.model_fields.get(str(path[0]))
    if field is not None and not (kind in ("extra_forbidden", "missing") and len(path) == 1):
        return f'{where}"{path[0]}" must be {field.description}.'
    names = [
        f'"{name}" (needed)' if member.is_required() else f'"{name}"'
        for name, member in model.model_fields.items()
    ]
    if issubclass(model, QueryBody):
        kinds = "vector, id, text" if issubclass(model, TextQueryBody) else "vector, id"
        alone = ", or like alone" * issubclass(model, SearchBody)
        names.append(f"exactly one of {kinds} among them{alone}")
    return f"{where}JSON must be an object of {', '.join(names)}; see /v1/openapi.json."


def loads(
    text: bytes | str, sentence: str = "The request is not JSON.", most: int = JSON_VALUES
) -> Any:
    """Parse JSON; raise a RequestError with `sentence` if it is invalid.

    Duplicate keys, more than 64 levels and more than `most` values are refused.
    """
    # Counted before the parser runs, because small values take many times their bytes as objects.
    if isinstance(text, bytes) and sum(map(text.count, (b",", b"[", b"{"))) > most:
        limit = f"{most:,} commas and opening brackets"
        raise RequestError(413, f"The JSON has too many values; the limit is {limit}.")
    try:
        return strict_loads(text, finite=False)
    except ValueError:
        raise RequestError(400, sentence) from None


def filter_of(form: str | Mapping[str, Any] | None) -> Filter | None:
    """Return a filter from its text or its JSON form; raise a RequestError if it is invalid."""
    try:
        filter = as_filter(form)
    except DataError as error:
        raise RequestError(400, str(error)) from None
    if filter and (filter.size.conditions > MAX_CONDITIONS or filter.size.values > MAX_VALUES):
        limits = f"{MAX_CONDITIONS} conditions and {MAX_VALUES:,} values"
        raise RequestError(400, f"The filter is too large: the limits are {limits}.")
    return filter


# Conversion of form fields and URL parameters. Text that cannot be converted stays text, which the
# model then refuses.


def _filter(text: str) -> Any:
    if text.lstrip().startswith("{"):
        return loads(text, 'The filter is not JSON, though it begins with "{".')
    if text.strip():
        return text
    return None


def _names(text: str) -> Any:
    if text.lstrip().startswith("["):
        return loads(text, 'A list of names is not JSON, though it begins with "[".')
    if text.strip():
        return [name.strip() for name in text.split(",")]
    return []


def _ids(text: str) -> Any:
    if text.startswith("["):
        return loads(text, 'A list of ids is not JSON, though it begins with "[".')
    return [text]


def _number(text: str) -> int | str:
    # `int` also takes signs, spaces, underscores and digits of other scripts.
    if text.isascii() and text.isdecimal() and len(text) < 9:
        return int(text)
    return text


def _decimal(text: str) -> float | str:
    # `float` also takes spaces, underscores, names and digits of other scripts.
    if re.fullmatch(r"[0-9]{1,20}(\.[0-9]{0,20})?(e[+-]?[0-9]{1,2})?", text):
        return float(text)
    return text


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
    "group_size": _number,
    "max_distance": _decimal,
    "offset": _number,
    "diversity": _decimal,
    "words": _decimal,
    "facets": _names,
    "scores": truth,
    "like": _ids,
    "dislike": _ids,
    "far": _decimal,
    "metadata": _metadata,
    "keep": lambda text: text or "copy",
}


# Queries and items


class QueryInput(NamedTuple):
    """Input of one query: an image file's bytes, a vector, the id of an item, or a text."""

    image: bytes | None = None
    vector: Floats64 | None = None
    id: str | None = None
    text: str | None = None


class Query(NamedTuple):
    """One or several searches with the same options and filter.

    Attributes:
        inputs: input of each query; there is none in a search for what is like examples alone.
        options: `Options` or, for a verdict, `IdentifyOptions`.
        filter: filter that results match.
        question: the options as the index takes them, without `examples`. `None` for a search of
            the nearest items, or a verdict.
        examples: pictures to "like" and to "dislike".
        voter: who searches, if the search is to be noted; see `feedback_record.Search`.
    """

    inputs: tuple[QueryInput, ...]
    options: Any
    filter: Filter | None
    question: questions.Query | None = None
    examples: Mapping[str, Sequence[bytes]] = MappingProxyType({})
    voter: str | None = None

    @property
    def texts(self) -> list[str] | None:
        """The text of each query; `None` for queries that are no texts."""
        texts = [input.text for input in self.inputs if input.text is not None]
        return texts or None


def query_of(
    body: Body,
    parameters: Mapping[str, str],
    model: type[SearchBody | IdentifyBody],
    most: int,
    max_bytes: int,
) -> Query:
    """Parse a body as one search or identification with at most `most` images.

    `parameters` are the options beside a body that is an image.
    """
    if body.kind == "json":
        content = model.of(loads(body.content))
        query = content.input()
        return _query([query] if any(part is not None for part in query) else [], content)
    options = model.options
    if body.kind == "image":
        return _query([QueryInput(body.content)], options.of_texts(parameters))
    names = tuple(options.model_fields)
    if model is IdentifyBody:
        images, fields = read_form(body, names, max_bytes, min(MAX_PHOTOS, most))
        return _query(map(QueryInput, images), options.of_texts(fields))
    examples: dict[str, list[bytes]] = {"like": [], "dislike": []}
    images, fields = read_form(body, names, max_bytes, 1, examples, most - 1)
    return _query(map(QueryInput, images), options.of_texts(fields), examples)


def batch_of(body: Body, most: int, max_bytes: int) -> Query:
    """Parse a body as a batch of at most `most` searches."""
    if body.kind == "form":
        images, fields = read_form(body, tuple(Options.model_fields), max_bytes, most)
        return _query(map(QueryInput, images), Options.of_texts(fields))
    batch = BatchBody.of(_entries(body, "queries", most))
    if len({(query.id is None, query.text is None) for query in batch.queries}) > 1:
        sentence = "The queries of one request are all vectors, all ids of items, or all texts."
        raise RequestError(400, sentence)
    return _query([query.input() for query in batch.queries], batch)


def texts_of(body: Body, most: int) -> list[str]:
    """Parse a body as at most `most` texts to encode."""
    texts = _usable_texts(TextsBody.of(loads(body.content, most=JSON_BATCH_VALUES)).text)
    if len(texts) > most:
        raise RequestError(400, f"The request has {len(texts):,} texts; the limit is {most:,}.")
    return texts


def _usable_texts(texts: str | Sequence[str]) -> list[str]:
    try:
        return checked_texts(texts, "text")
    except DataError as error:
        raise RequestError(400, str(error)) from None


def _query(
    inputs: Iterable[QueryInput],
    options: Any,
    examples: Mapping[str, Sequence[bytes]] = MappingProxyType({}),
) -> Query:
    query = Query(tuple(inputs), options, filter_of(getattr(options, "filter", None)))
    if query.texts is not None:
        _usable_texts(query.texts)
    if not (any(examples.values()) or options.model_fields_set & _QUESTION):
        return query
    size = options.group_size
    if options.k * size > MAX_K or options.offset * size > MAX_OFFSET:
        raise RequestError(
            400,
            f'"k" times "group_size" must be at most {MAX_K:,}, and "offset" times "group_size" at'
            f" most {MAX_OFFSET:,}.",
        )
    chosen: Any = options.model_dump(include=_QUESTION, exclude_none=True)
    for name in ("like", "dislike"):
        chosen[name] = tuple(map(questions.Id, chosen.get(name, ())))
    try:
        question = questions.query_of(
            options.k,
            text=query.texts,
            candidates=options.candidates,
            filter=query.filter,
            **chosen,
        )
    except DataError as error:
        raise RequestError(400, str(error)) from None
    return query._replace(question=question, examples=examples)


def _entries(body: Body, name: str, most: int) -> Any:
    """Parse a body, and check the length of its list `name` before the entries are read."""
    content = loads(body.content, most=JSON_BATCH_VALUES)
    entries = None
    if isinstance(content, dict):
        entries = content.get(name)
    if isinstance(entries, list) and len(entries) > most:
        raise RequestError(400, f"The request has {len(entries):,} {name}; the limit is {most:,}.")
    return content


def images_of(body: Body, most: int, max_bytes: int) -> list[bytes]:
    """Return the image that a body is, or the images of a form, of which there are `most`."""
    if body.kind == "image":
        return [body.content]
    images, _ = read_form(body, (), max_bytes, most)
    return images


def embeddings_of(body: Body, most: int, max_bytes: int) -> tuple[EmbeddingsBody, list[bytes]]:
    """Parse a body with at most `most` images as data URLs, and decode their base64."""
    content = EmbeddingsBody.of(loads(body.content))
    urls = [content.input] if isinstance(content.input, str) else content.input
    if len(urls) > most:
        raise RequestError(400, f"The request has {len(urls):,} inputs; the limit is {most:,}.")
    images = list[bytes]()
    for number, url in enumerate(urls, 1):
        # A URL such as data:image/png;base64,iVBORw0KGgo=
        head, _, text = url.partition(",")
        kind, _, coding = head.lower().rpartition(";")
        try:
            if not kind.startswith("data:image/") or coding != "base64":
                raise ValueError
            image = base64.b64decode(text, validate=True)
        except ValueError:
            raise RequestError(
                400,
                f"Input {number} is not an image as a data URL (data:image/png;base64,…); this"
                " server fetches no addresses, and texts are encoded by /v1/encode.",
            ) from None
        check_size(image, max_bytes)
        images.append(image)
    return content, images


class NewItem(NamedTuple):
    """An item to add or replace, with an image or a vector."""

    id: str
    label: str | None
    metadata: Mapping[str, Any]
    image: bytes | None = None
    vector: Sequence[float] | None = None
    keep: Keep = "nothing"
    bundle: str | None = None

    def require_bundle(self, served: str) -> None:
        """Raise a RequestError if the vector is of another bundle than the one that is served."""
        refuse_other_bundle(self.bundle, served)


def changes_of(body: Body) -> dict[str, Any]:
    """Parse the body of a PATCH; raise a RequestError 400 if it is invalid."""
    return ItemPatch.of(loads(body.content)).model_dump(exclude_unset=True)


def filtered_changes_of(body: Body) -> tuple[Filter | None, dict[str, Any]]:
    """Parse the filter and the changes of a PATCH of many items; see `changes_of`."""
    changes = ItemsPatch.of(loads(body.content)).model_dump(exclude_unset=True)
    filter = filter_of(changes.pop("filter"))
    if not changes:
        raise RequestError(400, 'The request changes nothing: send a "label" or "metadata".')
    return filter, changes


def put_item(id: str, body: Body, max_bytes: int) -> NewItem:
    """Parse the body of a PUT; raise a RequestError 400 if it is invalid."""
    if body.kind == "json":
        return NewItem(id, **dict(ItemBody.of(loads(body.content))))
    (image,), fields = read_form(body, tuple(ItemForm.model_fields), max_bytes)
    return NewItem(id, image=image, **dict(ItemForm.of_texts(fields)))


def items_of(body: Body, most: int, max_bytes: int) -> list[NewItem]:
    """Parse a body with at most `most` items; raise a RequestError 400 if it is invalid."""
    if body.kind == "json":
        entries = ItemsBody.of(_entries(body, "items", most)).items
        new_items = [NewItem(**dict(entry)) for entry in entries]
    else:
        images, fields = read_form(body, ("items",), max_bytes, most)
        content = loads(fields.get("items") or "[]", 'The field "items" is not JSON.')
        items = ImagesForm.of({"items": content}).items
        if len(items) != len(images):
            count = f"each of the {len(images)} images, in their order"
            raise RequestError(400, f'The field "items" must be a list with one item for {count}.')
        new_items = [
            NewItem(**dict(item), image=image, keep="copy")
            for item, image in zip(items, images, strict=True)
        ]
    if len({item.id for item in new_items}) < len(new_items):
        raise RequestError(400, "The request contains an id twice.")
    return new_items
