"""Squared distances in float32, as fast as FAISS has them, and how far they may be off."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from retrieval.serving.index.contract import Floats, Rows
from retrieval.serving.runtime import load_faiss

UNIT = 2.0**-24
TINY = 2.0**-100
"""Above what underflow loses of a coordinate's product."""
_BLOCK = 1 << 20  # numbers of vectors at a time
_PAIR_NUMBERS = 1 << 16  # measured at a time


def relative_error(width: int) -> float:
    """Return γ = nu / (1 − nu), n a little above the width: Σ (q − x)² in float32 is off by a part γ of itself, but for underflow."""
    terms = (width + 16) * UNIT
    return terms / (1 - terms)


def squared_distances(query: Floats, vectors: Floats, out: Floats) -> None:
    """Write Σ (q − x)² (N,) of a query (P,) and the rows of a C-contiguous matrix (N, P) to `out`."""
    faiss = load_faiss()
    faiss.fvec_L2sqr_ny(*map(faiss.swig_ptr, (out, query, vectors)), vectors.shape[1], len(vectors))


def squared_norms(vectors: Floats) -> Floats:
    """Return each row's |x|² (N,) as `nearest` takes it: the same for every search, 4 bytes a row to keep."""
    norms = np.empty(len(vectors), np.float32)
    step = max(1, _BLOCK // max(1, vectors.shape[1]))
    for start in range(0, len(vectors), step):
        norms[start : start + step] = norms_of(np.ascontiguousarray(vectors[start : start + step]))
    return norms


def norms_of(block: Floats) -> Floats:
    """Return |x|² (B,) in float32."""
    faiss = load_faiss()
    norms = np.empty(len(block), np.float32)
    faiss.fvec_norms_L2sqr(faiss.swig_ptr(norms), faiss.swig_ptr(block), block.shape[1], len(block))
    return norms


def measured(
    queries: NDArray[np.float64], vectors: Floats, query: Rows, row: Rows, columns: slice = slice(None)
) -> NDArray[np.float64]:
    """Return |q − x|² (n,) in double precision, of pairs of a query and a row, within some columns.

    Args:
        queries: (Q, columns).
        vectors: (N, P).
        query: (n,).
        row: (n,).
        columns: of the vectors.
    """
    squared = np.empty(len(row))
    step = max(1, _PAIR_NUMBERS // vectors.shape[1])
    for start in range(0, len(row), step):
        pairs = slice(start, start + step)
        apart = queries.take(query[pairs], axis=0)
        apart -= vectors.take(row[pairs], axis=0)[:, columns]
        np.einsum("ij,ij->i", apart, apart, out=squared[pairs])
    return squared
