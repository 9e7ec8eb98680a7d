"""The checks that every dataset must pass: all labels, unique keys and finite numbers."""

from __future__ import annotations

from collections import Counter
from typing import Any, TypeVar

import numpy as np

from retrieval.data.error_lists import refuse, some
from retrieval.model import labels
from retrieval.model.contracts import Dataset

D = TypeVar("D", bound=Dataset)
_ROWS = 65_536
"""Number of vectors checked at a time, to limit memory."""


def usable_dataset(dataset: D, where: str) -> D:
    """Return a dataset after checking that its items can be used; `where` begins error messages.

    Raises:
        DataError: a vector is not finite, an item has no label or no key, or two keys are equal.
            The message lists every problem.
    """
    problems = []
    if rows := _rows_not_finite(dataset):
        problems.append(
            f"features hold NaN, infinity or numbers too large for 32 bits in {len(rows):,}"
            f" rows: {some(rows, 10)}. Remove or correct them."
        )
    if unlabelled := [i for i, label in enumerate(dataset.labels) if is_missing_label(label)]:
        problems.append(
            f"{len(unlabelled):,} of {len(dataset.labels):,} items have no label:"
            f" {some([dataset.keys[i] for i in unlabelled])}. Label them, or leave them out."
        )
    if blank := [i for i, key in enumerate(dataset.keys) if not key]:
        problems.append(f"{len(blank):,} items have no key: {some(blank)}. Give each item its own.")
    problems += [
        f"'{key}' is the key of {count:,} items. Give each item its own key."
        for key, count in Counter(dataset.keys).items()
        if count > 1 and key
    ]
    if problems:
        refuse(where, problems)
    return dataset


def _rows_not_finite(dataset: Dataset) -> list[int]:
    rows: list[int] = []
    if dataset.kind == "features" and dataset.arrays is not None:
        for start in range(0, len(dataset.arrays), _ROWS):
            finite = np.isfinite(dataset.arrays[start : start + _ROWS]).all(axis=1)
            rows += (start + np.flatnonzero(~finite)).tolist()
    return rows


def is_missing_label(label: Any) -> bool:
    """Return whether a value means a missing label: None, blank text, NaN, or pandas' NaT or NA."""
    if isinstance(label, str):
        return not label.strip()
    return labels.is_missing(label)
