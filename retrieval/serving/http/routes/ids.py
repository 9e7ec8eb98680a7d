"""Items' ids in addresses: any text, percent-encoded in the path, or as `?id=`."""

from __future__ import annotations

from typing import Any
from urllib.parse import unquote

from starlette.convertors import StringConvertor, register_url_convertor
from starlette.requests import Request
from starlette.routing import Match, Route

from retrieval.serving.http.errors import RequestError
from retrieval.serving.http.site import parameters_of


class _Any(StringConvertor):
    """An item's id in an address: any characters, slashes and line breaks too."""

    regex = "(?s:.+)"


register_url_convertor("any", _Any())


class ItemRoute(Route):
    """A route with an item's id in its path, as it was sent: an encoded slash is of the id, and `/image` at the end is not."""

    def matches(self, scope: Any) -> tuple[Match, Any]:
        """Look at the path before it was decoded."""
        raw = scope.get("raw_path")
        if scope["type"] != "http" or raw is None:
            return Match.NONE, {}
        path = raw.partition(b"?")[0].decode("latin-1")
        return super().matches({**scope, "path": path, "root_path": ""})


def id_of(request: Request, *others: str) -> str:
    """Return the id that an address names an item by.

    Args:
        request: one of an `ItemRoute`, or with a parameter `id`.
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
