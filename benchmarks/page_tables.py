"""Tables of benchmarks/results, read back, so that a page says what a result says."""

from __future__ import annotations

import functools

from bench import RESULTS, markdown

Table = list[dict[str, str]]


@functools.cache
def tables(result: str) -> dict[str, list[Table]]:
    """Return the tables of results/RESULT.md by heading; rows by column."""
    found: dict[str, list[Table]] = {}
    heading, columns = "", None
    for line in (RESULTS / f"{result}.md").read_text(encoding="utf-8").splitlines():
        if line.startswith("#"):
            heading = line.lstrip("# ")
        if not line.startswith("|"):
            columns = None
            continue
        cells = [
            cell.strip() for cell in line.strip().removeprefix("|").removesuffix("|").split("|")
        ]
        if columns is None:
            columns = cells
            found.setdefault(heading, []).append([])
        elif set("".join(cells)) - set("-: "):
            found[heading][-1].append(dict(zip(columns, cells, strict=True)))
    return found


def rows(result: str, heading: str, number: int = 0) -> Table:
    """Return a table: that under the heading which begins so, counted from 0.

    Raises:
        KeyError: the result has no such table.
    """
    for title, found in tables(result).items():
        if title.startswith(heading) and number < len(found):
            return found[number]
    raise KeyError(f"results/{result}.md has no table {number} under '{heading}'.")


def row(table: Table, **wanted: str) -> dict[str, str]:
    """Return the one row whose columns are as given; `_` is the column without a name.

    Raises:
        KeyError: there is none.
    """
    for entry in table:
        if all(entry["" if column == "_" else column] == value for column, value in wanted.items()):
            return entry
    raise KeyError(f"No row with {wanted}.")


def mean(cell: str) -> float:
    """Return the mean of "mean ± spread"."""
    return float(cell.split("±")[0].replace(",", ""))


def claimed(method: str) -> str:
    """Return what a method gains over the loss that it builds on, one column a set."""
    cells = list(row(rows("methods", "Claimed"), _=method).items())[3:]
    return markdown([name for name, _ in cells], [[value for _, value in cells]])
