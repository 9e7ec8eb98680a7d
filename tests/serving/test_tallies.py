"""What the event loop counts looks to Prometheus like what its own library counts, and loses nothing."""

from __future__ import annotations

import re
from time import perf_counter
from types import SimpleNamespace

import numpy as np
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as openmetrics
from retrieval.serving.http.metrics import Metrics
from retrieval.serving.http.tallies import Spreads, Tallies
from retrieval.serving.stages import STAGES, Trail

BOUNDS = (0.001, 0.0025, 1, 10)


def pages(registry: CollectorRegistry) -> list[str]:
    """Return a registry's figures in both formats, without the moments since when they are counted."""
    said = (generate_latest(registry).decode(), openmetrics(registry).decode())
    return [re.sub(r"(_created(?:\{.*\})?) .*", r"\1 then", one) for one in said]


def test_the_pages_are_those_of_the_library():
    """Names, types, meanings, labels, their order, and numbers to the last digit."""
    random, found = np.random.default_rng(0), []
    values = [*random.exponential(0.5, 300).tolist(), *map(float, BOUNDS), 0.0, 11.0, 1e6, 3]
    for counts, spreads in ((Counter, Histogram), (Tallies, Spreads)):
        registry = CollectorRegistry()
        asked = counts("asked", "Of each.", ["how", "status"], registry=registry)
        took = spreads("took_seconds", "By where.", ["where"], buckets=BOUNDS, registry=registry)
        spreads("none", "Of nothing.", ["where"], buckets=BOUNDS, registry=registry)
        plain = spreads("plain", "Without labels.", buckets=(1, 2, 4), registry=registry)
        spreads("empty", "Without labels or values.", buckets=(1, 2, 4), registry=registry)
        for number, value in enumerate(values):
            asked.labels('a "b"\\' if number % 3 else "c", str(number % 2)).inc()
            took.labels(f"/{number % 4}").observe(value)
            plain.observe(number % 7)
        found.append(pages(registry))
    assert found[0] == found[1]
    assert 'took_seconds_bucket{le="+Inf",where="/1"} 77.0' in found[1][0] and "_created" in found[1][0]


def test_a_server_of_one_process_has_the_figures_of_one_of_several(tmp_path):
    """Whatever requests it answers: the one counts itself, the others by the library."""
    searcher, member = SimpleNamespace(), SimpleNamespace(of=2)
    own, theirs = (Metrics({"i": searcher}, ["/a", "/b"], member=one) for one in (None, member))
    random = np.random.default_rng(1)
    for number in range(200):
        trail, now = Trail(), perf_counter()
        for stage in random.permutation(STAGES)[: number % 9]:
            trail.note(str(stage), now, now + float(random.exponential()), int(random.integers(0, 70)))
        trail.reason = ("", "queue", "")[number % 3]
        status = (200, 0, 404, 503, 999)[number % 5]
        for one in (own, theirs):
            method, route = ("POST", "GET", "BREW")[number % 3], ("/a", "/b", "/c")[number % 3]
            one.answered(trail, method, route, status, float(number))
    assert pages(own.registry) == pages(theirs.registry)
