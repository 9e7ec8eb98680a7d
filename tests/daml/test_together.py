"""A generator and several weighed metrics in one run: J_gen by loops, gradients, and one metric."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from discriminator_by_loops import distance
from retrieval.recipe.read import Recipe, check_recipe
from retrieval.run import checkpoint
from retrieval.run.open import build_run
from retrieval.training.trainer import Trainer
from sklearn.datasets import load_digits

K, S, H = 3, 4, 6
Made = Recipe
Make = Callable[..., Made]


@pytest.fixture(scope="module")
def make(tmp_path_factory):
    """A checked recipe on the digits' pixels as vectors, changed by tables."""
    digits = load_digits()
    file = tmp_path_factory.mktemp("data") / "digits.npz"
    np.savez(file, features=(digits.data / 16.0).astype(np.float32), labels=digits.target)

    def build(**tables: Any) -> Made:
        base: dict[str, Any] = {
            "data": {"name": "core.features", "file": str(file)},
            "split": {"by": "item", "test": 0.3, "validation": 0.0},
            "sampler": {"classes": 4, "items": 4, "batches": 6},
            "backbone": {"name": "core.features"},
            "head": {"embedding_size": K * S},
            "combiner": {"name": "daml.discriminator", "metrics": K, "hidden": H, "start": 1.0},
            "generator": {"name": "daml.hard_negative"},
            "loss": {"name": "daml.triplet"},
            "optimizer": {"lr": 0.01},
            "train": {"epochs": 2, "device": "cpu"},
        }
        return check_recipe({k: v for k, v in (base | tables).items() if v is not None})

    return build


def trainer(folder: Path, made: Made) -> Trainer:
    """Before its first step, with a generator that is not at the identity."""
    checkpoint.seed_everything(0)
    run = build_run(folder, made)
    assert run.objective is not None and run.objective.generator is not None
    for parameter in run.objective.generator.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    return Trainer(run, Accelerator(cpu=True))


# --- J_gen by the learned distance


@pytest.mark.parametrize(
    "generator",
    [
        {"name": "daml.hard_negative", "margin": 0.1},
        {"name": "daml.hard_negative", "margin": 0.1, "form": "contrastive"},
        {"name": "daml.hard_positive", "margin": -0.4},
    ],
    ids=["negative", "contrastive", "positive"],
)
def test_the_generators_objective_has_the_weighed_distance(make, tmp_path, generator):
    of = trainer(
        tmp_path, make(generator=generator, sampler={"classes": 3, "items": 3, "batches": 1})
    )
    module = of.objective.generator
    assert module is not None
    seen: list[Any] = []
    module.register_forward_hook(lambda _, given, made: seen.append((*given, made)))
    losses = of.step.losses(*next(iter(of.batches.epoch(0))))
    ((a, p, n, x),) = seen
    state = {k: v.double().tolist() for k, v in of.run.model.state_dict().items()}
    total, used = 0.0, 0
    for row in zip(*(v.double().tolist() for v in (a, p, n, x)), strict=True):
        anchor, positive, negative, made = row
        if generator["name"] == "daml.hard_positive":
            gap = distance(state, negative, anchor, K) ** 2 - distance(state, made, anchor, K) ** 2
            hard, reg = -(math.dist(made, anchor) ** 2), math.dist(made, positive) ** 2
        else:
            own = distance(state, positive, anchor, K) ** 2 if "form" not in generator else 0.0
            gap = distance(state, made, anchor, K) ** 2 - own
            hard, reg = math.dist(made, anchor) ** 2, math.dist(made, negative) ** 2
        adversarial = max(0.0, gap - generator["margin"])
        used += adversarial > 0
        total += hard + 50 * reg + 50 * adversarial
    assert used > 0
    assert losses.generator is not None
    assert losses.generator.item() == pytest.approx(total / len(a), rel=1e-5)


# --- whose gradient reaches whom


@pytest.mark.parametrize("coupling", ["separate", "joint"])
@pytest.mark.parametrize("weight", [0.25, 3.0])
def test_loss_weight_is_lambda_in_what_each_side_steps_on(
    make, tmp_path, coupling, weight, monkeypatch
):
    """Eq 15: J_gen + μ J_dis + λ J_m.

    Differences of the three objectives, each taken by itself, along random directions.
    """
    monkeypatch.setattr(
        torch.Tensor, "float", torch.Tensor.double
    )  # a step casts to float32 wherever it can
    options = {"device": "cpu", "coupling": coupling, "real_weight": 0.5}
    tables = {"generator": {"name": "daml.hard_negative", "margin": -0.5}}
    plain, of = (
        trainer(tmp_path / str(w), make(train=options | {"loss_weight": w}, **tables))
        for w in (1.0, weight)
    )
    for left in (plain, of):
        left.run.model.double()
        left.objective.generator.double()  # type: ignore[union-attr]
    features, labels = next(iter(of.batches.epoch(0)))
    features = features.double()
    parts = {name: [p for p in group if p.requires_grad] for name, group in of.step.parts.items()}

    def objectives() -> tuple[float, float, float]:
        """J_m, J_dis with its balance, and J_gen, of the trainer without a weight, whose parameters
        are those of the other.
        """
        torch.manual_seed(0)
        losses = plain.step.losses(features, labels)
        assert losses.metric is not None and losses.generator is not None
        own = losses.metrics["combiner_loss"]
        return float(losses.metric.detach() - own), float(own), float(losses.generator.detach())

    torch.manual_seed(0)
    of.step.zero_grad()
    of.step.backward(of.step.losses(features, labels))
    moved = {
        name: [p for p in group if p.requires_grad] for name, group in plain.step.parts.items()
    }
    for name, group in parts.items():
        for parameter, same in zip(group, moved[name], strict=True):
            direction = torch.randn_like(same)
            ends = []
            for step in (1e-6, -2e-6):
                same.data.add_(direction, alpha=step)
                ends.append(objectives())
            same.data.add_(direction, alpha=1e-6)
            j_m, j_dis, j_gen = ((a - b) / 2e-6 for a, b in zip(*ends, strict=True))
            if coupling == "joint":
                expected = weight * j_m + j_dis + j_gen
            else:
                expected = j_gen if name == "generator" else weight * j_m + j_dis
            assert float((parameter.grad * direction).sum()) == pytest.approx(
                expected, rel=1e-4, abs=1e-5
            )  # type: ignore[operator]


def test_the_loss_is_added_up_of_synthetic_and_real_samples_and_the_combiners_own(make, tmp_path):
    values = []
    for weight in (0.0, 1.0, 2.5, 2.5):
        of = trainer(tmp_path, make(train={"device": "cpu", "real_weight": weight}))
        inputs, labels = next(iter(of.batches.epoch(0)))
        checkpoint.seed_everything(3)
        # the last without the combiner's own
        train = ["head", "loss"] if len(values) == 3 else ["head", "combiner", "loss"]
        of.step.phase = of.phase.model_copy(update={"train": train})
        losses = of.step.losses(inputs, labels)
        assert losses.metric is not None
        values.append(losses.metric.item())
    codes = of.run.model(inputs)[1]
    real = of.objective.loss(codes, labels).item()
    assert values[1] - values[0] == pytest.approx(real, rel=1e-4)
    assert values[2] - values[0] == pytest.approx(2.5 * real, rel=1e-4)
    assert of.run.model.combiner is not None
    own = of.run.model.combiner.objective(codes, labels, None)[0]
    assert own is not None and abs(own.item()) > 1e-3
    assert values[2] - values[3] == pytest.approx(own.item(), abs=1e-6)


# --- K = 1
