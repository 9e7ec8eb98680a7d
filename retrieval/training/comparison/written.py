"""A comparison as Markdown, CSV, LaTeX, HTML and JSON."""

from __future__ import annotations

import csv
import io
from importlib.resources import files
from pathlib import Path

from jinja2 import Environment, StrictUndefined

from retrieval.errors import DataError
from retrieval.evaluation.evaluation import metric_title
from retrieval.host.files import write_json, write_text
from retrieval.host.values import toml_value
from retrieval.training.comparison.result import Comparison
from retrieval.training.comparison.statistics import Mean, number, probability

Cells = list[list[str]]


def write(folder: Path, result: Comparison) -> None:
    """Write the tables into a folder, each file whole or not at all.

    Raises:
        DataError: the folder cannot be written.
    """
    for name, text in (
        ("comparison.md", markdown(result)),
        ("comparison.csv", as_csv(result)),
        ("comparison.tex", latex(result)),
        ("comparison.html", page(result)),
    ):
        write_text(folder / name, text, DataError)
    write_json(folder / "comparison.json", result.as_dict(), DataError)


def figures(result: Comparison) -> Cells:
    """Return the table of figures, its head first."""
    rows = [["", *map(metric_title, result.metrics)]]
    for each in result.contestants:
        rows.append(
            [each.name, *(interval(result.mean(each, metric)) for metric in result.metrics)]
        )
    return rows


def interval(mean: Mean) -> str:
    """Return a mean as a cell: without an interval where no seed changes it."""
    return f"{mean.value:.3f}" + (f" ± {number(mean.half)}" if mean.half else "")


def differences(result: Comparison) -> Cells:
    """Return the table of differences, its head first."""
    rows = [["", "less", "MAP@R", "p", "p, corrected"]]
    for each in result.differences:
        p, corrected = (
            "" if value is None else probability(value) for value in (each.p, each.corrected)
        )
        sign = "+" if each.mean.value >= 0 else "−"
        shown = f"{sign}{number(abs(each.mean.value))}" + (
            f" ± {number(each.mean.half)}" if each.mean.half else ""
        )
        rows.append([each.one, each.other, shown, p, corrected])
    return rows


def settings(result: Comparison) -> list[str]:
    """Return what the search chose for each recipe, a line each."""
    return [
        f"{each.name}: "
        + ", ".join(f"{key} = {toml_value(_short(value))}" for key, value in each.values.items())
        for each in result.contestants
        if each.values
    ]


def _short(value: object) -> object:
    return float(f"{value:.4g}") if isinstance(value, float) else value


def markdown(result: Comparison) -> str:
    """Return the comparison as Markdown."""

    def table(rows: Cells) -> list[str]:
        safe = [[cell.replace("\\", "\\\\").replace("|", "\\|") for cell in row] for row in rows]
        lines = ["| " + " | ".join(row) + " |" for row in safe]
        return [lines[0], "| --- |" + " ---: |" * (len(rows[0]) - 1), *lines[1:], ""]

    chosen = settings(result)
    return "\n".join(
        [
            f"**{result.conclusion}**",
            "",
            *table(figures(result)),
            *(f"- {sentence}" for sentence in result.sentences),
            "",
            *table(differences(result)),
            *(
                ["Settings that the search chose:", "", *(f"- {line}" for line in chosen), ""]
                if chosen
                else []
            ),
            *(f"- {note}" for note in result.notes),
            "",
        ]
    )


def as_csv(result: Comparison) -> str:
    """Return every figure of every seed, a row each."""
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow(["contestant", "kind", "seed", "metric", "value"])
    for each in result.contestants:
        kind = "recipe" if each.recipe else "baseline"
        for seed, found in enumerate(each.figures):
            rows.writerows(
                [each.name, kind, seed, metric, found[metric]] for metric in result.metrics
            )
    return text.getvalue()


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


def latex(result: Comparison) -> str:
    """Return both tables as LaTeX, for `\\usepackage{booktabs}`."""

    def table(rows: Cells) -> list[str]:
        lines = [" & ".join(cell.translate(LATEX) for cell in row) + r" \\" for row in rows]
        columns = "l" + "r" * (len(rows[0]) - 1)
        return [
            rf"\begin{{tabular}}{{{columns}}}",
            r"\toprule",
            lines[0],
            r"\midrule",
            *lines[1:],
            r"\bottomrule",
            r"\end{tabular}",
            "",
        ]

    notes = [
        f"% {line}"
        for line in (result.conclusion, *result.sentences, *settings(result), *result.notes)
    ]
    return "\n".join([*notes, *table(figures(result)), *table(differences(result))])


def page(result: Comparison) -> str:
    """Return the comparison as one HTML page without outside assets."""
    template = files(__package__).joinpath("comparison.html").read_text(encoding="utf-8")
    environment = Environment(autoescape=True, trim_blocks=True, undefined=StrictUndefined)
    return environment.from_string(template).render(
        result=result,
        figures=figures(result),
        differences=differences(result),
        settings=settings(result),
    )
