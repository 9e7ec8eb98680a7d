"""Writers of a living index that are killed lose nothing that was acknowledged: a few of what `benchmarks/kills.py` does a thousand times."""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import Any

import pytest


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_what_was_acknowledged_is_there_after_a_kill(tmp_path: Path) -> None:
    script: Any = importlib.import_module("kills")
    rows = script.kills(50, 7, tmp_path, lambda number, row: None)
    assert [one for row in rows for one in row["wrong"]] == []
    assert len(rows) == 50 and sum(row["acknowledged"] for row in rows) > 50
    assert {row["outcome"] for row in rows} >= {"not there", "same either way"}


def test_what_is_lost_is_seen(tmp_path: Path) -> None:
    model: Any = importlib.import_module("living_model")
    create: Any = importlib.import_module("retrieval.serving.local.create")
    bundles = model.make_bundles(tmp_path)
    create.create_local(tmp_path / "index", bundles[0], model.widths_of(bundles[0], features=model.WIDTH))
    held = model.State({f"id{n}": 5 for n in range(60)})
    with model.LocalStore(tmp_path / "index", upkeep=False) as store:
        store.upsert([model.item_of(id, one, 0) for id, one in held.items.items()], bundles[0].sha256)
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
def test_a_damaged_file_never_gives_a_wrong_answer_in_silence(tmp_path: Path) -> None:
    script: Any = importlib.import_module("damage")
    rows = script.cases(100, 3, tmp_path, lambda done: None)
    assert [row for row in rows if row["how"] in ("silent", "crash")] == []
    assert len(rows) == 100 and {row["how"] for row in rows} == {"right", "refused"}
