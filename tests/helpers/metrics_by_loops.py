"""Metrics of retrieval by their definitions, one query and one rank after another, in float64."""

from collections.abc import Callable
from typing import Any

import numpy as np

ALL = ["recall_at_1", "recall_at_4", "precision_at_1", "precision_at_5"]
ALL += ["r_precision", "map_at_r", "map"]


def metrics_by_loops(
    codes: Any,
    labels: Any,
    gallery: Any = None,
    theirs: Any = None,
    seen: Callable[[int], list[int]] | None = None,
) -> tuple[dict[str, float], int]:
    """The mean of each metric, and how many queries have a match.

    seen: places of the gallery that a query may see; of a query among the items, all others.
    """
    itself = gallery is None
    gallery, theirs = (codes, labels) if itself else (gallery, theirs)
    sums, asked = dict.fromkeys(ALL, 0.0), 0
    for i, code in enumerate(np.asarray(codes, float)):
        order = []
        for j in seen(i) if seen else range(len(gallery)):
            if itself and i == j:
                continue
            other = np.asarray(gallery[j], float)
            distance = sum((a - b) ** 2 for a, b in zip(code, other, strict=True))
            order.append((float(np.float32(distance)), j))
        hits = [theirs[j] == labels[i] for _, j in sorted(order)]
        relevant = sum(hits)
        if not relevant:
            continue
        asked += 1
        precision = [sum(hits[: rank + 1]) / (rank + 1) for rank in range(len(hits))]
        sums["recall_at_1"] += any(hits[:1])
        sums["recall_at_4"] += any(hits[:4])
        sums["precision_at_1"] += sum(hits[:1]) / 1
        sums["precision_at_5"] += sum(hits[:5]) / 5
        sums["r_precision"] += sum(hits[:relevant]) / relevant
        sums["map_at_r"] += sum(precision[j] for j in range(relevant) if hits[j]) / relevant
        sums["map"] += sum(precision[j] for j in range(len(hits)) if hits[j]) / relevant
    return {name: value / asked if asked else float("nan") for name, value in sums.items()}, asked
