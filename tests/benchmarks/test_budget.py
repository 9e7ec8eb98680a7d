"""A table's cell for a method that ran out of CPU time, or could not be fitted."""


def test_the_cells_say_so():
    import anml_table2

    def row(split, **found):
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
            line for line in anml_table2.render(rows).splitlines() if line.startswith("| penbased")
        )
        assert line.split(" | ")[5] == cell
