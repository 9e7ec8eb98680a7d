"""Resuming means the same recipe: what started the run is what goes on."""

from __future__ import annotations

from pathlib import Path

from retrieval.errors import DataError
from retrieval.plugins import Plugins
from retrieval.recipe import Recipe, read_recipe


def same_recipe(folder: Path, given: Recipe) -> tuple[Recipe, Plugins]:
    """Return the recipe that a run was started with.

    Args:
        folder: the run.
        given: the recipe that the user names now.

    Raises:
        DataError: there is no run, or the recipes differ; the sentence says where.
    """
    kept = folder / "recipe.toml"
    if not kept.is_file():
        raise DataError(
            f"{folder} is no run that could be resumed: it holds no recipe.toml. Leave --resume out to start it."
        )
    started, plugins = read_recipe(kept)
    before, now = started.model_dump(exclude={"plugins"}), given.model_dump(exclude={"plugins"})
    differing = [key for key in before if before[key] != now[key]]
    if differing:
        raise DataError(
            f"{folder} was started with another recipe: {', '.join(f'[{key}]' for key in differing)} differ{'s' if len(differing) == 1 else ''}. "
            "Resume with the recipe (and --set) that started it, or train into another folder with --output."
        )
    return started, plugins
