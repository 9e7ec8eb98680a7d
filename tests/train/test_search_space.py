"""Checking what a search may try: every end and choice, by plugins that were loaded once."""

from __future__ import annotations

from typing import Any

from retrieval.recipe import read
from retrieval.recipe.read import read_recipe
from retrieval.training.comparison import space

RECIPE = """
[data]
name = "core.digits"

[split]
by = "class"
test = 0.5

[backbone]
name = "core.convnet"
size = 8

[loss]
name = "daml.triplet"

[search]
loss.margin = { low = 0.1, high = 0.5 }
optimizer.name = { choices = ["AdamW", "SGD"] }
optimizer.lr = { low = 1e-4, high = 1e-2, log = true }
"""


def test_ends_and_choices_are_checked_without_loading_a_plugin_again(tmp_path, monkeypatch):
    file = tmp_path / "triplet.toml"
    file.write_text(RECIPE, encoding="utf-8")
    loads: list[Any] = []
    load = read.load_plugins
    monkeypatch.setattr(read, "load_plugins", lambda extra: loads.append(extra) or load(extra))
    recipe = read_recipe(file)
    assert len(loads) == 1
    assert space.faults(recipe) == [] and len(loads) == 1
    file.write_text(RECIPE.replace('"SGD"', '"Adm"'), encoding="utf-8")
    (wrong,) = space.faults(read_recipe(file))
    assert wrong.startswith('[search] optimizer.name = "Adm":') and len(loads) == 2
