"""The checks of `check`, which `train` makes before it writes: gradients, batches, files, notes."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch
from retrieval.data.datasets import ArrayDataset
from retrieval.errors import DataError, PluginError
from retrieval.evaluation.evaluate_run import evaluate
from retrieval.export.export_run import export
from retrieval.recipe.read import check_recipe
from retrieval.run import checkpoint_format
from retrieval.run.open import Run, build_run
from retrieval.training import check
from retrieval.training.check import run_one_batch
from retrieval.training.process import make_accelerator
from retrieval.training.trainer import train_run
from trained_weights import digit_photos, reported

from .conftest import BASE


def test_a_loss_without_gradient_is_refused_before_anything_is_written(make, tmp_path):
    recipe = make(loss={"name": "toolbox.deaf"})
    for attempt in (lambda: run_one_batch(recipe), lambda: train_run(tmp_path / "run", recipe)):
        with pytest.raises(PluginError, match=r"toolbox\.deaf gave [\d.]+ without a gradient"):
            attempt()
    assert not (tmp_path / "run").exists()


def test_a_gradient_of_zero_is_a_warning(make, tmp_path):
    recipe = make(loss={"name": "toolbox.deaf", "zero": True})
    checked = run_one_batch(recipe)
    assert any("no weight would change in 5 sampled batches" in line for line in checked)
    assert checked[-1].endswith("The recipe runs; read the warnings.")
    _, lines = reported(tmp_path / "run", recipe)
    notes = json.loads((tmp_path / "run" / "run.json").read_text())["notes"]
    for messages in (lines, notes):
        assert any("no weight would change" in message for message in messages)


def test_batches_without_pairs_and_batches_larger_than_the_data_are_warnings(make):
    miner = {"name": "pml.multi_similarity"}
    lines = run_one_batch(make(sampler={"classes": 4, "items": 1}, miner=miner))
    says = "toolbox.deadly compares items of the same class, but a batch has"
    assert any(says in line for line in lines)
    fine = run_one_batch(make(sampler={"classes": 4, "items": 4, "batches": 2}))
    assert fine[-1].endswith("The recipe is fine.") and not any("warning" in line for line in fine)
    lines = run_one_batch(make(sampler={"classes": 4, "items": 500}))
    says = "a batch takes 4 classes × 500 items = 2,000, but there are only"
    assert any(says in line for line in lines)


def test_looking_ahead_changes_nothing(make, tmp_path):
    recipe = make(backbone={"name": "toolbox.net", "dropout": 0.5})
    checkpoint_format.seed_everything(0)
    run = build_run(tmp_path / "run", recipe)
    weights = {name: value.clone() for name, value in run.model.state_dict().items()}
    before = torch.get_rng_state()
    check.look_ahead(run, make_accelerator(recipe))
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(value, weights[name]) for name, value in run.model.state_dict().items())
    assert all(p.grad is None for p in run.model.parameters())


def test_files_are_opened_before_training(make, tmp_path):
    photos = digit_photos(tmp_path / "photos", 12, classes=10)
    data = {"name": "core.image_folder", "folder": str(photos)}
    recipe = make(data=data, split={"by": "item", "validation": 0.0})
    assert run_one_batch(recipe)[-1].endswith("The recipe is fine.")
    for file in sorted(photos.rglob("*.png"))[::2]:
        file.write_bytes(b"\x89PNG\r\n\x1a\nnot an image")
    for attempt in (lambda: run_one_batch(recipe), lambda: train_run(tmp_path / "run", recipe)):
        says = r"64 files were opened\) has \d+ problems:\n  - .*skip_bad = true"
        with pytest.raises(DataError, match=says):
            attempt()
    assert not (tmp_path / "run").exists()


def test_a_recipe_with_nothing_to_train_is_a_run(make, tmp_path, monkeypatch):
    frozen = {"name": "toolbox.net", "frozen": True}
    recipe = make(backbone=frozen, head={"identity": True}, train={"epochs": 1})
    assert run_one_batch(recipe)[-1].startswith("The model has nothing to train")
    with monkeypatch.context() as patch:  # the check needs no features
        patch.setattr("retrieval.data.cache._fill", lambda *_: pytest.fail("features computed"))
        _, lines = reported(tmp_path / "run", recipe)
    assert "its weights are random" in lines[0]
    says = "The model has nothing to train: the backbone's features are used as they are."
    assert lines[1:] == [says]
    assert json.loads((tmp_path / "run" / "run.json").read_text())["notes"] == [says]
    run = Run.open(tmp_path / "run")
    metrics = evaluate(run, baseline=True).metrics
    assert 0 < metrics["trained"]["recall_at_1"] <= 1 and "raw pixels" in metrics
    assert export(run).bundle.manifest.vector == 16


def test_a_learner_that_refuses_few_items_is_fitted_on_more(make, tmp_path):
    features = np.random.default_rng(0).normal(size=(400, 200)).astype(np.float32)
    labels = np.repeat(np.arange(4), 100).astype(str)
    np.savez(tmp_path / "f.npz", features=features, labels=labels)
    tables: dict[str, Any] = {
        "data": {"name": "core.features", "file": str(tmp_path / "f.npz")},
        "backbone": {"name": "core.features"},
        "split": {"by": "item", "validation": 0.0},
        **dict.fromkeys(("loss", "sampler", "head", "train")),
    }
    # the first 32 items are too few for 128 components
    recipe = make(learner={"name": "core.pca", "n_components": 128}, **tables)
    assert "fitted 200 items. The recipe is fine." in run_one_batch(recipe)
    with pytest.raises(DataError, match="pca cannot be fitted on 200 items"):
        run_one_batch(make(learner={"name": "core.pca", "n_components": 300}, **tables))


def test_a_note_says_that_tags_affect_evaluation_only(make, tmp_path):
    columns = [{"colours": "red;blue"}] * 80
    data = ArrayDataset(np.zeros((80, 8, 8), np.uint8), list("abcdefgh") * 10, metadata=columns)
    table = {**BASE, "evaluate": {"tags": "colours"}}
    run = build_run(tmp_path, check_recipe(table, objects={"data": data}))
    assert any('tags = "colours" affects evaluation only' in note for note in run.splits.notes)
    assert not any("tags" in note for note in build_run(tmp_path, make()).splits.notes)


def test_principal_components_default_to_at_most_64():
    from retrieval_core import PCA

    random = np.random.default_rng(0)
    for features, components in ((10, 10), (100, 64)):
        codes = PCA().fit_transform(random.normal(size=(90, features)))
        assert codes.shape == (90, components)
