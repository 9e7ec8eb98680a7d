"""Means with 95 % intervals, as the reports print them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from scipy.stats import t


def half_width(values: Sequence[float], level: float = 0.95) -> float:
    """Return how far the interval of Student's t reaches to either side of the mean; NaN for fewer than two values."""
    if len(values) < 2:
        return float("nan")
    error = np.std(values, ddof=1) / np.sqrt(len(values))
    return float(t.ppf(0.5 + level / 2, len(values) - 1) * error)


def decimals(value: float, places: int = 3, sign: bool = False) -> str:
    """Return a number below 1 as the tables write it: ".931", "−.004"; 1 and more keep the digit before the point."""
    text = f"{abs(value):.{places}f}"
    text = text.removeprefix("0") if text.startswith("0.") else text
    minus = value < 0 and float(text) != 0
    return ("−" if minus else "+" if sign else "") + text


def interval(values: Sequence[float], places: int = 3, sign: bool = False) -> str:
    """Return mean ± half-width, or the one value that there is."""
    mean = decimals(float(np.mean(values)), places, sign)
    return mean if len(values) < 2 else f"{mean} ± {decimals(half_width(values), places)}"
