"""What the metrics of several seeds allow to be said: intervals, paired tests, sentences.

A *block* is what all contestants share and what a test counts: a seed or, where several splits were
drawn, a split, whose value is the mean over its seeds.

- **Pooled test**: where Bartlett's test finds the recipes' variances comparable, the residual
  variance of the two-way ANOVA (recipe, block) serves all pairs, with (R − 1)(B − 1) degrees of
  freedom (Montgomery, Design and Analysis of Experiments, §4.1). Else each pair has its own paired
  t test.
- **Deterministic recipes** have one value for all blocks. Against another recipe that is a
  one-sample t test; two of them differ or do not, on that split, and there is nothing to test.
- **Correction**: Holm's step-down method. The interval of a difference has the level at which
  Holm's method tests it, so it leaves out 0 exactly where the corrected p value is below .05.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

LEVEL = 0.05
"""A difference is decided when its corrected p value is below."""
COMPARABLE = 0.25
"""Bartlett's p value from which on variances are pooled.

In simulations of 3 to 5 seeds with standard deviations of 1 : 3, false alarms stay within a point
of 5 % (7 % with a level of .05); with one recipe of eight that scatters four times as much, they
are 10 % for 3 seeds and 6 % for 5.
"""
LEAST_POOLED = 3
"""Blocks from which on Bartlett's test can tell variances apart; with fewer none are pooled."""
POWER = 0.8
"""Probability with which the number of seeds that is named would decide a difference."""
MOST_BLOCKS = 1000
"""A larger number of seeds is not named."""
SAME = 1e-12
"""Values that differ by less are the same."""


@dataclass(frozen=True)
class Mean:
    """A mean over blocks.

    Attributes:
        value: the mean.
        half: how far its 95 % interval reaches to either side; 0 where all values are the same.
    """

    value: float
    half: float


@dataclass(frozen=True)
class Difference:
    """One contestant less another, in the same blocks.

    Attributes:
        one: the contestant.
        other: what is subtracted from it.
        mean: the mean difference and its interval, at the level of Holm's step.
        test: "pooled", "paired" or "one-sample"; "none" where every block gives the same
            difference, so that there is no chance to test.
        p: two-sided; None without a test.
        corrected: the same after Holm's correction.
        needed: of the undecided difference with the smallest p, how many blocks would decide it
            with a probability of .8 if its mean and variance are what was observed; one more than
            `MOST_BLOCKS` where it takes more than those.
    """

    one: str
    other: str
    mean: Mean
    test: str
    p: float | None
    corrected: float | None = None
    needed: int | None = None

    @property
    def decided(self) -> bool:
        """Whether the contestants are said to differ."""
        if self.corrected is None:
            return self.mean.value != 0
        return self.corrected < LEVEL


@dataclass(frozen=True)
class _Test:
    """A t test before the correction; `pooled` recipes share a variance, 2 stands for one pair."""

    difference: Difference
    error: float
    pooled: int


def mean_of(values: Sequence[float]) -> Mean:
    """Return a mean with Student's 95 % interval, s·t/√n; of one value, or equal ones, without."""
    from scipy import stats

    if np.ptp(values) < SAME:
        return Mean(float(values[0]), 0.0)
    half = stats.t.ppf(1 - LEVEL / 2, len(values) - 1) * stats.sem(values)
    return Mean(float(np.mean(values)), float(half))


def holm(values: Sequence[float]) -> tuple[list[float], list[float]]:
    """Return p values after Holm's step-down correction, and the level of each one's step.

    Source: Scandinavian Journal of Statistics 6, 1979. The steps after the first one that rejects
    nothing have its level.
    """
    corrected, levels = [0.0] * len(values), [LEVEL] * len(values)
    highest, level = 0.0, LEVEL
    for step, place in enumerate(np.argsort(values, kind="stable")):
        if highest < LEVEL:
            level = LEVEL / (len(values) - step)
        highest = max(highest, min(1.0, (len(values) - step) * values[place]))
        corrected[int(place)], levels[int(place)] = highest, level
    return corrected, levels


def method(
    values: Mapping[str, Sequence[float]],
    recipes: Sequence[str],
    differences: Sequence[Difference],
) -> str:
    """Return which tests the p values are of, and why, as the end of a sentence."""
    from scipy import stats

    unit = f"{len(next(iter(values.values())))} blocks"
    tests = {each.test for each in differences}
    seeded = [values[name] for name in recipes if np.ptp(values[name]) >= SAME]
    reason = "fewer than three recipes depend on the seed, or there are fewer than three blocks"
    if len(seeded) > 2 and len(seeded[0]) >= LEAST_POOLED:
        bartlett = probability(float(stats.bartlett(*seeded).pvalue))
        comparable = "comparable" if "pooled" in tests else "not comparable"
        reason = f"Bartlett's test finds the recipes' variances {comparable} (p = {bartlett})"
    if "pooled" in tests:
        freedom = (len(seeded) - 1) * (len(seeded[0]) - 1)
        lines = [
            "t tests by MAP@R with the residual variance of all recipes (ANOVA of recipe and block,"
            f" {freedom} degrees of freedom), since {reason}"
        ]
    else:
        lines = [f"paired t tests by MAP@R over {unit}, since {reason}"]
    if "one-sample" in tests:
        lines.append("a one-sample t test where one of the two does not depend on the seed")
    return (
        f"{'; '.join(lines)}. Corrected together by Holm's method; a difference's interval has the"
        " level at which Holm's method tests it."
    )


def pooled_error(values: Mapping[str, Sequence[float]]) -> float | None:
    """Return the standard error of a difference by the blocked ANOVA's residual variance.

    Args:
        values: by recipe, one of each block; none is constant.

    Returns:
        None for fewer than three recipes, or variances that are not comparable.
    """
    from scipy import stats

    table = np.array(list(values.values()))
    if len(table) < 3 or table.shape[1] < LEAST_POOLED:
        return None
    if stats.bartlett(*table).pvalue < COMPARABLE:
        return None
    residual = table - table.mean(1, keepdims=True) - table.mean(0) + table.mean()
    freedom = (len(table) - 1) * (table.shape[1] - 1)
    return float(np.sqrt(2 * np.square(residual).sum() / freedom / table.shape[1]))


def compare(
    values: Mapping[str, Sequence[float]],
    recipes: Sequence[str],
    pairs: Sequence[tuple[str, str]] | None = None,
) -> list[Difference]:
    """Test pairs of contestants, and correct the tests together.

    Args:
        values: each contestant's value of each block, two blocks at least.
        recipes: contestants whose variances may be pooled.
        pairs: names of what is compared; None: each recipe with the recipes after it.
    """
    from scipy import stats

    if pairs is None:
        pairs = [(one, other) for i, one in enumerate(recipes) for other in recipes[i + 1 :]]
    seeded = {name: values[name] for name in recipes if np.ptp(values[name]) >= SAME}
    shared = pooled_error(seeded)
    blocks = len(next(iter(values.values())))
    tests = []
    for one, other in pairs:
        apart = np.subtract(values[one], values[other])
        mean, error, pooled, kind = float(apart.mean()), 0.0, 2, "paired"
        if shared is not None and one in seeded and other in seeded:
            error, pooled, kind = shared, len(seeded), "pooled"
        elif np.ptp(apart) < SAME:
            mean, kind = 0.0 if abs(mean) < SAME else mean, "none"
        else:
            error = float(stats.sem(apart))
            if min(np.ptp(values[one]), np.ptp(values[other])) < SAME:
                kind = "one-sample"
        difference = Difference(one, other, Mean(mean, 0.0), kind, None)
        if error:
            p = 2 * stats.t.sf(abs(mean) / error, (pooled - 1) * (blocks - 1))
            difference = replace(difference, p=float(p))
        tests.append(_Test(difference, error, pooled))
    made = [test for test in tests if test.difference.p is not None]
    corrected, levels = holm([test.difference.p or 0.0 for test in made])
    # the undecided ones share a level, so the smallest p is the closest to a decision
    undecided = [step for step, p in enumerate(corrected) if p >= LEVEL]
    closest = min(undecided, key=lambda step: made[step].difference.p or 0.0, default=None)
    done = []
    steps = iter(range(len(made)))
    for test in tests:
        difference = test.difference
        if difference.p is not None:
            step = next(steps)
            limit = float(stats.t.ppf(1 - levels[step] / 2, (test.pooled - 1) * (blocks - 1)))
            difference = replace(
                difference,
                mean=Mean(difference.mean.value, limit * test.error),
                corrected=corrected[step],
                needed=_blocks_needed(test, blocks, levels[step]) if step == closest else None,
            )
        done.append(difference)
    return done


def _blocks_needed(test: _Test, blocks: int, level: float) -> int:
    """Return the blocks that decide a difference with a probability of `POWER`."""
    from scipy import stats

    effect = abs(test.difference.mean.value) / (test.error * np.sqrt(blocks))

    def enough(count: int) -> bool:
        freedom = (test.pooled - 1) * (count - 1)
        limit = stats.t.ppf(1 - level / 2, freedom)
        return bool(stats.nct.sf(limit, freedom, effect * np.sqrt(count)) >= POWER)

    return bisect_left(range(MOST_BLOCKS + 1), True, lo=blocks + 1, key=enough)


def sentences(differences: Sequence[Difference], blocks: str) -> list[str]:
    """Return what can be said of differences: one sentence each for the decided ones and those
    without a test, one for all undecided ones.

    Args:
        differences: as `compare` returns them.
        blocks: how many and of what kind, such as "5 seeds".
    """
    tests = sum(each.p is not None for each in differences)
    lines = []
    for each in differences:
        apart = number(abs(each.mean.value))
        if each.corrected is None:
            lines.append(_untested(each, apart))
        elif each.decided:
            one, other = (each.one, each.other) if each.mean.value > 0 else (each.other, each.one)
            lines.append(
                f"{one} is better than {other} by {apart} ± {number(each.mean.half)}"
                f"{_probability(each, tests)}."
            )
    undecided = [each for each in differences if each.corrected is not None and not each.decided]
    if undecided:
        lines.append(_undecided(undecided, blocks))
    return lines


def _untested(each: Difference, apart: str) -> str:
    if each.mean.value == 0:
        return f"{each.one} and {each.other} have the same MAP@R in every run."
    one, other = (each.one, each.other) if each.mean.value > 0 else (each.other, each.one)
    return (
        f"{one} is {apart} above {other} on this split: the difference does not depend on the"
        " seed, so seeds cannot say how certain it is of other splits (--splits can)."
    )


def _undecided(undecided: Sequence[Difference], blocks: str) -> str:
    pairs = ", ".join(
        f"{each.one} and {each.other} ({number(abs(each.mean.value))} ± {number(each.mean.half)})"
        for each in undecided
    )
    closest = next(each for each in undecided if each.needed is not None)
    unit = blocks.split()[-1]
    beyond = closest.needed is None or closest.needed > MOST_BLOCKS
    more = f"more than {MOST_BLOCKS:,}" if beyond else f"about {closest.needed}"
    return (
        f"Not decided with {blocks}: {pairs}. {closest.one} and {closest.other} would take"
        f" {more} {unit} (power .8 at the observed difference and variance)."
    )


def _probability(each: Difference, tests: int) -> str:
    assert each.corrected is not None
    equals = "" if each.corrected < 0.001 else "= "
    after = f" after Holm's correction for {tests} tests" if tests > 1 else ""
    return f", p {equals}{probability(each.corrected)}{after}"


def conclusion(differences: Sequence[Difference], recipes: Sequence[str], blocks: str) -> str:
    """Return what can be said of all recipes together, as a sentence."""
    among = [each for each in differences if {each.one, each.other} <= set(recipes)]
    if len(recipes) == 1:
        return f"{recipes[0]} with {blocks}: one recipe, and nothing to compare it with."
    worse = {each.other if each.mean.value > 0 else each.one for each in among if each.decided}
    rest = [name for name in recipes if name not in worse]
    for name in rest:
        own = [each for each in among if name in (each.one, each.other)]
        if all(each.decided for each in own):
            where = " on this split" if any(each.p is None for each in own) else ""
            return f"{name} has the highest MAP@R of all recipes compared{where}."
    if not worse:
        return f"Nothing can be said of which recipe is the best with {blocks}."
    return (
        f"No recipe is shown to be the best with {blocks}. It is one of {', '.join(rest)};"
        f" {', '.join(name for name in recipes if name in worse)}"
        f" {'is' if len(worse) == 1 else 'are'} worse than at least one of them."
    )


def conclusion_against(differences: Sequence[Difference], against: str, blocks: str) -> str:
    """Return which contestants are better and worse than one of them, as a sentence."""
    groups: dict[str, list[str]] = {"better": [], "worse": [], "not decided": []}
    for each in differences:
        name, sign = (each.other, -1) if each.one == against else (each.one, 1)
        kind = "better" if sign * each.mean.value > 0 else "worse"
        groups[kind if each.decided else "not decided"].append(name)
    lines = [f"{kind}: {', '.join(names)}" for kind, names in groups.items() if names]
    return f"Compared with {against}, with {blocks}: {'; '.join(lines)}."


def number(value: float) -> str:
    """Return a metric as the tables write it; one too small for that is not written as nothing."""
    return "<0.001" if 0 < abs(value) < 0.0005 else f"{value:.3f}"


def probability(value: float) -> str:
    """Return a p value as the tables write it."""
    return "< .001" if value < 0.001 else f"{value:.3f}".removeprefix("0")
