"""`retrieval evaluate` on real runs: models, raw inputs, a bundle."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from retrieval.data.encode import encode
from retrieval.errors import DataError
from retrieval.evaluation.evaluate_run import evaluate
from retrieval.export.export_run import export
from retrieval.run.open import Run
from trained_weights import fit, log, summary


def brute_force_recall_at_1(run: Any) -> float:
    """By plain loops over the model's own distances."""
    codes = encode(run.model, run.dataset, run.splits.query)
    labels = run.splits.labels[run.splits.query]
    distances = run.model.distances(codes, codes).detach().double().numpy()
    np.fill_diagonal(distances, np.inf)
    hits = [labels[int(np.argmin(row))] == labels[i] for i, row in enumerate(distances)]
    return float(np.mean(hits))


@pytest.mark.parametrize("combiner", [None, {"name": "toolbox.local"}])
def test_figures_equal_plain_loops_and_the_bundle_agrees(make, tmp_path, combiner):
    run = Run.open(fit(tmp_path, make(combiner=combiner)))
    export(run, tmp_path / "bundle")
    results = evaluate(run, baseline=True, clusters=True, bundle=tmp_path / "bundle")
    assert set(results.metrics) == {"trained", "raw pixels", "bundle"}
    trained, raw, bundle = (results.metrics[x] for x in ("trained", "raw pixels", "bundle"))
    assert trained["recall_at_1"] == pytest.approx(brute_force_recall_at_1(run), abs=1e-9)
    assert bundle["recall_at_1"] == pytest.approx(trained["recall_at_1"], abs=0.011)
    assert 0 < trained["nmi"] <= 1 and raw["recall_at_1"] > 0.9
    kept = json.loads((run.path / "evaluation-test.json").read_text())
    assert kept == json.loads(json.dumps(results.as_dict()))
    text = results.table()
    assert "raw pixels" in text and ("exhaustive" in text) == (combiner is not None)
    validation = evaluate(run, side="validation").metrics
    assert set(validation) == {"trained"}
    assert validation["trained"] == pytest.approx(summary(run.path)["validation"])
    if combiner is not None:
        overlap = results.candidates.overlap_at_10
        by_count = [overlap[count] for count in sorted(overlap, key=int)]
        assert by_count == sorted(by_count) and by_count[0] > 0.5


def test_a_metric_with_parameters_reaches_log_table_and_json(make, tmp_path):
    metrics = ["recall_at_5", {"name": "core.recall_at", "k": 5}]
    run = Run.open(fit(tmp_path, make(evaluate={"metrics": metrics}, train={"epochs": 1})))
    name = "core.recall_at(k=5)"
    (line,) = log(run.path)
    assert line[f"validation_{name}"] == line["validation_recall_at_5"]
    results = evaluate(run)
    figures = results.metrics["trained"]
    assert list(figures) == ["recall_at_5", name] and figures[name] == figures["recall_at_5"]
    assert f"\n{name} " in results.table()
    asked = evaluate(run, metrics=[{"name": "core.precision_at", "k": 3}, "precision_at_3"])
    found = asked.metrics["trained"]
    assert found["core.precision_at(k=3)"] == found["precision_at_3"] > 0


def test_a_run_that_keeps_no_validation_items_says_so(make, tmp_path):
    recipe = make(split={"by": "class", "validation": 0.0}, train={"epochs": 1})
    run = Run.open(fit(tmp_path, recipe))
    with pytest.raises(DataError, match="has no validation items"):
        evaluate(run, side="validation")
