"""Data sets of torchvision and Hugging Face."""

from __future__ import annotations

import inspect
import io
import pickle
import re
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from layouts import idx, refused as refusal
from PIL import Image
from retrieval.data.splits import make_splits
from retrieval.errors import DataError, MissingDependency
from retrieval.recipe.tables import Split

from retrieval_core import huggingface, torchvision_dataset


def pixels(number: int) -> Any:
    return np.random.default_rng(number).integers(0, 256, (10, 12, 3), dtype=np.uint8)


def encoded(number: int) -> bytes:
    out = io.BytesIO()
    Image.fromarray(pixels(number)).save(out, format="PNG")
    return out.getvalue()


def save(path: Path, number: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels(number)).save(path)


def test_torchvision_with_two_sides(tmp_path):
    # GTSRB has its training side in folders and its test side in a list.
    base = tmp_path / "gtsrb"
    images = base / "GTSRB" / "Final_Test" / "Images"
    for i in range(2):
        for c in range(2):
            save(base / "GTSRB" / "Training" / f"{c:05d}" / f"{i}.ppm", 10 * c + i)
        save(images / f"{i}.ppm", 50 + i)
    (base / "GT-final_test.csv").write_text("Filename;ClassId\n0.ppm;0\n1.ppm;1\n")
    data = torchvision_dataset("GTSRB", tmp_path)
    assert data.labels == ["0", "0", "1", "1", "0", "1"]
    assert data.splits == ["train"] * 4 + ["test"] * 2
    assert np.array_equal(np.asarray(data[2]), pixels(10))
    assert np.array_equal(np.asarray(data[5]), pixels(51))
    again = pickle.loads(pickle.dumps(data))  # decoding processes receive a pickle
    assert np.array_equal(np.asarray(again[4]), pixels(50))
    (images / "0.ppm").write_bytes(b"no image")
    with pytest.raises(DataError, match="GTSRB, test item 0 cannot be read"):
        data[4]


def test_torchvision_of_named_classes_in_one_folder(tmp_path):
    for name in ("cat", "dog", "emu"):
        for i in range(3):
            save(tmp_path / name / f"{i}.png", i)
    data = torchvision_dataset("ImageFolder", tmp_path)
    assert data.labels == ["cat"] * 3 + ["dog"] * 3 + ["emu"] * 3
    assert data.splits is None and data.keys[5] == "5"
    assert len(make_splits(data, Split(by="class", validation=0, test=["dog"])).query) == 3


def test_torchvision_in_memory(tmp_path):
    raw = tmp_path / "MNIST" / "raw"
    raw.mkdir(parents=True)
    random = np.random.default_rng(0)
    parts = [random.integers(0, 256, (count, 28, 28), dtype=np.uint8) for count in (4, 2)]
    for prefix, array in zip(("train", "t10k"), parts, strict=True):
        labels = np.array([3, 7, 3, 7][: len(array)], np.uint8)
        (raw / f"{prefix}-images-idx3-ubyte").write_bytes(idx(array))
        (raw / f"{prefix}-labels-idx1-ubyte").write_bytes(idx(labels))
    data = torchvision_dataset("MNIST", tmp_path)
    assert np.array_equal(data.arrays, np.concatenate(parts))
    assert data.labels == ["3 - three", "7 - seven"] * 3
    assert data.splits == ["train"] * 4 + ["test"] * 2


def test_torchvision_errors(tmp_path):
    def refused(name: str, **values: Any) -> str:
        return refusal(partial(torchvision_dataset, name), tmp_path, **values)

    assert "Did you mean 'Flowers102'?" in refused("flowers102")
    assert "Use core.cifar10." in refused("CIFAR10")
    assert "sets.cifar100" in refused("CIFAR100")
    assert "has no parameter splat" in refused("Flowers102", options={"splat": 1})
    text = refused("Flowers102")
    assert "cannot be read from" in text and "Set [data] download = true" in text


def test_data_sets_that_torchvision_unpickles_are_refused():
    """Finds them in the source of the installed torchvision."""
    from torchvision import datasets

    unpickles = re.compile(r"pickle\.loads?\(|torch\.load\((?![^\n]*weights_only=True)")
    modules = {
        name: module
        for name, module in vars(datasets).items()
        if inspect.ismodule(module) and unpickles.search(Path(str(module.__file__)).read_text())
    }
    assert {"cifar", "lsun"} <= set(modules)
    unsafe = [
        name
        for name in datasets.__all__
        if inspect.isclass(getattr(datasets, name))
        and any(
            base.__module__ == module.__name__
            for base in inspect.getmro(getattr(datasets, name))
            for module in modules.values()
        )
    ]
    for name in unsafe:
        says = f"unpickles a file for {name}, which may run any code. "
        with pytest.raises(DataError, match=says):
            torchvision_dataset(name, Path("/nowhere"))


def test_a_missing_hugging_face_library_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(MissingDependency, match="embedding-retrieval\\[huggingface\\]"):
        huggingface("somewhere")


def test_hugging_face_saved_on_disk(tmp_path):
    datasets = pytest.importorskip("datasets")
    kinds = {"image": datasets.Image(), "label": datasets.ClassLabel(names=["cat", "dog"])}

    def side(*numbers: int) -> Any:
        images = [{"bytes": encoded(n), "path": None} for n in numbers]
        rows = {"image": images, "label": [n % 2 for n in numbers]}
        return datasets.Dataset.from_dict(rows, features=datasets.Features(kinds))

    sides = {"train": side(0, 1, 2, 3), "test": side(4, 5)}
    datasets.DatasetDict(sides).save_to_disk(str(tmp_path / "saved"))
    data = huggingface(str(tmp_path / "saved"))
    assert data.labels == ["cat", "dog"] * 3 and data.splits == ["train"] * 4 + ["test"] * 2
    assert np.array_equal(np.asarray(data[5]), pixels(5))
    with pytest.raises(DataError, match="no split 'tests'") as error:
        huggingface(str(tmp_path / "saved"), test="tests", image="picture")
    assert "Did you mean 'test'?" in str(error.value) and "no column 'picture'" in str(error.value)
