"""What Prometheus is told: counted while requests are answered, or looked up when it asks."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from retrieval.serving.http.processes.figures import page
from retrieval.serving.http.tallies import Spreads, Tallies
from retrieval.serving.stages import STAGES, Trail
from retrieval.serving.store.contract import Stats

if TYPE_CHECKING:
    from retrieval.serving.http.processes.group import Member
    from retrieval.serving.http.protocol import Connections
    from retrieval.serving.http.searcher import Searcher

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
METHODS = ("GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS")
OTHER = "other"
_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_BATCHES = (1, 2, 4, 8, 16, 32, 64)
_STATS_SECONDS = 15.0
_PAGE = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096


class Metrics:
    """The figures of one server, in a registry of its own.

    Args:
        searchers: whose queues, indexes and processes are looked up, by the index's name.
        routes: the addresses that there are, as patterns; any other is "other".
        gates: the connections of each port, by name.
        member: this process among those of its server; None where there is but one.
    """

    def __init__(
        self,
        searchers: Mapping[str, Searcher],
        routes: Iterable[str],
        gates: Mapping[str, Connections] | None = None,
        member: Member | None = None,
    ) -> None:
        self.registry = CollectorRegistry()
        self._routes = {*routes, OTHER}
        counts: Any = Tallies if member is None else Counter
        spreads: Any = Spreads if member is None else Histogram
        self._requests = counts(
            "retrieval_requests",
            "Requests answered.",
            ["method", "route", "status"],
            registry=self.registry,
        )
        self._refused = counts(
            "retrieval_refused",
            "Requests refused, by why; by their status where it says enough.",
            ["reason"],
            registry=self.registry,
        )
        self._duration = spreads(
            "retrieval_request_seconds",
            "From a request's header to the end of its answer.",
            ["route"],
            buckets=_SECONDS,
            registry=self.registry,
        )
        stages = spreads(
            "retrieval_stage_seconds",
            "Of these, by stage, without the stages inside it.",
            ["stage"],
            buckets=_SECONDS,
            registry=self.registry,
        )
        self._stages = {name: stages.labels(name) for name in STAGES}
        batches = spreads(
            "retrieval_encode_batch",
            "Images (or features) that went through the encoder at once.",
            buckets=_BATCHES,
            registry=self.registry,
        )
        searches = spreads(
            "retrieval_search_batch",
            "Queries that were searched for at once.",
            buckets=_BATCHES,
            registry=self.registry,
        )
        self._sizes = {"encode": batches, "search": searches}
        # the library looks labels up under a lock each time; what there can be is bounded by routes, methods and statuses
        self._counters: dict[tuple[str, str, int], Any] = {}
        self._durations: dict[str, Any] = {}
        self._refusals: dict[str, Any] = {}
        self._growing = _Growing(self.registry, gates or {})
        self._looked = CollectorRegistry()
        self._looked.register(_Looked(searchers, gates or {}, 1 if member is None else member.of))
        self._member = member

    def answered(self, trail: Trail, method: str, route: str, status: int, seconds: float) -> None:
        """Count one request; for the event loop.

        Args:
            trail: its stages.
            method: of HTTP.
            route: the pattern that its address matched.
            status: of its answer; 0 when its client left before there was one.
            seconds: that it took.
        """
        what = (
            method if method in METHODS else OTHER,
            route if route in self._routes else OTHER,
            status if status == 0 or 100 <= status < 600 else 500,
        )
        counter = self._counters.get(what)
        if counter is None:
            counter = self._counters[what] = self._requests.labels(what[0], what[1], str(what[2]))
        counter.inc()
        duration = self._durations.get(what[1])
        if duration is None:
            duration = self._durations[what[1]] = self._duration.labels(what[1])
        duration.observe(seconds)
        for stage, _, _, own, items in trail.spans:
            self._stages[stage].observe(own)
            if items and stage in self._sizes:
                self._sizes[stage].observe(items)
        if status >= 400:
            reason = trail.reason or str(what[2])
            refused = self._refusals.get(reason)
            if refused is None:
                refused = self._refusals[reason] = self._refused.labels(reason)
            refused.inc()

    def exposition(self, others: Iterable[bytes] = ()) -> bytes:
        """Return all figures in the text format of Prometheus; for a thread: it looks at processes.

        Args:
            others: what the other processes have looked up.
        """
        looked = self.looked()
        if self._member is None:
            return generate_latest(self.registry) + looked
        return page(self._member, self.registry, looked, others)

    def looked(self) -> bytes:
        """Return the figures that are looked up in this process, and count what has grown since the last time; for a thread."""
        self._growing.look()
        return generate_latest(self._looked)


class _Growing:
    """Counts what grows elsewhere, by how much since it was looked at: so the count outlives this process.

    Args:
        registry: of the counts.
        gates: the connections of each port, by name.
    """

    def __init__(self, registry: CollectorRegistry, gates: Mapping[str, Connections]) -> None:
        self._gates = gates
        self._refused = Counter(
            "retrieval_connections_refused",
            "What was refused before it was a request, by status.",
            ["port", "status"],
            registry=registry,
        )
        self._cpu = Counter(
            "retrieval_cpu_seconds",
            "CPU time of the server's own processes; those that decode are not in it.",
            registry=registry,
        )
        self._known: dict[tuple[str, ...], float] = {}

    def look(self) -> None:
        """Count what has grown; for one thread at a time."""
        self._cpu.inc(self._more(time.process_time(), "cpu"))
        for port, gate in self._gates.items():
            for status, count in list(gate.refused.items()):
                self._refused.labels(port, str(status)).inc(self._more(count, port, str(status)))

    def _more(self, value: float, *what: str) -> float:
        before = self._known.get(what, 0.0)
        self._known[what] = value
        return value - before


@dataclass
class _Seen:
    stats: Stats | None = None
    at: float = -_STATS_SECONDS


class _Looked(Collector):
    """Looks up what need not be counted."""

    def __init__(
        self, searchers: Mapping[str, Searcher], gates: Mapping[str, Connections], wanted: int
    ) -> None:
        self._searchers, self._gates, self._wanted = searchers, gates, wanted
        self._searcher = next(iter(searchers.values()))  # all share their queues and processes
        self._seen = {name: _Seen() for name in searchers}

    def describe(self) -> Iterable[Metric]:
        """Return nothing: the registry need not collect to learn the names."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Give each figure as it is now."""
        yield from self._queues()
        yield from self._connections()
        yield from self._processes()
        yield from self._index()

    def _queues(self) -> Iterator[Metric]:
        lengths = GaugeMetricFamily(
            "retrieval_queue_length",
            "Searches, images and pictures that wait for their turn.",
            labels=["queue"],
        )
        for name, count in self._searcher.waiting().items():
            lengths.add_metric([name], count)
        yield lengths

    def _connections(self) -> Iterator[Metric]:
        is_open = GaugeMetricFamily(
            "retrieval_connections", "Open connections, by port and whether a request is under way.",
            labels=["port", "state"],
        )  # fmt: skip
        for port, gate in self._gates.items():
            idle = gate.idle_count
            is_open.add_metric([port, "idle"], idle)
            is_open.add_metric([port, "busy"], max(0, gate.count - idle))
        yield is_open

    def _processes(self) -> Iterator[Metric]:
        memory = GaugeMetricFamily(
            "retrieval_memory_bytes", "Resident memory of the server and of the processes that decode, together.",
            labels=["process"],
        )  # fmt: skip
        pids = self._searcher.decode_pids()
        memory.add_metric(["server"], _resident(os.getpid()))
        memory.add_metric(["decode"], sum(map(_resident, pids)))
        yield memory
        there = GaugeMetricFamily(
            "retrieval_processes", "Processes that serve: those that there are to be, and those that gave their figures.",
            labels=["state"],
        )  # fmt: skip
        there.add_metric(["wanted"], self._wanted)
        there.add_metric(["answering"], 1)
        yield there
        yield GaugeMetricFamily("retrieval_decode_processes", "Processes that decode.", value=len(pids))

    def _index(self) -> Iterator[Metric]:
        """Give what each index is; with its name where there are several."""
        found: dict[str, Any] = {}
        labels = ["index"] if len(self._searchers) > 1 else []
        for name, searcher in self._searchers.items():
            for kind, figure, text, value in _figures(self._stats(name, searcher)):
                family = found.setdefault(figure, kind(f"retrieval_index_{figure}", text, labels=labels))
                family.add_metric([name] if labels else [], value)
        yield from found.values()

    def _stats(self, name: str, searcher: Searcher) -> Stats | None:
        now = time.monotonic()
        if now - self._seen[name].at >= _STATS_SECONDS:
            self._seen[name] = _Seen(searcher.stats(), now)
        return self._seen[name].stats


def _figures(stats: Stats | None) -> Iterator[tuple[Any, str, str, float]]:
    """Give the kind, name, meaning and value of each figure of an index."""
    if stats is None:
        return
    gauge, counter, details = GaugeMetricFamily, CounterMetricFamily, stats.details
    yield gauge, "items", "Items of the index.", stats.count
    if stats.bytes is not None:
        yield gauge, "bytes", "Of the index on the disk.", stats.bytes
    if served := [one.number for one in stats.generations if one.state == "served"]:
        yield gauge, "generation", "Number of the generation that is served.", served[0]
        yield gauge, "generations", "Generations that there are.", len(stats.generations)
    if (segments := details.get("segments")) is not None:
        deleted = sum(one["deleted"] for one in segments)
        yield gauge, "segments", "Segments of the served generation.", len(segments)
        yield gauge, "deleted", "Rows of segments that are deleted and not yet merged away.", deleted
    for kind, name, text in (
        (gauge, "fresh", "Items that are in no segment yet."),
        (counter, "transactions", "Writes to the index since it was made, whoever wrote."),
        (counter, "merges", "Merges of segments that this server has made."),
    ):
        if name in details:
            yield kind, name, text, details[name]


def _resident(pid: int) -> int:
    """Return the resident memory of a process in bytes; 0 where the system does not say."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text("ascii").split()[1]) * _PAGE
    except (OSError, ValueError, IndexError):
        return 0
