"""`retrieval evaluate` on real runs: every kind of model, the raw inputs, a bundle with and without
a rescorer.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from retrieval.errors import DataError
from retrieval.evaluation.evaluate_run import evaluate
from retrieval.export.export_run import export
from retrieval.run.open import Run
from retrieval.training.trainer import train

Make = Callable[..., Any]


def trained(make: Make, folder: Path, **tables: Any) -> Any:
    train(folder, make(**tables))
    return Run.open(folder)


def brute_force_recall_at_1(run: Any) -> float:
    """By plain loops over the model's own distances."""
    from retrieval.data.encode import encode

    codes = encode(run.model, run.dataset, run.splits.query)
    labels = run.splits.labels[run.splits.query]
    distances = run.model.distances(codes, codes).detach().double().numpy()
    np.fill_diagonal(distances, np.inf)
    return float(
        np.mean([labels[int(np.argmin(row))] == labels[i] for i, row in enumerate(distances)])
    )


@pytest.mark.parametrize("combiner", [None, {"name": "toolbox.local"}])
def test_figures_equal_plain_loops_and_the_bundle_agrees(make, tmp_path, combiner):
    run = trained(make, tmp_path / "run", combiner=combiner)
    export(run, tmp_path / "bundle")
    results = evaluate(run, baseline=True, clusters=True, bundle=tmp_path / "bundle")
    figures = results.metrics
    assert figures["trained"]["recall_at_1"] == pytest.approx(
        brute_force_recall_at_1(run), abs=1e-9
    )
    assert figures["bundle"]["recall_at_1"] == pytest.approx(
        figures["trained"]["recall_at_1"], abs=0.011
    )
    assert set(figures) == {"trained", "raw pixels", "bundle"}
    assert 0 < figures["trained"]["nmi"] <= 1
    assert figures["raw pixels"]["recall_at_1"] > 0.9
    assert json.loads((tmp_path / "run" / "evaluation-test.json").read_text()) == json.loads(
        json.dumps(results.as_dict())
    )
    text = results.table()
    assert "raw pixels" in text
    assert ("exhaustive" in text) == (combiner is not None)
    logged = json.loads((tmp_path / "run" / "summary.json").read_text())["validation"]
    validation = evaluate(run, side="validation").metrics
    assert set(validation) == {"trained"} and validation["trained"] == pytest.approx(logged)
    if combiner is not None:
        overlap = results.candidates.overlap_at_10
        by_count = [overlap[count] for count in sorted(overlap, key=int)]
        assert by_count == sorted(by_count)
        assert by_count[0] > 0.5


def test_a_metric_with_parameters_reaches_log_table_and_json(make, tmp_path):
    run = trained(
        make,
        tmp_path / "run",
        evaluate={"metrics": ["recall_at_5", {"name": "core.recall_at", "k": 5}]},
        train={"epochs": 1},
    )
    name = "core.recall_at(k=5)"
    (line,) = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    logged = json.loads(line)
    assert logged[f"validation_{name}"] == logged["validation_recall_at_5"]
    results = evaluate(run)
    figures = results.metrics["trained"]
    assert list(figures) == ["recall_at_5", name] and figures[name] == figures["recall_at_5"]
    assert f"\n{name} " in results.table()
    asked = evaluate(run, metrics=[{"name": "core.precision_at", "k": 3}, "precision_at_3"])
    found = asked.metrics["trained"]
    assert found["core.precision_at(k=3)"] == found["precision_at_3"] > 0


def test_a_side_without_items_is_refused(make, tmp_path):
    run = trained(make, tmp_path / "run", split={"by": "class", "validation": 0.0})
    with pytest.raises(DataError, match="has no validation items"):
        evaluate(run, side="validation")
