"""Symmetric positive definite matrices: powers, the geodesic between two of them, and a floor under their eigenvalues."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import solve_triangular

Floats = NDArray[np.floating[Any]]

FLOOR = 1e-10
"""Least eigenvalue of a moment, relative to the mean of its eigenvalues."""


def symmetric(m: Floats) -> Floats:
    """Return (M + Mᵀ) / 2."""
    half: Floats = (m + m.T) / 2
    return half


def power(m: Floats, exponent: float) -> Floats:
    """Return M to a real power, M symmetric positive definite (F, F)."""
    values, vectors = np.linalg.eigh(m)
    return symmetric((vectors * values**exponent) @ vectors.T)


def geodesic(a: Floats, b: Floats, t: float) -> Floats:
    """Return A⁻¹ #_t B, the point at t on the geodesic from A⁻¹ (t = 0) to B (t = 1); t = .5 is the geometric mean.

    With A = LLᵀ it is L⁻ᵀ (Lᵀ B L)ᵗ L⁻¹. At t = .5 it solves M A M = B (Zadeh et al., Eq 8 and 13).

    Args:
        a: (F, F) symmetric positive definite.
        b: (F, F) symmetric positive definite.
        t: 0 to 1.
    """
    lower = np.linalg.cholesky(a)
    half = np.linalg.cholesky(b).T @ lower
    # singular values of a factor keep the digits that eigenvalues of the product would lose
    _, values, right = np.linalg.svd(half)
    factor = solve_triangular(lower, (right.T * values**t), trans="T", lower=True)
    return symmetric(factor @ factor.T)


def lifted(m: Floats, unit: float) -> Floats:
    """Return M with eigenvalues below `FLOOR` × unit raised to that; M itself where none is.

    Args:
        m: (F, F) symmetric, positive semi-definite up to rounding.
        unit: what an eigenvalue is compared with, greater than 0.
    """
    values, vectors = np.linalg.eigh(m)
    least = FLOOR * unit
    if values[0] >= least:
        return m
    return symmetric((vectors * np.maximum(values, least)) @ vectors.T)


def factor(m: Floats) -> Floats:
    """Return C (F, F) with M = CᵀC: eigenvectors times roots of their eigenvalues, the largest first, signs fixed."""
    values, vectors = np.linalg.eigh(m)
    vectors = vectors[:, ::-1]
    largest = np.abs(vectors).argmax(axis=0)
    signs = np.where(vectors[largest, np.arange(len(m))] < 0, -1.0, 1.0)
    return np.ascontiguousarray((vectors * signs * np.sqrt(values[::-1])).T)
