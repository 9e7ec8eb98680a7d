"""What `check` and the start of `train` see: what cannot learn, fit or open."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from retrieval.data.datasets import ArrayDataset
from retrieval.errors import DataError, PluginError
from retrieval.evaluation.evaluate_run import evaluate
from retrieval.export.export_run import export
from retrieval.recipe.read import check_recipe
from retrieval.run import checkpoint
from retrieval.run.open import Run, build_run
from retrieval.training import check
from retrieval.training.check import run_one_batch
from retrieval.training.process import make_accelerator
from retrieval.training.trainer import train
from trained_weights import digit_photos, reported

from .conftest import BASE


def test_a_loss_without_gradient_is_refused_before_anything_is_written(make, tmp_path):
    made = make(loss={"name": "toolbox.deaf"})
    for attempt in (lambda: run_one_batch(made), lambda: train(tmp_path / "run", made)):
        with pytest.raises(PluginError, match=r"toolbox\.deaf gave [\d.]+ without a gradient"):
            attempt()
    assert not (tmp_path / "run").exists()


def test_a_gradient_of_zero_is_warned_of(make, tmp_path):
    made = make(loss={"name": "toolbox.deaf", "zero": True})
    lines = run_one_batch(made)
    assert any("no weight would change in 5 sampled batches" in line for line in lines)
    assert lines[-1].endswith("The recipe runs; read the warnings.")
    _, said = reported(tmp_path / "run", made)
    assert any("no weight would change" in line for line in said)
    notes = json.loads((tmp_path / "run" / "run.json").read_text())["notes"]
    assert any("no weight would change" in note for note in notes)


def test_batches_without_a_pair_and_batches_beyond_the_data(make):
    miner = {"name": "pml.multi_similarity"}
    lines = run_one_batch(make(sampler={"classes": 4, "items": 1}, miner=miner))
    says = "toolbox.deadly compares items of the same class, but a batch has"
    assert any(says in line for line in lines)
    fine = run_one_batch(make(sampler={"classes": 4, "items": 4, "batches": 2}))
    assert fine[-1].endswith("The recipe is fine.") and not any("warning" in line for line in fine)
    lines = run_one_batch(make(sampler={"classes": 4, "items": 500}))
    says = "a batch takes 4 classes × 500 items = 2,000, but there are only"
    assert any(says in line for line in lines)


def test_looking_ahead_changes_nothing(make):
    recipe = make(backbone={"name": "toolbox.net", "dropout": 0.5})
    checkpoint.seed_everything(0)
    run = build_run(Path("nowhere"), recipe)
    weights = {name: value.clone() for name, value in run.model.state_dict().items()}
    before = torch.get_rng_state()
    check.look_ahead(run, make_accelerator(recipe))
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(value, weights[name]) for name, value in run.model.state_dict().items())
    assert all(p.grad is None for p in run.model.parameters())


def test_files_are_opened_before_training(make, tmp_path):
    photos = digit_photos(tmp_path / "photos", 12, classes=10)
    data = {"name": "core.image_folder", "folder": str(photos)}
    made = make(data=data, split={"by": "item", "validation": 0.0})
    assert run_one_batch(made)[-1].endswith("The recipe is fine.")
    for file in sorted(photos.rglob("*.png"))[::2]:
        file.write_bytes(b"\x89PNG\r\n\x1a\nnot an image")
    for attempt in (lambda: run_one_batch(made), lambda: train(tmp_path / "run", made)):
        says = r"64 files were opened\) has \d+ problems:\n  - .*skip_bad = true"
        with pytest.raises(DataError, match=says):
            attempt()
    assert not (tmp_path / "run").exists()


def test_a_recipe_with_nothing_to_train_is_a_run(make, tmp_path, monkeypatch):
    frozen = {"name": "toolbox.net", "frozen": True}
    made = make(backbone=frozen, head={"identity": True}, train={"epochs": 1})
    assert run_one_batch(made)[-1].startswith("The model has nothing to train")
    with monkeypatch.context() as patch:  # no feature is computed to find that out
        patch.setattr("retrieval.data.cache._fill", lambda *_: pytest.fail("it was computed"))
        _, said = reported(tmp_path / "run", made)
    assert "its weights are random" in said[0]
    says = "The model has nothing to train: the backbone's features are used as they are."
    assert said[1:] == [says]
    assert json.loads((tmp_path / "run" / "run.json").read_text())["notes"] == said[1:]
    run = Run.open(tmp_path / "run")
    figures = evaluate(run, baseline=True).metrics
    assert 0 < figures["trained"]["recall_at_1"] <= 1 and "raw pixels" in figures
    assert export(run).bundle.manifest.vector == 16


def test_principal_components_pass_where_training_would(make, tmp_path):
    features = np.random.default_rng(0).normal(size=(400, 200)).astype(np.float32)
    labels = np.repeat(np.arange(4), 100).astype(str)
    np.savez(tmp_path / "f.npz", features=features, labels=labels)
    tables: dict[str, Any] = {
        "data": {"name": "core.features", "file": str(tmp_path / "f.npz")},
        "backbone": {"name": "core.features"},
        "split": {"by": "item", "validation": 0.0},
        **dict.fromkeys(("loss", "sampler", "head", "train")),
    }
    made = make(learner={"name": "core.pca", "n_components": 128}, **tables)
    # 32 of them refuse 128 components
    assert "fitted 200 items. The recipe is fine." in run_one_batch(made)
    with pytest.raises(DataError, match="pca cannot be fitted on 200 items"):
        run_one_batch(make(learner={"name": "core.pca", "n_components": 300}, **tables))


def test_tags_count_in_evaluation_only(make, tmp_path):
    """The check and the run say so, for nothing else would."""
    columns = [{"colours": "red;blue"}] * 80
    data = ArrayDataset(np.zeros((80, 8, 8), np.uint8), list("abcdefgh") * 10, metadata=columns)
    table = {**BASE, "evaluate": {"tags": "colours"}}
    run = build_run(tmp_path, check_recipe(table, objects={"data": data}))
    assert any('tags = "colours" affects evaluation only' in note for note in run.splits.notes)
    assert not any("tags" in note for note in build_run(tmp_path, make()).splits.notes)


def test_principal_components_of_few_features():
    from retrieval_core import PCA

    assert PCA().fit_transform(np.random.default_rng(0).normal(size=(50, 10))).shape == (50, 10)
    assert PCA().fit_transform(np.random.default_rng(0).normal(size=(90, 100))).shape == (90, 64)
