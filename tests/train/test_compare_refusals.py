"""`retrieval compare`: what is refused, in a sentence and before anything runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from comparing import go
from retrieval.errors import DataError, MissingDependency
from retrieval.recipe import read
from retrieval.recipe.read import read_recipe
from retrieval.training.comparison import space


def refused(*recipes: Path, out: Path, says: str, **options: Any) -> None:
    with pytest.raises(DataError, match=says):
        go(list(recipes), out, **options)


def test_what_is_wrong_is_told_at_once(write, tmp_path):
    good, out = write("triplet"), tmp_path / "out"
    says = r"no recipe .*a\.toml(.|\n)*no recipe .*b\.toml"
    refused(tmp_path / "a.toml", good, tmp_path / "b.toml", out=out, says=says)
    bad = [write("one", loss={"name": "pml.tripled"}), write("two", train={"epoch": 1})]
    refused(*bad, out=out, says=r"one\.toml(.|\n)*pml.tripled(.|\n)*two\.toml(.|\n)*epochs")
    says = r"^\S+triplet\.toml and \S+other\.toml are both called 'triplet'\. "
    says += r"Change the `name` in one of them\.$"
    refused(good, write("triplet", "other"), out=out, says=says)
    for options, says in (
        ({"seeds": 1}, "at least two seeds or two splits"),
        ({"repeats": 0}, "at least 1"),
        ({"against": "tripled"}, r"Did you mean 'triplet'.*raw pixels, untrained"),
        ({"folds": 1}, "folds must be at least 2"),
        ({"workers": 0}, "from 1 to 64"),
        ({"search": -1}, "must be 0 or more"),
    ):
        refused(good, write("proxy"), out=out, says=says, **options)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").touch()
    refused(good, write("proxy"), out=tmp_path / "full", says="is not a comparison")
    assert not out.exists()


def test_a_search_that_cannot_be_is_refused_before_anything_runs(write, tmp_path, cli):
    out = tmp_path / "out"
    wrong = {
        "loss.margn": {"low": 0.1, "high": 0.2},
        "sampler.classes": {"low": 2, "high": 4},
        "optimizer.name": {"choices": ["SGD", "Adm"]},
        "optimizer.lr": {"low": 0.0, "high": 0.1},
    }
    with pytest.raises(DataError) as caught:
        go([write("triplet", search=wrong), write("proxy", search=None)], out)
    same = "sampler.classes: data, split, batches, epochs and backbone must stay the same"
    for said in (
        "margin",
        same,
        'optimizer.name = "Adm"',
        "optimizer.lr = 0",
        "proxy.toml",
        "has no [search]",
    ):
        assert said in str(caught.value)
    checked = cli("check", tmp_path / "triplet.toml")
    assert checked.code == 2 and "triplet.toml has 5 problems:" in checked.err
    assert 'optimizer.name = "Adm"' in checked.err
    assert "[search] sampler.classes: data, split" in checked.err
    for margin, says in (
        ({"low": 2, "high": 1}, "low < high"),
        ({"low": 0, "high": 1, "log": True}, "above 0"),
        ({"choices": [1], "low": 0}, "either choices"),
        ({"lo": 1}, "low"),
    ):
        searched = write("triplet", search={"loss.margin": margin})
        refused(searched, write("proxy"), out=out, says=says)
    says = "6 classes, but each of 4 folds needs two"
    refused(write("triplet"), write("proxy"), out=out, says=says, folds=4)


def test_different_budgets_are_named_and_allowed_only_when_told(write, tmp_path):
    different = write(
        "proxy",
        train={"epochs": 2, "device": "cpu"},
        sampler={"classes": 2, "items": 4, "batches": 4},
        backbone={"name": "core.convnet", "size": 8, "width": 4, "depth": 1},
        data={"name": "mine.digits", "scrambled": True},
    )
    with pytest.raises(DataError) as refused:
        go([write("triplet"), different], tmp_path / "out", search=0)
    said = str(refused.value)
    for each in (
        "the epochs: 1 in triplet, 2 in proxy",
        "[sampler] classes: 3 in triplet, 2 in proxy",
        "[backbone] width: 8 in triplet, 4 in proxy",
        "[data] scrambled: nothing in triplet, true in proxy",
    ):
        assert each in said
    found = go([write("triplet"), different], tmp_path / "out", search=0, allow_different=True)
    written = (tmp_path / "out" / "comparison.md").read_text()
    assert "The recipes differ in the epochs: 1 in triplet, 2 in proxy." in written
    assert len(found.different) == 4


def test_without_optuna_a_search_is_refused_in_a_sentence(write, tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "optuna", None)
    with pytest.raises(MissingDependency, match=r"embedding-retrieval\[compare\]"):
        go([write("triplet"), write("proxy")], tmp_path / "out")


RECIPE = """
data.name = "core.digits"
split = { by = "class", test = 0.5 }
backbone = { name = "core.convnet", size = 8 }
loss.name = "daml.triplet"
[search]
loss.margin = { low = 0.1, high = 0.5 }
optimizer.name = { choices = ["AdamW", "SGD"] }
optimizer.lr = { low = 1e-4, high = 1e-2, log = true }
"""


def test_ends_and_choices_are_checked_without_loading_a_plugin_again(tmp_path, monkeypatch):
    file = tmp_path / "triplet.toml"
    file.write_text(RECIPE, encoding="utf-8")
    loads = []
    load = read.load_plugins
    monkeypatch.setattr(read, "load_plugins", lambda extra: loads.append(extra) or load(extra))
    recipe = read_recipe(file)
    assert len(loads) == 1
    assert space.faults(recipe) == [] and len(loads) == 1
    file.write_text(RECIPE.replace('"SGD"', '"Adm"'), encoding="utf-8")
    (wrong,) = space.faults(read_recipe(file))
    assert wrong.startswith('[search] optimizer.name = "Adm":') and len(loads) == 2
