"""Retrieval figures of codes and labels: exact neighbours, metrics, clusters. Loads its modules on first use."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from retrieval.evaluate.clusters import cluster_figures
    from retrieval.evaluate.evaluation import DEFAULT_METRICS, Evaluation, evaluate
    from retrieval.evaluate.metrics import metric
    from retrieval.evaluate.neighbors import Neighbors, exact_neighbors

_HOME = {
    "DEFAULT_METRICS": "evaluation",
    "Evaluation": "evaluation",
    "Neighbors": "neighbors",
    "cluster_figures": "clusters",
    "evaluate": "evaluation",
    "exact_neighbors": "neighbors",
    "metric": "metrics",
}


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(f"retrieval.evaluate.{_HOME[name]}"), name)
    raise AttributeError(f"module 'retrieval.evaluate' has no attribute '{name}'")


__all__ = [
    "DEFAULT_METRICS",
    "Evaluation",
    "Neighbors",
    "cluster_figures",
    "evaluate",
    "exact_neighbors",
    "metric",
]
