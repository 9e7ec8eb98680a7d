"""Evaluate a run on its held-out items: the trained model, the raw inputs beside it, and a bundle as a server uses it."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from retrieval.data.encode import encode, pixels
from retrieval.data.features import backbone_features
from retrieval.data.loading import inputs
from retrieval.errors import DataError
from retrieval.evaluation.evaluation import Evaluation, evaluate
from retrieval.evaluation.served import nearest_in_each, served_neighbors
from retrieval.model.metrics import metric
from retrieval.run.folder import write_json
from retrieval.run.open import Run

if TYPE_CHECKING:
    from retrieval.host.plugins import Plugins
    from retrieval.model.contracts import Metric
    from retrieval.serving.bundle import Bundle
from retrieval.model.products import CheckedMetric

OVERLAP_AT = 10
OVERLAP_QUERIES = 1000
"""At most so many queries say what the candidate step of a rescorer costs."""


def resolve_metrics(names: Sequence[str], plugins: Plugins, always: Sequence[str] = ()) -> dict[str, Metric]:
    """Return metrics by name: built-in ones, and a plugin's as `PLUGIN.NAME` with its defaults.

    Raises:
        RetrievalError: there is no such metric.
    """
    wanted = dict.fromkeys([*names, *always])
    return {
        name: CheckedMetric(plugins.build("metrics", {"name": name}), name) if "." in name else metric(name)
        for name in wanted
    }


def evaluate_run(
    run: Run,
    *,
    side: str = "test",
    metrics: Sequence[str] = (),
    clusters: bool = False,
    baseline: bool = False,
    bundle: Path | None = None,
) -> dict[str, Any]:
    """Evaluate a run's model, and write the figures into `evaluation-SIDE.json` in its folder.

    Args:
        run: a loaded run.
        side: "test" or "validation".
        metrics: names of figures; by default the recipe's.
        clusters: also NMI and F1 of k-means clusters.
        baseline: also the raw inputs, unit length, Euclidean; otherwise their figures are kept where they stand.
        bundle: also a bundle's answers, searched as a server does: candidates by vector, then the rescorer if it has one.

    Returns:
        A dictionary with "run", "split", "queries", "gallery", "singletons" and "figures", by row and metric; with a rescorer
        also "candidates", which says how much of the exhaustive ranking's first ten the candidates keep.

    Raises:
        DataError: the run has no such items.
    """
    names = list(metrics) or run.recipe.evaluate.metrics
    chosen = resolve_metrics(names, run.plugins)
    clusters = clusters or run.recipe.evaluate.clusters
    query, gallery = (
        (run.splits.query, run.splits.gallery) if side == "test" else (run.splits.validation, None)
    )
    if not len(query):
        raise DataError(f"{run.path} has no {side} items: its [split] keeps none.")
    labels = run.splits.labels
    theirs = None if gallery is None else labels[gallery]
    device = torch.device("cuda" if torch.cuda.is_available() and run.recipe.train.device != "cpu" else "cpu")
    model = run.model.to(device)

    codes = _coder(run, device)

    def figures(ours: Any, others: Any, distance: Any = None) -> Evaluation:
        return evaluate(
            ours,
            labels[query],
            gallery=others,
            gallery_labels=theirs,
            metrics=chosen,
            distance=distance,
            clusters=clusters,
        )

    distance = None if model.combiner is None else model.combiner.compute_mat
    trained = figures(codes(query), None if gallery is None else codes(gallery), distance)
    results: dict[str, Any] = {
        "run": str(run.path), "split": side, "queries": trained.queries, "gallery": trained.gallery,
        "singletons": trained.singletons, "figures": {"trained": trained.values},
    }  # fmt: skip
    name = "raw vectors" if run.dataset.kind == "features" else "raw pixels"
    file = run.path / f"evaluation-{side}.json"
    if baseline:
        raw = [
            None if indices is None else pixels(run.dataset, indices, model) for indices in (query, gallery)
        ]
        results["figures"][name] = figures(*raw).values
    elif standing := _standing(file, results, name):
        results["figures"][name] = standing
    if bundle is not None:
        _served(results, run, bundle, query, gallery, chosen)
    if device.type != "cpu":
        model.to("cpu")
    write_json(file, results)
    return results


def _coder(run: Run, device: torch.device) -> Callable[[NDArray[np.int64]], torch.Tensor]:
    """Return a function from items' indices (N,) to their codes (N, C) under a run's model."""
    recipe, batch = run.recipe, run.recipe.evaluate.batch
    # a frozen backbone's features are on disk since training
    frozen = recipe.backbone.frozen or recipe.learner is not None
    source = backbone_features(run.model, run.dataset, device, batch) if frozen else run.dataset

    def codes(indices: NDArray[np.int64]) -> torch.Tensor:
        return encode(
            run.model, source, indices, batch=batch, device=device, progress="encoding", from_features=frozen
        )

    return codes


def _standing(file: Path, results: dict[str, Any], row: str) -> dict[str, float]:
    """Return a row that no training changes from an earlier evaluation of as many items; empty where there is none."""
    try:
        before = json.loads(file.read_text(encoding="utf-8"))
        if all(before[key] == results[key] for key in ("split", "queries", "gallery", "singletons")):
            return {str(name): float(value) for name, value in before["figures"][row].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):  # none, or not one of ours
        pass
    return {}


def _served(
    results: dict[str, Any],
    run: Run,
    path: Path,
    query: NDArray[np.int64],
    gallery: NDArray[np.int64] | None,
    metrics: dict[str, Metric],
) -> None:
    """Add what a bundle gives, and what its candidate step costs."""
    from retrieval.serving.bundle import Bundle

    bundle = Bundle.open(path)
    labels = run.splits.labels
    ours = encoded(bundle, run, query)
    others = ours if gallery is None else encoded(bundle, run, gallery)
    theirs = labels[query if gallery is None else gallery]
    exclude = np.arange(len(query)) if gallery is None else None
    rescorer = bundle.manifest.rescorer
    deepest = max((m.depth for m in metrics.values() if isinstance(m.depth, int)), default=OVERLAP_AT)
    k = min(len(theirs) - (exclude is not None), max(deepest, OVERLAP_AT))
    if rescorer is None:
        rows = served_neighbors(ours["query"], others["vector"], k, bundle.manifest, exclude)
    else:
        rows, overlaps = _rescored(bundle, ours, others, exclude, k, rescorer.candidates)
        results["candidates"] = {"overlap_at_10": overlaps, "default": rescorer.candidates}
    relevant = np.bincount(theirs, minlength=int(labels.max()) + 1)[labels[query]] - int(gallery is None)
    asked = relevant > 0
    matches = (theirs[rows] == labels[query][:, None]) & (rows >= 0)
    results["figures"]["bundle"] = {
        name: float(m(matches[asked], relevant[asked]).mean())
        for name, m in metrics.items()
        if isinstance(m.depth, int)
    }


def encoded(bundle: Bundle, run: Run, indices: NDArray[np.int64]) -> dict[str, Any]:
    """Return a bundle's "vector", "query" and "code" (None without a rescorer) of items of a run, (N, P) and (N, C)."""
    parts = [
        bundle.encode(chunk.numpy()) for chunk in inputs(run.dataset, indices, run.model.preprocessing, 256)
    ]
    vectors = np.concatenate([p.vector for p in parts])
    return {
        "vector": vectors,
        "query": np.concatenate([p.query for p in parts]) if parts[0].query is not None else vectors,
        "code": np.concatenate([p.code for p in parts if p.code is not None]) if bundle.has_code else None,
    }


def _rescored(
    bundle: Bundle,
    ours: dict[str, Any],
    others: dict[str, Any],
    exclude: NDArray[np.int64] | None,
    k: int,
    candidates: int,
) -> tuple[NDArray[np.int64], dict[str, float]]:
    """Return rows (Q, k) after rescoring the candidates, and the overlap of their first ten with the exhaustive ten.

    The exhaustive ranking costs as many distances as there are items: it is made for `OVERLAP_QUERIES` of the queries.
    """
    size, asked = len(others["vector"]), len(ours["query"])
    counts = sorted({min(c, size) for c in (50, 200, 500, candidates)})
    deepest = min(counts[-1], size - (exclude is not None))
    proposed = nearest_in_each(ours["query"], others["vector"], deepest, bundle.manifest.subspaces, exclude)
    rows = np.full((asked, k), -1, dtype=np.int64)
    kept = dict.fromkeys(counts, 0.0)
    sampled = np.linspace(0, asked - 1, min(asked, OVERLAP_QUERIES)).round().astype(np.int64)
    for i in range(asked):
        code, some = ours["code"][i : i + 1], np.unique(proposed[:, i, :candidates])
        ordered = some[np.argsort(bundle.rescore(code, others["code"][some])[0], kind="stable")][:k]
        rows[i, : len(ordered)] = ordered
    for i in sampled:
        distances = np.concatenate(
            [
                bundle.rescore(ours["code"][i : i + 1], others["code"][start : start + 4096])[0]
                for start in range(0, size, 4096)
            ]
        )
        if exclude is not None:
            distances[exclude[i]] = np.inf
        truth = np.argsort(distances, kind="stable")[: min(OVERLAP_AT, k)]
        for c in counts:
            mine = np.unique(proposed[:, i, :c])
            ordered = mine[np.argsort(distances[mine], kind="stable")][: len(truth)]
            kept[c] += len(np.intersect1d(ordered, truth)) / len(truth)
    return rows, {str(c): value / len(sampled) for c, value in kept.items()}
