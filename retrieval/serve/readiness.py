"""Whether the server can do its work: a search of its own, the whole way, again and again."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from retrieval.errors import RetrievalError
from retrieval.serve.guard import report
from retrieval.serve.searcher import Searcher

log = logging.getLogger("retrieval.serve")

_NEW = "The first search has not been run yet."

Check = Callable[[], str | None]
"""Returns why the server is not ready, or None."""


class Readiness:
    """Runs a query from pixels (or features) to items every few seconds.

    Args:
        searcher: what is probed; its settings say how often, and how long a search may take.
        checks: what else must hold; asked whenever readiness is.

    Attributes:
        fault: why the last probe failed; None after one that did not.
    """

    def __init__(self, searcher: Searcher, checks: Sequence[Check] = ()) -> None:
        self._searcher = searcher
        self._checks = checks
        self.fault: str | None = _NEW

    def reason(self) -> str | None:
        """Return why the server is not ready, or None when it is."""
        return self.fault or next(filter(None, (check() for check in self._checks)), None)

    async def probe(self) -> None:
        """Run a search now, and note what came of it."""
        settings = self._searcher.settings
        try:
            async with asyncio.timeout(settings.deadline):
                await self._searcher.search(self._searcher.sample(), lambda hits: b"found" if hits else b"")
            fault = None
        except TimeoutError:
            fault = f"Searches take longer than {settings.deadline:g} seconds."
        except RetrievalError as error:
            fault = f"A search failed: {error}"
        except Exception as error:
            report(error, settings.debug)
            fault = f"A search failed: {type(error).__name__}."
        if fault != self.fault and fault is not None:
            log.warning("Not ready. %s", fault)
        elif fault is None and self.fault not in (None, _NEW):
            log.warning("Ready again.")
        self.fault = fault

    async def watch(self) -> None:
        """Probe, for ever."""
        while True:
            await self.probe()
            await asyncio.sleep(self._searcher.settings.probe_seconds)
