"""Metrics against plain loops and against those of pytorch-metric-learning."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from metrics_by_loops import ALL, metrics_by_loops, random_items
from pytorch_metric_learning.utils.accuracy_calculator import AccuracyCalculator
from retrieval.errors import DataError, PluginError, RecipeError, RetrievalError
from retrieval.evaluation.evaluation import evaluate, resolve_metrics
from retrieval.evaluation.neighbors import Neighbors
from retrieval.host.plugins import load_plugins
from retrieval.metrics.recall_map_ndcg import (
    MAPAtR,
    MeanAveragePrecision,
    PrecisionAt,
    RecallAt,
    RPrecision,
    metric,
)
from sklearn.datasets import load_digits
from sklearn.metrics import average_precision_score


@pytest.fixture(scope="module")
def digits():
    codes, labels = load_digits(return_X_y=True)
    return codes.astype(np.float32), labels.astype(np.int64)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("parted", [False, True])
def test_against_the_definitions(parted, tied):
    codes, labels, _ = random_items(9, tied=tied)
    gallery = theirs = None
    if parted:
        gallery, theirs, _ = random_items(6, 50, tied, classes=6)
    expected, queries = metrics_by_loops(codes, labels, gallery, theirs)
    found = evaluate(codes, labels, gallery=gallery, gallery_labels=theirs, metrics=ALL)
    assert found.values == pytest.approx(expected, abs=1e-12)
    counts = (queries, 50 if parted else 70, 70 - queries)
    assert (found.queries, found.gallery, found.singletons) == counts
    assert 0 < queries < 70


def calculated(codes, labels, gallery=None, theirs=None):
    names = ["precision_at_1", "r_precision"]
    names += ["mean_average_precision_at_r", "mean_average_precision"]
    sides = (codes, labels, gallery, theirs)
    tensors = [None if each is None else torch.from_numpy(each) for each in sides]
    found = AccuracyCalculator(include=names, device=torch.device("cpu")).get_accuracy(*tensors)
    found["map_at_r"], found["map"] = found.pop(names[2]), found.pop(names[3])
    return found


def test_against_pytorch_metric_learning(digits):
    # of unit length, so that distances seldom tie
    codes = digits[0] / np.linalg.norm(digits[0], axis=1, keepdims=True)
    names = ["precision_at_1", "r_precision", "map_at_r", "map"]
    # the second has singletons, which both leave out
    for items in ((codes, digits[1]), random_items(1, 300)[:2]):
        ours = evaluate(*items, metrics=names).values
        assert ours == pytest.approx(calculated(*items), abs=1e-6)
    parts = (codes[:900], digits[1][:900], codes[900:], digits[1][900:])
    ours = evaluate(*parts[:2], gallery=parts[2], gallery_labels=parts[3], metrics=names).values
    assert ours == pytest.approx(calculated(*parts), abs=1e-6)


def test_ties_are_ordered_by_row():
    codes = np.zeros((6, 3), np.float32)
    labels = np.array([0, 1, 0, 1, 1, 0])
    # Query 0 sees 1 0 1 1 0: its first match is at rank 2. Query 1 sees 0 0 first, queries 2 to 5
    # see 0 1.
    found = evaluate(codes, labels, metrics=["recall_at_1", "recall_at_2"]).values
    assert found == {"recall_at_1": 2 / 6, "recall_at_2": 5 / 6}


def test_labels_are_compared_exactly(digits):
    codes, labels = digits[0][:200], digits[1][:200]
    names = ["recall_at_1", "map_at_r"]
    expected = evaluate(codes, labels, metrics=names).values
    for same in (
        labels + 2**24,
        labels + 2**62,
        -labels.astype(np.int8),
        labels.astype(np.uint64) + 2**63,
        [f"class {label}" for label in labels],
        labels.astype(str).astype(object),
        torch.from_numpy(labels),
    ):
        assert evaluate(codes, same, metrics=names).values == expected
    assert evaluate(torch.from_numpy(codes), labels, metrics=names).values == expected
    # In float32 these two are one class, and Recall@1 would be 1.
    near = np.array([2**24, 2**24 + 1, 2**24, 2**24 + 1])
    two = np.array([[0.0], [0.1], [5.0], [5.1]])
    assert evaluate(two, near, metrics=["recall_at_1"]).values == {"recall_at_1": 0}
    beyond = near.astype(np.uint64) + 2**63
    far = evaluate(two, near, gallery=two, gallery_labels=beyond, metrics=["recall_at_1"])
    assert far.queries == 0


def test_singletons_stay_as_distractors():
    codes = np.array([[0.0], [1.0], [1.4], [9.0]])
    found = evaluate(codes, ["a", "a", "lone", "other"], metrics=["recall_at_1", "recall_at_2"])
    # Item 1 is nearer to the lone item than to item 0.
    assert found.values == {"recall_at_1": 0.5, "recall_at_2": 1.0}
    assert (found.queries, found.singletons) == (2, 2)
    first, _, last = found.table().splitlines()
    assert first == "recall_at_1  0.5000"
    assert last.startswith("2 queries, gallery of 4; 2 left out")


def test_one_class_no_pair_at_all_and_a_gallery_smaller_than_k(digits):
    found = evaluate(digits[0][:50], np.zeros(50, int), metrics=ALL)
    assert set(found.values.values()) == {1.0}
    found = evaluate(digits[0][:50], np.arange(50), metrics=ALL)
    assert all(np.isnan(value) for value in found.values.values())
    assert (found.queries, found.singletons) == (0, 50)
    codes = np.array([[0.0], [1.0], [3.0]])
    found = evaluate(codes, [1, 1, 2], metrics=["recall_at_8", "precision_at_8"])
    assert found.values == {"recall_at_8": 1.0, "precision_at_8": 1 / 8}


def test_a_combiners_distance(digits):
    codes, labels = digits[0][:150].astype(np.float64), digits[1][:150]
    weights = torch.from_numpy(np.linspace(0, 3, 64))

    def weighted(a, b):
        return torch.cdist(a * weights, b * weights)

    values = evaluate(codes, labels, metrics=ALL, distance=weighted).values
    assert values == pytest.approx(metrics_by_loops(codes * weights.numpy(), labels)[0], abs=1e-12)
    assert values != evaluate(codes, labels, metrics=ALL).values


def test_a_metric_of_the_caller_and_its_depth(digits):
    shapes = set()

    class ReciprocalRank:
        depth = 30

        def __call__(self, matches, relevant):
            shapes.add((matches.shape[1], len(matches) == len(relevant)))
            return np.where(matches.any(1), 1 / (matches.argmax(1) + 1), 0.0)

    items = digits[0][:400], digits[1][:400]
    values = evaluate(*items, metrics={"rank": ReciprocalRank()}).values
    assert shapes == {(30, True)}
    assert 0.9 < values["rank"] < 1


def test_progress_reaches_the_end(digits, monkeypatch):
    steps = []
    monkeypatch.setattr(Neighbors, "block", lambda self, k: 500)
    # A metric that needs all ranks is searched in blocks.
    evaluate(*digits, metrics=["map"], progress=lambda *step: steps.append(step))
    assert steps == [("searching", done, 1797) for done in (500, 1000, 1500, 1797)]


def test_names_of_metrics():
    assert (RecallAt(7).depth, PrecisionAt(3).depth, metric("recall_at_12").depth) == (7, 3, 12)
    assert RPrecision().depth == MAPAtR().depth == "relevant"
    assert MeanAveragePrecision().depth == metric("map").depth == "all"
    for wrong, right in {
        "recal_at_4": "recall_at_4",
        "map@r": "map_at_r",
        "r_precison": "r_precision",
        "precision_1": "precision_at_1",
    }.items():
        with pytest.raises(RetrievalError, match=f"no metric '{wrong}'. Did you mean '{right}'"):
            metric(wrong)
    with pytest.raises(RetrievalError, match="recall_at_0 looks at no neighbour"):
        metric("recall_at_0")


def test_the_name_of_a_metric_shows_its_parameters(digits):
    wanted = ["recall_at_4", "core.recall_at", {"name": "core.recall_at", "k": 4}]
    wanted += [{"name": "recall_at", "k": 12}, "map"]
    found = resolve_metrics(wanted, load_plugins(), always=("map_at_r",))
    names = ["recall_at_4", "core.recall_at", "core.recall_at(k=4)", "recall_at(k=12)"]
    assert list(found) == [*names, "map", "map_at_r"]
    values = evaluate(digits[0][:300], digits[1][:300], metrics=found).values
    assert values["core.recall_at(k=4)"] == values["recall_at_4"] > values["core.recall_at"]
    assert found["recall_at(k=12)"].depth == 12
    says = r"kk: core\.recall_at has no such parameter .*Did you mean 'k'"
    with pytest.raises(RecipeError, match=says):
        resolve_metrics([{"name": "core.recall_at", "kk": 4}], load_plugins())


class Reciprocal:
    """1 / the rank of the first match, or 0."""

    depth = "all"

    def __call__(self, matches, relevant):
        return np.where(matches.any(1), 1 / (matches.argmax(1) + 1), 0)


@pytest.mark.parametrize(
    ("metrics", "names"),
    [
        ("map_at_r", ["map_at_r"]),
        ({"name": "core.recall_at", "k": 4}, ["core.recall_at(k=4)"]),
        (Reciprocal(), ["Reciprocal"]),
        (["core.map", Reciprocal(), RecallAt(5)], ["core.map", "Reciprocal", "RecallAt"]),
        ({"mrr": Reciprocal(), "r5": RecallAt(5)}, ["mrr", "r5"]),
    ],
)
def test_metrics_are_names_tables_and_objects(digits, metrics, names):
    evaluation = evaluate(digits[0][:200], digits[1][:200], metrics=metrics)
    assert list(evaluation.values) == names
    recalls = evaluate(digits[0][:200], digits[1][:200], metrics=["recall_at_1", "recall_at_5"])
    for name, value in evaluation.values.items():
        if name in ("Reciprocal", "mrr"):
            assert recalls.values["recall_at_1"] <= value <= 1
        if name in ("RecallAt", "r5"):
            assert value == recalls.values["recall_at_5"]


@pytest.mark.parametrize(
    ("metrics", "error", "says"),
    [
        ([RecallAt(1), RecallAt(5)], DataError, "Two metrics have the name RecallAt. Pass a dict"),
        (MAPAtR, PluginError, "metric MAPAtR is a class, MAPAtR; pass an object of it"),
        (average_precision_score, PluginError, "metric average_precision_score is .* depth = None"),
        ({"mine": Reciprocal().__call__}, PluginError, "metric mine is .* depth = None"),
    ],
)
def test_what_is_no_metric_is_named(metrics, error, says):
    with pytest.raises(error, match=says):
        evaluate(np.eye(4), [0, 0, 1, 1], metrics=metrics)


def test_a_metric_of_nan_is_never_averaged():
    class Broken(Reciprocal):
        def __call__(self, matches, relevant):
            return np.where(relevant > 1, np.nan, 1.0)

    with pytest.raises(PluginError, match=r"metric broken gave NaN .* for 3 of 5 queries"):
        evaluate(np.eye(5), [0, 0, 0, 1, 1], metrics={"broken": Broken()})


def test_without_a_query_there_is_no_score():
    evaluation = evaluate(np.eye(4), ["a", "b", "c", "d"])
    assert np.isnan(list(evaluation.values.values())).all() and evaluation.queries == 0
    says = "0 queries, gallery of 4; 4 left out: no other item of their class. Without a query"
    assert says in repr(evaluation)
    assert "Without a query" not in repr(evaluate(np.eye(4), ["a", "b", "c", "c"]))


def test_the_core_plugin_offers_what_the_short_names_mean():
    factories = load_plugins().factories("metrics")
    for name, full in {
        "map": "core.map",
        "map_at_r": "core.map_at_r",
        "r_precision": "core.r_precision",
        "recall_at_1": "core.recall_at",
        "precision_at_1": "core.precision_at",
    }.items():
        assert factories[full].make is type(metric(name))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"gallery": np.ones((2, 2))}, "come together"),
        ({"gallery": np.ones((2, 2)), "gallery_labels": ["a", "b"]}, "two kinds"),
        ({"gallery": np.ones((2, 3)), "gallery_labels": [1, 2]}, "2 columns"),
        ({"codes": np.full((3, 2), np.nan)}, "diverged"),
        ({"codes": np.ones(5), "labels": [1]}, r"shape \(5,\): codes must be a matrix"),
        ({"codes": torch.ones(5), "labels": [1]}, r"codes have shape \(5,\)"),
        ({"gallery": np.ones(2), "gallery_labels": [1]}, r"gallery codes have shape \(2,\)"),
    ],
)
def test_codes_and_labels_that_do_not_fit_are_refused(change, says):
    given = {"codes": np.ones((3, 2)), "labels": [1, 1, 2]} | change
    with pytest.raises(DataError, match=says):
        evaluate(**given)
