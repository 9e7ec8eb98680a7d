"""A short run of `benchmarks/feedback_kills.py`, and a check that it detects a loss."""

import importlib
import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def test_a_killed_server_loses_no_acknowledged_mark(tmp_path):
    script = BENCHMARKS / "feedback_kills.py"
    line = [sys.executable, script, "--count", "4", "--seed", "3", "--output", tmp_path]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(line, env=environment, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    raw = json.loads((tmp_path / "raw" / "feedback_kills.json").read_text(encoding="utf-8"))
    assert raw["wrong"] == [] and raw["kills"] == 4 and raw["acknowledged"] >= 16


def test_a_loss_is_detected():
    model: Any = importlib.import_module("feedback_kills")
    key = ("search", "/user0", "item")
    body = {"search_id": "search", "liked": ["other"], "disliked": ["third"]}
    for kept, outcome in (
        ({key: 1}, "not there"),
        ({key: 1, ("search", "/user0", "other"): 1, ("search", "/user0", "third"): -1}, "there"),
        ({key: 1, ("search", "/user0", "other"): 1}, None),  # half of a request
        ({key: -1}, None),
        ({}, None),
    ):
        voter = model.Voter("user0", random.Random(0), marks={key: 1}, doubtful=body)
        result = voter.settle(kept)
        assert bool(voter.wrong) == (outcome is None)
        assert outcome in (None, result)
