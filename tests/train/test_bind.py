"""`Generator.bind`: a generator sees the model's head as it is now, and does not own it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from retrieval.errors import DataError, PluginError
from retrieval.run import checkpoint
from retrieval.run.open import build_run
from retrieval.training.trainer import Trainer, train

Make = Callable[..., Any]
ONTO = {"name": "toolbox.onto"}


def built(make: Make, tmp_path: Path, **tables: Any) -> Any:
    checkpoint.seed_everything(0)
    return build_run(tmp_path, make(generator=ONTO, **tables))


@pytest.mark.parametrize("combiner", [None, {"name": "toolbox.local"}])
def test_the_generator_is_bound_once_to_the_models_own_head(
    make: Make, tmp_path: Path, combiner: dict[str, Any] | None
) -> None:
    run = built(make, tmp_path, combiner=combiner)
    generator = run.objective.generator
    assert len(generator.heads) == 1
    assert generator.heads[0] is run.model.head


def test_a_bound_head_is_neither_saved_nor_trained_twice(make: Make, tmp_path: Path) -> None:
    from accelerate import Accelerator

    run = built(make, tmp_path)
    assert not run.objective.generator.state_dict()
    trainer = Trainer(run, Accelerator(cpu=True))
    assert trainer.step.parts["generator"] == []
    of_optimisers = [
        p for o in trainer.step.optimizers.values() for g in o.param_groups for p in g["params"]
    ]
    assert (
        len(of_optimisers)
        == len({id(p) for p in of_optimisers})
        == len(list(run.model.parameters()))
    )


def test_it_sees_the_head_as_it_is_now(make: Make, tmp_path: Path) -> None:
    run = built(make, tmp_path)
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


def test_a_generator_that_swallows_the_head_is_refused_in_a_sentence(
    make: Make, tmp_path: Path
) -> None:
    with pytest.raises(
        PluginError,
        match=r"Onto\.bind\(head\) registers .* in a tuple instead: self\._head = \(head,\)\.$",
    ):
        build_run(tmp_path, make(generator={**ONTO, "keep": True}))


def test_it_trains_and_resumes_to_the_same_bits(
    make: Make, tmp_path: Path, monkeypatch: Any
) -> None:
    """A run of two epochs, and one that stopped in its second and was resumed."""
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    train(whole, make(generator=ONTO))
    monkeypatch.setenv("NAN_AT", "7")
    with pytest.raises(DataError, match="loss is nan"):
        train(halves, make(generator=ONTO))
    monkeypatch.delenv("NAN_AT")
    train(halves, make(generator=ONTO), resume=True)
    one, two = (
        checkpoint.load(f / "checkpoints" / "last.safetensors")["model"] for f in (whole, halves)
    )
    assert all(torch.equal(one[name], two[name]) for name in one)
