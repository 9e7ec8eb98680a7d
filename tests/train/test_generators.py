"""Generators: bound to the head, or after it, in a step, resumed, and in two processes."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch
from retrieval.errors import PluginError
from retrieval.model.products import check_generator
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
    """Moves the negative by a learned vector, and notes what it gets."""

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
        apart: Tensor = distance(anchor, synthetic)
        assert torch.allclose(apart, (anchor - synthetic).norm(dim=1), atol=1e-4)
        return apart.mean()


class Noted(nn.Module):
    """A loss that notes its reference set."""

    seen: ClassVar[list[tuple[Tensor, Tensor]]] = []

    def forward(self, embeddings, labels, indices_tuple=None, ref_emb=None, ref_labels=None):
        assert ref_emb is not None and ref_labels is not None
        self.seen.append((ref_emb, ref_labels))
        a, _, n = indices_tuple
        return (embeddings[a] * ref_emb[n]).sum(1).mean()


def test_samples_are_embeddings_and_skip_the_head(make, tmp_path):
    parts = {"generator": Shifted(), "loss": Noted()}
    of = trainer_of(tmp_path, check_recipe({**BASE, "train": {"device": "cpu"}}, objects=parts))
    inputs, labels = next(iter(of.batches.epoch(0)))
    of.step.backward(of.step.losses(inputs, labels))
    anchor, positive, negative, mate = Shifted.seen[-1]
    whole, classes = Noted.seen[-1]
    assert whole.shape[1] == anchor.shape[1] == 16 and len(whole) == 16 + len(anchor)
    assert torch.allclose(whole[16:], negative + 0.01)
    codes = whole[:16].detach()

    def labels_of(rows: Tensor) -> Tensor:
        return labels[torch.cdist(rows.detach(), codes).argmin(1)]

    assert torch.equal(labels_of(anchor), labels_of(positive))
    assert torch.equal(labels_of(negative), labels_of(mate))
    assert torch.equal(classes[16:], labels_of(negative))
    assert bool((negative != mate).any(1).all())  # each class has four items
    for part in ("backbone", "head", "generator"):
        assert any(p.grad is not None and bool(p.grad.any()) for p in of.step.parts[part])


def test_two_processes_train_as_one(make, trains_as_one):
    cases = {
        "symmetrical": SYMMETRICAL,
        "recall": {"loss": {"name": "core.recall_at_k", "k": [1, 2], "mix": True}},
        "metrix": {"loss": {"name": "core.metrix_proxy_anchor"}},
        "contextual": {"loss": {"name": "core.contextual"}},
    }
    tables = {**STILL, "optimizer": STEADY["optimizer"], "train": {"epochs": 1}}
    trains_as_one({name: make(**tables, **case) for name, case in cases.items()})


def test_another_space_is_refused():
    generator = Shifted()
    generator.space = "pixels"
    with pytest.raises(PluginError, match=r"mine.shifted has space = 'pixels'; it must be \"feat"):
        check_generator(generator, "mine.shifted")


ONTO = {"name": "toolbox.onto"}


@pytest.mark.parametrize("combiner", [None, {"name": "toolbox.local"}])
def test_the_generator_is_bound_once_to_the_models_own_head(make, tmp_path, combiner):
    run = build_run(tmp_path, make(generator=ONTO, combiner=combiner))
    (head,) = run.objective.generator.heads
    assert head is run.model.head


def test_a_bound_head_is_neither_saved_nor_trained_twice(make, tmp_path):
    trainer = trainer_of(tmp_path, make(generator=ONTO))
    assert not trainer.objective.generator.state_dict()
    assert trainer.step.parts["generator"] == []
    optimizers = trainer.step.optimizers.values()
    trained = [id(p) for o in optimizers for g in o.param_groups for p in g["params"]]
    assert sorted(trained) == sorted(map(id, trainer.run.model.parameters()))


def test_a_generator_that_swallows_the_head_is_refused_in_a_sentence(make, tmp_path):
    says = r"Onto\.bind\(head\) registers .* in a tuple instead: self\._head = \(head,\)\.$"
    with pytest.raises(PluginError, match=says):
        build_run(tmp_path, make(generator={**ONTO, "keep": True}))


@pytest.mark.parametrize("tables", [SYMMETRICAL, {"generator": ONTO}], ids=["after", "bound"])
def test_a_run_that_was_stopped_ends_with_the_same_weights(make, resumes, tables):
    resumes(make(**tables, train={"epochs": 2, "checkpoint_every": 2}), 7)
