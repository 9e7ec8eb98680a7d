"""Whether the server can do its work: a search of its own, the whole way, again and again, and each part of it by name."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from retrieval.serving.bundle import Bundle
from retrieval.serving.decoding.pool import Unstarted
from retrieval.serving.http.errors import RequestError
from retrieval.serving.http.guard import UNREACHABLE, report
from retrieval.serving.http.searcher import DAMAGED, Searcher
from retrieval.serving.http.storage import can_write, disk_fault
from retrieval.serving.probing import probe_fault
from retrieval.serving.store.contract import StoreUnavailable

log = logging.getLogger("retrieval.serving.http")

_NEW = "The first search has not been run yet."
_LEAST_TOLERANCE = 1e-4  # of a component: a device may sum in another order each time

Check = Callable[[], str | None]
"""Returns why the server is not ready, or None."""


@dataclass(frozen=True)
class Seen:
    """What a probe found.

    Attributes:
        items: of the index.
        bundle: SHA-256 of the one that is served.
    """

    items: int = 0
    bundle: str = ""


class Readiness:
    """Runs a query from pixels (or features) to items every few seconds, and looks at what it needs.

    Args:
        searcher: what is probed; its settings say how often, and how long a search may take.
        checks: what else must hold, by name; asked whenever readiness is.

    Attributes:
        seen: what the last probe found that did not fail.
        fallback: why the encoder runs on the CPU though it could have been a GPU; None otherwise. No fault: the server is ready.
    """

    def __init__(self, searcher: Searcher, checks: Mapping[str, Check] | None = None) -> None:
        self._searcher = searcher
        self._checks = dict(checks or {})
        self._told = False
        self._undecoded: str | None = None
        folder = searcher.index.path
        self._written = (
            folder
            if isinstance(folder, Path) and searcher.settings.changeable and can_write(folder)
            else None
        )
        self._references: dict[str, NDArray[np.float32]] = {}
        self._faults: dict[str, str | None] = {"search": _NEW}
        self.seen = Seen()
        self.fallback: str | None = None

    def checks(self) -> dict[str, str]:
        """Return what was found of each part: "ok", or what is wrong with it. It costs nothing: probes run by themselves."""
        damaged = DAMAGED if self._searcher.failed is not None else None
        faults = {**self._faults, "index": self._faults.get("index") or damaged}
        faults |= {name: check() for name, check in self._checks.items()}
        return {name: fault or "ok" for name, fault in faults.items()}

    @property
    def begun(self) -> bool:
        """Whether it has looked at all."""
        return _NEW not in self._faults.values()

    def reason(self) -> str | None:
        """Return why the server is not ready, or None when it is."""
        return next((said for said in self.checks().values() if said != "ok"), None)

    async def probe(self) -> None:
        """Look at each part now, and note what came of it."""
        parts: dict[str, Callable[[], Awaitable[str | None]]] = {
            "index": self._unchanged,
            "disk": self._disk,
            "search": self._searched,
            "model": self._embeds,
        }
        self._undecoded = None
        self._fallen()
        faults = {name: await self._noted(part) for name, part in parts.items()}
        faults = {
            "index": faults.pop("index"),
            "disk": faults.pop("disk"),
            "decoders": self._undecoded,
            **faults,
        }
        before, now = (next(filter(None, each.values()), None) for each in (self._faults, faults))
        if now != before and now is not None:
            log.warning("Not ready. %s", now)
        elif now is None and before not in (None, _NEW):
            log.warning("Ready again.")
        self._faults = faults

    def _fallen(self) -> None:
        """Note that the encoder runs on the CPU in a GPU's stead; the log says so once."""
        before, self.fallback = self.fallback, self._searcher.index.bundle.fallback
        if self.fallback not in (None, before):
            log.warning("%s", self.fallback)

    async def _noted(self, part: Callable[[], Awaitable[str | None]]) -> str | None:
        settings = self._searcher.settings
        try:
            async with asyncio.timeout(settings.deadline):
                return await part()
        except TimeoutError:
            if part in (self._unchanged, self._disk):
                return "The storage of the index does not answer."
            return f"Searches take longer than {settings.deadline:g} seconds."
        except RequestError as error:
            return f"A search of the server's own was refused: {error}"
        except StoreUnavailable:
            return UNREACHABLE
        except Unstarted as error:
            self._undecoded = str(error)
            return f"A search of the server's own failed: {error}"
        except Exception as error:
            report(error, settings.debug)
            return f"A search of the server's own failed ({type(error).__name__}); the log says why."

    async def _searched(self) -> str | None:
        bundle, before = await self._searcher.state()
        found = await self._searcher.search(self._searcher.sample(), lambda found: bytes(len(found.hits[0])))
        fault = await self._searcher.again()
        self.seen = Seen(before, bundle.sha256)
        return fault or (None if found or not before else "A search of the server's own found nothing.")

    async def _embeds(self) -> str | None:
        """Return why the encoder is not what it was when its bundle was made, or, of one without a probe, when it was opened."""
        bundle = self._searcher.index.bundle
        if bundle.manifest.probe is not None:
            return await self._searcher.machinery.searches.run(lambda job: probe_fault(bundle))
        bundle, vector = await self._searcher.embedding(self._searcher.sample())
        return self._wrong(bundle, vector)

    def _wrong(self, bundle: Bundle, vector: NDArray[np.float32]) -> str | None:
        said = bundle.manifest
        if not np.isfinite(vector).all():
            return "The model is broken: it embeds the probe image as NaN or infinity."
        tolerance = max(said.verified.tolerance, _LEAST_TOLERANCE)
        if bundle.sha256 not in self._references:
            self._references = {bundle.sha256: vector}
        apart = float(np.abs(vector - self._references[bundle.sha256]).max())
        if apart > tolerance:
            return (
                f"The model is broken: it embeds the probe image {apart:.2g} away from where it did when the server "
                f"opened it; {tolerance:.2g} is allowed. Start the server again."
            )
        return None

    async def _unchanged(self) -> str | None:
        """Return why the files on the disk are not what is served; another index that lies there whole is served from now on."""
        try:
            changed = await self._searcher.machinery.pictures.run(lambda job: self._searcher.take_up())
        except RequestError:
            return None  # the gallery is busy: asked again soon
        if changed is None:
            self._told = False
            return None
        if not self._told:
            log.warning("%s", changed)  # its path is for the log only
            self._told = True
        return "The files of the index are no longer those that are served. Start the server again."

    async def _disk(self) -> str | None:
        """Return why an index that could be written to when the server opened it cannot be now."""
        folder = self._written
        if folder is None:
            return None
        try:
            return await self._searcher.machinery.pictures.run(lambda job: disk_fault(folder))
        except RequestError:
            return None  # as above

    async def watch(self) -> None:
        """Probe, for ever."""
        while True:
            await self.probe()
            await asyncio.sleep(self._searcher.settings.probe_seconds)
