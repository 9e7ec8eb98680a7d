"""`retrieval evaluate` on real runs, from any working folder, and after their data are deleted."""

from __future__ import annotations

import json
import shutil
from typing import Any

import numpy as np
import pytest
from retrieval.bundle.bundle import Bundle
from retrieval.data.datasets import ArrayDataset
from retrieval.data.encode import encode
from retrieval.errors import BundleError, DataError
from retrieval.evaluation.evaluate_run import evaluate
from retrieval.export.export_run import export
from retrieval.run.open import Run
from retrieval.training.train import train
from sklearn.datasets import load_digits
from trained_weights import digit_photos, fit, log, ran, summary


def recall_at_1_by_loops(run: Any) -> float:
    codes = encode(run.model, run.dataset, run.splits.query)
    labels = run.splits.labels[run.splits.query]
    distances = run.model.distances(codes, codes).detach().double().numpy()
    np.fill_diagonal(distances, np.inf)
    hits = [labels[int(np.argmin(row))] == labels[i] for i, row in enumerate(distances)]
    return float(np.mean(hits))


@pytest.mark.parametrize("combiner", [None, {"name": "toolbox.local"}])
def test_metrics_equal_plain_loops_and_the_bundle_agrees(make, tmp_path, combiner):
    run = Run.open(fit(tmp_path, make(combiner=combiner)))
    export(run, tmp_path / "bundle")
    results = evaluate(run, baseline=True, clusters=True, bundle=tmp_path / "bundle")
    assert set(results.metrics) == {"trained", "raw pixels", "bundle"}
    trained, raw, bundle = (results.metrics[x] for x in ("trained", "raw pixels", "bundle"))
    assert trained["recall_at_1"] == pytest.approx(recall_at_1_by_loops(run), abs=1e-9)
    assert bundle["recall_at_1"] == pytest.approx(trained["recall_at_1"], abs=0.011)
    assert 0 < trained["nmi"] <= 1 and raw["recall_at_1"] > 0.9
    written = json.loads((run.path / "evaluation-test.json").read_text())
    assert written == json.loads(json.dumps(results.as_dict()))
    text = results.table()
    assert "raw pixels" in text and ("among the candidates: " in text) == (combiner is not None)
    validation = evaluate(run, side="validation").metrics
    assert set(validation) == {"trained"}
    assert validation["trained"] == pytest.approx(summary(run.path)["validation"])
    if combiner is not None:
        overlap = results.candidates.overlap_at_10
        by_count = [overlap[count] for count in sorted(overlap, key=int)]
        assert by_count == sorted(by_count) and by_count[0] > 0.5


def test_validation_by_source_searches_the_other_sources(tmp_path):
    rng = np.random.default_rng(0)
    labels = [str(number % 12) for number in range(240)]
    vectors = rng.normal(size=(12, 8))[np.arange(240) % 12] + rng.normal(size=(240, 8))
    metadata = [{"camera": "abcde"[number // 12 % 5]} for number in range(240)]
    data = ArrayDataset(vectors, labels, kind="features", metadata=metadata)
    recipe = {
        "data": {"name": "core.digits"},
        "split": {"by": "class", "validation_by": "class", "validation": 0.4, "source": "camera"},
        "backbone": {"name": "core.features"},
        "sampler": {"classes": 3, "items": 4},
        "loss": {"name": "pml.triplet_margin"},
        "evaluate": {"metrics": ["recall_at_1"]},
    }
    run = train(recipe, tmp_path / "run", epochs=2, dataset=data, progress=False)
    query, gallery = run.splits.validation_sides
    assert len(query) < len(gallery)
    codes = encode(run.model, run.dataset, np.arange(240)).numpy()
    hits = []
    for item in query:
        distances = np.linalg.norm(codes[gallery] - codes[item], axis=1)
        hits.append(labels[gallery[int(np.argmin(distances))]] == labels[item])
    expected = pytest.approx(np.mean(hits))
    assert summary(run.path)["validation"]["recall_at_1"] == expected
    measured = evaluate(run, side="validation", progress=False)
    assert measured.metrics["trained"]["recall_at_1"] == expected


def test_a_metric_with_parameters_reaches_log_table_and_json(make, tmp_path):
    metrics = ["recall_at_5", {"name": "core.recall_at", "k": 5}]
    run = Run.open(fit(tmp_path, make(evaluate={"metrics": metrics}, train={"epochs": 1})))
    name = "core.recall_at(k=5)"
    (line,) = log(run.path)
    assert line[f"validation_{name}"] == line["validation_recall_at_5"]
    results = evaluate(run)
    metrics = results.metrics["trained"]
    assert list(metrics) == ["recall_at_5", name] and metrics[name] == metrics["recall_at_5"]
    assert f"\n{name} " in results.table()
    results = evaluate(run, metrics=[{"name": "core.precision_at", "k": 3}, "precision_at_3"])
    metrics = results.metrics["trained"]
    assert metrics["core.precision_at(k=3)"] == metrics["precision_at_3"] > 0


def test_a_run_without_validation_items_says_so(make, tmp_path):
    recipe = make(split={"by": "class", "validation": 0.0}, train={"epochs": 1})
    run = Run.open(fit(tmp_path, recipe))
    with pytest.raises(DataError, match="has no validation items"):
        evaluate(run, side="validation")


RECIPE = """
name = "elsewhere"
plugins = ["mine.py"]
data = {{ {data} }}
split.by = "item"
sampler = {{ classes = 4, items = 2, batches = 2 }}
backbone = {{ {backbone} }}
head.embedding_size = 4
loss.name = "mine.contrastive"
train = {{ epochs = 1, device = "cpu" }}
"""
PLUGIN = """
from pytorch_metric_learning import losses
from retrieval.plugin import hookimpl

retrieval_losses = hookimpl(lambda: {"contrastive": losses.ContrastiveLoss})
"""
KINDS = {
    "photos": (
        'name = "core.image_folder", folder = "data"',
        'name = "core.convnet", size = 8, width = 2, depth = 2',
    ),
    "vectors": ('name = "core.features", file = "data/vectors.npz"', 'name = "core.features"'),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_is_used_from_another_folder_and_exported_without_its_data(
    kind, tmp_path, monkeypatch
):
    digits = load_digits()
    home, away, run = tmp_path / "home", tmp_path / "away", tmp_path / "moved"
    digit_photos(home / "data", 12)
    few = digits.target < 4
    vectors, labels = digits.data[few].astype(np.float32), digits.target[few].astype(str)
    np.savez(home / "data" / "vectors.npz", features=vectors, labels=labels)
    away.mkdir()
    data, backbone = KINDS[kind]
    (home / "recipe.toml").write_text(RECIPE.format(data=data, backbone=backbone))
    (home / "mine.py").write_text(PLUGIN)
    monkeypatch.chdir(home)
    ran("train", "recipe.toml")
    monkeypatch.chdir(away)
    trained = home / "runs" / "elsewhere"
    assert "recall_at_1" in ran("evaluate", trained)
    assert "note:" not in ran("export", trained, "-o", "whole.bundle")
    shutil.rmtree(home / "data")
    (home / "mine.py").unlink()
    trained.rename(run)
    with pytest.raises(DataError, match=f"{home / 'data'}"):
        ran("evaluate", run)
    without = ran("export", run, "-o", "without.bundle")
    assert "note: The run's data cannot be opened: " in without
    assert "verified on the held-out inputs that the run keeps" in without
    whole, bundle = (Bundle.open(away / f"{x}.bundle", threads=1) for x in ("whole", "without"))
    assert 8 <= bundle.manifest.verified.items <= 64
    generator = np.random.default_rng(0)
    items = generator.standard_normal((5, 64)).astype(np.float32)
    if kind == "photos":
        items = generator.integers(0, 256, (5, *whole.manifest.input.shape), dtype=np.uint8)
    np.testing.assert_array_equal(whole.encode(items).vector, bundle.encode(items).vector)
    says = "int8 variant is calibrated on training items, but there are none"
    with pytest.raises(BundleError, match=says):
        ran("export", run, "-o", "int8.bundle", "--variant", "int8")
    (run / "inputs.safetensors").unlink()
    with pytest.raises(DataError, match=f"{home / 'data'}"):
        ran("export", run, "-o", "none.bundle")
