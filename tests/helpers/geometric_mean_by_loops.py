"""Eq 11 of AML by plain loops over explicit pairs; nothing simplified."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from scipy.linalg import sqrtm
from torch import Tensor

Matrix = Any
LABELS = torch.tensor([0, 0, 1, 1, 2, 2, 2, 0, 1, 3, 3, 0])


def batch(items: int = 12, size: int = 3, seed: int = 0) -> Tensor:
    random = torch.Generator().manual_seed(seed)
    scale = torch.linspace(0.5, 2.0, size, dtype=torch.float64)
    return torch.randn(items, size, dtype=torch.float64, generator=random) * scale + 3


def dist(m: Matrix, x: Matrix, y: Matrix) -> float:
    total = 0.0
    for i in range(len(x)):
        for j in range(len(x)):
            total += (x[i] - y[i]) * m[i, j] * (x[j] - y[j])
    return total


def eq_9(m: Matrix, x: Matrix, y: Matrix, similar: bool, beta: float) -> tuple[Matrix, Matrix]:
    back = np.linalg.inv(m) if similar else m
    solve = np.linalg.inv(2 * back + beta * m)
    return solve @ (back @ (x + y) + beta * m @ x), solve @ (back @ (x + y) + beta * m @ y)


def eq_11(
    embeddings: Matrix,
    pairs: Any,
    alpha: float,
    beta: float,
    ridge: float,
    t: float = 1.0,
    both: Any = None,
) -> float:
    """Eq 7 of the pairs and α times Eq 7 of Eq 9's, M = tΣ over whitened embeddings; nothing
    simplified.
    """
    everything = embeddings if both is None else np.concatenate([embeddings, both])
    reference = embeddings if both is None else both
    mean = sum(everything) / len(everything)
    covariance = sum(np.outer(e - mean, e - mean) for e in everything) / len(everything)
    covariance = covariance + ridge * np.trace(covariance) / len(mean) * np.eye(len(mean))
    whiten = np.linalg.inv(sqrtm(covariance).real)
    m = t * covariance
    sums: dict[bool, list[float]] = {True: [], False: []}
    for similar, listed in ((True, pairs[:2]), (False, pairs[2:])):
        for i, j in zip(*listed, strict=True):
            x, y = whiten @ embeddings[i], whiten @ reference[j]
            metric = m if similar else np.linalg.inv(m)
            value = dist(metric, x, y)
            value += alpha * dist(metric, *eq_9(m, x, y, similar, beta))
            sums[similar].append(value)
    return sum(float(np.mean(each)) for each in sums.values() if each)


def every_pair(
    labels: Any, others: Any = None
) -> tuple[list[int], list[int], list[int], list[int]]:
    found: tuple[list[int], ...] = ([], [], [], [])
    for i, a in enumerate(labels):
        for j, b in enumerate(labels if others is None else others):
            if a == b and not (others is None and i == j):
                found[0].append(i), found[1].append(j)
            elif a != b:
                found[2].append(i), found[3].append(j)
    return found  # type: ignore[return-value]
