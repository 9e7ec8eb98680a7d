"""`[train] chunk`: the whole batch's gradient, with one chunk's activations in memory."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from retrieval.bundle.bundle import Bundle
from retrieval.export.export_run import export
from retrieval.run import checkpoint_format
from retrieval.run.open import Run, build_run
from retrieval.training import step
from retrieval.training.trainer import Trainer, train_run
from torch import Tensor
from trained_weights import STEADY, apart, log

Make = Callable[..., Any]
CONTRASTIVE = {"loss": {"name": "pml.contrastive"}}
MEMORY = {"name": "pml.cross_batch_memory", "loss": "pml.contrastive", "memory_size": 40}
MOVER = {"loss": {"name": "pml.triplet_margin"}, "generator": {"name": "toolbox.mover"}}
CASES: dict[str, dict[str, Any]] = {
    "miner": {"loss": {"name": "pml.multi_similarity"}, "miner": {"name": "pml.multi_similarity"}},
    "generator": {**MOVER, "train": {"real_weight": 0.5}},
    "both sides at once": {**MOVER, "train": {"coupling": "joint"}},
    "combiner": {**CONTRASTIVE, "combiner": {"name": "toolbox.local"}},
    "combiner's objective": {
        **CONTRASTIVE,
        "combiner": {"name": "daml.discriminator", "metrics": 2, "hidden": 4},
    },
    "memory": {"loss": MEMORY},
    "classes": {"loss": {"name": "pml.arc_face"}, "augmentation": {"mix": "mixup"}},
}


def trained(make: Make, folder: Path, chunk: int | None, **tables: Any) -> Trainer:
    """Return a trainer after its first epoch, with the gradients of the last batch."""
    table = {**STEADY, **tables}
    table["train"] = {**table["train"], "device": "cpu", **({"chunk": chunk} if chunk else {})}
    recipe = make(**table)
    checkpoint_format.seed_everything(0)
    run = build_run(folder, recipe)
    trainer = Trainer(run, Accelerator(cpu=True))
    run.model.double()
    run.objective.double()
    trainer.step.set_modes()
    for inputs, labels in trainer.batches.epoch(0):
        trainer.step(inputs, labels)
    return trainer


def gradients(trainer: Trainer) -> dict[str, Tensor]:
    return {
        f"{part}.{number}": parameter.grad
        for part, parameters in trainer.step.parts.items()
        for number, parameter in enumerate(parameters)
        if parameter.grad is not None
    }


def difference(trainer: Trainer, reference: Trainer) -> float:
    """The largest difference of a gradient, relative to the largest gradient."""
    actual, expected = gradients(trainer), gradients(reference)
    assert actual.keys() == expected.keys() and any(bool(x.any()) for x in actual.values())
    scale = max(float(x.abs().max()) for x in expected.values())
    return max(float((actual[k] - expected[k]).abs().max()) for k in actual) / scale


@pytest.fixture
def double(monkeypatch):
    """Let steps compute in double precision where they ask for float32."""
    monkeypatch.setattr(Tensor, "float", Tensor.double)


@pytest.mark.parametrize("name", CASES)
def test_the_gradient_is_that_of_the_whole_batch(make, double, tmp_path, name):
    """After three steps, which would carry on a difference of the first step."""
    whole = trained(make, tmp_path, None, **CASES[name])
    assert difference(trained(make, tmp_path, 5, **CASES[name]), whole) < 1e-6


def test_dropout_and_running_statistics_are_drawn_once(make, double, tmp_path, monkeypatch):
    tables = {"backbone": {"name": "toolbox.net", "dropout": 0.4}, "loss": {"name": "pml.nt_xent"}}
    actual = trained(make, tmp_path, 4, **tables)
    random = torch.get_rng_state()
    # in the same chunks, but with activations in memory
    monkeypatch.setattr(step, "in_little_memory", lambda forward, model, rows: forward(rows))
    expected = trained(make, tmp_path, 4, **tables)
    assert torch.equal(random, torch.get_rng_state())
    assert difference(actual, expected) < 1e-6
    buffers = (trainer.run.model.named_buffers() for trainer in (actual, expected))
    for (name, buffer), (_, other) in zip(*buffers, strict=True):
        assert torch.allclose(buffer, other, atol=1e-9), name


def test_only_the_activations_of_a_chunk_are_in_memory(make, tmp_path):
    peaks = []
    tables = {
        **CONTRASTIVE,
        "sampler": {"classes": 4, "items": 16, "batches": 1},
        "backbone": {"name": "toolbox.net", "width": 32, "batch_norm": False},
    }
    for chunk in (None, 8):
        trainer = trained(make, tmp_path, chunk, **tables)
        inputs, labels = next(iter(trainer.batches.epoch(0)))
        activities = [torch.profiler.ProfilerActivity.CPU]
        with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
            trainer.step(inputs, labels)
        events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
        events.sort(key=lambda e: e.start_ns())
        peaks.append(max(itertools.accumulate(e.nbytes() for e in events)))
    assert peaks[1] < peaks[0] / 3


def test_a_run_that_was_stopped_ends_with_the_same_weights(make, tmp_path, resumes):
    resumes(make(**CONTRASTIVE, train={"epochs": 2, "checkpoint_every": 2, "chunk": 3}), 4)
    (warning,) = (x for x in log(tmp_path / "whole")[0]["warnings"] if "batch norm" in x)
    assert "chunk of 3" in warning


def test_two_processes_train_and_export_the_same(make, trains_as_one, tmp_path, monkeypatch):
    tables = {**STEADY, **CASES["miner"]}
    trains_as_one({"chunked": make(**{**tables, "train": {"epochs": 1, "chunk": 3}})})
    train_run(tmp_path / "whole", make(**tables))
    assert apart(tmp_path / "whole", tmp_path / "chunked one") < 2e-5
    pixels = np.random.default_rng(0).integers(0, 256, (4, 1, 8, 8), dtype=np.uint8)
    monkeypatch.setattr("retrieval.export.agreement.EXPORTERS", ("torchscript",))
    vectors = []
    for name in ("whole", "chunked one"):
        export(Run.open(tmp_path / name), progress=False)
        bundle = Bundle.open(tmp_path / name / "bundle", threads=1, device="cpu")
        vectors.append(bundle.encode(pixels).vector)
    assert np.allclose(*vectors, atol=1e-4)
