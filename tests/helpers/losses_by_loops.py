"""The deep losses' formulas as plain Python loops over float64 numbers."""

import math
from collections.abc import Callable, Sequence

from torch import Tensor

Sets = list[tuple[list[int], list[int]]]


def log_exp_mean(values: Sequence[float], gamma: float) -> float:
    """1/γ · log(mean of e^{γ a}), the mean at γ = 0, the maximum at infinity."""
    if gamma == 0:
        return sum(values) / len(values)
    if math.isinf(gamma):
        return max(values)
    return math.log(math.fsum(math.exp(gamma * a) for a in values) / len(values)) / gamma


def log_exp_sum(values: Sequence[float], gamma: float) -> float:
    return math.log(math.fsum(math.exp(gamma * a) for a in values)) / gamma


def cosines(x: Tensor, y: Tensor) -> list[list[float]]:
    return [
        [
            math.fsum(a * b for a, b in zip(u, v, strict=True))
            / math.sqrt(math.fsum(a * a for a in u))
            / math.sqrt(math.fsum(b * b for b in v))
            for v in y.tolist()
        ]
        for u in x.tolist()
    ]


def by_label(labels: Sequence[int], others: Sequence[int] | None = None) -> Sets:
    """Positives and negatives of each anchor."""
    own = others is None
    others = labels if others is None else others
    return [
        (
            [j for j, b in enumerate(others) if a == b and not (own and i == j)],
            [j for j, b in enumerate(others) if a != b],
        )
        for i, a in enumerate(labels)
    ]


def mined(s: list[list[float]], sets: Sets, epsilon: float) -> Sets:
    kept = []
    for row, (same, different) in zip(s, sets, strict=True):
        most = max((row[j] for j in different), default=-math.inf)
        least = min((row[j] for j in same), default=math.inf)
        positives = [j for j in same if row[j] - epsilon < most]
        kept.append((positives, [j for j in different if row[j] + epsilon > least]))
    return kept


def gaps(
    s: list[list[float]],
    sets: Sets,
    gamma1: float,
    gamma2: float,
    p: float | None,
    q: float | None,
    soft: Callable[[Sequence[float], float], float] = log_exp_mean,
) -> list[float | None]:
    """Equation 22 in similarities; None for an anchor without a pair or without one side."""
    actual: list[float | None] = []
    for row, (same, different) in zip(s, sets, strict=True):
        near = [-row[j] for j in same] + ([] if p is None else [-p])
        far = [row[j] for j in different] + ([] if q is None else [q])
        if not near or not far or not (same or different):
            actual.append(None)
        else:
            actual.append(soft(near, gamma1) + soft(far, gamma2))
    return actual


def mean_loss(x: list[float | None], outer: str, margin: float = 0.0) -> float:
    costs = {"identity": float, "hinge": lambda gap: max(gap, 0.0)}
    costs["logistic"] = lambda gap: math.log1p(math.exp(gap))
    return math.fsum(costs[outer](gap + margin) for gap in x if gap is not None) / len(x)


def npair(s: list[list[float]], gamma: float, offset: float) -> float:
    """Equation 31 of N pairs of N classes, s[i][j] the similarity of anchor i and positive j."""
    n, total = len(s), 0.0
    for i in range(n):
        terms = [math.exp(gamma * (s[i][j] - offset - s[i][i])) for j in range(n) if j != i]
        total += math.log(1 + math.fsum(terms))
    return total / (n * gamma)
