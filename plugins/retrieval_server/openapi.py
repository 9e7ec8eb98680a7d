"""The OpenAPI 3.1 document of /v1: all routes with their parameters, bodies and responses."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any, NamedTuple

from pydantic import TypeAdapter

from retrieval_server import request_bodies, responses
from retrieval_server.access import is_free, needed_role
from retrieval_server.feedback import FeedbackBody
from retrieval_server.problems import MEDIA_TYPE

_INTRODUCTION = (
    "Search and change an index of images. Errors are `application/problem+json`. A path with"
    " `/indexes/{index}` names the index; other paths use the server's only index. If the server"
    " has keys, an operation needs a key with the role that its `security` names or a higher one"
    " (read, feedback, write, admin). No key is needed if the server has none or is open for the"
    " operation."
)
_KEY = {
    "type": "http",
    "scheme": "bearer",
    "description": (
        "An API key from the server's operator. Status 401 means a missing or unknown key, 403 a"
        " key without the role or index."
    ),
}
_IMAGES: tuple[str, ...] = ("image/png", "image/jpeg", "image/gif", "image/bmp", "image/webp")
_BINARY = {"type": "string", "format": "binary"}
_SEVERAL = {"type": "array", "items": _BINARY, "minItems": 1}
_ID = {"type": "string", "minLength": 1, "maxLength": 1000}
_NAME = {"type": "string", "pattern": "^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$"}
_VECTOR = {"vector": {"type": "boolean", "default": False}}
_JSON = "application/json"
_FORM = "multipart/form-data"
_KEPT = (
    *("type", "enum", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"),
    *("default", "description"),
)
_AS_TEXT = {
    "filter": "a filter as text, or as JSON that begins with a brace",
    "fields": "names separated by commas, or a JSON list",
    "metadata": "a JSON object",
    "facets": "names separated by commas, or a JSON list",
    "like": "the id of an item, or a JSON list of ids",
    "dislike": "the id of an item, or a JSON list of ids",
}


def _texts(model: type[request_bodies.JsonBody]) -> dict[str, Any]:
    """Return the schemas of a model's members as form fields or query parameters."""
    schemas = {}
    for name, schema in model.model_json_schema()["properties"].items():
        if name in _AS_TEXT:
            schemas[name] = {"type": "string", "description": _AS_TEXT[name]}
            continue
        # A type or null; a text is never null.
        if "anyOf" in schema:
            schema |= next(form for form in schema["anyOf"] if form["type"] != "null")
        schemas[name] = {key: schema[key] for key in _KEPT if schema.get(key) is not None}
    return schemas


_OPTIONS = _texts(request_bodies.SearchOptions)
_IDENTIFY_OPTIONS = _texts(request_bodies.IdentifyOptions)
_LIST = _texts(request_bodies.ListParameters)


def _ref(model: type) -> dict[str, Any]:
    return {"$ref": f"#/components/schemas/{model.__name__}"}


def _form(*required: str, **fields: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": fields,
        "required": list(required),
        "additionalProperties": False,
    }


class Operation(NamedTuple):
    """One path and method; the server's route and its part of the document are built from it.

    Attributes:
        method: HTTP method in lower case.
        path: path relative to each of `prefixes`.
        handler: name of the method of `Routes` that handles requests; the method's docstring is
            the operation's summary.
        answer: type of the response; `None` for an image.
        query: schemas of the query parameters by name; only `id` is required.
        bodies: schemas of the body by content type.
        status: HTTP status of success.
        of_index: whether the operation belongs to an index.
    """

    method: str
    path: str
    handler: str
    answer: type | None
    query: Mapping[str, Any] = {}
    bodies: Mapping[str, Any] = {}
    status: int = 200
    of_index: bool = True

    @property
    def prefixes(self) -> tuple[str, ...]:
        """Prefixes of the path, without and with the name of an index."""
        if self.of_index:
            return ("/v1", "/v1/indexes/{index}")
        return ("/v1",)

    @property
    def id(self) -> str:
        """The `operationId`: the handler's name, with `ByQuery` if `?id=` names the item."""
        head, *rest = self.handler.split("_")
        return head + "".join(map(str.title, rest)) + ("ByQuery" if "id" in self.query else "")


def _item_operations(path: str, query: Mapping[str, Any]) -> list[Operation]:
    """Return the operations on one item, named in the path or by `?id=`, longer paths first."""
    item = responses.ItemAnswer
    bodies = {_FORM: _NEW_ITEM, _JSON: _ref(request_bodies.ItemBody)}
    change = {_JSON: _ref(request_bodies.ItemPatch)}
    return [
        Operation("get", f"{path}/image", "get_image", None, query),
        Operation("get", f"{path}/thumbnail", "get_thumbnail", None, query),
        Operation("get", path, "get_item", item, {**query, **_VECTOR}),
        Operation("put", path, "put_item", responses.PutAnswer, query, bodies),
        Operation("patch", path, "patch_item", responses.PutAnswer, query, change),
        Operation("delete", path, "delete_item", responses.Deleted, query),
    ]


_NEW_ITEM = _form("image", image=_BINARY, **_texts(request_bodies.ItemForm))
_EXAMPLES = {
    "oneOf": [{"type": "string"}, _BINARY, _SEVERAL],
    "description": "the id of an item, a JSON list of ids, or pictures as files",
}
_SEARCH = {
    _FORM: _form(image=_BINARY, **_OPTIONS | {"like": _EXAMPLES, "dislike": _EXAMPLES}),
    **dict.fromkeys(("application/octet-stream", "image/*"), _BINARY),
    _JSON: _ref(request_bodies.SearchBody),
}
_BATCH = {
    _FORM: _form("image", image=_SEVERAL, **_texts(request_bodies.Options)),
    _JSON: _ref(request_bodies.BatchBody),
}
_IDENTIFY = {
    _FORM: _form(
        "image", image=_SEVERAL | {"maxItems": request_bodies.MAX_PHOTOS}, **_IDENTIFY_OPTIONS
    ),
    **dict.fromkeys(("application/octet-stream", "image/*"), _BINARY),
    _JSON: _ref(request_bodies.IdentifyBody),
}
_ITEMS = {
    "type": "string",
    "description": "a JSON list with one item per image, in the same order",
}
_ADD = {
    _FORM: _form("image", "items", image=_SEVERAL, items=_ITEMS),
    _JSON: _ref(request_bodies.ItemsBody),
}
_PATCH = {_JSON: _ref(request_bodies.ItemsPatch)}
_DELETE = {_JSON: _ref(request_bodies.DeleteBody)}
_ENCODE = {
    _FORM: _form("image", image=_SEVERAL),
    **dict.fromkeys(("application/octet-stream", "image/*"), _BINARY),
    _JSON: _ref(request_bodies.TextsBody),
}
_FEEDBACK = {_JSON: _ref(FeedbackBody)}
_EMBEDDINGS = {_JSON: _ref(request_bodies.EmbeddingsBody)}
OPERATIONS = (
    Operation("post", "/search", "search", responses.SearchAnswer, _OPTIONS, _SEARCH),
    Operation("post", "/search/batch", "search_batch", responses.BatchAnswer, {}, _BATCH),
    Operation(
        "post", "/identify", "identify", responses.IdentifyAnswer, _IDENTIFY_OPTIONS, _IDENTIFY
    ),
    Operation("post", "/encode", "encode", responses.EncodeAnswer, {}, _ENCODE),
    Operation("post", "/embeddings", "embeddings", responses.EmbeddingsAnswer, {}, _EMBEDDINGS),
    Operation("post", "/feedback", "feedback", responses.FeedbackAnswer, {}, _FEEDBACK),
    Operation("get", "/index", "get_index", responses.IndexAnswer),
    Operation("get", "/items", "list_items", responses.Page, _LIST),
    Operation("post", "/items", "add_items", responses.AddAnswer, {}, _ADD),
    Operation("patch", "/items", "patch_items", responses.Changed, {}, _PATCH),
    *_item_operations("/items/{id}", {}),
    *_item_operations("/item", {"id": _ID}),
    Operation("post", "/delete", "delete_items", responses.Deleted, {}, _DELETE),
    Operation("post", "/snapshots", "snapshot", responses.Snapshot, status=201),
    Operation("get", "/indexes", "list_indexes", responses.Indexes, of_index=False),
    Operation("get", "/openapi.json", "openapi", dict, of_index=False),
)
"""All operations of /v1, in the order in which routes are matched."""


@cache
def document(handlers: type) -> dict[str, Any]:
    """Return the document, with the docstrings of `handlers` as summaries.

    The document is cached, so do not modify it.
    """
    types = [
        *(
            request_bodies.ItemBody,
            request_bodies.ItemPatch,
            request_bodies.ItemsBody,
            request_bodies.ItemsPatch,
            request_bodies.DeleteBody,
            request_bodies.EmbeddingsBody,
            request_bodies.TextsBody,
            FeedbackBody,
        ),
        *(request_bodies.SearchBody, request_bodies.BatchBody, request_bodies.IdentifyBody),
        responses.Problem,
        *(operation.answer for operation in OPERATIONS if operation.answer not in (None, dict)),
    ]
    # All at once, so that types which share a part refer to one schema of it.
    _, schemas = TypeAdapter.json_schemas(
        [(str(number), "validation", TypeAdapter[Any](type)) for number, type in enumerate(types)],
        ref_template="#/components/schemas/{model}",
    )
    paths: dict[str, Any] = {}
    for operation in OPERATIONS:
        method = operation.method.upper()
        path = f"/v1{operation.path}"
        key = {"key": [needed_role(method, path, keyed=True)]}
        for prefix in operation.prefixes:
            named = "{index}" in prefix
            parameters = []
            if named:
                parameters = [_parameter("path", "index", _NAME)]
            described = {
                "operationId": operation.id + ("Of" if named else ""),
                "summary": getattr(handlers, operation.handler).__doc__,
                # An empty object beside the key: the server may have no keys.
                "security": [] if is_free(method, path) else [key, {}],
                "parameters": [*parameters, *_parameters(operation)],
                "responses": _responses(operation),
            }
            if operation.bodies:
                content = {kind: {"schema": schema} for kind, schema in operation.bodies.items()}
                described["requestBody"] = {"required": True, "content": content}
            paths.setdefault(prefix + operation.path, {})[operation.method] = described
    return {
        "openapi": "3.1.0",
        "info": {"title": "retrieval", "version": "1", "description": _INTRODUCTION},
        "paths": paths,
        "components": {"schemas": schemas["$defs"], "securitySchemes": {"key": _KEY}},
    }


def _parameters(operation: Operation) -> Iterator[dict[str, Any]]:
    if "{id}" in operation.path:
        yield _parameter("path", "id", _ID) | {"description": "percent-encoded, slashes too"}
    for name, schema in operation.query.items():
        yield _parameter("query", name, schema, required=name == "id")


def _parameter(part: str, name: str, schema: Any, required: bool = True) -> dict[str, Any]:
    return {"name": name, "in": part, "required": required, "schema": schema}


def _responses(operation: Operation) -> dict[str, Any]:
    by_status: dict[str, Any] = {}
    if operation.answer is None:
        kinds = _IMAGES
        if "thumbnail" in operation.handler:
            kinds = ("image/jpeg",)
        content: dict[str, Any] = {kind: {"schema": _BINARY} for kind in kinds}
        by_status["304"] = {"description": "The image has the ETag of the request's If-None-Match."}
    else:
        schema = {"type": "object"} if operation.answer is dict else _ref(operation.answer)
        content = {_JSON: {"schema": schema}}
    by_status[str(operation.status)] = {"description": "Done.", "content": content}
    failed = {MEDIA_TYPE: {"schema": _ref(responses.Problem)}}
    sentence = "The request failed; `detail` says why."
    by_status["4XX"] = {"description": sentence, "content": failed}
    by_status["503"] = {
        "description": "The server is busy or the index unavailable; try again later.",
        "content": failed,
        "headers": {"Retry-After": {"schema": {"type": "integer"}}},
    }
    return by_status
