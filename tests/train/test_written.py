"""What a run leaves in its folder: hooks' figures, checkpoints; and the folders that
are refused.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from retrieval.errors import DataError
from retrieval.run import checkpoint
from retrieval.run.open import Run
from retrieval.training.trainer import train

Make = Callable[..., Any]


def fit(tmp_path: Path, made: Any) -> Path:
    train(tmp_path / "run", made)
    return tmp_path / "run"


def test_the_runs_hooks_are_called(make, tmp_path):
    lines = [
        json.loads(x) for x in (fit(tmp_path, make()) / "hooks.jsonl").read_text().splitlines()
    ]
    assert [line["hook"] for line in lines] == ["start", "epoch", "epoch", "end"]
    assert [line["epoch"] for line in lines[1:3]] == [0, 1]
    assert {"loss", "validation_map_at_r"} <= lines[1]["metrics"].keys()
    assert lines[3]["metrics"]["map_at_r"] == max(
        line["metrics"]["validation_map_at_r"] for line in lines[1:3]
    )


def test_a_taken_folder_is_refused_and_untouched(make, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "mine.txt").write_text("keep")
    with pytest.raises(DataError, match=r"exists already and holds no run"):
        fit(tmp_path, make())
    assert [p.name for p in (tmp_path / "run").iterdir()] == ["mine.txt"]


def test_a_damaged_checkpoint_is_one_sentence(make, tmp_path):
    folder = fit(tmp_path, make())
    best = folder / "checkpoints" / "best.safetensors"
    content = best.read_bytes()
    best.write_bytes(content[: len(content) // 2])
    with pytest.raises(DataError, match=r"best\.safetensors is damaged"):
        Run.open(folder)
    best.write_bytes(b"\x80\x04K\x01.")  # a pickle is never opened
    with pytest.raises(DataError, match=r"best\.safetensors is damaged"):
        Run.open(folder)


def test_checkpoints_keep_every_nesting_and_type(tmp_path):
    state = {
        "a": {1: [torch.arange(3), (2.5, None, "x", True)]},
        "e": {},
        "l": [],
        "t": torch.tensor(2.0, dtype=torch.bfloat16),
    }
    checkpoint.save(tmp_path / "x.safetensors", state)
    again = checkpoint.load(tmp_path / "x.safetensors")
    assert torch.equal(again["a"][1][0], state["a"][1][0])
    assert again["a"][1][1] == (2.5, None, "x", True)
    assert (again["e"], again["l"]) == ({}, [])
    assert again["t"].dtype == torch.bfloat16


def test_resuming_with_another_recipe_is_refused(make, tmp_path):
    from retrieval.run.resume import changes

    folder = fit(tmp_path, make())
    assert changes(folder, make(), None) == []
    with pytest.raises(DataError, match=r"another recipe: \[optimizer\] differs"):
        changes(folder, make(optimizer={"lr": 0.5}), None)
