"""A few held-out inputs that a run stores, so that it can be exported without its data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from retrieval.base.arrays import Array, Ints
from retrieval.data.datasets import Dataset
from retrieval.data.loading import RawInputs
from retrieval.data.splits import Splits
from retrieval.data.texts import ItemTexts
from retrieval.errors import DataError

if TYPE_CHECKING:
    from retrieval.images.preprocessing import Preprocessing

INPUTS_FORMAT = "retrieval inputs 1"
ITEMS = 512
"""Largest number of items that verify a bundle on export, and of items that calibrate it."""

MAX_ITEMS = 64
MAX_BYTES = 8 << 20
"""Largest number of stored items, and their largest total size in bytes."""


class StoredInputs(Dataset):
    """Held-out inputs, already preprocessed, from a dataset that may no longer exist."""

    def __init__(
        self,
        kind: Any,
        inputs: Array,
        labels: list[str],
        texts: list[str],
    ) -> None:
        self.kind = kind
        self.texts = texts
        self.inputs = inputs
        self.labels = labels
        self.keys = [f"kept/{i}" for i in range(len(labels))]
        if kind == "features":
            self.arrays = inputs

    def __getitem__(self, index: int) -> Array:
        """Return an input of the encoder."""
        row: Array = self.inputs[index]
        return row

    def splits_of(self, why: str) -> Splits:
        """Return splits with all items on the test side, and `why` as a note."""
        names, numbers = np.unique(self.labels, return_inverse=True)
        none = np.empty(0, np.int64)
        items = np.arange(len(self.labels))
        return Splits(numbers.astype(np.int64), names.tolist(), none, none, items, notes=[why])


def pack_inputs(
    dataset: Dataset,
    splits: Splits,
    preprocessing: Preprocessing | None,
    texts: ItemTexts | None = None,
) -> bytes:
    """Return a few held-out inputs, labels and texts as the content of a safetensors file."""
    raw = RawInputs(dataset, preprocessing, budget=0)
    held_out = splits.held_out
    item_bytes = raw.batch(held_out[:1]).nbytes
    fitting = MAX_BYTES // max(1, item_bytes)
    # At least two, because torch's exporter takes a batch of one for a constant.
    number = max(2, min(MAX_ITEMS, fitting))
    chosen = by_class(held_out, splits.labels, number)
    labels = [splits.classes[i] for i in splits.labels[chosen]]
    metadata = {"format": INPUTS_FORMAT, "kind": dataset.kind, "labels": json.dumps(labels)}
    if texts is not None:
        metadata["texts"] = json.dumps(held_out_texts(texts, splits, MAX_ITEMS))
    # safetensors takes contiguous arrays only.
    inputs = np.ascontiguousarray(raw.batch(chosen))
    return save({"inputs": inputs}, metadata)


def read_inputs(path: Path) -> StoredInputs:
    """Return the inputs in a file that `pack_inputs` made.

    Raises:
        DataError: the file cannot be read.
    """
    try:
        with safe_open(path, framework="np") as file:
            metadata = file.metadata() or {}
            labels = json.loads(metadata["labels"])
            texts = json.loads(metadata.get("texts", "[]"))
            inputs = file.get_tensor("inputs")
        if metadata["format"] != INPUTS_FORMAT or not 0 < len(labels) == len(inputs):
            raise ValueError("it is of another format")
        labels = [str(label) for label in labels]
        return StoredInputs(metadata["kind"], inputs, labels, [str(text) for text in texts])
    except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path} cannot be read: {error}.") from error


def held_out_texts(texts: ItemTexts, splits: Splits, number: int = ITEMS) -> list[str]:
    """Return up to `number` of the held-out items' texts, evenly spaced."""
    chosen = evenly_spaced(texts.numbers(splits.held_out), number)
    return [texts.distinct[position] for position in chosen]


def evenly_spaced(indices: Ints, number: int = ITEMS) -> Ints:
    """Return up to `number` of the indices, evenly spaced."""
    if len(indices) <= number:
        return indices
    positions = np.linspace(0, len(indices) - 1, number).round()
    return indices[positions.astype(np.int64)]


def by_class(indices: Ints, labels: Ints, number: int = ITEMS) -> Ints:
    """Return up to `number` of the indices, evenly spaced within each class.

    If there are too many classes, evenly spaced classes contribute a few items each.
    """
    if len(indices) <= number:
        return indices
    labels = labels[indices]
    classes, counts = np.unique(labels, return_counts=True)
    usual = min(8, int(np.median(counts)))
    per_class = max(2, usual, number // len(classes))
    classes = evenly_spaced(classes, max(1, number // per_class))
    chosen = [evenly_spaced(indices[labels == label], per_class) for label in classes]
    return np.sort(np.concatenate(chosen))[:number]
