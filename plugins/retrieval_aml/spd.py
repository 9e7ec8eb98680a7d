"""Symmetric positive definite matrices: powers, the geodesic between two of them, and a floor under
their eigenvalues.
"""

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


def geodesic(a: Floats, b: Floats, t: float) -> Floats:
    """Return A⁻¹ #_t B, the point at t on the geodesic from A⁻¹ (t = 0) to B (t = 1); t = .5 is the
    geometric mean.

    At t = .5 it solves M A M = B (Zadeh et al., Eq 8 and 13).

    Args:
        a: (F, F) symmetric positive definite.
        b: (F, F) symmetric positive definite.
        t: 0 to 1.
    """
    half = geodesic_factor(a, b, t)
    return symmetric(half @ half.T)


def geodesic_factor(a: Floats, b: Floats, t: float) -> Floats:
    """Return H (F, F) with HHᵀ = A⁻¹ #_t B, which is L⁻ᵀ (Lᵀ B L)ᵗ L⁻¹ for A = LLᵀ; see `geodesic`."""
    lower = np.linalg.cholesky(a)
    # singular values of a factor keep the digits that eigenvalues of the product would lose
    _, values, right = np.linalg.svd(np.linalg.cholesky(b).T @ lower)
    half: Floats = solve_triangular(lower, (right.T * values**t), trans="T", lower=True)
    return half


def eigen_of_factor(half: Floats) -> tuple[Floats, Floats]:
    """Return the eigenvalues (F,) and eigenvectors (F, F) of HHᵀ, largest first: positive, however
    ill-conditioned it is.
    """
    vectors, values, _ = np.linalg.svd(half)
    return values**2, vectors


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


def spread_of(m: Floats) -> tuple[Floats, Floats]:
    """Return orthonormal columns for where M has any spread (F, R), and for the rest (F, F − R);
    the identity if R = F.

    Spread is an eigenvalue above `FLOOR` × the mean of all.

    Args:
        m: (F, F) symmetric, positive semi-definite up to rounding, not 0.
    """
    values, vectors = np.linalg.eigh(m)
    there = values > FLOOR * np.trace(m) / len(m)
    if there.all():
        return np.eye(len(m)), np.empty((len(m), 0))
    return vectors[:, there], vectors[:, ~there]


def completed(half: Floats, still: Floats) -> Floats:
    """Return the factor (F, F) of a metric that is HHᵀ where it was learned, and its geometric mean
    elsewhere.

    Args:
        half: (F, R) H.
        still: (F, F − R) orthonormal columns for directions that H does not reach.
    """
    if not still.shape[1]:
        return half
    values = np.linalg.svd(half, compute_uv=False)
    return np.hstack([half, still * np.exp(np.log(values).mean())])


def components(half: Floats) -> Floats:
    """Return C (F, F) with CᵀC = HHᵀ: eigenvectors times roots of their eigenvalues, the largest
    first, signs fixed.
    """
    values, vectors = eigen_of_factor(half)
    largest = np.abs(vectors).argmax(axis=0)
    signs = np.where(vectors[largest, np.arange(len(half))] < 0, -1.0, 1.0)
    return np.ascontiguousarray((vectors * signs * np.sqrt(values)).T)
