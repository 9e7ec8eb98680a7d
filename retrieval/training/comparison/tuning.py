"""Search for a recipe's best settings: Optuna proposes them, cross-validation scores them.

A resumed search gives the finished trials and their scores to a new Optuna sampler with the same
seed. The search therefore continues exactly as if it had not been interrupted, with any number of
workers.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

from retrieval.base.files import write_json
from retrieval.errors import DataError
from retrieval.evaluation.intervals import LEVEL
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
from retrieval.training.comparison.statistics import equation


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
class Agreement:
    """How well the folds agree on the order of trials.

    Attributes:
        rho: Spearman's rank correlation of the trials' scores, averaged over pairs of folds.
        p: probability of so large a `rho` if every fold orders the trials at random; `None` if
            there are too few trials and folds for a p value of at most `LEVEL`.
    """

    rho: float
    p: float | None


@dataclass(frozen=True)
class Tuning:
    """The trials of one recipe on one split, and the settings of the best one.

    Attributes:
        values: the settings of the best trial.
        trials: all trials.
        repeats: how often the training side was divided into folds.
        edges: for each key with a range of numbers, the largest value at its lower edge and the
            smallest at its upper edge (`range_edges`).
    """

    values: dict[str, Any]
    trials: Sequence[Trial]
    repeats: int = 1
    edges: Mapping[str, tuple[float, float]] = field(default_factory=dict)

    def notes(self, name: str) -> list[str]:
        """Return sentences on whether the folds agree, and on best values beyond all others tried.

        The best values are reported only if the folds agree and at least three different values
        were tried. Two values would both be at an end.
        """
        lines = []
        folds = agreement(self.trials, self.repeats)
        if folds is not None:
            # unless the folds agree, the best trial is as good as any other
            if folds.p is None:
                return [
                    f"{name}: so few trials and folds cannot tell whether the folds agree"
                    f" (ρ = {folds.rho:.2f}). Use more trials."
                ]
            correlation = f"(ρ = {folds.rho:.2f}, {equation(folds.p)})"
            if folds.p > LEVEL:
                return [
                    f"{name}: the folds agree no better than chance {correlation}, so the search"
                    " could not tell trials apart. Use more trials, more repeats or, with few"
                    " classes, hold out items (fold_by=item)."
                ]
            lines.append(f"{name}: the folds agree {correlation}.")
        for key, value in self.values.items():
            tried = {trial.values[key] for trial in self.trials if trial.score is not None}
            if isinstance(value, bool | str) or len(tried) < 3:
                continue
            low, high = self.edges.get(key, (-np.inf, np.inf))
            for end, extreme, at_edge in (
                ("lowest", min(tried), value <= low),
                ("highest", max(tried), value >= high),
            ):
                if value != extreme:
                    continue
                advice = "use more trials"
                if at_edge:
                    advice = "widen its range"
                lines.append(f"{name} was best at the {end} {key} tried, {value:.4g}: {advice}.")
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
    return Tuning(best.values, trials, plan.repeats, range_edges(recipe.search))


EDGE = 0.05
"""Share of a range that counts as its edge, because a sampler seldom draws the very end."""


def range_edges(ranges: Mapping[str, Range]) -> dict[str, tuple[float, float]]:
    """Return for each range of numbers where its lower edge ends and its upper edge begins."""
    edges = {}
    for key, values in ranges.items():
        if values.low is None or values.high is None:
            continue
        low = float(values.low)
        high = float(values.high)
        if values.log:
            step = (high / low) ** EDGE
            edges[key] = low * step, high / step
        else:
            margin = EDGE * (high - low)
            edges[key] = low + margin, high - margin
    return edges


DRAWS = 9_999
"""Number of random orders of the trials that are compared with the observed ones."""


def agreement(trials: Sequence[Trial], repeats: int = 1) -> Agreement | None:
    """Return how well the folds agree on the order of trials, by a permutation test.

    The p value is (1 + b) / (1 + m), where b of m random orders of the trials in each fold give at
    least the observed mean rank correlation. Its level is exact for every m (Phipson & Smyth,
    "Permutation p-values should never be zero", 2010). Folds of different repeats share items, so
    only folds of the same repeat are compared, and the p value of several repeats is twice their
    mean, which is valid however they depend on one another (Vovk & Wang, "Combining p-values via
    averaging", Biometrika 107, 2020).

    The result is `None` for fewer than three trials or two folds. Trials that diverged are left
    out.
    """
    table = np.array([trial.folds for trial in trials if trial.score is not None], np.float64)
    if len(table) < 3 or table.shape[1] < 2 * repeats:
        return None
    random = np.random.default_rng(0)
    rhos = []
    p_values = []
    for scores in np.split(table, repeats, axis=1):
        ranks = stats.rankdata(scores, axis=0).T
        ranks -= ranks.mean(1, keepdims=True)
        # a fold with equal scores for all trials has no order, so it agrees with none
        ranks /= np.linalg.norm(ranks, axis=1, keepdims=True) + 1e-12
        drawn = random.permuted(np.tile(ranks, (DRAWS, 1, 1)), axis=2)
        chance = _mean_correlation(drawn)
        rho = _mean_correlation(ranks)
        rhos.append(rho)
        # equal correlations differ by rounding
        p_values.append((1 + np.sum(chance >= rho - 1e-9)) / (1 + DRAWS))
    p = float(np.mean(p_values))
    # the probability that all folds of a repeat have the same order
    least = math.factorial(len(table)) ** (1 - len(ranks))
    if repeats > 1:
        p = min(1.0, 2 * p)
        least *= 2
    rho = float(np.mean(rhos))
    if least > LEVEL:
        return Agreement(rho, None)
    return Agreement(rho, p)


def _mean_correlation(ranks: Any) -> Any:
    """Return the mean correlation over pairs of folds, of unit ranks (…, folds, trials)."""
    folds = ranks.shape[-2]
    # the square of a sum is the sum of squares and twice the products of pairs
    both = np.square(ranks.sum(-2)).sum(-1) - np.square(ranks).sum((-2, -1))
    return both / (folds * (folds - 1))
