"""The metrics of a bundle that is searched by Eq 27, and of its variants, are those of Eq 27."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import oahu_loops as loops
import pytest
from retrieval.bundle.bundle import Bundle
from retrieval.evaluation.evaluate_run import encoded, evaluate, nearest_in_each
from retrieval.export.export_run import export
from retrieval.export.variants import SCORED, measure
from retrieval.model.contracts import Subspace
from retrieval.recipe.read import check_recipe
from retrieval.training.trainer import train_run
from sklearn.datasets import load_digits


def ranking(query: Any, vectors: Any, left_out: Any, alpha: list[float], k: int) -> list[int]:
    """Return the best rows by Eq 27 in plain loops."""
    kept = [row for row in range(len(vectors)) if row != left_out]
    query, *rows = (v.reshape(len(alpha), -1).tolist() for v in (query, *vectors[kept]))
    return [kept[row] for row, _ in loops.retrieve(query, rows, alpha, k)]


def test_the_metrics_of_a_bundle_are_those_of_eq_27(tmp_path):
    digits = load_digits()
    np.savez(tmp_path / "d.npz", features=digits.data[:300] / 16, labels=digits.target[:300])
    learner = {"name": "oahu.oahu", "depth": 2, "hidden": 16, "embedding": 4, "search": "score"}
    recipe = {
        "data": {"name": "core.features", "file": str(tmp_path / "d.npz")},
        "split": {"by": "item", "test": 0.5},
        "backbone": {"name": "core.features"},
        "learner": {**learner, "learning_rate": 0.05, "seeds": 400, "closure": 400},
    }
    run = train_run(tmp_path / "run", check_recipe(recipe))
    export(run)
    bundle = Bundle.open(run.path / "bundle", threads=1)
    assert bundle.manifest.merge == "score" and run.splits.gallery is None
    metrics = ["recall_at_1", "recall_at_10"]
    actual = evaluate(run, metrics=metrics, bundle=run.path / "bundle").metrics["bundle"]
    vectors = encoded(bundle, run, run.splits.query)["vector"].astype(np.float64)
    labels = run.splits.labels[run.splits.query]
    alpha = [space.weight for space in bundle.manifest.subspaces]
    rows = [ranking(vector, vectors, row, alpha, 10) for row, vector in enumerate(vectors)]
    right = labels[np.array(rows)] == labels[:, None]
    expected = {"recall_at_1": right[:, 0].mean(), "recall_at_10": right.any(1).mean()}
    assert actual == pytest.approx(expected)
    # the Euclidean order of the whole vectors differs
    whole = nearest_in_each(vectors, vectors, 10, (), np.arange(len(vectors)))[0]
    assert (labels[whole[:, 0]] == labels).mean() != actual["recall_at_1"]


def test_the_drift_of_a_variant_is_that_of_eq_27():
    rng = np.random.default_rng(1)
    labels = np.repeat(np.arange(6), 5)
    x = rng.standard_normal((30, 6)) + rng.standard_normal((6, 6))[labels]
    alpha = [0.2, 0.7, 0.1]
    spaces = [Subspace(str(i), 2 * i, 2 * i + 2, w) for i, w in enumerate(alpha)]
    first = [ranking(v, x, row, alpha, SCORED)[0] for row, v in enumerate(x)]
    share = float(np.mean(labels[first] == labels))
    outputs = {"vector": x}
    for merge, equal in (("score", True), ("min", False)):
        combiner: Any = SimpleNamespace(subspaces=spaces, merge=merge)
        variant = measure("f", outputs, [outputs], labels, None, combiner)
        assert variant.recall_at_1 is not None
        assert (variant.recall_at_1.after == pytest.approx(share)) == equal
