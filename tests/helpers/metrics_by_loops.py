"""Metrics of retrieval by their definitions, one query and one rank after another, in float64."""

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

ALL = ["recall_at_1", "recall_at_4", "precision_at_1", "precision_at_5"]
ALL += ["r_precision", "map_at_r", "map"]


def random_items(seed: int, count: int = 70, tied: bool = False, classes: int = 9) -> Any:
    """Return codes, labels of classes of unequal size, and the generator; `tied` codes are few."""
    random = np.random.default_rng(seed)
    labels = np.minimum(random.geometric(0.25, count), classes)
    if tied:
        codes = random.integers(0, 3, (count, 2))
    else:
        codes = random.normal(size=(count, 5)) + labels[:, None] * 0.3
    return codes.astype(np.float32), labels, random


def nearest_by_loops(query: Any, gallery: Any, seen: Iterable[int]) -> list[tuple[float, int]]:
    """Return (squared distance rounded to float32, row) of the rows `seen`, nearest first."""
    pairs = []
    for row in seen:
        differences = np.asarray(query, float) - np.asarray(gallery[row], float)
        pairs.append((float(np.float32(sum(d**2 for d in differences.tolist()))), row))
    return sorted(pairs)


def metrics_by_loops(
    codes: Any,
    labels: Any,
    gallery: Any = None,
    theirs: Any = None,
    seen: Callable[[int], list[int]] | None = None,
) -> tuple[dict[str, float], int]:
    """Return the mean of each metric, and how many queries have a match.

    `seen` returns the rows of the gallery that a query may see; by default, all but its own.
    """
    itself = gallery is None
    gallery, theirs = (codes, labels) if itself else (gallery, theirs)
    sums, queries = dict.fromkeys(ALL, 0.0), 0
    for i, code in enumerate(codes):
        rows = seen(i) if seen else [j for j in range(len(gallery)) if not (itself and i == j)]
        hits = [theirs[j] == labels[i] for _, j in nearest_by_loops(code, gallery, rows)]
        relevant = sum(hits)
        if not relevant:
            continue
        queries += 1
        precision = [sum(hits[: rank + 1]) / (rank + 1) for rank in range(len(hits))]
        sums["recall_at_1"] += any(hits[:1])
        sums["recall_at_4"] += any(hits[:4])
        sums["precision_at_1"] += sum(hits[:1]) / 1
        sums["precision_at_5"] += sum(hits[:5]) / 5
        sums["r_precision"] += sum(hits[:relevant]) / relevant
        sums["map_at_r"] += sum(precision[j] for j in range(relevant) if hits[j]) / relevant
        sums["map"] += sum(precision[j] for j in range(len(hits)) if hits[j]) / relevant
    means = {name: value / queries if queries else float("nan") for name, value in sums.items()}
    return means, queries
