"""Items and columns of a plugin's dataset are converted, or refused in one sentence."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import retrieval
import torch
from PIL import Image
from refusals import refusal
from retrieval.data.datasets import check_dataset
from retrieval.errors import DataError, PluginError
from sklearn.datasets import load_digits

PIXELS = (load_digits().images[:40] * 15.9).astype(np.uint8)


class Items(retrieval.plugin.Dataset):
    """Digits whose items are changed by `make`, and whose columns may be replaced."""

    def __init__(self, make: Callable[[np.ndarray], Any] = lambda x: x, **columns: Any) -> None:
        self.make = make
        self.labels = [str(i % 4) for i in range(40)]
        self.keys = [f"d/{i}" for i in range(40)]
        for name, column in columns.items():
            setattr(self, name, column)

    def __getitem__(self, index: int) -> Any:
        return self.make(PIXELS[index])


def pair(pixels: np.ndarray) -> Any:
    return Image.fromarray(pixels), "0"


def truncated(pixels: np.ndarray) -> Image.Image:
    """An image that opens, but whose pixels cannot be read."""
    file = io.BytesIO()
    Image.fromarray(np.tile(pixels, (40, 40))).save(file, "PNG")
    return Image.open(io.BytesIO(file.getvalue()[:200]))


GAVE = "it must give a vector"


@pytest.mark.parametrize(
    ("kind", "make", "says"),
    [
        ("image", pair, r"gave a tuple of 2 \(a Image, a str\); it must .* Return the image alone"),
        ("image", lambda x: x.tobytes(), "gave a bytes; it must give a Pillow image, or uint8 pix"),
        (
            "image",
            lambda x: torch.zeros(1, 8, 8),
            r"tensor of shape \(1, 8, 8\) and type float32; it must .*to_pil_image",
        ),
        ("image", lambda x: x / 255, r"array of shape \(8, 8\) and type float64; .* from 0 to 255"),
        ("image", lambda x: Image.new("L", (0, 8)), "gave an empty image of 0 × 8 pixels"),
        ("image", truncated, "cannot read it: "),
        ("image", lambda x: 1 / 0, r"ZeroDivisionError: division by zero \(.*, line \d+\)"),
        ("image", lambda x: Path("no/3.png").read_bytes(), "read it: No such file or directory"),
        ("image", lambda x: Image.fromarray(np.float32(x)), r"is floating-point grey \(mode F\)"),
        ("features", lambda x: torch.zeros(64), f"gave a tensor .*; {GAVE}: a numpy array of num"),
        ("features", lambda x: x, rf"gave a numpy array of shape \(8, 8\) .*; {GAVE}"),
        ("features", lambda x: x.ravel().astype(str), f"type <U.*; {GAVE}"),
        ("features", lambda x: np.full(64, np.nan), "gave NaN or infinity"),
    ],
)
def test_a_wrong_item_is_refused_in_one_sentence_that_names_it(kind, make, says):
    dataset = check_dataset(Items(make, kind=kind), "acme.items")
    with pytest.raises((PluginError, DataError), match=says) as caught:
        dataset[3]
    text = str(caught.value)
    assert text.startswith("The dataset acme.items, asked for item 3 (d/3),") and "\n" not in text


NAMES = [str(i % 4) for i in range(40)]
LONGER = type("Longer", (Items,), {"__len__": lambda self: 50})


@pytest.mark.parametrize(
    "labels",
    [
        [i % 4 for i in range(40)],
        np.arange(40) % 4,
        [torch.tensor(i % 4) for i in range(40)],
        [np.str_(name) for name in NAMES],
    ],
)
def test_whole_numbers_of_any_type_are_labels_by_their_digits(labels):
    items = Items(labels=labels, keys=torch.arange(40))
    checked = check_dataset(items, "acme.items")
    assert checked.labels == NAMES and all(type(label) is str for label in checked.labels)
    assert checked.keys == [str(i) for i in range(40)]
    assert items.labels is labels  # the user's object does not change


def test_truth_values_are_labels_by_their_names():
    labels = [i % 2 == 0 for i in range(39)] + [np.False_]
    assert set(check_dataset(Items(labels=labels), "acme.items").labels) == {"True", "False"}


@pytest.mark.parametrize(
    ("columns", "says"),
    [
        (
            {"labels": [float(i % 4) for i in range(40)]},
            r"labels has 0\.0 for item 0 \(and 39 more .*, but a label is text or a whole number",
        ),
        ({"labels": "0123" * 10}, "labels is a str, and must hold one entry per item"),
        ({"labels": NAMES[1:]}, "its columns differ in length: 39 labels, 40 keys"),
        ({"__class__": LONGER}, "differ in length: 40 labels, 40 keys, 50 by len"),
        (
            {"arrays": PIXELS[:, 0, 0], "kind": "features"},
            r"shape \(40,\) .* must be float32 of shape \(N, F\)",
        ),
        ({"arrays": np.zeros((40, 0)), "kind": "features"}, r"must be float32 of shape \(N, F\)"),
        (
            {"metadata": ["price"] * 40},
            "metadata has a str for item 0, and must have a mapping from columns to values",
        ),
        ({"files": ["a.png"] * 40}, "files has a str for item 0, and must have a pathlib.Path"),
        ({"arrays": PIXELS / 255}, "arrays has the type float64, and pixels must be uint8, from 0"),
    ],
)
def test_columns_that_break_the_contract_are_one_sentence(columns, says):
    with pytest.raises(PluginError, match=f"^The dataset acme.items breaks its contract: .*{says}"):
        check_dataset(Items(**columns), "acme.items")


def test_one_error_names_all_faults_and_a_column_that_raises_is_an_error_too():
    faulty = Items(labels=[0.5] * 39, files=["x"] * 40, kind="pictures")
    text = refusal(PluginError, check_dataset, faulty, "acme.items")
    parts = ("labels has", "files has", "kind is", "differ in length")
    assert all(part in text for part in parts), text

    class Broken(Items):
        @property
        def splits(self) -> Any:
            raise KeyError("split")

    with pytest.raises(PluginError, match=r"The dataset acme\.items failed: KeyError: 'split'"):
        check_dataset(Broken(), "acme.items")


def test_a_checked_dataset_keeps_other_attributes_and_can_be_pickled():
    checked = check_dataset(Items(np.copy, advice="Look again."), "acme.items")
    loaded = pickle.loads(pickle.dumps(checked))
    assert checked.advice == loaded.advice == "Look again." and len(loaded) == 40
    assert np.array_equal(np.asarray(loaded[3]), PIXELS[3])
    with pytest.raises(AttributeError):
        _ = checked.boxes


@pytest.mark.parametrize("workers", [0, 1])
def test_training_raises_the_same_error_also_from_worker_processes(workers, tmp_path, monkeypatch):
    monkeypatch.setenv("RETRIEVAL_CACHE", str(tmp_path / "cache"))
    table = {
        "split": {"by": "item"},
        "sampler": {"classes": 2, "items": 2},
        "backbone": {"name": "core.convnet", "size": 16, "width": 8},
        "loss": {"name": "pml.triplet_margin"},
        "train": {"epochs": 1, "workers": workers},
        "augmentation": {"crop_scale": [0.5, 1.0]},
    }
    says = r"The dataset object.Items, asked for item \d+ \(d/\d+\), gave a tuple of 2"
    with pytest.raises(PluginError, match=says):
        retrieval.train(table, tmp_path / "run", dataset=Items(pair), progress=False)


def test_pixels_are_not_converted_to_lists():
    class Pixels(np.ndarray):
        def tolist(self) -> Any:
            raise AssertionError("a list of all pixels takes seconds and hundreds of megabytes")

    pixels = PIXELS.view(Pixels)
    assert check_dataset(Items(arrays=pixels), "digits").arrays is pixels
