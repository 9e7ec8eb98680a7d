"""Benchmarks tell a method that runs out of CPU time from one that fails."""

import signal
from concurrent.futures.process import BrokenProcessPool

import pytest


@pytest.mark.parametrize(
    ("number", "error"), [(signal.SIGXCPU, TimeoutError), (signal.SIGKILL, BrokenProcessPool)]
)
def test_only_the_cpu_limit_counts_as_running_out_of_time(number, error):
    from bench import alone

    with pytest.raises(error):
        alone(signal.raise_signal, number)


def test_a_cell_shows_a_stopped_or_failed_method():
    import anml_table2

    def row(split, **results):
        return {"set": "penbased", "method": "scml", "split": split, **results}

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
