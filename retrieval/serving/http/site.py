"""What all routes of a server share: its indexes, its limits, its memory."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

from starlette.requests import Request

from retrieval.serving.http.access.audit import Audit
from retrieval.serving.http.access.roles import caller_of
from retrieval.serving.http.budget import Budget
from retrieval.serving.http.errors import RequestError
from retrieval.serving.http.originals import Originals
from retrieval.serving.http.pool import Pool
from retrieval.serving.http.searcher import Searcher
from retrieval.serving.http.settings import Role, Settings
from retrieval.serving.http.writing import Writing

_SNAPSHOTS_WAITING = 4


@dataclass(frozen=True)
class Served:
    """One index of a server.

    Attributes:
        name: in addresses.
        searcher: searches it.
        originals: reads its items' originals.
        writing: changes it.
    """

    name: str
    searcher: Searcher
    originals: Originals
    writing: Writing


class Site:
    """All indexes of a server, by name.

    Args:
        indexes: one or more.
        settings: limits, the same for all.
        audit: the record of changes; None for none.

    Attributes:
        copies: the thread that writes snapshots.
    """

    def __init__(self, indexes: Mapping[str, Served], settings: Settings, audit: Audit | None = None) -> None:
        self.audit = audit
        self.indexes = indexes
        self.settings = settings
        self.budget = Budget(settings.body_memory)
        busy = "The server is busy: too many snapshots are waiting. Try again in some minutes."
        self.copies = Pool("snapshot", 1, _SNAPSHOTS_WAITING, busy)

    def of(self, request: Request, role: Role = "read") -> Served:
        """Return the index that a request is about, if it may do there what it asks for.

        Raises:
            RequestError: 403, it may not; 404, no index has the name, or several could be meant.
        """
        caller = caller_of(request.scope)
        caller.require(role)
        name = request.path_params.get("index")
        if name is None and len(self.indexes) == 1:
            name = next(iter(self.indexes))
        if name is not None:
            caller.require_index(name)
        if name is None:
            says = "This server has several indexes: name one in the address, as in /v1/indexes/NAME/search."
        elif name in self.indexes:
            return self.indexes[name]
        else:
            says = "This server has no index of this name."
        raise RequestError(404, says, more={"indexes": sorted(filter(caller.may_use, self.indexes))})

    def close(self, end: float) -> bool:
        """Let what is being written end, snapshots too; return whether it has, until a time by `time.monotonic`."""
        left = [served.writing.close(max(0.1, end - time.monotonic())) for served in self.indexes.values()]
        return self.copies.close(max(0.1, end - time.monotonic())) and all(left)

    def of_any(self, request: Request) -> None:
        """Let a request pass that is about no index in particular; see `of`."""
        caller_of(request.scope).require("read")


def prefix_of(request: Request) -> str:
    """Return how addresses of the request's index begin."""
    root, name = request.scope.get("root_path", ""), request.path_params.get("index")
    return f"{root}/v1" if name is None else f"{root}/v1/indexes/{name}"


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
        raise RequestError(
            400,
            f"The address takes no parameter {unknown[0][:40]!a}. It takes: {', '.join(known)}.",
        )
    if len(found) < len(given):
        raise RequestError(400, "The address gives a parameter twice.")
    return found
