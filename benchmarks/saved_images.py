"""A plugin with one data set: images and labels from a file that a benchmark wrote."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from retrieval.plugin import ArrayDataset, Dataset, hookimpl


def saved(file: Path) -> Dataset:
    """Load arrays `images` (N, height, width), uint8, and `labels` (N,) of a .npz file.

    Args:
        file: the file.
    """
    with np.load(file, allow_pickle=False) as arrays:
        return ArrayDataset(arrays["images"], arrays["labels"].tolist())


@hookimpl
def retrieval_datasets() -> Mapping[str, Any]:
    return {"saved": saved}
