"""Exact k nearest neighbours, block by block: memory grows with the gallery, never with queries ×
gallery.

**Distance and order.** Squared Euclidean distances are computed in float64 and rounded to the 24
significant bits of float32. Gallery row orders those that are equal after rounding, so duplicates
come in the order of their rows. Block size, threads and device decide no rank, short of a float64
sum whose last bit decides how it rounds: about one pair in a hundred million.

**Speed.** On a CPU, `serving.store.search.nearest` finds few neighbours of embeddings that float32
holds. It returns some more than asked for: where the last of them, rounded, is as near as the k-th,
rows beyond may tie, and that query is searched in full. A full search measures every pair by a
product in float64: for large k, a GPU, other embeddings, and distances of a combiner.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from retrieval.errors import DataError
from retrieval.serving.store.search import nearest

Codes = NDArray[Any] | Tensor
DistanceBlock = Callable[[Tensor, Tensor], Tensor]
Rows = NDArray[np.int64]

MOST_ITEMS = 2**29
_COLUMN = MOST_ITEMS - 1
"""Bits of a float64 beyond the 24 of a float32: they hold the column."""
_MAGNITUDE = 2**63 - MOST_ITEMS
"""Other bits but the sign: negative numbers compare as integers once these are inverted."""
_BLOCK_BYTES = 128 * 2**20
_PAIRS_PER_CALL = 2**20
_SELECTED = 2**16
"""Keys selected from at a time: 512 KB stay in a core's cache."""
_DEEP = 256
"""From a k of one row in so many on, a full search is the faster one."""
_MARGIN = 8
_CANCELLED = 2.0**-18
"""Squared distances below this part of |q|² have lost float32's precision in |q|² + |g|² − 2 q·g.
"""


def exact_neighbors(
    queries: Codes,
    gallery: Codes,
    k: int,
    *,
    exclude: NDArray[np.integer[Any]] | None = None,
    block: int | None = None,
    distance: DistanceBlock | None = None,
    device: str = "auto",
) -> tuple[Rows, NDArray[np.float32]]:
    """Return the exact k nearest gallery items of each query; equal distances by gallery row.

    Args:
        queries: (Q, C) codes of any float or integer type.
        gallery: (N, C) codes.
        k: how many neighbours. Where the gallery has fewer, index −1 and distance infinity fill the
            row, as in FAISS.
        exclude: (Q,) the gallery row to leave out for each query (`arange(Q)` when the queries are
            the gallery); −1 leaves out none.
        block: queries at a time; None fits the working memory to about 130 MB.
        distance: codes (B, C) and (R, C) to distances (B, R), smaller is closer; None is Euclidean.
        device: "auto" takes CUDA where there is one; with `distance`, the codes' own device.

    Returns:
        Indices (Q, k) int64 and distances (Q, k) float32, nearest first.

    Raises:
        DataError: codes of wrong shape, not finite, or none; `k` below 1; distances that are NaN.
    """
    search = Neighbors(gallery, distance=distance, block=block, device=device)
    queries = as_tensor(queries, "queries")
    total = len(queries)
    indices = np.empty((total, max(k, 0)), dtype=np.int64)
    distances = np.empty((total, max(k, 0)), dtype=np.float32)
    size = search.block(k)
    for start in range(0, max(total, 1), size):
        rows = slice(start, start + size)
        own = None if exclude is None else exclude[rows]
        indices[rows], distances[rows] = search(queries[rows], k, own)
    return indices, distances


class Neighbors:
    """A gallery ready to be searched, one block of queries a call.

    Args:
        gallery: (N, C) codes.
        distance: see `exact_neighbors`, as for the rest.
        block: see `exact_neighbors`.
        device: see `exact_neighbors`.

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
    ) -> None:
        if block is not None and block < 1:
            raise DataError(f"block is {block}: at least one query at a time must be searched.")
        codes = as_tensor(gallery, "gallery")
        if not len(codes):
            raise DataError("The gallery is empty: there is nothing to search.")
        self.size, self.width = codes.shape
        if self.size > MOST_ITEMS:
            raise DataError(
                f"The gallery has {self.size:,} items; exact search takes {MOST_ITEMS:,} at most."
            )
        if device != "auto":
            self.device = torch.device(device)
        elif distance is not None:  # it may have weights of its own, which lie where the codes do
            self.device = codes.device
        else:
            self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.distance = distance
        self._block = block
        self._codes = codes.to(self.device)
        self._crowded = False
        # A power of two scales without rounding: no square of a code leaves float32.
        largest = float(codes.abs().max().double()) if codes.numel() else 0.0
        self._exponent = max(-1000, min(1000, int(np.frexp(largest)[1])))

    def block(self, k: int) -> int:
        """Return how many queries to search a call when each asks for `k` neighbours."""
        if self._block is not None:
            return self._block
        # float64 distances of every pair; the answer, and what is made of it
        row = (0 if self._shallow(k) else self.size * 8) + max(1, min(k, self.size)) * 40
        return max(1, min(1024, _BLOCK_BYTES // row))

    def __call__(
        self, queries: Codes, k: int, exclude: NDArray[np.integer[Any]] | None = None
    ) -> tuple[Rows, NDArray[np.float32]]:
        """Return indices and distances (B, k) for queries (B, C); see `exact_neighbors`."""
        if k < 1:
            raise DataError(f"k is {k}: at least one neighbour must be asked for.")
        codes = as_tensor(queries, "queries").to(self.device)
        if codes.shape[1] != self.width:
            raise DataError(
                f"The queries have {codes.shape[1]} columns, the gallery {self.width}: "
                "they must be codes of one model."
            )
        left_out = None if exclude is None else np.asarray(exclude, np.int64)
        if not len(codes):
            return np.empty((0, k), dtype=np.int64), np.empty((0, k), dtype=np.float32)
        with torch.no_grad():
            if self.distance is not None:
                table = self._measured(codes, self.distance)
                columns, values = self._selected(table, min(k, self.size), left_out)
            else:
                columns, values = self._euclidean(codes, min(k, self.size), left_out)
        with np.errstate(over="ignore", under="ignore"):  # what float32 cannot hold has its order
            distances = values.astype(np.float32)
        if left_out is not None and k >= self.size:
            # Only now can the row left out be among the answers; it is the last entry of its query.
            hit = columns == left_out[:, None]
            columns[hit] = -1
            distances[hit] = np.inf
            places = np.argsort(hit, axis=1, kind="stable")
            columns = np.take_along_axis(columns, places, 1)
            distances = np.take_along_axis(distances, places, 1)
        if k > self.size:
            pad = ((0, 0), (0, k - self.size))
            columns = np.pad(columns, pad, constant_values=-1)
            distances = np.pad(distances, pad, constant_values=np.inf)
        return columns, distances

    def _measured(self, queries: Tensor, distance: DistanceBlock) -> Tensor:
        """Return the callable's distances (B, N), float64."""
        values = torch.empty((len(queries), self.size), dtype=torch.float64, device=self.device)
        step = max(1, _PAIRS_PER_CALL // len(queries))
        for start in range(0, self.size, step):
            part = distance(queries, self._codes[start : start + step])
            if part.shape != (len(queries), min(step, self.size - start)):
                raise DataError(
                    f"The distance gave shape {tuple(part.shape)} for {len(queries)} queries and"
                    f" {min(step, self.size - start)} gallery items: it must give one number per"
                    " pair, (queries, gallery)."
                )
            values[:, start : start + step] = part
        if values.isnan().any():
            raise DataError(
                "The distance gave NaN for a pair of codes: such a pair has no rank. Check the"
                " combiner."
            )
        return values

    def _euclidean(
        self, queries: Tensor, k: int, left_out: Rows | None
    ) -> tuple[Rows, NDArray[np.float64]]:
        """Return columns and distances (B, k)."""
        scaled = self._scaled(queries)
        if float(scaled.abs().max() if scaled.numel() else 0) > 2.0**60:
            raise DataError(
                "The queries are over 10^18 times as large as the gallery's codes: they cannot be"
                " of one model."
            )
        single = _single(scaled) if self._shallow(k) and not self._crowded else None
        if single is None:
            columns, squared = self._full(scaled, k, left_out)
        else:
            columns, squared, crowded = self._few(single, k, left_out)
            rest = np.flatnonzero(crowded)
            self._crowded = 2 * len(rest) > len(single)  # as in a collapsed embedding
            step = max(1, _BLOCK_BYTES // (8 * self.size))
            for start in range(0, len(rest), step):
                rows = rest[start : start + step]
                own = None if left_out is None else left_out[rows]
                columns[rows], squared[rows] = self._full(scaled[torch.from_numpy(rows)], k, own)
        with np.errstate(over="ignore", under="ignore"):
            return columns, np.ldexp(np.sqrt(squared), self._exponent)

    def _shallow(self, k: int) -> bool:
        """Return whether `nearest` searches for so many neighbours."""
        few = (
            self.distance is None
            and self.device.type == "cpu"
            and self.width
            and k * _DEEP <= self.size
        )
        return bool(few) and self._singles is not None

    def _scaled(self, codes: Tensor) -> Tensor:
        return codes.to(torch.float64) * 2.0**-self._exponent

    @cached_property
    def _singles(self) -> NDArray[np.float32] | None:
        return _single(self._scaled(self._codes))

    @cached_property
    def _doubles(self) -> tuple[Tensor, Tensor]:
        """The scaled gallery (N, C), and what multiplies queries (C + 2, N): its norms, and ones."""
        codes = self._scaled(self._codes)
        norms = codes.square().sum(1)
        return codes, torch.cat([codes, norms[:, None], torch.ones_like(norms)[:, None]], dim=1).T

    def _few(
        self, queries: NDArray[np.float32], k: int, left_out: Rows | None
    ) -> tuple[Rows, NDArray[np.float64], NDArray[np.bool_]]:
        """Return columns and squared distances (B, k), and whose k-th may tie with more (B,)."""
        assert self._singles is not None
        wide = min(self.size, k + 1 + _MARGIN + k // 16)
        squared, columns = nearest(queries, self._singles, wide, threads=torch.get_num_threads())
        beyond = _parts(rounded_keys(squared[:, -1:], columns[:, -1:]))[1][:, 0]
        if left_out is not None:
            squared[columns == left_out[:, None]] = np.inf
        keys = rounded_keys(squared, columns)
        keys.sort(axis=1)
        columns, squared = _parts(keys[:, :k])
        return columns, squared, (squared[:, -1] >= beyond) & (wide < self.size)

    def _full(
        self, queries: Tensor, k: int, left_out: Rows | None
    ) -> tuple[Rows, NDArray[np.float64]]:
        """Measure all pairs; return columns and squared distances (B, k)."""
        codes, factors = self._doubles
        norms = queries.square().sum(1)
        # |q|² + |g|² − 2 q·g in one product; whole numbers stay exact in it.
        rows = torch.cat([-2 * queries, torch.ones_like(norms)[:, None], norms[:, None]], dim=1)
        squared = rows @ factors
        floor = norms * _CANCELLED
        crowded = ((squared < floor[:, None]).sum(1) > k).nonzero().ravel()
        if len(crowded):  # a collapsed embedding: nearly all its pairs are measured again
            apart = torch.cdist(
                queries[crowded], codes, compute_mode="donot_use_mm_for_euclid_dist"
            )
            squared[crowded] = apart.square_()
            floor[crowded] = 0
        columns, values = self._selected(squared, k, left_out)
        for query, place in _pairs(values < floor.cpu().numpy()[:, None], max(self.width, 1)):
            row, column = (
                torch.from_numpy(each).to(self.device) for each in (query, columns[query, place])
            )
            values[query, place] = (queries[row] - codes[column]).square_().sum(1).cpu().numpy()
        keys = rounded_keys(values, columns)
        keys.sort(axis=1)
        return _parts(keys)

    def _selected(
        self, values: Tensor, k: int, left_out: Rows | None
    ) -> tuple[Rows, NDArray[np.float64]]:
        """Return columns and rounded values (B, k) of the k smallest of each row, smallest first."""
        if left_out is not None:
            chosen = np.flatnonzero(left_out >= 0)
            values[torch.from_numpy(chosen), torch.from_numpy(left_out[chosen])] = torch.inf
        if values.device.type != "cpu":
            every = torch.arange(self.size, device=values.device)
            keys = rounded_keys(values, every).topk(k, dim=1, largest=False, sorted=True).values
            return _parts(keys.cpu().numpy())
        table, numbers = values.numpy(), np.arange(self.size)
        found = np.empty((len(table), k), np.int64)
        step = max(1, _SELECTED // self.size)
        for start in range(0, len(table), step):
            part = rounded_keys(table[start : start + step], numbers)
            if k < self.size:
                part.partition(k - 1, axis=1)
            found[start : start + step] = part[:, :k]
        found.sort(axis=1)
        return _parts(found)


def rounded_keys(values: Any, columns: Any) -> Any:
    """Return int64 that compare by value rounded to 24 bits (halves away from zero), then by
    column.

    Args:
        values: (B, n) float64, an array or a tensor; no NaN.
        columns: int64, broadcast against them.
    """
    keys = (values + 0.0).view(torch.int64 if isinstance(values, Tensor) else np.int64)  # −0 is 0
    keys += MOST_ITEMS // 2
    keys &= ~_COLUMN
    keys ^= (keys >> 63) & _MAGNITUDE
    keys |= columns
    return keys


def key_rows(keys: Rows) -> Rows:
    """Return the columns of `rounded_keys`."""
    return keys & _COLUMN


def _parts(keys: Rows) -> tuple[Rows, NDArray[np.float64]]:
    """Return the columns and rounded values that `rounded_keys` put together."""
    bits = keys & ~_COLUMN
    bits ^= (bits >> 63) & _MAGNITUDE
    return key_rows(keys), bits.view(np.float64)


def _pairs(mask: NDArray[np.bool_], width: int) -> Any:
    """Yield rows and columns where a mask is true, 16 MB of differences of that width at a time."""
    row, column = mask.nonzero()
    step = max(1, 2**21 // width)
    for start in range(0, len(row), step):
        yield row[start : start + step], column[start : start + step]


def _single(codes: Tensor) -> NDArray[np.float32] | None:
    """Return float64 codes in float32; None where that would round one."""
    single = codes.to(torch.float32)
    return single.contiguous().numpy() if bool((single == codes).all()) else None


def as_tensor(codes: Codes, what: str) -> Tensor:
    """Return codes as a finite matrix, in its own floating type or, of whole numbers, float64."""
    if not isinstance(codes, Tensor):
        array = np.asarray(codes)
        if array.dtype.kind not in "fiub":
            raise DataError(f"The {what} are of type {array.dtype}: codes must be numbers.")
        codes = torch.from_numpy(
            np.ascontiguousarray(
                array, dtype=array.dtype if array.dtype.kind == "f" else np.float64
            )
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
            f"{len(bad):,} of {len(codes):,} {what} codes hold NaN or infinity, the first in row"
            f" {int(bad[0])}: they have no distance to anything. The model has probably diverged."
        )
    return codes


def rows_of(codes: Codes, rows: NDArray[np.int64]) -> Codes:
    """Return some rows of codes, where they lie."""
    if isinstance(codes, Tensor):
        return codes[torch.from_numpy(rows).to(codes.device)]
    return np.asarray(codes)[rows]
