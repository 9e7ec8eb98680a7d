"""`Generator.bind`: a generator sees the model's head as it is now, and does not own it."""

from __future__ import annotations

import pytest
import torch
from retrieval.errors import PluginError
from retrieval.run.open import build_run
from trained_weights import trainer_of

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


def test_it_sees_the_head_as_it_is_now(make, tmp_path):
    run = build_run(tmp_path, make(generator=ONTO))
    generator, head = run.objective.generator, run.model.head
    random = torch.Generator().manual_seed(0)
    anchor, negative = torch.randn(2, 6, run.model.backbone.features, generator=random)
    with torch.no_grad():
        head[0].weight.zero_()
        head[0].bias.fill_(1.0)
        assert torch.equal(generator(anchor, anchor, negative), negative)  # all codes are one
        head[0].weight.normal_(generator=random)
        moved = generator(anchor, anchor, negative)
    assert (moved == anchor).all(1).any()


def test_a_generator_that_swallows_the_head_is_refused_in_a_sentence(make, tmp_path):
    says = r"Onto\.bind\(head\) registers .* in a tuple instead: self\._head = \(head,\)\.$"
    with pytest.raises(PluginError, match=says):
        build_run(tmp_path, make(generator={**ONTO, "keep": True}))


def test_it_trains_and_resumes_to_the_same_bits(make, resumes):
    resumes(make(generator=ONTO), 7)
