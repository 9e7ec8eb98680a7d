"""Partial FC: equal to known losses, divided over processes, saved and resumed by any number."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from retrieval import create
from retrieval.model.loss_division import Shard
from retrieval.recipe.read import to_toml
from retrieval.run import checkpoint_format
from retrieval.training.trainer import train_run
from torch import Tensor, nn
from trained_weights import STEADY, difference, load, summary

from .conftest import answers

MARGINS = [
    ("pml.arc_face", {"margin": 28.6}, {}),
    ("pml.arc_face", {"margin": 80.0}, {"margin": 80.0}),
    ("pml.cos_face", {"margin": 0.35}, {"margin": 0.0, "cosine_margin": 0.35}),
]


@pytest.mark.parametrize(("name", "theirs", "ours"), MARGINS)
def test_it_is_the_known_loss(name, theirs, ours):
    sizes = {"embedding_size": 6, "classes": 9}
    known = create("loss", name, **sizes, **theirs).double()
    loss = create("loss", "core.partial_fc", **sizes, **ours).double()
    loss.weight.data = known.W.data.T.clone()
    codes = nn.functional.normalize(torch.randn(20, 6, dtype=torch.float64))
    codes[0] = -2 * loss.weight.data[0]  # opposite to its class
    labels = torch.arange(20) % 9
    x, x_known = codes.clone().requires_grad_(), codes.clone().requires_grad_()
    actual, expected = loss(x, labels), known(x_known, labels)
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=0)
    expected.backward(), actual.backward()
    torch.testing.assert_close(x.grad, x_known.grad, rtol=1e-8, atol=1e-10)
    torch.testing.assert_close(loss.weight.grad, known.W.grad.T, rtol=1e-8, atol=1e-10)


def test_its_gradient_is_that_of_finite_differences_and_labels_are_checked():
    torch.manual_seed(0)
    loss = create("loss", "core.partial_fc", embedding_size=3, classes=5, scale=4.0).double()
    codes = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    labels = torch.tensor([0, 3, 3, 4])
    assert torch.autograd.gradcheck(lambda x, _: loss(x, labels), (codes, loss.weight))
    with pytest.raises(ValueError, match="labels must be from 0 to 4, not from 0 to 5"):
        loss(codes, torch.tensor([0, 1, 2, 5]))


def test_shares_hold_each_row_once():
    for whole, world in ((7, 3), (1_000_000, 7), (4, 4)):
        shares = [Shard.of(whole, rank, world) for rank in range(world)]
        assert [s.start for s in shares] == [0, *(s.stop for s in shares[:-1])]
        assert shares[-1].stop == whole
        assert max(s.stop - s.start for s in shares) - min(s.stop - s.start for s in shares) <= 1


RECIPE: dict[str, Any] = {
    **STEADY,
    "loss": {"name": "core.partial_fc", "scale": 8.0, "sample": 0.9},
    "optimizer": {"name": "SGD", "lr": 0.05, "options": {"momentum": 0.9}},
    "head": {"embedding_size": 16},
    "train": {"epochs": 2, "clip_norm": 1.0},
}


def state(folder: Path) -> dict[str, Tensor]:
    """A run's weights, with the rows of all classes and their momentum."""
    saved = load(folder)
    states = saved["optimizers"]["metric"]["state"].values()
    rows, buffers = saved["modules"]["loss"]["weight"], [s["momentum_buffer"] for s in states]
    (momentum,) = (buffer for buffer in buffers if buffer.shape == (5, 16))
    assert rows.shape == momentum.shape
    return {**saved["model"], "rows": rows, "momentum": momentum}


def test_a_run_is_resumed_exactly_on_as_many_processes_and_on_others(make, processes, tmp_path):
    recipe = make(**RECIPE)
    for name in ("two", "cut", "half", "four"):
        (tmp_path / f"{name}.toml").write_text(to_toml(recipe))
    halves = [f"{name}@train.epochs=1" for name in ("cut", "half")]
    output = processes(2, "train_process.py", str(tmp_path), "two", *halves, "cut+")
    assert [answer["error"] for answer in answers(output)] == [""] * 4
    train_run(tmp_path / "alone", recipe)
    alone, two = state(tmp_path / "alone"), state(tmp_path / "two")
    assert difference(two, alone) < 2e-5
    assert difference(state(tmp_path / "cut"), two) == 0  # bit for bit
    for name in ("four", "one"):
        shutil.copytree(tmp_path / "half", tmp_path / name)
    processes(4, "train_process.py", str(tmp_path), "four+")
    assert difference(state(tmp_path / "four"), alone) < 2e-5
    train_run(tmp_path / "one", recipe, resume=True)
    assert difference(state(tmp_path / "one"), alone) < 2e-5
    assert summary(tmp_path / "one")["steps"] == 6


@pytest.mark.skipif(not Path("/proc/self/status").is_file(), reason="needs Linux's /proc")
def test_a_process_reads_only_its_rows_into_memory(tmp_path):
    def memory() -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        (line,) = (line for line in lines if line.startswith("RssAnon"))
        return int(line.split()[1]) << 10

    path, rows = tmp_path / "last.safetensors", torch.arange(1 << 24).reshape(-1, 64)
    checkpoint_format.save(path, {"rows": checkpoint_format.Mapped(rows), "model": torch.ones(3)})
    before = memory()
    state = checkpoint_format.load_checkpoint(path)
    half = state["rows"][len(rows) // 4 : len(rows) // 2].clone()
    assert memory() - before < rows.nbytes / 2
    assert torch.equal(half, rows[len(rows) // 4 : len(rows) // 2])
    del state["rows"]
    assert str(path) not in Path("/proc/self/maps").read_text(), "the file is unmapped"
    assert torch.equal(state["model"], torch.ones(3))


def test_phases_that_train_only_or_never_divided_rows_train_as_one(make, trains_as_one):
    recipes = {}
    for part in ("loss", "head"):
        phase = [{"epochs": 1, "train": [part]}]
        recipes[part] = make(**{**RECIPE, "train": {"clip_norm": 1.0}}, phase=phase)
    trains_as_one(recipes)
