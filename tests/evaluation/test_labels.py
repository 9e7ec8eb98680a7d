"""Labels: missing ones and two kinds are refused, all others are compared exactly."""

from __future__ import annotations

import decimal
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from array_rows import ArrayRows
from retrieval import evaluate, plot
from retrieval.errors import DataError
from retrieval.evaluation.evaluation import Levels, Tags, cluster_metrics
from retrieval.evaluation.neighbors import Exclusion
from retrieval.evaluation.pairwise import pairwise
from retrieval.evaluation.verification import verification
from retrieval.model.labels import read_labels

NAN = float("nan")
CODES = np.random.default_rng(0).normal(size=(6, 3)).astype(np.float32)
MISSING: dict[str, Any] = {
    "NaN beside text": ["a", NAN, "a", NAN, "b", "b"],
    "None beside text": ["a", None, "a", None, "b", "b"],
    "NaN beside numbers": [1, NAN, 1, NAN, 2, 2],
    "array of floats": np.array([1, NAN, 1, NAN, 2, 2]),
    "array of objects": np.array(["a", NAN, "a", None, "b", "b"], object),
    "NumPy's NaN": [np.str_("a"), np.float32("nan"), "a", np.float64("nan"), "b", "b"],
    "not a time": ["a", np.datetime64("NaT"), "a", np.datetime64("NaT"), "b", "b"],
    "decimal": ["a", decimal.Decimal("NaN"), "a", decimal.Decimal("NaN"), "b", "b"],
    "masked array": np.ma.masked_array([1, 9, 1, 9, 2, 2], [0, 1, 0, 1, 0, 0]),
    "tensor": torch.tensor([1, NAN, 1, NAN, 2, 2]),
}
WHERE = r"2 of 6 (gallery )?labels are missing .* rows 1, 3, counted from 0\. Leave those items out"
TWO_KINDS: dict[str, Any] = {
    "list": ["1", 1, "2", 2, "3", 3],
    "objects": np.array(["1", 1, "2", 2, "3", 3], object),
    "NumPy's": [np.str_("1"), np.int64(1), "2", 2, "3", 3],
}
TAKERS: dict[str, Callable[[Any], Any]] = {
    "evaluate": lambda labels: evaluate(CODES, labels),
    "gallery": lambda labels: evaluate(CODES, ["a", "b"] * 3, gallery=CODES, gallery_labels=labels),
    "pairwise": lambda labels: pairwise(ArrayRows(CODES), labels),
    "clusters": lambda labels: cluster_metrics(CODES, labels),
    "map": lambda labels: plot.map(CODES, labels),
}
takers = pytest.mark.parametrize("take", TAKERS.values(), ids=TAKERS)


@takers
@pytest.mark.parametrize("labels", MISSING.values(), ids=MISSING)
def test_a_missing_label_is_refused_with_its_row(take, labels):
    with pytest.raises(DataError, match=WHERE):
        take(labels)


@takers
@pytest.mark.parametrize("labels", TWO_KINDS.values(), ids=TWO_KINDS)
def test_text_beside_numbers_is_refused_with_a_row_of_each(take, labels):
    says = r"two kinds, .* row 0 is '1' \(str\) and row 1 is 1 \(int\)"
    with pytest.raises(DataError, match=says):
        take(labels)


@pytest.mark.parametrize("kind", ["object", "str", "string", "category", "Int64", "Float64"])
def test_labels_of_pandas_are_read_by_the_same_rule(kind):
    pandas = pytest.importorskip("pandas")
    numbers = kind in ("Int64", "Float64")
    whole = [1, 1, 1, 1, 2, 2] if numbers else ["a", "a", "a", "a", "b", "b"]
    gaps = [None if row in (1, 3) else label for row, label in enumerate(whole)]
    assert evaluate(CODES, pandas.Series(whole, dtype=kind)).values == evaluate(CODES, whole).values
    with pytest.raises(DataError, match=WHERE):
        evaluate(CODES, pandas.Series(gaps, dtype=kind))
    for labels in (list(pandas.Series(gaps, dtype=kind)), ["a", pandas.NaT, "a", pandas.NA, *"bb"]):
        with pytest.raises(DataError, match=WHERE):
            evaluate(CODES, labels)


@pytest.mark.parametrize(
    "labels",
    [
        ["0", "0", "1", "1", "2", "2"],
        tuple("001122"),
        np.array(list("001122"), object),
        [0, 0, 1, 1, 2, 2],
        [0.0, 0.0, 1.0, 1.0, 2.0, 2.0],
        np.array([0, 0, 1, 1, 2, 2], np.float32),
        torch.tensor([0, 0, 1, 1, 2, 2]),
        list(torch.tensor([0, 0, 1, 1, 2, 2])),
        [np.int8(0), np.uint64(0), 1, 1, 2, 2],
        np.ma.masked_array([0, 0, 1, 1, 2, 2], False),
        {row: row // 2 for row in range(6)}.values(),
    ],
    ids=repr,
)
def test_complete_labels_of_any_type_are_read_alike(labels):
    assert evaluate(CODES, labels).values == evaluate(CODES, [0, 0, 1, 1, 2, 2]).values


LARGE = [[2**power, 2**power + 1] for power in (53, 62, 63, 70)]


@pytest.mark.parametrize("labels", [*LARGE, [-1, 2**63], [-1, 2**70]])
def test_large_whole_numbers_stay_apart(labels):
    assert [int(label) for label in read_labels(labels)] == labels


@pytest.mark.parametrize(
    ("labels", "says"),
    [
        ([1.5, 2, 3, 1, 1, 1], r"whole numbers or text.*row 0 is 1\.5 \(float\)"),
        ([1, 2, np.inf, 1, 1, 1], r"row 2 is inf"),
        ([1, 2.0**60, 1, 1, 1, 1], r"row 1 is 1\.15"),
        ([(1, 2)] * 6, r"row 0 is \(1, 2\) \(tuple\)"),
        ([b"a"] * 6, r"row 0 is b'a' \(bytes\)"),
        (np.array(["2026-01-01"] * 6, "datetime64[D]"), r"row 0 is datetime\.date"),
        (np.ones((6, 1), int), r"shape \(6, 1\)"),
        ("aabbcc", r"shape \(\)"),
        (None, r"shape \(\)"),
        ([0, 0, 1, 1, -1, -1], r"labels are -1 in 2 of 6 rows, .* Leave those items out"),
        (torch.tensor([-1, 0, 0, 1, 1, -1]), "labels are -1 in 2 of 6 rows"),
        ([1, 2], "6 codes and 2 labels: one label per item"),
    ],
    ids=repr,
)
def test_a_value_that_is_no_label_is_shown(labels, says):
    with pytest.raises(DataError, match=says):
        evaluate(CODES, labels)


def test_without_items_nothing_is_evaluated():
    with pytest.raises(DataError, match="There are 0 queries"):
        evaluate(CODES[:0], [])
    with pytest.raises(DataError, match="6 queries and 0 gallery items"):
        evaluate(CODES, [1] * 6, gallery=CODES[:0], gallery_labels=[])
    with pytest.raises(DataError, match="There are 0 queries"):
        pairwise(ArrayRows(CODES[:0]), [])


@pytest.mark.parametrize("missing", [NAN, None, np.datetime64("NaT")], ids=repr)
def test_a_missing_group_is_refused(missing):
    labels = ["a", "a", "b", "b", "c", "c"]
    assert set(evaluate(CODES, labels, by=["v", "w"] * 3).groups) == {"v", "w"}
    says = r"3 of 6 values to group by are missing .* rows 1, 3, 5, counted from 0"
    with pytest.raises(DataError, match=says):
        evaluate(CODES, labels, by=["v", missing] * 3)
    with pytest.raises(DataError, match="values to group by are of two kinds"):
        evaluate(CODES, labels, by=["1", 1] * 3)


@pytest.mark.parametrize("missing", [NAN, np.float32("nan"), None, ""], ids=repr)
def test_a_missing_value_to_exclude_by_hides_nothing(missing):
    labels = [0, 0, 1, 1, 2, 2]
    shown = evaluate(CODES, labels).values
    assert evaluate(CODES, labels, exclude=Exclusion([missing] * 6)).values == shown
    assert evaluate(CODES, labels, exclude=Exclusion(np.full(6, missing, object))).values == shown


def test_a_missing_level_equals_no_other():
    rows = np.arange(3)
    one, other = (Levels([["a", "b", "c"], [missing] * 3])(rows) for missing in (NAN, None))
    assert (one == other).all()


@pytest.mark.parametrize("tags", [["ab", "b"], [["ab"], NAN], [["ab"], None], [["ab"], [NAN]]])
def test_tags_that_are_no_lists_of_text_are_refused(tags):
    says = r"query labels in row [01] are .*give each item a list of strings"
    with pytest.raises(DataError, match=says):
        Tags(tags)


@pytest.mark.parametrize(
    ("same", "says"),
    [
        ([True, NAN, False, False], r"1 of 4 pairs' kinds is missing \(None or NaN\), in row 1"),
        ([True, None, False, False], "in row 1"),
        ([1.0, NAN, 0.0, 0.0], "in row 1"),
        (["True", "False", "True", "False"], "row 0 is 'True'"),
        ([1, -1, 1, -1], "row 1 is -1"),
        ([1, 0.5, 0, 0], r"row 1 is 0\.5"),
    ],
)
def test_a_pair_is_the_same_or_different(same, says):
    with pytest.raises(DataError, match=says):
        verification([0.1, 0.2, 0.3, 0.4], same, [0, 1, 0, 1])


def test_kinds_of_pairs_are_read_as_truth_or_as_one_and_zero():
    distances, folds = [0.1, 0.2, 0.3, 0.4], [0, 1, 0, 1]
    expected = verification(distances, [True, True, False, False], folds).values
    whole = [True, True, False, False]
    same_kinds = ([1, 1, 0, 0], [1.0, 1.0, 0.0, 0.0], np.array(whole, object), torch.tensor(whole))
    for same in same_kinds:
        assert verification(distances, same, folds).values == expected


@pytest.mark.parametrize("folds", [[0, NAN, 0, 1], ["a", NAN, "a", "b"], ["a", None, "a", "b"]])
def test_a_missing_fold_is_refused(folds):
    says = r"1 of 4 folds is missing .* row 1, counted from 0\. Leave those pairs out"
    with pytest.raises(DataError, match=says):
        verification([0.1, 0.2, 0.3, 0.4], [True, True, False, False], folds)
