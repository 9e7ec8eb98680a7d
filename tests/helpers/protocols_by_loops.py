"""Metrics of published protocols by loops over rankings, as the authors' code defines them."""

from __future__ import annotations

import math
from collections import defaultdict
from typing import Any


def revisited(order: list[int], relevant: set[int], junk: set[int], ranks: list[int]) -> Any:
    """Return the AP and mP@k of ROxford for one ranking of the whole gallery."""
    kept = [item for item in order if item not in junk]
    positions = [rank for rank, item in enumerate(kept) if item in relevant]
    average = 0.0
    for found, rank in enumerate(positions):
        before = found / rank if rank else 1.0
        average += (before + (found + 1) / (rank + 1)) / (2 * len(relevant))
    precisions = []
    for k in ranks:
        last = min(positions[-1] + 1, k)
        precisions.append(sum(rank < last for rank in positions) / last)
    return average, precisions


def map_at(order: list[int], relevant: set[int], k: int) -> float:
    """Return the AP@k of Google Landmarks v2 and ILIAS for one ranking."""
    found, total = 0, 0.0
    for rank, item in enumerate(order[:k], 1):
        if item in relevant:
            found += 1
            total += found / rank
    return total / min(len(relevant), k)


def micro_ap(pairs: list[tuple[float, bool]], relevant: int) -> float:
    """Return the µAP of (score, right) pairs; of equal scores, the wrong come first."""
    found, total = 0, 0.0
    for rank, (_, right) in enumerate(sorted(pairs, key=lambda pair: (-pair[0], pair[1])), 1):
        if right:
            found += 1
            total += found / rank
    return total / relevant


def met_prediction(
    similarities: list[float], labels: list[int], classes: int, temperature: float
) -> tuple[int, float]:
    """Return class and confidence of the Met dataset's classifier, from the K nearest items."""
    best: dict[int, float] = {}
    for similarity, label in zip(similarities, labels, strict=True):
        best[label] = max(best.get(label, 0.0), similarity)
    powers = {label: math.exp(temperature * best[label]) for label in sorted(best)}
    winner = max(powers, key=lambda label: powers[label])
    return winner, powers[winner] / (sum(powers.values()) + classes - len(powers))


def balanced(truth: list[int], right: list[bool]) -> float:
    """Return the mean over individuals of the share of right answers."""
    answers = defaultdict(list)
    for individual, answer in zip(truth, right, strict=True):
        answers[individual].append(answer)
    return sum(sum(rows) / len(rows) for rows in answers.values()) / len(answers)
