"""A data set, streams of its triplets, and an exact comparison of two learners."""

import itertools
from typing import Any

import numpy as np

from retrieval_oahu import from_labels, in_chunks


def noisy_clouds(each: int = 60) -> tuple[Any, Any]:
    """Three classes that differ in two of six features; the others are larger noise."""
    rng = np.random.default_rng(0)
    y = np.repeat(np.arange(3), each)
    x = rng.standard_normal((len(y), 6)) * np.array([1, 1, 4, 4, 4, 4])
    x[:, :2] += np.array([[0, 0], [4, 0], [0, 4]])[y]
    return x + 10, y


def stream_of(clouds: tuple[Any, Any], count: int, **options: Any) -> Any:
    """Return triplets (count, 3, F) of random items."""
    x, y = clouds
    return next(in_chunks(itertools.islice(from_labels(y, **options), count), x, count))


def fitted(learner: Any) -> dict[str, Any]:
    return {k: v for k, v in vars(learner).items() if k.endswith("_") and not k.startswith("_")}


def same(one: Any, other: Any) -> None:
    assert fitted(one).keys() == fitted(other).keys()
    for name, value in fitted(one).items():
        assert np.array_equal(value, fitted(other)[name]), name
