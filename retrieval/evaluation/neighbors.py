"""Exact k nearest neighbours by a distance, and items that are hidden from a query.

Memory grows with the gallery, never with queries × gallery.

*Codes* are the vectors that distances compare: embeddings or, with a combiner, its inputs.

**Distance and order.** Squared Euclidean distances are computed in float64 and rounded to the 24
significant bits of float32. Distances that are equal after rounding are ordered by gallery row.
Block size, threads and device do not change the order, except where the last bit of a float64 sum
decides the rounding: about one pair in a hundred million.

**Speed.** A *full* search measures every pair in float64. A *shallow* search is faster. It serves
small k on a CPU, if distances are Euclidean and float32 holds the codes exactly. It asks
`store.search.nearest` for a few neighbours more than k. If the last of them is, after
rounding, as near as the k-th, then further items may tie with the k-th, and the query is searched
in full.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor

from retrieval.base.arrays import Array, Bools, Floats32, Floats64, Ints
from retrieval.errors import DataError, did_you_mean
from retrieval.host.factory import calling
from retrieval.model.contracts import Combiner, in_words, refuse_class
from retrieval.model.labels import is_missing

Codes = Array | Tensor
DistanceBlock = Callable[[Tensor, Tensor], Tensor]

MOST_ITEMS = 2**29
# A key (see `rounded_keys`) has the bits of a float64. The last 29 of them are beyond the precision
# of float32 and hold the column, which is the gallery row. The other bits except the sign are
# inverted in negative keys, so that keys compare as integers.
_COLUMN = MOST_ITEMS - 1
_MAGNITUDE = 2**63 - MOST_ITEMS
_BLOCK_BYTES = 128 * 2**20  # working memory of a block
_PAIRS_PER_CALL = 2**20  # of a `distance`
_SELECTED = 2**16  # keys to select from at once; 512 KB stay in a core's cache
_DEEP = 256  # full search is faster if k is more than one gallery item in this many
_MARGIN = 8  # a shallow search takes at least so many neighbours more than k
_DIFFERENCES = 2**21  # numbers in the differences that are computed at once, 16 MB
_CANCELLED = 2.0**-18
"""Below this share of |q|², |q|² + |g|² − 2 q·g in float64 is less precise than float32."""


def exact_neighbors(
    queries: Codes,
    gallery: Codes,
    k: int,
    *,
    exclude: Ints | None = None,
    distance: DistanceBlock | None = None,
    device: str = "auto",
) -> tuple[Ints, Floats32]:
    """Return the exact k nearest gallery items of each query; ties are ordered by gallery row.

    Args:
        queries: (Q, C), codes of any float or integer type.
        gallery: (N, C), codes.
        k: number of neighbours. If the gallery has fewer, index −1 and distance infinity fill up.
        exclude: (Q,), the gallery row to leave out for each query, or −1 to leave out none.
        distance: a function from codes (B, C) and (R, C) to distances (B, R), smaller is closer;
            `None` means Euclidean.
        device: "auto" uses CUDA if available or, with `distance`, the codes' own device.

    Returns:
        Indices (Q, k) int64 and distances (Q, k) float32, nearest first.

    Raises:
        DataError: codes have a wrong shape or are not finite, the gallery is empty, `k` is below 1,
            or distances are NaN.
    """
    search = Neighbors(gallery, distance=distance, device=device)
    queries = as_tensor(queries, "queries")
    total = len(queries)
    size = search.block(k)
    indices = np.empty((total, max(k, 0)), dtype=np.int64)
    distances = np.empty((total, max(k, 0)), dtype=np.float32)
    # without queries, one empty block still checks k and the number of columns
    for start in range(0, max(total, 1), size):
        rows = slice(start, start + size)
        if exclude is None:
            left_out = None
        else:
            left_out = exclude[rows]
        indices[rows], distances[rows] = search(queries[rows], k, left_out)
    return indices, distances


class Neighbors:
    """A gallery to search with one block of queries per call; see `exact_neighbors`.

    Raises:
        DataError: the gallery is empty, not a matrix, or not finite.
    """

    def __init__(
        self, gallery: Codes, *, distance: DistanceBlock | None = None, device: str = "auto"
    ) -> None:
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
        elif distance is not None:  # the weights of a combiner are on the device of the codes
            self.device = codes.device
        else:
            self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.distance = distance
        self._codes = codes.to(self.device)
        self._crowded = False  # whether most queries of the last block had ties at the k-th place
        # scaling by a power of two is exact, and keeps the squares of codes within float32
        if codes.numel():
            largest = float(codes.abs().max().double())
        else:
            largest = 0.0
        self._exponent = max(-1000, min(1000, int(np.frexp(largest)[1])))

    def block(self, k: int) -> int:
        """Return the number of queries per call for `k` neighbours each."""
        # bytes per query: the results and their temporaries, and float64 distances of every pair
        row = max(1, min(k, self.size)) * 40
        if not self._shallow(k):
            row += self.size * 8
        return max(1, min(1024, _BLOCK_BYTES // row))

    def __call__(
        self, queries: Codes, k: int, exclude: Ints | None = None
    ) -> tuple[Ints, Floats32]:
        """Return indices and distances (B, k) for queries (B, C); see `exact_neighbors`."""
        if k < 1:
            raise DataError(f"k is {k}, but it must be at least 1.")
        codes = as_tensor(queries, "queries").to(self.device)
        if codes.shape[1] != self.width:
            raise DataError(
                f"The queries have {codes.shape[1]} columns, but the gallery has {self.width}: "
                "they must be codes of one model."
            )
        columns = np.full((len(codes), k), -1, np.int64)
        distances = np.full((len(codes), k), np.inf, np.float32)
        if not len(codes):
            return columns, distances
        left_out = np.full(len(codes), -1)
        if exclude is not None:
            left_out[:] = exclude
        reach = min(k, self.size)
        with torch.no_grad():
            if self.distance is None:
                rows, values = self._euclidean(codes, reach, left_out)
            else:
                table = self.measured(codes, self.distance)
                rows, values = self._selected(table, reach, left_out)
        # The excluded row has NaN and comes last. It is here only if all rows are.
        present = ~np.isnan(values)
        columns[:, :reach] = np.where(present, rows, -1)
        with np.errstate(over="ignore", under="ignore"):  # cannot change the order any more
            distances[:, :reach] = np.where(present, values, np.inf)
        return columns, distances

    def measured(self, queries: Tensor, distance: DistanceBlock) -> Tensor:
        """Return the distances (B, N) by `distance`, in float64."""
        values = torch.empty((len(queries), self.size), dtype=torch.float64, device=self.device)
        step = max(1, _PAIRS_PER_CALL // len(queries))
        for start in range(0, self.size, step):
            items = self._codes[start : start + step]
            part = distance(queries, items)
            if part.shape != (len(queries), len(items)):
                raise DataError(
                    f"The distance returned shape {tuple(part.shape)} for {len(queries)} queries"
                    f" and {len(items)} gallery items: it must give one number per pair, (queries,"
                    " gallery)."
                )
            values[:, start : start + step] = part
        if values.isnan().any():
            raise DataError(
                "The distance of a pair of codes is NaN, so the pair has no rank. Check the"
                " distance or combiner."
            )
        return values

    def _euclidean(self, queries: Tensor, k: int, left_out: Ints) -> tuple[Ints, Floats64]:
        """Return columns and Euclidean distances (B, k)."""
        scaled = self._scaled(queries)
        if scaled.numel() and float(scaled.abs().max()) > 2.0**60:
            raise DataError(
                "The queries are more than 10^18 times as large as the gallery's codes: the two"
                " cannot be of one model."
            )
        single = None
        if self._shallow(k) and not self._crowded:
            single = _single(scaled)
        if single is None:
            columns, squared = self._full(scaled, k, left_out)
        else:
            columns, squared, crowded = self._shallow_search(single, k, left_out)
            rest = np.flatnonzero(crowded)
            self._crowded = 2 * len(rest) > len(single)  # as in a collapsed embedding
            step = max(1, _BLOCK_BYTES // (8 * self.size))
            for start in range(0, len(rest), step):
                rows = rest[start : start + step]
                some = scaled[torch.from_numpy(rows)]
                columns[rows], squared[rows] = self._full(some, k, left_out[rows])
        with np.errstate(over="ignore", under="ignore"):
            return columns, np.ldexp(np.sqrt(squared), self._exponent)

    def _shallow(self, k: int) -> bool:
        """Return whether a shallow search finds `k` neighbours; see the module."""
        plain = self.distance is None and self.device.type == "cpu" and self.width > 0
        return plain and k * _DEEP <= self.size and self._singles is not None

    def _scaled(self, codes: Tensor) -> Tensor:
        return codes.to(torch.float64) * 2.0**-self._exponent

    @cached_property
    def _singles(self) -> Floats32 | None:
        return _single(self._scaled(self._codes))

    @cached_property
    def _doubles(self) -> tuple[Tensor, Tensor]:
        """The scaled gallery g (N, C), and its factors g, |g|² and 1 (C + 2, N); see `_full`."""
        codes = self._scaled(self._codes)
        norms = codes.square().sum(1)
        return codes, torch.cat([codes, norms[:, None], torch.ones_like(norms)[:, None]], dim=1).T

    def _shallow_search(
        self, queries: Floats32, k: int, left_out: Ints
    ) -> tuple[Ints, Floats64, Bools]:
        """Return columns and squared distances (B, k), and whether the k-th may have ties (B,)."""
        # imported here: checking a recipe needs this module, but no search
        from retrieval.store.exact_search import nearest

        assert self._singles is not None
        wide = min(self.size, k + 1 + _MARGIN + k // 16)
        squared, columns = nearest(queries, self._singles, wide, threads=torch.get_num_threads())
        _, last = _parts(rounded_keys(squared[:, -1:], columns[:, -1:]))
        squared[columns == left_out[:, None]] = np.nan
        keys = rounded_keys(squared, columns)
        keys.sort(axis=1)
        columns, squared = _parts(keys[:, :k])
        # if every item was found, none can tie beyond the last
        crowded = (squared[:, -1] >= last[:, 0]) & (wide < self.size)
        return columns, squared, crowded

    def _full(self, queries: Tensor, k: int, left_out: Ints) -> tuple[Ints, Floats64]:
        """Measure all pairs; return columns and squared distances (B, k)."""
        codes, factors = self._doubles
        norms = queries.square().sum(1)
        # |q|² + |g|² − 2 q·g in one product, which is exact for whole numbers
        rows = torch.cat([-2 * queries, torch.ones_like(norms)[:, None], norms[:, None]], dim=1)
        wide = min(k + 1, self.size)
        floor = (norms * _CANCELLED).cpu().numpy()
        columns, values = self._selected(rows @ factors, wide, left_out)
        # A query with more than k imprecise pairs, as in a collapsed embedding, is measured again.
        crowded = np.flatnonzero(values[:, -1] < floor)
        if wide > k and len(crowded):
            some = queries[torch.from_numpy(crowded).to(self.device)]
            distances = torch.cdist(some, codes, compute_mode="donot_use_mm_for_euclid_dist")
            columns[crowded], values[crowded] = self._selected(
                distances.square_(), wide, left_out[crowded]
            )
            floor[crowded] = 0
        columns = columns[:, :k]
        values = values[:, :k]
        imprecise, ranks = (values < floor[:, None]).nonzero()
        if not len(ranks):
            return columns, values
        step = max(1, _DIFFERENCES // max(self.width, 1))
        for start in range(0, len(ranks), step):
            query = imprecise[start : start + step]
            rank = ranks[start : start + step]
            row = torch.from_numpy(query).to(self.device)
            column = torch.from_numpy(columns[query, rank]).to(self.device)
            squares = (queries[row] - codes[column]).square_()
            values[query, rank] = squares.sum(1).cpu().numpy()
        keys = rounded_keys(values, columns)
        keys.sort(axis=1)
        return _parts(keys)

    def _selected(self, values: Tensor, k: int, left_out: Ints) -> tuple[Ints, Floats64]:
        """Return columns and rounded values (B, k) of each query's k smallest, in order."""
        rows = np.flatnonzero(left_out >= 0)
        values[torch.from_numpy(rows), torch.from_numpy(left_out[rows])] = torch.nan
        if values.device.type != "cpu":
            every = torch.arange(self.size, device=values.device)
            keys = rounded_keys(values, every).topk(k, dim=1, largest=False, sorted=True).values
            return _parts(keys.cpu().numpy())
        table = values.numpy()
        numbers = np.arange(self.size)
        keys = np.empty((len(table), k), np.int64)
        step = max(1, _SELECTED // self.size)
        for start in range(0, len(table), step):
            part = rounded_keys(table[start : start + step], numbers)
            part.partition(k - 1, axis=1)
            keys[start : start + step] = part[:, :k]
        keys.sort(axis=1)
        return _parts(keys)


def rounded_keys(values: Any, columns: Any) -> Any:
    """Return int64 keys that compare by value rounded to 24 bits (halves up), then by column.

    Values are a float64 array or tensor, where NaN comes last. Columns are int64 of the same shape.
    """
    # adding 0 turns −0, whose bits differ, into 0
    keys = (values + 0.0).view(torch.int64 if isinstance(values, Tensor) else np.int64)
    keys += MOST_ITEMS // 2
    keys &= ~_COLUMN
    keys ^= (keys >> 63) & _MAGNITUDE
    keys |= columns
    return keys


def key_rows(keys: Ints) -> Ints:
    """Return the columns of `rounded_keys`."""
    return keys & _COLUMN


def _parts(keys: Ints) -> tuple[Ints, Floats64]:
    """Return the columns and rounded values of `rounded_keys`."""
    bits = keys & ~_COLUMN
    bits ^= (bits >> 63) & _MAGNITUDE
    return key_rows(keys), bits.view(np.float64)


def _single(codes: Tensor) -> Floats32 | None:
    """Return float64 codes in float32, or `None` if float32 would round a number."""
    single = codes.to(torch.float32)
    if bool((single == codes).all()):
        return single.contiguous().numpy()
    return None


def as_tensor(codes: Codes, what: str) -> Tensor:
    """Return codes as a finite matrix of their own floating type; integers become float64."""
    if not isinstance(codes, Tensor):
        array = np.asarray(codes)
        if array.dtype.kind not in "fiub":
            raise DataError(f"The type of the {what} is {array.dtype}: codes must be numbers.")
        if array.dtype.kind != "f":
            array = array.astype(np.float64)
        codes = torch.from_numpy(np.ascontiguousarray(array))
    codes = codes.detach()
    if codes.ndim != 2:
        raise DataError(
            f"The {what} have shape {tuple(codes.shape)}: codes must be a matrix, one row per item."
        )
    if not codes.is_floating_point():
        codes = codes.to(torch.float64)
    # A sum is infinite or NaN if any number is, and may be if they are huge.
    if codes.sum().isfinite():
        return codes
    finite = codes.isfinite().all(1)
    if not finite.all():
        bad = (~finite).nonzero().ravel()
        raise DataError(
            f"{len(bad):,} of {len(codes):,} {what} hold NaN or infinity, the first in row"
            f" {int(bad[0])}, so they have no distances. The model has probably diverged."
        )
    return codes


def code_rows(codes: Codes, rows: Ints) -> Codes:
    """Return rows of codes, on the device of the codes."""
    if isinstance(codes, Tensor):
        return codes[torch.from_numpy(rows).to(codes.device)]
    return np.asarray(codes)[rows]


@dataclass(frozen=True)
class Exclusion:
    """Hides gallery items that share a value with the query, such as the camera.

    A missing value (`None`, NaN, NA or "") equals no other value.

    Attributes:
        query: (Q,), the queries' values.
        gallery: (N,), the gallery's values; `None` if the queries are the gallery.
        same_label: hide only items that also have the query's label. This is the protocol of
            Market-1501 (Zheng et al., "Scalable Person Re-identification: A Benchmark", ICCV
            2015), in which other persons of the camera stay as distractors.
    """

    query: Sequence[Any] | Array
    gallery: Sequence[Any] | Array | None = None
    same_label: bool = False

    def hidden(self, query_class: Ints, item_class: Ints) -> Hidden:
        """Return the items that are hidden from each query."""
        if self.gallery is None:
            items = self.query
        else:
            items = self.gallery
        for values, labels, side in (
            (self.query, query_class, "queries"),
            (items, item_class, "gallery items"),
        ):
            if len(values) != len(labels):
                raise DataError(
                    f"There are {len(labels):,} {side} and {len(values):,} values to exclude by."
                )
        groups = group_numbers(self.query, items)
        itself = self.gallery is None
        return Hidden(*groups, query_class, item_class, self.same_label, itself)


def group_numbers(queries: Iterable[Any], items: Iterable[Any]) -> tuple[Ints, Ints]:
    """Return a number for each value, the same for equal values of queries and items.

    No query shares a number with an item if its value is missing or "".
    """
    number_of: dict[Any, int] = {}

    def numbers(values: Iterable[Any], missing: int) -> Ints:
        column = []
        for value in values:
            if is_missing(value) or value == "":
                column.append(missing)
            else:
                column.append(number_of.setdefault(value, len(number_of)))
        return np.array(column, np.int64)

    # two numbers for missing values, so that a query's never equals an item's
    return numbers(queries, -1), numbers(items, -2)


@dataclass(frozen=True)
class Hidden:
    """Which items `Exclusion` hides from each query: those of the query's group.

    `query` (Q,) and `gallery` (N,) are group numbers; −1 and −2 stand for no group. With
    `same_label`, only items of the query's class are hidden. With `itself`, the queries are the
    gallery, and each query is hidden from itself.
    """

    query: Ints
    gallery: Ints
    query_class: Ints
    item_class: Ints
    same_label: bool
    itself: bool

    def matching(self) -> Ints:
        """Return how many items of its class are hidden from each query (Q,), itself included."""
        # pairs of group and class are counted as one number
        width = 1 + int(max(self.query_class.max(initial=-1), self.item_class.max(initial=-1)))
        queries = self.query * width + self.query_class
        items = self.gallery * width + self.item_class
        return self._counts(queries, items)

    def every(self) -> Ints:
        """Return how many items are hidden from each query (Q,), itself included."""
        if self.same_label:
            return self.matching()
        return self._counts(self.query, self.gallery)

    def _counts(self, query: Ints, items: Ints) -> Ints:
        """Return how often each query's number is among the items'; a query may have no group."""
        number = np.unique(np.concatenate([items, query]), return_inverse=True)[1]
        counts = np.bincount(number[: len(items)], minlength=len(number))[number[len(items) :]]
        return np.where(self.query < 0, int(self.itself), counts)

    def visible(self, rows: Ints, items: Ints) -> Bools:
        """Return whether items (B, k) are visible to queries (B,); −1 stands for no item."""
        visible = self.gallery[items] != self.query[rows, None]
        if self.same_label:
            visible |= self.item_class[items] != self.query_class[rows, None]
        # row −1 reads the last item above, and is no item
        return np.asarray(visible & (items >= 0))


class Ignored:
    """Items that are hidden from each query because a list names them, see `Hidden`.

    Args:
        rows: for each query, the numbers of the items.
        size: number of items in the gallery.
    """

    def __init__(self, rows: Sequence[Ints], size: int) -> None:
        self._size = size
        self._counts = np.array([len(items) for items in rows])
        queries = np.repeat(np.arange(len(rows)), self._counts)
        self._pairs = queries * size + np.concatenate(rows)

    def every(self) -> Ints:
        """Return how many items are hidden from each query (Q,)."""
        return self._counts

    def visible(self, rows: Ints, items: Ints) -> Bools:
        """Return whether items (B, k) are visible to queries (B,); −1 stands for no item."""
        pairs = rows[:, None] * self._size + items
        return np.asarray((items >= 0) & ~np.isin(pairs, self._pairs))


@dataclass(frozen=True)
class NeighborSearch:
    """Exact search for the nearest gallery items that are visible to a query.

    Without a gallery, the queries are the gallery, and each query is left out of its own results.
    For `distance` and `device`, see `exact_neighbors`. The first `recorded` results of each query
    are kept from any search, for `first`.
    """

    queries: Codes
    gallery: Codes | None
    hidden: Hidden | Ignored | None = None
    distance: DistanceBlock | None = None
    device: str = "auto"
    recorded: int = 1

    @cached_property
    def _records(self) -> tuple[Ints, Floats32]:
        """Rows and distances (Q, recorded); row −1 and distance infinity where there is none."""
        shape = len(self.queries), self.recorded
        return np.full(shape, -1), np.full(shape, np.inf, np.float32)

    @property
    def searched(self) -> Codes:
        """The codes in which to search: the gallery or, without one, the queries."""
        if self.gallery is None:
            return self.queries
        return self.gallery

    @cached_property
    def _neighbors(self) -> Neighbors:
        return Neighbors(self.searched, distance=self.distance, device=self.device)

    @property
    def ranks_all(self) -> bool:
        """Whether `Ranking` can serve: all items are searched on a CPU, by Euclidean distance."""
        on_cpu = self.device == "cpu" or (self.device == "auto" and not torch.cuda.is_available())
        # Full search says what is wrong with codes of two widths.
        fits = self.gallery is None or self.gallery.shape[-1] == self.queries.shape[-1] > 0
        return on_cpu and fits and self.distance is None and self.hidden is None

    def blocks(self, query_rows: Ints, depths: Ints) -> Iterator[tuple[Ints, Ints, Floats32]]:
        """Yield blocks: queries (B,), the rows of their nearest items (B, k), and distances (B, k).

        `depths` is the number of items that each of `query_rows` needs, and k is the largest depth
        of the block. If fewer items are visible, row −1 and distance infinity fill the results.
        """
        search = self._neighbors
        hidden = self.hidden
        reach = depths
        if hidden is not None:  # hidden items take up ranks, so search deeper by their number
            reach = np.minimum(depths + hidden.every()[query_rows], search.size)
        done = 0
        while done < len(query_rows):
            # 1,024 queries are the most that a block holds
            size = search.block(int(reach[done : done + 1024].max()))
            part = slice(done, done + size)
            rows = query_rows[part]
            if self.gallery is None:
                left_out = rows
            else:
                left_out = None
            codes = code_rows(self.queries, rows)
            items, distances = search(codes, int(reach[part].max()), left_out)
            if hidden is not None:
                depth = int(depths[part].max())
                visible = hidden.visible(rows, items)
                # a stable sort moves hidden items behind the visible ones, which keep their order
                first = np.argsort(~visible, axis=1, kind="stable")[:, :depth]
                visible = np.take_along_axis(visible, first, 1)
                items = np.take_along_axis(items, first, 1)
                distances = np.take_along_axis(distances, first, 1)
                items[~visible] = -1
                distances[~visible] = np.inf
            width = min(self.recorded, items.shape[1])
            first_items, first_distances = self._records
            first_items[rows, :width] = items[:, :width]
            first_distances[rows, :width] = distances[:, :width]
            yield rows, items, distances
            done += len(rows)

    def nearest(self, k: int, query_rows: Ints | None = None) -> tuple[Ints, Floats32]:
        """Return rows and distances (A, k) of the items nearest to `query_rows` (A,) or to all."""
        if query_rows is None:
            query_rows = np.arange(len(self.queries))
        items = np.full((len(query_rows), k), -1, np.int64)
        distances = np.full((len(query_rows), k), np.inf, np.float32)
        order = np.arange(len(query_rows))
        done = 0
        # similar depths share a block, which is searched to the largest
        if self.hidden is not None:
            order = np.argsort(self.hidden.every()[query_rows], kind="stable")
        depths = np.full(len(query_rows), k)
        for rows, block_items, block_distances in self.blocks(query_rows[order], depths):
            part = order[done : done + len(rows)]
            width = block_items.shape[1]
            items[part, :width] = block_items
            distances[part, :width] = block_distances
            done += len(rows)
        return items, distances

    def first(self, query_rows: Ints) -> tuple[Ints, Floats32]:
        """Return the first results (B, recorded) of queries; search only if none are recorded."""
        items, distances = self._records
        self.nearest(self.recorded, query_rows[items[query_rows, 0] < 0])
        return items[query_rows], distances[query_rows]


Distance: TypeAlias = "Literal['euclidean', 'cosine'] | DistanceBlock | Any"
"""A name, a function, or an object that measures distances; see `retrieval.evaluate`."""

_PROBED = 32
"""Number of gallery items by which a similarity is told from a distance."""
_SHARE = 0.9
"""Of all excesses of a similarity, added up, more than this share is positive."""


def measuring(
    codes: Codes, gallery: Codes | None, distance: Distance | None
) -> tuple[Codes, Codes | None, DistanceBlock | None]:
    """Return the codes, the gallery and the function for an exact search by a distance.

    The function is `None` for the Euclidean distance. "cosine" is the Euclidean distance of codes
    scaled to unit length, which gives the same order.

    Raises:
        DataError: there is no distance of that name, it is a similarity, or a code has no cosine.
        PluginError: the distance is a class, or it fails.
    """
    if distance is None:
        return codes, gallery, None
    if isinstance(distance, str):
        if distance == "euclidean":
            return codes, gallery, None
        if distance == "cosine":
            if gallery is None:
                unit_gallery = None
            else:
                unit_gallery = _unit(gallery, "gallery codes")
            return _unit(codes, "codes"), unit_gallery, None
        hint = did_you_mean(distance, ("euclidean", "cosine"))
        raise DataError(
            f"There is no distance '{distance}'.{hint} The names are"
            " 'euclidean' and 'cosine'. Pass any other distance as a function, such as"
            " sklearn.metrics.pairwise.manhattan_distances."
        )
    # the object of a bound method, such as a combiner's `compute_mat`
    owner = getattr(distance, "__self__", distance)
    if isinstance(owner, Combiner):
        return codes, gallery, distance
    measure = _function(distance, owner)
    _refuse_similarity(measure, as_tensor(codes if gallery is None else gallery, "gallery"))
    return codes, gallery, measure


def _function(distance: Any, owner: Any) -> DistanceBlock:
    """Return a distance as a function of two tensors; a similarity's values change their sign."""
    subject = f"The distance {getattr(distance, '__name__', type(distance).__name__)}"
    refuse_class(distance, subject)
    # an object of scikit-learn's `DistanceMetric` has this method
    call: Any = distance if callable(distance) else getattr(distance, "pairwise", None)
    if call is None:
        raise DataError(
            f"The distance is {in_words(distance)}: it must be 'euclidean', 'cosine' or a function"
            " from codes (B, C) and (R, C) to distances (B, R)."
        )
    # pytorch-metric-learning's similarities say by this attribute that larger is closer
    if getattr(owner, "is_inverted", False):
        sign = -1
    else:
        sign = 1

    def measure(queries: Tensor, items: Tensor) -> Tensor:
        with calling(subject, "Evaluate fewer items at once."):
            return sign * torch.as_tensor(call(queries, items))

    return measure


def _refuse_similarity(measure: DistanceBlock, gallery: Tensor) -> None:
    """Raise a `DataError` if items are farther from themselves than from one another.

    A distance has d(x, x) + d(y, y) <= d(x, y) + d(y, x), and a similarity the opposite. This holds
    for each pair of a metric or of a kernel; a learned function may have exceptions.
    """
    step = max(1, len(gallery) // _PROBED)
    items = gallery[::step][:_PROBED]
    table = Neighbors(items, distance=measure).measured(items, measure)
    to_itself = table.diagonal()
    excess = to_itself[:, None] + to_itself - table - table.T
    if excess.clamp(min=0).sum() > _SHARE * excess.abs().sum():
        raise DataError(
            "The distance is a similarity: it is larger for an item and itself than for two items,"
            " so the search would rank backwards. Pass a distance, such as 'cosine' or"
            " lambda a, b: -similarity(a, b)."
        )


def _unit(codes: Codes, what: str) -> Tensor:
    """Return codes scaled to unit length, at least in single precision."""
    rows = as_tensor(codes, what)
    lengths = rows.double().norm(dim=1, keepdim=True)
    if zeros := int((lengths == 0).sum()):
        raise DataError(
            f"{zeros:,} of {len(rows):,} {what} are all zeros, so they have no cosine. Leave those"
            " items out, or use the Euclidean distance."
        )
    unit: Tensor = rows / lengths
    return unit.to(torch.promote_types(rows.dtype, torch.float32))
