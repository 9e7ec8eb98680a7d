"""How near strangers come to an index: measured on the index's own classes.

A stranger belongs to a class that the index lacks. Each class of the index is a stranger to all
others, so the distance of its items to the nearest item of another class is what a stranger's
distance looks like. If classes are exchangeable (the stranger's class is like those of the index),
the rank of a query's distance among these distances is a p-value.

Sources: Barber, Candès, Ramdas & Tibshirani, "Predictive inference with the jackknife+", Annals of
Statistics 49(1), 2021, for one draw; Rüger, "Das maximale Signifikanzniveau des Tests", Metrika 25,
1978, for the median of several; Vovk & Wang, "Combining p-values via averaging", Biometrika
107(4), 2020, for the mean of several photos.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from retrieval.base.arrays import Array, Floats64
from retrieval.base.progress import Meter, Progress, showing
from retrieval.bundle.bundle import Bundle, Encoded
from retrieval.errors import DataError, StoreError, at_least_one
from retrieval.index.queries_and_hits import Hit, Hits
from retrieval.store.contract import (
    CODE,
    VECTOR,
    Generation,
    Item,
    Store,
    Superseded,
    require_time,
)
from retrieval.store.filters import Exists, Filter, In
from retrieval.store.filters.tree import Field, parse_field
from retrieval.store.items import CALIBRATION

if TYPE_CHECKING:
    from retrieval.index.index import Index

_FORMAT = 1
_ARRAYS = {"labels": np.object_, "to_other": np.float64, "to_own": np.float64}
_MAX_PROBES = 4000  # in all draws together
_SAMPLE = 400  # ids that tell how many items were deleted since
_STALE_SHARE = 0.1  # of the items that were added or deleted since
_PAGE = 1000  # items per read
_PROBES_PER_BLOCK = 256
_FIRST_HITS = 16
_MAX_HITS_AT_ONCE = 20_000  # limits the memory of a block of searches


class KnownShares(NamedTuple):
    """What happens at a rate to photos of classes that the index has.

    Attributes:
        unknown: share of these photos that are called unknown.
        wrong: share of these photos that get the label of another class.
    """

    unknown: float
    wrong: float


@dataclass(frozen=True)
class Calibration:
    """Distances between the classes of an index; see `Index.calibrate`.

    A draw takes one item of each class, a probe. Row t of `labels`, `to_other` and `to_own` has the
    probes of draw t.

    Attributes:
        label: metadata field that names an item's class; `None` for the items' label.
        distinct: metadata field whose value items of one burst share, or `None`.
        draws: number of draws.
        seed: seed of the draws.
        created: date and time in UTC.
        classes: number of classes of the index.
        items: number of items that have a class.
        count: number of all items.
        labels: class (draws, n) of each probe.
        to_other: distance (draws, n) of each probe to the nearest item of another class. NaN if the
            probe has no vector.
        to_own: distance (draws, n) of each probe to the nearest other item of its class, or
            infinity if an item of another class is nearer. NaN if its class has no other item.
        sample: ids of some items.
    """

    label: str | None
    distinct: str | None
    draws: int
    seed: int
    created: str
    classes: int
    items: int
    count: int
    labels: Array
    to_other: Floats64
    to_own: Floats64
    sample: list[str]

    def __repr__(self) -> str:
        return (
            f"Calibration(classes={self.classes:,}, items={self.items:,},"
            f" least_rate={self.least_rate:.4g}, created='{self.created}')"
        )

    @property
    def field(self) -> Field:
        """The field that names an item's class."""
        return parse_field(self.label or "label")

    @property
    def filter(self) -> Filter | None:
        """Filter for the items that have a class, or `None` if all have one."""
        if self.items == self.count:
            return None
        return Exists(self.field)

    @property
    def least_rate(self) -> float:
        """The smallest rate that the number of classes can prove, 1 / (n + 1)."""
        return float(np.median(1 / (self._sizes() + 1)))

    def _sizes(self) -> Floats64:
        """Return the number of probes of each draw."""
        sizes: Floats64 = (~np.isnan(self.to_other)).sum(axis=1)
        return sizes

    def rate(self, nearest: float, label: str | None, second: float) -> float:
        """Return the share of strangers that come as near as a query, as a p-value.

        For each draw of n probes, this is (1 + c) / (n + 1), where c counts the probes that are as
        near to another class as the query is to the index without the probe's own class. The
        median over the draws is returned.

        Args:
            nearest: distance of the query to its nearest item.
            label: class of this item.
            second: distance of the query to the nearest item of another class.
        """
        return float(np.median(self._rates(nearest, label, second)))

    def _rates(self, nearest: float, label: str | None, second: float) -> Floats64:
        """Return the p-value of each draw; see `rate`."""
        limits = np.where(self.labels == label, second, nearest)
        counts = (self.to_other <= limits).sum(axis=1)
        rates: Floats64 = (1 + counts) / (self._sizes() + 1)
        return rates

    def shares(self, distances: Sequence[float]) -> Floats64:
        """Return for each distance the share of strangers that come as near.

        It is the `rate` of a query of no class, so `1 - share` is the score of a hit.
        """
        # NaN is sorted last, so it never counts.
        counts = [np.searchsorted(np.sort(draw), distances, "right") for draw in self.to_other]
        shares: Floats64 = np.median((1 + np.array(counts)) / (self._sizes()[:, None] + 1), axis=0)
        return shares

    def known(self, far: float) -> KnownShares:
        """Return what happens to known photos at a rate: each probe stands for such a photo."""
        has_own = ~np.isnan(self.to_own) & ~np.isnan(self.to_other)
        unknown = 0
        wrong = 0
        for draw, column in np.argwhere(has_own).tolist():
            own = self.to_own[draw, column]
            other = self.to_other[draw, column]
            is_right = bool(own <= other)
            label = self.labels[draw, column] if is_right else None
            rates = self._rates(min(own, other), label, other)
            if self.draws > 1:
                # In its own draw, the probe would be compared with itself.
                rates = np.delete(rates, draw)
            rate = float(np.median(rates))
            unknown += rate > far
            wrong += rate <= far and not is_right
        count = max(1, int(has_own.sum()))
        return KnownShares(unknown / count, wrong / count)

    def require(self, far: float) -> None:
        """Raise a `DataError` unless the calibration can prove a rate."""
        if not 0 < far < 1:
            raise DataError(f"A rate of false alarms is between 0 and 1, not {far}.")
        if far < self.least_rate:
            advice = "Ask for a higher rate, or add classes"
            # A draw has all classes unless they are many.
            if self.classes > self.labels.shape[1]:
                advice += ", or calibrate with fewer draws, which have more classes each"
            raise DataError(
                f"Too few classes: {self.classes:,} classes in {self.draws} draws can tell a rate"
                f" of {self.least_rate:.2g} or more, not {far:g}. {advice}."
            )

    def is_stale(self, index: Index) -> bool:
        """Return whether over 10 % of the items were added or deleted since the calibration."""
        # To count the ids is far cheaper than to read the items.
        remaining = index.store.count(In("id", tuple(self.sample)))
        alive = self.count * remaining / len(self.sample)
        deleted = self.count - alive
        added = max(0, len(index) - alive)
        return deleted + added > _STALE_SHARE * self.count

    def to_bytes(self) -> bytes:
        """Return the calibration as JSON."""
        arrays = {name: vars(self)[name].tolist() for name in _ARRAYS}
        return json.dumps({"format": _FORMAT, **vars(self), **arrays}).encode()

    @classmethod
    def from_bytes(cls, content: bytes) -> Calibration:
        """Read what `to_bytes` wrote.

        Raises:
            StoreError: the content is damaged, or of a newer version.
        """
        try:
            facts = json.loads(content)
            if facts.pop("format") != _FORMAT:
                raise ValueError("another format")
            # Text as objects, because one long label would make an array of text huge.
            arrays: dict[str, Any] = {
                name: np.array(facts.pop(name), kind) for name, kind in _ARRAYS.items()
            }
            shapes = {array.shape for array in arrays.values()}
            if len(shapes) > 1 or arrays["to_own"].ndim != 2:
                raise ValueError("its arrays have other shapes")
            return cls(**facts, **arrays)
        except (ValueError, TypeError, KeyError, AttributeError) as fault:
            raise StoreError(
                f"The calibration of this index cannot be read: {fault}. Calibrate it again."
            ) from None


def read_field(entry: Item | Hit, field: Field) -> str | None:
    """Return the value of an item's field as text, or `None` without one."""
    value: Any
    if isinstance(field, str):
        value = getattr(entry, field)
    else:
        value = entry.metadata
        for name in field:
            value = value.get(name) if isinstance(value, Mapping) else None
    if value is None or isinstance(value, str):
        return value
    return json.dumps(value, sort_keys=True)


def read_calibration(store: Store, generation: Generation) -> Calibration | None:
    """Return the calibration of a generation, or `None`."""
    content = store.note(generation, CALIBRATION)
    if content is None:
        return None
    return _parsed(content)


# To parse a calibration takes longer than most searches, but to read it does not. The bytes are the
# key, so that what another process measures anew is seen at once.
_parsed = lru_cache(maxsize=8)(Calibration.from_bytes)


def calibration(index: Index) -> Calibration | None:
    """Return what `calibrate` measured on the served generation, or `None`."""
    index.follow()
    return read_calibration(index.store, index.generation)


def need_calibration(index: Index) -> Calibration:
    """Return what `calibrate` measured on the served generation.

    Raises:
        DataError: the index is not calibrated.
    """
    measured = calibration(index)
    if measured is None:
        raise DataError(
            "This index is not calibrated. First run: retrieval calibrate INDEX (in Python:"
            " index.calibrate())."
        )
    return measured


def calibrate(
    index: Index,
    label: str | None = None,
    distinct: str | None = None,
    *,
    draws: int = 11,
    seed: int = 0,
    progress: Progress = True,
) -> Calibration:
    """Measure how near strangers come, and keep the result with the served generation.

    Each draw takes one item of each class, and finds the nearest item of another class. In all
    draws there are at most 4,000 items; of more classes, each draw takes some. Repeat this after
    many items were added or deleted. `migrate` repeats it.

    Args:
        label: metadata field that names an item's class; by default the items' label. Items
            without it are left out.
        distinct: metadata field of which items of one burst, photo or event share the value. Such
            items are not compared.
        draws: number of draws, which is odd. The smallest rate is 1 / (n + 1) for n classes a
            draw, so fewer draws of an index with many classes allow a smaller rate.
        seed: seed of the draws.
        progress: see `add`.

    Raises:
        DataError: the index has fewer than two classes, no item has the field `distinct`, or the
            bundle's distances cannot be compared between queries.
        StoreError: the index is read-only, its store keeps no notes, or the disk fails.
    """
    if at_least_one("draws", draws) % 2 == 0 or draws > _MAX_PROBES:
        raise DataError(f"draws must be odd and at most {_MAX_PROBES:,}, not {draws}.")
    bundle = index.follow()
    generation = index.generation
    _refuse(bundle)
    with showing(progress):
        items = _Classes(
            index, parse_field(label or "label"), parse_field(distinct) if distinct else None
        )
        if len(items.by_class) < 2:
            raise DataError(
                f"The index {index.path} has {len(items.by_class)} classes by its"
                f" field '{label or 'label'}'. Calibration needs two or more; each further one"
                " allows a smaller rate."
            )
        if distinct is not None and not items.has_bursts:
            raise DataError(
                f"No item of the index {index.path} that has a class has the field '{distinct}', by"
                " which bursts are told apart. Name another field."
            )
        rng = np.random.default_rng(seed)
        probes = items.draw(rng, draws)
        sample = rng.permutation(items.ids)[:_SAMPLE].tolist()
        distances = items.measure(bundle, sorted({id for draw in probes for id in draw}))
    pairs = np.array([[distances.get(id, (np.nan, np.nan)) for id in draw] for draw in probes])
    calibration = Calibration(
        label,
        distinct,
        draws,
        seed,
        datetime.now(UTC).isoformat(timespec="seconds"),
        len(items.by_class),
        len(items.class_of),
        len(items.ids),
        np.array([[items.class_of[id] for id in draw] for draw in probes], np.object_),
        pairs[:, :, 0],
        pairs[:, :, 1],
        sample,
    )
    index.store.set_note(generation, CALIBRATION, calibration.to_bytes())
    return calibration


def _refuse(bundle: Bundle) -> None:
    """Refuse a bundle whose items cannot stand for queries."""
    if bundle.manifest.query_vectors:
        raise DataError(
            "The bundle of this index encodes queries differently from items, so its items cannot"
            " stand for queries, and the index cannot be calibrated."
        )
    if bundle.manifest.merge == "score":
        raise DataError(
            "The distances of this bundle order the hits of one query, and cannot be compared"
            " between queries. So the index cannot be calibrated."
        )


class _Classes:
    """The items of an index by class.

    Attributes:
        ids: ids of all items.
        class_of: class of each item that has one, by id.
        by_class: ids of the items of each class.
    """

    def __init__(self, index: Index, label: Field, distinct: Field | None) -> None:
        self.index = index
        self.label = label
        self.distinct = distinct
        self.ids: list[str] = []
        self.class_of: dict[str, str] = {}
        self.by_class: dict[str, list[str]] = defaultdict(list)
        # Number of the items of a class with each value of `distinct`.
        self._alike: Counter[tuple[str, str]] = Counter()
        after = None
        while page := index.scan(after=after, limit=_PAGE):
            after = page[-1].id
            for item in page:
                self.ids.append(item.id)
                name = read_field(item, label)
                if name is not None:
                    self.class_of[item.id] = name
                    self.by_class[name].append(item.id)
                    self._alike[name, self._burst(item)] += 1

    @property
    def has_bursts(self) -> bool:
        """Whether an item has the field `distinct`."""
        return any(burst.startswith("=") for _, burst in self._alike)

    def _burst(self, entry: Item | Hit) -> str:
        """Return what an item shares only with items that must not be compared with it."""
        value = None
        if self.distinct is not None:
            value = read_field(entry, self.distinct)
        if value is None:
            # A value starts with "=", so that it equals no id.
            return entry.id
        return f"={value}"

    def draw(self, rng: np.random.Generator, draws: int) -> list[list[str]]:
        """Return the ids of the probes of each draw."""
        names = sorted(self.by_class)
        size = min(len(names), _MAX_PROBES // draws)
        probes = []
        for _ in range(draws):
            drawn = sorted(rng.choice(len(names), size, replace=False).tolist())
            groups = [self.by_class[names[number]] for number in drawn]
            probes.append([group[rng.integers(len(group))] for group in groups])
        return probes

    def measure(self, bundle: Bundle, ids: Sequence[str]) -> dict[str, tuple[float, float]]:
        """Return each probe's distance to the nearest item of another class, and of its own."""
        filter = None
        if len(self.class_of) < len(self.ids):
            filter = Exists(self.label)
        distances = {}
        with Meter("calibrating", len(ids), "items") as meter:
            for start in range(0, len(ids), _PROBES_PER_BLOCK):
                block = ids[start : start + _PROBES_PER_BLOCK]
                items = self.index.get(block, arrays=True).values()
                # A migration with `skip_bad` leaves items without arrays.
                probes = [item for item in items if item.arrays]
                if probes:
                    searches = hits_until(
                        self.index,
                        as_queries(bundle, probes),
                        lambda row, hits: self._nearest(probes[row], hits)[0] < np.inf,  # noqa: B023
                        _FIRST_HITS,
                        filter,
                    )
                    for probe, hits in zip(probes, searches, strict=True):
                        distances[probe.id] = self._nearest(probe, hits)
                meter.update(len(block))
        return distances

    def _nearest(self, probe: Item, hits: Hits) -> tuple[float, float]:
        """Return the distances of a probe's nearest hits of another class and of its own."""
        name = self.class_of[probe.id]
        burst = self._burst(probe)
        to_own = np.inf
        if len(self.by_class[name]) == self._alike[name, burst]:
            to_own = np.nan
        for hit in hits:
            hit_class = read_field(hit, self.label)
            if hit_class is None or self._burst(hit) == burst:
                continue
            if hit_class != name:
                return hit.distance, to_own
            to_own = min(to_own, hit.distance)
        return np.inf, to_own


def as_queries(bundle: Bundle, items: Sequence[Item]) -> Encoded:
    """Return the stored arrays of items as queries."""
    vectors = np.stack([item.arrays[VECTOR] for item in items])
    codes = None
    if bundle.manifest.rescorer is not None:
        codes = np.stack([item.arrays[CODE] for item in items])
    return Encoded(vectors, vectors, codes, bundle.sha256)


def hits_until(
    index: Index,
    queries: Encoded,
    is_enough: Callable[[int, Hits], bool],
    k: int,
    filter: Filter | None = None,
    most: int | None = None,
) -> list[Hits]:
    """Search for more hits of each query until they are enough, or all items are hits.

    Args:
        index: the index.
        queries: encoded queries.
        is_enough: takes the row of a query and its hits.
        k: number of hits at first.
        filter: leaves out items that `is_enough` ignores, which saves hits.
        most: number of hits that are enough in any case.
    """
    if "filters" not in index.store.capabilities:
        filter = None
    answers: list[Hits] = [Hits()] * len(queries)
    rows = list(range(len(queries)))
    while rows:
        unfinished = []
        step = max(1, _MAX_HITS_AT_ONCE // k)
        for start in range(0, len(rows), step):
            require_time()
            block = rows[start : start + step]
            vectors = queries.query[block]
            codes = None if queries.code is None else queries.code[block]
            encoded = Encoded(vectors, vectors, codes, queries.bundle)
            for row, hits in zip(block, index.search(encoded, k, filter=filter), strict=True):
                answers[row] = hits
                is_last = len(hits) < k or k == most
                if not is_last and not is_enough(row, hits):
                    unfinished.append(row)
        rows = unfinished
        k *= 4
        if most is not None:
            k = min(k, most)
    return answers


def calibrate_again(index: Index, before: Generation) -> None:
    """Calibrate the served generation with the settings of an earlier one, if it had a calibration.

    An index that cannot be calibrated with its new bundle stays without.
    """
    earlier = read_calibration(index.store, before)
    if earlier is not None:
        with suppress(DataError, Superseded):
            calibrate(
                index, earlier.label, earlier.distinct, draws=earlier.draws, seed=earlier.seed
            )
