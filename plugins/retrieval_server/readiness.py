"""Readiness: check each index of a server every few seconds, with a complete search."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Mapping
from typing import Any

import numpy as np
from retrieval.bundle.bundle import Bundle
from retrieval.bundle.probe import probe_fault
from retrieval.errors import DataError, StoreError
from retrieval.images.preprocessing import from_array, to_png
from retrieval.index.index import Index
from retrieval.store.contract import StoreUnavailable, Superseded

from retrieval_server.problems import UNREACHABLE, RequestError, report
from retrieval_server.request_bodies import Options, Query, QueryInput
from retrieval_server.served_index import DAMAGED, Served
from retrieval_server.settings import PROBE_SECONDS

log = logging.getLogger("retrieval_server")

_NEW = "The first search has not been run yet."
_CHANGED = (
    "The files of the index were replaced or removed, and the server cannot open it now. It tries"
    " again every few seconds; its log says what is wrong."
)


class Readiness:
    """Checks one index regularly: its files, a complete search and its encoder."""

    def __init__(self, served: Served) -> None:
        self._served = served
        self._logged_change = False
        self._faults: dict[str, str | None] = {"search": _NEW}
        self._items = 0
        self._bundle = ""
        self._sample: tuple[Bundle, Query] | None = None
        self._fallback: str | None = None

    def state(self) -> dict[str, Any]:
        """Return the result of the last check.

        If the encoder runs on the CPU although ONNX Runtime was built for a GPU, the member
        `fallback` says why.
        """
        fallback = {}
        if self._fallback:
            fallback = {"fallback": self._fallback}
        return {"items": self._items, "bundle": self._bundle, **fallback, "checks": self.checks()}

    def checks(self) -> dict[str, str]:
        """Return the last known state of each part: "ok" or a sentence."""
        # A search that failed shows damage before the next probe.
        damaged = None
        if self._served.failed is not None:
            damaged = DAMAGED
        faults = {**self._faults, "index": self._faults.get("index") or damaged}
        return {name: fault or "ok" for name, fault in faults.items()}

    def reason(self) -> str | None:
        """Return why the index is not ready, or None if it is."""
        return next((state for state in self.checks().values() if state != "ok"), None)

    async def watch(self) -> None:
        """Check all parts every few seconds, forever."""
        while True:
            await self.probe()
            await asyncio.sleep(PROBE_SECONDS)

    async def probe(self) -> None:
        """Check all parts now and store their states."""
        fallback = self._fallback
        self._fallback = self._served.index.bundle.fallback
        if self._fallback not in (None, fallback):
            log.warning("%s", self._fallback)
        slow = f"Searches take longer than {self._served.settings.deadline:g} seconds."
        silent = "The storage of the index does not answer."
        earlier = _first(self._faults)
        self._faults = {
            "index": await self._fault_of(self._files(), silent),
            "search": await self._fault_of(self._search(), slow),
            "model": await self._fault_of(self._model(), slow),
        }
        fault = _first(self._faults)
        if fault is not None and fault != earlier:
            log.warning("Not ready. %s", fault)
        elif fault is None and earlier not in (None, _NEW):
            log.warning("Ready again.")

    async def _fault_of(self, part: Awaitable[str | None], late: str) -> str | None:
        """Return the fault that a check finds or raises; `late` if it misses the deadline."""
        try:
            # `wait_for` can swallow the cancellation at shutdown in Python 3.11.
            async with asyncio.timeout(self._served.settings.deadline):
                return await part
        except TimeoutError:
            return late
        except RequestError as error:
            return f"The server's test search was refused: {error}"
        except StoreUnavailable:
            return UNREACHABLE
        except Exception as error:
            report(error)
            name = type(error).__name__
            return f"The server's test search failed ({name}); the log says why."

    async def _files(self) -> str | None:
        """If another index has replaced this one, serve it; return a sentence if that fails."""
        changed = await self._served.workers.pictures.run(self._served.take_up)
        if changed is not None and not self._logged_change:
            # The sentence has the path, which only the log may show.
            log.warning("%s", changed)
        self._logged_change = changed is not None
        return changed and _CHANGED

    async def _search(self) -> str | None:
        """Run a complete search, and repeat the client's search that failed last, if any."""
        served = self._served
        bundle, items = await served.read(_followed, DAMAGED)
        if self._sample is None or self._sample[0] is not bundle:
            # The sample is kept because creating it takes as long as its search.
            self._sample = bundle, await served.workers.pictures.run(lambda: sample(bundle))
        query = self._sample[1]
        hits = await served.search(query, lambda query, hits, index: bytes(len(hits[0])))
        self._items = items
        self._bundle = bundle.sha256
        if (repeat := served.failed) is not None:
            try:
                await served.workers.searches.run(repeat)
            except (DataError, RequestError, Superseded):
                # The bundle was replaced or the item deleted since the search failed.
                pass
            except StoreError as error:
                report(error)
                return DAMAGED
            served.failed = None
        if hits or not items:
            return None
        return "The server's test search found nothing."

    async def _model(self) -> str | None:
        """Return why the encoder no longer agrees with its bundle's probe, or `None`."""
        bundle = self._served.index.bundle
        return await self._served.workers.searches.run(lambda: probe_fault(bundle))


def _followed(index: Index) -> tuple[Bundle, int]:
    """Return the bundle of an index and the number of its items; prepare for a coming switch."""
    index.prepare()
    return index.follow(), len(index)


def _first(faults: Mapping[str, str | None]) -> str | None:
    return next(filter(None, faults.values()), None)


def sample(bundle: Bundle) -> Query:
    """Return a random query, which passes through all stages of a client's search."""
    input = bundle.manifest.input
    noise = np.random.default_rng(0)
    if input.kind == "features":
        return Query((QueryInput(vector=noise.normal(size=input.shape)),), Options(k=1), None)
    pixels = noise.integers(0, 256, size=input.shape, dtype=np.uint8).transpose(1, 2, 0)
    return Query((QueryInput(image=to_png(from_array(pixels))),), Options(k=1), None)
