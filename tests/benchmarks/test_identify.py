"""The benchmarks of identify and of likes measure what they say, against plain loops."""

import importlib
import sys

import numpy as np
import pytest
from retrieval.index.answering import rocchio


def clouds(rng, classes=24, size=6):
    import identify

    labels = np.repeat([f"class {n:02}" for n in range(classes)], size)
    centres = rng.normal(size=(classes, 8))
    vectors = np.repeat(centres, size, axis=0) + 0.4 * rng.normal(size=(len(labels), 8))
    return identify.photos_of(vectors.astype(np.float32), labels)


def test_the_nearest_two_classes():
    import identify

    indexed, queries = clouds(np.random.default_rng(0)), clouds(np.random.default_rng(1))
    labels, nearest, second = identify.nearest_classes(queries, indexed)
    for row, query in enumerate(queries.vectors):
        distances = np.linalg.norm(indexed.vectors.astype(float) - query, axis=1)
        label = indexed.labels[distances.argmin()]
        assert labels[row] == label
        assert nearest[row] == pytest.approx(distances.min())
        assert second[row] == pytest.approx(distances[indexed.labels != label].min())


def test_a_repetition_divides_and_counts():
    import identify

    rng = np.random.default_rng(0)
    photos = clouds(rng)
    sides = identify.divided(rng, photos)
    indexed, known, strangers = sides
    assert (len(indexed), len(known), len(strangers)) == (12 * 4, 12 * 2, 12 * 6)
    assert set(known.labels) == set(indexed.labels)
    assert not set(strangers.labels) & set(indexed.labels)
    # The checks compare with `Index.identify`.
    ((row, few),) = identify.repetition(sides, (None,), checks=True)
    assert few == {}  # twelve classes cannot tell a rate of .01
    assert row["strangers"] == 72 == sum(row["counts"].values())
    assert row["accepted"] == sum(row["by_class"].values())
    assert row["right"] + row["wrong"] + row["unknown"] == pytest.approx(1)
    best = identify.by_threshold(sides, 0.1)
    # The best threshold, by trying each.
    label, nearest, _ = identify.nearest_classes(known, indexed)
    others = identify.nearest_classes(strangers, indexed)[1]
    rights = [
        np.mean((nearest <= limit) & (label == known.labels))
        for limit in [*nearest, *others]
        if np.mean(others <= limit) <= 0.1
    ]
    assert best["best_right"] == pytest.approx(max(rights, default=0))


def test_copies_and_events():
    import identify

    rng = np.random.default_rng(0)
    sides = identify.divided(rng, clouds(rng))
    copied = identify.CASES["copies of a tenth of the items in other classes"](rng, sides)[0]
    count = len(sides[0])
    assert len(copied) == count + count // 10
    for row in range(count, len(copied)):
        original = copied.events[row]
        assert copied.labels[row] != copied.labels[original]
        gap = np.linalg.norm(copied.vectors[row] - copied.vectors[original])
        assert gap == pytest.approx(identify.own_distance(sides[0]) / 10, rel=1e-5)
    for case, same in (("queries of other events", False), ("queries of the same events", True)):
        moved = identify.CASES[f"events, {case}"](rng, sides)
        assert {event < identify.EVENTS for event in moved[2].events} == {same}
        assert {event < identify.EVENTS for event in moved[0].events} == {True}


def test_the_scores_of_likes():
    import likes

    rng = np.random.default_rng(0)
    vectors = rng.normal(size=(50, 6)).astype(np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    similar = vectors @ vectors.T
    score = likes.FORMULAS[likes.DEFAULT](similar[:3], similar[3:5])
    query = rocchio(vectors[:3], vectors[3:5], [(0, 6)])
    by_distance = np.linalg.norm(vectors - query, axis=1).argsort()
    assert (by_distance == (-score).argsort()).all()
    best = likes.best_score(similar[:3], similar[3:5])
    for item in range(50):
        like, dislike = max(similar[:3, item]), max(similar[3:5, item])
        assert best[item] == pytest.approx(like if like > dislike else -(dislike**2))


def test_precision_leaves_the_examples_out():
    import likes

    labels = np.repeat(["a", "b", "c", "d"], 5)
    vectors = np.repeat(np.eye(4), 5, axis=0)
    (row, *_) = likes.measured("made", vectors, labels, 4)
    for half, classes in likes.halves(labels).items():
        assert len(classes) == 2
        for examples in ((1, 0), (1, 1), (3, 3)):
            values = likes.precisions(vectors @ vectors.T, labels, classes, examples, 4)
            assert values[likes.DEFAULT] == dict.fromkeys(classes, 1), half
    assert (row["set"], row["half"], row["likes"], row["dislikes"]) == ("made", "choose", 1, 0)


@pytest.mark.parametrize("script", ["identify", "likes"])
def test_quick(script, monkeypatch, capsys):
    import bench

    module = importlib.import_module(script)
    monkeypatch.setattr(bench, "one_thread", lambda: None)
    monkeypatch.setattr(sys, "argv", [script, "--quick"])
    with pytest.raises(SystemExit) as ended:
        module.main()
    assert not ended.value.code
    rows = capsys.readouterr().out.splitlines()
    assert rows and all(row.startswith("{'set': 'digits'") for row in rows)
