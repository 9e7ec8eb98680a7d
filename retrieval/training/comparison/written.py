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
from retrieval.host.values import toml_value
from retrieval.training.comparison.result import Comparison, Contestant
from retrieval.training.comparison.statistics import Mean, number, probability

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
        ("comparison.html", page(result)),
        ("comparison.tex", latex(result, style)),
    ):
        write_text(folder / name, text, DataError)


def metric_table(result: Comparison) -> Cells:
    """Return the table of metrics."""
    if result.plan.splits > 1:
        blocks = "splits and seeds"
    else:
        blocks = "seeds only"
    rows = [[f"mean ± 95 % over {blocks}, uncorrected", *map(metric_title, result.metrics)]]
    for row in result.contestants:
        rows.append([row.name, *(interval(result.mean(row, metric)) for metric in result.metrics)])
    return rows


def interval(mean: Mean) -> str:
    """Return a mean and its interval as a table's cell; equal values have no interval."""
    return f"{mean.value:.3f}" + (f" ± {number(mean.half)}" if mean.half else "")


def differences(result: Comparison) -> Cells:
    """Return the table of differences; empty if nothing was compared."""
    rows = [["", "minus", "MAP@R ± at Holm's level", "p", "p, corrected"]]
    for difference in result.differences:
        mean = difference.mean
        p_values = (difference.p, difference.corrected)
        apart = f"{'+' if mean.value >= 0 else '−'}{number(abs(mean.value))}"
        apart += f" ± {number(mean.half)}" if mean.half else ""
        p, corrected = ("" if value is None else probability(value) for value in p_values)
        rows.append([difference.contestant, difference.reference, apart, p, corrected])
    if len(rows) > 1:
        return rows
    return []


def settings(result: Comparison) -> list[str]:
    """Return one line per recipe and split with the settings of the best trial."""
    lines = []
    for row in result.contestants:
        for split, search in enumerate(row.searches):
            if len(row.searches) == 1:
                name = row.name
            else:
                name = f"{row.name}, split {split}"
            values = []
            for key, value in search.values.items():
                if isinstance(value, float):
                    rounded = float(f"{value:.4g}")
                else:
                    rounded = value
                values.append(f"{key} = {toml_value(rounded)}")
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
        for place, values in enumerate(row.metrics):
            split, seed = divmod(place, result.plan.seeds)
            rows += [
                (row.name, kind, split, seed, metric, values[metric]) for metric in result.metrics
            ]
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
    best = [max(result.mean(row, metric).value for row in result.contestants) for metric in columns]

    def line(row: Contestant) -> str:
        cells = [row.name.translate(LATEX)]
        for metric, top in zip(columns, best, strict=True):
            mean = result.mean(row, metric)
            text = f"{100 * mean.value:.1f}"
            half = 100 * mean.half
            if mean.value == top:
                text = rf"\textbf{{{text}}}"
            cells.append(text + (rf" $\pm$ {half:.1f}" if half else ""))
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


def page(result: Comparison) -> str:
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
        differences=differences(result),
        settings=settings(result),
    )
