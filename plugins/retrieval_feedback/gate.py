"""The gate: a test by betting of whether a challenger answers better than the incumbent.

Gamblers who start with a wealth of 1 bet on each judged search that the challenger wins it. Each
bet is fixed before the search. If the challenger is not better, no gambler can expect to gain, and
the chance that their wealth *ever* reaches 1/α is at most α (Ville's inequality), whenever and
however often somebody looks (Waudby-Smith & Ramdas, "Estimating means of bounded random variables
by betting", JRSS-B 2024). Voters are bounded, not trusted: whatever a voter does, wealth with them
is at most e^`STAKE` times wealth without them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
from retrieval.feedback.record import DISLIKED

ALPHA = 0.05
"""Chance of ever switching, among all trials over one base, to what is not better."""
STAKE = 1.0
"""Most that the logarithm of wealth can gain through one voter."""
SEARCHES = 4
"""Searches of a voter that count in a trial, the first ones."""
SHARES = (0.25, 0.5, 1.0)
"""Shares of the stake that the gamblers bet; wealth is their mean, so small gains count as well."""
REFUSED = 10.0
"""Wealth of those who bet on the incumbent at which the challenger is refused."""
MOST_SEARCHES = 2000
"""Counted searches without a decision after which the challenger is refused."""


@dataclass(frozen=True)
class Evidence:
    """What the judged searches of a trial say so far.

    Attributes:
        searches: number of searches that counted.
        voters: number of their voters.
        wins: number of searches that the challenger won.
        losses: number that the incumbent won; the others are ties.
        wealth: wealth of the gamblers who bet on the challenger.
        against: wealth of the gamblers who bet on the incumbent.
        needed: wealth at which the challenger is better beyond doubt.
        verdict: "better", "refused", or "open".
    """

    searches: int
    voters: int
    wins: int
    losses: int
    wealth: float
    against: float
    needed: float
    verdict: Literal["better", "refused", "open"]

    def as_dict(self) -> dict[str, Any]:
        """Return the attributes by name."""
        return asdict(self)


def level(number: int, alpha: float = ALPHA) -> float:
    """Return the error rate of trial `number`, from 1; those of all trials sum to `alpha`."""
    return alpha / (number * (number + 1))


def weigh(outcomes: Iterable[tuple[str, float]], alpha: float) -> Evidence:
    """Bet on outcomes in the order in which they came, until the first verdict.

    Args:
        outcomes: voter and outcome of each judged search: above 0 if the challenger won, below 0 if
            the incumbent did. Only the sign counts.
        alpha: error rate of the trial.
    """
    voters: list[str] = []
    signs: list[float] = []
    counted: Counter[str] = Counter()
    for voter, outcome in outcomes:
        counted[voter] += 1
        if counted[voter] <= SEARCHES and len(voters) < MOST_SEARCHES:
            voters.append(voter)
            signs.append(float(np.sign(outcome)))
    bets = np.array(SHARES) * STAKE / SEARCHES
    # (2, T): the wealth of both sides after each search.
    won = np.array(signs) * np.array([[1.0], [-1.0]])
    wealth = np.exp(np.log1p(won[..., None] * bets).cumsum(axis=1)).mean(axis=2)
    verdicts = np.where(wealth[0] >= 1 / alpha, 1, np.where(wealth[1] >= REFUSED, -1, 0))
    decided = np.flatnonzero(verdicts)
    end = len(signs)
    verdict: Literal["better", "refused", "open"] = "open"
    if len(decided):
        end = int(decided[0]) + 1
        verdict = "better" if verdicts[end - 1] > 0 else "refused"
    elif end == MOST_SEARCHES:
        verdict = "refused"
    ahead, behind = wealth[:, end - 1].tolist() if end else (1.0, 1.0)
    return Evidence(
        searches=end,
        voters=len(set(voters[:end])),
        wins=signs[:end].count(1.0),
        losses=signs[:end].count(-1.0),
        wealth=ahead,
        against=behind,
        needed=1 / alpha,
        verdict=verdict,
    )


def by_teams(hits: Sequence[str], teams: str, marks: Mapping[str, int]) -> float:
    """Return the challenger's credit less the incumbent's in an interleaved search.

    A liked or clicked hit is a credit for the team that chose it, a disliked one a debit. Team
    draft shares each pair of places among the teams by a coin (Radlinski, Kurup & Joachims, "How
    does clickthrough data reflect retrieval quality?", CIKM 2008), so whoever does not know the
    teams and marks by place or at random favours none.
    """
    credit = {"c": 0, "i": 0}
    for hit, team in zip(hits, teams, strict=True):
        if hit in marks:
            credit[team] += -1 if marks[hit] == DISLIKED else 1
    return float(credit["c"] - credit["i"])


def by_order(
    hits: Sequence[str], challenger: Mapping[str, float], marks: Mapping[str, int]
) -> float:
    """Return how much better the challenger orders the hits that the incumbent showed.

    This is the estimate without exploring: the share of pairs of a liked or clicked hit and another
    one that the challenger orders rightly, less that of the incumbent. Who marks by place favours
    the incumbent's first hits, so the estimate errs on its side. It sees nothing of items that were
    not shown.

    Args:
        hits: ids in the order shown.
        challenger: the challenger's distance from the query to each hit.
        marks: marks of one voter.
    """
    known = [hit for hit in hits if hit in challenger]
    is_preferred = [hit in marks and marks[hit] != DISLIKED for hit in known]
    distances = [challenger[hit] for hit in known]
    return _ordered(distances, is_preferred) - _ordered(list(range(len(known))), is_preferred)


def _ordered(distances: Sequence[float], is_preferred: Sequence[bool]) -> float:
    """Return the share of pairs of a preferred item and another in which it is nearer."""
    values = np.array(distances, np.float64)
    mask = np.array(is_preferred, bool)
    if mask.all() or not mask.any():
        return 0.0
    differences = values[~mask][None, :] - values[mask][:, None]
    return float(((differences > 0) + 0.5 * (differences == 0)).mean())
