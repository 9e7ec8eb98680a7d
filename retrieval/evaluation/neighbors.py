"""Exact k nearest neighbours, block by block: memory grows with the gallery, never with queries × gallery.

**Distance and order.** Squared Euclidean distances are computed in double precision and rounded to the 24 significant
bits of float32; those that are equal after rounding are ordered by gallery row. So duplicates of a gallery item come in the order of their
rows, and block size, threads and the way a candidate was found decide no rank, short of a float64 sum whose last bit
decides how it rounds: about one pair in a hundred million.

**Speed.** Where few neighbours are asked for, a low-precision product proposes candidates, which are measured exactly.
An error bound (`candidates.Proposer`) tells for each query whether anything nearer can have been missed; if so, that
query is searched in full. The result is the same.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from retrieval.errors import DataError
from retrieval.evaluation.candidates import Proposer
from retrieval.evaluation.selection import (
    MAX_COLUMNS,
    direct,
    order_ragged,
    smallest,
    smallest_on_device,
    smallest_remeasured,
)

Codes = NDArray[Any] | Tensor
DistanceBlock = Callable[[Tensor, Tensor], Tensor]
Candidates = Literal["auto", "bfloat16", "float32", "none"]

_BLOCK_BYTES = 128 * 2**20
_PAIRS_PER_CALL = 2**20
# d² below this part of |q|² has lost float32 precision in |q|² + |g|² − 2 q·g, even in float64: computed directly.
# Larger galleries' norms need no part in it: d² can be that small only where |g| is within 1 % of |q|.
_CANCELLED = 2.0**-18


def exact_neighbors(
    queries: Codes,
    gallery: Codes,
    k: int,
    *,
    exclude: NDArray[np.integer[Any]] | None = None,
    block: int | None = None,
    distance: DistanceBlock | None = None,
    device: str = "auto",
    candidates: Candidates = "auto",
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Return the exact k nearest gallery items of each query, nearest first; equal distances by gallery row.

    Args:
        queries: (Q, C) codes of any float or integer type.
        gallery: (N, C) codes.
        k: how many neighbours. Where the gallery has fewer, index −1 and distance infinity fill the row, as in FAISS.
        exclude: (Q,) the gallery row to leave out for each query (`arange(Q)` when the queries are the gallery);
            −1 leaves out none.
        block: queries at a time; None fits the working memory to about 130 MB.
        distance: codes (B, C) and (R, C) to distances (B, R), smaller is closer; None is the Euclidean distance.
        device: "auto" takes CUDA where there is one; with `distance`, the codes' own device.
        candidates: which precision may propose candidates when `k` is small: "auto" the fastest here, "none" no
            proposals. The result is the same.

    Returns:
        Indices (Q, k) int64 and distances (Q, k) float32.

    Raises:
        DataError: codes of wrong shape, not finite, or none; `k` below 1; distances that are NaN.
    """
    search = Neighbors(gallery, distance=distance, block=block, device=device, candidates=candidates)
    queries = as_tensor(queries, "queries")
    total = len(queries)
    indices = np.empty((total, max(k, 0)), dtype=np.int64)
    distances = np.empty((total, max(k, 0)), dtype=np.float32)
    size = search.block(k)
    for start in range(0, max(total, 1), size):
        rows = slice(start, start + size)
        indices[rows], distances[rows] = search(queries[rows], k, None if exclude is None else exclude[rows])
    return indices, distances


class Neighbors:
    """A gallery ready to be searched, one block of queries a call.

    Args:
        gallery: (N, C) codes.
        distance: see `exact_neighbors`, as for the rest.
        block: see `exact_neighbors`.
        device: see `exact_neighbors`.
        candidates: see `exact_neighbors`.

    Raises:
        DataError: the gallery is empty, not a matrix, or not finite.
    """

    def __init__(
        self,
        gallery: Codes,
        *,
        distance: DistanceBlock | None = None,
        block: int | None = None,
        device: str = "auto",
        candidates: Candidates = "auto",
    ) -> None:
        if block is not None and block < 1:
            raise DataError(f"block is {block}: at least one query at a time must be searched.")
        if candidates not in ("auto", "bfloat16", "float32", "none"):
            raise DataError(f"candidates is '{candidates}'; it may be auto, bfloat16, float32 or none.")
        codes = as_tensor(gallery, "gallery")
        if not len(codes):
            raise DataError("The gallery is empty: there is nothing to search.")
        self.size, self.width = codes.shape
        if self.size > MAX_COLUMNS:
            raise DataError(
                f"The gallery has {self.size:,} items; exact search takes {MAX_COLUMNS:,} at most."
            )
        if device != "auto":
            self.device = torch.device(device)
        elif distance is not None:  # it may have weights of its own, which lie where the codes do
            self.device = codes.device
        else:
            self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.distance = distance
        self._block = block
        self._kept: Tensor | None = None
        self._proposer: Proposer | None = None
        if distance is not None:
            self._codes = codes.to(self.device)
            return
        # A power of two scales without rounding: no code is so large or small that its square leaves float32.
        largest = float(codes.abs().max().double()) if codes.numel() else 0.0
        self._exponent = max(-1000, min(1000, int(np.frexp(largest)[1])))
        self._codes = codes.to(self.device, torch.float64) * 2.0**-self._exponent
        norms = self._codes.square().sum(1)
        self._columns = torch.cat([self._codes, norms[:, None], torch.ones_like(norms)[:, None]], dim=1).T
        self._precision = _proposal_precision(candidates) if self.device.type == "cpu" else None

    def block(self, k: int) -> int:
        """Return how many queries to search a call when each asks for `k` neighbours."""
        if self._block is not None:
            return self._block
        row = self.size * 8 + min(k, self.size) * 40  # float64 distances; the answer, and what is made of it
        return max(1, min(1024, _BLOCK_BYTES // row))

    def __call__(
        self, queries: Codes, k: int, exclude: NDArray[np.integer[Any]] | None = None
    ) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Return indices and distances (B, k) for a block of queries (B, C); see `exact_neighbors`."""
        if k < 1:
            raise DataError(f"k is {k}: at least one neighbour must be asked for.")
        codes = as_tensor(queries, "queries").to(self.device)
        if codes.shape[1] != self.width:
            raise DataError(
                f"The queries have {codes.shape[1]} columns, the gallery {self.width}: they must be codes of one model."
            )
        left_out = _checked_exclude(exclude, len(codes), self.size)
        if not len(codes):
            return np.empty((0, k), dtype=np.int64), np.empty((0, k), dtype=np.float32)
        with torch.no_grad():
            if self.distance is not None:
                columns, values = self._select(
                    self._measured(codes, self.distance), min(k, self.size), left_out
                )
            else:
                columns, values = self._euclidean(codes, min(k, self.size), left_out)
        if left_out is not None and k >= self.size:
            # Only now can the row left out be among the answers; it is the last entry of its query.
            hit = columns == left_out[:, None]
            columns[hit] = -1
            values[hit] = np.inf
            places = np.argsort(hit, axis=1, kind="stable")
            columns, values = np.take_along_axis(columns, places, 1), np.take_along_axis(values, places, 1)
        if k > self.size:
            pad = ((0, 0), (0, k - self.size))
            columns = np.pad(columns, pad, constant_values=-1)
            values = np.pad(values, pad, constant_values=np.inf)
        return columns, values

    def _measured(self, queries: Tensor, distance: DistanceBlock) -> Tensor:
        """Return the callable's distances (B, N), float64."""
        values = self._buffer(len(queries))
        step = max(1, _PAIRS_PER_CALL // len(queries))
        for start in range(0, self.size, step):
            part = distance(queries, self._codes[start : start + step])
            if part.shape != (len(queries), min(step, self.size - start)):
                raise DataError(
                    f"The distance gave shape {tuple(part.shape)} for {len(queries)} queries and "
                    f"{min(step, self.size - start)} gallery items: it must give one number per pair, (queries, gallery)."
                )
            values[:, start : start + step] = part
        if values.isnan().any():
            raise DataError(
                "The distance gave NaN for a pair of codes: such a pair has no rank. Check the combiner."
            )
        return values

    def _euclidean(
        self, queries: Tensor, k: int, left_out: NDArray[np.int64] | None
    ) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        scaled = queries.to(torch.float64) * 2.0**-self._exponent
        if float(scaled.abs().max() if scaled.numel() else 0) > 2.0**60:
            raise DataError(
                "The queries are over 10^18 times as large as the gallery's codes: they cannot be of one model."
            )
        if self._precision is not None and self._proposer is None and Proposer.worthwhile(k, self.size):
            self._proposer = Proposer(self._codes, self._precision)
        if self._proposer is None or not self._proposer.serves(k):
            columns, squared = self._full(scaled, k, left_out)
        else:
            columns, squared, missing = self._proposer(scaled, k, left_out)
            if missing.any():
                rest = np.flatnonzero(missing)
                size = self.block(k)
                for start in range(0, len(rest), size):
                    rows = rest[start : start + size]
                    columns[rows], squared[rows] = self._full(
                        scaled[torch.from_numpy(rows)], k, None if left_out is None else left_out[rows]
                    )
        np.sqrt(squared, out=squared)
        if abs(self._exponent) < 100:
            squared *= np.float32(2.0**self._exponent)
            return columns, squared
        with np.errstate(over="ignore", under="ignore"):  # float32 holds no such distance; the order is right
            return columns, np.ldexp(squared, self._exponent)

    def _full(
        self, queries: Tensor, k: int, left_out: NDArray[np.int64] | None
    ) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Measure all pairs of scaled queries and the gallery; return columns and squared distances (B, k)."""
        norms = queries.square().sum(1)
        # |q|² + |g|² − 2 q·g in one product; whole numbers stay exact in it.
        rows = torch.cat([-2 * queries, torch.ones_like(norms)[:, None], norms[:, None]], dim=1)
        squared = torch.mm(rows, self._columns, out=self._buffer(len(queries)))
        return self._select(squared, k, left_out, queries, (norms * _CANCELLED).to(torch.float32))

    def _select(
        self,
        values: Tensor,
        k: int,
        left_out: NDArray[np.int64] | None,
        queries: Tensor | None = None,
        floor: Tensor | None = None,
    ) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Return columns and values of the k smallest of each row; those below `floor` are measured again."""
        if left_out is not None:
            chosen = np.flatnonzero(left_out >= 0)
            values[torch.from_numpy(chosen), torch.from_numpy(left_out[chosen])] = torch.inf
        if values.device.type != "cpu":
            return self._select_on_device(values, k, queries, floor)
        table, limit = values.numpy(), None if floor is None else floor.numpy()
        columns, nearest = np.empty((len(values), k), np.int64), np.empty((len(values), k), np.float32)

        def part(rows: slice) -> None:
            def again(row: NDArray[np.int64], column: NDArray[np.int64]) -> NDArray[np.float64]:
                assert queries is not None
                return self._direct(queries[rows], row, column)

            columns[rows], nearest[rows] = (
                smallest(table[rows], k, signed=True)
                if limit is None
                else smallest_remeasured(table[rows], k, limit[rows], again)
            )

        _in_threads(part, len(values))
        return columns, nearest

    def _select_on_device(
        self, values: Tensor, k: int, queries: Tensor | None, floor: Tensor | None
    ) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Do as `_select`, in torch operations alone."""
        wide = k
        if floor is not None:
            wide = max(k, int((values < floor[:, None]).sum(1).max()))
        columns, nearest = smallest_on_device(values, wide)
        if queries is not None and floor is not None:
            for part in torch.split((nearest < floor[:, None]).nonzero(), 2**18):
                row, place = part.T
                apart = queries[row] - self._codes[columns[row, place]]
                nearest[row, place] = apart.square().sum(1)
        counts = np.full(len(values), wide, dtype=np.int64)
        return order_ragged(counts, columns.cpu().numpy().ravel(), nearest.cpu().numpy().ravel(), k)

    def _direct(
        self, queries: Tensor, rows: NDArray[np.int64], columns: NDArray[np.int64]
    ) -> NDArray[np.float64]:
        """Return |q − g|² of single pairs, without cancellation."""
        used, place = np.unique(columns, return_inverse=True)
        if len(used) * len(queries) <= 4 * len(rows):  # most pairs are wanted: a collapsed embedding
            out = np.empty((len(queries), len(used)))
            step = max(1, 2**16 // self.width)
            for start in range(0, len(used), step):
                part = self._codes[torch.from_numpy(used[start : start + step])]
                apart = torch.cdist(queries, part, compute_mode="donot_use_mm_for_euclid_dist")
                out[:, start : start + step] = apart.square_().numpy()
            return out[rows, place]
        return direct(queries, self._codes, rows, columns)

    def _buffer(self, rows: int) -> Tensor:
        """Return (rows, N) of float64 that is kept between blocks: fresh pages cost as much as the product."""
        if self._kept is None or len(self._kept) < rows:
            self._kept = torch.empty((rows, self.size), dtype=torch.float64, device=self.device)
        return self._kept[:rows]


def _in_threads(part: Callable[[slice], None], rows: int) -> None:
    """Run `part` on slices of the rows, in as many threads as torch may use; NumPy works on one only."""
    threads = min(torch.get_num_threads(), rows)
    if threads == 1:
        part(slice(0, rows))
        return
    edges = [rows * number // threads for number in range(threads + 1)]
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(part, [slice(*pair) for pair in itertools.pairwise(edges)]))


def as_tensor(codes: Codes, what: str) -> Tensor:
    """Return codes as a finite matrix, in its own floating type or, of whole numbers, float64."""
    if not isinstance(codes, Tensor):
        array = np.asarray(codes)
        if array.dtype.kind not in "fiub":
            raise DataError(f"The {what} are of type {array.dtype}: codes must be numbers.")
        codes = torch.from_numpy(
            np.ascontiguousarray(array, dtype=array.dtype if array.dtype.kind == "f" else np.float64)
        )
    codes = codes.detach()
    if codes.ndim != 2:
        raise DataError(
            f"The {what} have shape {tuple(codes.shape)}: codes must be a matrix, one row per item."
        )
    if not codes.is_floating_point():
        codes = codes.to(torch.float64)
    finite = codes.isfinite().all(1)
    if not finite.all():
        bad = (~finite).nonzero().ravel()
        raise DataError(
            f"{len(bad):,} of {len(codes):,} {what} codes hold NaN or infinity, the first in row {int(bad[0])}: "
            "they have no distance to anything. The model has probably diverged."
        )
    return codes


def rows_of(codes: Codes, rows: NDArray[np.int64]) -> Codes:
    """Return some rows of codes, where they lie."""
    if isinstance(codes, Tensor):
        return codes[torch.from_numpy(rows).to(codes.device)]
    return np.asarray(codes)[rows]


def _checked_exclude(
    exclude: NDArray[np.integer[Any]] | None, rows: int, size: int
) -> NDArray[np.int64] | None:
    if exclude is None:
        return None
    out = np.asarray(exclude)
    if out.shape != (rows,) or out.dtype.kind not in "iu":
        raise DataError(
            f"exclude has shape {out.shape} and type {out.dtype}: it must be one gallery row a query, ({rows},)."
        )
    if rows and (out.min() < -1 or out.max() >= size):
        raise DataError(
            f"exclude names gallery rows {out.min()} to {out.max()}; there are 0 to {size - 1}, and -1 for none."
        )
    return out.astype(np.int64)


def _proposal_precision(candidates: Candidates) -> torch.dtype | None:
    """Return the type whose products propose candidates on this CPU, or None."""
    if candidates == "none":
        return None
    if candidates == "bfloat16":
        return torch.bfloat16
    if candidates == "auto" and torch.cpu._is_amx_tile_supported():
        return torch.bfloat16
    # A user may have let float32 products run in lower precision, which the error bound does not cover.
    return torch.float32 if torch.get_float32_matmul_precision() == "highest" else None
