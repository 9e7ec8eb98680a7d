"""Starting from the weights of another run."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from retrieval.errors import RecipeError
from retrieval.model.model import Model
from retrieval.recipe.read import Recipe
from retrieval.run import checkpoint
from retrieval.run.folder import checkpoint_file

SHOWN = 8


def take_weights(model: Model, recipe: Recipe) -> None:
    """Put the weights of the run that `[train] start_from` names into a model; do nothing where it
    names none.

    With a learner only the backbone's: it makes the other parts itself.

    Raises:
        RecipeError: there is no such run, or its weights have other names or shapes; the sentences
            say which.
        DataError: its checkpoint is damaged.
    """
    if recipe.train.start_from is None:
        return
    source = Path(recipe.train.start_from)
    file = source
    if source.is_dir():
        files = [checkpoint_file(source, name) for name in ("best", "last", "previous")]
        file = next((each for each in files if each.is_file()), files[0])
    if not file.is_file():
        raise RecipeError([f"[train] start_from: {source} is not a run with a checkpoint."])
    theirs: dict[str, Tensor] = checkpoint.load(file)["model"]
    parts = [
        part for part in recipe.train.start_parts if recipe.learner is None or part == "backbone"
    ]
    faults = {part: _misfits(part, model.state_dict(), theirs) for part in parts}
    problems = [problem for found in faults.values() for problem in found]
    if problems:
        fitting = [part for part, found in faults.items() if not found]
        more = f" (and {len(problems) - SHOWN} more)" if len(problems) > SHOWN else ""
        advice = (
            f"Take what fits: [train] start_parts = {fitting}.".replace("'", '"')
            if fitting
            else "No part fits."
        )
        shown = [f"[train] start_from: {problem}" for problem in problems[:SHOWN]]
        raise RecipeError([*shown[:-1], f"{shown[-1].rstrip('.')}{more}. {advice}"])
    model.load_state_dict(
        {name: value for name, value in theirs.items() if name.partition(".")[0] in parts},
        strict=False,
    )


def _misfits(part: str, ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> list[str]:
    """Return what keeps a part's weights from fitting, one sentence each."""
    own = {name: tuple(value.shape) for name, value in ours.items() if name.startswith(f"{part}.")}
    other = {
        name: tuple(value.shape) for name, value in theirs.items() if name.startswith(f"{part}.")
    }
    found = [f"that run has no {name} {shape}." for name, shape in own.items() if name not in other]
    found += [
        f"that run has {name} {shape}, and this model has not."
        for name, shape in other.items()
        if name not in own
    ]
    return found + [
        f"{name} is {other[name]} in that run, and {shape} here."
        for name, shape in own.items()
        if name in other and other[name] != shape
    ]
