"""A generator and a discriminator in one run: J_gen by loops, and the sum of the objectives."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from discriminator_by_loops import distance
from retrieval.recipe.read import Recipe
from retrieval.run import checkpoint_format
from retrieval.training.trainer import Trainer
from trained_weights import trainer_of

K = 3


def trainer(folder: Path, recipe: Recipe) -> Trainer:
    """A trainer before its first step, with a random generator."""
    of = trainer_of(folder, recipe)
    for parameter in of.objective.generator.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    return of


@pytest.mark.parametrize(
    "generator",
    [
        {"name": "daml.hard_negative", "margin": 0.1},
        {"name": "daml.hard_negative", "margin": 0.1, "form": "contrastive"},
        {"name": "daml.hard_positive", "margin": -0.4},
    ],
    ids=["negative", "contrastive", "positive"],
)
def test_the_generators_objective_uses_the_weighted_distance(make, tmp_path, generator):
    sampler = {"classes": 3, "items": 3, "batches": 1}
    of = trainer(tmp_path, make(generator=generator, sampler=sampler))
    seen: list[Any] = []
    of.objective.generator.register_forward_hook(lambda _, rows, x: seen.append((*rows, x)))
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
    assert losses.generator.item() == pytest.approx(total / len(a), rel=1e-5)


@pytest.mark.parametrize("coupling", ["separate", "joint"])
@pytest.mark.parametrize("weight", [0.25, 3.0])
def test_loss_weight_is_lambda_of_the_objectives(make, tmp_path, coupling, weight, monkeypatch):
    """Eq 15, J_gen + μ J_dis + λ J_m, by finite differences along random directions."""
    # a step casts to float32 wherever it can
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    options = {"device": "cpu", "coupling": coupling, "real_weight": 0.5}
    generator = {"name": "daml.hard_negative", "margin": -0.5}
    plain, of = (
        trainer(tmp_path, make(train=options | {"loss_weight": w}, generator=generator))
        for w in (1.0, weight)
    )
    for trained in (plain, of):
        trained.run.model.double()
        trained.objective.generator.double()
    features, labels = next(iter(of.batches.epoch(0)))
    features = features.double()

    def objectives() -> tuple[float, float, float]:
        """J_m, J_dis with its balance, and J_gen of the trainer without `loss_weight`."""
        torch.manual_seed(0)
        losses = plain.step.losses(features, labels)
        own = losses.metrics["combiner_loss"]
        return float(losses.metric.detach() - own), float(own), float(losses.generator.detach())

    torch.manual_seed(0)
    of.step.zero_grad()
    of.step.backward(of.step.losses(features, labels))
    for name, group in of.step.parts.items():
        for parameter, same in zip(group, plain.step.parts[name], strict=True):
            if not parameter.requires_grad:
                continue
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
            slope = float((parameter.grad * direction).sum())
            assert slope == pytest.approx(expected, rel=1e-4, abs=1e-5)


def test_the_loss_is_the_sum_over_synthetic_and_real_samples_and_the_combiner(make, tmp_path):
    values = []
    combiner = {"name": "daml.discriminator", "metrics": 3, "hidden": 8, "start": 1.0}
    combiner |= {"mu": 0.5, "rho": 3.0}
    for weight in (0.0, 1.0, 2.5, 2.5):
        train = {"device": "cpu", "real_weight": weight}
        of = trainer(tmp_path, make(combiner=combiner, train=train))
        inputs, labels = next(iter(of.batches.epoch(0)))
        checkpoint_format.seed_everything(3)
        # the last phase does not train the combiner
        trains = ["head", "loss"] if len(values) == 3 else ["head", "combiner", "loss"]
        of.step.phase = of.phase.model_copy(update={"train": trains})
        losses = of.step.losses(inputs, labels)
        values.append(losses.metric.item())
        assert "load_1" in losses.metrics
        assert ("combiner_loss" in losses.metrics) == ("combiner" in trains)
    codes = of.run.model(inputs)[1]
    real = of.objective.loss(codes, labels).item()
    assert values[1] - values[0] == pytest.approx(real, rel=1e-4)
    assert values[2] - values[0] == pytest.approx(2.5 * real, rel=1e-4)
    own = of.run.model.combiner.objective(codes, labels, None)[0]
    assert abs(own.item()) > 1e-3
    assert values[2] - values[3] == pytest.approx(own.item(), abs=1e-6)
