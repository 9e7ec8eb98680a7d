"""Means with intervals, paired differences, and what can be said: Student's t over seeds, corrected
for many comparisons by Holm.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

LEVEL = 0.05
"""A difference is said to be there when its corrected p value is below."""


@dataclass(frozen=True)
class Mean:
    """A mean over seeds.

    Attributes:
        value: the mean.
        half: how far its 95 % interval reaches to either side; 0 where all values are the same.
    """

    value: float
    half: float


@dataclass(frozen=True)
class Difference:
    """One contestant less another, of the same seeds.

    Attributes:
        one: the contestant.
        other: what is taken from it.
        mean: the mean difference and its interval.
        p: of the paired t test, two-sided; None where every seed gives the same difference, so that
            there is no chance to test.
        corrected: the same after Holm's correction.
    """

    one: str
    other: str
    mean: Mean
    p: float | None
    corrected: float | None = None

    @property
    def certain(self) -> bool:
        """Whether the difference is said to be there."""
        return self.corrected is not None and self.corrected < LEVEL


def mean_of(values: Sequence[float]) -> Mean:
    """Return a mean with Student's 95 % interval, s·t/√n; two values at least."""
    from scipy import stats

    if np.ptp(values) < 1e-12:
        return Mean(float(values[0]), 0.0)
    reach = stats.t.ppf(0.975, len(values) - 1) * stats.sem(values)
    return Mean(float(np.mean(values)), float(reach))


def holm(values: Sequence[float]) -> list[float]:
    """Return p values after Holm's step-down correction (Scandinavian Journal of Statistics 6,
    1979).
    """
    corrected = [0.0] * len(values)
    running = 0.0
    for rank, place in enumerate(np.argsort(values, kind="stable")):
        running = max(running, min(1.0, (len(values) - rank) * values[place]))
        corrected[int(place)] = running
    return corrected


def compare(figures: Mapping[str, Sequence[float]], recipes: Sequence[str]) -> list[Difference]:
    """Compare each recipe with the recipes after it and with every baseline.

    Args:
        figures: each contestant's figure by seed, all of the same seeds.
        recipes: those of them that are recipes; the others are baselines.

    Returns:
        The differences, corrected together.
    """
    from scipy import stats

    baselines = [name for name in figures if name not in recipes]
    found = []
    for i, one in enumerate(recipes):
        for other in [*recipes[i + 1 :], *baselines]:
            apart = np.subtract(figures[one], figures[other])
            chance = np.ptp(apart) >= 1e-12
            p = float(stats.ttest_1samp(apart, 0.0).pvalue) if chance else None
            found.append(Difference(one, other, mean_of(apart.tolist()), p))
    corrected = iter(holm([each.p for each in found if each.p is not None]))
    return [
        (
            each
            if each.p is None
            else Difference(each.one, each.other, each.mean, each.p, next(corrected))
        )
        for each in found
    ]


def said(each: Difference, seeds: int, tests: int) -> str:
    """Return what can be said of a difference, as a sentence."""
    apart = f"{number(abs(each.mean.value))} ± {number(each.mean.half)}"
    if each.p is None:
        if each.mean.value == 0:
            return f"{each.one} and {each.other} have the same MAP@R with every seed."
        better = "above" if each.mean.value > 0 else "below"
        return (
            f"{each.one} is {number(abs(each.mean.value))} {better} {each.other} with every seed:"
            " neither depends on the seed, so seeds cannot say how certain that is."
        )
    assert each.corrected is not None
    after = f", p {'' if each.corrected < 0.001 else '= '}{probability(each.corrected)}" + (
        f" after Holm's correction for {tests} comparisons" if tests > 1 else ""
    )
    if not each.certain:
        return (
            f"Nothing can be said of {each.one} and {each.other} with {seeds} seeds: they are"
            f" {apart} apart{after}."
        )
    better = "better" if each.mean.value > 0 else "worse"
    return f"{each.one} is {better} than {each.other} by {apart}{after}."


def conclusion(differences: Sequence[Difference], recipes: Sequence[str], seeds: int) -> str:
    """Return what can be said of all recipes together, as a sentence."""
    for name in recipes:
        against = [
            d for d in differences if name in (d.one, d.other) and {d.one, d.other} <= set(recipes)
        ]
        if all(d.certain and (d.mean.value > 0) == (d.one == name) for d in against):
            return f"{name} has the highest MAP@R of all recipes compared."
    among = [d for d in differences if {d.one, d.other} <= set(recipes)]
    if not any(d.certain for d in among):
        return f"Nothing can be said of which recipe is the best with {seeds} seeds."
    worse = {d.other if d.mean.value > 0 else d.one for d in among if d.certain}
    rest = [name for name in recipes if name not in worse]
    return (
        f"No recipe is shown to be the best with {seeds} seeds. It is one of {', '.join(rest)};"
        f" {', '.join(name for name in recipes if name in worse)}"
        f" {'is' if len(worse) == 1 else 'are'} worse than at least one of them."
    )


def number(value: float) -> str:
    """Return a figure as the tables write it; one too small for that is not written as nothing."""
    return "<0.001" if 0 < abs(value) < 0.0005 else f"{value:.3f}"


def probability(value: float) -> str:
    """Return a p value as the tables write it."""
    return "< .001" if value < 0.001 else f"{value:.3f}".removeprefix("0")
