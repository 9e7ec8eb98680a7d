"""A page of benchmarks/results is what its script makes of the figures that were kept."""

from __future__ import annotations

import importlib
import json
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


def kept(name: str) -> Any:
    file = RESULTS / "raw" / name
    text = file.read_text(encoding="utf-8")
    return (
        json.loads(text)
        if file.suffix == ".json"
        else [json.loads(line) for line in text.splitlines()]
    )


PAGES: dict[str, tuple[str, Callable[[Any, Any], str]]] = {
    "photos_without_labels": ("photos_without_labels", lambda script, raw: script.render(raw)),
    "pml_losses": ("pml_losses", lambda script, raw: script.render(raw)),
    "evaluation": ("evaluation", lambda script, raw: script.render(raw)),
    "aml_table1": ("aml_table1", lambda script, raw: script.render(raw)),
    "aml_heldout": ("aml_heldout", lambda script, raw: script.render(raw)),
    "aml_roc": ("aml_roc", lambda script, raw: script.render(raw)),
    "anml_table2": ("anml_table2", lambda script, raw: script.table(raw)),
    "data_check": ("data_check", lambda script, raw: script.render(raw)),
    "daml_real": ("daml_real", lambda script, raw: script.render(raw)),
    "methods": ("methods", lambda script, raw: script.render(raw)),
    "damage": ("damage", lambda script, raw: script.render(raw)),
    "kills": ("kills", lambda script, raw: script.render(raw)),
    "daml_weights": ("daml_weights", lambda script, raw: script.render()),
    "scale": ("scale", lambda script, raw: script.render(raw)),
    "index_search": ("index_search", lambda script, raw: script.render(raw)),
    "histories": ("histories", lambda script, raw: script.render(raw)),
    "fashion": ("fashion", lambda script, raw: script.render(raw)),
    "serve": ("serve", lambda script, raw: script.render(raw)),
    "store": ("store", lambda script, raw: script.render(raw)),
    "power_cuts": ("power_cuts", lambda script, raw: script.render(raw)),
    "oahu_table3": ("oahu_table3", lambda script, raw: script.render(raw)),
    "oahu_warm": ("oahu_warm", lambda script, raw: script.render(raw)),
    "search": ("search", lambda script, raw: script.render(raw)),
    "soak": ("soak", lambda script, raw: script.render(raw)),
    "recipes": ("recipes", lambda script, raw: script.render(raw)),
    "levels": ("levels", lambda script, raw: script.render(raw)),
    "learners": ("learners", lambda script, raw: script.render(raw)),
    "writers": ("writers", lambda script, raw: script.render(raw)),
    "training": ("training", lambda script, raw: script.render(raw)),
}
"""What writes each page, and how."""


def page(name: str, raw: Any) -> str:
    script, write = PAGES[name]
    return write(importlib.import_module(script), raw)


def raw_of(name: str) -> Any:
    return kept(f"{name}.{'json' if (RESULTS / 'raw' / f'{name}.json').exists() else 'jsonl'}")


@pytest.mark.parametrize("name", PAGES)
def test_the_page_is_made_of_what_was_kept(name):
    assert page(name, raw_of(name)) == (RESULTS / f"{name}.md").read_text(encoding="utf-8")


def test_whatever_was_kept_has_its_page_tested():
    kept_too = {
        "cards",
        "anml_table2_earlier",
        "pooling",
        "attack",
        "attack_proxy",
    }  # a card's test is its own
    assert {path.stem for path in (RESULTS / "raw").iterdir()} == set(PAGES) | kept_too


def test_recipes_train_for_as_many_epochs_as_were_chosen():
    script: Any = importlib.import_module("fashion")
    for recipe in script.RECIPES:
        values = script.means([row for row in kept("fashion.jsonl") if row["recipe"] == recipe])
        made = tomllib.loads(
            (RESULTS.parents[1] / "models" / recipe / "recipe.toml").read_text(encoding="utf-8")
        )
        assert made["train"]["epochs"] == values.index(max(values)) + 1
