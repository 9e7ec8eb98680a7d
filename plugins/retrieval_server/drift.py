"""Drift: whether photos that clients search with are still like the items of the index.

The calibration has the distance of each of its items to the nearest other item, as if the item were
a photo of something that the index knows. If many more searches than expected are farther from
their nearest item than nearly all of these, the photos, the camera or the items have changed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
from prometheus_client import Histogram
from prometheus_client.core import Metric
from prometheus_client.registry import Collector
from retrieval.base.arrays import Floats64
from retrieval.errors import StoreError
from retrieval.index.calibration import Calibration
from retrieval.index.index import Index
from retrieval.index.queries_and_hits import Hit

_SEARCHES = 1000  # latest searches that are looked at
_MIN_SEARCHES = 100
_EXPECTED_SHARE = 0.05  # of known items that are farther than the limit
_WARNING_SHARE = 0.15  # with 100 searches, chance exceeds it in one of 20,000 cases
_QUANTILES = (0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99)
_BUCKETS = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0)


class Drift:
    """The nearest distances of an index's latest searches by image.

    Args:
        index: the index.
        labels: label of the index in the metrics, by its name; empty for the only index.

    Attributes:
        histogram: counts the distances. Its buckets are quantiles of the distances of known items,
            if the index is calibrated when the server starts.
    """

    def __init__(self, index: Index, labels: Mapping[str, str]) -> None:
        distances = known_distances(read_calibration(index))
        buckets: Sequence[float] = _BUCKETS
        if len(distances):
            rounded = {float(f"{bound:.3g}") for bound in np.quantile(distances, _QUANTILES)}
            buckets = sorted(rounded)
        histogram = Histogram(
            "retrieval_index_nearest_distance",
            "Distance of a search by image, without a filter, to its nearest item.",
            list(labels),
            buckets=buckets,
            registry=None,
        )
        self.histogram = histogram
        self._observe = histogram.labels(**labels).observe if labels else histogram.observe
        # With the bundle, because distances of two bundles cannot be compared.
        self._latest = deque[tuple[str, float]](maxlen=_SEARCHES)

    def note(self, bundle: str, answers: Iterable[Sequence[Hit]]) -> None:
        """Count the hits of queries."""
        for hits in answers:
            if hits:
                self._observe(hits[0].distance)
                self._latest.append((bundle, hits[0].distance))

    def state(self, sha256: str, calibration: Calibration | None) -> dict[str, Any] | None:
        """Return what `/v1/index` says of drift, or `None` for an index without a calibration.

        Args:
            sha256: SHA-256 of the bundle of the index.
            calibration: calibration of the index.
        """
        expected = known_distances(calibration)
        if not len(expected):
            return None
        latest = [distance for bundle, distance in self._latest.copy() if bundle == sha256]
        state: dict[str, Any] = {
            "searches": len(latest),
            "median": float(np.median(latest)) if latest else None,
            "expected": float(np.median(expected)),
            "warning": None,
        }
        limit = float(np.quantile(expected, 1 - _EXPECTED_SHARE))
        share = float(np.mean(np.array(latest) > limit)) if latest else 0.0
        if len(latest) >= _MIN_SEARCHES and share > _WARNING_SHARE:
            state["warning"] = (
                f"Of the last {len(latest):,} searches by image, {share:.0%} are farther than"
                f" {limit:.4g} from their nearest item; of known items {_EXPECTED_SHARE:.0%} are."
                " The photos may have changed, or show what the index lacks."
            )
        return state


class NearestDistances(Collector):
    """The histograms of all indexes as one metric."""

    def __init__(self, drifts: Iterable[Drift]) -> None:
        self._histograms = [drift.histogram for drift in drifts]

    def describe(self) -> Iterable[Metric]:
        """Return the metric without samples."""
        return self._histograms[0].describe()

    def collect(self) -> Iterable[Metric]:
        """Return the metric."""
        (metric,) = self._histograms[0].collect()
        for histogram in self._histograms[1:]:
            (other,) = histogram.collect()
            metric.samples += other.samples
        return [metric]


def read_calibration(index: Index) -> Calibration | None:
    """Return the calibration of an index; `None` if it has none or it is damaged."""
    # A damaged calibration must not keep the server from searching.
    with suppress(StoreError):
        return index.calibration()
    return None


def known_distances(calibration: Calibration | None) -> Floats64:
    """Return the distance of calibrated items to their nearest other item; empty without any."""
    if calibration is None:
        return np.empty(0)
    # NaN: the only item of a class is a stranger to all others.
    nearest: Floats64 = np.minimum(calibration.to_own, calibration.to_other)
    return nearest[np.isfinite(nearest)]
