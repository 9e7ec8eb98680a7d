"""DAML trained by recipes: which objective trains which part, and phases."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from daml_recipes import ALGORITHM, LOSSES, METRIC, batch, made, trainer
from retrieval.run import checkpoint
from retrieval.run.build import Called
from trained_weights import fit, log, moved, start, weights


@pytest.mark.parametrize("tables", LOSSES, ids=lambda t: t["loss"]["name"])
@pytest.mark.parametrize("coupling", ["separate", "joint"])
def test_gradients_are_those_of_the_couplings_objectives(tmp_path, tables, coupling):
    """Separate: J_m for the metric, also through synthetic samples, and J_gen for the generator,
    bit for bit. Joint: the sum for both.
    """
    of = trainer(tmp_path, **tables, train={"device": "cpu", "coupling": coupling})
    inputs, labels = batch(of)
    random = checkpoint.random_state()
    losses = of.step.losses(inputs, labels)
    metric, generator = list(of.run.model.parameters()), list(of.objective.generator.parameters())
    total = losses.metric + losses.generator

    def gradients(value: torch.Tensor, of: list[Any]) -> list[Any]:
        return list(torch.autograd.grad(value, of, retain_graph=True, allow_unused=True))

    for value, rivals in (
        (losses.metric, generator),
        (losses.generator, [*of.run.model.backbone.parameters()]),
    ):
        assert any(g is not None and bool(g.any()) for g in gradients(value, rivals))
    if coupling == "joint":
        expected = gradients(total, metric + generator)
    else:
        expected = gradients(losses.metric, metric) + gradients(losses.generator, generator)
    assert all(bool(g.any()) for g in expected[len(metric) :])
    checkpoint.restore_random_state(random)
    for parameter in metric + generator:
        parameter.grad = None
    again = of.step.losses(inputs, labels)
    of.step.backward(again)
    for parameter, gradient in zip(metric + generator, expected, strict=True):
        if coupling == "separate":
            assert torch.equal(parameter.grad, gradient)
        else:
            torch.testing.assert_close(parameter.grad, gradient, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["daml.hard_negative", "daml.hard_positive"])
def test_the_loss_trains_the_backbone_through_synthetic_samples(tmp_path, name):
    """The backbone's gradient for one triplet, with the generator's weights as constants."""
    of = trainer(tmp_path, generator={"name": name}, loss={"name": "daml.triplet", "margin": 3.0})
    images, labels = batch(of)
    labels = torch.arange(len(images)) // 2
    of.run.model.eval()
    of.objective.miner = Called(lambda *_: tuple(torch.tensor([i]) for i in (0, 1, 2)))
    losses = of.step.losses(images, labels)
    of.step.backward(losses)
    trained = [p.grad.clone() for p in of.run.model.backbone.parameters() if p.grad is not None]

    built = copy.deepcopy(of.objective.generator)
    built.requires_grad_(False)
    features, _ = of.run.model(images, False)
    a, p, n = (features[i : i + 1] for i in range(3))
    synthetic = built(a, p, n)
    p, n = (synthetic, n) if built.replaces == "positive" else (p, synthetic)
    ea, ep, en = (of.run.model.head(x) for x in (a, p, n))
    value = ((ea - ep).square().sum() - (ea - en).square().sum() + 3.0).relu()
    assert losses.metric.item() == pytest.approx(value.item(), rel=1e-5)
    slope, *expected = torch.autograd.grad(value, [features, *of.run.model.backbone.parameters()])
    assert all(bool(slope[row].any()) for row in range(3)) and not slope[3:].any()
    assert len(trained) == len(expected)
    for actual, entry in zip(trained, expected, strict=True):
        torch.testing.assert_close(actual, entry, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("generator", ["daml.hard_negative", "daml.hard_positive"])
def test_a_learning_rate_of_zero_changes_nothing(tmp_path, generator):
    table = {"name": generator, "margin": 0.0}
    still = dict.fromkeys(METRIC, 0.0)
    recipe = made(generator=table, optimizer={"lr_factor": still})
    changed = moved(start(tmp_path, recipe), weights(fit(tmp_path, recipe, "metric")))
    trained = {name for name in changed if "running" not in name and "num_b" not in name}
    assert trained and all(name.startswith("generator.") for name in trained)
    recipe = made(generator=table, generator_optimizer={"lr_factor": {"generator": 0.0}})
    changed = moved(start(tmp_path, recipe), weights(fit(tmp_path, recipe, "generator")))
    assert any(name.startswith("model.backbone") for name in changed)
    assert any(name.startswith("model.head") for name in changed)
    assert not any(name.startswith("generator.") for name in changed)


def test_the_phases_of_algorithm_1_train_what_they_say(tmp_path):
    before = start(tmp_path, made(phase=ALGORITHM))
    seen = []
    for upto in (1, 2, 3):
        after = weights(fit(tmp_path, made(phase=ALGORITHM[:upto]), str(upto)))
        seen.append({name.partition(".")[0] for name in moved(before, after)})
        before = after
    assert seen == [{"model"}, {"generator"}, {"model", "generator"}]
    lines = log(tmp_path / "3")
    assert "generator_loss" not in lines[0] and "synthetic_shift" not in lines[0]
    assert "loss" not in lines[1] and lines[1]["generator_loss"] > 0
    assert {"loss", "generator_loss", "synthetic_shift", "triplets"} <= lines[2].keys()


def test_a_phase_can_train_the_generator_while_the_metric_sees_real_samples_only(tmp_path):
    of = trainer(tmp_path, phase=[{"name": "apart", "epochs": 1, "synthetic": False}])
    inputs, labels = batch(of)
    losses = of.step.losses(inputs, labels)
    assert torch.equal(losses.metric, of.objective.loss(of.run.model(inputs)[1], labels))
    of.step.backward(losses)
    assert all(bool(p.grad.any()) for p in of.objective.generator.parameters())
