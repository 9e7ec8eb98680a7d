"""A model card shows what benchmarks/cards.py writes from kept runs of at least five seeds."""

from pathlib import Path

import numpy as np
import pytest
from scipy import stats

MODELS = Path(__file__).parents[2] / "models"
CARDS = [
    path.parent.name
    for path in sorted(MODELS.glob("*/README.md"))
    if "<!-- results: benchmarks/cards.py -->" in path.read_text(encoding="utf-8")
]


@pytest.mark.parametrize("name", CARDS)
def test_the_card_shows_the_kept_runs(name):
    import cards

    text = (MODELS / name / "README.md").read_text(encoding="utf-8")
    block = cards.BLOCK.search(text)
    assert block is not None and block[0] == cards.block(name)


@pytest.mark.parametrize("name", CARDS)
def test_a_card_has_at_least_five_seeds(name):
    import cards

    own = cards.CARDS[name][0]
    assert sum(cards.key(own, seed) in cards.kept() for seed in range(99)) >= 5


def test_every_measured_card_has_a_block():
    import cards

    assert set(CARDS) == set(cards.CARDS)


def test_intervals_follow_students_distribution():
    from bench import half_width, interval

    values = [0.931, 0.947, 0.939, 0.95, 0.928]
    low, high = stats.ttest_1samp(values, 0).confidence_interval(0.95)
    assert np.mean(values) - half_width(values) == pytest.approx(low)
    assert np.mean(values) + half_width(values) == pytest.approx(high)
    assert interval(values) == ".939 ± .012" and interval([-0.004], sign=True) == "−.004"
