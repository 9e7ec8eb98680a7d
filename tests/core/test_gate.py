"""Every reader of a data set refuses bad vectors, keys and labels with the same messages."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import retrieval
from PIL import Image
from retrieval.data.datasets import ArrayDataset, is_missing_label, usable_dataset
from retrieval.data.splits import sides
from retrieval.errors import DataError
from retrieval.index.sources import collect
from retrieval.run.build import build_dataset

N = 12
VECTORS = np.random.default_rng(0).normal(size=(N, 3)).astype(np.float32)
LABELS = [f"class {i % 3}" for i in range(N)]
Columns = dict[str, Any]
Write = Callable[[Path, Columns], retrieval.plugin.Dataset]


def npz(folder: Path, columns: Columns) -> retrieval.plugin.Dataset:
    plural = {"features": "features", "label": "labels", "key": "keys", "split": "splits"}
    arrays = {plural[name]: np.array(values) for name, values in columns.items()}
    np.savez(folder / "v.npz", **arrays)
    return retrieval.create("dataset", "core.features", file=str(folder / "v.npz"))


def parquet(folder: Path, columns: Columns) -> retrieval.plugin.Dataset:
    listed = {name: np.asarray(values).tolist() for name, values in columns.items()}
    pq.write_table(pa.table(listed), folder / "v.parquet")
    return retrieval.create("dataset", "core.parquet", path=str(folder / "v.parquet"))


both = pytest.mark.parametrize("read", [npz, parquet])


def refused(read: Write, folder: Path, says: str, **columns: Any) -> None:
    with pytest.raises(DataError, match=says):
        read(folder, {"features": VECTORS, "label": LABELS, **columns})


@both
def test_vectors_that_are_not_finite_are_refused(read, tmp_path):
    vectors, large = VECTORS.copy(), VECTORS.astype(float)
    vectors[5, 1], vectors[7, 0], large[3, 0] = np.nan, np.inf, 1e300
    says = r"features hold NaN, infinity or numbers too large for 32 bits in 2 rows: 5, 7\. Rem"
    refused(read, tmp_path, says, features=vectors)
    refused(read, tmp_path, "for 32 bits in 1 rows: 3", features=large)


def test_null_inside_a_vector_is_refused(tmp_path):
    rows: list[list[float | None]] = VECTORS.tolist()
    rows[4][2] = None
    refused(parquet, tmp_path, "features hold NaN.* in 1 rows: 4", features=rows)


@both
def test_equal_keys_are_refused(read, tmp_path):
    keys = [f"k{i}" for i in range(N - 2)] + ["k0", "k0"]
    refused(read, tmp_path, "'k0' is the key of 3 items", key=keys)


@pytest.mark.parametrize("missing", [None, float("nan"), ""])
def test_missing_labels_of_a_table_are_refused(missing, tmp_path):
    labels: list[Any] = list(range(N)) if missing != "" else list(LABELS)
    if isinstance(missing, float):
        labels = [float(label) for label in labels]
    labels[2] = labels[9] = missing
    says = r"2 of 12 items have no label: v/2, v/9\. Label them"
    refused(parquet, tmp_path, says, label=labels)


@both
def test_the_label_minus_one_is_none(read, tmp_path):
    labels = [*range(N - 2), -1, -1]
    refused(read, tmp_path, r"2 of 12 items have no label: .*10, .*11\. Label them", label=labels)
    texts = [str(label) for label in labels]
    assert read(tmp_path, {"features": VECTORS, "label": texts}).labels[-1] == "-1"


def test_a_missing_value_among_texts_of_npz_is_refused(tmp_path):
    labels = np.array([float("nan"), *LABELS[1:]])
    refused(npz, tmp_path, "1 of 12 items have no label: 0", label=labels)
    items = collect([tmp_path / "v.npz"], "features").items
    assert [items[0].label, items[1].label] == [None, "class 1"]


def test_an_index_reads_a_nan_label_as_none(tmp_path):
    labels = [float("nan"), *map(float, range(N - 1))]
    table = pa.table({"features": VECTORS.tolist(), "label": labels})
    pq.write_table(table, tmp_path / "v.parquet")
    items = collect([tmp_path / "v.parquet"], "features").items
    assert [item.label for item in items][:2] == [None, "0.0"]


def test_missing_hugging_face_labels_are_refused(tmp_path):
    datasets = pytest.importorskip("datasets")
    images = [Image.new("RGB", (8, 8), (i, 0, 0)) for i in range(4)]
    for name, labels, feature in (
        ("named", [0, 1, -1, 1], datasets.ClassLabel(names=["cat", "dog"])),
        ("number", [0.0, 1.0, float("nan"), 1.0], datasets.Value("float64")),
        ("text", ["cat", "dog", None, "dog"], datasets.Value("string")),
    ):
        features = datasets.Features({"image": datasets.Image(), "label": feature})
        table = datasets.Dataset.from_dict({"image": images, "label": labels}, features=features)
        table.save_to_disk(str(tmp_path / name))
        with pytest.raises(DataError, match="1 of 4 items have no label: 2"):
            retrieval.create("dataset", "core.huggingface", source=str(tmp_path / name), test=None)


class Own(retrieval.plugin.Dataset):
    """A plugin's own dataset."""

    kind = "features"

    def __init__(self) -> None:
        self.labels = ["a", "b", "a", None, "b"]  # type: ignore[list-item]
        self.keys = ["x", "x", "y", "z", "w"]

    def __getitem__(self, index: int) -> Any:
        return VECTORS[index]


def test_a_plugins_own_data_set_is_checked():
    says = r"(?s)has 2 problems.*1 of 5 items have no label: z.*'x' is the key of 2"
    with pytest.raises(DataError, match=says):
        usable_dataset(Own(), "The dataset own")
    parts = {"backbone": {"name": "core.features"}, "loss": {"name": "pml.triplet_margin"}}
    recipe = retrieval.read_recipe({"data": Own(), "split": {"by": "item"}, **parts})
    with pytest.raises(DataError, match="'x' is the key of 2 items"):
        build_dataset(recipe)
    unnamed = ArrayDataset(VECTORS[:3], ["a", "b", "a"], ["x", "", ""], kind="features")
    with pytest.raises(DataError, match=r"^x: 2 items have no key: 1, 2\."):
        usable_dataset(unnamed, "x")


def test_missing_values():
    pandas = pytest.importorskip("pandas")
    missing = [None, "", "  ", float("nan"), np.float32("nan"), pandas.NA, pandas.NaT]
    assert all(map(is_missing_label, missing))
    assert not any(map(is_missing_label, ["nan", 0, 0.0, False, np.int64(0), "a"]))


def test_long_arrays_are_checked_in_blocks():
    vectors = np.zeros((200_000, 2), np.float32)
    vectors[199_999, 1] = np.inf
    data = ArrayDataset(vectors, ["a"] * len(vectors), range(len(vectors)), kind="features")
    with pytest.raises(DataError, match="32 bits in 1 rows: 199999"):
        usable_dataset(data, "x")


@both
def test_sides_are_known_by_their_usual_names(read, tmp_path):
    split = ["Train", "val", "TEST", "valid"] * 3
    data = read(tmp_path, {"features": VECTORS, "label": LABELS, "split": split})
    assert list(data.splits or ()) == ["train", "validation", "test", "validation"] * 3
    assert sides(["trian"]) == ["trian"]  # the split refuses this name
