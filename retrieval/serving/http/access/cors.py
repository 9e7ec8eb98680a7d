"""Other sites whose pages may use the server: none, unless its operator names them."""

from __future__ import annotations

from collections.abc import Iterable
from urllib.parse import urlsplit

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from retrieval.errors import RetrievalError

_HEADERS = ["Authorization", "Content-Type", "Idempotency-Key", "If-None-Match", "Traceparent"]
_SHOWN = ["ETag", "Retry-After", "WWW-Authenticate", "X-Request-Id"]
_PORTS = {"http": 80, "https": 443}


def check_origins(origins: Iterable[str]) -> tuple[str, ...]:
    """Return origins as browsers name them: in small letters, without the usual port.

    Raises:
        RetrievalError: one of them is none.
    """
    return tuple(dict.fromkeys(map(_origin, origins)))


def _origin(text: str) -> str:
    try:
        parts = urlsplit(text)
        host, port = parts.hostname or "", parts.port
    except ValueError:
        parts, host, port = urlsplit(""), "", None
    plain = parts.path in ("", "/") and not (parts.query or parts.fragment or parts.username or "*" in host)
    if parts.scheme not in _PORTS or not host or not plain:
        raise RetrievalError(
            f"--cors-origin takes the address of a site, without a path, such as https://shop.example, not '{text}'."
        )
    name = f"[{host}]" if ":" in host else host
    return f"{parts.scheme}://{name}" + ("" if port in (None, _PORTS[parts.scheme]) else f":{port}")


def cross_origin(app: ASGIApp, origins: tuple[str, ...]) -> ASGIApp:
    """Return an application that the pages of some origins may use too; for none, the one that is given."""
    if not origins:
        return app
    return CORSMiddleware(
        app,
        allow_origins=origins,
        allow_methods=["GET", "HEAD", "POST", "PUT", "DELETE"],
        allow_headers=_HEADERS,
        expose_headers=_SHOWN,
    )
