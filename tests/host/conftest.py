"""A plugin with a factory of every kind, and a recipe that uses it."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from retrieval.host.plugins import load_plugins

EVERYTHING = Path(__file__).with_name("plugins_for_tests") / "everything.py"
TABLE: dict[str, Any] = {
    "plugins": [str(EVERYTHING)],
    "data": {"name": "everything.items"},
    "backbone": {"name": "everything.same"},
    "loss": {"name": "everything.margin", "scale": 1.0},
}


@pytest.fixture(scope="session")
def everything():
    """All plugins, including `plugins_for_tests/everything.py`."""
    return load_plugins([str(EVERYTHING)])


@pytest.fixture
def table():
    """A valid recipe, which the test may change."""
    return deepcopy(TABLE)


@pytest.fixture
def problems():
    """A function that returns all problems of a recipe."""
    from retrieval.errors import RecipeError
    from retrieval.recipe.read import check_recipe

    def of(table: dict[str, Any]) -> tuple[str, ...]:
        try:
            check_recipe(table)
        except RecipeError as error:
            return error.problems
        return ()

    return of
