"""The result of a comparison: tables, tests and conclusions, also as Markdown, CSV, LaTeX, JSON."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

from retrieval.errors import DataError, did_you_mean
from retrieval.evaluation.evaluation import metric_title
from retrieval.host.files import write_json, write_text
from retrieval.host.values import toml_value
from retrieval.training.comparison import statistics
from retrieval.training.comparison.plan import PRIMARY, Plan
from retrieval.training.comparison.search import Trial, agreement
from retrieval.training.comparison.statistics import Difference, Mean, mean_of, number, probability

Cells = list[list[str]]


@dataclass(frozen=True)
class Search:
    """The trials of one recipe on one split, and the settings of the best one."""

    values: dict[str, Any]
    trials: Sequence[Trial]

    def notes(self, name: str) -> list[str]:
        """Return sentences: whether the folds agree and, if so, which best values are at an edge.

        An edge needs three different values, because of two values each is at an edge.
        """
        folds = agreement(self.trials)
        if folds is not None and not folds[1]:
            return [
                f"{name}: the folds do not agree (ρ = {folds[0]:.2f}): the search could not tell"
                " trials apart."
            ]
        lines = []
        if folds is not None:
            lines.append(f"{name}: the folds agree (ρ = {folds[0]:.2f}).")
        for key, value in self.values.items():
            tried = {trial.values[key] for trial in self.trials if trial.score is not None}
            if isinstance(value, bool | str) or len(tried) < 3 or min(tried) < value < max(tried):
                continue
            end = "lowest" if value == min(tried) else "highest"
            lines.append(f"{name} was best at the {end} {key} tried, {value:.4g}: widen its range.")
        return lines


@dataclass(frozen=True)
class Contestant:
    """A row of the table.

    Attributes:
        name: the name of the recipe or baseline.
        kind: "net" or "learner" for a recipe; "raw", "untrained" or "frozen" for a baseline.
        metrics: metrics on the test side, one dictionary per seed of the first split, then of the
            next split.
        searches: the search on each split, if there was one.
    """

    name: str
    kind: str
    metrics: list[dict[str, float]]
    searches: list[Search] = field(default_factory=list)

    @property
    def recipe(self) -> bool:
        """Whether the contestant is a recipe, not a baseline."""
        return self.kind in ("net", "learner")


@dataclass(frozen=True, repr=False)
class Comparison:
    """The result of `compare`.

    Attributes:
        contestants: baselines, then recipes.
        plan: seeds, splits, trials and folds.
        different: one sentence for each allowed difference between the recipes.
        missing: the baseline that is missing, and why; `None` if none is.
        base: the name of the recipe whose data and net the baselines use.
        against: the contestant that all recipes are compared with; `None` compares all pairs.
        test_baselines: whether recipes are also compared with baselines.
    """

    contestants: list[Contestant]
    plan: Plan
    different: list[str]
    missing: str | None
    base: str
    against: str | None = None
    test_baselines: bool = False

    def __repr__(self) -> str:
        wide = max(len(row.name) for row in self.contestants)
        means = ((row.name, self.mean(row, PRIMARY)) for row in self.contestants)
        rows = [f"{name:{wide}}  {mean.value:.4f} ± {mean.half:.4f}" for name, mean in means]
        return "\n".join(
            [f"{'':{wide}}  {PRIMARY} over {self.plan.seeds} seeds", *rows, self.conclusion]
        )

    @property
    def metrics(self) -> list[str]:
        """The metrics that all contestants have, MAP@R first."""
        shared = [
            m
            for m in self.contestants[0].metrics[0]
            if all(m in c.metrics[0] for c in self.contestants)
        ]
        return [PRIMARY, *(name for name in shared if name != PRIMARY)]

    @property
    def recipes(self) -> list[str]:
        """The recipes' names."""
        return [row.name for row in self.contestants if row.recipe]

    def values(self, contestant: Contestant, metric: str) -> list[float]:
        """Return a metric's value for each seed or, with several splits, each split's mean."""
        table = np.array([row[metric] for row in contestant.metrics]).reshape(self.plan.splits, -1)
        return [float(value) for value in (table[0] if len(table) == 1 else table.mean(1))]

    def mean(self, contestant: Contestant, metric: str) -> Mean:
        """Return a metric's mean over blocks and its interval."""
        return mean_of(self.values(contestant, metric))

    @cached_property
    def primary(self) -> dict[str, list[float]]:
        """MAP@R of each contestant, one value per block."""
        return {row.name: self.values(row, PRIMARY) for row in self.contestants}

    @cached_property
    def differences(self) -> list[Difference]:
        """The tested differences of MAP@R."""
        return statistics.compare(self.primary, self.recipes, self._pairs())

    def _pairs(self) -> list[tuple[str, str]]:
        """Return the pairs of names to test."""
        names, baselines = self.recipes, [row for row in self.contestants if not row.recipe]
        pairs = list(combinations(names, 2))
        if self.against is not None:
            pairs = [(name, self.against) for name in names if name != self.against]
            if self.against not in names:
                return list(dict.fromkeys(self._fair(*pair) for pair in pairs))
            names = [self.against]
        if self.test_baselines:
            pairs += [self._fair(name, row.name) for name in names for row in baselines]
        return list(dict.fromkeys(pairs))

    def _fair(self, name: str, baseline: str) -> tuple[str, str]:
        """Return the pair, with raw items as the baseline of a learner, which trains no net."""
        kinds = {row.name: row.kind for row in self.contestants}
        if kinds[name] == "learner" and kinds[baseline] == "untrained":
            baseline = next(row.name for row in self.contestants if row.kind == "raw")
        return name, baseline

    @property
    def conclusion(self) -> str:
        """The conclusion about all recipes."""
        if self.against is not None:
            return statistics.conclusion_against(self.differences, self.against, self.plan.blocks)
        return statistics.conclusion(self.differences, self.recipes, self.plan.blocks)

    @property
    def sentences(self) -> list[str]:
        """The conclusions about pairs."""
        return statistics.sentences(self.differences, self.plan.blocks)

    @property
    def notes(self) -> list[str]:
        """How the metrics were computed, and their limits."""
        plan = self.plan
        interval = (
            f"Mean ± 95 % interval (Student's t, uncorrected) over {plan.splits} splits, each the"
            f" mean over {plan.seeds} seeds: it holds split and seed. Splits share classes or"
            " items, so it is somewhat too narrow."
            if plan.splits > 1
            else f"Mean ± 95 % interval (Student's t, uncorrected) over {plan.seeds} seeds, which"
            " all rows share. The seed sets the initial weights and the batches. The split is"
            " fixed, so the interval covers seeds only. Several splits cover other test items."
        )
        notes = [interval, self._tuning()]
        if any(difference.p is not None for difference in self.differences):
            tests = statistics.method(self.primary, self.differences, plan.blocks)
            notes.append(f"p values: {tests}")
        fixed = [name for name in self.recipes if np.ptp(self.primary[name]) < statistics.SAME]
        if fixed and self.plan.splits == 1:
            notes.append(f"{', '.join(fixed)}: the same with every seed, so there is no interval.")
        notes.append(f"Baselines use the data and the net of {self.base}.")
        if self.missing:
            notes.append(f"There is no row {self.missing}.")
        for row in self.contestants:
            for place, search in enumerate(row.searches):
                split = f" on split {place}" if plan.splits > 1 else ""
                notes += search.notes(row.name + split)
        return [*notes, *(f"The recipes differ in {difference}" for difference in self.different)]

    def _tuning(self) -> str:
        plan = self.plan
        if not plan.trials:
            return (
                "Nothing was tuned: each recipe was taken as it is. How much each was tuned before"
                " is not known."
            )
        return (
            f"{plan.trials} settings were tried for each recipe (Optuna's TPE), each judged by"
            " MAP@R on the training side alone, its classes divided into"
            f" {plan.folds} folds; no item of the test side was within reach."
        )

    def as_dict(self) -> dict[str, Any]:
        """Return the content of `comparison.json`."""
        rows = []
        for row in self.contestants:
            rows.append(asdict(row) | {"recipe": row.recipe})
            for search, table in zip(row.searches, rows[-1]["searches"], strict=True):
                folds = agreement(search.trials)
                table["agreement"] = None if folds is None else folds[0]
        return {
            "conclusion": self.conclusion,
            "sentences": self.sentences,
            "notes": self.notes,
            "seeds": self.plan.seeds,
            "splits": self.plan.splits,
            "contestants": rows,
            "differences": [asdict(difference) for difference in self.differences],
        }


def write(folder: Path, result: Comparison, columns: Sequence[str]) -> None:
    """Write the tables into a folder, each file atomically; LaTeX has these columns.

    Raises:
        DataError: the folder cannot be written, or a column does not exist.
    """
    texts = {"md": markdown(result), "csv": as_csv(result), "tex": latex(result, columns)}
    write_json(folder / "comparison.json", result.as_dict(), DataError)
    for ending, text in texts.items():
        write_text(folder / f"comparison.{ending}", text, DataError)


def metric_table(result: Comparison) -> Cells:
    """Return the table of metrics; the first row is its header."""
    blocks = "splits and seeds" if result.plan.splits > 1 else "seeds only"
    rows = [[f"mean ± 95 %, of {blocks}, uncorrected", *map(metric_title, result.metrics)]]
    for row in result.contestants:
        rows.append([row.name, *(interval(result.mean(row, metric)) for metric in result.metrics)])
    return rows


def interval(mean: Mean) -> str:
    """Return a mean as a cell of a table, without an interval if all values are equal."""
    return f"{mean.value:.3f}" + (f" ± {number(mean.half)}" if mean.half else "")


def differences(result: Comparison) -> Cells:
    """Return the table of differences; the first row is its header."""
    rows = [["", "less", "MAP@R ± at Holm's level", "p", "p, corrected"]]
    for difference in result.differences:
        p, corrected = (
            "" if value is None else probability(value)
            for value in (difference.p, difference.corrected)
        )
        sign = "+" if difference.mean.value >= 0 else "−"
        apart = f"{sign}{number(abs(difference.mean.value))}" + (
            f" ± {number(difference.mean.half)}" if difference.mean.half else ""
        )
        rows.append([difference.contestant, difference.reference, apart, p, corrected])
    return rows if len(rows) > 1 else []


def settings(result: Comparison) -> list[str]:
    """Return one line per recipe and split with the settings of the best trial."""
    lines = []
    for row in result.contestants:
        for split, search in enumerate(row.searches):
            name = row.name if len(row.searches) == 1 else f"{row.name}, split {split}"
            values = {
                k: float(f"{v:.4g}") if isinstance(v, float) else v
                for k, v in search.values.items()
            }
            lines.append(
                f"{name}: {', '.join(f'{k} = {toml_value(v)}' for k, v in values.items())}"
            )
    return lines


def markdown(result: Comparison) -> str:
    """Return the comparison as Markdown."""

    def table(rows: Cells) -> list[str]:
        safe = [[cell.replace("\\", "\\\\").replace("|", "\\|") for cell in row] for row in rows]
        lines = ["| " + " | ".join(row) + " |" for row in safe]
        return [lines[0], "| --- |" + " ---: |" * (len(rows[0]) - 1), *lines[1:], ""]

    lines = [f"**{result.conclusion}**", "", *table(metric_table(result))]
    if result.differences:
        lines += [*(f"- {sentence}" for sentence in result.sentences), ""]
        lines += table(differences(result))
    if best := settings(result):
        lines += ["Settings of the best trials:", "", *(f"- {line}" for line in best), ""]
    return "\n".join([*lines, *(f"- {note}" for note in result.notes), ""])


def as_csv(result: Comparison) -> str:
    """Return the metrics as CSV, one row per contestant, split, seed and metric."""
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow(["contestant", "kind", "split", "seed", "metric", "value"])
    for row in result.contestants:
        kind = "recipe" if row.recipe else "baseline"
        for place, values in enumerate(row.metrics):
            split, seed = divmod(place, result.plan.seeds)
            rows.writerows(
                [row.name, kind, split, seed, metric, values[metric]] for metric in result.metrics
            )
    return text.getvalue()


_ESCAPED = {character: f"\\{character}" for character in "&%$#_{}"} | {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "±": r"$\pm$",
    "−": "$-$",
    "<": "$<$",
    ">": "$>$",
}
LATEX = str.maketrans(_ESCAPED)


def latex(result: Comparison, columns: Sequence[str] = ()) -> str:
    """Return metrics, by default all, in LaTeX (booktabs), in per cent, with the best in bold.

    Raises:
        DataError: a column does not exist.
    """
    columns = columns or result.metrics
    for name in columns:
        if name not in result.metrics:
            raise DataError(
                f"latex {name}: the table has no such metric.{did_you_mean(name, result.metrics)}"
                f" It has: {', '.join(result.metrics)}."
            )
    means = [[result.mean(row, metric) for metric in columns] for row in result.contestants]
    best = [max(cells[place].value for cells in means) for place in range(len(columns))]
    lines: list[str] = []
    before = False
    for row, cells in zip(result.contestants, means, strict=True):
        if row.recipe and not before and lines:
            lines.append(r"\midrule")
        before = row.recipe
        texts = []
        for mean, top in zip(cells, best, strict=True):
            text = f"{100 * mean.value:.1f}"
            text = rf"\textbf{{{text}}}" if mean.value == top else text
            half = 100 * mean.half
            texts.append(text + (rf" $\pm$ {half:.1f}" if half else ""))
        lines.append(" & ".join([row.name.translate(LATEX), *texts]) + r" \\")
    caption = f"Mean ± 95 % interval over {result.plan.blocks}, per cent. {result.conclusion}"
    head = " & ".join(["", *(metric_title(metric).translate(LATEX) for metric in columns)])
    return "\n".join(
        [
            *(f"% {line}" for line in (*result.sentences, *result.notes)),
            r"\begin{table}",
            r"\centering",
            rf"\caption{{{caption.translate(LATEX)}}}",
            r"\label{tab:comparison}",
            rf"\begin{{tabular}}{{l{'r' * len(columns)}}}",
            r"\toprule",
            rf"{head} \\",
            r"\midrule",
            *lines,
            r"\bottomrule",
            r"\end{tabular}",
            r"\end{table}",
            "",
        ]
    )
