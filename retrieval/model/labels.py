"""Read labels: all text or all whole numbers, none missing."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from retrieval.base.arrays import Array
from retrieval.errors import DataError

# Limit up to which float64 represents every whole number exactly.
EXACT = 2.0**53

ADVICE = "Leave those items out, or give them a label."


class LabelsError(DataError, ValueError):
    """Labels cannot be used; also a ValueError, as scikit-learn's users expect of `fit`."""


def read_labels(
    labels: Any,
    what: str = "labels",
    advice: str = ADVICE,
) -> Array:
    """Return labels (N,) as an array of text or whole numbers.

    Floats with whole values become whole numbers, because pandas turns an integer column with gaps
    into floats.

    Args:
        labels: a list, an array, a tensor, a pandas Series or Categorical, or anything else that
            NumPy reads as an array.
        what: name of the labels in error messages, such as "gallery labels".
        advice: what to do about missing labels.

    Raises:
        LabelsError: labels are missing, are of two kinds, are neither text nor whole numbers, or
            are not one-dimensional.
    """
    array = read_values(labels, what, advice)
    if array.dtype.kind in "iuU":
        return array
    values = array.tolist()
    for row, value in enumerate(values):
        if not isinstance(value, str) and not _is_whole(value):
            raise LabelsError(
                f"The {what} must be whole numbers or text, so that they compare exactly; row {row}"
                f" is {_quoted(value)}."
            )
    if values and isinstance(values[0], str):
        return array.astype(str)
    return _whole_numbers(values)


def read_values(values: Any, what: str, advice: str = ADVICE) -> Array:
    """Return values (N,) as an array without converting them; see `read_labels` for the arguments.

    Raises:
        LabelsError: values are missing (None, NaN, NaT, NA or masked), mix text with other types,
            or are not one-dimensional.
    """
    array = _unchanged(values)
    if array.ndim != 1:
        raise LabelsError(f"The {what} have the shape {array.shape}, and must be one per item.")
    if array.dtype.kind not in "fO":
        return array
    missing = np.flatnonzero([is_missing(value) for value in array])
    if len(missing):
        rows = ", ".join(map(str, missing[:5]))
        if len(missing) > 5:
            rows += ", …"
        are, plural = ("are", "s") if len(missing) > 1 else ("is", "")
        raise LabelsError(
            f"{len(missing):,} of {len(array):,} {what} {are} missing (None or NaN), in row{plural}"
            f" {rows}, counted from 0. {advice}"
        )
    is_text = np.array([isinstance(value, str) for value in array], bool)
    if is_text.any() and not is_text.all():
        text_row = is_text.argmax()
        other_row = is_text.argmin()
        raise LabelsError(
            f"The {what} are of two kinds, which never match: row {text_row} is"
            f" {_quoted(array[text_row])} and row {other_row} is {_quoted(array[other_row])}. Make"
            " them all text, or all whole numbers."
        )
    return array


def learner_labels(y: Any) -> Any:
    """Return the labels passed to a learner's `fit`, as `read_labels` reads them.

    Some labels are returned unchanged, because scikit-learn's `validate_data` rejects them: None,
    other shapes, and numbers that are infinite or not whole.

    Raises:
        LabelsError: labels are missing, or of two kinds.
    """
    if y is None:
        return y
    array = _unchanged(y)
    if array.ndim != 1 or not len(array):
        return y
    array = read_values(array, "labels")
    if array.dtype.kind != "O":
        return array
    if all(isinstance(value, str) or _is_whole(value) for value in array):
        return read_labels(array)
    return y


def is_missing(value: Any) -> bool:
    """Return whether a value is None, NaN of any type, or pandas' NaT or NA."""
    # Comparing pandas' NA yields NA, which is neither true nor false.
    if value is None or type(value).__name__ == "NAType":
        return True
    # NaN is the only value that differs from itself.
    try:
        return bool(value != value)
    except (TypeError, ValueError, RuntimeError):  # arrays have no truth value
        return False


def _unchanged(labels: Any) -> Array:
    """Return labels as an array of the same values; np.asarray would turn mixed types into text."""
    if isinstance(labels, np.ma.MaskedArray):
        unmasked: Array = labels.data.astype(object)
        unmasked[np.ma.getmaskarray(labels)] = None
        return unmasked
    if callable(detach := getattr(labels, "detach", None)):
        labels = detach().cpu()
    is_collection = isinstance(labels, Iterable) and not isinstance(labels, str | bytes)
    if not is_collection or hasattr(labels, "__array__"):
        array = np.asarray(labels)
        if array.dtype.kind in "biufUO":
            return array
        return np.fromiter(array.tolist() if array.ndim == 1 else array, object)
    values = list(labels)
    kinds = set(map(type, values))
    if kinds in ({str}, {int}, {bool}):
        array = np.asarray(values)
        # NumPy may turn whole numbers beyond int64 into floats, which are not exact.
        if array.dtype.kind in "biuU":
            return array
    return np.fromiter(map(python_scalar, values), object)


def python_scalar(value: Any) -> Any:
    """Return a NumPy scalar or zero-dimensional tensor as a Python value; others unchanged."""
    item: Callable[[], Any] | None = getattr(value, "item", None)
    if item is not None and getattr(value, "ndim", None) == 0:
        return item()
    return value


def _is_whole(value: Any) -> bool:
    if isinstance(value, float | np.floating):
        number = float(value)
        return abs(number) <= EXACT and number.is_integer()
    return isinstance(value, int | np.integer | np.bool_)


def _whole_numbers(values: list[Any]) -> Array:
    whole = [int(value) for value in values]
    # Numbers beyond 64 bits stay Python's, which compare exactly too.
    for kind in (np.int64, np.uint64):
        with suppress(OverflowError):
            return np.array(whole, kind)
    return np.array(whole, object)


def _quoted(value: Any) -> str:
    text = repr(value)
    if len(text) > 40:
        text = text[:39] + "…"
    return f"{text} ({type(value).__name__})"


def class_codes(y: ArrayLike, learner: str) -> NDArray[np.intp]:
    """Return labels (N,) as class ids 0 to C − 1.

    Args:
        y: labels (N,).
        learner: the learner's name, for error messages.

    Raises:
        ValueError: labels are missing or of two kinds, are continuous numbers, name one class only,
            or name each class once.
    """
    labels = np.asarray(learner_labels(y))
    if labels.dtype.kind == "f" and (labels != np.floor(labels)).any():
        raise ValueError(f"The labels are continuous numbers; {learner} needs classes.")
    names, codes = np.unique(labels, return_inverse=True)
    if len(names) < 2:
        raise ValueError(
            f"All {len(labels)} items are of one class, {names.tolist()[0]!r}: {learner} needs at"
            " least two."
        )
    if len(names) == len(labels):
        raise ValueError(
            f"Each of the {len(labels)} items is the only one of its class: {learner} needs at"
            " least one class with two members."
        )
    return codes.astype(np.intp)
