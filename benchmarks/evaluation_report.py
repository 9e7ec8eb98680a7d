"""The page of `evaluation.py`, from what it kept: every figure and every sentence about one."""

from __future__ import annotations

from typing import Any

OURS = "`retrieval.evaluate`"
BINS = '`AccuracyCalculator, k="max_bin_count"`'
SLICED = f"{BINS}, queries in 4 slices"
DEFAULT = "`AccuracyCalculator, default k`"
HEAD = (
    "| contestant | items | wall s | CPU s | wall ÷ ours | CPU ÷ ours | added MB | whole MB | R@1 / R@8{} |"
)


def line(row: dict[str, Any], ours: dict[str, Any]) -> str:
    """Return a contestant's line."""
    if "failed" in row:
        return f"| {row['contestant']} | {row['items']:,} | {row['failed']} | | | | | | |"
    figures = " / ".join(
        f"{row['values'][name]:.4f}"
        for name in ("recall_at_1", "recall_at_8", "map_at_r")
        if name in row["values"]
    )
    ratios = f"{row['wall'] / ours['wall']:.1f} × | {row['cpu'] / ours['cpu']:.1f} ×"
    return (
        f"| {row['contestant']} | {row['items']:,} | {row['wall']:.1f} | {row['cpu']:.1f} | {ratios} | "
        f"{row['added_mb']:,.0f} | {row['whole_mb']:,.0f} | {figures} |"
    )


def table(rows: list[dict[str, Any]], last: str) -> list[str]:
    """Return a table's lines; ours is the row of the same number of items that comes first."""
    ours: dict[int, dict[str, Any]] = {}
    for row in rows:
        ours.setdefault(row["items"], row)
    return [HEAD.format(last), "|---" * 9 + "|", *(line(row, ours[row["items"]]) for row in rows)]


def compared(rows: list[dict[str, Any]]) -> list[str]:
    """Return what the first table says, as sentences: times and memory of each peer against ours."""
    measured = {(row["contestant"], row["items"]): row for row in rows if "failed" not in row}
    sentences = []
    for (name, items), row in measured.items():
        ours = measured.get((OURS, items))
        if name == OURS or ours is None:
            continue
        sentences.append(
            f"- {name} at {items:,}: {row['cpu'] / ours['cpu']:.1f} × our CPU seconds ({row['wall'] / ours['wall']:.1f} × in wall seconds); "
            f"{row['added_mb'] / ours['added_mb']:.0f} × the memory that we add, {row['whole_mb'] / ours['whole_mb']:.0f} × the whole process."
        )
    whole = max((items for name, items in measured if name == BINS), default=0)
    if whole:
        each = measured[BINS, whole]["added_mb"] * 2**20 / (whole * whole / 10)
        sentences.append(
            f'- `k="max_bin_count"` added {each:.0f} bytes at {whole:,} items for each pair of a query and one of its neighbours, a tenth of the items.'
        )
    for row in rows:
        if "failed" in row:
            sentences.append(f"- {row['contestant']} at {row['items']:,}: {row['failed']}.")
    return sentences


def agreement(rows: list[dict[str, Any]]) -> str:
    """Return how far apart the contestants' figures lie."""
    worst = 0.0
    for items in {row["items"] for row in rows}:
        values = [row["values"] for row in rows if row["items"] == items and "failed" not in row]
        for name in values[0] if values else ():
            found = [v[name] for v in values if name in v]
            worst = max(worst, max(found) - min(found))
    return f"Figures of contestants on the same items differ by {worst:.1e} at most (of those printed)."


def render(kept: dict[str, Any]) -> str:
    """Return the page."""
    lines = [
        "# Evaluation: Recall@1, 2, 4, 8 and MAP@R",
        "",
        "`python benchmarks/evaluation.py`. Fashion-MNIST's training images as 128 principal components of unit length, query = gallery",
        "without itself, 10 classes of about a tenth of the items each, so MAP@R needs the nearest tenth of the gallery for each query.",
        "`retrieval` measures in double precision and orders ties by row. Each contestant runs in a process of its own, one after another.",
        "",
        f"Machine: {kept['machine']}; {kept['threads']} threads a contestant, which sleep when they wait (`OMP_WAIT_POLICY=PASSIVE`); load {kept['load']}:",
        "where others share the cores, compare CPU seconds before wall seconds. Memory is the peak resident size: what the evaluation added, and the",
        f"whole process with its libraries. Versions: {kept['versions']}.",
        "",
        *table(kept["rows"], " / MAP@R"),
        "",
        *compared(kept["rows"]),
        "",
        f"{agreement(kept['rows'])} These are ratios of one machine and ten large classes: with many small classes the calculator needs few neighbours.{kept.get('note', '')}",
    ]
    if "recall" in kept:
        lines += [
            "",
            f"Recall alone (8 neighbours are enough). Load {kept['recall']['load']}.",
            "",
            *table(kept["recall"]["rows"], ""),
        ]
    return "\n".join([*lines, ""])
