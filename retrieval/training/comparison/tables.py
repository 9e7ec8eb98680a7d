"""Write a comparison's tables as Markdown, CSV, LaTeX, HTML and JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined

from retrieval.base.csv_table import csv_text
from retrieval.base.files import write_json, write_text
from retrieval.errors import DataError, did_you_mean
from retrieval.evaluation.evaluation import metric_title
from retrieval.evaluation.intervals import Mean
from retrieval.host.values import toml_value
from retrieval.training.comparison.result import Comparison, Contestant
from retrieval.training.comparison.statistics import number, probability

Cells = list[list[str]]
"""Rows of a table; the first row is its header."""


@dataclass(frozen=True)
class Latex:
    """Options of the LaTeX table.

    Attributes:
        columns: the metrics to show; empty means all.
        caption: the caption in LaTeX; `None` means the number of blocks and the conclusion.
        label: the label.
    """

    columns: Sequence[str] = ()
    caption: str | None = None
    label: str = "tab:comparison"


def write(folder: Path, result: Comparison, style: Latex) -> None:
    """Write the tables into a folder, each file atomically.

    Raises:
        DataError: the folder cannot be written, or a column does not exist.
    """
    write_json(folder / "comparison.json", result.as_dict(), DataError)
    for name, text in (
        ("comparison.md", markdown(result)),
        ("comparison.csv", as_csv(result)),
        ("comparison.html", comparison_page(result)),
        ("comparison.tex", latex(result, style)),
    ):
        write_text(folder / name, text, DataError)


def metric_table(result: Comparison) -> Cells:
    """Return the table of metrics."""
    blocks = "seeds only"
    if result.plan.splits > 1:
        blocks = "splits and seeds"
    rows = [[f"mean ± 95 % over {blocks}, uncorrected", *map(metric_title, result.metrics)]]
    for row in result.contestants:
        rows.append([row.name, *(interval_text(result.mean(row, m)) for m in result.metrics)])
    return rows


def interval_text(mean: Mean) -> str:
    """Return a mean and its interval as a table's cell; equal values have no interval."""
    return f"{mean.value:.3f}{_half_width(mean)}"


def _half_width(mean: Mean) -> str:
    if mean.half:
        return f" ± {number(mean.half)}"
    return ""


def difference_table(result: Comparison) -> Cells:
    """Return the table of differences; empty if nothing was compared."""
    rows = [["", "minus", "MAP@R ± at Holm's level", "p", "p, corrected"]]
    for difference in result.differences:
        mean = difference.mean
        # a true minus sign, as wide as the plus
        if mean.value >= 0:
            sign = "+"
        else:
            sign = "−"
        row = [
            difference.contestant,
            difference.reference,
            f"{sign}{number(abs(mean.value))}{_half_width(mean)}",
        ]
        for p in (difference.p, difference.corrected):
            row.append("" if p is None else probability(p))
        rows.append(row)
    if len(rows) > 1:
        return rows
    return []


def _tuned_settings(result: Comparison) -> list[str]:
    """Return one line per recipe and split with the settings of the best trial."""
    lines = []
    for row in result.contestants:
        for split, search in enumerate(row.searches):
            name = row.name
            if len(row.searches) > 1:
                name += f", split {split}"
            values = []
            for key, value in search.values.items():
                if isinstance(value, float):
                    value = float(f"{value:.4g}")
                values.append(f"{key} = {toml_value(value)}")
            lines.append(f"{name}: {', '.join(values)}")
    return lines


def markdown(result: Comparison) -> str:
    """Return the comparison as Markdown."""
    return _rendered("comparison.md", result)


def as_csv(result: Comparison) -> str:
    """Return the metrics as CSV, one row per contestant, split, seed and metric."""
    rows: list[tuple[Any, ...]] = [("contestant", "kind", "split", "seed", "metric", "value")]
    for row in result.contestants:
        if row.recipe:
            kind = "recipe"
        else:
            kind = "baseline"
        for index, values in enumerate(row.metrics):
            split, seed = divmod(index, result.plan.seeds)
            for metric in result.metrics:
                rows.append((row.name, kind, split, seed, metric, values[metric]))
    return csv_text(rows)


LATEX = str.maketrans(
    {
        "\\": r"\textbackslash{}",
        "&": r"\&",
        "%": r"\%",
        "$": r"\$",
        "#": r"\#",
        "_": r"\_",
        "{": r"\{",
        "}": r"\}",
        "~": r"\textasciitilde{}",
        "^": r"\textasciicircum{}",
        "±": r"$\pm$",
        "−": "$-$",
        "<": "$<$",
        ">": "$>$",
    }
)


def latex(result: Comparison, style: Latex) -> str:
    """Return the table of metrics in LaTeX (booktabs), in per cent, with the best means in bold.

    Raises:
        DataError: a column does not exist.
    """
    columns = list(style.columns) or result.metrics
    for name in columns:
        if name not in result.metrics:
            raise DataError(
                f"latex {name}: the table has no such metric.{did_you_mean(name, result.metrics)}"
                f" It has: {', '.join(result.metrics)}."
            )
    # printed in bold: the highest mean, even if the difference to the next is not decided
    best = [max(result.mean(row, metric).value for row in result.contestants) for metric in columns]

    def line(row: Contestant) -> str:
        cells = [row.name.translate(LATEX)]
        for metric, top in zip(columns, best, strict=True):
            mean = result.mean(row, metric)
            text = f"{100 * mean.value:.1f}"
            half = 100 * mean.half
            if mean.value == top:
                text = rf"\textbf{{{text}}}"
            if half:
                text += rf" $\pm$ {half:.1f}"
            cells.append(text)
        return " & ".join(cells) + r" \\"

    baselines = [line(row) for row in result.contestants if not row.recipe]
    recipes = [line(row) for row in result.contestants if row.recipe]
    rows = "\n\\midrule\n".join("\n".join(group) for group in (baselines, recipes) if group)
    caption = style.caption or (
        f"Mean ± 95 % interval over {result.plan.blocks}, per cent. {result.conclusion}"
    ).translate(LATEX)
    head = " & ".join(["", *(metric_title(metric).translate(LATEX) for metric in columns)])
    comments = "".join(f"% {line}\n" for line in (*result.sentences, *result.notes))
    return (
        comments
        + rf"""\begin{{table}}
\centering
\caption{{{caption}}}
\label{{{style.label}}}
\begin{{tabular}}{{l{"r" * len(columns)}}}
\toprule
{head} \\
\midrule
{rows}
\bottomrule
\end{{tabular}}
\end{{table}}
"""
    )


def comparison_page(result: Comparison) -> str:
    """Return the comparison as one self-contained HTML page."""
    return _rendered("comparison.html", result)


def _rendered(name: str, result: Comparison) -> str:
    """Return a comparison in the form of a template beside this file."""
    template = files(__package__).joinpath(name).read_text(encoding="utf-8")
    environment = Environment(
        autoescape=name.endswith(".html"), trim_blocks=True, undefined=StrictUndefined
    )
    return environment.from_string(template).render(
        result=result,
        metrics=metric_table(result),
        differences=difference_table(result),
        settings=_tuned_settings(result),
    )
