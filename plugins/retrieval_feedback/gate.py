"""The gate: a test by betting of whether a challenger answers better than the incumbent.

Gamblers who start with a wealth of 1 bet on each judged search that the challenger wins it. Each
bet is fixed before the search. If the challenger is not better, no gambler can expect to gain, and
the chance that their mean wealth *ever* reaches 1/α is at most α (Ville's inequality), whenever and
however often somebody looks (Waudby-Smith & Ramdas, "Estimating means of bounded random variables
by betting", JRSS-B 2024). Voters are bounded, not trusted: whatever a voter does, and however often
they search, they at most double wealth, and at most halve it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

ALPHA = 0.05
"""Chance of ever switching, among all trials over one base, to what is not better."""
SEARCHES_PER_FALSE_ALARM = 20
"""Least mean number of searches between two false alarms of a watch."""
MAX_FACTOR = 2.0
"""Largest factor by which one voter multiplies or divides wealth."""
BET_SHARES = (0.1, 0.25, 0.5)
"""Shares of their wealth that the gamblers bet; large shares are best for large leads."""
REFUSED_WEALTH = 0.05
"""Wealth below which the challenger is refused: it makes room for one that learned more."""
MAX_SEARCHES = 2000
"""Number of searches after which the challenger is refused if nothing is decided."""
WINNING_CREDIT = 0.6
"""Credit that wins a search altogether; a smaller credit wins a part of it."""

Verdict = Literal["better", "refused", "open"]


@dataclass(frozen=True)
class Evidence:
    """What the judged searches of a trial say so far.

    Attributes:
        searches: number of searches that counted.
        voters: number of their voters.
        wins: number of searches that the challenger won.
        losses: number that the incumbent won; the others are ties.
        lead: mean outcome.
        wealth: wealth of the gamblers.
        needed: wealth at which the challenger is better beyond doubt.
        verdict: "better", "refused", or "open".
    """

    searches: int
    voters: int
    wins: int
    losses: int
    lead: float
    wealth: float
    needed: float
    verdict: Verdict


def error_rate(number: int) -> float:
    """Return the error rate of trial `number`, from 1; those of all trials sum to `ALPHA`."""
    return ALPHA / (number * (number + 1))


def weigh(
    outcomes: Iterable[tuple[str, float]], alpha: float, *, watched: float | None = None
) -> Evidence:
    """Bet on outcomes in the order in which they came, until the first verdict.

    A watch asks whether the incumbent has lost its lead over the challenger. Its gamblers bet that
    the incumbent leads by less than `watched`, and begin anew whenever their wealth falls below 1,
    because old searches say nothing about today. That is an e-detector (Shin, Ramdas & Rinaldo,
    "E-detectors: a nonparametric framework for sequential change detection", 2023): as long
    as the incumbent leads by that much, 1/α searches or more pass on average before an alarm.

    Args:
        outcomes: voter and outcome of each judged search, from -1 to 1: above 0 if the challenger
            won, below 0 if the incumbent did.
        alpha: error rate of the trial.
        watched: for a watch, the mean outcome for the incumbent, from 0 to 1, that it must keep.
    """
    pairs = list(outcomes)
    if watched is None:
        pairs = pairs[:MAX_SEARCHES]
    voters = [voter for voter, _ in pairs]
    values = np.array([outcome for _, outcome in pairs])
    if watched is None:
        wealth = _wealth(voters, values)
        decided = (wealth >= 1 / alpha) | (wealth < REFUSED_WEALTH)
    else:
        wealth = _wealth(voters, (values + watched) / (1 + watched), anew=True)
        decided = wealth >= 1 / alpha
    end = len(pairs)
    if decided.any():
        end = int(decided.argmax()) + 1
    last = float(wealth[end - 1]) if end else 1.0
    verdict: Verdict = "open"
    if last >= 1 / alpha:
        verdict = "better"
    elif watched is None and (last < REFUSED_WEALTH or end == MAX_SEARCHES):
        verdict = "refused"
    counted = values[:end]
    return Evidence(
        searches=end,
        voters=len(set(voters[:end])),
        wins=int((counted > 0).sum()),
        losses=int((counted < 0).sum()),
        lead=float(counted.mean()) if end else 0.0,
        wealth=last,
        needed=1 / alpha,
        verdict=verdict,
    )


def _wealth(
    voters: Sequence[str], payoffs: NDArray[np.float64], anew: bool = False
) -> NDArray[np.float64]:
    """Return the mean wealth (T,) of the gamblers after each search.

    Args:
        voters: voter of each search.
        payoffs: (T,), from -1 to 1, what a bet of 1 gains.
        anew: whether gamblers begin anew when their wealth falls below 1.
    """
    paths = np.ones((len(BET_SHARES), len(voters)))
    for share, path in zip(BET_SHARES, paths, strict=True):
        wealth = 1.0
        factors: dict[str, float] = {}
        for number, (voter, payoff) in enumerate(zip(voters, payoffs.tolist(), strict=True)):
            factor = factors.get(voter, 1.0)
            # Whatever comes, the voter's factor stays between 1 / MAX_FACTOR and MAX_FACTOR.
            bet = max(0.0, min(share, MAX_FACTOR / factor - 1, 1 - 1 / (MAX_FACTOR * factor)))
            factors[voter] = factor * (1 + bet * payoff)
            wealth *= 1 + bet * payoff
            if anew and wealth < 1:
                wealth = 1.0
                factors = {}
            path[number] = wealth
    return np.asarray(paths.mean(axis=0))


def search_outcome(
    credits: Mapping[str, float], preferred: Sequence[str], skipped: Sequence[str]
) -> float:
    """Return by how much the challenger won a search, from -1 to 1.

    It gets the credits of preferred hits, and loses those of skipped hits. The credits of a page of
    `team_draft` have a mean of zero at each position, so whoever marks by position or at random,
    without knowing the coins, favours neither ranking.
    """
    lead = sum(credits[id] for id in preferred) - sum(credits[id] for id in skipped)
    return min(max(lead / WINNING_CREDIT, -1.0), 1.0)
