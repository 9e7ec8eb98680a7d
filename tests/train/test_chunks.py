"""`[train] chunk`: the gradient of the whole batch, with the activations of one chunk in memory."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from retrieval.errors import RecipeError
from retrieval.export.export_run import export
from retrieval.recipe.read import to_toml
from retrieval.run import checkpoint
from retrieval.run.open import Run, build_run
from retrieval.serving.bundle import Bundle
from retrieval.training import step
from retrieval.training.trainer import Trainer, train
from torch import Tensor

Make = Callable[..., Any]
STILL = {
    "sampler": {"classes": 4, "items": 4, "batches": 3},
    "backbone": {"name": "toolbox.net", "batch_norm": False, "dropout": 0.0},
    "head": {"embedding_size": 12},
    "optimizer": {"name": "SGD", "lr": 0.05},
    "train": {"epochs": 1},
}
MOVER = {"loss": {"name": "pml.triplet_margin"}, "generator": {"name": "toolbox.mover"}}
CASES: dict[str, dict[str, Any]] = {
    "miner": {"loss": {"name": "pml.multi_similarity"}, "miner": {"name": "pml.multi_similarity"}},
    "generator": {**MOVER, "train": {"real_weight": 0.5}},
    "both sides at once": {**MOVER, "train": {"coupling": "joint"}},
    "combiner": {"loss": {"name": "pml.contrastive"}, "combiner": {"name": "toolbox.local"}},
    "combiner's objective": {
        "loss": {"name": "pml.contrastive"},
        "combiner": {"name": "daml.discriminator", "metrics": 2, "hidden": 4},
    },
    "memory": {
        "loss": {"name": "pml.cross_batch_memory", "loss": "pml.contrastive", "memory_size": 40}
    },
    "classes": {"loss": {"name": "pml.arc_face"}, "augmentation": {"mix": "mixup"}},
}


def trained(make: Make, folder: Path, chunk: int | None, **tables: Any) -> Trainer:
    """Return a trainer after its first epoch, with the gradients of the last batch."""
    table = {**STILL, **tables}
    table["train"] = {**table["train"], "device": "cpu", **({"chunk": chunk} if chunk else {})}
    recipe = make(**table)
    checkpoint.seed_everything(0)
    run = build_run(folder, recipe)
    of = Trainer(run, Accelerator(cpu=True))
    run.model.double()
    assert run.objective is not None
    run.objective.double()
    of.step.set_modes()
    for inputs, labels in of.batches.epoch(0):
        of.step(inputs, labels)
    return of


def gradients(of: Trainer) -> dict[str, Tensor]:
    return {
        f"{part}.{number}": parameter.grad
        for part, parameters in of.step.parts.items()
        for number, parameter in enumerate(parameters)
        if parameter.grad is not None
    }


def apart(one: Trainer, other: Trainer) -> float:
    ours, theirs = gradients(one), gradients(other)
    assert ours.keys() == theirs.keys() and any(bool(x.any()) for x in ours.values())
    scale = max(float(x.abs().max()) for x in theirs.values())
    return max(float((ours[k] - theirs[k]).abs().max()) for k in ours) / scale


@pytest.fixture
def double(monkeypatch: pytest.MonkeyPatch) -> None:
    """The step computes in double precision wherever it asks for float32."""
    monkeypatch.setattr(Tensor, "float", Tensor.double)


@pytest.mark.parametrize("name", CASES)
def test_the_gradient_is_that_of_the_whole_batch(make, double, tmp_path, name):
    """After three steps, each of which would carry on a difference of the one before."""
    whole = trained(make, tmp_path, None, **CASES[name])
    assert apart(trained(make, tmp_path, 5, **CASES[name]), whole) < 1e-6


def test_dropout_and_running_statistics_are_drawn_once(make, double, tmp_path, monkeypatch):
    tables = {"backbone": {"name": "toolbox.net", "dropout": 0.4}, "loss": {"name": "pml.nt_xent"}}
    ours = trained(make, tmp_path, 4, **tables)
    random = torch.get_rng_state()
    # the same chunks, whose activations stay in memory
    monkeypatch.setattr(step, "in_little_memory", lambda forward, model, rows: forward(rows))
    theirs = trained(make, tmp_path, 4, **tables)
    assert torch.equal(random, torch.get_rng_state())
    assert apart(ours, theirs) < 1e-6
    for (name, one), (_, other) in zip(
        ours.run.model.named_buffers(), theirs.run.model.named_buffers(), strict=True
    ):
        assert torch.allclose(one, other, atol=1e-9), name


def test_only_the_activations_of_a_chunk_are_in_memory(make, tmp_path):
    peaks = []
    for chunk in (None, 8):
        of = trained(
            make,
            tmp_path,
            chunk,
            loss={"name": "pml.contrastive"},
            sampler={"classes": 4, "items": 16, "batches": 1},
            backbone={"name": "toolbox.net", "width": 32, "batch_norm": False},
        )
        inputs, labels = next(iter(of.batches.epoch(0)))
        activities = [torch.profiler.ProfilerActivity.CPU]
        with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
            of.step(inputs, labels)
        assert profile.profiler is not None and profile.profiler.kineto_results is not None
        events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
        bytes_held = itertools.accumulate(
            e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())
        )
        peaks.append(max(bytes_held))
    assert peaks[1] < peaks[0] / 3


def test_a_run_that_was_stopped_ends_with_the_same_weights(make, tmp_path, stopped):
    recipe = make(
        loss={"name": "pml.contrastive"}, train={"epochs": 2, "checkpoint_every": 2, "chunk": 3}
    )
    train(tmp_path / "whole", recipe)
    stopped(tmp_path / "stopped", recipe, 4)
    whole, resumed = (last(tmp_path / name)["model"] for name in ("whole", "stopped"))
    assert all(torch.equal(whole[key], resumed[key]) for key in whole)
    warnings = json.loads((tmp_path / "whole" / "metrics.jsonl").read_text().splitlines()[0])
    assert any("batch norm" in line and "chunk of 3" in line for line in warnings["warnings"])


def last(folder: Path) -> dict[str, Any]:
    state: dict[str, Any] = checkpoint.load(folder / "checkpoints" / "last.safetensors")
    return state


@pytest.mark.parametrize(
    ("tables", "sentence"),
    [
        ({"train": {"accumulate": 4}}, "never compare items of different batches.*chunk"),
        ({"train": {"chunk": 0}}, "chunk"),
        (
            {"train": {"chunk": 4}, "backbone": {"name": "toolbox.net", "frozen": True}},
            "frozen = true.*Remove chunk",
        ),
        ({"train": {"chunk": 4}, "loss": None, "learner": {"name": "core.pca"}}, "Remove chunk"),
    ],
)
def test_what_cannot_go_together_is_refused(make, tables, sentence):
    with pytest.raises(RecipeError, match=sentence):
        make(**tables)


def test_two_processes_train_and_export_the_same(make, processes, tmp_path, monkeypatch):
    """By chunks of each process's share, with a divided loss; the model exports as any other."""
    tables = {**STILL, **CASES["miner"]}
    chunked = make(**{**tables, "train": {"epochs": 1, "chunk": 3}})
    (tmp_path / "two.toml").write_text(to_toml(chunked))
    processes(2, "train_process.py", str(tmp_path), "two")
    train(tmp_path / "whole", make(**tables))
    train(tmp_path / "one", chunked)
    whole = last(tmp_path / "whole")["model"]
    for name in ("one", "two"):
        state = last(tmp_path / name)["model"]
        assert max(float((state[key] - whole[key]).abs().max()) for key in whole) < 2e-5, name
    pixels = np.random.default_rng(0).integers(0, 256, (4, 1, 8, 8), dtype=np.uint8)
    monkeypatch.setattr("retrieval.export.verify.EXPORTERS", ("torchscript",))
    vectors = []
    for name in ("whole", "one"):
        export(Run.open(tmp_path / name), progress=False)
        bundle = Bundle.open(tmp_path / name / "bundle", threads=1, device="cpu")
        vectors.append(bundle.encode(pixels).vector)
    assert np.allclose(*vectors, atol=1e-4)
