"""Whether the server can do its work: a search of its own, the whole way, again and again."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from retrieval.serving.http.errors import RequestError
from retrieval.serving.http.guard import report
from retrieval.serving.http.searcher import DAMAGED, Searcher

log = logging.getLogger("retrieval.serving.http")

_NEW = "The first search has not been run yet."

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
    """Runs a query from pixels (or features) to items every few seconds.

    Args:
        searcher: what is probed; its settings say how often, and how long a search may take.
        checks: what else must hold; asked whenever readiness is.

    Attributes:
        fault: why the last probe failed; None after one that did not.
        seen: what the last probe found that did not fail.
    """

    def __init__(self, searcher: Searcher, checks: Sequence[Check] = ()) -> None:
        self._searcher = searcher
        self._checks = checks
        self._told = False
        self.fault: str | None = _NEW
        self.seen = Seen()

    def reason(self) -> str | None:
        """Return why the server is not ready, or None when it is."""
        damaged = DAMAGED if self._searcher.failed is not None else None
        return self.fault or damaged or next(filter(None, (check() for check in self._checks)), None)

    async def probe(self) -> None:
        """Run a search now, look at the index's files, and note what came of it."""
        fault = await self._searched()
        fault = await self._unchanged() or fault
        if fault != self.fault and fault is not None:
            log.warning("Not ready. %s", fault)
        elif fault is None and self.fault not in (None, _NEW):
            log.warning("Ready again.")
        self.fault = fault

    async def _searched(self) -> str | None:
        settings = self._searcher.settings
        try:
            async with asyncio.timeout(settings.deadline):
                bundle, before = await self._searcher.state()
                found = await self._searcher.search(self._searcher.sample(), lambda hits: bytes(len(hits)))
                fault = await self._searcher.again()
                self.seen = Seen(before, bundle.sha256)
        except TimeoutError:
            return f"Searches take longer than {settings.deadline:g} seconds."
        except RequestError as error:
            return f"A search of the server's own was refused: {error}"
        except Exception as error:
            report(error, settings.debug)
            return f"A search of the server's own failed ({type(error).__name__}); the log says why."
        return fault or (None if found or not before else "A search of the server's own found nothing.")

    async def _unchanged(self) -> str | None:
        """Return why the files on the disk are not what is served. What is served is held in memory, and stays right."""
        index, settings = self._searcher.index, self._searcher.settings
        try:
            async with asyncio.timeout(settings.deadline):
                changed = await self._searcher.pictures.run(lambda job: index.changed())
        except TimeoutError:
            return "The storage of the index does not answer."
        except RequestError:
            return None  # the gallery is busy: asked again soon
        if changed is None:
            self._told = False
            return None
        if not self._told:
            log.warning("%s", changed)  # its path is for the log only
            self._told = True
        return "The files of the index are no longer those that are served. Start the server again."

    async def watch(self) -> None:
        """Probe, for ever."""
        while True:
            await self.probe()
            await asyncio.sleep(self._searcher.settings.probe_seconds)
