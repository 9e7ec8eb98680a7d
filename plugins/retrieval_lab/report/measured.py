"""Measurements for a report: neighbours, metrics, distances of pairs, mistakes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from retrieval.base.arrays import Bools, Floats64, Ints
from retrieval.errors import DataError, did_you_mean
from retrieval.evaluation.evaluate_run import Protocol, device_of, items_of
from retrieval.evaluation.evaluation import hit_grades, query_values
from retrieval.evaluation.verification import roc_curve
from retrieval.metrics.recall_map_ndcg import metric
from retrieval.run.open import ItemCodes, Run

Items = Ints

SHOWN = 8
"""Number of neighbours that a sheet shows, and that must agree for a label to be suspect."""
RECALLS = (1, 2, 4, 8)
PER_CLASS = 50
"""Most items of a class in the sample of pairs; more if the classes would not fill the sample."""


@dataclass(frozen=True)
class Measured:
    """Results on a run's test items; with random galleries, the results in the first gallery.

    Attributes:
        run: the run.
        query: (Q,), the queries: items that have a relevant item.
        gallery: number of items in the gallery.
        neighbours: (Q, SHOWN), the results, nearest first, padded with −1.
        distances: (Q, SHOWN), the distances of the results.
        grades: (Q, SHOWN), the grades of relevance of the results.
        match: the smallest grade that counts as a match.
        metrics: by name, the values (Q,) of each metric.
        rounds: number of random galleries, or 1 if the recipe draws none.
        intervals: each metric's mean over all galleries, and its 95 % `interval`.
        pairs: a sample of pairs for the histograms and thresholds.
        names: the name of every class, in the order of the run's classes.
    """

    run: Run
    query: Items
    gallery: int
    neighbours: Items
    distances: Floats64
    grades: Floats64
    match: float
    metrics: dict[str, Floats64]
    rounds: int
    intervals: dict[str, tuple[float, float, float]]
    pairs: Pairs
    names: list[str]

    @property
    def labels(self) -> Items:
        """The class of every item of the dataset."""
        return self.run.splits.labels

    def name(self, item: int) -> str:
        """Return the name of an item's class."""
        return self.names[int(self.labels[item])]


@dataclass(frozen=True)
class Pairs:
    """A sample of the test items, and all pairs of its items.

    Attributes:
        items: (S,), the items.
        codes: (S, C), the items' codes: what distances compare.
        matrix: (S, S), the distances between the items.
        first: (P,), the position in `items` of the first item of each pair.
        second: (P,), the position of the second item.
        distance: (P,), the distance of each pair.
        same: (P,), whether the items match: have the same label or share one of `[evaluate] tags`.
    """

    items: Items
    codes: torch.Tensor
    matrix: Floats64
    first: Items
    second: Items
    distance: Floats64
    same: Bools


def measure(run: Run, sample: int, label_column: str | None = None) -> Measured:
    """Search for a run's test items as its `[evaluate]` says, and measure distances of pairs.

    Pairs are of at most `sample` items. `label_column` is a column of metadata with names of
    classes.

    Raises:
        DataError: the run has no test items, no query has a relevant item, or the data lack the
            column.
        RecipeError: `[evaluate]` names a column that the data lack.
    """
    labels = run.splits.labels
    random = np.random.default_rng(0)
    names = class_names(run, label_column)
    query, gallery = items_of(run, "test")
    protocol = Protocol(run, query, gallery)
    codes, gallery_codes = protocol.encoded(ItemCodes(run, device_of(run)))
    run.model.to("cpu")
    table = run.recipe.evaluate
    combiner = run.model.combiner
    metrics = ["map_at_r", *(f"recall_at_{k}" for k in RECALLS), "r_precision"]
    if table.levels or table.tags is not None:
        metrics.append(f"ndcg_at_{SHOWN}")
    chosen = {name: metric(name) for name in metrics}
    columns: dict[str, list[Floats64]] = {name: [] for name in metrics}
    classes: list[Items] = []
    for items, gallery_items, left, right in protocol.rounds(codes, gallery_codes):
        if gallery_items is None:
            searched = items
        else:
            searched = gallery_items
        search, query_class, item_class, arguments = protocol.search(
            items, gallery_items, left, right, combiner and combiner.compute_mat, "auto", SHOWN
        )
        relevance = arguments.get("relevance")
        values, relevant = query_values(search, query_class, item_class, relevance, chosen)
        answerable = np.flatnonzero(relevant > 0)
        for name, column in values.items():
            columns[name].append(column[answerable])
        classes.append(query_class[answerable])
        if len(classes) == 1:
            first = items, searched, relevance, answerable, *search.first(answerable)
    items, searched, relevance, answerable, rows, distances = first
    if not len(answerable):
        raise DataError(f"{run.path}: no test item has a relevant item that it may find.")
    queries = items[answerable]
    grades = (rows >= 0) & (labels[searched[rows]] == labels[queries, None])
    match = 1.0
    if relevance is not None:
        grades = hit_grades(relevance, answerable, rows)
        match = relevance.match
    return Measured(
        run=run,
        query=queries,
        gallery=len(searched),
        neighbours=np.where(rows >= 0, searched[rows], -1),
        distances=distances.astype(np.float64),
        grades=grades.astype(np.float64),
        match=match,
        metrics={name: column[0] for name, column in columns.items()},
        rounds=len(classes),
        intervals={
            name: interval(np.concatenate(column), np.concatenate(classes), random)
            for name, column in columns.items()
        },
        pairs=_pairs(run, query, codes, sample, random),
        names=names,
    )


def class_names(run: Run, column: str | None) -> list[str]:
    """Return the name of each class: its label, or the value of its first item in `column`."""
    names = list(run.splits.classes)
    if column is None:
        return names
    rows = run.dataset.metadata or []
    columns = sorted({str(name) for row in rows for name in row})
    if column not in columns:
        raise DataError(
            f"label_column {column}: the items of {run.path} have no such column of metadata"
            f" (they have: {', '.join(columns) or 'none'}).{did_you_mean(column, columns)}"
        )
    # backwards, so that the first item of a class has the last word
    for item in reversed(range(len(rows))):
        if (value := rows[item].get(column)) is not None:
            names[int(run.splits.labels[item])] = str(value)
    return names


def interval(
    values: Floats64, classes: Items, random: np.random.Generator
) -> tuple[float, float, float]:
    """Return a mean and the ends of its 95 % interval, by a bootstrap over classes.

    For a single class, the interval is the mean itself. Source: Field & Welsh, "Bootstrapping
    clustered data", JRSS B 69, 2007.
    """
    _, number = np.unique(classes, return_inverse=True)
    sums = np.bincount(number, values)
    counts = np.bincount(number)
    means = []
    for _ in range(100):  # ten draws at once, as there may be many classes
        drawn = random.multinomial(len(sums), np.full(len(sums), 1 / len(sums)), size=10)
        means.append(drawn @ sums / (drawn @ counts))
    low, high = np.percentile(means, [2.5, 97.5])
    return float(values.mean()), float(low), float(high)


def _pairs(
    run: Run, items: Items, codes: torch.Tensor, sample: int, random: np.random.Generator
) -> Pairs:
    """Measure all pairs in a sample of at most `sample` items.

    The sample has up to `PER_CLASS` items of each class, or more if needed to fill it. Pairs that
    `[evaluate] exclude` hides are left out.
    """
    labels = run.splits.labels[items]
    chosen: list[int] = []
    classes = random.permutation(np.unique(labels))
    most = max(PER_CLASS, -(-sample // len(classes)))
    for label in classes:
        chosen += random.permutation(np.flatnonzero(labels == label))[:most].tolist()
        if len(chosen) >= sample:
            break
    rows = np.array(sorted(chosen[:sample]))
    part = codes[rows]
    with torch.inference_mode():
        starts = range(0, len(part), 64)
        blocks = [run.model.distances(part[start : start + 64], part) for start in starts]
    matrix: Any = torch.cat(blocks).double().numpy()
    # a combiner's distance may depend on the order of two items, but t-SNE needs symmetry
    matrix = np.maximum((matrix + matrix.T) / 2, 0.0)
    first, second = np.triu_indices(len(rows), 1)
    sample_classes = labels[rows]
    arguments = Protocol(run, items[rows], None).arguments(items[rows], None)
    if (exclude := arguments.get("exclude")) is not None:
        hidden = exclude.hidden(sample_classes, sample_classes)
        visible = hidden.visible(first, second[:, None])[:, 0]
        first = first[visible]
        second = second[visible]
    same = sample_classes[first] == sample_classes[second]
    if (relevance := arguments.get("relevance")) is not None:
        same = relevance(np.arange(len(rows)))[first, second] >= relevance.match
    return Pairs(items[rows], part, matrix, first, second, matrix[first, second], same)


def confusion_matrix(
    measured: Measured, most: int = 12
) -> tuple[list[str], list[str], list[list[int]], int] | None:
    """Return names of rows and columns, counts of nearest items, and the number of test classes.

    Rows and columns are the `most` classes with the most mistakes. A last column counts nearest
    items of all other classes, if there are any. Without a mistake there is no matrix.
    """
    true = measured.labels[measured.query]
    nearest = measured.labels[measured.neighbours[:, 0]]
    if np.array_equal(true, nearest):
        return None
    mistakes = np.bincount(true[true != nearest], minlength=len(measured.names))
    classes = np.unique(true)
    worst = classes[np.argsort(-mistakes[classes], kind="stable")][:most]
    shown = np.sort(worst)
    # all other classes share the last row and the last column
    number = np.full(len(measured.names), len(shown))
    number[shown] = np.arange(len(shown))
    counts = np.zeros((len(shown) + 1, len(shown) + 1), np.int64)
    np.add.at(counts, (number[true], number[nearest]), 1)
    names = [measured.names[label] for label in shown]
    columns = names
    if counts[:-1, -1].any():
        columns = [*names, "other classes"]
    return names, columns, counts[:-1, : len(columns)].tolist(), len(classes)


def suspects(measured: Measured, most: int = 12) -> Items:
    """Return the positions of queries whose `SHOWN` nearest items all have one other label.

    The queries whose nearest items are closest come first.

    Source: Wilson, "Asymptotic properties of nearest neighbor rules using edited data", IEEE Trans.
    SMC 2, 1972.
    """
    is_full = (measured.neighbours >= 0).all(1)
    nearest = measured.labels[measured.neighbours]
    wrong = (
        is_full
        & (nearest == nearest[:, :1]).all(1)
        & (nearest[:, 0] != measured.labels[measured.query])
    )
    rows = np.flatnonzero(wrong)
    return rows[np.argsort(measured.distances[rows].mean(1), kind="stable")][:most]


def hardest(
    measured: Measured, most: int = 8
) -> tuple[list[tuple[int, int, float]], list[tuple[int, int, float]]]:
    """Return the closest non-matching and the farthest matching pairs, with their distances."""
    pairs = measured.pairs

    def listed(mask: Bools, sign: int) -> list[tuple[int, int, float]]:
        rows = np.flatnonzero(mask)
        order = rows[np.argsort(sign * pairs.distance[rows], kind="stable")][:most]
        first = pairs.items[pairs.first[order]]
        second = pairs.items[pairs.second[order]]
        columns = (first.tolist(), second.tolist(), pairs.distance[order].tolist())
        return list(zip(*columns, strict=True))

    return listed(~pairs.same, 1), listed(pairs.same, -1)


def thresholds(pairs: Pairs) -> list[tuple[str, float, float, float]]:
    """Return thresholds of the distance of matching pairs, as (name, threshold, FAR, FRR).

    FAR is the false accept rate, and FRR the false reject rate. The result is empty if all pairs
    match or none does.
    """
    if pairs.same.all() or not pairs.same.any():
        return []
    roc = roc_curve(pairs.distance, pairs.same)
    different = int((~pairs.same).sum())
    # the curve's first threshold is −∞, which is no threshold for a user
    gaps = np.abs(roc.far + roc.tar - 1)[1:]
    points = {"equal error rate": int(np.argmin(gaps)) + 1}
    for rate in (0.1, 0.01, 0.001):
        # fewer different pairs cannot show so small a rate
        if different * rate >= 1:
            points[f"FAR of {100 * rate:g} % at most"] = int(np.flatnonzero(roc.far <= rate)[-1])
    rows = []
    for name, point in points.items():
        threshold = float(roc.threshold[point])
        rows.append((name, threshold, float(roc.far[point]), float(1 - roc.tar[point])))
    return rows
