"""Counts and histograms for Prometheus that one thread counts in, without a lock: the event loop, many times a request.

They have the calls of prometheus_client's own and look the same to whoever asks. Several processes count in files instead, by the library's:
what is in memory only is gone with a process that is killed, and a total never falls.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Generic, TypeVar

from prometheus_client import Counter
from prometheus_client.core import Metric
from prometheus_client.registry import Collector, CollectorRegistry
from prometheus_client.utils import floatToGoString

Child = TypeVar("Child", "Tally", "Spread")


def _says_since() -> bool:
    """Whether the library says since when each figure is counted; its users may turn that off."""
    counts = Counter("probe", "Of nothing.", registry=None)
    return any(one.name == "probe_created" for family in counts.collect() for one in family.samples)


class Tally:
    """One count."""

    __slots__ = ("since", "value")

    def __init__(self) -> None:
        self.value, self.since = 0, time.time()

    def inc(self) -> None:
        """Count one."""
        self.value += 1


class Spread:
    """One histogram.

    Args:
        bounds: upper ones, ascending; what is more than the last is counted too.
    """

    __slots__ = ("_bounds", "counts", "since", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds, self.counts, self.sum = bounds, [0] * (len(bounds) + 1), 0.0
        self.since = time.time()

    def observe(self, value: float) -> None:
        """Count a value, which belongs below the first bound that it does not exceed."""
        self.counts[bisect_left(self._bounds, value)] += 1
        self.sum += value


class _Family(Collector, Generic[Child]):
    """Figures of one name.

    Args:
        name: without an end such as `_total`.
        documentation: what they mean.
        labels: names.
        registry: that asks for them.
    """

    def __init__(
        self, name: str, documentation: str, labels: Sequence[str], registry: CollectorRegistry
    ) -> None:
        self._name, self._documentation, self._labels = name, documentation, tuple(labels)
        self._children: dict[tuple[str, ...], Child] = {}
        self._since = _says_since()
        registry.register(self)

    def _made(self) -> Child:
        """Return a figure of labels that were not seen before."""
        raise NotImplementedError(f"{type(self).__name__} must define _made()")

    def labels(self, *values: str) -> Child:
        """Return the figure of some labels; the same one each time."""
        child = self._children.get(values)
        if child is None:
            child = self._children[values] = self._made()
        return child

    def describe(self) -> Iterable[Metric]:
        """Return nothing: the registry need not collect to learn the names."""
        return []

    def _each(self) -> Iterator[tuple[dict[str, str], Child]]:
        for values, child in list(self._children.items()):  # the event loop goes on meanwhile
            yield dict(zip(self._labels, values, strict=True)), child


class Tallies(_Family[Tally]):
    """Counts of one name; see `_Family`."""

    def _made(self) -> Tally:
        return Tally()

    def collect(self) -> Iterator[Metric]:
        """Give them as they are now."""
        family = Metric(self._name, self._documentation, "counter")
        for labels, child in self._each():
            family.add_sample(f"{self._name}_total", labels, child.value)
            if self._since:
                family.add_sample(f"{self._name}_created", labels, child.since)
        yield family


class Spreads(_Family[Spread]):
    """Histograms of one name; see `_Family`. One without labels is there from the start.

    Args:
        buckets: upper bounds, ascending.
    """

    def __init__(
        self,
        name: str,
        documentation: str,
        labels: Sequence[str] = (),
        *,
        buckets: Sequence[float],
        registry: CollectorRegistry,
    ) -> None:
        self._bounds = [float(each) for each in buckets]
        written: Any = floatToGoString
        self._said = [str(written(each)) for each in (*self._bounds, float("inf"))]
        super().__init__(name, documentation, labels, registry)
        if not labels:
            self.observe = self.labels().observe

    def _made(self) -> Spread:
        return Spread(self._bounds)

    def collect(self) -> Iterator[Metric]:
        """Give them as they are now."""
        family, name = Metric(self._name, self._documentation, "histogram"), self._name
        for labels, child in self._each():
            counted = 0
            for bound, count in zip(self._said, list(child.counts), strict=True):
                counted += count
                family.add_sample(f"{name}_bucket", {**labels, "le": bound}, counted)
            family.add_sample(f"{name}_count", labels, counted)
            family.add_sample(f"{name}_sum", labels, child.sum)
            if self._since:
                family.add_sample(f"{name}_created", labels, child.since)
        yield family
