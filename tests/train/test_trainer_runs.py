"""The trainer: NaN, early stopping, seeds, precisions, several processes, learners."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from retrieval.errors import DataError, RecipeError
from retrieval.run.open import Run
from trained_weights import GENERATOR, STILL, fit, moved, start, weights


def test_weights_that_become_nan_are_never_kept_as_the_best(make, tmp_path):
    """In the last step of the first epoch: what was there before is evaluated."""
    from retrieval.evaluation.evaluate_run import evaluate

    made = make(
        **STILL,
        sampler={"classes": 4, "items": 4, "batches": 1},
        optimizer={"name": "SGD", "lr": 1e38, "options": {"weight_decay": 1e38}},
    )
    with pytest.raises(
        DataError, match=r"at step 1 \(epoch 1\): weights of the \w+ became NaN or infinite"
    ):
        fit(tmp_path, made)
    first = start(tmp_path / "again", made)
    for file in ("last", "best"):  # the weights before the first step are the best so far
        kept = weights(tmp_path / "run", file)
        assert all(torch.equal(first[name], value) for name, value in kept.items())
    assert evaluate(Run.open(tmp_path / "run")).metrics["trained"]["recall_at_1"] > 0


def test_early_stopping_ends_after_patience_and_keeps_the_best(make, tmp_path):
    made = make(train={"epochs": 50, "patience": 2}, optimizer={"lr": 1e-9})
    lines = [
        json.loads(x) for x in (fit(tmp_path, made) / "metrics.jsonl").read_text().splitlines()
    ]
    scores = [line["validation_map_at_r"] for line in lines]
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    scores.insert(0, summary["start"])
    best = scores.index(max(scores))
    assert len(scores) == best + 3 < 50 and summary["best_epoch"] == best
    assert summary["validation"]["map_at_r"] == max(scores)


def test_the_same_recipe_and_seed_give_the_same_numbers_and_another_seed_others(make, tmp_path):
    one, two = fit(tmp_path, make(), "one"), fit(tmp_path, make(), "two")
    assert not moved(weights(one), weights(two))
    assert moved(weights(one), weights(fit(tmp_path, make(seed=1), "three")))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU is present")
def test_training_on_a_gpu_with_fp16(make, tmp_path):
    folder = fit(tmp_path, make(train={"epochs": 2, "precision": "fp16", "device": "cuda"}))
    assert json.loads((folder / "run.json").read_text())["machine"]["device"].startswith("cuda")


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is present")
@pytest.mark.parametrize("options", [{"precision": "fp16"}, {"device": "cuda"}])
def test_what_needs_a_gpu_is_refused_without_one(make, tmp_path, options):
    with pytest.raises(RecipeError, match=r"GPU"):
        fit(tmp_path, make(train=options))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("adversarial", [False, True])
def test_two_processes_train_as_one(make, processes, tmp_path, adversarial):
    from retrieval.recipe.read import to_toml

    sgd = {"name": "SGD", "lr": 0.05}
    made = make(
        **STILL,
        generator=GENERATOR if adversarial else None,
        combiner={"name": "toolbox.local"} if adversarial else None,
        optimizer=sgd,
        miner={"name": "pml.triplet_margin"},
    )
    (tmp_path / "recipe.toml").write_text(to_toml(made))
    one = weights(fit(tmp_path, made, "one"))
    if adversarial:
        (tmp_path / "recipe.toml").rename(tmp_path / "two.toml")
        processes(2, "train_process.py", str(tmp_path), "two")
    else:  # as a user begins it
        done = subprocess.run(
            [
                sys.executable,
                "-m",
                "torch.distributed.run",
                "--standalone",
                "--nproc-per-node",
                "2",
                "-m",
                "retrieval.cli",
                "train",
                str(tmp_path / "recipe.toml"),
                "--output",
                str(tmp_path / "two"),
            ],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        )
        assert done.returncode == 0, done.stderr
    two = weights(tmp_path / "two")
    changed = {name.partition(".")[0] for name in moved(start(tmp_path, made), two)}
    assert changed >= ({"model", "generator"} if adversarial else {"model"})
    for name, value in one.items():
        torch.testing.assert_close(two[name], value, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("learner", ["core.pca", "core.lda", "core.nca"])
def test_a_learner_trains_saves_and_loads(make, tmp_path, learner):
    table: dict[str, Any] = (
        {"name": learner, "n_components": 4}
        if learner != "core.nca"
        else {"name": learner, "n_components": 4, "max_iter": 10}
    )
    made = make(loss=None, learner=table, split={"by": "item"})
    folder = fit(tmp_path, made)
    run = Run.open(folder)
    from retrieval.data.encode import encode

    codes = encode(run.model, run.dataset, run.splits.query)
    assert codes.shape[1] == 4
    assert torch.isfinite(codes).all()
    assert json.loads((folder / "summary.json").read_text())["validation"]["map_at_r"] > 0.2
