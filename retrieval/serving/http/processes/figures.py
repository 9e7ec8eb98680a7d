"""The figures of a server of several processes, on one page, whichever of them is asked.

What is counted, each process writes to a file of its own number (prometheus_client's multiprocess mode), which its successor goes on with: a
total never falls because a process was killed. What is looked up, the one that is asked asks the others for, and adds up.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from typing import Any

import prometheus_client.values
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from retrieval.serving.http.processes.group import FIGURES, Member

_INDEX = "retrieval_index_"
_MERGES = "retrieval_index_merges"


def count_in(member: Member) -> None:
    """Have this process count in a file of its number; before any figure is made."""
    os.environ["PROMETHEUS_MULTIPROC_DIR"] = str(member.folder / FIGURES)
    library: Any = prometheus_client.values
    library.ValueClass = library.MultiProcessValue(lambda number=member.number: number)


def page(member: Member, counted: CollectorRegistry, own: bytes, others: Iterable[bytes]) -> bytes:
    """Return the figures of all processes in the text format of Prometheus.

    Args:
        member: this process.
        counted: its own registry of what is counted, for the meanings.
        own: what it has looked up.
        others: what the others have.
    """
    meanings = {family.name: family.documentation for family in counted.collect()}
    registry = CollectorRegistry()
    registry.register(_Given(_counted(member, meanings)))
    registry.register(_Given(_added(own, others)))
    return generate_latest(registry)


class _Given(Collector):
    """Gives what there is already."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = list(families)

    def describe(self) -> Iterable[Metric]:
        """Return nothing: the registry need not collect to learn the names."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Give it."""
        yield from self._families


def _counted(member: Member, meanings: dict[str, str]) -> Iterator[Metric]:
    read: Any = MultiProcessCollector
    for family in read(None, str(member.folder / FIGURES)).collect():
        family.documentation = meanings.get(family.name, family.documentation)
        yield family


def _added(own: bytes, others: Iterable[bytes]) -> list[Metric]:
    """Return what was looked up in all processes: added up, but for what is the index's, which is the same for all."""
    families: dict[str, Metric] = {}
    values: dict[str, dict[tuple[str, tuple[tuple[str, str], ...]], float]] = {}
    for text in (own, *others):
        for family in text_string_to_metric_families(text.decode()):
            families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            known = values.setdefault(family.name, {})
            for sample in family.samples:
                key = sample.name, tuple(sorted(sample.labels.items()))
                one_for_all = family.name.startswith(_INDEX) or sample.labels.get("state") == "wanted"
                if key not in known:
                    known[key] = sample.value
                elif not one_for_all or family.name == _MERGES:
                    known[key] += sample.value
                elif family.type == "counter":  # looked up at another moment: what only grows never falls
                    known[key] = max(known[key], sample.value)
    for name, family in families.items():
        for (sample_name, labels), value in values[name].items():
            family.add_sample(sample_name, dict(labels), value)
    return list(families.values())
