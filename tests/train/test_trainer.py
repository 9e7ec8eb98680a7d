"""The trainer: isolation of the two sides, phases, parts, what counts without triplets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from retrieval.run import checkpoint
from retrieval.run.open import Run
from retrieval.training.trainer import train
from trained_weights import GENERATOR, STILL, Make, fit, moved, start, weights


def test_with_a_zero_rate_the_metric_stays_bit_identical_and_the_generator_moves(
    make: Make, tmp_path: Path
) -> None:
    still = {"backbone": 0.0, "head": 0.0, "combiner": 0.0, "loss": 0.0}
    made = make(
        **STILL,
        generator=GENERATOR,
        combiner={"name": "toolbox.local"},
        optimizer={"lr_factor": still},
    )
    changed = moved(start(tmp_path, made), weights(fit(tmp_path, made)))
    assert changed
    assert all(name.startswith("generator.") for name in changed)


def test_with_a_zero_rate_the_generator_stays_bit_identical_and_the_metric_moves(
    make: Make, tmp_path: Path
) -> None:
    made = make(**STILL, generator=GENERATOR, generator_optimizer={"lr_factor": {"generator": 0.0}})
    changed = moved(start(tmp_path, made), weights(fit(tmp_path, made)))
    assert any(name.startswith("model.backbone") for name in changed)
    assert not any(name.startswith("generator.") for name in changed)


def test_each_side_takes_the_gradient_of_its_own_objective_only(make: Make, tmp_path: Path) -> None:
    """The metric's gradient is that of J_m with the synthetic negatives as constants; the
    generator's that of J_gen.
    """
    from accelerate import Accelerator
    from retrieval.run.open import build_run
    from retrieval.training.trainer import Trainer

    made = make(**STILL, generator=GENERATOR)
    checkpoint.seed_everything(0)
    run = build_run(tmp_path, made)
    (tmp_path / "checkpoints").mkdir()
    trainer = Trainer(run, Accelerator(cpu=True))
    inputs, labels = next(iter(trainer.batches.epoch(0)))
    random = checkpoint.random_state()
    losses = trainer.step.losses(inputs, labels)
    metric_side = [*run.model.parameters()]
    generator_side = [*run.objective.generator.parameters()]  # type: ignore[union-attr]
    passing = torch.autograd.grad(
        losses.metric, generator_side, retain_graph=True, allow_unused=True
    )
    assert any(
        g is not None and bool(g.any()) for g in passing
    )  # and is kept out of the generator below
    expected_metric = torch.autograd.grad(losses.metric, metric_side, retain_graph=True)
    expected_generator = torch.autograd.grad(losses.generator, generator_side, retain_graph=True)
    checkpoint.restore_random_state(random)
    for parameter in metric_side + generator_side:
        parameter.grad = None
    again = trainer.step.losses(inputs, labels)
    trainer.step.backward(again)
    for parameter, gradient in zip(metric_side, expected_metric, strict=True):
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.grad, gradient, rtol=0, atol=0)
    for parameter, gradient in zip(generator_side, expected_generator, strict=True):
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.grad, gradient, rtol=0, atol=0)


def test_joint_coupling_lets_both_gradients_flow_everywhere(make: Make, tmp_path: Path) -> None:
    made = make(**STILL, generator=GENERATOR, train={"epochs": 1, "coupling": "joint"})
    separate = make(**STILL, generator=GENERATOR, train={"epochs": 1})
    one, other = weights(fit(tmp_path, made, "joint")), weights(fit(tmp_path, separate, "separate"))
    changed = moved(one, other)
    assert any(name.startswith("generator.") for name in changed)
    assert any(name.startswith("model.head") for name in changed)


def test_a_phase_trains_its_parts_only_and_keeps_the_others_batch_statistics(
    make: Make, tmp_path: Path
) -> None:
    made = make(phase=[{"name": "head", "epochs": 1, "train": ["head"]}])
    changed = moved(start(tmp_path, made), weights(fit(tmp_path, made)))
    assert changed == {"model.head.0.weight", "model.head.0.bias"}


def test_each_part_is_in_training_mode_where_it_trains_and_only_there(
    make: Make, tmp_path: Path
) -> None:
    from accelerate import Accelerator
    from retrieval.run.open import build_run
    from retrieval.training.trainer import Trainer

    parts = ["backbone", "head", "combiner", "generator"]
    made = make(
        generator=GENERATOR,
        combiner={"name": "toolbox.local"},
        phase=[{"name": part, "epochs": 1, "train": [part]} for part in parts],
    )
    checkpoint.seed_everything(0)
    run = build_run(tmp_path, made)
    trainer = Trainer(run, Accelerator(cpu=True))
    modules = [run.model.backbone, run.model.head, run.model.combiner, run.objective.generator]  # type: ignore[union-attr]
    for number, part in enumerate(parts):
        trainer.progress.phase = number
        trainer._enter_phase()
        trainer.step.set_modes()
        assert [module.training for module in modules] == [each == part for each in parts]  # type: ignore[union-attr]
        grads = {
            name for name, group in trainer.step.parts.items() for p in group if p.requires_grad
        }
        assert grads == {part}


def test_a_generator_phase_leaves_the_metric_alone(make: Make, tmp_path: Path) -> None:
    made = make(
        generator=GENERATOR, phase=[{"name": "generator", "epochs": 1, "train": ["generator"]}]
    )
    changed = moved(start(tmp_path, made), weights(fit(tmp_path, made)))
    assert changed
    assert all(name.startswith("generator.") for name in changed)


def test_a_closed_form_generator_needs_no_optimiser(make: Make, tmp_path: Path) -> None:
    made = make(generator={"name": "toolbox.midpoint"}, miner={"name": "pml.triplet_margin"})
    lines = [
        json.loads(x) for x in (fit(tmp_path, made) / "metrics.jsonl").read_text().splitlines()
    ]
    assert list(lines[0]["lr"]) == ["backbone", "head"]
    assert lines[0]["triplets"] > 0
    assert "generator_loss" not in lines[0]


def test_a_losss_own_parameters_train_and_take_their_rates_factor(
    make: Make, tmp_path: Path
) -> None:
    loss = {"name": "toolbox.proxies"}
    moving = make(loss=loss, optimizer={"lr_factor": {"loss": 10.0}})
    assert "loss.proxies" in moved(
        start(tmp_path, moving), weights(fit(tmp_path, moving, "moving"))
    )
    still = make(loss=loss, optimizer={"lr_factor": {"loss": 0.0}})
    assert "loss.proxies" not in moved(
        start(tmp_path, still), weights(fit(tmp_path, still, "still"))
    )


SGD = {"name": "SGD", "lr": 1e-2}


RATES: list[tuple[dict[str, Any], tuple[int, ...]]] = [
    ({"phase": [{"lr": 1e-1}]}, (10, 10, 10, 10)),
    ({"phase": [{"generator_lr": 2e-1}]}, (1, 1, 1, 20)),
    ({"phase": [{"lr": 1e-1, "generator_lr": 2e-1}]}, (10, 10, 10, 20)),
    ({"generator_optimizer": SGD, "phase": [{"lr": 1e-1}]}, (10, 10, 10, 1)),
    (
        {"optimizer": SGD | {"lr_factor": {"head": 2.0, "combiner": 3.0, "generator": 4.0}}},
        (1, 2, 3, 4),
    ),
    (
        {
            "generator_optimizer": SGD | {"lr_factor": {"generator": 5.0}},
            "phase": [{"lr": 1e-1, "generator_lr": 2e-2}],
        },
        (10, 10, 10, 10),
    ),
]
"""Tables, and how many times the plain rate each part then has: backbone, head, combiner,
generator.
"""


def test_rates_and_factors_reach_what_they_name(make: Make, tmp_path: Path) -> None:
    """One step of plain gradient descent: so many times the rate, so many times the way."""
    parts = ("model.backbone", "model.head", "model.combiner", "generator")

    def ways(tables: dict[str, Any], name: str) -> dict[str, torch.Tensor]:
        given = {
            **STILL,
            "generator": GENERATOR,
            "combiner": {"name": "toolbox.local"},
            "sampler": {"classes": 4, "items": 4, "batches": 1},
            "optimizer": SGD,
            **tables,
            "phase": [{"epochs": 1, **tables.get("phase", [{}])[0]}],
        }
        made = make(**given)
        before, after = start(tmp_path, made), weights(fit(tmp_path, made, name))
        return {item: after[item].double() - before[item].double() for item in moved(before, after)}

    def length(way: dict[str, torch.Tensor], part: str) -> float:
        return float(torch.cat([way[n].flatten() for n in way if n.startswith(part)]).norm())

    plain = ways({}, "plain")
    for number, (tables, times) in enumerate(RATES):
        way = ways(tables, f"run{number}")
        assert plain.keys() == way.keys()
        for part, factor in zip(parts, times, strict=True):
            assert length(way, part) / length(plain, part) == pytest.approx(factor, rel=1e-3), part


def test_a_figure_is_the_mean_of_the_batches_that_have_it(
    make: Make, tmp_path: Path, monkeypatch: Any
) -> None:
    """A batch without triplets has no generator's objective: that is none, not zero."""
    from retrieval.training.step import Losses, Step

    call, seen = Step.losses, []

    def every_other(self: Any, inputs: Any, labels: Any) -> Losses:
        losses = call(self, inputs, labels if len(seen) % 2 else torch.zeros_like(labels))
        seen.append(None if losses.generator is None else losses.generator.item())
        return losses

    monkeypatch.setattr(Step, "losses", every_other)
    folder = fit(tmp_path, make(generator=GENERATOR, train={"epochs": 1}))
    (line,) = (json.loads(x) for x in (folder / "metrics.jsonl").read_text().splitlines())
    had = [value for value in seen[2:] if value is not None]  # the look ahead tried two before
    assert len(seen) == 7 and len(had) == 2
    assert line["generator_loss"] == pytest.approx(sum(had) / 2)


def test_an_epoch_without_triplets_is_warned_of(make: Make, tmp_path: Path) -> None:
    from retrieval.training.check import run_one_batch

    said: list[str] = []
    for items in (1, 2):
        made = make(generator=GENERATOR, sampler={"classes": 4, "items": items, "batches": 2})
        train(tmp_path / str(items), made, report=said.append)
        noted = any(
            "has no triplet for the generator to work on" in line for line in run_one_batch(made)
        )
        assert noted == (items == 1)
    warnings = [line for line in said if line.startswith("warning: no batch had a triplet")]
    assert len(warnings) == 2  # one an epoch of the first
    lines = [json.loads(x) for x in (tmp_path / "1" / "metrics.jsonl").read_text().splitlines()]
    assert all("[sampler] items to 2" in line["warnings"][0] for line in lines)


@pytest.mark.parametrize(
    ("synthetic", "real_weight"), [(True, 0.0), (True, 0.5), (False, 0.0), (False, 0.5)]
)
def test_without_triplets_the_real_samples_count_as_ever(
    make: Make, tmp_path: Path, synthetic: bool, real_weight: float
) -> None:
    from accelerate import Accelerator
    from retrieval.run.open import build_run
    from retrieval.training.trainer import Trainer

    made = make(
        **STILL,
        generator=GENERATOR,
        train={"real_weight": real_weight},
        phase=[{"epochs": 1, "synthetic": synthetic}],
    )
    checkpoint.seed_everything(0)
    trainer = Trainer(build_run(tmp_path, made), Accelerator(cpu=True))
    inputs, labels = next(iter(trainer.batches.epoch(0)))
    one_class = torch.zeros_like(labels)
    losses = trainer.step.losses(inputs, one_class)
    alone = trainer.objective.loss(trainer.run.model(inputs)[1], one_class).item()
    assert alone > 0 and losses.metric is not None
    expected = alone * (real_weight if synthetic else 1.0)
    assert losses.metric.item() == pytest.approx(expected, rel=1e-6)
    assert losses.metric.requires_grad


def test_frozen_features_give_what_the_frozen_backbone_gives(make: Make, tmp_path: Path) -> None:
    made = make(backbone={"name": "toolbox.net", "frozen": True})
    changed = moved(start(tmp_path, made), weights(fit(tmp_path, made)))
    assert all(name.startswith("model.head") for name in changed)
    assert changed
    run = Run.open(tmp_path / "run")
    from retrieval.data.encode import encode
    from retrieval.data.features import backbone_features

    whole = encode(run.model, run.dataset, run.splits.query)
    features = backbone_features(run.model, run.dataset, run.device, run.recipe.evaluate.batch)
    cached = encode(run.model, features, run.splits.query, from_features=True)
    torch.testing.assert_close(whole, cached)
