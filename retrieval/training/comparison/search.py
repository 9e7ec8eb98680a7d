"""The search for a recipe's settings: Optuna proposes, folds over the training classes judge, each trial is kept in a file.

What is proposed follows from the number of the trial and from what is known of those before it, and nothing else: a search that was killed
goes on as if it had not been, and any number of workers finds the same.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from retrieval.errors import DataError, MissingDependency
from retrieval.host.files import write_json
from retrieval.recipe.ranges import Range
from retrieval.recipe.read import Recipe
from retrieval.training.comparison import space
from retrieval.training.comparison.jobs import Figures, Job
from retrieval.training.comparison.plan import PRIMARY

Do = Callable[[Sequence[Job]], list[Figures]]
"""Does jobs, in this process or in workers, and returns their figures in order."""


@dataclass(frozen=True)
class Trial:
    """Settings that were tried.

    Attributes:
        values: by key of the recipe.
        score: the mean MAP@R over the folds; None where a training diverged.
    """

    values: dict[str, Any]
    score: float | None


def require_optuna() -> None:
    """Refuse to search without Optuna.

    Raises:
        MissingDependency: it is not installed.
    """
    try:
        import optuna  # noqa: F401
    except ImportError:
        raise MissingDependency(
            "--search needs optuna, which is not installed. Install it: pip install 'embedding-retrieval[compare]'."
        ) from None


def suggest(done: Sequence[Trial], ranges: Mapping[str, Range], own: Mapping[str, Any]) -> dict[str, Any]:
    """Return what to try after some trials, by the tree-structured Parzen estimator (Bergstra et al., NIPS 2011).

    Args:
        done: the trials so far.
        ranges: what may be tried.
        own: the recipe's own values, tried first.
    """
    import optuna
    from optuna.trial import TrialState, create_trial

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    spaces = {key: _distribution(values) for key, values in ranges.items()}
    study = optuna.create_study(direction="maximize", sampler=optuna.samplers.TPESampler(seed=len(done)))
    for trial in done:
        state = TrialState.FAIL if trial.score is None else TrialState.COMPLETE
        study.add_trial(
            create_trial(state=state, params=trial.values, distributions=spaces, value=trial.score)
        )
    if not done and own:
        study.enqueue_trial(dict(own))
    return dict(study.ask(spaces).params)


def _distribution(values: Range) -> Any:
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    if values.choices:
        return CategoricalDistribution(values.choices)
    assert values.low is not None and values.high is not None
    if isinstance(values.low, int) and isinstance(values.high, int):
        return IntDistribution(values.low, values.high, log=values.log)
    return FloatDistribution(values.low, values.high, log=values.log)


def search(recipe: Recipe, trials: int, folds: int, folder: Path, do: Do) -> list[Trial]:
    """Try settings of a recipe, or go on with trying.

    Args:
        recipe: with a `[search]`.
        trials: how many settings.
        folds: into how many parts the training classes are divided.
        folder: where the trials are kept.
        do: does a trial's trainings.

    Raises:
        DataError: every training diverged, or a file of a trial is damaged.
    """
    done: list[Trial] = []
    for number in range(trials):
        place = folder / f"trial-{number:03}"
        values = _values(place / "values.json")
        if values is None:
            values = suggest(done, recipe.search, space.own_values(recipe))
            place.mkdir(parents=True, exist_ok=True)
            write_json(place / "values.json", values, DataError)
        table = space.changed(space.table_of(recipe), values)
        jobs = [
            Job("fold", table, place / f"fold-{k}", place / f"fold-{k}.json", (k, folds))
            for k in range(folds)
        ]
        scores = [found["trained"][PRIMARY] if found else None for found in do(jobs)]
        whole = [score for score in scores if score is not None]
        done.append(Trial(values, float(np.mean(whole)) if len(whole) == folds else None))
    if all(trial.score is None for trial in done):
        raise DataError(
            f"{recipe.name}: in each of the {trials} trials the loss became NaN or infinite. Narrow [search], above all the learning rate."
        )
    return done


def best(trials: Sequence[Trial]) -> Trial:
    """Return the trial with the highest score; of equal ones the first."""
    return max((t for t in trials if t.score is not None), key=lambda trial: trial.score or 0.0)


def _values(file: Path) -> dict[str, Any] | None:
    try:
        return dict(json.loads(file.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError) as error:
        raise DataError(
            f"{file} is damaged: {error}. Remove its folder, and the same command tries anew."
        ) from None
