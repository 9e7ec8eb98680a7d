"""Team-draft interleaving is fair: clicks that cannot see the teams favour none."""

import itertools
import random

import numpy as np
import pytest
from retrieval.errors import DataError
from retrieval.feedback.interleaving import load_head, team_draft

IDS = [f"item{n}" for n in range(8)]


def drafts(incumbent, challenger, k):
    """Yield every outcome of the coins, all equally likely."""
    for coins in itertools.product((True, False), repeat=k):
        tosses = iter(coins)
        yield team_draft(incumbent, challenger, k, lambda tosses=tosses: next(tosses))


def rankings():
    chance = random.Random(0)
    for _ in range(20):
        yield chance.sample(IDS, 8), chance.sample(IDS, 8)
    yield IDS, IDS
    yield IDS, IDS[::-1]


@pytest.mark.parametrize("k", [1, 2, 5, 8])
def test_each_team_gets_half_of_every_position_before_the_ids_are_seen(k):
    for incumbent, challenger in rankings():
        teams = np.array(
            [[team == "c" for team in teams] for _, teams in drafts(*(incumbent, challenger, k))]
        )
        assert teams.shape == (2**k, k)
        assert (teams.mean(axis=0) == 0.5).all()


def test_the_teams_take_turns_and_choose_their_best():
    for incumbent, challenger in rankings():
        for chosen, teams in drafts(incumbent, challenger, 6):
            assert len(chosen) == len(set(chosen)) == len(teams) == 6
            for start in range(0, 6, 2):
                assert set(teams[start : start + 2]) == {"c", "i"}
            for place, (id, team) in enumerate(zip(chosen, teams, strict=True)):
                ranking = {"c": challenger, "i": incumbent}[team]
                assert id == next(entry for entry in ranking if entry not in chosen[:place])


def test_equal_rankings_give_the_same_page_and_no_team_an_advantage():
    for chosen, _ in drafts(IDS, IDS, 5):
        assert chosen == IDS[:5]


def test_a_better_challenger_gets_more_of_the_clicks_on_what_is_right():
    right = set(IDS[:4])
    incumbent, challenger = IDS[::-1], IDS
    credit = [
        sum({"c": 1, "i": -1}[team] for id, team in zip(*draft, strict=True) if id in right)
        for draft in drafts(incumbent, challenger, 4)
    ]
    assert min(credit) > 0


def test_what_one_ranking_lacks_comes_from_the_other():
    for chosen, teams in drafts(IDS, IDS[:2], 6):
        assert set(chosen) == set(IDS[:6]) and teams.count("i") >= 4
    for chosen, _ in drafts(IDS[:3], IDS[1:3], 6):
        assert sorted(chosen) == IDS[:3]
    assert team_draft([], [], 5, lambda: True) == ([], "")


def test_a_head_is_checked_before_it_runs():
    base = np.ones((2, 3), np.float32)
    assert (load_head(None)(base) == base).all()
    for content in (b"", b"no graph", b"\x00" * 100):
        with pytest.raises(DataError, match="The head of the trial cannot be loaded"):
            load_head(content)
