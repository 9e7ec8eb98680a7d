"""The trainer: NaN, early stopping, seeds, precisions, several processes, learners."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from retrieval.data.encode import encode
from retrieval.errors import DataError, RecipeError
from retrieval.evaluation.evaluate_run import evaluate
from retrieval.recipe.read import to_toml
from retrieval.run.open import Run
from trained_weights import (
    GENERATOR,
    STILL,
    apart,
    fit,
    lines_of,
    log,
    moved,
    same,
    start,
    summary,
    weights,
)


def test_weights_that_become_nan_are_never_kept_as_the_best(make, tmp_path):
    made = make(
        **STILL,
        sampler={"classes": 4, "items": 4, "batches": 1},
        optimizer={"name": "SGD", "lr": 1e38, "options": {"weight_decay": 1e38}},
    )
    says = r"at step 1 \(epoch 1\): weights of the \w+ became NaN or infinite"
    with pytest.raises(DataError, match=says):
        fit(tmp_path, made)
    first = start(tmp_path / "again", made)
    for file in ("last", "best"):  # the weights before the first step are the best so far
        assert not moved(weights(tmp_path / "run", file), first)
    assert evaluate(Run.open(tmp_path / "run")).metrics["trained"]["recall_at_1"] > 0


def test_early_stopping_ends_after_patience_and_keeps_the_best(make, tmp_path):
    folder = fit(tmp_path, make(train={"epochs": 50, "patience": 2}, optimizer={"lr": 1e-9}))
    ended = summary(folder)
    scores = [ended["start"], *(line["validation_map_at_r"] for line in log(folder))]
    best = scores.index(max(scores))
    assert len(scores) == best + 3 < 50 and ended["best_epoch"] == best
    assert ended["validation"]["map_at_r"] == max(scores)


def test_the_same_seed_gives_the_same_numbers_and_hooks_are_told_of_them(make, tmp_path):
    one, two = fit(tmp_path, make(), "one"), fit(tmp_path, make(), "two")
    assert same(one, two) and not same(one, fit(tmp_path, make(seed=1), "three"))
    _, first, second, ended = lines = lines_of(one, "hooks.jsonl")
    assert [line["hook"] for line in lines] == ["start", "epoch", "epoch", "end"]
    assert (first["epoch"], second["epoch"]) == (0, 1)
    assert {"loss", "validation_map_at_r"} <= first["metrics"].keys()
    scores = [line["metrics"]["validation_map_at_r"] for line in (first, second)]
    assert ended["metrics"]["map_at_r"] == max(scores)


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


SGD = {"optimizer": {"name": "SGD", "lr": 0.05}, "miner": {"name": "pml.triplet_margin"}}


def test_two_processes_train_two_sides_as_one(make, trains_as_one, tmp_path):
    made = make(**STILL, **SGD, generator=GENERATOR, combiner={"name": "toolbox.local"})
    trains_as_one({"two": made}, within=1e-4)
    changed = moved(start(tmp_path, made), weights(tmp_path / "two"))
    assert {name.partition(".")[0] for name in changed} >= {"model", "generator"}


def test_two_processes_that_torch_starts_train_as_one(make, process, tmp_path):
    made = make(**STILL, **SGD)
    (tmp_path / "recipe.toml").write_text(to_toml(made))
    words = ["--standalone", "--nproc-per-node", "2", "-m", "retrieval.cli", "train"]
    words += [tmp_path / "recipe.toml", "--output", tmp_path / "two"]
    settings = {"seconds": 300, "OMP_NUM_THREADS": "1"}
    done = process("-m", "torch.distributed.run", *words, **settings)
    assert done.code == 0, done.err
    assert moved(start(tmp_path, made), weights(tmp_path / "two"))
    assert apart(fit(tmp_path, made, "one"), tmp_path / "two") < 1e-4


@pytest.mark.parametrize("learner", ["core.pca", "core.lda", "core.nca"])
def test_a_learner_trains_saves_and_loads(make, tmp_path, learner):
    table: dict[str, Any] = {"name": learner, "n_components": 4}
    if learner == "core.nca":
        table["max_iter"] = 10
    run = Run.open(fit(tmp_path, make(loss=None, learner=table, split={"by": "item"})))
    codes = encode(run.model, run.dataset, run.splits.query)
    assert codes.shape[1] == 4 and torch.isfinite(codes).all()
    assert summary(run.path)["validation"]["map_at_r"] > 0.2
