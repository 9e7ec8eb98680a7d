"""What a table of benchmarks says of a method that did not end within its CPU time, or could not be
fitted.
"""

from __future__ import annotations

from typing import Any


def test_the_cells_say_so() -> None:
    import anml_table2

    def row(split: int, **found: Any) -> dict[str, Any]:
        return {"set": "penbased", "method": "scml", "split": split, **found}

    fine = {"honest": 99.0, "best": 99.5, "fit_seconds": 2.0}
    for rows, cell in (
        ([row(0, **fine), row(1, over=1200)], "> 20 min"),
        (
            [row(0, **fine), row(1, failed="It cannot be fitted."), row(2, **fine)],
            "fails in 1 of 3",
        ),
        ([row(0, **fine), row(1, **fine)], "99.0 ± 0.0"),
    ):
        (line, *_) = (
            line for line in anml_table2.table(rows).splitlines() if line.startswith("| penbased")
        )
        assert line.split(" | ")[5] == cell
