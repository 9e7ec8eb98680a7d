"""Runs and a bundle that an earlier version wrote still work; see `before/README.md`."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

BEFORE = Path(__file__).with_name("before")
EXPECTED = json.loads((BEFORE / "expected.json").read_text(encoding="utf-8"))


@pytest.fixture
def before(tmp_path):
    """A copy of the earlier version's files, which a command may change."""
    return Path(shutil.copytree(BEFORE, tmp_path / "before"))


@pytest.mark.parametrize("name", ["run", "learner_run"])
def test_an_old_run_has_the_same_metrics(cli, before, name):
    done = cli("evaluate", before / name)
    assert done.code == 0, done.err
    result = json.loads((before / name / "evaluation-test.json").read_text(encoding="utf-8"))
    # On another processor, neighbours whose distances differ in the last digit may be swapped.
    figures = EXPECTED["figures"][name]["trained"]
    assert result["metrics"]["trained"] == pytest.approx(figures, abs=0.02)


def test_an_old_run_resumes(cli, before):
    recipe = before / "run" / "recipe.toml"
    done = cli("train", recipe, "--set", "phase.0.epochs=2", "--output", before / "run", "--resume")
    assert done.code == 0, done.err
    lines = (before / "run" / "metrics.jsonl").read_text().splitlines()
    # the earlier version counted epochs from 0
    assert [json.loads(line)["epoch"] for line in lines] == [0, 2]


@pytest.mark.parametrize("name", ["run", "learner_run"])
def test_an_old_run_is_exported(cli, before, name):
    done = cli("export", before / name)
    assert done.code == 0, done.err


def test_an_old_bundle_is_indexed_and_searched(cli, tmp_path):
    (tmp_path / "images" / "3").mkdir(parents=True)
    shutil.copy(BEFORE / "query.png", tmp_path / "images" / "3")
    words = ["index", "create", tmp_path / "index", tmp_path / "images"]
    done = cli(*words, "--bundle", BEFORE / "bundle")
    assert done.code == 0, done.err
    done = cli("search", tmp_path / "index", BEFORE / "query.png", "--json")
    assert done.code == 0, done.err
    [result] = json.loads(done.out)[0]["results"]
    assert (result["id"], result["label"], result["distance"]) == ("3/query.png", "3", 0.0)
