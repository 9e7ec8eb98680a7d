"""A short run of `benchmarks/soak.py`, which kills a server, and a check that it detects a loss."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="finds the processes to kill in /proc")
def test_kills_lose_nothing_acknowledged(tmp_path):
    words = ["--seconds", "20", "--pause", "2", "5", "--seed", "4", "--output", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / "soak.py"), *words],
        capture_output=True,
        text=True,
        timeout=110,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((tmp_path / "raw" / "soak.json").read_text(encoding="utf-8"))
    assert result["wrong"] == [] and sum(result["kills"].values()) >= 3
    assert min(result["writes"], result["reads"], result["items"]) > 10
    assert "**Differences: 0.**" in (tmp_path / "soak.md").read_text(encoding="utf-8")


def test_a_loss_is_detected(tmp_path):
    soak: Any = importlib.import_module("soak")
    living: Any = importlib.import_module("retrieval.index.index")
    path = soak.make_bundle(tmp_path / "bundle")
    soak.create_index(tmp_path / "i", path, progress=False)
    bundle, record = soak.Bundle.open(path, threads=1), soak.Record()
    values = {f"c/{number}": soak.Value(number, f"label {number}") for number in range(30)}
    items = importlib.import_module("retrieval.store.contract").Item
    with living.Index.open(tmp_path / "i", threads=1) as index:
        for id, value in values.items():
            vector = bundle.encode(soak.np.float32([value.numbers()])).vector[0]
            item = items(
                id, value.label, {"made": value.features}, keep="nothing", arrays={"vector": vector}
            )
            index.upsert([item])
            record.acknowledge(id, value)
    assert soak.differences(tmp_path / "i", bundle, [record], 0) == (30, [])
    record.begin("c/1", None)  # without an answer, both results are right
    record.begin("c/new", soak.Value(7, "x"))
    assert soak.differences(tmp_path / "i", bundle, [record], 0) == (30, [])
    for id, value in (
        ("c/2", None),
        ("c/3", soak.Value(3, "other")),
        ("c/gone", soak.Value(9, "x")),
    ):
        other = soak.Record(dict(record.known))
        other.acknowledge(id, value)
        count, wrong = soak.differences(tmp_path / "i", bundle, [other], 0)
        assert count == 30 and len(wrong) == 1 and id in wrong[0]
