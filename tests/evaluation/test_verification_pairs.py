"""Lists of pairs and their faults; pairs and folds that are drawn."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from retrieval.data.pairs import LabelledPairs, read_pairs
from retrieval.errors import DataError
from retrieval.evaluation.verification import _draw, draw_pairs, make_folds

KEYS = [f"{name}/{name}_{n:04d}.png" for name in ("Ann_Lee", "Bo", "Cy") for n in (1, 2, 3)]
LFW = (
    "2\t2\nBo\t1\t2\nCy\t2\t3\nBo\t1\tCy\t1\nBo\t3\tCy\t2\nAnn_Lee\t1\t3\nAnn_Lee\t1\t2\n"
    "Ann_Lee\t1\tCy\t1\nAnn_Lee\t2\tBo\t1\n"
)


def read(folder: Path, text: str, keys: list[str] = KEYS) -> LabelledPairs:
    path = folder / "pairs.txt"
    path.write_text(text, encoding="utf-8")
    return read_pairs(path, keys)


def refused(folder: Path, text: str) -> list[str]:
    with pytest.raises(DataError) as error:
        read(folder, text)
    return [line.strip(" -") for line in str(error.value).splitlines()]


CSV = """\ufefffirst,second,note,same,fold
c,a,x,1,10

"b,1",a,"",0,10
a,b c,,1,2
c,b c,,0,2
"""


def test_csv(tmp_path):
    pairs = read(tmp_path, CSV.replace("\n", "\r\n"), ["a", "b,1", "b c", "c"])
    assert pairs.first.tolist() == [3, 1, 0, 3] and pairs.second.tolist() == [0, 0, 2, 2]
    assert pairs.same.tolist() == [True, False, True, False]
    assert pairs.folds == ("2", "10") and pairs.fold.tolist() == [1, 1, 0, 0]
    without = read(tmp_path, "first,second,same\na,c,1\na,d,0\n", ["a", "c", "d"])
    assert without.fold is None and without.folds == () and len(without) == 2


def test_lfw(tmp_path):
    pairs = read(tmp_path, LFW)
    named = [(KEYS[a], KEYS[b]) for a, b in zip(pairs.first, pairs.second, strict=True)]
    assert named[0] == ("Bo/Bo_0001.png", "Bo/Bo_0002.png")
    assert named[3] == ("Bo/Bo_0003.png", "Cy/Cy_0002.png")
    assert named[4] == ("Ann_Lee/Ann_Lee_0001.png", "Ann_Lee/Ann_Lee_0003.png")
    assert pairs.same.tolist() == [True, True, False, False] * 2
    assert pairs.folds == ("1", "2") and pairs.fold.tolist() == [0] * 4 + [1] * 4
    single = read(tmp_path, "1\nBo\t1\t2\nBo\t1\tCy\t1\n", [f"faces/aligned/{key}" for key in KEYS])
    assert single.fold is None
    assert (single.first.tolist(), single.second.tolist()) == ([3, 3], [4, 6])


FAULTY = """first,second,same,fold
Bo/Bo_0001.png,nobody,1,1
Bo/Bo_0001.png,Bo/Bo_0001.png,1,1
Bo/Bo_0001.png,Bo/Bo_0002.png,1,1
Bo/Bo_0002.png,Bo/Bo_0001.png,0,2
Bo/Bo_0001.png,Cy/Cy_0001.png,yes,1
Bo/Bo_0001.png,,0,1
Bo/Bo_0001.png,Cy/Cy_0002.png,0
Bo/Bo_0001.png,Cy/Cy_0002.png,0,
"""


def test_all_faults_of_a_csv_file_at_once(tmp_path):
    known = "there is no such item (the data have keys such as 'Ann_Lee/Ann_Lee_0001.png')."
    assert refused(tmp_path, FAULTY) == [
        f"{tmp_path / 'pairs.txt'} has 7 problems:",
        "line 8: it has 3 values; the header names 4 columns.",
        "line 6: same must be 1 or 0, not 'yes'.",
        "line 7: a pair needs two items; one is empty.",
        "line 9: its fold is empty: name the fold of each pair, or remove the column 'fold'.",
        f"line 2: 'nobody': {known}",
        "line 3: 'Bo/Bo_0001.png' is paired with itself.",
        "line 5: Bo/Bo_0002.png and Bo/Bo_0001.png are different here and the same in line 4.",
    ]


HEADER = "first,second,same"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (f"{HEADER}\na,b,1\nb,c,1\n", "all 2 pairs are the same: both kinds are needed."),
        (f"{HEADER}\na,b,0\nb,c,0\n", "all 2 pairs are different: both kinds are needed."),
        (f"{HEADER},fold\na,b,0,x\nb,c,1,x\n", "all pairs are in one fold ('x')"),
        (f"{HEADER},fold\na,b,0,x\nb,c,1,x\na,c,0,y\n", "the fold 'x' all pairs are different"),
        (f"{HEADER}\n", "it lists no pair."),
        ("", "the header has no column 'first' (it has: none)."),
        ("9" * 5000 + "\n", "the header has no column 'first' (it has: 999"),
        ("first,secnd,same\na,b,1\n", "no column 'second' (it has: first, secnd, same). Rename"),
        (f'{HEADER}\n"a,b,1\n', "not valid CSV"),
        (f"{HEADER}\na,d,1\na,b,0\n", "'d': 2 items have that name."),
    ],
)
def test_a_csv_file_that_cannot_be_used(tmp_path, text, says):
    with pytest.raises(DataError) as error:
        read(tmp_path, text, ["a", "b", "c", "d", "d"])
    assert says in str(error.value)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"2\t2\n": "2\t3\n"}, "line 1 states 2 × 3 same and as many different pairs, 12 lines; 8"),
        ({"2\t2\n": "2\t0\n"}, "line 1 states 2 × 0 same and as many different pairs, 0 lines; 8"),
        ({"2\t2\n": "1\t4\n"}, "all pairs are in one fold ('1')"),
        (
            {"Cy\t2\t3": "Cy\t2\tBo\t3"},
            "fold 1 has 1 same and 3 different pairs; line 1 states 2 of each.",
        ),
        (
            {"Bo\t1\t2": "Bo\t1\t4"},
            "line 2: 'Bo/Bo_0004': there is no such item (the data have keys such as",
        ),
        (
            {"Bo\t1\tCy\t1": "Bo\t1\tBo\t2"},
            "(two people) is expected, with numbers from 1, not 'Bo 1 Bo 2'.",
        ),
        ({"Bo\t1\t2": f"Bo\t1\t{'9' * 5000}"}, "(two people) is expected, with numbers from 1"),
        ({"2\t2\n": f"2\t{'9' * 5000}\n"}, "columns must be separated by commas"),
    ],
)
def test_an_lfw_list_that_cannot_be_used(tmp_path, changes, says):
    text = LFW
    for old, new in changes.items():
        text = text.replace(old, new, 1)
    found = "\n".join(refused(tmp_path, text))
    assert says in found and "problems" not in found


def test_all_faults_of_an_lfw_list_at_once(tmp_path):
    text = LFW + "x\n"
    changes = {"Bo\t1\t2": "Bo\t1\t1", "Cy\t2\t3": "Cy\t2\t9", "Ann_Lee\t1\t3": "Ann_Lee"}
    for old, new in changes.items():
        text = text.replace(old, new, 1)
    found = "\n".join(refused(tmp_path, text))
    lines = ["line 1 states 2", "line 6: 'NAME", "line 10: 'NAME"]
    for says in ("has 5 problems", *lines, "line 2: 'Bo/Bo_0001' is", "line 3: 'Cy/Cy_0009'"):
        assert says in found


def test_a_missing_file_and_one_that_is_no_text(tmp_path):
    with pytest.raises(DataError, match=r"does not exist\. Relative paths start at"):
        read_pairs(tmp_path / "none.csv", KEYS)
    with pytest.raises(DataError, match="cannot be read"):
        read_pairs(tmp_path, KEYS)
    (tmp_path / "raw.csv").write_bytes(b"first\xff")
    with pytest.raises(DataError, match=r"is not UTF-8 text \(byte 5\)"):
        read_pairs(tmp_path / "raw.csv", KEYS)


def labels_of(*sizes: int) -> NDArray[np.int64]:
    labels = np.repeat(np.arange(len(sizes)), sizes).astype(np.int64)
    return np.random.default_rng(0).permutation(labels)


def check(pairs: LabelledPairs, labels: NDArray[np.int64], folds: int, each: int) -> None:
    """Check what holds for any draw; items are numbered from 1000."""
    a, b = pairs.first - 1000, pairs.second - 1000
    assert len(set(map(frozenset, zip(a.tolist(), b.tolist(), strict=True)))) == len(pairs)
    assert np.array_equal(labels[a] == labels[b], pairs.same)
    assert (a != b).all() and pairs.fold is not None and len(pairs.folds) == folds
    for k in range(folds):
        assert pairs.same[pairs.fold == k].sum() == (~pairs.same[pairs.fold == k]).sum() == each


def in_folds(pairs: LabelledPairs, values: NDArray[np.int64]) -> list[set[int]]:
    assert pairs.fold is not None
    both = np.stack([pairs.first, pairs.second], 1) - 1000
    return [set(values[both[pairs.fold == k]].ravel().tolist()) for k in range(len(pairs.folds))]


def test_classes_are_kept_apart_where_they_suffice():
    labels = labels_of(*[12] * 40)
    items = np.arange(len(labels)) + 1000
    pairs = draw_pairs(items, labels)
    # all same pairs of a fold's four classes: fewer than the 300 that are wanted
    check(pairs, labels, 10, 4 * 66)
    groups = in_folds(pairs, labels)
    assert sum(map(len, groups)) == len(set.union(*groups)) == 40
    again, other = draw_pairs(items, labels), draw_pairs(items, labels, seed=1)
    assert np.array_equal(pairs.first, again.first) and np.array_equal(pairs.second, again.second)
    assert not np.array_equal(pairs.first, other.first)


def test_items_are_kept_apart_where_classes_do_not_suffice():
    labels = labels_of(*[100] * 5)
    pairs = draw_pairs(np.arange(500) + 1000, labels, count=800)
    check(pairs, labels, 10, 40)
    groups = in_folds(pairs, np.arange(500))
    assert sum(map(len, groups)) == len(set.union(*groups))
    assert all(len(group) == 5 for group in in_folds(pairs, labels))


@pytest.mark.parametrize(("sizes", "folds"), [([5, 5, 1], 3), ([9, 9], 6), ([2] * 4, 2)])
def test_few_items_have_fewer_folds(sizes, folds):
    labels = labels_of(*sizes)
    pairs = draw_pairs(np.arange(len(labels)) + 1000, labels)
    check(pairs, labels, folds, int(pairs.same.sum()) // folds)
    groups = in_folds(pairs, np.arange(len(labels)))
    assert sum(map(len, groups)) == len(set.union(*groups))


@pytest.mark.parametrize(("count", "folds", "per_kind"), [(4, 2, 1), (11, 5, 1), (59, 10, 2)])
def test_few_pairs_have_fewer_folds_and_are_never_more_than_asked_for(count, folds, per_kind):
    for sizes in ([100] * 5, [12] * 40):
        labels = labels_of(*sizes)
        pairs = draw_pairs(np.arange(len(labels)) + 1000, labels, count=count)
        check(pairs, labels, folds, per_kind)
    for few in (3, 0, -20):
        with pytest.raises(DataError, match=f"{few} pairs are too few to draw"):
            draw_pairs(np.arange(len(labels)) + 1000, labels, count=few)


@pytest.mark.parametrize("sizes", [[9], [1, 1, 1], [2, 1], [1]])
def test_items_without_enough_pairs_are_refused(sizes):
    labels = labels_of(*sizes)
    with pytest.raises(DataError, match=f"from {len(labels)} items of {len(sizes)} classes"):
        draw_pairs(np.arange(len(labels)), labels)


@pytest.mark.parametrize("same", [True, False])
def test_classes_are_drawn_evenly_and_every_pair_can_be(same):
    labels, random = labels_of(300, 10, 10, 1), np.random.default_rng(0)
    rows = _draw(labels, 60, same, random)
    assert np.bincount(labels[rows].ravel(), minlength=4)[0] < 80
    size = 310 if same else 100
    labels = labels_of(size, *[1] * 60) if same else labels_of(size, size, *[1] * 60)
    every = [(i, j) for i, j in itertools.combinations(range(len(labels)), 2)]
    every = {pair for pair in every if (labels[pair[0]] == labels[pair[1]]) == same}
    pairs = {tuple(sorted(pair)) for pair in _draw(labels, len(every), same, random).tolist()}
    assert pairs == every


def test_folds_are_drawn_for_a_list_without_them():
    same = np.arange(90) < 30
    fold, names = make_folds(same)
    assert names == tuple(map(str, range(1, 11)))
    assert np.bincount(fold[same]).tolist() == [3] * 10
    assert np.bincount(fold[~same]).tolist() == [6] * 10
    assert np.array_equal(fold, make_folds(same)[0])
    assert not np.array_equal(fold, make_folds(same, seed=1)[0])
    assert len(make_folds(np.arange(9) < 4)[1]) == 4
    with pytest.raises(DataError, match="1 same and 8 different pairs cannot be divided"):
        make_folds(np.arange(9) < 1)
