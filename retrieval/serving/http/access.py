"""Who asks, and what they may do: roles."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from retrieval.serving.http.keys import MAX_SENT, KeySource
from retrieval.serving.http.problems import RequestError
from retrieval.serving.http.settings import HEALTH, ROLES, Role, Settings

_FREE = re.compile(r"/|/page(?:-part|-edit)?\.(?:css|js)|/livez|/readyz|/v1/openapi\.json")
_SEARCHES = re.compile(r"/v1(?:/indexes/[^/]+)?/search(?:/batch)?")
_ADMIN = re.compile(r"/metrics|/v1(?:/indexes/[^/]+)?/snapshots")
_DOES = {
    "read": "searching and looking",
    "write": "adding, changing and deleting",
    "admin": "snapshots and figures",
}


def is_free(method: str, path: str) -> bool:
    """Return whether a request takes no key: for the page, which is code and no data, and for health."""
    return method in ("GET", "HEAD") and _FREE.fullmatch(path) is not None


@lru_cache(64)
def needed_role(method: str, path: str, keyed: bool) -> Role:
    """Return the role that a request takes; metrics are for everybody where there are no keys."""
    if path == "/metrics" and not keyed:
        return "read"
    if _ADMIN.fullmatch(path):
        return "admin"
    if method in ("GET", "HEAD") or (method == "POST" and _SEARCHES.fullmatch(path)):
        return "read"
    return "write"


@dataclass(frozen=True)
class Caller:
    """Who has sent a request.

    Attributes:
        name: the key's; empty without a key.
        role: what they may do; None: nothing.
        address: where the request came from.
        indexes: names of the indexes that they may use; None: all.
        keyed: whether the server has keys.
    """

    name: str
    role: Role | None
    address: str
    indexes: tuple[str, ...] | None = None
    keyed: bool = True

    def require(self, role: Role) -> None:
        """Refuse a caller who may not do so much.

        Raises:
            RequestError: 401, a key is needed; 403, a key with another role is, or the server has none.
        """
        if self.role is not None and ROLES.index(self.role) >= ROLES.index(role):
            return
        if not self.keyed:
            raise RequestError(
                403, "This server is read-only. Its operator can allow changes with keys, or with --open."
            )
        if not self.name:
            sentence = (
                f"A key is needed for {_DOES[role]}. Send one in the header: Authorization: Bearer KEY."
            )
            raise _unauthorised(sentence)
        asked = f'Bearer realm="retrieval", error="insufficient_scope", scope="{role}"'
        raise RequestError(
            403,
            f"This key has the role {self.role}; {_DOES[role]} takes a key with the role {role}.",
            headers={"WWW-Authenticate": asked},
        )

    def may_use(self, index: str) -> bool:
        """Return whether an index is one of theirs."""
        return self.indexes is None or index in self.indexes


class Access:
    """Says who sends a request, and refuses what they may not do.

    Args:
        settings: what everybody may do.
        source: of the keys; None: there are none.
    """

    def __init__(self, settings: Settings, source: KeySource | None) -> None:
        self.source = source
        self._open: Role | None = settings.open or (None if source is not None else "read")
        self._health_port = settings.health_port

    def admit(self, scope: Any, authorization: list[bytes]) -> Caller:
        """Return who has sent a request.

        Args:
            scope: of ASGI.
            authorization: the values of that header.

        Raises:
            RequestError: 401 or 403.
        """
        address, method, path = (scope.get("client") or ("",))[0], scope["method"], scope["path"]
        nobody = Caller("", self._open, address, keyed=self.source is not None)
        on_health_port = self._health_port is not None and scope["server"][1] == self._health_port
        if is_free(method, path) or (on_health_port and path in HEALTH):
            return nobody
        caller = self._holder(address, authorization) if self.source and authorization else nobody
        caller.require(needed_role(method, path, self.source is not None))
        return caller

    def _holder(self, address: str, authorization: list[bytes]) -> Caller:
        assert self.source is not None
        scheme, _, sent = authorization[0].partition(b" ")
        if len(authorization) > 1 or scheme.lower() != b"bearer" or len(sent) > MAX_SENT:
            sentence = "The header Authorization cannot be read. Send it once, as: Bearer KEY."
            raise _unauthorised(sentence, ', error="invalid_request"')
        key = self.source.keys.find(sent.strip().decode("latin-1"))
        if key is None:
            sentence = "This key is not known here. Ask the server's operator for one."
            raise _unauthorised(sentence, ', error="invalid_token"')
        return Caller(key.name, key.role, address, key.indexes)


def _unauthorised(sentence: str, error: str = "") -> RequestError:
    return RequestError(401, sentence, headers={"WWW-Authenticate": f'Bearer realm="retrieval"{error}'})
