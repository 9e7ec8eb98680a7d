"""Laws of growth against costs that follow them, the plan against arithmetic by hand, and an interrupted run's lines."""

from __future__ import annotations

import importlib
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

SIZES = (1000, 4000, 16_000, 64_000)


@pytest.fixture
def fit() -> Any:
    return importlib.import_module("scale_fit")


@pytest.fixture
def report() -> Any:
    return importlib.import_module("scale_report")


@pytest.fixture
def scale() -> Any:
    return importlib.import_module("scale")


def test_a_power_law_is_found_and_judged_on_the_largest_size(fit: Any) -> None:
    costs = {n: 3e-4 * n**1.37 for n in SIZES}
    found = fit.power(costs)
    assert found.text == "n^1.37" and found.error == pytest.approx(0, abs=1e-9)
    assert found.at(10**7) == pytest.approx(3e-4 * 10 ** (7 * 1.37))
    costs[SIZES[-1]] *= 2  # the law of the smaller sizes says half of what was measured
    assert fit.power(costs).error == pytest.approx(-0.5)


@pytest.mark.parametrize("law", ["n", "√n", "n·√n", "n·log n", "log n"])
def test_theory_is_found_and_judged_on_the_largest_size(fit: Any, law: str) -> None:
    costs = {n: 2.0 + 0.5 * fit.LAWS[law](n) for n in SIZES}
    found = fit.theory(costs, law)
    assert found.error == pytest.approx(0, abs=1e-9)
    assert found.at(10**6) == pytest.approx(2.0 + 0.5 * fit.LAWS[law](10**6))
    costs[SIZES[-1]] *= 0.5
    assert fit.theory(costs, law).error == pytest.approx(1.0)


def test_terms_of_a_law_are_told_apart(fit: Any) -> None:
    """Lists: of 256 vectors each, centres are learned (n), and all vectors sorted into √n lists (n·√n)."""
    costs = {n: 2.0 + 0.5 * n + 0.01 * n**1.5 for n in SIZES}
    found = fit.theory(costs, "n + n·√n")
    assert found.text == "n + n·√n" and found.error == pytest.approx(0, abs=1e-9)
    assert found.at(10**7) == pytest.approx(2.0 + 0.5e7 + 0.01 * 10**10.5)
    assert fit.theory({n: 3.0 + 1e-9 * n for n in SIZES}, "n + n·√n").text == "constant"


def test_two_sizes_say_nothing_of_an_error(fit: Any) -> None:
    costs = {n: float(n) for n in SIZES[:2]}
    assert fit.power(costs).error is None and fit.theory(costs, "n").error is None
    assert fit.theory(costs, "n").at(10**6) == pytest.approx(10**6)


def test_of_few_sizes_the_largest_is_grown_as_a_whole(fit: Any) -> None:
    found = fit.scaled({100: 7.0, 400: 8.0}, "√n")
    assert found.at(40_000) == pytest.approx(80.0) and found.error is None
    assert fit.scaled({400: 8.0}, "n + n·√n").at(40_000) == pytest.approx(8000.0)


def test_costs_that_fall_do_not_make_a_law_negative(fit: Any) -> None:
    falling = fit.theory({1000: 4.0, 2000: 3.0, 4000: 2.0}, "n")
    assert falling.at(10**9) > 0


def test_a_plan_is_arithmetic(report: Any) -> None:
    """Shards of 10 GB with their vectors: ten in four fifths of 128 GB of memory, of which each core has at most one."""
    size, query, build = 10e9 - 512 * 10**7, 0.001, 3600.0
    shards, needed, rate, p99, on_disk, _, _, hours, copied = report.machines(
        10**9, 10**7, build, size, query
    )
    assert (shards, needed, on_disk) == ("100", "10", "5")
    assert rate == report.number(0.5 * 16 / (10 * query))
    assert p99 == report.number(1e3 * query * math.log(100) / 0.5)
    assert hours == report.number(100 / (10 * 16))
    assert copied == report.number(10 * 10e9 / 1.25e9 / 3600)


def test_a_slow_query_gets_fewer_shards_of_a_machine(report: Any) -> None:
    """One whose work takes 5 ms a shard keeps 50 ms at the 99th percentile with one shard a core, not two."""
    assert report.slowest(16, 0.005) <= report.LONGEST < report.slowest(17, 0.005)
    fast, slow = (report.machines(10**9, 10**7, 1.0, 1e8, query)[4] for query in (1e-4, 0.005))
    assert int(slow) == 7 > int(fast)


@pytest.mark.parametrize("query", [0.0001, 0.001, 0.0054, 0.0055, 0.006, 0.01, 0.0108])
def test_no_plan_is_slower_than_its_limit(report: Any, query: float) -> None:
    """Where one shard is too slow for a machine that is half busy, the machine is less busy, and answers fewer."""
    cells = report.machines(10**9, 10**7, 1.0, 1e8, query)
    for rate, p99 in (cells[2:4], cells[5:7]):
        assert float(p99) <= 1e3 * report.LONGEST
        assert 0 < float(rate.replace(",", "")) <= report.BUSY * 16 / query
    assert (report.load_of(1, query) == report.BUSY) == (query < report.LONGEST / 2 / math.log(100))


def test_a_plan_that_cannot_be_kept_is_not_made(report: Any) -> None:
    assert report.machines(10**9, 10**7, 1.0, 1e8, 0.011)[1:] == ["–"] * 8


def test_a_search_is_tuned_on_other_queries_than_it_is_measured_on(
    scale: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A contestant that finds as many of the ten as it is told: the first point that is surely enough is measured, with the first queries."""
    monkeypatch.setattr(scale, "QUERIES", 20)
    rng = np.random.default_rng(0)
    vectors, queries = (rng.normal(size=(n, 8)).astype(np.float32) for n in (500, 60))
    nearest = np.argsort(((vectors - queries[:, None]) ** 2).sum(2), axis=1)
    limits = ((vectors[nearest[:, 9]] - queries) ** 2).sum(1) * (1 + 1e-5)
    asked: dict[int, set[int]] = {}

    class Told(scale.System):  # type: ignore[name-defined,misc]
        points = tuple({"probes": n} for n in (5, 8, 10, 30))

        def load(self, vectors: Any, folder: Path) -> None:
            pass

        def search(self, query: Any, point: dict[str, int]) -> Any:
            at = int(np.flatnonzero((queries == query).all(1))[0])
            asked.setdefault(point["probes"], set()).add(at)
            return nearest[at, : point["probes"]]

    found = scale.search(Told(), vectors, queries, limits, tmp_path)
    assert [one["recall"] for one in found["tried"]] == pytest.approx([0.5, 0.8, 1.0])
    assert found["point"] == {"probes": 10} and found["enough"] and found["recall"] == 1.0
    assert asked == {5: set(range(20, 60)), 8: set(range(20, 60)), 10: set(range(60))}


def test_points_that_do_all_that_was_enough_are_not_tried(scale: Any) -> None:
    enough = [{"point": {"probes": 4, "expand": 8}, "surely": 0.96}]
    assert not scale.past(enough, {"probes": 16, "expand": 2})
    assert scale.past(enough, {"probes": 24, "expand": 2})
    assert scale.past([{"point": {"ef_search": 16}, "surely": 0.96}], {"ef_search": 24})
    assert not scale.past([{"point": {"ef_search": 16}, "surely": 0.94}], {"ef_search": 24})


def test_a_line_that_was_cut_off_is_measured_again(scale: Any, tmp_path: Path) -> None:
    file = tmp_path / "scale.jsonl"
    whole = json.dumps({"system": "ours ivf", "size": 1000})
    file.write_text(f"{whole}\n{whole[:20]}")
    assert scale.lines(file) == [json.loads(whole)]
    assert scale.lines(tmp_path / "none") == []


def test_true_neighbours_are_those_of_each_size(scale: Any, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    vectors, queries = (rng.normal(size=(n, 8)).astype(np.float32) for n in (3000, 5))
    scale.truth(tmp_path, vectors, queries, [1000, 3000])
    for size in (1000, 3000):
        away = ((vectors[:size].astype(np.float64) - queries[:, None].astype(np.float64)) ** 2).sum(2)
        assert (np.load(tmp_path / f"truth-{size}.npy") == np.argsort(away, axis=1)[:, :10]).all()


def test_the_plan_is_made_of_what_was_kept(report: Any, scale: Any) -> None:
    assert report.plan(scale.lines(scale.KEPT)) == scale.PLAN.read_text(encoding="utf-8")
