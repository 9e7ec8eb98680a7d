"""Several processes train what one would: batch norm, rows of the loss, classes; two and four of
them, by gloo on the loopback.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from retrieval.recipe.read import to_toml
from retrieval.run import checkpoint
from retrieval.run.folder import claimed
from retrieval.training.trainer import train

Make = Callable[..., Any]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    state = checkpoint.load(folder / "checkpoints" / "last.safetensors")
    return {
        **state["model"],
        **{f"{n}.{k}": v for n, m in state["modules"].items() for k, v in m.items()},
    }


def apart(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    return max(float((one[name] - other[name]).abs().max()) for name in one)


STILL = {
    "sampler": {"classes": 4, "items": 4, "batches": 3},
    "backbone": {"name": "toolbox.net", "batch_norm": False, "dropout": 0.0},
    "head": {"embedding_size": 12},
    "optimizer": {"name": "SGD", "lr": 0.05},
    "train": {"epochs": 1},
}
DIVIDED: dict[str, dict[str, Any]] = {
    "anchors": {
        "loss": {"name": "pml.multi_similarity"},
        "miner": {"name": "pml.multi_similarity"},
    },
    "triplets": {"loss": {"name": "pml.triplet_margin", "margin": 0.3}},
    "combiner": {"loss": {"name": "pml.contrastive"}, "combiner": {"name": "toolbox.local"}},
    "items": {"loss": {"name": "pml.normalized_softmax"}},
    "whole": {"loss": {"name": "pml.lifted_structure"}},
}
"""Losses that are divided by anchors (with a miner, by labels, over a combiner's distance), by
items, and not at all.
"""


@pytest.mark.parametrize("world", [2, 4])
def test_several_processes_train_as_one_and_gather_codes_only(make, processes, tmp_path, world):
    names = list(DIVIDED) if world == 2 else ["anchors"]
    for name in names:
        (tmp_path / f"{name}.toml").write_text(to_toml(make(**STILL, **DIVIDED[name])))
    said = processes(world, "train_process.py", str(tmp_path), *names)
    told = [json.loads(line) for line in said.splitlines() if line.startswith("{")]
    for line, name in zip(told, names, strict=True):
        tables = DIVIDED[name]
        assert not line["error"]
        assert line["widths"] == ([] if name == "items" else [12])  # features have 16, images 64
        train(tmp_path / f"{name} one", make(**STILL, **tables))
        one = weights(tmp_path / f"{name} one")
        assert apart(one, weights(tmp_path / name)) < 2e-5, name
        losses = [
            json.loads((tmp_path / run / "metrics.jsonl").read_text().splitlines()[0])["loss"]
            for run in (name, f"{name} one")
        ]
        assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_processes_begin_a_run_together_or_not_at_all(make, processes, tmp_path):
    for name in ("first", "held", "late"):
        (tmp_path / f"{name}.toml").write_text(to_toml(make(**STILL)))
    with claimed(tmp_path / "held"):
        said = processes(2, "train_process.py", str(tmp_path), "first", "held", "late~", "late+~")
    told = [json.loads(line)["error"] for line in said.splitlines() if line.startswith("{")]
    assert "Another process" in told.pop(1)
    assert told == ["", "", ""]
    assert (tmp_path / "late" / "summary.json").is_file()


@pytest.mark.parametrize("world", [2, 4])
def test_rows_all_at_once_and_in_blocks_give_the_same_loss_and_gradients(processes, world):
    processes(world, "blocks_process.py")


@pytest.mark.parametrize("world", [2, 4])
def test_batch_norm_of_all_shares_is_that_of_the_whole_batch(processes, world):
    processes(world, "norm_process.py")


def test_a_run_of_two_processes_with_batch_norm_is_that_of_one(make, processes, tmp_path):
    import onnx
    from retrieval.export.export_run import export
    from retrieval.run.open import Run

    table = {
        "backbone": {"name": "toolbox.net", "dropout": 0.0},
        "optimizer": {"name": "SGD", "lr": 0.05},
    }
    for name, sync in (("whole", True), ("shares", False)):
        made = make(**table, train={"epochs": 1, "sync_batch_norm": sync})
        (tmp_path / f"{name}.toml").write_text(to_toml(made))
    processes(2, "train_process.py", str(tmp_path), "whole", "shares")
    whole, shares = weights(tmp_path / "whole"), weights(tmp_path / "shares")
    train(tmp_path / "one", make(**table, train={"epochs": 1}))
    one = weights(tmp_path / "one")
    assert apart(one, whole) < 1e-5 < 1e-3 < apart(one, shares)
    lines = [
        json.loads((tmp_path / name / "metrics.jsonl").read_text().splitlines()[0])
        for name in ("whole", "shares")
    ]
    assert "warnings" not in lines[0]
    assert any("sync_batch_norm = true" in line for line in lines[1]["warnings"])
    export(Run.open(tmp_path / "whole"), tmp_path / "bundle", progress=False)
    nodes = [node.op_type for node in onnx.load(tmp_path / "bundle" / "encoder.onnx").graph.node]
    assert (
        nodes.count("BatchNormalization") <= 1
    )  # one node, or none where the exporter made it a part of the convolution
    assert not set(nodes) & {"Sqrt", "Sub", "ReduceSum"}
