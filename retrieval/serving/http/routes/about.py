"""What a server is: its indexes, their snapshots, its health, its own description."""

from __future__ import annotations

import secrets
from datetime import UTC, datetime
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from retrieval.errors import StoreError
from retrieval.serving.http.access.audit import Change, author, recorded
from retrieval.serving.http.access.roles import caller_of
from retrieval.serving.http.errors import RequestError
from retrieval.serving.http.guard import store_failed
from retrieval.serving.http.openapi import document
from retrieval.serving.http.sending import answer, as_json
from retrieval.serving.http.settings import Role
from retrieval.serving.http.site import Served, Site, parameters_of
from retrieval.serving.http.waiting import client_of, in_time
from retrieval.serving.index.index import Index


class About:
    """What a site says of itself.

    Args:
        site: which.
    """

    def __init__(self, site: Site) -> None:
        self._site = site
        self._settings = site.settings

    async def indexes(self, request: Request) -> Response:
        """List the names of the indexes."""
        parameters_of(request)
        self._site.of_any(request)
        mine = filter(caller_of(request.scope).may_use, self._site.indexes)
        return answer({"indexes": sorted(mine)})

    async def index(self, request: Request) -> Response:
        """Describe one."""
        served = self._site.of(request)
        parameters_of(request)
        reading = served.searcher.read(
            lambda index: as_json(self._described(served, index, caller_of(request.scope).role)),
            client_of(request),
        )
        return answer(await in_time(request, reading, self._settings.deadline))

    def _described(self, served: Served, index: Index, role: Role | None) -> dict[str, Any]:
        bundle, stats = index.follow(), index.stats()
        manifest, settings = bundle.manifest, self._settings
        return {
            "index": served.name,
            "name": manifest.name,
            "items": len(index),
            "bundle": bundle.sha256,
            "input": {"kind": manifest.input.kind, "shape": list(manifest.input.shape)},
            "vector": manifest.vector,
            "distance": manifest.distance.name,
            "rescores": manifest.rescorer is not None,
            "format": 2,
            "generation": index.generation.number,
            "generations": [
                {"number": one.number, "state": one.state, "bundle": one.bundle} for one in stats.generations
            ],
            "bytes": stats.bytes,
            "segments": stats.details.get("segments"),
            "fresh": stats.details.get("fresh"),
            **index.store.settings(),
            "role": role,
            "limits": {
                "bytes": settings.max_bytes,
                "pixels": settings.max_pixels,
                "batch": settings.batch,
                "batch_bytes": settings.batch_bytes,
            },
        }

    async def snapshot(self, request: Request) -> Response:
        """Write a copy of one moment of an index below the folder that the operator named; returns when it is whole."""
        served, folder = self._site.of(request, "admin"), self._settings.snapshots
        parameters_of(request)
        if folder is None:
            raise RequestError(
                403, "This server writes no snapshots. Its operator can name a folder: --snapshots FOLDER."
            )
        stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
        name = f"{served.name}-{stamp}-{secrets.token_hex(4)}"

        change = Change("snapshot", served.name, by=author.get())

        def work() -> bytes:
            with served.searcher.current.use() as index, recorded(self._site.audit, change):
                index.snapshot(folder / name)
            return as_json({"snapshot": name})

        try:
            made = await in_time(request, self._site.copies.run(lambda job: work(), client_of(request)), None)
        except StoreError as fault:
            said = "The snapshot cannot be written. The server's log says more."
            raise store_failed(fault, said, "", self._settings.debug) from None
        return answer(made, 201)

    async def openapi(self, request: Request) -> Response:
        """Give the OpenAPI document."""
        return answer(document())
