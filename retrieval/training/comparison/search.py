"""The search for a recipe's settings: Optuna proposes, folds of the training side judge.

Each trial is kept in a file.

One sampler serves all trials of a recipe, and its state goes on from one to the next: with a new
sampler for each trial, every search would draw the same points. A search that was killed asks its
sampler for the known trials again, tells it their scores, and so goes on as if it had not been
killed; any number of workers gets the same trials.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from retrieval.errors import DataError, MissingDependency
from retrieval.host.files import write_json
from retrieval.recipe.read import Recipe
from retrieval.recipe.tables import Range
from retrieval.training.comparison import space
from retrieval.training.comparison.jobs import Figures, Job
from retrieval.training.comparison.plan import PRIMARY, Plan

Do = Callable[[Sequence[Job]], list[Figures]]
"""Does jobs, in this process or in workers, and returns their metrics in order."""


@dataclass(frozen=True)
class Trial:
    """Settings that were tried.

    Attributes:
        values: by key of the recipe.
        score: the mean MAP@R over the folds; None where a training diverged.
        folds: MAP@R on each fold; None where its training diverged.
    """

    values: dict[str, Any]
    score: float | None
    folds: Sequence[float | None] = ()


def require_optuna() -> None:
    """Refuse to search without Optuna.

    Raises:
        MissingDependency: it is not installed.
    """
    try:
        import optuna  # noqa: F401
    except ImportError:
        raise MissingDependency(
            "--search needs optuna, which is not installed. Install it: pip install"
            " 'embedding-retrieval[compare]'."
        ) from None


class Proposals:
    """What to try next, by the tree-structured Parzen estimator (Bergstra et al., NIPS 2011).

    Args:
        name: of the recipe; recipes with the same ranges draw other points.
        ranges: what may be tried.
        own: the recipe's own values, tried first.
    """

    def __init__(self, name: str, ranges: Mapping[str, Range], own: Mapping[str, Any]) -> None:
        import optuna

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._spaces = {key: _distribution(values) for key, values in ranges.items()}
        seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "little")
        sampler = optuna.samplers.TPESampler(seed=seed)
        self._study = optuna.create_study(direction="maximize", sampler=sampler)
        if own:
            self._study.enqueue_trial(dict(own))
        self._trial: Any = None
        self._values: dict[str, Any] = {}

    def next(self, known: dict[str, Any] | None = None) -> dict[str, Any]:
        """Return the values of the next trial: `known`, if it was begun in an earlier run."""
        self._trial = self._study.ask(self._spaces)
        self._values = dict(self._trial.params) if known is None else known
        return self._values

    def tell(self, score: float | None) -> None:
        """Say how the trial ended; None: it diverged."""
        from optuna.trial import TrialState, create_trial

        state = TrialState.FAIL if score is None else TrialState.COMPLETE
        if self._values == self._trial.params:
            self._study.tell(self._trial, score, state)
            return
        # Another version of Optuna proposed what is known: its values count, not what this one
        # would have tried.
        self._study.tell(self._trial, state=TrialState.FAIL)
        self._study.add_trial(
            create_trial(state=state, params=self._values, distributions=self._spaces, value=score)
        )


def _distribution(values: Range) -> Any:
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    if values.choices:
        return CategoricalDistribution(values.choices)
    assert values.low is not None and values.high is not None
    if isinstance(values.low, int) and isinstance(values.high, int):
        return IntDistribution(values.low, values.high, log=values.log)
    return FloatDistribution(values.low, values.high, log=values.log)


def search(recipe: Recipe, own: Mapping[str, Any], plan: Plan, folder: Path, do: Do) -> list[Trial]:
    """Try settings of a recipe, or go on with trying.

    Args:
        recipe: with a `[search]`.
        own: its table, with the split that is measured on.
        plan: how many settings and folds, and what a fold holds out.
        folder: where the trials are kept.
        do: does a trial's trainings.

    Raises:
        DataError: every training diverged, or a file of a trial is damaged.
    """
    done: list[Trial] = []
    proposals = Proposals(recipe.name, recipe.search, space.own_values(recipe))
    for number in range(plan.trials):
        place = folder / f"trial-{number:03}"
        known = _values(place / "values.json")
        values = proposals.next(known)
        if known is None:
            place.mkdir(parents=True, exist_ok=True)
            write_json(place / "values.json", values, DataError)
        table = space.changed(own, values)
        jobs = [
            Job(
                "fold",
                table,
                place / f"fold-{k}",
                place / f"fold-{k}.json",
                (k, plan.folds),
                plan.fold_by,
            )
            for k in range(plan.folds * plan.repeats)
        ]
        scores = [row["trained"][PRIMARY] if row else None for row in do(jobs)]
        finite = [score for score in scores if score is not None]
        mean = float(np.mean(finite)) if len(finite) == len(jobs) else None
        done.append(Trial(values, mean, scores))
        proposals.tell(done[-1].score)
    if all(trial.score is None for trial in done):
        raise DataError(
            f"{recipe.name}: in each of the {plan.trials} trials the loss became NaN or infinite."
            " Narrow [search], above all the learning rate."
        )
    return done


def best(trials: Sequence[Trial]) -> Trial:
    """Return the trial with the highest score; of equal ones the first."""
    return max((t for t in trials if t.score is not None), key=lambda trial: trial.score or 0.0)


def agreement(trials: Sequence[Trial]) -> tuple[float, bool] | None:
    """Return how far folds agree on the order of trials.

    Returns:
        The mean rank correlation of trials' scores between two folds (Spearman's ρ), and whether
            the mean score tells trials apart: its reliability Kρ / (1 + (K − 1) ρ) (Spearman &
            Brown, 1910) is one half at least. None for fewer than three trials, or two folds.
    """
    from scipy import stats

    table = np.array([trial.folds for trial in trials if trial.score is not None], np.float64)
    if len(table) < 3 or table.shape[1] < 2:
        return None
    ranks = stats.rankdata(table, axis=0)
    # a fold that gives all trials one score has no order
    ranks = ranks[:, np.ptp(ranks, axis=0) > 0]
    count = ranks.shape[1]
    if count < 2:
        return 0.0, False
    between = np.corrcoef(ranks.T)[np.triu_indices(count, 1)]
    rho = float(between.mean())
    return rho, rho > 0 and count * rho / (1 + (count - 1) * rho) >= 0.5


def _values(file: Path) -> dict[str, Any] | None:
    try:
        return dict(json.loads(file.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError) as error:
        raise DataError(
            f"{file} is damaged: {error}. Remove its folder, and the same command tries anew."
        ) from None
