"""Every installed loss with a reference set, together with a generator, and with a discriminator if
the loss takes a distance.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from retrieval.errors import RecipeError
from retrieval.host.plugins import load_plugins
from retrieval.run import checkpoint_format
from retrieval.training.trainer import Trainer
from trained_weights import trainer_of

FACTORIES = load_plugins().factories("losses")
TAKES = [name for name, f in FACTORIES.items() if f.supports_ref_emb and f.supports_miner]
NOT = [name for name in FACTORIES if name not in TAKES]
REQUIRED: dict[str, dict[str, Any]] = {
    "core.matryoshka": {"widths": [2, 4], "loss": "pml.contrastive"},
    "pml.multiple": {"losses": ["pml.contrastive", "daml.npair"]},
    "pml.cross_batch_memory": {"loss": "pml.contrastive"},
    "pml.ranked_list": {"margin": 0.4, "Tn": 10.0},
    "pml.self_supervised": {"loss": "pml.contrastive"},
    "pml.triplet_margin": {"margin": 2.0},  # else the loss of the synthetic negatives is 0
}


@pytest.fixture
def trainer(make, tmp_path):
    """A trainer before its first step."""

    def build(loss: str, **tables: Any) -> Trainer:
        recipe = make(loss={"name": loss} | REQUIRED.get(loss, {}), **tables)
        return trainer_of(tmp_path, recipe)

    return build


def randomise(of: Trainer, scale: float) -> None:
    for seed, parameter in enumerate(of.objective.generator.parameters()):
        torch.nn.init.normal_(parameter, std=scale, generator=torch.Generator().manual_seed(seed))


def test_losses_of_every_plugin_are_among_them():
    assert len(TAKES) >= 25
    assert {name.partition(".")[0] for name in TAKES} >= {"daml", "pml", "anml"}


@pytest.mark.parametrize("generator", ["daml.hard_negative", "daml.hard_positive"])
@pytest.mark.parametrize("name", TAKES)
def test_synthetic_samples_enter_the_loss_and_its_gradient(trainer, name, generator):
    of = trainer(name, generator={"name": generator}, combiner=None)
    inputs, labels = next(iter(of.batches.epoch(0)))
    values = []
    for scale in (0.1, 1.0):
        randomise(of, scale)
        checkpoint_format.seed_everything(0)
        losses = of.step.losses(inputs, labels)
        assert torch.isfinite(losses.metric)
        values.append(losses.metric.item())
    assert values[0] != values[1]
    of.step.zero_grad()
    of.step.backward(losses)
    for part in ("head", "generator"):
        gradients = [parameter.grad for parameter in of.step.parts[part]]
        assert all(bool(g.isfinite().all()) for g in gradients)
        assert any(bool(g.any()) for g in gradients)


@pytest.mark.parametrize("name", [name for name in TAKES if FACTORIES[name].takes("distance")])
def test_with_a_discriminator_it_trains_head_and_discriminator(trainer, name):
    of = trainer(name)
    randomise(of, 0.1)
    losses = of.step.losses(*next(iter(of.batches.epoch(0))))
    assert torch.isfinite(losses.metric)
    alone = losses.metric - losses.metrics["combiner_loss"]
    reached = [p for part in ("head", "combiner") for p in of.step.parts[part]]
    for gradient in torch.autograd.grad(alone, reached):
        assert bool(gradient.isfinite().all()) and bool(gradient.any())


@pytest.mark.parametrize("name", NOT)
def test_other_losses_are_refused_with_advice(trainer, name):
    says = rf"{name} (takes no `ref_emb`|picks its own pairs). Use a loss that .*: \w+\."
    with pytest.raises(RecipeError, match=says):
        trainer(name, combiner=None)
