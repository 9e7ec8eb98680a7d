"""Metrics of published protocols, against the authors' definitions in plain loops."""

from __future__ import annotations

import math

import numpy as np
import protocols_by_loops as loops
import pytest
from metrics_by_loops import nearest_by_loops
from retrieval.errors import DataError, RetrievalError
from retrieval.evaluation.evaluation import Judged, evaluate
from retrieval.evaluation.neighbors import Exclusion

from retrieval_sets.protocols import (
    BAKS,
    BAUS,
    GPR1200AP,
    MetAccuracy,
    MetGAP,
    MicroAP,
    OxfordAP,
    OxfordPrecisionAt,
)

ITEMS = 60


def unit(random, count):
    codes = random.normal(size=(count, 4)).astype(np.float32)
    return codes / np.linalg.norm(codes, axis=1, keepdims=True)


def judged_sides(seed, queries=12, tied=False):
    """Return codes of both sides and, by query, disjoint sets of relevant and ignored rows."""
    random = np.random.default_rng(seed)
    query, gallery = unit(random, queries), unit(random, ITEMS)
    if tied:
        query, gallery = query.round(), gallery.round()
    sets = []
    for number in range(queries):
        order = random.permutation(ITEMS).tolist()
        size = number % 5  # some queries have no relevant item
        sets.append((set(order[:size]), set(order[size : size + 3 * number])))
    return query, gallery, sets


def judged(sets):
    keys = [f"item {row}" for row in range(ITEMS)]
    relevant, ignored = (
        [[keys[row] for row in rows] for rows in side] for side in zip(*sets, strict=True)
    )
    return Judged(relevant, keys, ignored)


def evaluated(query, gallery, sets, metrics):
    """Evaluate by lists; every label is different, so that only the lists can match."""
    return evaluate(
        query,
        [f"q{row}" for row in range(len(query))],
        gallery=gallery,
        gallery_labels=[f"g{row}" for row in range(len(gallery))],
        metrics=metrics,
        relevance=judged(sets),
    )


def orders(query, gallery):
    return [[row for _, row in nearest_by_loops(code, gallery, range(ITEMS))] for code in query]


@pytest.mark.parametrize("tied", [False, True])
def test_junk_leaves_the_ranking_of_oxford_and_paris(tied):
    query, gallery, sets = judged_sides(1, tied=tied)
    metrics = {"ap": OxfordAP(), "p1": OxfordPrecisionAt(1), "p5": OxfordPrecisionAt(5)}
    actual = evaluated(query, gallery, sets, {**metrics, "p10": OxfordPrecisionAt()})
    expected = [
        loops.revisited(order, *rows, [1, 5, 10])
        for order, rows in zip(orders(query, gallery), sets, strict=True)
        if rows[0]
    ]
    assert actual.queries == len(expected) == 9 and actual.singletons == 3
    mean = np.mean([[average, *precisions] for average, precisions in expected], axis=0)
    assert list(actual.values.values()) == pytest.approx(mean.tolist(), abs=1e-12)


@pytest.mark.parametrize("k", [1, 3, 100])
def test_map_at_k_divides_by_the_smaller_of_r_and_k(k):
    query, gallery, sets = judged_sides(2)
    actual = evaluated(query, gallery, [(rows, set()) for rows, _ in sets], f"map_at_{k}")
    expected = [
        loops.map_at(order, rows, k)
        for order, (rows, _) in zip(orders(query, gallery), sets, strict=True)
        if rows
    ]
    assert actual.values[f"map_at_{k}"] == pytest.approx(np.mean(expected), abs=1e-12)
    with pytest.raises(RetrievalError, match="map_at_0 looks at no neighbour"):
        evaluated(query, gallery, sets, "map_at_0")


@pytest.mark.parametrize("tied", [False, True])
def test_micro_ap_ranks_the_pairs_of_all_queries(tied):
    query, gallery, sets = judged_sides(3, tied=tied)
    actual = evaluated(query, gallery, sets, {"uap": MicroAP(4)})
    pairs = []
    for code, (relevant, junk) in zip(query, sets, strict=True):
        seen = [row for row in range(ITEMS) if row not in junk]
        near = nearest_by_loops(code, gallery, seen)[:4]
        pairs += [(-math.sqrt(squared), row in relevant) for squared, row in near]
    total = sum(len(relevant) for relevant, _ in sets)
    assert actual.values["uap"] == pytest.approx(loops.micro_ap(pairs, total), abs=1e-12)
    assert "uap" not in actual.per_query


def known_and_new(seed=4):
    """Return codes and class numbers of 40 queries, whose classes the gallery lacks in part."""
    random = np.random.default_rng(seed)
    centres = unit(random, 12)
    query_class, item_class = random.integers(0, 12, 40), random.integers(0, 8, ITEMS)
    query, gallery = (
        centres[classes] + random.normal(scale=0.4, size=(len(classes), 4))
        for classes in (query_class, item_class)
    )
    unit_length = (x / np.linalg.norm(x, axis=1, keepdims=True) for x in (query, gallery))
    return *unit_length, query_class, item_class


@pytest.mark.parametrize("temperature", [0.1, 15.0, 500.0])
@pytest.mark.parametrize("k", [1, 7])
def test_the_classifier_of_the_met_dataset(k, temperature):
    query, gallery, query_class, item_class = known_and_new()
    metrics = {
        "gap": MetGAP(k, temperature),
        "gap-": MetGAP(k, temperature, distractors=False),
        "acc": MetAccuracy(k),
    }
    actual = evaluate(
        query, query_class, gallery=gallery, gallery_labels=item_class, metrics=metrics
    )
    classes = len(set(item_class.tolist()))
    known, pairs, without = [], [], []
    for code, truth in zip(query, query_class.tolist(), strict=True):
        rows = [row for _, row in nearest_by_loops(code, gallery, range(ITEMS))[:k]]
        similarities = [float(code @ gallery[row]) for row in rows]
        labels = [int(item_class[row]) for row in rows]
        winner, confidence = loops.met_prediction(similarities, labels, classes, temperature)
        pairs.append((confidence, winner == truth))
        if truth in item_class:
            without.append(pairs[-1])
            known.append(winner == truth)
    assert 0 < len(known) < len(pairs)
    assert actual.values["gap"] == pytest.approx(loops.micro_ap(pairs, len(known)), abs=1e-9)
    assert actual.values["gap-"] == pytest.approx(loops.micro_ap(without, len(known)), abs=1e-9)
    assert actual.values["acc"] == pytest.approx(np.mean(known), abs=1e-12)


def test_known_and_new_animals_are_balanced_over_individuals():
    query, gallery, query_class, item_class = known_and_new(5)
    metrics = {"baks": BAKS(0.35), "baus": BAUS(0.35)}
    actual = evaluate(
        query, query_class, gallery=gallery, gallery_labels=item_class, metrics=metrics
    )
    answers = []
    for code in query:
        squared, row = nearest_by_loops(code, gallery, range(ITEMS))[0]
        answers.append(int(item_class[row]) if math.sqrt(squared) <= 0.35 else "new")
    for name, chosen in (("baks", True), ("baus", False)):
        rows = [i for i, truth in enumerate(query_class) if (truth in item_class) == chosen]
        right = [answers[i] == (query_class[i] if chosen else "new") for i in rows]
        expected = loops.balanced([int(query_class[i]) for i in rows], right)
        assert 0 < expected < 1 and actual.values[name] == pytest.approx(expected, abs=1e-12)


def test_gpr1200_keeps_the_query_in_its_own_ranking():
    random = np.random.default_rng(6)
    codes, labels = unit(random, ITEMS), np.arange(ITEMS) % 7
    actual = evaluate(codes, labels, metrics={"ap": GPR1200AP()})
    expected = []
    for i, code in enumerate(codes):
        order = [row for _, row in nearest_by_loops(code, codes, range(ITEMS))]
        assert order[0] == i
        relevant = {row for row in range(ITEMS) if labels[row] == labels[i]}
        expected.append(loops.map_at(order, relevant, ITEMS))
    assert actual.values["ap"] == pytest.approx(np.mean(expected), abs=1e-12)


def test_pooled_metrics_beside_others_and_by_group():
    query, gallery, query_class, item_class = known_and_new()
    actual = evaluate(
        query,
        query_class,
        gallery=gallery,
        gallery_labels=item_class,
        metrics={"first": BAKS(9.0), "recall": OxfordAP(), "last": MicroAP()},
        by=[str(number % 2) for number in range(len(query))],
    )
    assert list(actual.values) == ["first", "recall", "last"]
    assert set(actual.groups["0"]) == {"recall", "queries"}


def test_wrong_lists():
    keys = ["a", "b"]
    with pytest.raises(DataError, match="name 1 items that are not in the gallery: x"):
        Judged([["a"], ["x"]], keys)
    with pytest.raises(DataError, match="Query 1: b is listed as relevant and as ignored"):
        Judged([[], ["b"]], keys, [[], ["a", "b"]])
    codes = np.eye(2)
    relevance = Judged([["b"], ["a"]], keys)
    with pytest.raises(DataError, match="cannot be combined"):
        evaluate(codes, keys, relevance=relevance, exclude=Exclusion(["x", "y"]))
    assert evaluate(codes, keys, relevance=relevance, metrics="map").values == {"map": 1.0}
