"""A run on its device: precision, memory format, compiled kernels, deterministic algorithms."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from retrieval.errors import PluginError, RecipeError
from retrieval.training.trainer import Trainer, train_run
from trained_weights import apart, same, weights

PLAIN = {
    "backbone": {"name": "toolbox.net", "dropout": 0.0},  # compiled, it would draw other numbers
    "sampler": {"classes": 4, "items": 4, "batches": 4},
    "loss": {"name": "pml.arc_face"},
    "optimizer": {"name": "SGD", "lr": 0.01},  # Adam would turn rounding errors into whole steps
}


def test_precision_and_memory_format_train_nearly_the_same(make, tmp_path):
    options = {"plain": {}, "bf16": {"precision": "bf16"}, "last": {"channels_last": True}}
    tables = {**PLAIN, "sampler": {"classes": 4, "items": 4, "batches": 2}}
    for name, option in options.items():
        train_run(tmp_path / name, make(**tables, train={"epochs": 1, "device": "cpu", **option}))
    plain, bf16, last = (tmp_path / name for name in options)
    assert apart(plain, last) < 1e-4 and 1e-7 < apart(plain, bf16) < 0.05
    assert weights(bf16)["model.head.0.weight"].dtype == torch.float32


@pytest.mark.skipif(not shutil.which("g++"), reason="torch.compile needs g++, and there is none")
def test_a_compiled_backbone_trains_nearly_the_same_and_is_plain_again(make, process, tmp_path):
    train_run(tmp_path / "plain", make(**PLAIN, train={"epochs": 1, "device": "cpu"}))
    script = Path(__file__).with_name("compile_process.py")
    words = (script, tmp_path / "plain" / "recipe.toml", tmp_path / "compiled")
    outcome = process(*words, seconds=600, OMP_NUM_THREADS="1")
    assert outcome.code == 0, outcome.err
    result = json.loads(outcome.out.splitlines()[-1])
    assert result["graphs"] >= 1 and result["plain"]
    assert apart(tmp_path / "compiled", tmp_path / "plain") < 1e-4


def test_a_missing_compiler_is_named(make, tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", str(tmp_path / "no-g++"))
    says = r"compile: on a CPU, torch\.compile needs a C\+\+ compiler, but .*no-g"
    with pytest.raises(RecipeError, match=says):
        train_run(tmp_path / "run", make(train={"compile": True, "device": "cpu"}))
    assert not (tmp_path / "run").exists()


def test_deterministic_algorithms_are_on_in_training_and_off_after(make, tmp_path, monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")  # so that it is restored
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    seen: list[bool] = []
    real = Trainer._train_batch

    def recorded(self: Any, *batch: Any) -> Any:
        benchmark = torch.backends.cudnn.benchmark
        seen.append(torch.are_deterministic_algorithms_enabled() and not benchmark)
        return real(self, *batch)

    monkeypatch.setattr(Trainer, "_train_batch", recorded)
    train_run(tmp_path / "one", make(**PLAIN, train={"epochs": 1, "deterministic": True}))
    assert seen == [True] * 4 and not torch.are_deterministic_algorithms_enabled()
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    train_run(tmp_path / "two", make(**PLAIN, train={"epochs": 1, "device": "cpu"}))
    assert seen[4:] == [False] * 4
    if not torch.cuda.is_available():  # a CPU gives the same bits anyway
        assert same(tmp_path / "one", tmp_path / "two")


def test_a_part_without_a_deterministic_algorithm_is_refused(make, tmp_path):
    tables, options = {"loss": {"name": "toolbox.put"}}, {"epochs": 1, "device": "cpu"}
    train_run(tmp_path / "any", make(**tables, train=options))
    says = r"The loss toolbox\.put failed: .*does not have a deterministic"
    with pytest.raises(PluginError, match=says):
        train_run(tmp_path / "same", make(**tables, train={**options, "deterministic": True}))


def test_a_deterministic_run_that_was_stopped_ends_with_the_same_weights(make, resumes):
    resumes(make(**PLAIN, train={"epochs": 2, "deterministic": True, "checkpoint_every": 3}), 6)
    assert not torch.are_deterministic_algorithms_enabled()
