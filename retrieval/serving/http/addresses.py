"""What a request says besides its body: its sender, an item's id in its path or behind the question mark, parameters."""

from __future__ import annotations

from typing import Any
from urllib.parse import unquote

from starlette.convertors import StringConvertor, register_url_convertor
from starlette.requests import Request
from starlette.routing import Match, Route

from retrieval.serving.http.access import Caller
from retrieval.serving.http.problems import RequestError
from retrieval.serving.store.items import check_id


class _AnyText(StringConvertor):
    """An item's id in an address: any characters, slashes and line breaks too."""

    regex = "(?s:.+)"


register_url_convertor("any", _AnyText())


class ItemRoute(Route):
    """A route with an item's id in its path as it was sent: an encoded slash is of the id, `/image` at the end is not."""

    def matches(self, scope: Any) -> tuple[Match, Any]:
        """Match the path before it is decoded."""
        if scope["type"] != "http" or "raw_path" not in scope:
            return Match.NONE, {}
        path = scope["raw_path"].partition(b"?")[0].decode("latin-1")
        return super().matches({**scope, "path": path, "root_path": ""})


def parameters_of(request: Request, *known: str) -> dict[str, str]:
    """Return what an address says behind its question mark.

    Raises:
        RequestError: 400, it says what the address does not take, or something twice.
    """
    if not request.scope["query_string"]:
        return {}
    given = request.query_params.multi_items()
    if given and not known:
        raise RequestError(400, "The address takes no query string (?…); fields go into the request's body.")
    found = dict(given)
    if unknown := [name for name in found if name not in known]:
        sentence = f"The address takes no parameter {unknown[0][:40]!a}. It takes: {', '.join(known)}."
        raise RequestError(400, sentence)
    if len(found) < len(given):
        raise RequestError(400, "The address gives a parameter twice.")
    return found


def id_of(request: Request, *others: str) -> str:
    """Return the id that an address names an item by, in its path or as `?id=`.

    Args:
        request: one of an item.
        others: parameters that the address may have besides.

    Raises:
        RequestError: 400, it names none.
    """
    if "id" in request.path_params:
        parameters_of(request, *others)
        return unquote(request.path_params["id"], errors="surrogateescape")
    id = parameters_of(request, "id", *others).get("id")
    if not id:
        raise RequestError(400, "The address names no item: add ?id=, and the id percent-encoded.")
    return id


def usable_id(id: str) -> str:
    """Return an id that an item may have.

    Raises:
        RequestError: 400, none may have it.
    """
    if fault := check_id(id):
        raise RequestError(400, f"The item {fault}.")
    return id


def caller_of(request: Request) -> Caller:
    """Return who has sent a request."""
    caller: Caller = request.scope["retrieval.caller"]
    return caller


def prefix_of(request: Request) -> str:
    """Return how addresses of the request's index begin."""
    name = request.path_params.get("index")
    return "/v1" if name is None else f"/v1/indexes/{name}"
