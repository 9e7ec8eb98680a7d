"""The search for AML's metric: L-BFGS over symmetric matrices, whose exponential is positive
definite whatever the step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize

from retrieval_aml.objective import Objective
from retrieval_aml.spd import eigen_of_factor, geodesic_factor

Floats = NDArray[np.floating[Any]]

FARTHEST = 20.0
"""Largest exponent that a trial step of the line search may reach: the optimum lies within that of
GMML.
"""
ROUND = 25
"""Iterations after which the search begins again around the metric reached, with the second
derivatives of that place.
"""
RESOLVED = 1e-7
"""Slope below which steps follow the gradient alone: what they gain is lost in the value's
rounding.
"""
FLATTEST = 1e-8
"""Least curvature, relative to the largest, that the search scales a direction by."""


@dataclass(frozen=True)
class Found:
    """The result of the search.

    Attributes:
        half: (F, F) the metric's factor: M = HHᵀ.
        value: D(M).
        slope: largest entry of the scaled gradient of D(M) / D(start): half its square is about
            what is left to gain.
        iterations: of L-BFGS.
    """

    half: Floats
    value: float
    slope: float
    iterations: int


def minimise(objective: Objective, *, tol: float, max_iter: int) -> Found:
    """Minimise D(M) over M = W exp(S) W, S symmetric, from S = 0, where W² = √c A⁻¹ # B is GMML's
    metric.

    It begins again around the metric reached every `ROUND` iterations, and where a line search
    fails (moments of low rank with a large α).

    Args:
        objective: D.
        tol: largest entry of the scaled gradient, relative to D, at which the search is done.
        max_iter: most iterations.
    """
    half = objective.pull**0.25 * geodesic_factor(objective.similar, objective.dissimilar, 0.5)
    iterations = 0
    value = np.inf
    while True:
        found = _round(objective, half, tol, min(ROUND, max_iter - iterations))
        iterations += found.iterations
        done = found.slope <= tol or iterations >= max_iter or not found.value < value * (1 - 1e-12)
        if done:
            return Found(found.half, found.value, found.slope, iterations)
        half, value = found.half, found.value


def _round(objective: Objective, start: Floats, tol: float, max_iter: int) -> Found:
    """Search around W² = HHᵀ, H the factor `start`.

    S is written in the eigenvectors of K = (W A_eff W + c W⁻¹ B W⁻¹) / 2, each entry divided by the
    root of kᵢ + kⱼ, about the second derivative along it: ill-conditioned moments take as few
    iterations as others.
    """
    values, vectors = eigen_of_factor(start)
    unit = objective.at(values, vectors)[0]
    root, back = ((vectors * values**power) @ vectors.T for power in (0.5, -0.5))
    stretched = root @ objective.effective_similar_at(values, vectors) @ root
    shrunk = objective.pull * (back @ objective.dissimilar @ back)
    curvature, turn = np.linalg.eigh((stretched + shrunk) / 2)
    w = root @ turn
    size = len(w)
    curved = (curvature[:, None] + curvature[None, :]) / unit
    scale = 1 / np.sqrt(np.maximum(curved, FLATTEST * curved.max()))
    upper = np.triu_indices(size)
    # off-diagonal entries stand for two: with √2 the vector has the matrix's norm
    weight = np.where(upper[0] == upper[1], 1.0, np.sqrt(2.0))

    def factor(flat: Floats) -> tuple[Floats, Floats, Floats]:
        s = np.zeros((size, size))
        s[upper] = flat / weight
        s = (s + np.triu(s, 1).T) * scale
        values, vectors = np.linalg.eigh(s)
        values = np.clip(values, -FARTHEST, FARTHEST)
        return w @ (vectors * np.exp(values / 2)), values, vectors

    def loss(flat: Floats) -> tuple[float, Floats]:
        half, values, vectors = factor(flat)
        value, gradient = objective.at(*eigen_of_factor(half))
        turned = vectors.T @ (w.T @ gradient @ w) @ vectors
        back = vectors @ (_exponential_slopes(values) * turned) @ vectors.T
        return value / unit, weight * (scale * back)[upper] / unit

    found = minimize(
        loss,
        np.zeros(len(weight)),
        jac=True,
        method="L-BFGS-B",
        options={
            "maxiter": max_iter,
            "maxfun": 20 * max_iter,
            "gtol": tol,
            "ftol": 0.0,
            "maxcor": 20,
        },
    )
    flat, iterations = found.x, int(found.nit)
    value, gradient = loss(flat)
    slope = float(np.abs(gradient).max())
    # Below about 1e-8 a step changes the value by less than its rounding, and the line search
    # fails; the gradient still tells. All second derivatives are about 1 here, so the gradient is
    # the step.
    while tol < slope < RESOLVED and iterations < max_iter:
        next_value, next_gradient = loss(flat - gradient)
        next_slope = float(np.abs(next_gradient).max())
        if next_slope >= slope:
            break
        flat, value, gradient, slope = flat - gradient, next_value, next_gradient, next_slope
        iterations += 1
    return Found(factor(flat)[0], value * unit, slope, iterations)


def _exponential_slopes(s: Floats) -> Floats:
    """Return (eᵃ − eᵇ) / (a − b) for all pairs, eᵃ where a = b."""
    half = (s[:, None] - s[None, :]) / 2
    safe = np.where(np.abs(half) < 1e-4, 1.0, half)
    ratio = np.where(np.abs(half) < 1e-4, 1 + half**2 / 6, np.sinh(safe) / safe)
    slopes: Floats = np.exp((s[:, None] + s[None, :]) / 2) * ratio
    return slopes
