"""Result of a comparison: metrics, tests of their differences, and conclusions in words."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from functools import cached_property
from itertools import combinations, product
from typing import Any

import numpy as np

from retrieval.base.display_tables import html_table
from retrieval.evaluation.intervals import Mean
from retrieval.training.comparison import statistics
from retrieval.training.comparison.plan import PRIMARY, ComparisonPlan
from retrieval.training.comparison.statistics import MeanDifference, mean_of
from retrieval.training.comparison.tuning import Tuning, agreement


@dataclass(frozen=True)
class Contestant:
    """A recipe or baseline, one row of the table.

    Attributes:
        name: the name of the recipe or baseline.
        kind: "net" or "learner" for a recipe; "raw", "untrained" or "frozen" for a baseline;
            "model" for another model.
        metrics: metrics on the test side, one dictionary per run: the seeds on the first split,
            then the seeds on the second split, and so on.
        searches: the search on each split; empty without a search.
    """

    name: str
    kind: str
    metrics: list[dict[str, float]]
    searches: list[Tuning] = field(default_factory=list)

    @property
    def recipe(self) -> bool:
        """Whether the contestant is a recipe, not a baseline."""
        return self.kind in ("net", "learner")


@dataclass(frozen=True, repr=False)
class Comparison:
    """The result of `compare`.

    Attributes:
        contestants: the baselines, then the recipes.
        plan: the comparison's plan.
        different: one sentence for each allowed difference between the recipes.
        missing: the baseline that is missing and why, as the end of a sentence, or `None`.
        base: the name of the recipe whose data and net the baselines use.
        against: the contestant that all recipes are compared with; `None` compares all pairs.
        test_baselines: whether recipes are compared with baselines too.
    """

    contestants: list[Contestant]
    plan: ComparisonPlan
    different: list[str]
    missing: str | None
    base: str
    against: str | None = None
    test_baselines: bool = False

    def __repr__(self) -> str:
        width = max(len(row.name) for row in self.contestants)
        lines = [f"{'':{width}}  {PRIMARY} over {self.plan.blocks}"]
        for row in self.contestants:
            lines.append(f"{row.name:{width}}  {self._interval(row, PRIMARY)}")
        return "\n".join([*lines, self.conclusion])

    def _repr_html_(self) -> str:
        rows = [["", *self.metrics]]
        for row in self.contestants:
            rows.append([row.name, *(self._interval(row, metric) for metric in self.metrics)])
        return html_table(rows, [self.conclusion])

    def _interval(self, contestant: Contestant, metric: str) -> str:
        mean = self.mean(contestant, metric)
        return f"{mean.value:.4f} ± {mean.half:.4f}"

    @property
    def metrics(self) -> list[str]:
        """The metrics that all contestants have, MAP@R first."""
        first, *rest = (row.metrics[0] for row in self.contestants)
        shared = [name for name in first if all(name in metrics for metrics in rest)]
        # a stable sort: the other metrics keep the order of the recipe
        return sorted(shared, key=lambda name: name != PRIMARY)

    @property
    def recipes(self) -> list[str]:
        """The recipes' names."""
        return [row.name for row in self.contestants if row.recipe]

    def values(self, contestant: Contestant, metric: str) -> list[float]:
        """Return a metric's value in each block: of each seed, or the mean of each split."""
        table = np.array([run[metric] for run in contestant.metrics]).reshape(self.plan.splits, -1)
        # the seeds of one split share its items and classes, so only splits are independent
        if self.plan.splits > 1:
            values = table.mean(1)
        else:
            values = table[0]
        return [float(value) for value in values]

    def mean(self, contestant: Contestant, metric: str) -> Mean:
        """Return a metric's mean over the blocks, with its interval."""
        return mean_of(self.values(contestant, metric))

    @cached_property
    def primary(self) -> dict[str, list[float]]:
        """MAP@R of each contestant, one value per block."""
        return {row.name: self.values(row, PRIMARY) for row in self.contestants}

    @cached_property
    def differences(self) -> list[MeanDifference]:
        """The tested differences of MAP@R."""
        return statistics.compare_pairs(self.primary, self.recipes, self._pairs())

    def _pairs(self) -> list[tuple[str, str]]:
        """Return the pairs of contestants to test, by name.

        A learner has no untrained net, so it is compared with the raw items instead.
        """
        names = self.recipes
        baselines = [row.name for row in self.contestants if not row.recipe]
        if self.against is None:
            models = [row.name for row in self.contestants if row.kind == "model"]
            pairs = [*combinations(names, 2), *product(names, models)]
        else:
            pairs = [(name, self.against) for name in names if name != self.against]
            names = [name for name in names if name == self.against]
        if self.test_baselines:
            pairs += product(names, baselines)
        kinds = {row.name: row.kind for row in self.contestants}
        raw = next((name for name in baselines if kinds[name] == "raw"), "")
        fair_pairs: dict[tuple[str, str], None] = {}  # ordered, without duplicates
        for name, other in pairs:
            if kinds[name] == "learner" and kinds[other] == "untrained":
                other = raw
            fair_pairs[name, other] = None
        return list(fair_pairs)

    @property
    def conclusion(self) -> str:
        """The conclusion about all recipes."""
        if self.against is not None:
            return statistics.conclusion_against(self.differences, self.against, self.plan.blocks)
        return statistics.conclusion(self.differences, self.recipes, self.plan.blocks)

    @property
    def sentences(self) -> list[str]:
        """The conclusions about the pairs of contestants."""
        return statistics.difference_sentences(self.differences, self.plan.blocks)

    @property
    def notes(self) -> list[str]:
        """How the metrics were computed, and what they cannot say."""
        plan = self.plan
        if plan.splits > 1:
            interval = (
                f"each the mean over {plan.seeds} seeds. The interval covers splits and seeds."
                " Splits share classes or items, so it is somewhat too narrow."
            )
        else:
            interval = (
                "which all rows share. The seed sets the initial weights and the batches. The split"
                " is fixed, so the interval covers seeds only; for other test items, use several"
                " splits."
            )
        notes = [
            f"Mean ± 95 % interval (Student's t, uncorrected) over {plan.blocks}, {interval}",
            self._tuning(),
        ]
        if any(difference.p is not None for difference in self.differences):
            tests = statistics.method(self.primary, self.recipes, self.differences, plan.blocks)
            notes.append(f"p values: {tests}")
        fixed = [name for name in self.recipes if np.ptp(self.primary[name]) < statistics.SAME]
        if fixed and plan.splits == 1:
            notes.append(
                f"{', '.join(fixed)}: the value is the same with every seed, so there is no"
                " interval."
            )
        notes.append(f"Baselines use the data and the net of {self.base}.")
        if self.missing:
            notes.append(f"There is no row {self.missing}.")
        for row in self.contestants:
            for number, search in enumerate(row.searches):
                name = row.name
                if plan.splits > 1:
                    name += f" on split {number}"
                notes += search.notes(name)
        return [*notes, *(f"The recipes differ in {difference}" for difference in self.different)]

    def _tuning(self) -> str:
        plan = self.plan
        if not plan.trials:
            return (
                "Nothing was tuned: each recipe was used as it is. How much it was tuned before is"
                " unknown."
            )
        if plan.fold_by == "class":
            divided = "its classes"
        else:
            divided = "the items of each class"
        times = ""
        if plan.repeats > 1:
            times = f", {plan.repeats} times"
        return (
            f"{plan.trials} settings were tried for each recipe (Optuna's TPE), each judged by"
            f" MAP@R on the training side alone, with {divided} divided into {plan.folds}"
            f" folds{times}; no item of the test side was used."
        )

    def as_dict(self) -> dict[str, Any]:
        """Return the content of `comparison.json`."""
        rows = []
        for row in self.contestants:
            table = asdict(row) | {"recipe": row.recipe}
            for search, entry in zip(row.searches, table["searches"], strict=True):
                folds = agreement(search.trials, search.repeats)
                entry["agreement"] = folds and asdict(folds)
            rows.append(table)
        return {
            "conclusion": self.conclusion,
            "sentences": self.sentences,
            "notes": self.notes,
            "seeds": self.plan.seeds,
            "splits": self.plan.splits,
            "contestants": rows,
            "differences": [asdict(difference) for difference in self.differences],
        }
