"""The gate: its error for dependent voters and any time of looking, its power, and what one voter
can do.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from retrieval.feedback.record import CLICKED, DISLIKED, LIKED

from retrieval_feedback.gate import (
    MOST_SEARCHES,
    SEARCHES,
    STAKE,
    Evidence,
    by_order,
    by_teams,
    level,
    weigh,
)

TRIALS = 2000
HITS = tuple("abcdefghij")
Outcomes = list[tuple[str, float]]


def teams(rng: np.random.Generator) -> str:
    """Return the teams of a page of ten hits: a coin for each two places."""
    return "".join("ci" if coin else "ic" for coin in rng.random(5) < 0.5)


def sticky(rng: np.random.Generator) -> Outcomes:
    """Return outcomes of voters who each always click the same places, and imitate each other."""
    outcomes = []
    fashion = rng.permutation(10)[:3]
    for voter in range(60):
        if rng.random() < 0.3:
            fashion = rng.permutation(10)[: rng.integers(1, 8)]
        for _ in range(rng.geometric(0.2)):
            marks = dict.fromkeys([HITS[place] for place in fashion], CLICKED)
            outcomes.append((f"v{voter}", by_teams(HITS, teams(rng), marks)))
    return outcomes


def judged(rng: np.random.Generator, gain: float, voters: int, each: int) -> Outcomes:
    """Return outcomes of voters who prefer the challenger's hits by `gain`."""
    chances = [(1 - gain) / 2, (1 + gain) / 2]
    return [
        (f"v{voter}", float(rng.choice([-1.0, 1.0], p=chances)))
        for _ in range(each)
        for voter in range(voters)
    ]


@pytest.mark.parametrize("number", [1, 2])
def test_looking_at_any_time_is_wrong_no_more_often_than_stated(number):
    alpha = level(number)
    wrong = 0
    for seed in range(TRIALS):
        # `weigh` stops at the first verdict, so one call is a look after each search.
        wrong += weigh(sticky(np.random.default_rng(seed)), alpha).verdict == "better"
    # The bound is on the chance; a binomial count with it exceeds this in 1 of 1,000 simulations.
    assert wrong <= alpha * TRIALS + 3.1 * np.sqrt(alpha * TRIALS)


def test_levels_sum_to_the_error_of_all_trials():
    assert sum(level(number) for number in range(1, 10_000)) == pytest.approx(0.05, rel=1e-3)


@pytest.mark.parametrize(
    ("gain", "voters", "power"), [(0.3, 60, 0.9), (0.2, 120, 0.9), (0.1, 400, 0.8)]
)
def test_a_better_challenger_passes(gain, voters, power):
    passed = [
        weigh(judged(np.random.default_rng(seed), gain, voters, SEARCHES), level(1)).verdict
        for seed in range(300)
    ]
    assert passed.count("better") / 300 >= power


def test_a_worse_challenger_is_refused():
    verdicts = [
        weigh(judged(np.random.default_rng(seed), -0.2, 100, SEARCHES), level(1)).verdict
        for seed in range(300)
    ]
    assert verdicts.count("refused") >= 270
    assert "better" not in verdicts


def test_an_endless_trial_is_refused():
    draws = itertools.cycle([1.0, -1.0])
    outcomes = [(f"v{n}", next(draws)) for n in range(MOST_SEARCHES + 100)]
    evidence = weigh(outcomes, level(1))
    assert evidence.verdict == "refused"
    assert evidence.searches == MOST_SEARCHES


@pytest.mark.parametrize("seed", range(20))
def test_one_voter_changes_wealth_at_most_by_the_stake(seed):
    rng = np.random.default_rng(seed)
    others = judged(rng, 0.05, 20, 2)
    hostile = [("hostile", 1.0)] * 1000
    mixed = [(others + hostile)[row] for row in rng.permutation(len(others) + 1000)]
    without = [outcome for outcome in mixed if outcome[0] != "hostile"]
    # An error rate that nothing reaches, so that all outcomes count.
    most = weigh(mixed, 1e-300).wealth / weigh(without, 1e-300).wealth
    assert 1 < most <= np.exp(STAKE)


def test_a_single_voter_proves_nothing():
    assert weigh([("only", 1.0)] * 10_000, level(1)).verdict == "open"


def test_no_outcomes():
    assert weigh([], level(1)) == Evidence(0, 0, 0, 0, 1.0, 1.0, pytest.approx(40.0), "open")


def test_credit_of_teams():
    marks = {"a": LIKED, "b": DISLIKED, "c": CLICKED, "elsewhere": LIKED}
    assert by_teams("abc", "cic", marks) == 3
    assert by_teams("abc", "ici", marks) == -3
    assert by_teams("abc", "cic", {"a": CLICKED, "b": CLICKED}) == 0


def test_credit_of_an_order():
    # The incumbent shows a, b, c, d, and c is good: 1 of 3 pairs is right.
    challenger = {"a": 3.0, "b": 2.0, "c": 1.0, "d": 4.0}
    assert by_order("abcd", challenger, {"c": CLICKED, "a": DISLIKED}) == pytest.approx(2 / 3)
    assert by_order("abcd", dict(zip("abcd", range(4), strict=True)), {"c": LIKED}) == 0
    assert by_order("abcd", challenger, {"a": DISLIKED}) == 0
    assert by_order("abcd", dict.fromkeys("abcd", 1.0), {"c": LIKED}) == pytest.approx(1 / 6)


def test_marks_by_place_favour_the_incumbent_without_exploring():
    rng = np.random.default_rng(0)
    outcomes = []
    for _ in range(2000):
        challenger = dict(zip(HITS, rng.random(10), strict=True))
        place = min(int(rng.geometric(0.4)), 10) - 1
        outcomes.append(by_order(HITS, challenger, {HITS[place]: CLICKED}))
    assert np.mean(outcomes) < 0
