"""The trainer: two sides and their phases, NaN, early stopping, seeds, several processes."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from retrieval.base import progress
from retrieval.data.encode import encode
from retrieval.data.features import backbone_features
from retrieval.errors import DataError, RecipeError
from retrieval.evaluation.evaluate_run import evaluate
from retrieval.recipe.read import to_toml
from retrieval.run.open import Run
from retrieval.training.check import run_one_batch
from retrieval.training.step import Losses, Step
from retrieval.training.trainer import Trainer, train_run
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
    trainer_of,
    weights,
)


def changed_by(tmp_path: Path, recipe: Any) -> set[str]:
    """The weights that a run changes."""
    return moved(start(tmp_path, recipe), weights(fit(tmp_path, recipe)))


def test_a_phase_trains_its_parts_only_and_keeps_the_others_batch_statistics(make, tmp_path):
    for part, layer in (("head", "model.head.0"), ("generator", "generator.map")):
        phase = {"name": part, "epochs": 1, "train": [part]}
        changed = changed_by(tmp_path / part, make(generator=GENERATOR, phase=[phase]))
        assert changed == {f"{layer}.weight", f"{layer}.bias"}


def test_each_part_is_in_training_mode_where_it_trains_and_only_there(make, tmp_path):
    parts = ["backbone", "head", "combiner", "generator"]
    phases = [{"name": part, "epochs": 1, "train": [part]} for part in parts]
    combiner = {"name": "toolbox.local"}
    trainer = trainer_of(tmp_path, make(generator=GENERATOR, combiner=combiner, phase=phases))
    model = trainer.run.model
    modules = [model.backbone, model.head, model.combiner, trainer.objective.generator]
    for number, part in enumerate(parts):
        trainer.progress.phase = number
        trainer._enter_phase()
        step = trainer.step
        step.set_modes()
        assert [module.training for module in modules] == [name == part for name in parts]
        grads = {name for name, group in step.parts.items() for p in group if p.requires_grad}
        assert grads == {part}


def test_a_closed_form_generator_needs_no_optimiser(make, tmp_path):
    recipe = make(generator={"name": "toolbox.midpoint"}, miner={"name": "pml.triplet_margin"})
    line = log(fit(tmp_path, recipe))[0]
    assert list(line["lr"]) == ["backbone", "head"]
    assert line["triplets"] > 0 and "generator_loss" not in line


def test_a_losss_own_parameters_train_and_take_their_rates_factor(make, tmp_path):
    for factor in (10.0, 0.0):
        recipe = make(loss={"name": "toolbox.proxies"}, optimizer={"lr_factor": {"loss": factor}})
        assert ("loss.proxies" in changed_by(tmp_path / str(factor), recipe)) == (factor > 0)


SGD = {"name": "SGD", "lr": 1e-2}
OTHERS = {"head": 2.0, "combiner": 3.0, "generator": 4.0}
OWN = {"generator_optimizer": SGD | {"lr_factor": {"generator": 5.0}}}
# tables, and the rates of backbone, head, combiner and generator as multiples of the plain rate
RATES: list[tuple[dict[str, Any], tuple[int, ...]]] = [
    ({"phase": [{"lr": 1e-1}]}, (10, 10, 10, 10)),
    ({"phase": [{"generator_lr": 2e-1}]}, (1, 1, 1, 20)),
    ({"phase": [{"lr": 1e-1, "generator_lr": 2e-1}]}, (10, 10, 10, 20)),
    ({"generator_optimizer": SGD, "phase": [{"lr": 1e-1}]}, (10, 10, 10, 1)),
    ({"optimizer": SGD | {"lr_factor": OTHERS}}, (1, 2, 3, 4)),
    ({**OWN, "phase": [{"lr": 1e-1, "generator_lr": 2e-2}]}, (10, 10, 10, 10)),
]


def test_rates_and_factors_reach_what_they_name(make, tmp_path):
    """In one step of plain gradient descent, weights move in proportion to their rate."""

    def step(tables: dict[str, Any], name: str) -> dict[str, torch.Tensor]:
        phase = {"epochs": 1, **tables.get("phase", [{}])[0]}
        parts = {"generator": GENERATOR, "combiner": {"name": "toolbox.local"}, "optimizer": SGD}
        sampler = {"classes": 4, "items": 4, "batches": 1}
        recipe = make(**{**STILL, **parts, "sampler": sampler, **tables, "phase": [phase]})
        before, after = start(tmp_path, recipe), weights(fit(tmp_path, recipe, name))
        return {item: after[item].double() - before[item].double() for item in moved(before, after)}

    def length(step: dict[str, torch.Tensor], part: str) -> float:
        return float(torch.cat([step[n].flatten() for n in step if n.startswith(part)]).norm())

    plain = step({}, "plain")
    parts = ("model.backbone", "model.head", "model.combiner", "generator")
    for number, (tables, factors) in enumerate(RATES):
        moves = step(tables, f"run{number}")
        assert plain.keys() == moves.keys()
        for part, factor in zip(parts, factors, strict=True):
            ratio = length(moves, part) / length(plain, part)
            assert ratio == pytest.approx(factor, rel=1e-3), part


def test_a_figure_is_the_mean_of_the_batches_that_have_it(make, tmp_path, monkeypatch):
    call, seen = Step.losses, []

    def every_other(self: Any, inputs: Any, labels: Any) -> Losses:
        losses = call(self, inputs, labels if len(seen) % 2 else torch.zeros_like(labels))
        seen.append(None if losses.generator is None else losses.generator.item())
        return losses

    monkeypatch.setattr(Step, "losses", every_other)
    (line,) = log(fit(tmp_path, make(generator=GENERATOR, train={"epochs": 1})))
    had = [value for value in seen[2:] if value is not None]  # the first two are trial batches
    assert len(seen) == 7 and len(had) == 2
    assert line["generator_loss"] == pytest.approx(sum(had) / 2)


def test_an_epoch_without_triplets_is_warned_of(make, tmp_path):
    reports: list[str] = []
    for items in (1, 2):
        recipe = make(generator=GENERATOR, sampler={"classes": 4, "items": items, "batches": 2})
        train_run(tmp_path / str(items), recipe, report=reports.append)
        lines = run_one_batch(recipe)
        noted = any("has no triplet for the generator" in line for line in lines)
        assert noted == (items == 1)
    warnings = [line for line in reports if line.startswith("warning: no batch had a triplet")]
    assert len(warnings) == 2  # in both epochs of the first run
    assert all("[sampler] items to 2" in line["warnings"][0] for line in log(tmp_path / "1"))


@pytest.mark.parametrize("synthetic", [True, False])
@pytest.mark.parametrize("real_weight", [0.0, 0.5])
def test_without_triplets_the_real_samples_count_as_ever(make, tmp_path, synthetic, real_weight):
    phase = [{"epochs": 1, "synthetic": synthetic}]
    recipe = make(**STILL, generator=GENERATOR, train={"real_weight": real_weight}, phase=phase)
    trainer = trainer_of(tmp_path, recipe)
    inputs, labels = next(iter(trainer.batches.epoch(0)))
    one_class = torch.zeros_like(labels)
    loss = trainer.step.losses(inputs, one_class).metric
    alone = trainer.objective.loss(trainer.run.model(inputs)[1], one_class).item()
    assert alone > 0 and loss.requires_grad
    assert loss.item() == pytest.approx(alone * (real_weight if synthetic else 1.0), rel=1e-6)


def test_frozen_features_give_what_the_frozen_backbone_gives(make, tmp_path):
    changed = changed_by(tmp_path, make(backbone={"name": "toolbox.net", "frozen": True}))
    assert changed and all(name.startswith("model.head") for name in changed)
    run = Run.open(tmp_path / "run")
    whole = encode(run.model, run.dataset, run.splits.query)
    features = backbone_features(run.model, run.dataset, run.device, run.recipe.evaluate.batch_size)
    cached = encode(run.model, features, run.splits.query, from_features=True)
    torch.testing.assert_close(whole, cached)


def test_weights_that_become_nan_are_never_kept_as_the_best(make, tmp_path):
    optimizer = {"name": "SGD", "lr": 1e38, "options": {"weight_decay": 1e38}}
    recipe = make(**STILL, sampler={"classes": 4, "items": 4, "batches": 1}, optimizer=optimizer)
    says = r"at step 1 \(epoch 1\): weights of the \w+ became NaN or infinite"
    with pytest.raises(DataError, match=says):
        fit(tmp_path, recipe)
    first = start(tmp_path / "again", recipe)
    for file in ("last", "best"):  # both hold the weights before the first step
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
    assert (first["epoch"], second["epoch"]) == (1, 2)
    assert {"loss", "validation_map_at_r"} <= first["metrics"].keys()
    scores = [line["metrics"]["validation_map_at_r"] for line in (first, second)]
    assert ended["metrics"]["map_at_r"] == max(scores)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is present")
@pytest.mark.parametrize("options", [{"precision": "fp16"}, {"device": "cuda"}])
def test_what_needs_a_gpu_is_refused_without_one(make, tmp_path, options):
    with pytest.raises(RecipeError, match=r"GPU"):
        fit(tmp_path, make(train=options))
    assert not (tmp_path / "run").exists()


MINED = {"optimizer": {"name": "SGD", "lr": 0.05}, "miner": {"name": "pml.triplet_margin"}}


def test_two_processes_train_two_sides_as_one(make, trains_as_one, tmp_path):
    recipe = make(**STILL, **MINED, generator=GENERATOR, combiner={"name": "toolbox.local"})
    trains_as_one({"two": recipe}, within=1e-4)
    changed = moved(start(tmp_path, recipe), weights(tmp_path / "two"))
    assert {name.partition(".")[0] for name in changed} >= {"model", "generator"}


def test_two_processes_that_torch_starts_train_as_one(make, process, tmp_path):
    recipe = make(**STILL, **MINED)
    (tmp_path / "recipe.toml").write_text(to_toml(recipe))
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    words += ["-m", "retrieval.cli", "train", tmp_path / "recipe.toml"]
    outcome = process(*words, "--output", tmp_path / "two", seconds=300, OMP_NUM_THREADS="1")
    assert outcome.code == 0, outcome.err
    assert outcome.out.count("epoch 1:") == outcome.out.count("Trained ") == 1
    assert moved(start(tmp_path, recipe), weights(tmp_path / "two"))
    assert apart(fit(tmp_path, recipe, "one"), tmp_path / "two") < 1e-4


def test_the_time_that_is_left_is_the_phase_s_own(make, tmp_path, monkeypatch, capsys):
    now = [0.0]
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: now[0]))
    train = Trainer._train_batch
    seconds = {"head": 5.0, "whole": 60.0}

    def timed(trainer: Trainer, *batch: Any) -> Any:
        now[0] += seconds[trainer.phase.name]
        return train(trainer, *batch)

    monkeypatch.setattr(Trainer, "_train_batch", timed)
    phases = [
        {"name": "head", "epochs": 2, "train": ["head", "loss"]},
        {"name": "whole", "epochs": 2},
    ]
    sampler = {"classes": 4, "items": 4, "batches": 4}
    fit(tmp_path, make(phase=phases, sampler=sampler))
    lines = [line for line in capsys.readouterr().err.splitlines() if " left" in line]
    assert len(lines) == 12
    for number, line in enumerate(lines):
        head = number < 4
        done = 2 * number + 2 if head else number - 3
        left = (8 - done) * (5 if head else 60)
        assert line.startswith(f"training, phase {1 if head else 2} of 2: {done} of 8 batches")
        assert f" {left // 60:02}:{left % 60:02} left" in line
