"""A short run of `benchmarks/feedback_kills.py`, and checks that it detects what differs."""

import ast
import importlib
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def test_a_killed_server_and_worker_lose_no_acknowledged_mark():
    line = [sys.executable, BENCHMARKS / "feedback_kills.py", "--quick"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(line, env=environment, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    row = ast.literal_eval(done.stdout)
    assert row["wrong"] == [] and len(row["outcomes"]) == 16 and row["acknowledged"] >= 16


def test_a_loss_is_detected():
    model: Any = importlib.import_module("feedback_kills")
    key = ("search", "/user0", "item")
    body = {"search_id": "search", "liked": ["other"], "disliked": ["third"], "user": "user0"}
    for kept, outcome in (
        ({key: 1}, "not there"),
        ({key: 1, ("search", "/user0", "other"): 1, ("search", "/user0", "third"): -1}, "there"),
        ({key: 1, ("search", "/user0", "other"): 1}, None),  # half of a request
        ({key: -1}, None),
        ({}, None),
    ):
        client = model.Client(random.Random(0), {"search"}, {key: 1}, body)
        result = client.settle(kept)
        assert bool(client.wrong) == (outcome is None)
        assert outcome in (None, result)
