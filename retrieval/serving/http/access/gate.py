"""What stands before every address that gives or takes data: who asks, whether they may, and how often."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from retrieval.serving.http.access.audit import Author, author
from retrieval.serving.http.access.keys import LONGEST
from retrieval.serving.http.access.meter import Limits, Meter, Use, network
from retrieval.serving.http.access.roles import Caller, is_free, needed, set_caller, unauthorised
from retrieval.serving.http.access.source import KeySource
from retrieval.serving.http.problems import request_id
from retrieval.serving.http.settings import HEALTH, Role, Settings

_REMEMBERED = 1024  # addresses without a key


class Access:
    """Who may do what, and how much of it.

    Args:
        settings: limits of whoever has none of their own, and what may be done without a key.
        source: of keys; None: there are none.
    """

    def __init__(self, settings: Settings, source: KeySource | None = None) -> None:
        self._source = source
        self._default = Limits(
            settings.requests_per_second, settings.burst, settings.concurrent, settings.bytes_per_minute
        )
        self._share = self._default.share(settings.processes)
        self._without: Role | None = settings.open or (None if source is not None else "read")
        self._keys, self._addresses = Meter(), Meter()
        self._health_port = settings.health_port
        self._processes = settings.processes
        self._nameless = lru_cache(_REMEMBERED)(
            lambda address: Caller("", self._without, address, keyed=source is not None)
        )

    def is_free(self, scope: Any) -> bool:
        """Whether a request takes no key, and counts for no limit: figures too, on a port that is for monitors only."""
        if is_free(scope["method"], scope["path"]):
            return True
        port = (scope.get("server") or ("", None))[1]
        return port is not None and port == self._health_port and scope["path"] in HEALTH

    def caller(self, scope: Any) -> Caller:
        """Return who has sent a request.

        Raises:
            RequestError: 401, with a key that is none.
        """
        address = (scope.get("client") or ("",))[0]
        said = [value for name, value in scope["headers"] if name == b"authorization"]
        if self._source is None or not said:
            return self._nameless(address)
        scheme, _, sent = said[0].partition(b" ")
        if len(said) > 1 or scheme.lower() != b"bearer" or len(sent) > LONGEST:
            raise unauthorised(
                "The header Authorization cannot be read. Send it once, as: Bearer KEY.",
                ', error="invalid_request"',
            )
        key = self._source.keys.find(sent.strip().decode("latin-1"))
        if key is None:
            raise unauthorised(
                "This key is not known here. Ask the server's operator for one.", ', error="invalid_token"'
            )
        return Caller(key.name, key.role, address, key.indexes, key)

    def admit(self, scope: Any) -> Use | None:
        """Let a request in that its sender may send, and count it; None if nothing is to be counted.

        Raises:
            RequestError: 401, 403 or 429.
        """
        caller = self.caller(scope)
        role = needed(scope["method"], scope["path"], self._source is not None)
        caller.require(role)
        set_caller(scope, caller)
        if role != "read":
            author.set(Author(caller, request_id(scope)))
        limits = self._limits(caller)
        if not limits.any:
            return None
        if caller.name:
            return self._keys.begin(caller.name, limits)
        return self._addresses.begin(network(caller.address), limits)

    def _limits(self, caller: Caller) -> Limits:
        own, default = caller.allowance, self._default
        if own is None:
            return self._share
        whole = Limits(
            default.rate if own.requests_per_second is None else own.requests_per_second,
            default.burst if own.burst is None else own.burst,
            default.concurrent if own.concurrent is None else own.concurrent,
            default.bytes_per_minute if own.bytes_per_minute is None else own.bytes_per_minute,
        )
        return whole.share(self._processes)
