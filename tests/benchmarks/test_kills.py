"""Short runs of `benchmarks/kills.py` and `damage.py`, and a check that they detect a loss."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from retrieval.store.folder import create_local

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def kept(script: str, count: int, seed: int, output: Path) -> Any:
    """Return the results of a script, which runs in a new process because it forks."""
    line = [sys.executable, BENCHMARKS / f"{script}.py", "--count", count]
    line += ["--seed", seed, "--output", output]
    options = {"capture_output": True, "text": True, "timeout": 400}
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(list(map(str, line)), env=environment, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads((output / "raw" / f"{script}.json").read_text(encoding="utf-8"))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_kill_loses_nothing_acknowledged(tmp_path):
    raw = kept("kills", 50, 7, tmp_path)
    assert raw["wrong"] == [] and raw["kills"] == 50 and raw["acknowledged"] > 50
    assert {outcome for *_, outcome, _ in raw["cells"]} >= {"not there", "same either way"}


def test_a_loss_is_detected(tmp_path):
    model: Any = importlib.import_module("living_model")
    bundles = model.make_bundles(tmp_path)
    widths = model.widths_of(bundles[0], features=model.WIDTH)
    create_local(tmp_path / "index", bundles[0], widths)
    state = model.State({f"id{n}": 5 for n in range(60)})
    items = [model.item_of(id, number, 0) for id, number in state.items.items()]
    with model.LocalStore(tmp_path / "index", upkeep=False) as store:
        store.upsert(items, bundles[0].sha256)
    assert model.check(tmp_path / "index", [state], {}, bundles, 0) == {"which": 0, "wrong": []}
    for call in (
        {"call": "upsert", "items": [["id7", 6]]},
        {"call": "upsert", "items": [["id77", 6]]},
        {"call": "delete", "ids": ["id7"]},
        {"call": "begin", "bundle": 1, "number": 2},
    ):
        result = model.check(tmp_path / "index", [state.after(call)], {}, bundles, 0)
        assert result["which"] is None and result["wrong"]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_damaged_file_never_gives_a_wrong_answer(tmp_path):
    raw = kept("damage", 100, 3, tmp_path)
    assert raw["wrong"] == [] and raw["cases"] == 100
    assert {how for *_, how, _ in raw["cells"]} == {"right", "refused"}
