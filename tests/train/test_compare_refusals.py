"""`retrieval compare`: what is refused, in a sentence and before anything runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from comparing import go
from retrieval.errors import DataError, MissingDependency


def test_what_is_wrong_is_told_at_once(write: Callable[..., Path], tmp_path: Path) -> None:
    good, out = write("triplet"), tmp_path / "out"
    with pytest.raises(DataError, match=r"no recipe .*a\.toml(.|\n)*no recipe .*b\.toml"):
        go([tmp_path / "a.toml", good, tmp_path / "b.toml"], out)
    bad = [write("one", loss={"name": "pml.tripled"}), write("two", train={"epoch": 1})]
    with pytest.raises(
        DataError, match=r"one\.toml(.|\n)*pml.tripled(.|\n)*two\.toml(.|\n)*epochs"
    ):
        go(bad, out)
    with pytest.raises(
        DataError,
        match=(
            r"^\S+triplet\.toml and \S+other\.toml are both called 'triplet'\. Change the `name` in"
            r" one of them\.$"
        ),
    ):
        go([good, write("triplet", "other")], out)
    for options, sentence in (
        ({"seeds": 1}, "two seeds or two splits at least"),
        ({"repeats": 0}, "at least 1"),
        ({"against": "tripled"}, r"Did you mean 'triplet'.*raw pixels, untrained"),
        ({"folds": 1}, "folds must be at least 2"),
        ({"workers": 0}, "from 1 to 64"),
        ({"search": -1}, "must be 0 or more"),
    ):
        with pytest.raises(DataError, match=sentence):
            go([good, write("proxy")], out, **options)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").touch()
    with pytest.raises(DataError, match="is not a comparison"):
        go([good, write("proxy")], tmp_path / "full")
    assert not out.exists()


def test_a_search_that_cannot_be_is_refused_before_anything_runs(
    write: Callable[..., Path], tmp_path: Path, cli: Callable[..., Any]
) -> None:
    wrong = {
        "loss.margn": {"low": 0.1, "high": 0.2},
        "sampler.classes": {"low": 2, "high": 4},
        "optimizer.name": {"choices": ["SGD", "Adm"]},
        "optimizer.lr": {"low": 0.0, "high": 0.1},
    }
    with pytest.raises(DataError) as refused:
        go([write("triplet", search=wrong), write("proxy", search=None)], tmp_path / "out")
    said = str(refused.value)
    assert "'margn'. Did you mean 'margin'" in said or "margin" in said
    assert "sampler.classes: data, split, batches, epochs and backbone must stay the same" in said
    assert 'optimizer.name = "Adm"' in said and "optimizer.lr = 0" in said
    assert "proxy.toml" in said and "has no [search]" in said
    checked = cli("check", tmp_path / "triplet.toml")
    assert checked.code == 2 and "triplet.toml has 5 problems:" in checked.err
    assert (
        'optimizer.name = "Adm"' in checked.err
        and "[search] sampler.classes: data, split" in checked.err
    )
    for range_, sentence in (
        ({"low": 2, "high": 1}, "low < high"),
        ({"low": 0, "high": 1, "log": True}, "above 0"),
        ({"choices": [1], "low": 0}, "either choices"),
        ({"lo": 1}, "low"),
    ):
        with pytest.raises(DataError, match=sentence):
            go([write("triplet", search={"loss.margin": range_}), write("proxy")], tmp_path / "out")
    with pytest.raises(DataError, match="6 classes, but each of 4 folds needs two"):
        go([write("triplet"), write("proxy")], tmp_path / "out", folds=4)


def test_different_budgets_are_named_and_allowed_only_when_told(
    write: Callable[..., Path], tmp_path: Path
) -> None:
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
    assert (
        "The recipes differ in the epochs: 1 in triplet, 2 in proxy."
        in (tmp_path / "out" / "comparison.md").read_text()
    )
    assert len(found.different) == 4


def test_without_optuna_a_search_is_refused_in_a_sentence(
    write: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "optuna", None)
    with pytest.raises(MissingDependency, match=r"embedding-retrieval\[compare\]"):
        go([write("triplet"), write("proxy")], tmp_path / "out")
