"""The gate: its error for dependent voters and any time of looking, its power, what voters can do,
and the watch of what is served.
"""

from __future__ import annotations

import numpy as np
import pytest
from retrieval.feedback.feedback_record import CLICKED
from retrieval.feedback.interleaving import team_draft

from retrieval_feedback.gate import (
    MAX_FACTOR,
    MAX_SEARCHES,
    SEARCHES_PER_FALSE_ALARM,
    Evidence,
    error_rate,
    search_outcome,
    weigh,
)
from retrieval_feedback.triplets import preferred_and_skipped

TRIALS = 1000
Outcomes = list[tuple[str, float]]


def page(rng: np.random.Generator) -> tuple[list[str], tuple[float, ...]]:
    """Return ten interleaved hits of two rankings at random, and their credits."""
    rankings = [[f"{n}" for n in rng.permutation(20)] for _ in range(2)]
    return team_draft(*rankings, 10, lambda: rng.random() < 0.5)


def sticky(rng: np.random.Generator) -> Outcomes:
    """Return outcomes of voters who each always click the same places, and imitate each other."""
    outcomes = []
    fashion = rng.permutation(10)[:3]
    for voter in range(60):
        if rng.random() < 0.3:
            fashion = rng.permutation(10)[: rng.integers(1, 8)]
        for _ in range(rng.geometric(0.2)):
            hits, credits = page(rng)
            marks = dict.fromkeys([hits[place] for place in fashion], CLICKED)
            of_hit = dict(zip(hits, credits, strict=True))
            outcomes.append(
                (f"v{voter}", search_outcome(of_hit, *preferred_and_skipped(hits, marks)))
            )
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
    alpha = error_rate(number)
    wrong = 0
    for seed in range(TRIALS):
        # `weigh` stops at the first verdict, so one call is a look after each search.
        wrong += weigh(sticky(np.random.default_rng(seed)), alpha).verdict == "better"
    # The bound is on the chance; a binomial count with it exceeds this in 1 of 1,000 simulations.
    assert wrong <= alpha * TRIALS + 3.1 * np.sqrt(alpha * TRIALS)


def test_levels_sum_to_the_error_of_all_trials():
    assert sum(error_rate(number) for number in range(1, 10_000)) == pytest.approx(0.05, rel=1e-3)


@pytest.mark.parametrize(
    ("gain", "voters", "power"), [(0.3, 60, 0.9), (0.2, 120, 0.85), (0.1, 400, 0.7)]
)
def test_a_better_challenger_passes(gain, voters, power):
    passed = [
        weigh(judged(np.random.default_rng(seed), gain, voters, 4), error_rate(1)).verdict
        for seed in range(300)
    ]
    assert passed.count("better") / 300 >= power


def test_a_worse_challenger_is_refused():
    verdicts = [
        weigh(judged(np.random.default_rng(seed), -0.2, 100, 4), error_rate(1)).verdict
        for seed in range(300)
    ]
    assert verdicts.count("refused") >= 270
    assert "better" not in verdicts


def test_an_endless_trial_is_refused():
    outcomes = [(f"v{n}", 0.0) for n in range(MAX_SEARCHES + 100)]
    evidence = weigh(outcomes, error_rate(1))
    assert evidence.verdict == "refused"
    assert evidence.searches == MAX_SEARCHES


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("outcome", [1.0, -1.0])
def test_one_voter_at_most_doubles_or_halves_wealth(seed, outcome):
    rng = np.random.default_rng(seed)
    others = judged(rng, 0.5, 20, 2)
    hostile = [("hostile", outcome)] * 1000
    mixed = [(others + hostile)[row] for row in rng.permutation(len(others) + 1000)]
    without = [pair for pair in mixed if pair[0] != "hostile"]
    # An error rate that nothing reaches, so that all outcomes count.
    ratio = weigh(mixed, 1e-300).wealth / weigh(without, 1e-300).wealth
    assert MAX_FACTOR**-1 * (1 - 1e-9) <= ratio <= MAX_FACTOR * (1 + 1e-9)
    assert outcome * np.log(ratio) > 0.4


def test_how_many_voters_who_know_the_teams_can_force_a_trial():
    for voters, number, verdict in (
        (5, 1, "open"),
        (6, 1, "better"),
        (6, 2, "open"),
        (7, 2, "better"),
    ):
        outcomes = [(f"v{voter}", 1.0) for _ in range(100) for voter in range(voters)]
        assert weigh(outcomes, error_rate(number)).verdict == verdict


def test_a_single_voter_proves_nothing():
    assert weigh([("only", 1.0)] * 10_000, error_rate(1)).verdict in ("open", "refused")


def test_no_outcomes():
    expected = Evidence(0, 0, 0, 0, 0.0, 1.0, pytest.approx(40.0), "open")
    assert weigh([], error_rate(1)) == expected


def runs(rng: np.random.Generator, leads: list[tuple[int, float]]) -> Outcomes:
    """Return outcomes for the base while what is served leads by some mean outcome."""
    return [
        (f"v{rng.integers(200)}", -0.5 if rng.random() < 0.5 + lead else 0.5)
        for searches, lead in leads
        for _ in range(searches)
    ]


def test_a_watch_sees_that_a_lead_is_lost_and_forgets_what_was_before():
    delays = []
    for seed in range(50):
        rng = np.random.default_rng(seed)
        outcomes = runs(rng, [(2000, 0.3), (1000, -0.1)])
        evidence = weigh(outcomes, 1 / SEARCHES_PER_FALSE_ALARM, watched=0.15)
        delays.append(evidence.searches - 2000)
    assert np.median(delays) < 100
    assert sum(delay < 0 for delay in delays) <= 2


def test_a_watch_gives_false_alarms_no_more_often_than_stated():
    lengths = [
        weigh(
            runs(np.random.default_rng(seed), [(2000, 0.15)]),
            1 / SEARCHES_PER_FALSE_ALARM,
            watched=0.15,
        ).searches
        for seed in range(200)
    ]
    # What is served leads by just as much as it must. The runs are cut short at 2,000.
    assert np.mean(lengths) > SEARCHES_PER_FALSE_ALARM


def test_credit_of_a_page():
    credits = {"a": 0.1, "b": -0.06, "c": 0.02}
    assert search_outcome(credits, ["a", "c"], ["b"]) == pytest.approx(0.3)
    assert search_outcome(credits, ["b"], []) == pytest.approx(-0.1)
    assert search_outcome(credits, [], []) == 0
    assert search_outcome(dict.fromkeys("ab", 0.5), ["a", "b"], []) == 1
    assert search_outcome(dict.fromkeys("ab", 0.5), [], ["a", "b"]) == -1
