"""Statistics over several seeds or splits: intervals, paired tests, and conclusions in words.

A *contestant* is a recipe or baseline. A *block* is the unit of a test: a seed or, if there are
several splits, a split. A split's value is the mean over its seeds. All contestants share the
blocks.

- **Pooled test**: if Bartlett's test finds the variances of R recipes comparable over B blocks, all
  pairs use the residual variance of the two-way ANOVA (recipe, block), with (R − 1)(B − 1) degrees
  of freedom (Montgomery, Design and Analysis of Experiments, §4.1). Otherwise each pair has its own
  paired t test.
- **Deterministic recipes** have the same value in all blocks. A one-sample t test compares another
  recipe with a deterministic one. The difference of two deterministic recipes is exact on the
  split, so it is not tested.
- **Correction**: Holm's step-down method. A difference's interval uses the level at which Holm's
  method tests the difference. The interval therefore excludes 0 exactly if the corrected p value is
  below .05.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

import numpy as np
from scipy import stats

from retrieval.evaluation.intervals import LEVEL, Mean

COMPARABLE = 0.25
"""Variances are pooled if the p value of Bartlett's test is at least this.

In simulations with 3 to 5 seeds and standard deviations in the ratio 1 : 3, the rate of false
alarms is 4 to 6 %; a threshold of .05 would give 7 %. If one recipe of eight has four times the
standard deviation of the others, the rate is 10 % for 3 seeds and 6 % for 5.
"""
LEAST_POOLED = 3
"""Smallest number of blocks for Bartlett's test; with fewer, variances are not pooled."""
POWER = 0.8
"""Probability that the suggested number of seeds decides a difference."""
MOST_BLOCKS = 1000
"""Largest number of seeds that a sentence suggests."""
SAME = 1e-12
"""Values that differ by less than this count as equal."""


@dataclass(frozen=True)
class MeanDifference:
    """The difference of two contestants over the same blocks.

    Attributes:
        contestant: name of the first contestant.
        reference: name of the contestant whose value is subtracted.
        mean: the mean difference and its interval, at the level at which Holm's method tests it.
        test: "pooled", "paired" or "one-sample"; "none" if all blocks have the same difference.
        error: standard error of the mean; 0 without a test.
        pooled: number of recipes that share the variance; 2 for a pair.
        p: two-sided p value; `None` without a test.
        corrected: p value after Holm's correction; `None` without a test.
        needed: number of blocks that would decide the difference with probability `POWER`, given
            the observed mean and variance; `MOST_BLOCKS` + 1 means more. Only set for the undecided
            difference with the smallest p value.
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
        """Whether the corrected p value is below `LEVEL` or, without a test, the values differ."""
        if self.corrected is None:
            return self.mean.value != 0
        return self.corrected < LEVEL

    @property
    def ranked(self) -> tuple[str, str]:
        """The names of the better and of the worse contestant."""
        if self.mean.value < 0:
            return self.reference, self.contestant
        return self.contestant, self.reference


def mean_of(values: Sequence[float]) -> Mean:
    """Return a mean with its 95 % interval, ± s·t/√n (Student), or ± 0 for equal values."""
    if np.ptp(values) < SAME:
        return Mean(float(values[0]), 0.0)
    half = stats.t.ppf(1 - LEVEL / 2, len(values) - 1) * stats.sem(values)
    return Mean(float(np.mean(values)), float(half))


def holm(values: Sequence[float]) -> tuple[list[float], list[float]]:
    """Return p values after Holm's step-down correction, and the levels at which they are tested.

    Source: Holm, Scandinavian Journal of Statistics 6, 1979. The first step that rejects nothing
    gives its level to all later steps.
    """
    corrected = [0.0] * len(values)
    levels = [LEVEL] * len(values)
    highest = 0.0
    level = LEVEL
    for step, index in enumerate(np.argsort(values, kind="stable").tolist()):
        remaining = len(values) - step
        # a step that rejects nothing ends the method, so the level stays what it is there
        if highest < LEVEL:
            level = LEVEL / remaining
        # a later p value is never corrected to less than an earlier one
        highest = max(highest, min(1.0, remaining * values[index]))
        corrected[index] = highest
        levels[index] = level
    return corrected, levels


def method(
    values: Mapping[str, Sequence[float]],
    recipes: Sequence[str],
    differences: Sequence[MeanDifference],
    blocks: str,
) -> str:
    """Return which tests were used and why, as the end of a sentence."""
    tests = {difference.test for difference in differences}
    seeded = list(_seeded(values, recipes).values())
    reason = "pooling variances takes three recipes that depend on the seed, and three seeds"
    if len(seeded) > 2 and len(seeded[0]) >= LEAST_POOLED:
        bartlett = equation(float(stats.bartlett(*seeded).pvalue))
        if "pooled" in tests:
            not_ = ""
        else:
            not_ = "not "
        reason = f"Bartlett's test finds the recipes' variances {not_}comparable ({bartlett})"
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
        f"{'; '.join(lines)}. Corrected together by Holm's method; a difference's interval uses the"
        " level of its test."
    )


def pooled_error(values: Mapping[str, Sequence[float]]) -> float | None:
    """Return the standard error of a difference from the residual variance of the two-way ANOVA.

    `None` means that variances are not pooled: there are fewer than three recipes or blocks, or the
    variances are not comparable. The values of each recipe must vary over the blocks.
    """
    table = np.array(list(values.values()))
    if len(table) < 3 or table.shape[1] < LEAST_POOLED:
        return None
    if stats.bartlett(*table).pvalue < COMPARABLE:
        return None
    residual = table - table.mean(1, keepdims=True) - table.mean(0) + table.mean()
    freedom = (len(table) - 1) * (table.shape[1] - 1)
    return float(np.sqrt(2 * np.square(residual).sum() / freedom / table.shape[1]))


def _seeded(
    values: Mapping[str, Sequence[float]], recipes: Sequence[str]
) -> dict[str, Sequence[float]]:
    """Return the values of the recipes that depend on the seed."""
    return {name: values[name] for name in recipes if np.ptp(values[name]) >= SAME}


def compare_pairs(
    values: Mapping[str, Sequence[float]],
    recipes: Sequence[str],
    pairs: Sequence[tuple[str, str]] | None = None,
) -> list[MeanDifference]:
    """Test pairs of contestants, and correct all p values together.

    Args:
        values: each contestant's value in each block, at least two blocks.
        recipes: contestants whose variances may be pooled.
        pairs: pairs of names to compare; `None` compares all pairs of recipes.
    """
    if pairs is None:
        pairs = list(combinations(recipes, 2))
    seeded = _seeded(values, recipes)
    shared_error = pooled_error(seeded)
    blocks = len(next(iter(values.values())))
    differences = []
    for contestant, reference in pairs:
        by_block = np.subtract(values[contestant], values[reference])
        mean = float(by_block.mean())
        error = 0.0
        pooled = 2
        test = "paired"
        # a deterministic recipe has no variance to pool, so its pairs are tested on their own
        if shared_error is not None and contestant in seeded and reference in seeded:
            error = shared_error
            pooled = len(seeded)
            test = "pooled"
        elif np.ptp(by_block) < SAME:
            # a rounding error must not make one of two equal recipes the better
            if abs(mean) < SAME:
                mean = 0.0
            test = "none"
        else:
            error = float(stats.sem(by_block))
            if min(np.ptp(values[contestant]), np.ptp(values[reference])) < SAME:
                test = "one-sample"
        p = None
        if error:
            freedom = (pooled - 1) * (blocks - 1)
            p = float(2 * stats.t.sf(abs(mean) / error, freedom))
        # the interval follows when all p values are known, because Holm's levels depend on them
        differences.append(
            MeanDifference(contestant, reference, Mean(mean, 0.0), test, error, pooled, p)
        )
    return _corrected(differences, blocks)


def _corrected(differences: list[MeanDifference], blocks: int) -> list[MeanDifference]:
    """Return the differences with corrected p values, intervals and the number of needed blocks."""
    tested = [test for test in differences if test.p is not None]
    corrected, levels = holm([test.p or 0.0 for test in tested])
    # undecided differences share a level, so the one with the smallest p value is closest to it
    undecided = [test for test, p in zip(tested, corrected, strict=True) if p >= LEVEL]
    closest = min(undecided, key=lambda test: test.p or 0.0, default=None)
    results = []
    corrections = zip(corrected, levels, strict=True)
    for test in differences:
        if test.p is not None:
            p, level = next(corrections)
            freedom = (test.pooled - 1) * (blocks - 1)
            limit = float(stats.t.ppf(1 - level / 2, freedom))
            mean = Mean(test.mean.value, limit * test.error)
            needed = None
            if test is closest:
                needed = _blocks_needed(test, blocks, level)
            test = replace(test, mean=mean, corrected=p, needed=needed)
        results.append(test)
    return results


def _blocks_needed(test: MeanDifference, blocks: int, level: float) -> int:
    """Return how many blocks would decide a difference with probability `POWER`."""
    # the error of a mean shrinks with the root of the number of blocks; the effect does not
    effect = abs(test.mean.value) / (test.error * np.sqrt(blocks))

    def enough(count: int) -> bool:
        freedom = (test.pooled - 1) * (count - 1)
        limit = stats.t.ppf(1 - level / 2, freedom)
        return bool(stats.nct.sf(limit, freedom, effect * np.sqrt(count)) >= POWER)

    return bisect_left(range(MOST_BLOCKS + 1), True, lo=blocks + 1, key=enough)


def difference_sentences(tests: Sequence[MeanDifference], blocks: str) -> list[str]:
    """Return one sentence per decided or untested difference, and one for all undecided ones.

    `blocks` is the number and kind of blocks, such as "5 seeds".
    """
    count = sum(test.p is not None for test in tests)
    after = ""
    if count > 1:
        after = f" after Holm's correction for {count} tests"
    lines = []
    for test in tests:
        better, worse = test.ranked
        apart = number(abs(test.mean.value))
        if test.corrected is not None:
            if test.decided:
                p = equation(test.corrected)
                half = number(test.mean.half)
                lines.append(f"{better} is better than {worse} by {apart} ± {half}, {p}{after}.")
        elif test.mean.value == 0:
            lines.append(f"{better} and {worse} have the same MAP@R in every run.")
        else:
            lines.append(
                f"{better} is {apart} above {worse} on this split. The difference does not depend"
                " on the seed; only several splits can say how certain it is on other splits."
            )
    undecided = [test for test in tests if test.corrected is not None and not test.decided]
    if undecided:
        pairs = ", ".join(
            f"{test.contestant} and {test.reference}"
            f" ({number(abs(test.mean.value))} ± {number(test.mean.half)})"
            for test in undecided
        )
        closest, count = next((test, test.needed) for test in undecided if test.needed is not None)
        needed = f"about {count}"
        if count > MOST_BLOCKS:
            needed = f"more than {MOST_BLOCKS:,}"
        lines.append(
            f"Not decided with {blocks}: {pairs}. {closest.contestant} and {closest.reference}"
            f" would take {needed} {blocks.split()[-1]} (power .8 at the observed difference and"
            " variance)."
        )
    return lines


def conclusion(tests: Sequence[MeanDifference], recipes: Sequence[str], blocks: str) -> str:
    """Return a sentence that names the best recipe, or those that may be the best."""
    if len(recipes) == 1:
        if own_tests := [test for test in tests if test.contestant == recipes[0]]:
            return conclusion_against(own_tests, recipes[0], blocks)
        return f"{recipes[0]} with {blocks}: there is nothing to compare this recipe with."
    tests = [test for test in tests if {test.contestant, test.reference} <= set(recipes)]
    worse = {test.ranked[1] for test in tests if test.decided}
    rest = [name for name in recipes if name not in worse]
    for name in rest:
        tests_of_name = [test for test in tests if name in (test.contestant, test.reference)]
        # a recipe that has lost nothing is the best only if no difference is left undecided
        if all(test.decided for test in tests_of_name):
            where = ""
            if any(test.p is None for test in tests_of_name):
                where = " on this split"
            return f"{name} has the highest MAP@R of all recipes compared{where}."
    if not worse:
        return f"With {blocks}, it cannot be said which recipe is the best."
    if len(worse) == 1:
        verb = "is"
    else:
        verb = "are"
    return (
        f"No recipe is shown to be the best with {blocks}. It is one of {', '.join(rest)};"
        f" {', '.join(name for name in recipes if name in worse)} {verb} worse than at least one of"
        " them."
    )


def conclusion_against(tests: Sequence[MeanDifference], against: str, blocks: str) -> str:
    """Return a sentence that names the contestants that are better and worse than `against`."""
    groups: dict[str, list[str]] = {"better": [], "worse": [], "not decided": []}
    for test in tests:
        if test.contestant == against:
            name = test.reference
        else:
            name = test.contestant
        kind = "not decided"
        if test.decided:
            if test.ranked[0] == name:
                kind = "better"
            else:
                kind = "worse"
        groups[kind].append(name)
    lines = [f"{kind}: {', '.join(names)}" for kind, names in groups.items() if names]
    return f"Compared with {against}, with {blocks}: {'; '.join(lines)}."


def number(value: float) -> str:
    """Return a metric as text with three decimals; a smaller value is "<0.001", not 0."""
    if 0 < abs(value) < 0.0005:
        return "<0.001"
    return f"{value:.3f}"


def probability(value: float) -> str:
    """Return a p value as text for tables."""
    if value < 0.001:
        return "< .001"
    return f"{value:.3f}".removeprefix("0")


def equation(value: float) -> str:
    """Return a p value as text for sentences, such as "p = .012"."""
    if value < 0.001:
        return "p < .001"
    return f"p = {probability(value)}"
