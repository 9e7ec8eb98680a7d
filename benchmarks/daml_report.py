"""What `daml_baselines.py` writes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from published import published

LOSSES = ("contrastive", "triplet", "lifted", "N-pair")


def papers_gain(loss: str) -> str:
    """Return DAML's gain in Recall@1 on Cars196 in the paper."""
    return f"{published('daml_table_5', loss, 'DAML') - published('daml_table_5', loss, 'alone'):+.1f}"


def gained(runs: list[dict[str, Any]], without: list[dict[str, Any]]) -> str:
    return spread(
        [
            a["figures"]["recall_at_1"] - b["figures"]["recall_at_1"]
            for a, b in zip(runs, without, strict=True)
        ]
    )


def spread(values: Any) -> str:
    values = 100 * np.asarray(values)
    return f"{values.mean():.1f} ± {values.std(ddof=1):.1f}"


HEADINGS = {
    "glyphs": "Glyphs, 600 classes to train, 600 to search",
    "random": "Glyphs, one random negative an anchor, trained four times as long",
    "few": "Glyphs, 60 classes to train, 600 to search",
    "drawn": "Glyphs, a small net from scratch",
    "fashion": "Fashion-MNIST, classes 5–9",
}


def report(table: dict[str, dict[str, dict[str, Any]]], as_they_come: list[dict[str, Any]]) -> Iterator[str]:
    """Yield the lines of the report."""
    yield "# Generated hard negatives against mined ones (DAML)\n"
    yield "Made by `python benchmarks/daml_baselines.py`, which says what is trained and how parameters were chosen. Figures in %, mean ±"
    yield "standard deviation of three seeds; gains are over the loss alone, of the same seed. Test classes were never trained on.\n"
    yield "Choices that were made while looking at validation classes, what is left out, and why, are in the script's first lines. Missing rows were not"
    yield "measured.\n"
    for data, rows in table.items():
        yield f"## {HEADINGS[data]}\n"
        yield "| loss | method | chosen | R@1 | gain | paper's gain | R@2 | R@4 | R@8 | NMI | F1 | training, CPU s |"
        yield "| --- " * 12 + "|"
        for row in sorted(rows.values(), key=lambda row: LOSSES.index(row["loss"])):
            figures = {
                name: [run["figures"][name] for run in row["runs"]] for name in row["runs"][0]["figures"]
            }
            plain = rows.get(f"{row['loss']}: plain")
            gain = ""
            if plain and row["method"] != "plain":
                gain = gained(row["runs"], plain["runs"])
            paper = papers_gain(row["loss"]) if row["method"] == "DAML" else ""
            own = ", ".join(f"{k} {v:g}" for k, v in row["choice"].items() if k != "name")
            cells = [
                spread(figures[name]) for name in ("recall_at_2", "recall_at_4", "recall_at_8", "nmi", "f1")
            ]
            seconds = np.mean([run["seconds"] for run in row["runs"]])
            yield (
                f"| {row['loss']} | {row['method']} | {own} | {spread(figures['recall_at_1'])} | {gain} | "
                f"{paper} | {' | '.join(cells)} | {seconds:.1f} |"
            )
        yield ""
    if as_they_come:
        yield "## Glyphs, parameters as they come\n"
        yield "The paper sets every margin to 1.\n"
        yield "| negatives, batches | loss | parameter | plain R@1 | DAML R@1 | gain | paper's gain |"
        yield "| --- " * 7 + "|"
        for row in as_they_come:
            own = ", ".join(f"{k} {v:g}" for k, v in row["choice"].items() if k != "name")
            without, made = (spread([r["figures"]["recall_at_1"] for r in row[m]]) for m in ("plain", "DAML"))
            given = "one, 1600" if row["data"] == "random" else "three, 400"
            yield (
                f"| {given} | {row['loss']} | {own} | {without} | {made} | {gained(row['DAML'], row['plain'])} | "
                f"{papers_gain(row['loss'])} |"
            )
        yield ""
