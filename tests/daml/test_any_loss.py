"""Every installed loss with a reference set, beside a generator and, where it takes a distance,
beside a discriminator.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from retrieval.errors import RecipeError
from retrieval.host.plugins import load_plugins
from retrieval.recipe.read import check_recipe
from retrieval.run import checkpoint
from retrieval.run.open import build_run
from retrieval.training.trainer import Trainer
from sklearn.datasets import load_digits

FACTORIES = load_plugins().factories("losses")
TAKES = [name for name, f in FACTORIES.items() if f.supports_ref_emb and f.supports_miner]
NOT = [name for name, f in FACTORIES.items() if not (f.supports_ref_emb and f.supports_miner)]
REQUIRED: dict[str, dict[str, Any]] = {
    "core.matryoshka": {"widths": [2, 4], "loss": "pml.contrastive"},
    "pml.multiple": {"losses": ["pml.contrastive", "daml.npair"]},
    "pml.cross_batch_memory": {"loss": "pml.contrastive"},
    "pml.ranked_list": {"margin": 0.4, "Tn": 10.0},
    "pml.self_supervised": {"loss": "pml.contrastive"},
}
Make = Callable[..., Trainer]


@pytest.fixture(scope="module")
def make(tmp_path_factory):
    """A trainer on the digits' pixels as vectors, before its first step."""
    digits = load_digits()
    file = tmp_path_factory.mktemp("data") / "digits.npz"
    np.savez(
        file, features=(digits.data[:300] / 16.0).astype(np.float32), labels=digits.target[:300]
    )

    def build(loss: str, **tables: Any) -> Trainer:
        base: dict[str, Any] = {
            "data": {"name": "core.features", "file": str(file)},
            "split": {"by": "item", "validation": 0.0},
            "sampler": {"classes": 4, "items": 4, "batches": 1},
            "backbone": {"name": "core.features"},
            "head": {"embedding_size": 8},
            "generator": {"name": "daml.hard_negative"},
            "loss": {"name": loss} | REQUIRED.get(loss, {}),
            "train": {"device": "cpu"},
        }
        built = check_recipe(base | tables)
        checkpoint.seed_everything(0)
        return Trainer(build_run(Path(file.parent), built), Accelerator(cpu=True))

    return build


def disturb(of: Trainer, scale: float) -> None:
    assert of.objective.generator is not None
    for seed, parameter in enumerate(of.objective.generator.parameters()):
        torch.nn.init.normal_(parameter, std=scale, generator=torch.Generator().manual_seed(seed))


def test_there_are_some_of_every_plugin():
    assert len(TAKES) >= 25
    assert {name.partition(".")[0] for name in TAKES} >= {"daml", "pml", "anml"}


@pytest.mark.parametrize("generator", ["daml.hard_negative", "daml.hard_positive"])
@pytest.mark.parametrize("name", TAKES)
def test_synthetic_samples_enter_the_loss_and_its_gradient(make, name, generator):
    of = make(name, generator={"name": generator})
    inputs, labels = next(iter(of.batches.epoch(0)))
    values = []
    for scale in (0.1, 1.0):
        disturb(of, scale)
        checkpoint.seed_everything(0)
        losses = of.step.losses(inputs, labels)
        assert losses.metric is not None and torch.isfinite(losses.metric)
        values.append(losses.metric.item())
    assert values[0] != values[1]
    of.step.zero_grad()
    of.step.backward(losses)
    for part in ("head", "generator"):
        gradients = [parameter.grad for parameter in of.step.parts[part]]
        assert all(g is not None and bool(g.isfinite().all()) for g in gradients)
        assert any(bool(g.any()) for g in gradients if g is not None)


@pytest.mark.parametrize("name", [name for name in TAKES if FACTORIES[name].takes("distance")])
def test_beside_a_discriminator_it_trains_both(make, name):
    combiner = {"name": "daml.discriminator", "metrics": 2, "hidden": 4, "start": 1.0}
    of = make(name, combiner=combiner)
    disturb(of, 0.1)
    inputs, labels = next(iter(of.batches.epoch(0)))
    losses = of.step.losses(inputs, labels)
    assert losses.metric is not None and torch.isfinite(losses.metric)
    alone = losses.metric - losses.metrics["combiner_loss"]
    reach = torch.autograd.grad(
        alone,
        [p for part in ("head", "combiner") for p in of.step.parts[part]],
        allow_unused=True,
    )
    assert all(g is not None and bool(g.isfinite().all()) and bool(g.any()) for g in reach)


@pytest.mark.parametrize("name", NOT)
def test_any_other_is_refused_with_what_to_use(make, name):
    with pytest.raises(
        RecipeError,
        match=rf"{name} (takes no `ref_emb`|picks its own pairs). Use a loss that .*: \w+\.",
    ):
        make(name)
