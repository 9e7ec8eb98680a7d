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
        contestant: whose value it is.
        reference: whose value is subtracted.
        mean: the mean difference and its interval, at the level of Holm's step.
        test: "pooled", "paired" or "one-sample"; "none" where every block gives the same
            difference, so that there is no chance to test.
        p: two-sided; None without a test.
        corrected: the same after Holm's correction.
        needed: of the undecided difference with the smallest p, how many blocks would decide it
            with a probability of .8 if its mean and variance are what was observed; one more than
            `MOST_BLOCKS` where it takes more than those.
    """

    contestant: str
    reference: str
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

    @property
    def ranked(self) -> tuple[str, str]:
        """The name of the better contestant, then of the other."""
        names = self.contestant, self.reference
        return names if self.mean.value > 0 else names[::-1]


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
    blocks: str,
) -> str:
    """Return which tests the p values are of, and why, as the end of a sentence."""
    from scipy import stats

    tests = {difference.test for difference in differences}
    seeded = [values[name] for name in recipes if np.ptp(values[name]) >= SAME]
    reason = "it takes three recipes that depend on the seed, and three seeds, to pool variances"
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
        lines = [f"paired t tests by MAP@R over {blocks}, since {reason}"]
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
        pairs = [
            (contestant, reference)
            for i, contestant in enumerate(recipes)
            for reference in recipes[i + 1 :]
        ]
    seeded = {name: values[name] for name in recipes if np.ptp(values[name]) >= SAME}
    shared = pooled_error(seeded)
    blocks = len(next(iter(values.values())))
    tests = []
    for contestant, reference in pairs:
        apart = np.subtract(values[contestant], values[reference])
        mean, error, pooled, kind = float(apart.mean()), 0.0, 2, "paired"
        if shared is not None and contestant in seeded and reference in seeded:
            error, pooled, kind = shared, len(seeded), "pooled"
        elif np.ptp(apart) < SAME:
            mean, kind = 0.0 if abs(mean) < SAME else mean, "none"
        else:
            error = float(stats.sem(apart))
            if min(np.ptp(values[contestant]), np.ptp(values[reference])) < SAME:
                kind = "one-sample"
        difference = Difference(contestant, reference, Mean(mean, 0.0), kind, None)
        if error:
            p = 2 * stats.t.sf(abs(mean) / error, (pooled - 1) * (blocks - 1))
            difference = replace(difference, p=float(p))
        tests.append(_Test(difference, error, pooled))
    tested = [test for test in tests if test.difference.p is not None]
    corrected, levels = holm([test.difference.p or 0.0 for test in tested])
    # the undecided ones share a level, so the smallest p is the closest to a decision
    undecided = [step for step, p in enumerate(corrected) if p >= LEVEL]
    closest = min(undecided, key=lambda step: tested[step].difference.p or 0.0, default=None)
    done = []
    steps = iter(range(len(tested)))
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
    tests = sum(difference.p is not None for difference in differences)
    lines = []
    for difference in differences:
        apart = number(abs(difference.mean.value))
        if difference.corrected is None:
            lines.append(_untested(difference, apart))
        elif difference.decided:
            better, worse = difference.ranked
            lines.append(
                f"{better} is better than {worse} by {apart} ± {number(difference.mean.half)}"
                f"{_probability(difference, tests)}."
            )
    undecided = [
        difference
        for difference in differences
        if difference.corrected is not None and not difference.decided
    ]
    if undecided:
        lines.append(_undecided(undecided, blocks))
    return lines


def _untested(difference: Difference, apart: str) -> str:
    if difference.mean.value == 0:
        return (
            f"{difference.contestant} and {difference.reference} have the same MAP@R in every run."
        )
    better, worse = difference.ranked
    return (
        f"{better} is {apart} above {worse} on this split: the difference does not depend on the"
        " seed, so seeds cannot say how certain it is of other splits (--splits can)."
    )


def _undecided(undecided: Sequence[Difference], blocks: str) -> str:
    pairs = ", ".join(
        f"{difference.contestant} and {difference.reference}"
        f" ({number(abs(difference.mean.value))} ± {number(difference.mean.half)})"
        for difference in undecided
    )
    closest = next(difference for difference in undecided if difference.needed is not None)
    unit = blocks.split()[-1]
    beyond = closest.needed is None or closest.needed > MOST_BLOCKS
    more = f"more than {MOST_BLOCKS:,}" if beyond else f"about {closest.needed}"
    return (
        f"Not decided with {blocks}: {pairs}. {closest.contestant} and {closest.reference} would"
        f" take {more} {unit} (power .8 at the observed difference and variance)."
    )


def _probability(difference: Difference, tests: int) -> str:
    assert difference.corrected is not None
    equals = "" if difference.corrected < 0.001 else "= "
    after = f" after Holm's correction for {tests} tests" if tests > 1 else ""
    return f", p {equals}{probability(difference.corrected)}{after}"


def conclusion(differences: Sequence[Difference], recipes: Sequence[str], blocks: str) -> str:
    """Return what can be said of all recipes together, as a sentence."""
    among = [
        difference
        for difference in differences
        if {difference.contestant, difference.reference} <= set(recipes)
    ]
    if len(recipes) == 1:
        return f"{recipes[0]} with {blocks}: one recipe, and nothing to compare it with."
    worse = {difference.ranked[1] for difference in among if difference.decided}
    rest = [name for name in recipes if name not in worse]
    for name in rest:
        own = [
            difference
            for difference in among
            if name in (difference.contestant, difference.reference)
        ]
        if all(difference.decided for difference in own):
            where = " on this split" if any(difference.p is None for difference in own) else ""
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
    for difference in differences:
        name, sign = (
            (difference.reference, -1)
            if difference.contestant == against
            else (difference.contestant, 1)
        )
        kind = "better" if sign * difference.mean.value > 0 else "worse"
        groups[kind if difference.decided else "not decided"].append(name)
    lines = [f"{kind}: {', '.join(names)}" for kind, names in groups.items() if names]
    return f"Compared with {against}, with {blocks}: {'; '.join(lines)}."


def number(value: float) -> str:
    """Return a metric as the tables write it; one too small for that is not written as nothing."""
    return "<0.001" if 0 < abs(value) < 0.0005 else f"{value:.3f}"


def probability(value: float) -> str:
    """Return a p value as the tables write it."""
    return "< .001" if value < 0.001 else f"{value:.3f}".removeprefix("0")
