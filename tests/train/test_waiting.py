"""A step does not wait for its device: figures are read some steps later, and so is NaN, whose step
is named all the same.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from retrieval.data.augment import MixedLabels
from retrieval.errors import DataError
from retrieval.model import loss
from retrieval.run import checkpoint
from retrieval.run.open import build_run
from retrieval.training import step, trainer
from retrieval.training.batch import all_finite
from retrieval.training.step import Step
from retrieval.training.trainer import train
from torch.utils._python_dispatch import TorchDispatchMode

Make = Callable[..., Any]

WAITS = ("_local_scalar_dense", "nonzero", "is_nonzero", "equal")
"""What has to be known on the CPU before it goes on."""


class Waits(TorchDispatchMode):
    """Counts what would wait for a device; CPU tensors of torch's optimisers, their step counts,
    never are on one.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in WAITS:
            self.seen.append(name)
        return func(*args, **(kwargs or {}))


@pytest.fixture
def elsewhere(monkeypatch: Any) -> None:
    """The trainer as it is on a device, whose numbers are not there yet."""
    for module in (trainer, step, loss):
        monkeypatch.setattr(module, "reads_at_once", lambda device: False)


PLAIN = {
    "sampler": {"classes": 4, "items": 4, "batches": 5},
    "backbone": {"name": "toolbox.net"},
    "optimizer": {"name": "SGD", "lr": 0.05, "options": {"momentum": 0.9}},
    "train": {"epochs": 2, "clip_norm": 1.0},
}


@pytest.mark.parametrize(
    ("tables", "mixed"),
    [
        ({"loss": {"name": "pml.arc_face"}}, False),
        ({"loss": {"name": "pml.normalized_softmax"}}, True),
        ({"loss": {"name": "pml.contrastive"}, "generator": {"name": "toolbox.mover"}}, False),
    ],
    ids=["classes", "mixed", "generator"],
)
def test_a_step_reads_nothing(make, tmp_path, elsewhere, tables, mixed):
    recipe = make(**PLAIN, **tables)
    run = build_run(tmp_path, recipe)
    assert run.objective is not None
    made = Step(run.model, run.objective, recipe, recipe.phases[0], 5, Accelerator(cpu=True))
    made.set_modes()
    inputs = torch.randint(0, 256, (16, 1, 8, 8), dtype=torch.uint8)
    own = torch.arange(4).repeat_interleave(4)
    labels = MixedLabels(own, own.flip(0), 0.3) if mixed else own
    with Waits() as waits:
        losses = made(inputs, labels)
    drawn = ["nonzero"] if "generator" in tables else []  # as many triplets as there are: a shape
    assert waits.seen == drawn
    with Waits() as waits:
        losses.refuse()
    assert waits.seen  # so it counts


def test_figures_read_late_are_the_same_and_so_are_weights_and_a_resumed_run(
    make, tmp_path, monkeypatch
):
    made = make(**PLAIN, loss={"name": "pml.contrastive"}, generator={"name": "toolbox.mover"})
    train(tmp_path / "at once", made)
    for module in (trainer, step, loss):
        monkeypatch.setattr(module, "reads_at_once", lambda device: False)
    train(tmp_path / "late", made)
    stopped = trainer.Trainer._train_batch
    calls = [0]

    def stop(self: Any, *given: Any) -> Any:
        calls[0] += 1
        if calls[0] == 8:
            raise KeyboardInterrupt
        return stopped(self, *given)

    monkeypatch.setattr(trainer.Trainer, "_train_batch", stop)
    again = make(
        **{**PLAIN, "train": {**PLAIN["train"], "checkpoint_every": 2}},
        loss=made.loss.table,
        generator=made.generator.table,
    )
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "resumed", again)
    train(tmp_path / "resumed", again, resume=True)
    lines = [_log(tmp_path / name) for name in ("at once", "late", "resumed")]
    assert lines[0] == lines[1] == lines[2] and len(lines[0]) == 2
    states = [
        checkpoint.load(tmp_path / name / "checkpoints" / "last.safetensors")["model"]
        for name in ("at once", "late", "resumed")
    ]
    for other in states[1:]:
        assert all(torch.equal(states[0][name], other[name]) for name in other)


def _log(folder: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if k != "images_per_second"} for line in lines]


@pytest.mark.parametrize("late", [False, True])
def test_nan_names_its_step_and_leaves_the_last_good_checkpoint(
    make, tmp_path, late, request, monkeypatch
):
    if late:
        request.getfixturevalue("elsewhere")
    with pytest.raises(DataError, match=r"at step 3 .*generator's output became NaN"):
        train(tmp_path / "made", make(generator={"name": "toolbox.mover", "explode_at": 3}))
    monkeypatch.setenv("NAN_AT", "7")
    with pytest.raises(DataError, match=r"at step 7 \(epoch 2\).*loss is nan"):
        train(tmp_path / "run", make())
    kept = checkpoint.load(tmp_path / "run" / "checkpoints" / "last.safetensors")
    assert kept["progress"]["total"] == 5
    assert all(torch.isfinite(v).all() for v in kept["model"].values())


def test_nan_is_said_where_a_part_fails_because_of_it(make, tmp_path, elsewhere, monkeypatch):
    monkeypatch.setenv("NAN_AT", "4")
    real, calls = Step._mined, [0]

    def refusing(self: Step, codes: torch.Tensor, labels: torch.Tensor) -> Any:
        calls[0] += 1
        if not all_finite([codes]):
            raise DataError("the miner was given NaN")
        return real(self, codes, labels)

    monkeypatch.setattr(Step, "_mined", refusing)
    with pytest.raises(DataError, match=r"at step 4 .*loss is nan"):
        train(tmp_path / "run", make())
    assert calls[0] > 4
