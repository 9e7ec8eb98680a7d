from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from refusals import refusal
from retrieval.data.datasets import ArrayDataset
from retrieval.data.splits import make_splits
from retrieval.errors import DataError
from retrieval.recipe.tables import Split


def dataset(labels: list[str], **columns: Any) -> ArrayDataset:
    return ArrayDataset(np.zeros((len(labels), 4), np.float32), labels, kind="features", **columns)


def each(names: str, count: int) -> list[str]:
    return [name for name in names.split() for _ in range(count)]


def test_natural_order_of_classes():
    splits = make_splits(dataset(each("c10 c2 c1 c9", 6)), Split(by="class"))
    assert splits.classes == ["c1", "c2", "c9", "c10"]
    assert splits.train_classes == ["c1", "c2"]
    assert {splits.classes[i] for i in splits.labels[splits.query]} == {"c9", "c10"}


@pytest.mark.parametrize(
    ("count", "test", "held"), [(200, 0.5, 100), (11, 0.5, 6), (10, 0.3, 3), (3, 0.4, 1)]
)
def test_by_class_holds_out_the_last_classes(count, test, held):
    labels = [str(i) for i in range(count) for _ in range(4)]
    splits = make_splits(dataset(labels), Split(by="class", test=test))
    tested = {int(labels[i]) for i in splits.query}
    assert tested == set(range(count - held, count))
    assert {int(labels[i]) for i in [*splits.train, *splits.validation]} == set(range(count - held))
    assert splits.gallery is None


def test_by_class_with_named_classes():
    splits = make_splits(dataset(each("1 2 3 4", 5)), Split(by="class", test=[3, "1"]))
    assert splits.train_classes == ["2", "4"]
    unknown = Split(by="class", test=["dgo", "cat", "zebra"])
    text = refusal(DataError, make_splits, dataset(each("cat dog cow", 5)), unknown)
    for words in ("no class 'dgo'. Did you mean 'dog'?", "no class 'zebra'", "cat, cow, dog"):
        assert words in text


@given(
    st.lists(st.integers(0, 6), min_size=1, max_size=120),
    st.floats(0.05, 0.9),
    st.floats(0.0, 0.9),
    st.sampled_from(["item", "class"]),
    st.integers(-5, 5),
)
@settings(max_examples=150, deadline=None)
def test_sides_never_overlap(numbers, test, part, by, seed):
    labels = [f"class {n}" for n in numbers]
    split = Split(by=by, test=test, validation=part, seed=seed)
    try:
        splits = make_splits(dataset(labels), split)
    except DataError:
        return  # a side is too small
    again = make_splits(dataset(labels), split)
    parts = []
    for side in ("train", "validation", "query"):
        np.testing.assert_array_equal(getattr(splits, side), getattr(again, side))
        parts += getattr(splits, side).tolist()
    assert sorted(parts) == list(range(len(labels)))
    trained = Counter(labels[i] for i in splits.train)
    for name, count in Counter(labels[i] for i in splits.validation).items():
        assert count >= 2 and trained[name] >= 2
    if by == "class":
        tested = {labels[i] for i in splits.query}
        assert not tested & {labels[i] for i in [*splits.train, *splits.validation]}
    names = [splits.train_classes[k] for k in splits.train_labels]
    assert names == [labels[i] for i in splits.train]
    assert set(splits.train_labels.tolist()) == set(range(len(splits.train_classes)))


def test_by_item_is_stratified_and_follows_the_seed():
    labels = each("a b", 100) + each("c", 10)
    options = {"by": "item", "test": 0.3}
    split, other, unvalidated = (
        make_splits(dataset(labels), Split(**options, **more))
        for more in ({"validation": 0.2}, {"validation": 0.2, "seed": 1}, {"validation": 0.0})
    )
    assert Counter(labels[i] for i in split.query) == {"a": 30, "b": 30, "c": 3}
    assert Counter(labels[i] for i in split.validation) == {"a": 14, "b": 14, "c": 2}
    assert split.query.tolist() != other.query.tolist()
    # The validation part does not change the test part.
    np.testing.assert_array_equal(split.query, unvalidated.query)
    assert not len(unvalidated.validation)


def test_validation_by_class():
    labels = each("a b c d e f g h", 6)
    split = make_splits(dataset(labels), Split(by="class", validation=0.5, validation_by="class"))
    assert len(split.train_classes) == 2
    assert not set(split.labels[split.train]) & set(split.labels[split.validation])
    rounded = make_splits(  # 2.6 of 13 training classes
        dataset(each("a b c d e f g h i j k l m n", 3)),
        Split(by="class", test=["n"], validation=0.2, validation_by="class"),
    )
    assert len(set(rounded.labels[rounded.validation])) == 3
    with pytest.raises(DataError, match="validation_by"):
        make_splits(dataset(each("a b c", 6)), Split(by="class", test=["c"], validation_by="class"))


def test_given_split_is_kept():
    own = ["train", "train", "train", "validation", "test", "test"] * 2
    splits = make_splits(dataset(each("a b", 6), splits=own), Split())
    assert splits.train.tolist() == [0, 1, 2, 6, 7, 8]
    assert splits.validation.tolist() == [3, 9]
    assert splits.query.tolist() == [4, 5, 10, 11]
    own = ["train"] * 10 + ["test"] * 10  # validation items come from the training side
    splits = make_splits(dataset(each("a b", 20), splits=own * 2), Split(validation=0.2))
    assert len(splits.validation) == 4 and len(splits.train) == 16
    assert all(own[i % 20] == "train" for i in splits.validation)
    with pytest.raises(DataError, match=r'no split of its own. Set .split. by = "class"'):
        make_splits(dataset(each("a b", 4)), Split())


def test_query_and_gallery():
    labels = each("a b c d", 5)
    roles = ["", "", "", "query", "gallery"] * 4
    splits = make_splits(dataset(labels, roles=roles), Split(validation=0.0))
    assert splits.train.tolist() == [i for i in range(20) if i % 5 < 3]
    assert splits.query.tolist() == [3, 8, 13, 18] and splits.gallery.tolist() == [4, 9, 14, 19]
    splits = make_splits(dataset(labels, roles=roles), Split(by="class", validation=0.0))
    assert splits.query.tolist() == [13, 18]
    assert splits.notes == ["6 test items are neither query nor gallery, and are left out."]


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ({"roles": ["", "", "", "", "query"] * 2}, ["there are queries but no gallery"]),
        ({"roles": [*[""] * 4, "query", *[""] * 4, "gallery"]}, ["no query can find a match"]),
        ({"roles": [*[""] * 9, "gallery"]}, ["no item is a query"]),
        (
            {"splits": ["train", "trian", *["test"] * 7, "Test"]},
            ["2 problems", "not 'trian'. Did you mean 'train'?", "not 'Test'"],
        ),
        ({"splits": ["train"] * 9 + [""]}, ["splits must be", "not ''"]),
    ],
)
def test_wrong_columns_are_named_all_at_once(columns, words):
    text = refusal(DataError, make_splits, dataset(each("a b", 5), **columns), Split())
    assert all(word in text for word in words), text


def test_an_item_without_a_side_but_with_a_role_is_tested():
    columns = {"splits": ["train"] * 6 + [""] * 4, "roles": [""] * 6 + ["query", "gallery"] * 2}
    splits = make_splits(dataset([*"aabbccaacc"], **columns), Split(validation=0.0))
    assert splits.query.tolist() == [6, 8] and splits.gallery.tolist() == [7, 9]


@pytest.mark.parametrize(
    ("labels", "split", "sentence"),
    [
        ([], Split(by="item"), "no items"),
        (each("a", 9), Split(by="item"), "only the class 'a' is left to train on"),
        (each("a b c d", 1), Split(by="class", validation=0.0), "no class has two items to train"),
        (each("a b", 3), Split(by="class", test=["a", "b"]), "nothing is left to train on"),
        (each("a b c", 3), Split(by="class", test=0.1), "nothing is left to test on"),
        ([*"aabbc"], Split(by="class", test=["c"], validation=0.0), "no test class has two"),
    ],
)
def test_unusable_sides_are_refused(labels, split, sentence):
    with pytest.raises(DataError, match=sentence):
        make_splits(dataset(labels), split)


def test_a_class_with_one_item_trains_with_a_note():
    splits = make_splits(dataset([*each("a b", 8), "alone"]), Split(by="item"))
    assert "alone" in splits.train_classes
    assert len(splits.notes) == 1 and "(alone)" in splits.notes[0]


CAMERAS = ["a", "b", "c", "d", "e"]


def photos(classes: int, each: int = 2) -> ArrayDataset:
    """Return a dataset with `each` photos of each class by each of five cameras."""
    rows = [(f"class {n}", camera) for n in range(classes) for camera in CAMERAS * each]
    return dataset([label for label, _ in rows], metadata=[{"camera": c} for _, c in rows])


@pytest.mark.parametrize("seed", [0, 1, -3])
@pytest.mark.parametrize(("part", "count"), [(0.05, 1), (0.3, 2), (0.5, 3)])
@pytest.mark.parametrize("validation_by", ["item", "class"])
def test_validation_by_source(validation_by, part, count, seed):
    data = photos(12, 4)
    table = {"by": "class", "test": 0.3, "validation": part, "seed": seed}
    split = Split(**table, validation_by=validation_by, source="camera")
    splits = make_splits(data, split)
    camera = np.array([row["camera"] for row in data.metadata])
    query, gallery = splits.validation_sides
    held = {*camera[query]}
    assert len(held) == count
    assert held.isdisjoint(camera[splits.train])
    assert held.isdisjoint(camera[gallery])
    assert {*camera[splits.train]} | held == {*CAMERAS}
    assert np.array_equal(np.union1d(query, gallery), splits.validation)
    trained = {*splits.labels[splits.train]}
    if validation_by == "class":
        assert trained.isdisjoint(splits.labels[splits.validation])
    else:
        assert {*splits.labels[query]} == trained
        assert len(query) == len(trained) * count * 4
    assert any("does not train" in note for note in splits.notes)
    # the test side is the same without sources
    plain = make_splits(data, Split(**table, validation_by=validation_by))
    assert np.array_equal(plain.query, splits.query)
    assert plain.validation_sides[1] is None


def test_validation_by_source_needs_three():
    data = photos(12)
    text = refusal(DataError, make_splits, data, Split(by="class", source="camara"))
    assert "0 values of 'camara'" in text
    assert "Did you mean 'camera'?" in text
    two = [{"camera": "ab"[i % 2]} for i in range(len(data))]
    few = dataset([*data.labels], metadata=two)
    text = refusal(DataError, make_splits, few, Split(by="class", source="camera"))
    assert "2 values of 'camera'" in text
    # nothing is validated, so no source is held out
    unvalidated = make_splits(few, Split(by="class", source="camera", validation=0.0))
    assert unvalidated.validation_query is None
