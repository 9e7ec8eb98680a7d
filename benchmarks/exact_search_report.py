"""The page of benchmarks/exact_search.py, from what it kept."""

from __future__ import annotations

from typing import Any

INDEX = "`IndexFlatL2`, as it comes"
KNN = "`faiss.knn`, as it comes"
KNN_BLAS = "`faiss.knn`, its threshold for matrix products at 1,024"
OURS = "`nearest`"
NORMS = "`nearest`, norms kept"
COMPACT = "`nearest`, compact companion"
DEFAULT = "`nearest`, all items"
POST = "`nearest` of twice as many as needed on average, then dropped"


def render(kept: dict[str, Any]) -> str:
    """Return the page."""
    first = next(iter(kept.values()))
    lines = [
        "# Exact search",
        "",
        "`python benchmarks/exact_search.py --cache FOLDER`. Vectors and queries are of images (`benchmarks/image_vectors.py`): Fashion-MNIST's training images, "
        "shifted, turned and mirrored, and as queries its test images; 64 and 128 numbers by a net trained here, 1,280 the pixels themselves, enlarged. The ten nearest of each "
        "query, one thread, least CPU milliseconds of a call of so many queries; contestants took turns in one process. Recall@10 is against Σ (q − x)² of "
        "every row in double precision, for up to 8 of the queries. The number after a contestant's time is how many times faster than `IndexFlatL2` as it comes it was in that run.",
        "",
        f"Machine: {first['machine']}; {first['versions']}. Other work shared its cores and memory, which disturbs CPU time too: trust ratios of a column, and no absolute time.",
    ]
    lines += ["", *(_summary(shape, told["rows"]) for shape, told in kept.items())]
    for shape, told in kept.items():
        lines += ["", *_shape(shape, told)]
        if "filtered" in told:
            lines += ["", *_filtered(told["filtered"])]
    return "\n".join(lines) + "\n"


def _summary(shape: str, rows: list[dict[str, Any]]) -> str:
    """Return a line: how many times faster than FAISS's index, for one query and for 32."""
    cells = {(row["contestant"], row["batch"]): row["cpu"] for row in rows}
    said = []
    for name in (OURS, NORMS, COMPACT):
        found = [
            f"{cells[INDEX, batch] / cells[name, batch]:.1f} × for {'one query' if batch == 1 else '32 queries'}"
            for batch in (1, 32)
            if (name, batch) in cells
        ]
        said += [f"{name} {' and '.join(found)}"] if found else []
    return f"- {_name(shape)}, speed by that of `IndexFlatL2` as it comes: {'; '.join(said)}."


def _name(shape: str) -> str:
    count, width = map(int, shape.split("x"))
    return f"{count:,} × {width:,}"


def _shape(shape: str, told: dict[str, Any]) -> list[str]:
    batches = sorted({row["batch"] for row in told["rows"]})
    cells = {(row["contestant"], row["batch"]): row for row in told["rows"]}
    names = list(dict.fromkeys(row["contestant"] for row in told["rows"]))
    heads = ["1 query" if batch == 1 else f"{batch} queries" for batch in batches]
    lines = [
        f"## {_name(shape)}",
        "",
        f"{told['date']}, load average {told['load']:.1f}.",
        "",
        f"| | {' | '.join(heads)} | recall@10 |",
        f"| --- | {'--- | ' * (len(batches) + 1)}".rstrip(),
    ]
    for name in [INDEX, *(other for other in names if other != INDEX)]:
        found = [cells.get((name, batch)) for batch in batches]
        shown = [
            "" if row is None else f"{_ms(row['cpu'])} ({cells[INDEX, batch]['cpu'] / row['cpu']:.1f} ×)"
            for row, batch in zip(found, batches, strict=True)
        ]
        lines.append(
            f"| {name} | {' | '.join(shown)} | {min(row['recall'] for row in found if row is not None):.4f} |"
        )
    width = int(shape.split("x")[1])
    if told["width"]:
        lines += [
            "",
            f"The companion has {told['width']} numbers a row, {100 * told['width'] / width:.0f} % of the vectors' size, and is made in {told['build']:.1f} CPU seconds.",
        ]
    else:
        lines += ["", "No companion: it would gain nothing here."]
    two = {(row["threads"], row["batch"]): row for row in told["threads"]}
    said = [
        f"{'one query' if batch == 1 else f'{batch} queries'} {two[1, batch]['wall'] / two[2, batch]['wall']:.2f} × in wall time, {two[2, batch]['cpu'] / two[1, batch]['cpu']:.2f} × the CPU time"
        for batch in (1, 32)
    ]
    return [*lines, f"Two threads against one, on cores that others used too: {'; '.join(said)}."]


def _filtered(rows: list[dict[str, Any]]) -> list[str]:
    lines = [
        "### With a filter",
        "",
        "Milliseconds and, in brackets, the part of the time of a search of all items in the same turns; recall@10 among the items kept, for up to 8 of the queries.",
        "",
        "| kept | queries | "
        + " | ".join((DEFAULT, OURS, COMPACT, POST))
        + " | recall@10, both of ours | recall@10, dropped |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for key in dict.fromkeys((row["kept"], row["batch"]) for row in rows):
        found = {row["contestant"]: row for row in rows if (row["kept"], row["batch"]) == key}
        base = found[DEFAULT]["cpu"]
        shown = [
            f"{_ms(found[name]['cpu'])} ({found[name]['cpu'] / base:.2f})" for name in (OURS, COMPACT, POST)
        ]
        ours = min(found[OURS]["recall"], found[COMPACT]["recall"])
        lines.append(
            f"| {key[0]} | {key[1]} | {_ms(base)} | {' | '.join(shown)} | {ours:.4f} | {found[POST]['recall']:.4f} |"
        )
    return lines


def _ms(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}"
