"""What parameters of loss, combiners and learners may be."""

from __future__ import annotations

import warnings


def refuse_range(name: str, value: float, low: float, high: float, *, closed: bool = False) -> None:
    """Refuse a parameter that is not between two numbers.

    Args:
        name: what it is called.
        value: what it is.
        low: it must be above.
        high: it must be below, or with `closed` at most.
        closed: see `high`.

    Raises:
        ValueError: the parameter is not between the two numbers, or it is NaN.
    """
    if not (low < value < high or (closed and value == high)):
        raise ValueError(
            f"{name} is {value} and must be above {low:g} and {'at most' if closed else 'below'}"
            f" {high:g}."
        )


def warn_tau(tau: float) -> None:
    """Warn where Theorem 3.1 promises nothing."""
    if tau > 2 / 3:
        warnings.warn(
            f"tau is {tau:g}: beyond 2/3, Theorem 3.1 no longer says that two classes are parted."
            " Larger values do work.",
            stacklevel=4,
        )
