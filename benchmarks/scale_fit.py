"""How a cost grows with the number of vectors: laws fitted to some sizes, and judged on the largest."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

LAWS: dict[str, Callable[[float], float]] = {
    "n": lambda n: n,
    "√n": math.sqrt,
    "n·√n": lambda n: n * math.sqrt(n),
    "n·log n": lambda n: n * math.log(n),
    "log n": math.log,
}


@dataclass(frozen=True)
class Fit:
    """A law with its numbers.

    Attributes:
        text: as a reader writes it.
        at: the cost of so many vectors.
        error: how far the law of all sizes but the largest is from what was measured there, as a share of it; None where there are too few sizes to tell.
    """

    text: str
    at: Callable[[float], float]
    error: float | None


def power(points: Mapping[int, float]) -> Fit:
    """Return a·nᵇ, of the least squares of logarithms."""
    a, b = _power(points)
    return Fit(f"n^{b:.2f}", lambda n: float(a * n**b), _error(points, lambda some: _at_power(_power(some))))


def theory(points: Mapping[int, float], law: str) -> Fit:
    """Return a constant and a share of each term of a law, such as "n + n·√n", none below 0, of the least squares of relative differences."""
    terms, numbers = law.split(" + "), _line(points, law)
    ends = [[number * f for number, f in zip(numbers, _terms(law, n), strict=True)] for n in (min(points), max(points))]  # fmt: skip
    there = [
        name
        for name, *parts in zip(["constant", *terms], *ends, strict=True)
        if any(part >= 0.01 * sum(end) for part, end in zip(parts, ends, strict=True))
    ]
    return Fit(
        " + ".join(there),
        _at_line(numbers, law),
        _error(points, lambda some: _at_line(_line(some, law), law)),
    )


def scaled(points: Mapping[int, float], law: str) -> Fit:
    """Return the cost of the largest size, grown by a law's last term as a whole: what does not grow is taken to grow, too, since so few sizes do not tell it apart."""
    largest, last = max(points), law.split(" + ")[-1]
    return Fit(last, lambda n: points[largest] * LAWS[last](n) / LAWS[last](largest), None)


def _power(points: Mapping[int, float]) -> tuple[float, float]:
    x, y = np.log(list(points)), np.log(list(points.values()))
    b, a = np.polyfit(x, y, 1) if len(x) > 1 else (1.0, y[0] - x[0])
    return float(np.exp(a)), float(b)


def _at_power(numbers: tuple[float, float]) -> Callable[[float], float]:
    return lambda n: numbers[0] * n ** numbers[1]


def _terms(law: str, n: float) -> list[float]:
    return [1.0, *(LAWS[term](n) for term in law.split(" + "))]


def _line(points: Mapping[int, float], law: str) -> list[float]:
    from scipy.optimize import nnls

    rows = np.array([_terms(law, n) for n in points]) / np.array(list(points.values()))[:, None]
    scale = rows.max(axis=0)
    found, _ = nnls(rows / scale, np.ones(len(points)))
    return [float(number) for number in found / scale]


def _at_line(numbers: list[float], law: str) -> Callable[[float], float]:
    return lambda n: float(np.dot(numbers, _terms(law, n)))


def _error(
    points: Mapping[int, float], fit: Callable[[Mapping[int, float]], Callable[[float], float]]
) -> float | None:
    if len(points) < 3:
        return None
    largest = max(points)
    before = fit({size: cost for size, cost in points.items() if size != largest})
    return before(largest) / points[largest] - 1
