"""Eq 11 of AML for embeddings, by plain loops over explicit pairs."""

from typing import Any

import numpy as np
import torch
from pairs_by_loops import whole
from scipy.linalg import sqrtm
from torch import Tensor

Matrix = Any
LABELS = torch.tensor([0, 0, 1, 1, 2, 2, 2, 0, 1, 3, 3, 0])


def batch(items: int = 12, size: int = 3, seed: int = 0) -> Tensor:
    random = torch.Generator().manual_seed(seed)
    scale = torch.linspace(0.5, 2.0, size, dtype=torch.float64)
    return torch.randn(items, size, dtype=torch.float64, generator=random) * scale + 3


def eq_11(
    embeddings: Matrix,
    pairs: Any,
    alpha: float,
    beta: float,
    ridge: float,
    t: float = 1.0,
    both: Any = None,
) -> float:
    """Eq 7 of the pairs plus α times Eq 7 of their adversarial pairs (Eq 9), with M = tΣ.

    Σ is the covariance of `embeddings` and `both`, the references; M measures whitened embeddings.
    """
    everything = embeddings if both is None else np.concatenate([embeddings, both])
    reference = embeddings if both is None else both
    mean = sum(everything) / len(everything)
    covariance = sum(np.outer(e - mean, e - mean) for e in everything) / len(everything)
    covariance = covariance + ridge * np.trace(covariance) / len(mean) * np.eye(len(mean))
    whiten = np.linalg.inv(sqrtm(covariance).real)
    rows = [(i, j) for listed in (pairs[:2], pairs[2:]) for i, j in zip(*listed, strict=True)]
    points = np.array([[whiten @ embeddings[i], whiten @ reference[j]] for i, j in rows])
    similar = np.arange(len(rows)) < len(pairs[0])
    return whole(t * covariance, points, similar, alpha, beta)


def every_pair(
    labels: Any, others: Any = None
) -> tuple[list[int], list[int], list[int], list[int]]:
    positives: tuple[list[int], list[int]] = ([], [])
    negatives: tuple[list[int], list[int]] = ([], [])
    for i, a in enumerate(labels):
        for j, b in enumerate(labels if others is None else others):
            if a != b or others is not None or i != j:
                rows, columns = positives if a == b else negatives
                rows.append(i), columns.append(j)
    return (*positives, *negatives)
