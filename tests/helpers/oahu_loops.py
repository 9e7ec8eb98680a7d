"""OAHU by plain Python loops in float64, independent of the package."""

import math
from typing import Any

Matrix = list[list[float]]
Vector = list[float]


def product(x: Vector, m: Matrix) -> Vector:
    return [sum(x[i] * m[i][j] for i in range(len(x))) for j in range(len(m[0]))]


def embed(x: Vector, w: list[Matrix], theta: list[Matrix]) -> list[Vector]:
    """Eq 1 and the unit sphere, level by level; `w` has one matrix less than `theta`."""
    actual, h = [], x
    for level, own in enumerate(theta):
        z = product(h, own)
        length = math.sqrt(sum(v * v for v in z))
        actual.append([v / length if length >= 1e-12 else 0.0 for v in z])
        if level < len(w):
            h = [max(0.0, v) for v in product(h, w[level])]
    return actual


def distance(x: Vector, y: Vector) -> float:
    return math.sqrt(sum((a - b) ** 2 for a, b in zip(x, y, strict=True)))


def thresholds(positive: float, negative: float, tau: float) -> tuple[float, float]:
    """Eq 11."""
    near = tau / (math.exp(2) - 1) * (math.exp(positive) - 1)
    far = -(2 - (2 - tau)) / (1 - math.exp(-2)) * (math.exp(-negative) - 1) + (2 - tau)
    return near, far


def local_loss(positive: float, negative: float, near: float, far: float) -> float:
    """Eq 12 and 13 with the thresholds `near` and `far`."""
    attractive = max(0.0, positive / (2 - near) - near / (2 - near))
    repulsive = max(0.0, 1 - negative / far)
    return (attractive + repulsive) / 2


def losses(
    triplet: list[Vector], w: list[Matrix], theta: list[Matrix], tau: float, fixed: Any = None
) -> list[float]:
    """The loss of each level, with the thresholds `fixed` if they are passed."""
    a, p, n = (embed(x, w, theta) for x in triplet)
    actual = []
    for level in range(len(theta)):
        positive, negative = distance(a[level], p[level]), distance(a[level], n[level])
        near, far = thresholds(positive, negative, tau) if fixed is None else fixed[level]
        actual.append(local_loss(positive, negative, near, far))
    return actual


def fixed_thresholds(
    triplet: list[Vector], w: list[Matrix], theta: list[Matrix], tau: float
) -> list[tuple[float, float]]:
    a, p, n = (embed(x, w, theta) for x in triplet)
    return [thresholds(distance(a[i], p[i]), distance(a[i], n[i]), tau) for i in range(len(theta))]


def overall(
    triplet: list[Vector],
    w: list[Matrix],
    theta: list[Matrix],
    tau: float,
    alpha: Vector,
    fixed: Any,
) -> float:
    """Eq 19."""
    return sum(a * x for a, x in zip(alpha, losses(triplet, w, theta, tau, fixed), strict=True))


def hedge(alpha: Vector, loss: Vector, beta: float, s: float, rule: str) -> Vector:
    """Eq 20, the floor, the sum: Algorithm 1, lines 9–11."""
    if rule == "paper":
        rule = "exp" if beta ** min(loss) * math.log(beta) > beta - 1 else "linear"
    changed = []
    for a, x in zip(alpha, loss, strict=True):
        a = a * beta**x if rule == "exp" else a * (1 - (1 - beta) * x)
        changed.append(max(a, s / len(alpha)))
    return [a / sum(changed) for a in changed]


def candidates(
    query: list[Vector], references: list[list[Vector]], alpha: Vector, k: int
) -> list[list[tuple[int, float]]]:
    """Each space's k nearest references with their scores, Eq 23 and 27; `references[i][l]`."""
    actual = []
    for level, weight in enumerate(alpha):
        near = sorted((distance(query[level], r[level]), i) for i, r in enumerate(references))[:k]
        least, span = near[0][0], near[-1][0] - near[0][0]
        scale = [math.exp(-(d - least) / span if span > 0 else 0.0) for d, _ in near]
        actual.append([(i, weight * score) for (_, i), score in zip(near, scale, strict=True)])
    return actual


def predict(query: Any, references: Any, labels: list[str], alpha: Vector, k: int) -> str:
    """Eq 24 and 25."""
    votes: dict[str, float] = {}
    for space in candidates(query, references, alpha, k):
        for i, score in space:
            votes[labels[i]] = votes.get(labels[i], 0.0) + score
    return max(sorted(votes), key=lambda c: votes[c])


def retrieve(query: Any, references: Any, alpha: Vector, k: int) -> list[tuple[int, float]]:
    """Eq 27: sorted by score, the first appearance of each item kept."""
    flat = [pair for space in candidates(query, references, alpha, k) for pair in space]
    answer: list[tuple[int, float]] = []
    for i, score in sorted(flat, key=lambda pair: (-pair[1], pair[0])):
        if i not in [j for j, _ in answer]:
            answer.append((i, score))
    return answer[:k]


def probability(x: list[Vector], y: list[Vector], alpha: Vector, threshold: float) -> float:
    """Eq 26."""
    return sum(a for a, u, v in zip(alpha, x, y, strict=True) if distance(u, v) / 2 < threshold)
