"""What each request takes, and who may send it. What is not named here takes the role write, or read to look."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from retrieval.serving.http.access.keys import Allowance
from retrieval.serving.http.errors import RequestError
from retrieval.serving.http.observer import KEY
from retrieval.serving.http.settings import Role

_ROLES: tuple[Role, ...] = ("read", "write", "admin")
_FREE = re.compile(r"/|/page(?:-part|-edit)?\.(?:css|js)|/livez|/readyz|/v1/openapi\.json")
"""The page, which is code and no data; the health of the server; the description of its addresses."""

_SEARCHES = re.compile(r"/v1(?:/indexes/[^/]+)?/search(?:/batch)?")
_ADMIN = re.compile(r"/metrics|/v1(?:/indexes/[^/]+)?/snapshots")
_METRICS = "/metrics"
_CALLER = "retrieval.caller"
_REMEMBERED = 64  # addresses; most requests are for a few, and one is no longer than a header may be
_DOES = {
    "read": "searching and looking",
    "write": "adding, changing and deleting",
    "admin": "snapshots and figures",
}
_CLOSED = "This server is read-only. Its operator can allow changes with keys, or with --open."
_ASK = "Send one in the header: Authorization: Bearer KEY."


def is_free(method: str, path: str) -> bool:
    """Whether a request takes no key, and counts for no limit."""
    return method in ("GET", "HEAD") and _FREE.fullmatch(path) is not None


@lru_cache(_REMEMBERED)
def needed(method: str, path: str, keyed: bool) -> Role:
    """Return the role that a request takes; figures are for all where there are no keys."""
    if path == _METRICS and not keyed:
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
        name: the key's; empty for one without a key.
        role: what they may do; None: nothing.
        address: where the request came from.
        indexes: those that they may use; None: all.
        allowance: the key's own limits.
        keyed: whether the server has keys.
    """

    name: str
    role: Role | None
    address: str
    indexes: tuple[str, ...] | None = None
    allowance: Allowance | None = None
    keyed: bool = True

    def require(self, role: Role) -> None:
        """Refuse one who may not do so much.

        Raises:
            RequestError: 401, a key is needed; 403, another key is, or there are none.
        """
        if self.role is not None and _ROLES.index(self.role) >= _ROLES.index(role):
            return
        if not self.keyed:
            raise RequestError(403, _CLOSED)
        if not self.name:
            raise unauthorised(f"A key is needed for {_DOES[role]}. {_ASK}")
        asked = f'Bearer realm="retrieval", error="insufficient_scope", scope="{role}"'
        raise RequestError(
            403,
            f"This key has the role {self.role}; {_DOES[role]} takes a key with the role {role}.",
            headers={"WWW-Authenticate": asked},
        )

    def require_index(self, name: str) -> None:
        """Refuse one who may not use an index.

        Raises:
            RequestError: 403.
        """
        if not self.may_use(name):
            raise RequestError(403, "This key is for other indexes.")

    def may_use(self, name: str) -> bool:
        """Whether an index is one of theirs."""
        return self.indexes is None or name in self.indexes


def unauthorised(sentence: str, error: str = "") -> RequestError:
    """Return a 401 that says how to come with a key."""
    return RequestError(401, sentence, headers={"WWW-Authenticate": f'Bearer realm="retrieval"{error}'})


def caller_of(scope: Any) -> Caller:
    """Return who has sent the request that an ASGI scope is of."""
    found = scope.get(_CALLER)
    if isinstance(found, Caller):
        return found
    return Caller("", "admin", (scope.get("client") or ("",))[0])  # an application without Access before it


def set_caller(scope: Any, caller: Caller) -> None:
    """Say who has sent a request."""
    scope[_CALLER] = caller
    if caller.name:
        scope[KEY] = caller.name
