"""Identify what photos show, or say "unknown", at a rate of false alarms that was measured."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Set
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import TYPE_CHECKING, Any

import numpy as np

from retrieval.bundle.bundle import Encoded
from retrieval.errors import DataError
from retrieval.index.calibration import Calibration, hits_until, need_calibration, read_field
from retrieval.index.queries_and_hits import Hit, Hits, encode_queries
from retrieval.store.contract import Superseded

if TYPE_CHECKING:
    from retrieval.index.index import Index

_HITS = 10  # hits that a verdict shows
# If so many hits have one class, the second counts as infinitely far, which only raises the rate.
_MAX_HITS = 10_000
_MAX_ATTEMPTS = 5  # while other processes change the served bundle


@dataclass(frozen=True)
class Verdict:
    """The answer of `Index.identify`.

    Attributes:
        label: class of what the photos show, or `None` for unknown.
        rate: about this share of strangers comes as near as these photos; see `Calibration.rate`.
        second: another class that is also nearer than strangers are, or `None`.
        stale: whether over 10 % of the items were added or deleted since the calibration.
        hits: nearest items of the photos.
    """

    label: str | None
    rate: float
    second: str | None = None
    stale: bool = False
    hits: Hits = field(default_factory=Hits, repr=False)


def identify(
    index: Index, images: Any, far: float = 0.01, *, without: Collection[str] = ()
) -> Verdict:
    """Return the class of what one photo or several photos show, or unknown.

    Of strangers, whose class the index lacks, about the share `far` gets a label. The index must be
    calibrated: `calibrate` says what it measures, and the page on identification what breaks it.

    Args:
        images: a query or a list of queries, as for `search`. All of them show one thing.
        far: accepted rate of false alarms.
        without: ids of items that are left out, such as the photos themselves.

    Raises:
        DataError: the index is not calibrated, it has too few classes for the rate, or a query
            cannot be used.
    """
    attempts = 0
    while True:
        measured = need_calibration(index)
        measured.require(far)
        bundle = index.bundle
        vectors, codes, _ = encode_queries(bundle, images)
        if not len(vectors):
            raise DataError("There is no photo to identify.")
        queries = Encoded(vectors, vectors, codes, bundle.sha256)
        try:
            return _verdict(index, measured, queries, far, set(without))
        # Another bundle is served, which encodes and is calibrated on its own.
        except Superseded:
            attempts += 1
            if isinstance(images, Encoded) or attempts == _MAX_ATTEMPTS:
                raise


def _verdict(
    index: Index, measured: Calibration, queries: Encoded, far: float, without: Set[str]
) -> Verdict:
    """Return the verdict on the photos of one thing."""
    answers = hits_until(
        index,
        queries,
        lambda _, hits: len(_nearest_classes(hits, measured, without)) == 2,
        _HITS + len(without),
        measured.filter,
        _MAX_HITS,
    )
    rates = []
    votes: Counter[str] = Counter()
    seconds: Counter[str] = Counter()
    for hits in answers:
        classes = _nearest_classes(hits, measured, without)
        if not classes:
            return Verdict(None, 1.0)
        (label, nearest), (second_label, second) = [*classes.items(), ("", np.inf)][:2]
        votes[label] += 1
        rates.append(measured.rate(nearest, label, second))
        # If the index lacked the first class, it would give the photo this label.
        if measured.rate(second, None, second) <= far:
            seconds[second_label] += 1
    rate = rates[0]
    if len(rates) > 1:
        # Twice the mean of p-values is a p-value, however much the photos depend on each other.
        rate = min(1.0, 2 * float(np.mean(rates)))
    names: list[str | None] = [None, None]
    if rate <= far:
        ((winner, _),) = votes.most_common(1)
        seconds.update(votes)
        del seconds[winner]
        names = [winner, *(name for name, _ in seconds.most_common(1)), None]
    evidence: dict[str, Hit] = {}
    for hit in sorted(chain.from_iterable(answers), key=lambda hit: hit.distance):
        if hit.id not in without:
            evidence.setdefault(hit.id, hit)
    shown = Hits(islice(evidence.values(), _HITS), index.store.original)
    return Verdict(names[0], rate, names[1], measured.is_stale(index), shown)


def _nearest_classes(hits: Hits, measured: Calibration, without: Set[str]) -> dict[str, float]:
    """Return the distances of the nearest two classes among hits, nearest first."""
    classes: dict[str, float] = {}
    for hit in hits:
        name = read_field(hit, measured.field)
        if name is not None and hit.id not in without:
            classes.setdefault(name, hit.distance)
            if len(classes) == 2:
                break
    return classes
