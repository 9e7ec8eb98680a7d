"""The OpenAPI 3.1 document of /v1: every route with its parameters, bodies, answers and an example."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from retrieval.serving.http import answers, models
from retrieval.serving.http.access.roles import is_free, needed
from retrieval.serving.http.examples import EXAMPLES
from retrieval.serving.http.problems import MEDIA_TYPE

_REFERENCE = "#/components/schemas/{model}"
_IMAGES = ("image/png", "image/jpeg", "image/gif", "image/bmp", "image/webp")
_BINARY = {"type": "string", "format": "binary"}
_TEXT = {"type": "string"}
_INTRODUCTION = (
    "Search an index of images and change it. Errors are `application/problem+json`. An address with `/indexes/{index}` names the index; "
    "without it, the server's only one is meant. Where the server has keys, an operation takes one of the role that its `security` names, or of a "
    "higher one: read, write, admin. Where it has none, or is open for so much, none is sent."
)
_KEY = {
    "type": "http",
    "scheme": "bearer",
    "description": "An API key from the server's operator. 401: none, or an unknown one; 403: one of another role or index; 429: beyond its limits.",
}


@dataclass(frozen=True)
class Operation:
    """One route and method.

    Attributes:
        method: lower case.
        path: below `/v1`, and below `/v1/indexes/{index}` if it is an index's.
        id: the `operationId`.
        summary: a sentence.
        answer: the model of the answer; None for a picture.
        query: schemas of the parameters behind the question mark, by name; those in `required` must be there.
        bodies: schemas of the body by content type.
        status: of success.
        of_index: whether it is an index's.
        headers: schemas of request headers.
    """

    method: str
    path: str
    id: str
    summary: str
    answer: type[BaseModel] | None
    query: Mapping[str, Any] = field(default_factory=dict)
    required: tuple[str, ...] = ()
    bodies: Mapping[str, Any] = field(default_factory=dict)
    status: int = 200
    of_index: bool = True
    headers: Mapping[str, Any] = field(default_factory=dict)


def _model(model: type[BaseModel]) -> dict[str, Any]:
    return {"$ref": _REFERENCE.format(model=model.__name__)}


def _form(required: tuple[str, ...], **fields: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": fields,
        "required": list(required),
        "additionalProperties": False,
    }


_ID = {"type": "string", "minLength": 1, "maxLength": 1000}
_FIELDS = {"type": "string", "description": "names divided by commas, or a JSON list"}
_FILTER = {"type": "string", "description": "text, or JSON that begins with a brace", "minLength": 1}
_OPTIONS = {
    "k": {"type": "integer", "minimum": 1, "maximum": models.MAX_K, "default": 10},
    "filter": _FILTER,
    "candidates": {"type": "integer", "minimum": 1, "maximum": models.MAX_CANDIDATES},
    "fields": _FIELDS,
    "explain": {"type": "boolean", "default": False},
}
_SEVERAL = {"type": "array", "items": _BINARY, "minItems": 1}
_ITEM = {
    "multipart/form-data": _form(
        ("image",),
        image=_BINARY,
        label=_TEXT,
        metadata={"type": "string", "description": "a JSON object"},
        keep={"enum": ["copy", "thumbnail", "nothing"], "default": "copy"},
    ),
    "application/json": _model(models.ItemBody),
}
_VECTOR = {"vector": {"type": "boolean", "default": False}}

OPERATIONS = (
    Operation("post", "/search", "search", "Search with an image, a vector or an item of the index.", answers.SearchAnswer,
              query=_OPTIONS, bodies={
                  "multipart/form-data": _form(("image",), image=_BINARY, **_OPTIONS),
                  "application/json": _model(models.SearchBody),
                  "application/octet-stream": _BINARY, "image/*": _BINARY}),
    Operation("post", "/search/batch", "searchBatch", "Search with several images, vectors or items.", answers.BatchAnswer,
              bodies={"multipart/form-data": _form(("image",), image=_SEVERAL, **_OPTIONS),
                      "application/json": _model(models.BatchBody)}),
    Operation("get", "/index", "getIndex", "Say what the index is and holds.", answers.IndexAnswer),
    Operation("get", "/items", "listItems", "List items, page by page.", answers.ListAnswer, query={
        "cursor": {"type": "string", "description": "of the page before; with the same filter"},
        "limit": {"type": "integer", "minimum": 1, "maximum": 1000, "default": 100}, "filter": _FILTER, "fields": _FIELDS}),
    Operation("post", "/items", "addItems", "Add items, or put them in the place of others: all of them, or none.", answers.AddedAnswer,
              bodies={"multipart/form-data": _form(("image", "items"), image=_SEVERAL, items={
                          "type": "string", "description": "a JSON list that says what each image is, in their order"}),
                      "application/json": _model(models.ItemsBody)},
              headers={"Idempotency-Key": {"type": "string", "minLength": 1, "maxLength": 255}}),
    Operation("get", "/items/{id}", "getItem", "Give an item.", answers.ItemAnswer, query=_VECTOR),
    Operation("put", "/items/{id}", "putItem", "Add an item, or put it in the place of the one of this id.", answers.PutAnswer, bodies=_ITEM),
    Operation("delete", "/items/{id}", "deleteItem", "Delete an item.", answers.DeletedAnswer),
    Operation("get", "/items/{id}/image", "getImage", "Give an item's original, as browsers show it.", None),
    Operation("get", "/items/{id}/thumbnail", "getThumbnail", "Give a small JPEG of an item's original.", None),
    Operation("get", "/item", "getItemByQuery", "Give an item, of any id.", answers.ItemAnswer, query={"id": _ID, **_VECTOR}, required=("id",)),
    Operation("put", "/item", "putItemByQuery", "As `putItem`, of any id.", answers.PutAnswer, query={"id": _ID}, required=("id",), bodies=_ITEM),
    Operation("delete", "/item", "deleteItemByQuery", "As `deleteItem`, of any id.", answers.DeletedAnswer, query={"id": _ID}, required=("id",)),
    Operation("get", "/item/image", "getImageByQuery", "As `getImage`, of any id.", None, query={"id": _ID}, required=("id",)),
    Operation("get", "/item/thumbnail", "getThumbnailByQuery", "As `getThumbnail`, of any id.", None, query={"id": _ID}, required=("id",)),
    Operation("post", "/delete", "deleteItems", "Delete items by id, by filter, or all.", answers.DeletedAnswer,
              bodies={"application/json": _model(models.DeleteBody)}),
    Operation("post", "/snapshots", "snapshot", "Write a copy of this moment to the operator's folder.", answers.SnapshotAnswer, status=201),
    Operation("get", "/indexes", "listIndexes", "Name the server's indexes.", answers.IndexesAnswer, of_index=False),
    Operation("get", "/openapi.json", "openapi", "Give this document.", answers.Answer, of_index=False),
)  # fmt: skip
"""Every route of /v1."""


@cache
def document() -> dict[str, Any]:
    """Return the document; not to be changed."""
    found = [model for model in vars(models).values() if _is_model(model, models.Body)]
    found += [model for model in vars(answers).values() if _is_model(model, answers.Answer)]
    _, schemas = models_json_schema(
        [(model, "validation") for model in found], ref_template="#/components/schemas/{model}"
    )
    paths: dict[str, Any] = {}
    for operation in OPERATIONS:
        paths.setdefault(f"/v1{operation.path}", {})[operation.method] = _described(operation, named=False)
        if operation.of_index:
            there = paths.setdefault(f"/v1/indexes/{{index}}{operation.path}", {})
            there[operation.method] = _described(operation, named=True)
    return {
        "openapi": "3.1.0",
        "info": {"title": "retrieval", "version": "1", "description": _INTRODUCTION},
        "paths": paths,
        "components": {"schemas": schemas["$defs"], "securitySchemes": {"key": _KEY}},
    }


def _is_model(one: object, kind: type[BaseModel]) -> bool:
    return isinstance(one, type) and issubclass(one, kind)


def _described(operation: Operation, *, named: bool) -> dict[str, Any]:
    example = EXAMPLES.get(operation.id, {})
    said: dict[str, Any] = {
        "operationId": operation.id + ("Of" if named else ""),
        "summary": operation.summary,
        "security": _security(operation),
        "parameters": _parameters(operation, example, named=named),
        "responses": _responses(operation, example),
    }
    if operation.bodies:
        content = {kind: {"schema": schema} for kind, schema in operation.bodies.items()}
        if "body" in example:
            content["application/json"]["example"] = example["body"]
        said["requestBody"] = {"required": True, "content": content}
    return said


def _security(operation: Operation) -> list[dict[str, list[str]]]:
    """Return the role of the key that an operation takes, where the server asks for one; nothing for what is free."""
    method, path = operation.method.upper(), f"/v1{operation.path}"
    if is_free(method, path):
        return []
    return [{"key": [needed(method, path, keyed=True)]}, {}]


def _parameters(operation: Operation, example: Mapping[str, Any], *, named: bool) -> list[dict[str, Any]]:
    found = []
    if named:
        schema = {"type": "string", "pattern": "^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$"}
        found.append({"name": "index", "in": "path", "required": True, "schema": schema})
    if "{id}" in operation.path:
        said = "percent-encoded, slashes too"
        found.append(
            {"name": "id", "in": "path", "required": True, "schema": _ID, "description": said, "example": "shoe/7"}
        )  # fmt: skip
    for place, schemas in (("query", operation.query), ("header", operation.headers)):
        for name, schema in schemas.items():
            one = {"name": name, "in": place, "required": name in operation.required, "schema": schema}
            shown = example.get("query", {}).get(name)
            found.append(one if shown is None else {**one, "example": shown})
    return found


def _responses(operation: Operation, example: Mapping[str, Any]) -> dict[str, Any]:
    content: dict[str, Any] = {}
    if operation.answer is None:
        kinds = ("image/jpeg",) if "humbnail" in operation.id else _IMAGES
        content = {kind: {"schema": _BINARY} for kind in kinds}
    else:
        content["application/json"] = {"schema": _model(operation.answer)}
        if "answer" in example:
            content["application/json"]["example"] = example["answer"]
    found: dict[str, Any] = {str(operation.status): {"description": "Done.", "content": content}}
    if operation.answer is None:
        found["304"] = {"description": "It is what the request's If-None-Match names."}
    failed = {MEDIA_TYPE: {"schema": _model(answers.Problem)}}
    found["4XX"] = {
        "description": "The request cannot be answered; the sentence says why.",
        "content": failed,
    }
    again = {"Retry-After": {"schema": {"type": "integer"}}}
    found["503"] = {
        "description": "Too much at a time, or the index is not to be had: come again.",
        "content": failed,
        "headers": again,
    }
    return found
