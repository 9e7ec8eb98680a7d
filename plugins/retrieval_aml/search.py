"""The search for AML's metric: L-BFGS over symmetric matrices, whose exponential is positive definite whatever the step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize

from retrieval_aml.objective import Objective
from retrieval_aml.spd import geodesic, power, symmetric

Floats = NDArray[np.floating[Any]]

FARTHEST = 60.0
"""Largest exponent that a trial step of the line search may reach."""


@dataclass(frozen=True)
class Found:
    """What the search ended with.

    Attributes:
        m: (F, F) the metric.
        value: D(M).
        slope: largest entry of the gradient in S of D(M) / D(start).
        iterations: of L-BFGS.
    """

    m: Floats
    value: float
    slope: float
    iterations: int


def minimise(objective: Objective, *, tol: float, max_iter: int) -> Found:
    """Minimise D(M) over M = W exp(S) W, S symmetric, from S = 0, where W² = √c A⁻¹ # B is GMML's metric.

    Args:
        objective: D.
        tol: largest entry of the gradient in S, relative to D at the start, at which the search is done.
        max_iter: most iterations.
    """
    start = np.sqrt(objective.pull) * geodesic(objective.similar, objective.dissimilar, 0.5)
    w = power(start, 0.5)
    size = len(w)
    upper = np.triu_indices(size)
    # off-diagonal entries stand for two: with √2 the vector has the matrix's norm
    weight = np.where(upper[0] == upper[1], 1.0, np.sqrt(2.0))
    unit = objective(start)[0]

    def metric(flat: Floats) -> tuple[Floats, Floats, Floats]:
        s = np.zeros((size, size))
        s[upper] = flat / weight
        s = s + np.triu(s, 1).T
        values, vectors = np.linalg.eigh(s)
        values = np.clip(values, -FARTHEST, FARTHEST)
        half = w @ (vectors * np.exp(values / 2))
        return symmetric(half @ half.T), values, vectors

    def loss(flat: Floats) -> tuple[float, Floats]:
        m, values, vectors = metric(flat)
        value, gradient = objective(m)
        turned = vectors.T @ (w @ gradient @ w) @ vectors
        back = vectors @ (_exponential_slopes(values) * turned) @ vectors.T
        return value / unit, weight * back[upper] / unit

    begun = np.zeros(len(weight))
    found = minimize(
        loss,
        begun,
        jac=True,
        method="L-BFGS-B",
        options={"maxiter": max_iter, "maxfun": 20 * max_iter, "gtol": tol, "ftol": 1e-15, "maxcor": 20},
    )
    m = metric(found.x)[0]
    value, gradient = loss(found.x)
    return Found(m, value * unit, float(np.abs(gradient).max()), int(found.nit))


def _exponential_slopes(s: Floats) -> Floats:
    """Return (eᵃ − eᵇ) / (a − b) for all pairs, eᵃ where a = b."""
    half = (s[:, None] - s[None, :]) / 2
    safe = np.where(np.abs(half) < 1e-4, 1.0, half)
    ratio = np.where(np.abs(half) < 1e-4, 1 + half**2 / 6, np.sinh(safe) / safe)
    slopes: Floats = np.exp((s[:, None] + s[None, :]) / 2) * ratio
    return slopes
