"""Team-draft interleaving is fair: clicks that cannot see the coins favour no ranking."""

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
def test_no_place_has_a_credit_on_average_before_the_ids_are_seen(k):
    for incumbent, challenger in rankings():
        credits = np.array([credits for _, credits in drafts(incumbent, challenger, k)])
        assert credits.shape == (2**k, k)
        # Whatever came before: given the first coins, the mean of the later places is zero, too.
        for known in range(k):
            blocks = credits.reshape(2**known, -1, k)
            assert abs(blocks[:, :, 2 * known :].mean(axis=1)).max(initial=0) < 1e-12


def test_the_rankings_take_turns_and_choose_their_best():
    for incumbent, challenger in rankings():
        pages = set()
        for coins in itertools.product((True, False), repeat=3):
            chosen = []
            for coin in coins:
                for ranking in [(challenger, incumbent), (incumbent, challenger)][not coin]:
                    chosen.append(next(id for id in ranking if id not in chosen))
            tosses = iter(coins)
            assert team_draft(incumbent, challenger, 6, lambda t=tosses: next(t))[0] == chosen
            pages.add(tuple(chosen))
        assert len(pages) == 1 or incumbent != challenger


def test_credits_are_half_of_how_much_more_the_challenger_raises_a_hit_than_the_other_one():
    incumbent, challenger = ["a", "b", "c", "d"], ["d", "a", "b", "c"]
    # "d" rises by three places of four, each other falls by one. Then "a" is next in both.
    assert team_draft(incumbent, challenger, 3, lambda: True) == (["d", "a", "b"], (0.5, -0.5, 0.0))
    assert team_draft(incumbent, challenger, 3, lambda: False) == (
        ["a", "d", "b"],
        (-0.5, 0.5, 0.0),
    )


def test_equal_rankings_give_the_same_page_and_no_credit():
    for chosen, credits in drafts(IDS, IDS, 5):
        assert (chosen, credits) == (IDS[:5], (0,) * 5)


def test_a_better_challenger_gets_credit_for_clicks_on_what_is_right():
    right = set(IDS[:4])
    incumbent, challenger = IDS[::-1], IDS
    credit = [
        sum(credit for id, credit in zip(*draft, strict=True) if id in right)
        for draft in drafts(incumbent, challenger, 4)
    ]
    assert min(credit) > 0


def test_what_one_ranking_lacks_comes_from_the_other():
    for chosen, credits in drafts(IDS, IDS[:2], 6):
        assert set(chosen) == set(IDS[:6]) and len(credits) == 6
    for chosen, credits in drafts(IDS[:3], IDS[1:3], 6):
        assert sorted(chosen) == IDS[:3] and len(credits) == 3
    assert team_draft([], [], 5, lambda: True) == ([], ())


def test_a_head_is_checked_before_it_runs():
    base = np.ones((2, 3), np.float32)
    assert (load_head(None)(base) == base).all()
    for content in (b"", b"no graph", b"\x00" * 100):
        with pytest.raises(DataError, match="The head of the trial cannot be loaded"):
            load_head(content)
