"""The simulated users of the benchmark of feedback, and its formulas for one query."""

from pathlib import Path

import numpy as np
import pytest


@pytest.fixture
def users():
    import feedback

    vectors, labels, taste = feedback.loaded("digits", Path())
    rows = np.arange(0, 1797, 2)
    return lambda kind: feedback.Users(kind, vectors, labels, taste, rows, 0)


def test_a_formula_without_weight_finds_what_is_next(users):
    import feedback

    plain = users("hidden")
    items = plain.vectors[plain.indexed]
    for query in range(1, 101, 20):
        second = feedback._second(plain, items, query, "qdrant", 0.0)
        order = np.argsort(((items - plain.vectors[query]) ** 2).sum(axis=1), kind="stable")
        rows = plain.indexed[order[10:20]]
        assert second == np.mean(plain.taste[rows] == plain.taste[query])


def test_tastes(users):
    taste = users("hidden")
    rows = np.arange(50)
    np.testing.assert_array_equal(taste.relevant(7, rows), taste.taste[rows] == taste.taste[7])
    drift = users("drift")
    assert (drift.relevant(7, rows) == taste.relevant(7, rows)).all()
    drift.clicks = 1000
    assert (drift.relevant(7, rows) == (drift.labels[rows] == drift.labels[7])).all()
    present = users("present")
    assert present.relevant(8, present.indexed).sum() == 20
    assert not present.relevant(8, np.array([8])).any()


def test_hostile_users_are_three_in_ten(users):
    hostile = users("hostile")
    queries = [hostile.query() for _ in range(3000)]
    assert np.mean([user < hostile.hostile for user, _ in queries]) == pytest.approx(0.3, abs=0.03)
    copies = {query for user, query in queries if user < hostile.hostile and user % 3 == 2}
    assert len(copies) == 1
    rows = hostile.indexed[:10]
    # User 0 inverts: with many pages, what does not fit is clicked.
    clicks = sum(
        len(set(hostile.clicked(0, 0, rows)) & set(rows[hostile.relevant(0, rows)]))
        for _ in range(50)
    )
    others = sum(
        len(set(hostile.clicked(0, 0, rows)) & set(rows[~hostile.relevant(0, rows)]))
        for _ in range(50)
    )
    assert others > clicks
