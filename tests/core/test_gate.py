"""Every reader of a dataset refuses what cannot be trained on, in the words of the reader of
`.npz`.
"""

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
from retrieval.data.datasets import ArrayDataset
from retrieval.data.gate import is_missing, usable
from retrieval.data.splits import sides
from retrieval.errors import DataError, PluginError
from retrieval.run.build import build_dataset
from retrieval.serving.index.sources import collect

N = 12
VECTORS = np.random.default_rng(0).normal(size=(N, 3)).astype(np.float32)
LABELS = [f"class {i % 3}" for i in range(N)]
Columns = dict[str, Any]
Write = Callable[[Path, Columns], retrieval.plugin.Dataset]


def npz(folder: Path, columns: Columns) -> retrieval.plugin.Dataset:
    arrays = {
        f"{name}s" if name != "features" else name: np.array(values)
        for name, values in columns.items()
    }
    np.savez(folder / "v.npz", **arrays)
    return retrieval.create("dataset", "core.features", file=str(folder / "v.npz"))


def parquet(folder: Path, columns: Columns) -> retrieval.plugin.Dataset:
    listed = {
        name: values.tolist() if hasattr(values, "tolist") else values
        for name, values in columns.items()
    }
    pq.write_table(pa.table(listed), folder / "v.parquet")
    return retrieval.create("dataset", "core.parquet", path=str(folder / "v.parquet"))


def bad_vectors() -> np.ndarray[Any, Any]:
    vectors = VECTORS.copy()
    vectors[5, 1], vectors[7, 0] = np.nan, np.inf
    return vectors


@pytest.mark.parametrize("read", [npz, parquet])
def test_vectors_that_are_not_finite_are_refused(read, tmp_path):
    with pytest.raises(
        DataError,
        match=r"2 rows of features hold NaN, infinity or numbers too large for 32 bits: 5, 7\. Rem",
    ):
        read(tmp_path, {"features": bad_vectors(), "label": LABELS})
    with pytest.raises(DataError, match="1 row of features holds NaN"):
        read(
            tmp_path,
            {
                "features": np.where(VECTORS[3, 0] == VECTORS, 1e300, VECTORS.astype(float)),
                "label": LABELS,
            },
        )


def test_null_inside_a_vector_is_refused(tmp_path):
    rows: list[list[float | None]] = VECTORS.tolist()
    rows[4][2] = None
    with pytest.raises(DataError, match=r"1 row of features holds NaN.*: 4"):
        parquet(tmp_path, {"features": rows, "label": LABELS})


@pytest.mark.parametrize("read", [npz, parquet])
def test_equal_keys_are_refused(read, tmp_path):
    keys = [f"k{i}" for i in range(N - 2)] + ["k0", "k0"]
    with pytest.raises(DataError, match="'k0' is the key of 3 items"):
        read(tmp_path, {"features": VECTORS, "label": LABELS, "key": keys})


@pytest.mark.parametrize("missing", [None, float("nan"), ""])
def test_missing_labels_of_a_table_are_refused(missing, tmp_path):
    labels: list[Any] = list(range(N)) if missing != "" else list(LABELS)
    if isinstance(missing, float):
        labels = [float(label) for label in labels]
    labels[2] = labels[9] = missing
    with pytest.raises(DataError, match=r"2 of 12 items have no label: v/2, v/9\. Give each one"):
        parquet(tmp_path, {"features": VECTORS, "label": labels})


def test_a_missing_value_among_texts_of_npz_is_refused(tmp_path):
    with pytest.raises(DataError, match="1 of 12 items has no label: 0"):
        npz(tmp_path, {"features": VECTORS, "label": np.array([float("nan"), *LABELS[1:]])})
    items = collect([tmp_path / "v.npz"], "features").items
    assert [items[0].label, items[1].label] == [None, "class 1"]


def test_an_index_takes_a_nan_label_for_none(tmp_path):
    labels = [float("nan"), *map(float, range(N - 1))]
    pq.write_table(
        pa.table({"features": VECTORS.tolist(), "label": labels}), tmp_path / "v.parquet"
    )
    assert [item.label for item in collect([tmp_path / "v.parquet"], "features").items][:2] == [
        None,
        "0.0",
    ]


def test_hugging_face_labels_pass_the_gate(tmp_path):
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
        with pytest.raises(DataError, match="1 of 4 items has no label: 2"):
            retrieval.create("dataset", "core.huggingface", source=str(tmp_path / name), test=None)


class Own(retrieval.plugin.Dataset):
    """A plugin's own dataset."""

    kind = "features"

    def __init__(self) -> None:
        self.labels = ["a", "b", "a", None, "b"]  # type: ignore[list-item]
        self.keys = ["x", "x", "y", "z", "w"]

    def __getitem__(self, index: int) -> Any:
        return VECTORS[index]


def test_a_plugins_own_dataset_passes_it_too():
    with pytest.raises(
        DataError, match=r"(?s)has 2 problems.*1 of 5 items has no label: z.*'x' is the key of 2"
    ):
        usable(Own(), "The dataset own")
    recipe = retrieval.read_recipe(
        {
            "data": Own(),
            "split": {"by": "item"},
            "backbone": {"name": "core.features"},
            "loss": {"name": "pml.triplet_margin"},
        }
    )
    with pytest.raises(PluginError, match="2 items have the key 'x'"):
        build_dataset(recipe)


def test_what_is_missing():
    pandas = pytest.importorskip("pandas")
    missing = [None, "", "  ", float("nan"), np.float32("nan"), pandas.NA, pandas.NaT]
    assert all(map(is_missing, missing))
    assert not any(map(is_missing, ["nan", 0, 0.0, False, np.int64(0), "a"]))


def test_long_arrays_are_looked_through_in_blocks():
    vectors = np.zeros((200_000, 2), np.float32)
    vectors[199_999, 1] = np.inf
    with pytest.raises(DataError, match="32 bits: 199999"):
        usable(
            ArrayDataset(vectors, ["a"] * len(vectors), range(len(vectors)), kind="features"), "x"
        )  # type: ignore[arg-type]


@pytest.mark.parametrize("read", [npz, parquet])
def test_sides_are_known_by_their_usual_names(read, tmp_path):
    split = ["Train", "val", "TEST", "valid"] * 3
    data = read(tmp_path, {"features": VECTORS, "label": LABELS, "split": split})
    assert list(data.splits or ()) == ["train", "validation", "test", "validation"] * 3
    assert sides(["trian"]) == ["trian"]  # which the split then refuses
