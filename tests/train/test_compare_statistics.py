"""What a comparison says of its figures: intervals, Holm's correction, sentences, and the files
they are written to.
"""

from __future__ import annotations

import csv
import io
import math
from pathlib import Path
from typing import Any

import pytest
from retrieval.training.comparison.result import Comparison, Contestant
from retrieval.training.comparison.statistics import compare, conclusion, holm, mean_of
from retrieval.training.comparison.written import as_csv, latex, markdown
from retrieval.training.comparison.written import page as html_page

A, B, C = (
    [0.90, 0.92, 0.91, 0.93, 0.92],
    [0.80, 0.81, 0.82, 0.84, 0.81],
    [0.90, 0.91, 0.93, 0.92, 0.91],
)


def test_an_interval_is_student_s() -> None:
    found = mean_of([1.0, 2.0, 4.0])
    deviation = math.sqrt(((1 - 7 / 3) ** 2 + (2 - 7 / 3) ** 2 + (4 - 7 / 3) ** 2) / 2)
    assert found.value == pytest.approx(7 / 3)
    assert found.half == pytest.approx(
        4.302653 * deviation / math.sqrt(3), rel=1e-6
    )  # t of 2 degrees of freedom, from a table
    assert mean_of([0.5, 0.5]).half == 0.0


def test_holm_is_as_in_the_paper() -> None:
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.6, 0.7]) == [1.0, 1.0] and holm([]) == []


def test_differences_are_paired_and_corrected_together() -> None:
    found = compare({"raw": [0.5] * 5, "a": A, "b": B, "c": C}, ["a", "b", "c"])
    assert [(d.one, d.other) for d in found] == [
        ("a", "b"),
        ("a", "c"),
        ("a", "raw"),
        ("b", "c"),
        ("b", "raw"),
        ("c", "raw"),
    ]
    apart = [x - y for x, y in zip(A, C, strict=True)]
    t = (
        sum(apart)
        / 5
        / (math.sqrt(sum((x - sum(apart) / 5) ** 2 for x in apart) / 4) / math.sqrt(5))
    )
    assert (
        found[1].mean.value == pytest.approx(sum(apart) / 5)
        and abs(t) < 2.776
        and not found[1].certain
    )
    assert found[0].certain and found[0].mean.value > 0 and found[3].mean.value < 0
    assert all(d.corrected is not None and d.p is not None and d.corrected >= d.p for d in found)


def result(**figures: list[float]) -> Comparison:
    def rows(values: list[float]) -> list[dict[str, float]]:
        return [{"recall_at_1": value / 2, "map_at_r": value} for value in values]

    seeds = len(next(iter(figures.values())))
    recipes = [
        Contestant(name.replace("_", " "), True, rows(values)) for name, values in figures.items()
    ]
    base = Contestant("raw pixels", False, rows([0.5] * seeds))
    return Comparison([base, *recipes], seeds, 0, 4, [], None, "a")


def test_sentences_say_what_is_known_and_what_is_not() -> None:
    clear = result(a=A, b=B)
    assert clear.conclusion == "a has the highest MAP@R of all recipes compared."
    assert clear.sentences[0].startswith("a is better than b by 0.100 ± 0.0")
    assert "after Holm's correction for 3 comparisons" in clear.sentences[0]
    assert clear.sentences[1].endswith(", p < .001 after Holm's correction for 3 comparisons.")
    close = result(a=A[:3], c=C[:3])
    assert close.conclusion == "Nothing can be said of which recipe is the best with 3 seeds."
    assert close.sentences[0].startswith(
        "Nothing can be said of a and c with 3 seeds: they are 0.003 ± "
    )
    three = result(a=A, b=B, c=C)
    assert three.conclusion.startswith(
        "No recipe is shown to be the best with 5 seeds. It is one of a, c; b is worse"
    )
    fitted = result(a=[0.9, 0.9], b=[0.8, 0.8], c=[0.9, 0.9])
    assert (
        fitted.sentences[0]
        == "a is 0.100 above b with every seed: neither depends on the seed, so seeds cannot say"
        " how certain that is."
    )
    assert fitted.sentences[1] == "a and c have the same MAP@R with every seed."
    assert conclusion(fitted.differences, ["a", "b", "c"], 2).startswith("Nothing can be said")


def test_files_say_the_same_and_escape_what_names_hold() -> None:
    found = result(**{"a_|<b>&%$": A, "b": B})
    assert r"| a \|<b>&%$ | 0.916 ± 0.014 | 0.458 ± 0.007 |" in markdown(found)
    assert "| raw pixels | 0.500 | 0.250 |" in markdown(found)
    assert r"a |$<$b$>$\&\%\$ & 0.916 $\pm$ 0.014" in latex(found) and r"\toprule" in latex(found)
    assert (
        "a |&lt;b&gt;&amp;%$" in html_page(found)
        and "<b>&%" not in html_page(found)
        and "http" not in html_page(found)
    )
    rows = list(csv.DictReader(io.StringIO(as_csv(found))))
    assert len(rows) == 3 * 5 * 2
    assert [
        float(r["value"]) for r in rows if r["contestant"] == "b" and r["metric"] == "map_at_r"
    ] == B


def test_the_page_in_a_browser_loads_nothing_fits_a_phone_and_axe_finds_nothing(
    page: Any, tmp_path: Path
) -> None:
    axe = pytest.importorskip(
        "axe_playwright_python.sync_playwright", reason="axe is not installed"
    ).Axe()
    long = "a-name-that-nobody-would-think-of-but-somebody-has-and-that-is-wider-than-a-phone"
    found = result(**{long: A, "<b>b</b>": B, "c": C})
    found.contestants[1].values.update({"loss.margin": 0.1234567, "optimizer.name": "AdamW" * 20})
    file = tmp_path / "comparison.html"
    file.write_text(html_page(found), encoding="utf-8")
    page.set_viewport_size({"width": 390, "height": 800})
    page.goto(file.as_uri())
    assert page.asked == [file.as_uri()] and not page.faults
    fits = "() => document.documentElement.scrollWidth <= window.innerWidth"
    for width in (390, 1200):
        page.set_viewport_size({"width": width, "height": 900})
        assert page.evaluate(fits)
        seen = axe.run(page)
        assert seen.violations_count == 0, seen.generate_report()
    assert page.locator("tbody tr").count() == 4 + 6 and "<b>b</b>" in page.inner_text("main")
    page.set_viewport_size({"width": 390, "height": 800})
    page.evaluate("() => { document.querySelector('.wide').style.overflow = 'visible' }")
    assert not page.evaluate(fits)  # it does look
    page.evaluate("() => document.documentElement.removeAttribute('lang')")
    assert axe.run(page).violations_count > 0
