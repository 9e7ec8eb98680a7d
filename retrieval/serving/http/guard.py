"""Which requests are answered at all: hosts, other sites' pages; and what is said of faults of our own."""

from __future__ import annotations

import ipaddress
import logging
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from starlette.responses import Response

from retrieval.errors import StoreError
from retrieval.serving.http.errors import RequestError
from retrieval.serving.http.problems import problem
from retrieval.serving.http.settings import HEALTH, Settings
from retrieval.serving.store.contract import StoreUnavailable

log = logging.getLogger("retrieval.serving.http")

_REMEMBERED = 64  # of the Hosts that are asked for

UNREACHABLE = (
    "The store of this index cannot be reached now. Nothing is known to be damaged: try again in a moment."
)


class Guard:
    """Refuses requests for other hosts, and of other sites' pages.

    Args:
        settings: which hosts are served.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._knows = lru_cache(_REMEMBERED)(self._is_served)

    def refusal(self, scope: Any, headers: Mapping[bytes, bytes]) -> Response | None:
        """Return why a request is not answered; None if it is."""
        host = headers.get(b"host", b"").decode("latin-1")
        if not host and scope.get("http_version") == "1.1":
            return _error(scope, 400, "The request has no Host.")
        if host and not self._knows(host):
            return _error(
                scope,
                421,
                "The server does not answer for this host name. Its operator can add names with --allow-host.",
            )
        port = (scope.get("server") or ("", None))[1]
        if port is not None and port == self._settings.health_port and scope["path"] not in HEALTH:
            return _error(scope, 404, f"This port answers {', '.join(HEALTH)} only.")
        if scope["method"] not in ("GET", "HEAD") and self._is_foreign(headers, host):
            return _error(scope, 403, "The request comes from another site's page.")
        return None

    def _is_served(self, host: str) -> bool:
        """Whether the server answers for a Host. A page that rebinds a name of its own has no address to use."""
        known, name = self._settings.hosts, _name(host)
        return known is None or name in known or name == "localhost" or _is_address(name)

    def _is_foreign(self, headers: Mapping[bytes, bytes], host: str) -> bool:
        said = headers.get(b"origin")
        origin = None if said is None else said.decode("latin-1")
        if origin in self._settings.cors_origins:
            return False
        if headers.get(b"sec-fetch-site", b"none") not in (b"same-origin", b"none"):
            return True
        if origin is None:
            return False
        where = origin.partition("://")[2]
        return where.lower() != host.lower() and _name(where) not in (self._settings.hosts or ())


def report(fault: BaseException, debug: bool) -> None:
    """Write one line about a fault of our own; with its traceback only for those who look for it."""
    code = fault.__traceback__
    while code is not None and code.tb_next is not None:
        code = code.tb_next
    where = f" ({code.tb_frame.f_code.co_filename}:{code.tb_lineno})" if code is not None else ""
    text = str(fault)[:200].encode("unicode_escape").decode()
    log.error("%s: %s%s", type(fault).__name__, text, where, exc_info=fault if debug else None)


def store_failed(fault: StoreError, sentence: str, reason: str, debug: bool) -> RequestError:
    """Write about a fault of an index's store, and return what the client is told: `sentence`, unless it cannot be reached now."""
    report(fault, debug)
    if isinstance(fault, StoreUnavailable):
        return RequestError(503, UNREACHABLE, "unreachable")
    return RequestError(503, sentence, reason)


def _error(scope: Any, status: int, sentence: str) -> Response:
    return problem(scope, status, sentence, {"Connection": "close"})


def _name(host: str) -> str:
    """Return a Host's name without its port, lower case, without the dot at its end."""
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    return host.partition(":")[0].lower().removesuffix(".")


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
