"""Candidates from a low-precision product, with a proof for each query that none is missing.

With centred codes q and g, the nearest items have the largest s = q·g − |g|²/2, since |q − g|² = |q|² − 2 s. The product
is made in bfloat16 (or float32) from rounded codes q̂, ĝ, whose rounding is known. By Cauchy and Schwarz

    |s − ŝ| ≤ |q − q̂| max|g| + |q̂| max|g − ĝ| + what the half norms and the float32 sum lose =: E.

Every item with ŝ ≥ T, T chosen for each query, becomes a candidate and is measured exactly. An item that is none has
s < T + E, so its squared distance is above |q|² − 2 (T + E). Where the k-th candidate is nearer, the k are the nearest.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from retrieval.evaluation.selection import order_ragged

_GROUPS = 32


class Proposer:
    """Proposes and measures candidates.

    Args:
        gallery: (N, C) float64 codes, scaled to at most 1.
        precision: bfloat16 or float32.
    """

    def __init__(self, gallery: Tensor, precision: torch.dtype) -> None:
        self._gallery = gallery
        self._precision = precision
        self._centre = gallery.mean(0)
        centred = gallery - self._centre
        norms = centred.square().sum(1)
        rounded = centred.to(precision)
        self._norm = float(norms.max().sqrt())
        self._lost = float((centred - rounded.double()).norm(dim=1).max())
        # The half norm enters the product as three numbers of low precision that add up to it.
        rest, parts = norms / 2, []
        for _ in range(3):
            parts.append(rest.to(precision))
            rest = rest - parts[-1].double()
        self._lost_half = float(rest.abs().max())
        size, width = gallery.shape
        # Whole groups of columns; the last ones repeat item 0 and are never candidates.
        self._size = size
        self._padded = -(-size // _GROUPS) * _GROUPS
        self._columns = torch.zeros((width + 3, self._padded), dtype=precision)
        self._columns[:width, :size] = rounded.T
        for number, part in enumerate(parts):
            self._columns[width + number, :size] = part
        self._columns[width, size:] = torch.finfo(torch.bfloat16).max
        self._kept: Tensor | None = None
        self._asked = self._failed = 0

    @staticmethod
    def worthwhile(k: int, size: int) -> bool:
        """Return whether proposals can be faster than measuring everything."""
        return size >= 4096 and k * 32 <= size

    def serves(self, k: int) -> bool:
        """Return whether to go on: not for large `k`, nor on codes so crowded that most proofs fail."""
        return self.worthwhile(k, self._size) and not (self._asked >= 256 and self._failed * 2 > self._asked)

    def __call__(
        self, queries: Tensor, k: int, left_out: NDArray[np.int64] | None
    ) -> tuple[NDArray[np.int64], NDArray[np.float32], NDArray[np.bool_]]:
        """Return columns and squared distances (B, k) of scaled queries (B, C), and which queries (B,) lack a proof."""
        from retrieval.evaluation.selection import direct

        rows = len(queries)
        centred = queries - self._centre
        norms = centred.square().sum(1)
        rounded = centred.to(self._precision)
        minus = torch.full((rows, 3), -1.0, dtype=self._precision)
        if self._kept is None or len(self._kept) < rows:
            self._kept = torch.empty((rows, self._padded), dtype=self._precision)
        product = torch.mm(torch.cat([rounded, minus], dim=1), self._columns, out=self._kept[:rows])
        # As integers, positive floats compare as they do as floats, and above all negative ones.
        scores = product.view(torch.int16 if self._precision == torch.bfloat16 else torch.int32).numpy()
        if left_out is not None:
            chosen = np.flatnonzero(left_out >= 0)
            scores[chosen, left_out[chosen]] = np.iinfo(scores.dtype).min
        # T: that of the groups' best scores which leaves k and a margin above it: a vectorised maximum and a small partition,
        # several times as fast as selecting among all.
        best = scores.reshape(rows, _GROUPS, -1).max(axis=1)
        wanted = min(best.shape[1], k + max(16, k // 2))
        best.partition(best.shape[1] - wanted, axis=1)
        threshold = best[:, best.shape[1] - wanted]
        mask = scores >= np.maximum(threshold, 1)[:, None]
        counts = np.count_nonzero(mask, axis=1).astype(np.int64)
        missing = (threshold <= 0) | (counts < k) | (counts > 16 * wanted)
        mask[missing] = False
        places = np.flatnonzero(mask).astype(np.int64, copy=False)
        counts[missing] = 0
        owner = np.repeat(np.arange(rows), counts)
        columns = places - owner * self._padded
        found = direct(queries, self._gallery, owner, columns)
        good = np.flatnonzero(~missing)
        out, squared = np.full((rows, k), -1, np.int64), np.full((rows, k), np.inf, np.float32)
        if len(good):
            out[good], squared[good] = order_ragged(counts[good], columns, found, k)
        bound = self._bound(centred, norms, rounded, threshold)
        missing |= squared[:, -1] >= bound
        self._asked += rows
        self._failed += int(missing.sum())
        return out, squared, missing

    def _bound(
        self, centred: Tensor, norms: Tensor, rounded: Tensor, threshold: NDArray[np.signedinteger]
    ) -> NDArray[np.float64]:
        """Return (B,) below which no item that is not a candidate can lie, in squared distance."""
        back = rounded.double()
        size, lost = back.norm(dim=1), (centred - back).norm(dim=1)
        largest = self._norm + self._lost
        summed = (self._columns.shape[0] + 1) * 2.0**-23 * (size * largest + largest**2)
        error = lost * self._norm + size * self._lost + self._lost_half + summed + 1e-30
        # Rounding the product is monotone: what was rounded to less than T was less than T.
        value = torch.from_numpy(np.ascontiguousarray(threshold)).view(self._precision).double()
        bound = norms - 2 * (value + error)
        # Room for rounding the measured distance to float32, and for float64's own error.
        return np.asarray((bound - bound.abs() * 1e-6 - norms * 1e-12).numpy())
