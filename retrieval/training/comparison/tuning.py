"""Search for a recipe's best settings: Optuna proposes them, cross-validation scores them.

A resumed search gives the finished trials and their scores to a new Optuna sampler with the same
seed. The search therefore continues exactly as if it had not been interrupted, with any number of
workers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

from retrieval.base.files import write_json
from retrieval.errors import DataError
from retrieval.recipe.read import Recipe
from retrieval.recipe.tables import Range
from retrieval.training.comparison.jobs import ComparisonJob, Do, refuse_fold
from retrieval.training.comparison.plan import (
    PRIMARY,
    ComparisonPlan,
    own_values,
    saved,
    with_values,
)


@dataclass(frozen=True)
class Trial:
    """One tried setting.

    Attributes:
        values: values by key of the recipe.
        score: mean MAP@R over the folds; `None` if training diverged on a fold.
        folds: MAP@R on each fold; `None` where training diverged.
    """

    values: dict[str, Any]
    score: float | None
    folds: Sequence[float | None] = ()


@dataclass(frozen=True)
class Tuning:
    """The trials of one recipe on one split, and the settings of the best one."""

    values: dict[str, Any]
    trials: Sequence[Trial]

    def notes(self, name: str) -> list[str]:
        """Return sentences on whether the folds agree, and on best values at the edge of a range.

        Edges are reported only if the folds agree and at least three different values were tried.
        Two values would both be at an edge.
        """
        lines = []
        folds = agreement(self.trials)
        if folds is not None:
            rho, agree = folds
            if not agree:
                # the best trial is then as good as any other, so its edges say nothing
                return [
                    f"{name}: the folds do not agree (ρ = {rho:.2f}), so the search could not tell"
                    " trials apart. Use more repeats or, with few classes, hold out items"
                    " (fold_by=item)."
                ]
            lines.append(f"{name}: the folds agree (ρ = {rho:.2f}).")
        for key, value in self.values.items():
            tried = {trial.values[key] for trial in self.trials if trial.score is not None}
            if isinstance(value, bool | str) or len(tried) < 3:
                continue
            for end, edge in (("lowest", min(tried)), ("highest", max(tried))):
                if value == edge:
                    lines.append(
                        f"{name} was best at the {end} {key} tried, {value:.4g}: widen its range."
                    )
        return lines


class Proposals:
    """Proposes settings with the tree-structured Parzen estimator (Bergstra et al., NIPS 2011).

    The recipe's name seeds the sampler. The recipe's own values are tried first.
    """

    def __init__(self, name: str, ranges: Mapping[str, Range], own: Mapping[str, Any]) -> None:
        import optuna

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._spaces = {key: _distribution(values) for key, values in ranges.items()}
        # Python's own hash of a text differs from process to process
        seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "little")
        sampler = optuna.samplers.TPESampler(seed=seed)
        self._study = optuna.create_study(direction="maximize", sampler=sampler)
        if own:
            self._study.enqueue_trial(dict(own))
        self._trial: Any = None

    def next(self) -> dict[str, Any]:
        """Draw the values of the next trial."""
        self._trial = self._study.ask(self._spaces)
        return dict(self._trial.params)

    def tell(self, values: Mapping[str, Any], score: float | None) -> None:
        """Record the values that were tried and their score; `None` means that training diverged.

        A resumed search tells the values of earlier trials. If another version of Optuna drew them,
        they differ from the values that `next` returned. This method therefore adds a new trial,
        and marks the trial of `next` as failed.
        """
        from optuna.trial import TrialState, create_trial

        self._study.tell(self._trial, state=TrialState.FAIL)
        self._study.add_trial(
            create_trial(
                state=TrialState.FAIL if score is None else TrialState.COMPLETE,
                params=dict(values),
                distributions=self._spaces,
                value=score,
            )
        )


def _distribution(values: Range) -> Any:
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    if values.choices:
        return CategoricalDistribution(values.choices)
    assert values.low is not None and values.high is not None
    if isinstance(values.low, int) and isinstance(values.high, int):
        return IntDistribution(values.low, values.high, log=values.log)
    return FloatDistribution(values.low, values.high, log=values.log)


def tune(
    recipe: Recipe, table: Mapping[str, Any], plan: ComparisonPlan, folder: Path, do: Do
) -> Tuning:
    """Try settings from a recipe's `[search]`, or resume an earlier search in `folder`.

    `table` is the recipe's table, with the split to use; `do` runs the trials' jobs.

    Raises:
        DataError: a fold cannot be measured, training diverged in every trial, or a file of a trial
            is damaged.
    """

    def jobs_of(table: Mapping[str, Any], folder: Path) -> list[ComparisonJob]:
        return [
            ComparisonJob(
                "fold",
                table,
                folder / f"fold-{number}",
                folder / f"fold-{number}.json",
                (number, plan.folds),
                plan.fold_by,
                objects=recipe.objects,
            )
            for number in range(plan.folds * plan.repeats)
        ]

    # The folds depend on the data alone, so the first trial's stand for all.
    for job in jobs_of(table, folder):
        refuse_fold(job)
    trials: list[Trial] = []
    proposals = Proposals(recipe.name, recipe.search, own_values(recipe))
    for number in range(plan.trials):
        trial_folder = folder / f"trial-{number:03}"
        # drawn even if the trial has its values, so that the sampler's generator goes on
        values = proposals.next()
        file = trial_folder / "values.json"
        earlier = saved(file, dict, "Remove its folder; then the same command tries again.")
        if earlier is None:
            trial_folder.mkdir(parents=True, exist_ok=True)
            write_json(file, values, DataError)
        else:
            values = earlier
        metrics = do(jobs_of(with_values(table, values), trial_folder))
        scores = [row["trained"][PRIMARY] if row else None for row in metrics]
        mean = None
        if None not in scores:
            mean = float(np.mean([score for score in scores if score is not None]))
        trials.append(Trial(values, mean, scores))
        proposals.tell(values, mean)
    scored = [trial for trial in trials if trial.score is not None]
    if not scored:
        raise DataError(
            f"{recipe.name}: in each of the {plan.trials} trials, the loss became NaN or infinite."
            " Narrow the ranges of [search], above all the learning rate's."
        )
    # the first of those with equal scores, whichever worker was the first to finish
    best = max(scored, key=lambda trial: trial.score or 0.0)
    return Tuning(best.values, trials)


def agreement(trials: Sequence[Trial]) -> tuple[float, bool] | None:
    """Return how well the folds agree on the order of trials, and whether they agree enough.

    The agreement ρ is Spearman's rank correlation of the trials' scores, averaged over pairs of
    folds. It is enough if the reliability of the mean over K folds, Kρ / (1 + (K − 1) ρ) (Spearman
    & Brown, 1910), is at least one half. The result is `None` for fewer than three trials or two
    folds.
    """
    table = np.array([trial.folds for trial in trials if trial.score is not None], np.float64)
    if len(table) < 3 or table.shape[1] < 2:
        return None
    ranks = stats.rankdata(table, axis=0)
    # a fold with equal scores for all trials has no order
    ranks = ranks[:, np.ptp(ranks, axis=0) > 0]
    count = ranks.shape[1]
    if count < 2:
        return 0.0, False
    between = np.corrcoef(ranks.T)[np.triu_indices(count, 1)]
    rho = float(between.mean())
    return rho, rho > 0 and count * rho / (1 + (count - 1) * rho) >= 0.5
