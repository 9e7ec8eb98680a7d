"""Every recipe in models/ is valid, and its card has results and their command."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from retrieval.recipe.read import read_recipe

ROOT = Path(__file__).parents[1]
FOLDERS = sorted(path for path in (ROOT / "models").iterdir() if path.is_dir())


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_the_recipe_is_valid_and_named_like_its_folder(folder):
    recipe = read_recipe(folder / "recipe.toml")
    assert recipe.name == folder.name


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_the_card_has_results_and_their_command(folder):
    card = (folder / "README.md").read_text(encoding="utf-8")
    assert re.search(r"\| *(recall_at_1|map_at_r|Recall@1)", card), "no table of figures"
    assert re.search(r"(?<![\d.])0?\.\d{2,}", card), "no figure"
    commands = re.findall(r"^(?:    )?((?:retrieval|python) .+)$", card, re.MULTILINE)
    assert any(
        f"models/{folder.name}" in c or "benchmarks/" in c or "retrieval demo" in c
        for c in commands
    ), "no command"


def test_the_demo_trains_the_recipe_of_digits():
    assert (ROOT / "models" / "digits" / "recipe.toml").read_text() == (
        ROOT / "retrieval" / "cli" / "demo.toml"
    ).read_text()
