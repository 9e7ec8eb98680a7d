"""Killed writers lose nothing acknowledged: a few of what `benchmarks/kills.py` does."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def kept(script: str, count: int, seed: int, output: Path) -> Any:
    """Return what a script keeps; it forks, so it has a process of its own."""
    line = [sys.executable, BENCHMARKS / f"{script}.py", "--count", count]
    line += ["--seed", seed, "--output", output]
    options = {"capture_output": True, "text": True, "timeout": 400}
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(list(map(str, line)), env=environment, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads((output / "raw" / f"{script}.json").read_text(encoding="utf-8"))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_what_was_acknowledged_is_there_after_a_kill(tmp_path):
    raw = kept("kills", 50, 7, tmp_path)
    assert raw["wrong"] == [] and raw["kills"] == 50 and raw["acknowledged"] > 50
    assert {outcome for *_, outcome, _ in raw["cells"]} >= {"not there", "same either way"}


def test_what_is_lost_is_seen(tmp_path):
    model: Any = importlib.import_module("living_model")
    create: Any = importlib.import_module("retrieval.serving.store.folder")
    bundles = model.make_bundles(tmp_path)
    create.create_local(
        tmp_path / "index", bundles[0], model.widths_of(bundles[0], features=model.WIDTH)
    )
    held = model.State({f"id{n}": 5 for n in range(60)})
    with model.LocalStore(tmp_path / "index", upkeep=False) as store:
        store.upsert(
            [model.item_of(id, one, 0) for id, one in held.items.items()], bundles[0].sha256
        )
    assert model.check(tmp_path / "index", [held], {}, bundles, 0) == {"which": 0, "wrong": []}
    for call in (
        {"call": "upsert", "items": [["id7", 6]]},
        {"call": "upsert", "items": [["id77", 6]]},
        {"call": "delete", "ids": ["id7"]},
        {"call": "begin", "bundle": 1, "number": 2},
    ):
        found = model.check(tmp_path / "index", [held.after(call)], {}, bundles, 0)
        assert found["which"] is None and found["wrong"]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_damaged_file_never_gives_a_wrong_answer_in_silence(tmp_path):
    raw = kept("damage", 100, 3, tmp_path)
    assert raw["wrong"] == [] and raw["cases"] == 100
    assert {how for *_, how, _ in raw["cells"]} == {"right", "refused"}
