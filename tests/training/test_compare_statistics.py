"""Statistics of a comparison: tests, intervals, sentences, and the written files."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Sequence
from html import escape
from itertools import combinations
from typing import Any

import numpy as np
import pytest
from retrieval.errors import DataError
from retrieval.evaluation.intervals import difference_over_classes
from retrieval.training.comparison.plan import ComparisonPlan
from retrieval.training.comparison.result import Comparison, Contestant
from retrieval.training.comparison.statistics import (
    compare_pairs,
    conclusion,
    difference_sentences,
    holm,
    mean_of,
)
from retrieval.training.comparison.tables import (
    Latex,
    as_csv,
    comparison_page as html_page,
    latex,
    markdown,
)
from retrieval.training.comparison.tuning import Trial, Tuning, agreement
from scipy import stats

A = [0.90, 0.92, 0.91, 0.93, 0.92]
B = [0.80, 0.81, 0.82, 0.84, 0.81]
C = [0.90, 0.91, 0.93, 0.92, 0.91]


def result(values: dict[str, list[float]], *, learner: str = "", **options: Any) -> Comparison:
    """Return a comparison of recipes with these values of MAP@R, and raw pixels at .5."""
    seeds, splits = len(next(iter(values.values()))), options.pop("splits", 1)

    def rows(numbers: Sequence[float]) -> list[dict[str, float]]:
        return [{"recall_at_1": value / 2, "map_at_r": value} for value in numbers]

    recipes = [
        Contestant(name, "learner" if name == learner else "net", rows(numbers))
        for name, numbers in values.items()
    ]
    raw = Contestant("raw pixels", "raw", rows([0.5] * seeds))
    plan = ComparisonPlan({}, options.pop("trials", 0), 4, None, seeds // splits, splits)
    return Comparison([raw, *recipes], plan, [], None, "a", **options)


def test_an_interval_is_student_s():
    mean = mean_of([1.0, 2.0, 4.0])
    deviation = math.sqrt(((1 - 7 / 3) ** 2 + (2 - 7 / 3) ** 2 + (4 - 7 / 3) ** 2) / 2)
    assert mean.value == pytest.approx(7 / 3)
    # t with 2 degrees of freedom, from a table
    assert mean.half == pytest.approx(4.302653 * deviation / math.sqrt(3), rel=1e-6)
    assert mean_of([0.5, 0.5]).half == 0.0


def test_holm_is_as_in_the_paper():
    corrected, levels = holm([0.01, 0.04, 0.03, 0.005])
    assert corrected == pytest.approx([0.03, 0.06, 0.06, 0.02])
    # the third step rejects nothing, so the fourth has the same level
    assert levels == pytest.approx([0.05 / 3, 0.05 / 2, 0.05 / 2, 0.05 / 4])
    assert holm([0.6, 0.7])[0] == [1.0, 1.0] and holm([]) == ([], [])


def test_two_recipes_have_a_paired_test_and_three_a_pooled_one():
    (pair,) = compare_pairs({"a": A, "b": B}, ["a", "b"])
    assert pair.test == "paired" and pair.p == pytest.approx(stats.ttest_rel(A, B).pvalue)
    values = {"a": A, "b": B, "c": C}
    differences = compare_pairs(values, list(values))
    assert [(d.contestant, d.reference) for d in differences] == [*combinations("abc", 2)]
    assert {d.test for d in differences} == {"pooled"}
    total = 0.0
    grand = sum(map(sum, values.values())) / 15
    for numbers in values.values():
        for block, value in enumerate(numbers):
            block_mean = sum(other[block] for other in values.values()) / 3
            total += (value - sum(numbers) / 5 - block_mean + grand) ** 2
    error = math.sqrt(total / 8 * 2 / 5)
    assert differences[0].p == pytest.approx(2 * stats.t.sf(0.1 / error, 8))
    noisy = compare_pairs({**values, "d": [0.1, 0.9, 0.2, 0.8, 0.5]}, [*values, "d"])
    assert {d.test for d in noisy} == {"paired"}, "different variances are not pooled"


def tables(reps: int, recipes: int, seeds: int, shift: float = 0.0) -> Any:
    """Yield random tables in which seeds matter and all recipes but the first are equally good."""
    random = np.random.default_rng(0)
    for _ in range(reps):
        table = random.normal(size=(recipes, seeds)) + random.normal(size=seeds)
        table[0] += shift
        yield {f"r{place}": row.tolist() for place, row in enumerate(table)}


def test_false_alarms_stay_below_their_level():
    alarms = pooled = 0
    for values in tables(2000, 4, 3):
        differences = compare_pairs(values, list(values))
        alarms += any(difference.decided for difference in differences)
        pooled += differences[0].test == "pooled"
    assert pooled > 1200, "equal variances are mostly pooled"
    # 5 % of 2,000, and three standard deviations of this count
    assert alarms <= 100 + 3 * math.sqrt(100)


def test_a_pooled_test_decides_more_than_a_paired_one_and_the_number_of_seeds_is_right():
    paired = pooled = 0
    for values in tables(200, 6, 3, shift=4.0):
        pooled += compare_pairs(values, list(values), [("r0", "r1")])[0].decided
        paired += compare_pairs(values, ["r0", "r1"], [("r0", "r1")])[0].decided
    assert pooled > paired + 20
    # an effect of 1 at level .05 takes 10 seeds: G*Power, matched pairs, two-sided, power .8
    differences = np.array([-1.0, 1.0]) * math.sqrt(0.5) + 1.0
    (pair,) = compare_pairs({"a": differences.tolist(), "b": [0.0, 0.0]}, ["a", "b"])
    assert pair.test == "one-sample" and not pair.decided and pair.needed == 10


def test_an_interval_excludes_0_exactly_where_holm_decides():
    for values in tables(100, 5, 4, shift=2.0):
        for difference in compare_pairs(values, list(values)):
            assert difference.decided == (abs(difference.mean.value) > difference.mean.half)


def test_deterministic_recipes_are_compared_too():
    still, warm = [0.69] * 5, [0.69, 0.70, 0.71, 0.69, 0.70]
    values = {"lanml": [0.55] * 5, "gmml": still, "warm": warm, "same": still}
    differences = compare_pairs(values, list(values))
    assert [(d.contestant, d.reference) for d in differences] == [*combinations(values, 2)]
    for d in differences:
        assert d.test == ("one-sample" if "warm" in (d.contestant, d.reference) else "none")
    assert differences[1].p == pytest.approx(stats.ttest_1samp(warm, 0.55).pvalue)
    text = conclusion(differences, list(values), "5 seeds")
    assert "It is one of gmml, warm, same; lanml is worse" in text
    lines = difference_sentences(differences, "5 seeds")
    assert lines[0].startswith("gmml is 0.140 above lanml on this split")
    assert "gmml and same have the same MAP@R in every run." in lines
    assert compare_pairs(values, ["gmml", "lanml"])[0].decided
    two = conclusion(compare_pairs(values, ["gmml", "lanml"]), ["gmml", "lanml"], "5 seeds")
    assert two == "gmml has the highest MAP@R of all recipes compared on this split."


def test_sentences_say_what_is_decided_and_what_is_not():
    clear = result({"a": A, "b": B})
    assert clear.conclusion == "a has the highest MAP@R of all recipes compared."
    assert clear.sentences[0].startswith("a is better than b by 0.100 ± 0.0")
    assert len(clear.sentences) == 1, "baselines are not tested"
    close = result({"a": A[:3], "c": C[:3]})
    assert close.conclusion == "With 3 seeds, it cannot be said which recipe is the best."
    three = result({"a": A, "b": B, "c": C})
    assert "with 5 seeds. It is one of a, c; b is worse" in three.conclusion
    undecided = three.sentences[-1]
    assert "Not decided with 5 seeds: a and c (0.002 ± 0.012)" in undecided
    assert "a and c would take about 257 seeds" in undecided
    assert "residual variance of all recipes" in "\n".join(three.notes)


def test_against_compares_all_with_one_and_baselines_are_tested_only_on_request():
    values = {"a": A, "b": B, "c": C}
    against = result(values, against="a")
    assert [(d.contestant, d.reference) for d in against.differences] == [("b", "a"), ("c", "a")]
    assert against.conclusion == "Compared with a, with 5 seeds: worse: b; not decided: c."
    raw = result(values, against="raw pixels").differences
    assert [d.reference for d in raw] == ["raw pixels"] * 3
    assert len(result(values, test_baselines=True).differences) == 3 + 3
    mixed = result(values, learner="b", against="untrained")
    rows = [{"recall_at_1": 0.1, "map_at_r": 0.2 + 0.01 * seed} for seed in range(5)]
    mixed.contestants.insert(1, Contestant("untrained", "untrained", rows))
    references = [(d.contestant, d.reference) for d in mixed.differences]
    # a learner has no untrained net
    assert references == [("a", "untrained"), ("b", "raw pixels"), ("c", "untrained")]


def test_the_blocks_of_several_splits_are_the_splits():
    # two seeds of each of three splits
    values = {"a": [0.9, 0.7, 0.6, 0.8, 0.5, 0.5], "b": [0.7, 0.7, 0.7, 0.5, 0.4, 0.5]}
    comparison = result(values, splits=3)
    assert comparison.primary["a"] == pytest.approx([0.8, 0.7, 0.5])
    paired = stats.ttest_rel([0.8, 0.7, 0.5], [0.7, 0.6, 0.45])
    assert comparison.differences[0].p == pytest.approx(paired.pvalue)
    assert "map_at_r over 3 splits" in repr(comparison)
    mean = comparison.mean(comparison.contestants[-1], "map_at_r")
    row = f"<tr><td>b</td><td>{mean.value:.4f} ± {mean.half:.4f}</td>"
    html = comparison._repr_html_()
    assert "<tr><th></th><th>map_at_r</th>" in html and row in html
    assert html.endswith(f"<pre>{escape(comparison.conclusion)}</pre>")
    assert "The interval covers splits and seeds" in comparison.notes[0]
    assert "over splits and seeds" in markdown(comparison)
    assert "over seeds only" in markdown(result({"a": A, "b": B}))


def test_a_mean_over_queries_has_its_spread_over_classes():
    random = np.random.default_rng(0)
    sizes = random.integers(2, 30, 12)
    labels = np.repeat(np.arange(12), sizes)
    of_class = random.normal(0, 0.3, 12)[labels]
    first = random.random(len(labels)) + of_class
    second = random.random(len(labels))
    sums, reference = (np.bincount(labels, values).tolist() for values in (first, second))
    found = difference_over_classes(sums, reference, sizes.tolist())
    # the cluster-robust variance of a mean, item by item
    mean = np.mean(first - second)
    squares = 0.0
    for label in range(12):
        squares += sum((first - second - mean)[labels == label]) ** 2
    error = np.sqrt(squares * 12 / 11) / len(labels)
    assert found.value == pytest.approx(mean)
    assert found.half == pytest.approx(stats.t.ppf(0.975, 11) * error)


def test_an_interval_over_classes_is_exceeded_by_chance_in_one_of_twenty():
    random = np.random.default_rng(0)
    beyond = 0
    for _ in range(2000):
        sizes = random.integers(5, 30, 10)
        sums = sizes * random.normal(0, 1, 10)
        found = difference_over_classes(sums.tolist(), [0.0] * 10, sizes.tolist())
        beyond += abs(found.value) > found.half
    assert 0.03 < beyond / 2000 < 0.08


def test_one_recipe_is_a_comparison_too():
    alone = result({"a": A})
    assert alone.conclusion.startswith("a with 5 seeds") and not alone.differences
    assert markdown(alone).count("| a |") == 1 and "p values" not in markdown(alone)
    assert "What can be said" not in html_page(alone)


def searched(scores: Any, repeats: int = 1) -> Tuning:
    """A search with these scores (trials, folds) and the trials' numbers as margins."""
    trials = [
        Trial({"loss.margin": float(number)}, float(np.mean(row)), np.asarray(row).tolist())
        for number, row in enumerate(scores)
    ]
    best = max(trials, key=lambda trial: trial.score or 0)
    return Tuning(best.values, trials, repeats)


def test_a_search_whose_folds_do_not_agree_says_so():
    random = np.random.default_rng(1)
    quality = np.linspace(0.1, 0.9, 20)[:, None]
    noise = searched(random.random((20, 4)))
    signal = searched(quality + 0.05 * random.random((20, 4)))
    ranks = [stats.rankdata([t.folds[k] for t in noise.trials]) for k in range(4)]
    by_pairs = np.mean([stats.pearsonr(a, b)[0] for a, b in combinations(ranks, 2)])
    folds = agreement(noise.trials)
    assert folds.rho == pytest.approx(by_pairs)
    # the mean rank correlation orders as Friedman's statistic does
    friedman = stats.friedmanchisquare(*[trial.folds for trial in noise.trials]).pvalue
    assert folds.p == pytest.approx(friedman, abs=0.03)
    (line,) = noise.notes("a")
    assert "the folds agree no better than chance" in line and "not tell trials apart" in line
    assert signal.notes("a")[0].startswith("a: the folds agree (ρ = ")
    assert "highest loss.margin tried, 19: use more trials" in signal.notes("a")[1]
    assert agreement(signal.trials[:2]) is None
    table = result({"a": A, "b": B}, trials=20)
    table.contestants[1].searches.append(noise)
    assert "the folds agree no better than chance" in markdown(table)
    entry = table.as_dict()["contestants"][1]["searches"][0]["agreement"]
    assert entry == {"rho": pytest.approx(by_pairs), "p": folds.p}


@pytest.mark.parametrize(("order", "p"), [([0, 1, 2, 3], 1 / 24), ([1, 0, 2, 3], 4 / 24)])
def test_the_test_of_agreement_counts_all_orders(order, p):
    # of 24 orders one has a correlation of 1, and three have .8
    folds = agreement(searched(np.transpose([[0.1, 0.2, 0.3, 0.4], order])).trials)
    assert folds.p == pytest.approx(p, abs=0.01)


@pytest.mark.parametrize(
    ("shape", "repeats", "enough"),
    [((3, 2), 1, False), ((4, 2), 1, True), ((3, 3), 1, True), ((4, 4), 2, False)],
)
def test_too_few_trials_to_tell_are_said(shape, repeats, enough):
    tuning = searched(np.linspace(0, 1, shape[0])[:, None] + np.zeros(shape), repeats)
    if enough:
        assert tuning.notes("a")[0].startswith("a: the folds agree (ρ = 1.00, p = .0")
    else:
        (line,) = tuning.notes("a")
        assert "so few trials and folds cannot tell" in line


@pytest.mark.parametrize(("trials", "folds"), [(4, 2), (3, 3), (20, 4)])
def test_the_folds_of_noise_agree_in_at_most_one_of_twenty_searches(trials, folds):
    random = np.random.default_rng(0)
    found = [agreement(searched(random.random((trials, folds))).trials) for _ in range(200)]
    agreed = sum(fold.p <= 0.05 for fold in found)
    # 10 expected at most, with a standard deviation of 3.1
    assert agreed <= 18


def test_repeated_folds_of_noise_do_not_agree_because_they_share_items():
    random = np.random.default_rng(0)
    agreed = 0
    for _ in range(100):
        # each class has its own order of trials, and each repeat divides the same classes anew
        classes = random.random((8, 8))
        halves = []
        for _ in range(3):
            order = random.permutation(8)
            halves += [classes[:, order[:4]].mean(1), classes[:, order[4:]].mean(1)]
        agreed += agreement(searched(np.transpose(halves), 3).trials, 3).p <= 0.05
    assert agreed <= 11


def test_files_have_the_same_values_and_escape_names():
    comparison = result({"a |<b>&%$": A, "b": B})
    assert r"| a \|<b>&%$ | 0.916 ± 0.014 | 0.458 ± 0.007 |" in markdown(comparison)
    assert "| raw pixels | 0.500 | 0.250 |" in markdown(comparison)
    text = html_page(comparison)
    assert "a |&lt;b&gt;&amp;%$" in text and "<b>&%" not in text and "http" not in text
    rows = list(csv.DictReader(io.StringIO(as_csv(comparison))))
    assert len(rows) == 3 * 5 * 2 and {row["split"] for row in rows} == {"0"}
    of_b = [row for row in rows if (row["contestant"], row["metric"]) == ("b", "map_at_r")]
    assert [float(row["value"]) for row in of_b] == B


TABLE = r"""
\begin{table}
\centering
\caption{On \emph{digits}.}
\label{tab:x}
\begin{tabular}{lr}
\toprule
 & MAP@R \\
\midrule
raw pixels & 50.0 \\
\midrule
a |$<$b$>$\&\%\$ & \textbf{91.6} $\pm$ 1.4 \\
b & 81.6 $\pm$ 1.9 \\
\bottomrule
\end{tabular}
\end{table}
"""


def test_latex_is_a_table_for_a_paper():
    comparison = result({"a |<b>&%$": A, "b": B})
    text = latex(comparison, Latex(["map_at_r"], r"On \emph{digits}.", "tab:x"))
    body = [line for line in text.splitlines() if not line.startswith("%")]
    assert body == TABLE.strip().splitlines()
    assert r"interval over 5 seeds, per cent" in latex(comparison, Latex())
    with pytest.raises(DataError, match=r"latex map_at_k: .* Did you mean 'map_at_r'"):
        latex(comparison, Latex(["map_at_k"]))


def test_the_page_in_a_browser_loads_nothing_fits_a_phone_and_axe_finds_nothing(page, tmp_path):
    axe = pytest.importorskip(
        "axe_playwright_python.sync_playwright", reason="axe is not installed"
    ).Axe()
    long = "a-name-that-nobody-would-think-of-but-somebody-has-and-that-is-wider-than-a-phone"
    comparison = result({long: A, "<b>b</b>": B, "c": C})
    values = {"loss.margin": 0.1234567, "optimizer.name": "AdamW" * 20}
    comparison.contestants[1].searches.append(Tuning(values, [Trial(values, 0.5)]))
    file = tmp_path / "comparison.html"
    file.write_text(html_page(comparison), encoding="utf-8")
    page.set_viewport_size({"width": 390, "height": 800})
    page.goto(file.as_uri())
    assert page.asked == [file.as_uri()] and not page.faults
    fits = "() => document.documentElement.scrollWidth <= window.innerWidth"
    for width in (390, 1280):
        page.set_viewport_size({"width": width, "height": 900})
        assert page.evaluate(fits)
        report = axe.run(page)
        assert report.violations_count == 0, report.generate_report()
    assert page.locator("tbody tr").count() == 4 + 3 and "<b>b</b>" in page.inner_text("main")
    page.set_viewport_size({"width": 390, "height": 800})
    page.evaluate("() => { document.querySelector('.wide').style.overflow = 'visible' }")
    assert not page.evaluate(fits), "the check can fail"
    page.evaluate("() => document.documentElement.removeAttribute('lang')")
    assert axe.run(page).violations_count > 0
