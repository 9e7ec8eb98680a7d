"""The checks that every dataset must pass: all labels, unique keys and finite numbers."""

from __future__ import annotations

from collections import Counter
from typing import Any, TypeVar

from retrieval.data.error_lists import refuse, some
from retrieval.model.checked_dataset import rows_not_finite
from retrieval.model.contracts import Dataset

D = TypeVar("D", bound=Dataset)


def usable(dataset: D, where: str) -> D:
    """Return a dataset after checking that its items can be used; `where` begins error messages.

    Raises:
        DataError: vectors are not finite, items have no label, or keys are equal; the message lists
            every problem.
    """
    problems = []
    vectors = dataset.arrays if dataset.kind == "features" else None
    if vectors is not None and (rows := rows_not_finite(vectors)):
        plural = len(rows) > 1
        problems.append(
            f"{len(rows):,} row{'s' if plural else ''} of features hold{'' if plural else 's'} NaN,"
            f" infinity or numbers too large for 32 bits: {some(rows, 10)}. Remove or correct"
            f" {'them' if plural else 'it'}."
        )
    unlabelled = [i for i, label in enumerate(dataset.labels) if is_missing(label)]
    if unlabelled:
        plural = len(unlabelled) > 1
        problems.append(
            f"{len(unlabelled):,} of {len(dataset.labels):,} items {'have' if plural else 'has'}"
            f" no label: {some([dataset.keys[i] for i in unlabelled])}. Give"
            f" {'each' if plural else 'it'} one, or leave {'them' if plural else 'it'} out."
        )
    if len(set(dataset.keys)) < len(dataset.keys):
        problems += [
            f"'{key}' is the key of {count:,} items. Give each item its own key."
            for key, count in Counter(dataset.keys).items()
            if count > 1
        ]
    if problems:
        refuse(where, problems)
    return dataset


def is_missing(label: Any) -> bool:
    """Return whether a value means a missing label: None, blank text, NaN or pandas' NA."""
    if label is None or isinstance(label, str):
        return not (label and label.strip())
    try:
        return bool(label != label)  # only NaN differs from itself
    except (TypeError, ValueError):  # pandas' NA cannot be compared
        return True
