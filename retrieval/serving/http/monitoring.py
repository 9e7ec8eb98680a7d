"""What monitors ask: `/livez`, `/readyz` and `/metrics`; and the observer of all requests, which counts for them."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from retrieval.serving.http.errors import RequestError
from retrieval.serving.http.log import Log
from retrieval.serving.http.metrics import CONTENT_TYPE, Metrics
from retrieval.serving.http.observer import Observer, patterns_of
from retrieval.serving.http.pool import Pool
from retrieval.serving.http.problems import problem
from retrieval.serving.http.processes.handing import figures_of_others
from retrieval.serving.http.readiness import Check, Readiness
from retrieval.serving.http.searcher import Searcher
from retrieval.serving.http.traces import Traces

if TYPE_CHECKING:
    from retrieval.serving.http.processes.group import Member
    from retrieval.serving.http.protocol import Connections

_SCRAPES = 4  # that may wait: Prometheus asks again


class Monitoring:
    """How a server is, for the monitors that ask it.

    Args:
        searchers: of each index, by its name: what is looked at.
        checks: what must hold for readiness besides a search that succeeds, by name.
        gates: the connections of each port, by name, for the figures.
        log: has a line for each request; None for none.
        traces: None for none.
        member: this process among those of its server; None where there is but one.

    Attributes:
        readiness: of each index.
        routes: the addresses.
    """

    def __init__(
        self,
        searchers: Searcher | Mapping[str, Searcher],
        checks: Mapping[str, Check] | None = None,
        gates: Mapping[str, Connections] | None = None,
        log: Log | None = None,
        traces: Traces | None = None,
        member: Member | None = None,
    ) -> None:
        named = {"index": searchers} if isinstance(searchers, Searcher) else searchers
        self.readiness = {name: Readiness(one, checks) for name, one in named.items()}
        self.routes = [
            Route("/livez", self._live),
            Route("/readyz", self._ready),
            Route("/metrics", self._metrics),
        ]
        self._searchers = named
        self._gates = gates
        self._log, self._traces, self._member = log, traces, member
        self._scrapes = Pool("metrics", 1, _SCRAPES)
        self._figures = Metrics(named, [], gates, member)

    def observer(self, routes: Sequence[BaseRoute]) -> Observer:
        """Return what notes every request; it counts by the patterns of these routes."""
        patterns = patterns_of(routes)
        self._figures = Metrics(self._searchers, patterns.values(), self._gates, self._member)
        return Observer(patterns, self._figures, self._log, self._traces)

    def close(self) -> None:
        """Let go of its thread."""
        self._scrapes.close(0.1)

    async def _live(self, request: Request) -> Response:
        return JSONResponse({"status": "live", **self._processes("live")})

    async def _ready(self, request: Request) -> Response:
        several = len(self.readiness) > 1
        said = {name: self._found(name) for name in self.readiness}
        content = {"indexes": said} if several else next(iter(said.values()))
        processes = self._processes("ready")
        for name, one in self.readiness.items():
            if reason := one.reason():
                checks = content if several else {"checks": content["checks"]}
                return problem(
                    request.scope,
                    503,
                    f"Index {name}: {reason}" if several else reason,
                    more={**checks, **processes},
                )
        if self._member is not None and self._member.reason is not None:
            return problem(request.scope, 503, self._member.reason, more=processes)
        return JSONResponse({"status": "ready", **content, **processes})

    def _processes(self, state: str) -> dict[str, Any]:
        """Return how many of the server's processes are in a state, where there are several."""
        if self._member is None:
            return {}
        return {"processes": {state: getattr(self._member, state), "of": self._member.of}}

    @property
    def begun(self) -> bool:
        """Whether each index has been looked at."""
        return all(one.begun for one in self.readiness.values())

    def state(self) -> dict[str, Any]:
        """Return whether this process is ready, and why not if it is known."""
        if not self.begun:
            return {"ready": False, "reason": None}
        reason = next(filter(None, (one.reason() for one in self.readiness.values())), None)
        return {"ready": reason is None, "reason": reason}

    async def looked(self) -> bytes:
        """Return the figures that are looked up in this process."""
        return await self._scrapes.run(lambda job: self._figures.looked())

    def _found(self, name: str) -> dict[str, Any]:
        """Return what was found of one index."""
        one = self.readiness[name]
        fallen = {} if one.fallback is None else {"fallback": one.fallback}
        return {"items": one.seen.items, "bundle": one.seen.bundle, **fallen, "checks": one.checks()}

    async def watch(self) -> None:
        """Look at every index again and again, for ever."""
        await asyncio.gather(*(one.watch() for one in self.readiness.values()))

    async def _metrics(self, request: Request) -> Response:
        try:
            async with asyncio.timeout(next(iter(self._searchers.values())).settings.deadline):
                others = [] if self._member is None else await figures_of_others(self._member)
                content = await self._scrapes.run(lambda job: self._figures.exposition(others))
        except TimeoutError:
            raise RequestError(503, "The storage of the index does not answer.", "index") from None
        return Response(content, headers={"Content-Type": CONTENT_TYPE, "Cache-Control": "no-store"})
