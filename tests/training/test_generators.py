"""Generators: what they get, their samples in the loss, the bound head, exact resume."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch
from retrieval.errors import PluginError
from retrieval.model.checked_parts import check_generator
from retrieval.plugin import Generator
from retrieval.recipe.read import check_recipe
from retrieval.run.open import build_run
from torch import Tensor, nn
from trained_weights import STEADY, STILL, trainer_of

from .conftest import BASE

SYMMETRICAL = {
    "generator": {"name": "core.symmetrical_synthesis"},
    "loss": {"name": "pml.triplet_margin", "margin": 0.4},
}


class Shifted(Generator):
    """Adds a learned vector to the negative, and records its arguments."""

    space = "embeddings"
    classmates = True
    seen: ClassVar[list[tuple[Tensor, ...]]] = []

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.full((width,), 0.01))

    def forward(self, *rows: Tensor) -> Tensor:
        self.seen.append(rows)
        return rows[2] + self.shift

    def objective(self, anchor: Tensor, positive: Tensor, *rows: Any) -> Tensor:
        _, synthetic, distance = rows
        values: Tensor = distance(anchor, synthetic)
        assert torch.allclose(values, (anchor - synthetic).norm(dim=1), atol=1e-4)
        return values.mean()


class Recorder(nn.Module):
    """A loss that records its reference set."""

    seen: ClassVar[list[tuple[Tensor, Tensor]]] = []

    def forward(self, embeddings, labels, indices_tuple=None, ref_emb=None, ref_labels=None):
        assert ref_emb is not None and ref_labels is not None
        self.seen.append((ref_emb, ref_labels))
        a, _, n = indices_tuple
        return (embeddings[a] * ref_emb[n]).sum(1).mean()


def test_samples_are_embeddings_and_skip_the_head(tmp_path):
    parts = {"generator": Shifted(), "loss": Recorder()}
    recipe = check_recipe({**BASE, "train": {"device": "cpu"}}, objects=parts)
    trainer = trainer_of(tmp_path, recipe)
    inputs, labels = next(iter(trainer.batches.epoch(0)))
    trainer.step.backward(trainer.step.losses(inputs, labels))
    anchor, positive, negative, mate = Shifted.seen[-1]
    reference, classes = Recorder.seen[-1]
    assert reference.shape[1] == anchor.shape[1] == 16 and len(reference) == 16 + len(anchor)
    assert torch.allclose(reference[16:], negative + 0.01)
    codes = reference[:16].detach()

    def labels_of(rows: Tensor) -> Tensor:
        return labels[torch.cdist(rows.detach(), codes).argmin(1)]

    assert torch.equal(labels_of(anchor), labels_of(positive))
    assert torch.equal(labels_of(negative), labels_of(mate))
    assert torch.equal(classes[16:], labels_of(negative))
    assert bool((negative != mate).any(1).all())  # each class has four items
    for part in ("backbone", "head", "generator"):
        gradients = [p.grad for p in trainer.step.parts[part] if p.grad is not None]
        assert any(bool(gradient.any()) for gradient in gradients)


def test_two_processes_train_as_one(make, trains_as_one):
    cases = {
        "symmetrical": SYMMETRICAL,
        "recall": {"loss": {"name": "core.recall_at_k", "k": [1, 2], "mix": True}},
        "metrix": {"loss": {"name": "core.metrix_proxy_anchor"}},
        "contextual": {"loss": {"name": "core.contextual"}},
    }
    tables = {**STILL, "optimizer": STEADY["optimizer"], "train": {"epochs": 1}}
    trains_as_one({name: make(**tables, **case) for name, case in cases.items()})


def test_an_unknown_space_is_refused():
    generator = Shifted()
    generator.space = "pixels"
    with pytest.raises(PluginError, match=r"mine.shifted has space = 'pixels'; it must be \"feat"):
        check_generator(generator, "mine.shifted")


ONTO = {"name": "toolbox.onto"}


@pytest.mark.parametrize("combiner", [None, {"name": "toolbox.local"}])
def test_a_generator_is_bound_once_to_the_models_head_which_is_neither_saved_nor_trained_twice(
    make, tmp_path, combiner
):
    trainer = trainer_of(tmp_path, make(generator=ONTO, combiner=combiner))
    generator, model = trainer.objective.generator, trainer.run.model
    (head,) = generator.heads
    assert head is model.head and not generator.state_dict()
    assert trainer.step.parts["generator"] == []
    groups = [group for o in trainer.step.optimizers.values() for group in o.param_groups]
    trained = [id(parameter) for group in groups for parameter in group["params"]]
    assert sorted(trained) == sorted(map(id, model.parameters()))


def test_a_generator_that_registers_the_head_is_refused(make, tmp_path):
    says = r"Onto\.bind\(head\) registers .* in a tuple instead: self\._head = \(head,\)\.$"
    with pytest.raises(PluginError, match=says):
        build_run(tmp_path, make(generator={**ONTO, "keep": True}))


@pytest.mark.parametrize("tables", [SYMMETRICAL, {"generator": ONTO}], ids=["after", "bound"])
def test_a_run_that_was_stopped_ends_with_the_same_weights(make, resumes, tables):
    resumes(make(**tables, train={"epochs": 2, "checkpoint_every": 2}), 7)
