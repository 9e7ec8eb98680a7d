"""What a comparison found."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any

from retrieval.training.comparison.plan import PRIMARY
from retrieval.training.comparison.search import Trial
from retrieval.training.comparison.statistics import (
    Difference,
    Mean,
    compare,
    conclusion,
    mean_of,
    said,
)


@dataclass(frozen=True)
class Contestant:
    """A row of the table.

    Attributes:
        name: the recipe's name, or what the baseline is called.
        recipe: whether it is a recipe.
        figures: by seed, each metric's value on the test side.
        values: the settings that the search chose.
        trials: the settings that were tried.
    """

    name: str
    recipe: bool
    figures: list[dict[str, float]]
    values: dict[str, Any] = field(default_factory=dict)
    trials: Sequence[Trial] = ()

    @property
    def edges(self) -> list[str]:
        """A sentence for each number whose best value is the smallest or the largest that was
        tried.

        Of two trials one is always the smallest: from three on, it says something.
        """
        sentences = []
        for key, value in self.values.items():
            tried = {trial.values[key] for trial in self.trials if trial.score is not None}
            if isinstance(value, bool | str) or len(tried) < 3 or min(tried) < value < max(tried):
                continue
            end = "lowest" if value == min(tried) else "highest"
            sentences.append(
                f"{self.name} was best at the {end} {key} tried, {value:.4g}: widen its range."
            )
        return sentences


@dataclass(frozen=True, repr=False)
class Comparison:
    """What `compare` found.

    Attributes:
        contestants: baselines, then recipes.
        seeds: runs of each.
        trials: settings that were tried for each recipe.
        folds: parts of the training classes that judged them.
        different: what the recipes do not share, and was allowed, a sentence each.
        missing: which baseline there is none of, and why.
        base: the recipe whose data and net the baselines have.
    """

    contestants: list[Contestant]
    seeds: int
    trials: int
    folds: int
    different: list[str]
    missing: str | None
    base: str

    def __repr__(self) -> str:
        wide = max(len(each.name) for each in self.contestants)
        means = ((each.name, self.mean(each, PRIMARY)) for each in self.contestants)
        rows = [f"{name:{wide}}  {mean.value:.4f} ± {mean.half:.4f}" for name, mean in means]
        return "\n".join(
            [f"{'':{wide}}  {PRIMARY} over {self.seeds} seeds", *rows, self.conclusion]
        )

    @property
    def metrics(self) -> list[str]:
        """The metrics that all contestants have, MAP@R first."""
        shared = [
            m
            for m in self.contestants[0].figures[0]
            if all(m in c.figures[0] for c in self.contestants)
        ]
        return [PRIMARY, *(name for name in shared if name != PRIMARY)]

    @property
    def recipes(self) -> list[str]:
        """The recipes' names."""
        return [each.name for each in self.contestants if each.recipe]

    def mean(self, contestant: Contestant, metric: str) -> Mean:
        """Return a metric's mean over seeds and its interval."""
        return mean_of([figures[metric] for figures in contestant.figures])

    @cached_property
    def differences(self) -> list[Difference]:
        """Each recipe less those after it and less each baseline, by MAP@R."""
        figures = {each.name: [f[PRIMARY] for f in each.figures] for each in self.contestants}
        return compare(figures, self.recipes)

    @property
    def conclusion(self) -> str:
        """What can be said of all recipes together."""
        return conclusion(self.differences, self.recipes, self.seeds)

    @property
    def sentences(self) -> list[str]:
        """What can be said of each difference."""
        tests = sum(each.p is not None for each in self.differences)
        return [said(each, self.seeds, tests) for each in self.differences]

    @property
    def notes(self) -> list[str]:
        """How the figures came about, and what they do not say."""
        tuned = (
            f"{self.trials} settings were tried for each recipe (Optuna's TPE), each judged by"
            f" MAP@R on the training side alone, its classes divided into {self.folds} folds; no"
            " item of the test side was within reach."
            if self.trials
            else (
                "Nothing was tuned: each recipe was taken as it is. How much each was tuned before"
                " is not known."
            )
        )
        notes = [
            (
                f"Mean ± 95 % interval (Student's t) over {self.seeds} seeds, which all rows share."
                " A seed decides on weights and batches; the split is the same, so an interval"
                " says nothing of other test items."
            ),
            tuned,
            "p values: paired t test over seeds by MAP@R, corrected together by Holm's method.",
            f"Baselines have the data and the net of {self.base}.",
        ]
        if self.missing:
            notes.append(f"There is no row {self.missing}.")
        notes += [sentence for each in self.contestants for sentence in each.edges]
        return [*notes, *(f"Not the same for all: {each}" for each in self.different)]

    def as_dict(self) -> dict[str, Any]:
        """Return what `comparison.json` holds."""
        return {
            "conclusion": self.conclusion,
            "sentences": self.sentences,
            "notes": self.notes,
            "seeds": self.seeds,
            "contestants": [asdict(each) for each in self.contestants],
            "differences": [asdict(each) for each in self.differences],
        }
