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
from itertools import combinations

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
        error: standard error of the mean; 0 without a test.
        pooled: how many recipes share the variance; 2 for a pair.
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
    error: float = 0.0
    pooled: int = 2
    p: float | None = None
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
        return names if self.mean.value >= 0 else names[::-1]


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
        bartlett = equation(float(stats.bartlett(*seeded).pvalue))
        comparable = "comparable" if "pooled" in tests else "not comparable"
        reason = f"Bartlett's test finds the recipes' variances {comparable} ({bartlett})"
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

    It is None for fewer than three recipes or blocks, and variances that are not comparable. No
    recipe's values are constant.
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
        pairs = list(combinations(recipes, 2))
    seeded = {name: values[name] for name in recipes if np.ptp(values[name]) >= SAME}
    shared = pooled_error(seeded)
    blocks = len(next(iter(values.values())))
    differences = []
    for contestant, reference in pairs:
        apart = np.subtract(values[contestant], values[reference])
        mean, error, pooled, test = float(apart.mean()), 0.0, 2, "paired"
        if shared is not None and contestant in seeded and reference in seeded:
            error, pooled, test = shared, len(seeded), "pooled"
        elif np.ptp(apart) < SAME:
            mean, test = 0.0 if abs(mean) < SAME else mean, "none"
        else:
            error = float(stats.sem(apart))
            if min(np.ptp(values[contestant]), np.ptp(values[reference])) < SAME:
                test = "one-sample"
        p = None
        if error:
            p = float(2 * stats.t.sf(abs(mean) / error, (pooled - 1) * (blocks - 1)))
        differences.append(
            Difference(contestant, reference, Mean(mean, 0.0), test, error, pooled, p)
        )
    return _corrected(differences, blocks)


def _corrected(differences: list[Difference], blocks: int) -> list[Difference]:
    from scipy import stats

    tested = [place for place, test in enumerate(differences) if test.p is not None]
    corrected, levels = holm([differences[place].p or 0.0 for place in tested])
    # the undecided ones share a level, so the smallest p is the closest to a decision
    undecided = [place for place, p in zip(tested, corrected, strict=True) if p >= LEVEL]
    closest = min(undecided, key=lambda place: differences[place].p or 0.0, default=None)
    for place, p, level in zip(tested, corrected, levels, strict=True):
        test = differences[place]
        limit = float(stats.t.ppf(1 - level / 2, (test.pooled - 1) * (blocks - 1)))
        differences[place] = replace(
            test,
            mean=Mean(test.mean.value, limit * test.error),
            corrected=p,
            needed=_blocks_needed(test, blocks, level) if place == closest else None,
        )
    return differences


def _blocks_needed(test: Difference, blocks: int, level: float) -> int:
    """Return the blocks that decide a difference with a probability of `POWER`."""
    from scipy import stats

    effect = abs(test.mean.value) / (test.error * np.sqrt(blocks))

    def enough(count: int) -> bool:
        freedom = (test.pooled - 1) * (count - 1)
        limit = stats.t.ppf(1 - level / 2, freedom)
        return bool(stats.nct.sf(limit, freedom, effect * np.sqrt(count)) >= POWER)

    return bisect_left(range(MOST_BLOCKS + 1), True, lo=blocks + 1, key=enough)


def sentences(tests: Sequence[Difference], blocks: str) -> list[str]:
    """Return a sentence for each decided or untested difference, and one for all undecided ones.

    `blocks` says how many and of what kind, as "5 seeds".
    """
    count = sum(test.p is not None for test in tests)
    after = f" after Holm's correction for {count} tests" if count > 1 else ""
    lines = []
    for test in tests:
        (better, worse), apart = test.ranked, number(abs(test.mean.value))
        if test.corrected is not None:
            if test.decided:
                p = equation(test.corrected)
                half = number(test.mean.half)
                lines.append(f"{better} is better than {worse} by {apart} ± {half}, {p}{after}.")
        elif test.mean.value == 0:
            lines.append(f"{better} and {worse} have the same MAP@R in every run.")
        else:
            lines.append(
                f"{better} is {apart} above {worse} on this split: the difference does not depend"
                " on the seed, so seeds cannot say how certain it is of other splits (--splits"
                " can)."
            )
    undecided = [test for test in tests if test.corrected is not None and not test.decided]
    if undecided:
        pairs = ", ".join(
            f"{test.contestant} and {test.reference}"
            f" ({number(abs(test.mean.value))} ± {number(test.mean.half)})"
            for test in undecided
        )
        closest = next(test for test in undecided if test.needed is not None)
        beyond = (closest.needed or 0) > MOST_BLOCKS
        needed = f"more than {MOST_BLOCKS:,}" if beyond else f"about {closest.needed}"
        lines.append(
            f"Not decided with {blocks}: {pairs}. {closest.contestant} and {closest.reference}"
            f" would take {needed} {blocks.split()[-1]} (power .8 at the observed difference and"
            " variance)."
        )
    return lines


def conclusion(tests: Sequence[Difference], recipes: Sequence[str], blocks: str) -> str:
    """Return what can be said of all recipes together, as a sentence."""
    if len(recipes) == 1:
        return f"{recipes[0]} with {blocks}: one recipe, and nothing to compare it with."
    tests = [test for test in tests if {test.contestant, test.reference} <= set(recipes)]
    worse = {test.ranked[1] for test in tests if test.decided}
    rest = [name for name in recipes if name not in worse]
    for name in rest:
        own = [test for test in tests if name in (test.contestant, test.reference)]
        if all(test.decided for test in own):
            where = " on this split" if any(test.p is None for test in own) else ""
            return f"{name} has the highest MAP@R of all recipes compared{where}."
    if not worse:
        return f"Nothing can be said of which recipe is the best with {blocks}."
    return (
        f"No recipe is shown to be the best with {blocks}. It is one of {', '.join(rest)};"
        f" {', '.join(name for name in recipes if name in worse)}"
        f" {'is' if len(worse) == 1 else 'are'} worse than at least one of them."
    )


def conclusion_against(tests: Sequence[Difference], against: str, blocks: str) -> str:
    """Return which contestants are better and worse than one of them, as a sentence."""
    groups: dict[str, list[str]] = {"better": [], "worse": [], "not decided": []}
    for test in tests:
        name = test.reference if test.contestant == against else test.contestant
        kind = "better" if test.ranked[0] == name else "worse"
        groups[kind if test.decided else "not decided"].append(name)
    lines = [f"{kind}: {', '.join(names)}" for kind, names in groups.items() if names]
    return f"Compared with {against}, with {blocks}: {'; '.join(lines)}."


def number(value: float) -> str:
    """Return a metric as the tables write it; one too small for that is not written as nothing."""
    return "<0.001" if 0 < abs(value) < 0.0005 else f"{value:.3f}"


def probability(value: float) -> str:
    """Return a p value as the tables write it."""
    return "< .001" if value < 0.001 else f"{value:.3f}".removeprefix("0")


def equation(value: float) -> str:
    """Return a p value as sentences write it."""
    return f"p {probability(value)}" if value < 0.001 else f"p = {probability(value)}"
