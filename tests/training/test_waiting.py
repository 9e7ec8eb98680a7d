"""A step does not wait for its device: metrics and NaN are read some steps later."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from accelerate import Accelerator
from retrieval.data.augment import MixedLabels
from retrieval.errors import DataError
from retrieval.model import loss
from retrieval.run.open import build_run
from retrieval.training import step, trainer
from retrieval.training.step import Step
from retrieval.training.trainer import all_finite, train_run
from torch.utils._python_dispatch import TorchDispatchMode
from trained_weights import load, log, same

# operations that copy a tensor's values to the CPU
WAITS = ("_local_scalar_dense", "nonzero", "is_nonzero", "equal")


class Waits(TorchDispatchMode):
    """Records the operations that would wait for a device."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in WAITS:
            self.seen.append(name)
        return func(*args, **(kwargs or {}))


@pytest.fixture
def elsewhere(monkeypatch):
    """The trainer behaves as on a GPU, whose values are not yet known."""
    for module in (trainer, step, loss):
        monkeypatch.setattr(module, "reads_at_once", lambda device: False)


MOVED = {"loss": {"name": "pml.contrastive"}, "generator": {"name": "toolbox.mover"}}
PLAIN = {
    "sampler": {"classes": 4, "items": 4, "batches": 5},
    "backbone": {"name": "toolbox.net"},
    "optimizer": {"name": "SGD", "lr": 0.05, "options": {"momentum": 0.9}},
    "train": {"epochs": 2, "clip_norm": 1.0, "checkpoint_every": 2},
}


@pytest.mark.parametrize(
    ("tables", "mixed"),
    [
        ({"loss": {"name": "pml.arc_face"}}, False),
        ({"loss": {"name": "pml.normalized_softmax"}}, True),
        (MOVED, False),
    ],
    ids=["classes", "mixed", "generator"],
)
def test_a_step_reads_nothing(make, tmp_path, elsewhere, tables, mixed):
    recipe = make(**PLAIN, **tables)
    run = build_run(tmp_path, recipe)
    trial = Step(run.model, run.objective, recipe, recipe.phases[0], 5, Accelerator(cpu=True))
    trial.set_modes()
    inputs = torch.randint(0, 256, (16, 1, 8, 8), dtype=torch.uint8)
    own = torch.arange(4).repeat_interleave(4)
    labels = MixedLabels(own, own.flip(0), 0.3) if mixed else own
    with Waits() as waits:
        losses = trial(inputs, labels)
    # the number of triplets is a shape, so a generator waits once
    assert waits.seen == (["nonzero"] if "generator" in tables else [])
    with Waits() as waits:
        losses.refuse()
    assert waits.seen, "the mode records reads"


def test_figures_and_weights_read_late_are_the_same_also_resumed(make, tmp_path, request, resumes):
    recipe = make(**PLAIN, **MOVED)
    train_run(tmp_path / "at once", recipe)
    request.getfixturevalue("elsewhere")
    resumes(recipe, 8)
    assert same(tmp_path / "at once", tmp_path / "whole")
    assert log(tmp_path / "at once") == log(tmp_path / "whole")


@pytest.mark.parametrize("late", [False, True])
def test_nan_names_its_step_and_leaves_a_good_checkpoint(
    make, tmp_path, late, request, monkeypatch
):
    if late:
        request.getfixturevalue("elsewhere")
    with pytest.raises(DataError, match=r"at step 3 .*generator's output became NaN"):
        train_run(tmp_path / "moved", make(generator={"name": "toolbox.mover", "explode_at": 3}))
    monkeypatch.setenv("NAN_AT", "7")
    with pytest.raises(DataError, match=r"at step 7 \(epoch 2\).*loss is nan"):
        train_run(tmp_path / "run", make())
    checkpoint = load(tmp_path / "run")
    assert checkpoint["progress"]["total"] == 5
    assert all(torch.isfinite(value).all() for value in checkpoint["model"].values())


def test_nan_of_an_earlier_step_is_blamed_if_a_part_fails_on_it(
    make, tmp_path, elsewhere, monkeypatch
):
    monkeypatch.setenv("NAN_AT", "4")
    real, calls = Step._loss, [0]

    def refusing(self: Step, codes: torch.Tensor, *arguments: Any, **reference: Any) -> Any:
        calls[0] += 1
        if not all_finite([codes]):
            raise DataError("the loss was given NaN")
        return real(self, codes, *arguments, **reference)

    monkeypatch.setattr(Step, "_loss", refusing)
    with pytest.raises(DataError, match=r"at step 4 .*loss is nan"):
        train_run(tmp_path / "run", make())
    assert calls[0] > 4
