"""Training on a GPU never waits for the device, learns in each precision, and resumes exactly."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from accelerate import Accelerator
from retrieval.evaluation import evaluate_run
from retrieval.evaluation.evaluation import evaluate
from retrieval.host.plugins import create
from retrieval.run.open import Run, build_run
from retrieval.training import trainer
from retrieval.training.trainer import moved, train_run
from trained_weights import lines_of, same


@pytest.mark.parametrize("precision", ["no", "bf16", "fp16"])
@pytest.mark.parametrize("channels_last", [False, True])
def test_each_precision_learns(make, tmp_path, device, precision, channels_last):
    options = {"epochs": 4, "precision": precision, "channels_last": channels_last}
    run = train_run(tmp_path / "run", make(device, train=options))
    lines = lines_of(tmp_path / "run")
    assert lines[-1]["loss"] < lines[0]["loss"] and lines[-1]["validation_recall_at_1"] > 0.7
    assert next(run.model.parameters()).device.type == device


def test_a_step_waits_for_nothing(make, tmp_path, device):
    run = build_run(tmp_path, make(device, train={"clip_norm": 1.0, "precision": "bf16"}))
    training = trainer.Trainer(run, Accelerator(mixed_precision="bf16"))
    training.step.set_modes()
    batches = list(training.batches.epoch(0))
    on_device = [moved(inputs, labels, run.device) for inputs, labels in batches]
    training._train_batch(*on_device[0])  # loads libraries and tunes cuDNN, which waits
    before = torch.cuda.get_sync_debug_mode()
    try:
        torch.cuda.set_sync_debug_mode("error")
        for inputs, labels in on_device[1:]:
            training._train_batch(inputs, labels)
            training.progress.total += 1
        moved(*batches[0], run.device)
    finally:
        torch.cuda.set_sync_debug_mode(before)
    training.tally.read()
    assert training.progress.counts["loss"] == len(on_device)


def test_a_run_that_was_stopped_ends_with_the_same_weights(make, tmp_path, device, monkeypatch):
    recipe = make(device, train={"deterministic": True, "checkpoint_every": 5})
    train_run(tmp_path / "whole", recipe)
    real, calls = trainer.Trainer._train_batch, [0]

    def stop(self: Any, *batch: Any) -> Any:
        calls[0] += 1
        if calls[0] == 18:
            raise KeyboardInterrupt
        return real(self, *batch)

    monkeypatch.setattr(trainer.Trainer, "_train_batch", stop)
    with pytest.raises(KeyboardInterrupt):
        train_run(tmp_path / "stopped", recipe)
    train_run(tmp_path / "stopped", recipe, resume=True)
    assert same(tmp_path / "whole", tmp_path / "stopped")


def test_a_compiled_run_learns(make, tmp_path, device):
    train_run(tmp_path / "run", make(device, train={"epochs": 3, "compile": True}))
    lines = lines_of(tmp_path / "run")
    assert lines[-1]["loss"] < lines[0]["loss"]


def test_metrics_of_a_run_are_those_of_the_cpu(make, tmp_path, device):
    train_run(tmp_path / "run", make(device))
    run = Run.open(tmp_path / "run")
    on_device = evaluate_run.evaluate(run).metrics["trained"]
    run = Run.open(tmp_path / "run")
    run.recipe = make("cpu")
    on_cpu = evaluate_run.evaluate(run).metrics["trained"]
    assert on_device == pytest.approx(on_cpu, abs=2e-3)  # TF32 changes codes, and so ties


def test_exact_search_on_the_device_gives_the_same_metrics(device):
    torch.manual_seed(0)
    codes, labels = torch.randn(3000, 32), torch.randint(0, 40, (3000,))
    names = ("recall_at_1", "map_at_r")
    on_cpu, on_device = (
        evaluate(codes, labels.numpy(), metrics=names, device=place).values
        for place in ("cpu", device)
    )
    assert on_device == pytest.approx(on_cpu, abs=1e-6)


@pytest.mark.parametrize(
    "name", ["pml.multi_similarity", "pml.circle", "pml.contrastive", "pml.sup_con", "pml.arc_face"]
)
def test_a_loss_of_8192_items_is_that_of_the_cpu(device, name):
    torch.manual_seed(0)
    codes = torch.nn.functional.normalize(torch.randn(8192, 64), dim=1)
    labels = torch.arange(8192) // 8
    sizes = {"classes": 1024, "embedding_size": 64} if name == "pml.arc_face" else {}
    loss = create("loss", name, **sizes)
    values, gradients = [], []
    for place in ("cpu", device):
        x = codes.to(place).requires_grad_()
        value = loss.to(place)(x, labels.to(place))
        value.backward()
        values.append(float(value.detach()))
        gradients.append(x.grad.cpu())
    assert values[1] == pytest.approx(values[0], rel=1e-3)
    assert torch.allclose(gradients[0], gradients[1], rtol=1e-2, atol=1e-5)
