"""A comparison as Markdown, CSV, LaTeX, HTML and JSON."""

from __future__ import annotations

import csv
import html
import io
from pathlib import Path

from retrieval.errors import DataError
from retrieval.host.files import write_json, write_text
from retrieval.host.values import toml_value
from retrieval.training.comparison.result import Comparison
from retrieval.training.comparison.statistics import Mean, number, probability

NAMES = {"map_at_r": "MAP@R", "r_precision": "R-precision", "nmi": "NMI", "f1": "F1"}

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


def title(metric: str) -> str:
    """Return a metric as a table's head has it: `recall_at_1` is Recall@1."""
    if metric.startswith("recall_at_") and metric.rpartition("_")[2].isdigit():
        return f"Recall@{metric.rpartition('_')[2]}"
    return NAMES.get(metric, metric)


def figures(result: Comparison) -> Cells:
    """Return the table of figures, its head first."""
    rows = [["", *map(title, result.metrics)]]
    for each in result.contestants:
        rows.append([each.name, *(interval(result.mean(each, metric)) for metric in result.metrics)])
    return rows


def interval(mean: Mean) -> str:
    """Return a mean as a cell: without an interval where no seed changes it."""
    return f"{mean.value:.3f}" + (f" ± {number(mean.half)}" if mean.half else "")


def differences(result: Comparison) -> Cells:
    """Return the table of differences, its head first."""
    rows = [["", "less", "MAP@R", "p", "p, corrected"]]
    for each in result.differences:
        p, corrected = ("" if value is None else probability(value) for value in (each.p, each.corrected))
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
            rows.writerows([each.name, kind, seed, metric, found[metric]] for metric in result.metrics)
    return text.getvalue()


LATEX = str.maketrans(
    {
        "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_", "{": r"\{", "}": r"\}",
        "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "±": r"$\pm$", "−": "$-$", "<": "$<$", ">": "$>$",
    }
)  # fmt: skip


def latex(result: Comparison) -> str:
    """Return both tables as LaTeX, for `\\usepackage{booktabs}`."""

    def table(rows: Cells) -> list[str]:
        lines = [" & ".join(cell.translate(LATEX) for cell in row) + r" \\" for row in rows]
        columns = "l" + "r" * (len(rows[0]) - 1)
        return [
            rf"\begin{{tabular}}{{{columns}}}", r"\toprule", lines[0], r"\midrule", *lines[1:], r"\bottomrule", r"\end{tabular}", "",
        ]  # fmt: skip

    notes = [f"% {line}" for line in (result.conclusion, *result.sentences, *settings(result), *result.notes)]
    return "\n".join([*notes, *table(figures(result)), *table(differences(result))])


STYLE = """
body { font: 1rem/1.5 system-ui, sans-serif; overflow-wrap: anywhere; max-width: 60rem; margin: 0 auto; padding: 1rem; color: #1b1b1b; background: #fff }
.wide { overflow-x: auto } table { border-collapse: collapse; margin: 1rem 0 } th, td { padding: .3rem .7rem; border-bottom: 1px solid #bbb; text-align: right; white-space: nowrap }
th:first-child, td:first-child { text-align: left } thead th { border-bottom: 2px solid #555 } tbody th { font-weight: normal }
@media print { .wide { overflow: visible } body { padding: 0; max-width: none } }
"""


def page(result: Comparison) -> str:
    """Return the comparison as one HTML page without outside assets."""

    def table(rows: Cells, name: str) -> str:
        head = "".join(f'<th scope="col">{html.escape(cell) or "contestant"}</th>' for cell in rows[0])
        body = "\n".join(
            f'<tr><th scope="row">{html.escape(row[0])}</th>' + "".join(f"<td>{html.escape(c)}</td>" for c in row[1:]) + "</tr>"
            for row in rows[1:]
        )  # fmt: skip
        return (
            f'<div class="wide" tabindex="0" role="region" aria-label="{name}"><table><thead><tr>{head}</tr></thead>\n'
            f"<tbody>{body}</tbody></table></div>"
        )

    def items(lines: list[str]) -> str:
        return "<ul>" + "".join(f"<li>{html.escape(line)}</li>" for line in lines) + "</ul>"

    chosen = settings(result)
    return "\n".join(
        [
            '<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>Comparison of {html.escape(', '.join(result.recipes))}</title><style>{STYLE}</style></head><body><main>",
            f"<h1>Comparison</h1><p><strong>{html.escape(result.conclusion)}</strong></p>",
            table(figures(result), "Figures"),
            "<h2>What can be said</h2>" + items(result.sentences),
            table(differences(result), "Differences"),
            "<h2>Settings that the search chose</h2>" + items(chosen) if chosen else "",
            "<h2>How it was measured</h2>" + items(result.notes),
            "</main></body></html>\n",
        ]
    )
