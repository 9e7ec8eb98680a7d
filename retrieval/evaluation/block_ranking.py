"""Rank items for many queries, as far as metrics need it: does each rank match?

Metrics only need to know whether the item at each rank matches. Half squared distances
h = |q − g|² / 2 are therefore computed as a product ĥ in float32, and only pairs in doubt are
measured again. The standard bound on a sum of n products (N. Higham, Accuracy and Stability of
Numerical Algorithms, 2002, §3.1), with u the rounding unit, holds for any order of summation:

    |h − ĥ| ≤ n u (|q||g| + |q|²/2 + |g|²/2) + the rounding of codes and result =: E.

Items whose ĥ differ by more than 2 E are therefore in their true order. Consecutive items that are
closer form a *run*. The order within a run matters only if it has both matching and other items
among the needed ranks. Its items are then in doubt: they are measured in float64 and ordered as by
`exact_neighbors`.

Without a gallery, the queries are ranked among each other. A block of products then serves both its
rows and its columns as queries, so that only half of the pairs are computed.

A sample of the items determines each query's *reach*, the distance within which items are its
*candidates*. A query with too few candidates, or too many in doubt, is left to full search.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from retrieval.base.arrays import Array, Bools, Floats32, Floats64, Ints
from retrieval.evaluation.neighbors import rounded_keys

_SMALLEST = 64  # items of the smallest set that is ranked
_SIGMAS = 2.5  # standard deviations above the expected rank in the sample, see `_sample_rank`
_PANEL = 1024  # most queries of a panel, and most items of the sample
_EXPECTED = 2**21  # most candidates that a panel is expected to have
_RANKS = 2**17  # ranks to settle at once, so that the temporary arrays stay in a core's cache
_KEPT_BYTES = 96 * 2**20  # most bytes for the candidates of all panels
_MOST = 2**22  # most candidates of a panel
_DOUBT = 16  # a query with more than one item in so many in doubt is searched in full
_UNIT = 2.0**-24  # u of float32
_MOST_EXPONENT = 126


@dataclass
class _Panel:
    """A group of queries with their reach and candidates.

    Attributes:
        start: position of the first query in the order of all items.
        factors: (B, C + 2), see `_factored`.
        depth: number of ranks that the queries need.
        error: (B,), 2 E, see the module.
        reach: (B,), the largest ĥ of a candidate.
        queries: for each block, an array (M,) with the query of each candidate.
        keys: for each block, an array (M,) with the key of each candidate, see `_keys`.
    """

    start: int
    factors: Floats32
    depth: int
    error: Floats32
    reach: Floats32
    queries: list[Array] = field(default_factory=list)
    keys: list[Ints] = field(default_factory=list)


class Ranking:
    """Ranks the items of a gallery, or of the set of queries, for many queries.

    Args:
        codes: (Q, C), finite, float32 or float64.
        classes: (Q,), class numbers.
        query_rows: (A,), the rows that are queries, in the order of `depths`.
        depths: (A,), the number of ranks that each query needs, ascending.
        gallery: (N, C), of the type of `codes`; `None` ranks the codes, without the query itself.
        item_class: (N,), the gallery's class numbers.
    """

    def __init__(
        self,
        codes: Array,
        classes: Ints,
        query_rows: Ints,
        depths: Ints,
        gallery: Array | None = None,
        item_class: Ints | None = None,
    ) -> None:
        self._among = gallery is None
        sides = [codes] if gallery is None else [codes, gallery]
        exponent = math.frexp(max(_largest(side) for side in sides))[1]
        if codes.dtype == np.float64:  # a power of two scales exactly, and keeps squares finite
            sides = [np.ldexp(side, -exponent) for side in sides]
            exponent = 0
        self._codes = sides[0]
        self._items = sides[-1]
        size = len(self._items)
        self._sampled = _sample_size(size)
        # The sample is the first panel. Items that are not queries come next, so that they share no
        # panel with queries of large depth.
        sample = np.random.default_rng(0).choice(size, self._sampled, replace=False)
        depth_of_item = np.zeros(size, np.int64)
        if self._among:
            depth_of_item[query_rows] = depths
        rest = np.setdiff1d(np.arange(size), sample)
        rest = rest[np.argsort(depth_of_item[rest], kind="stable")]
        self._item_order = np.concatenate([sample, rest])
        if item_class is None:
            item_class = classes
        self._item_class = item_class[self._item_order]
        mean = self._items.mean(0, dtype=np.float64)
        factors, norms = _factored(self._items, self._item_order, mean, exponent)
        self._factors = factors
        largest = norms.max()
        if self._among:
            self._order = self._item_order
            self._depths = depth_of_item[self._order]
        else:
            self._order = query_rows
            self._depths = depths
            factors, norms = _factored(codes, query_rows, mean, exponent)
        self._classes = classes[self._order]
        # in units of u (|q| + |g|)²: one half per term, and roundings of codes, norms and result
        roundings = (factors.shape[1] + 1) / 2 + 2
        error = 2.02 * _UNIT * roundings * (norms + largest) ** 2 + 1e-30
        self._panels = []
        for start in range(0, len(factors), self._sampled):
            part = slice(start, start + self._sampled)
            reach = np.full(len(factors[part]), -np.inf, np.float32)
            depth = int(self._depths[part].max())
            panel = _Panel(start, factors[part], depth, error[part].astype(np.float32), reach)
            self._panels.append(panel)

    @staticmethod
    def serves(size: int, depths: Ints, *, among: bool = True) -> int:
        """Return how many queries are worth ranking: the first ones, by ascending `depths` (A,).

        Args:
            size: number of items.
            depths: number of ranks that each query needs.
            among: whether the queries are ranked among each other.
        """
        if size < _SMALLEST:
            return 0
        count = int(np.searchsorted(depths, size // 4, side="right"))
        # Half of the products serve nobody if few items are queries.
        if not count or (among and 2 * count <= size):
            return 0
        step = max(1, count // 64)
        spread = size / _sample_size(size)
        # expected numbers of candidates: of all queries, and of a panel of the largest depth
        candidates = step * spread * sum(_sample_rank(size, int(d)) for d in depths[:count:step])
        deepest = _sample_rank(size, int(depths[count - 1])) * _sample_size(size) * spread
        if deepest <= _EXPECTED and (2 * candidates <= _KEPT_BYTES or not among):
            return count
        return 0

    def __iter__(self) -> Iterator[tuple[Ints, Bools, Bools]]:
        """Yield by panel: queries (B,), matches (B, k), and whether they need full search (B,)."""
        for number, panel in enumerate(self._panels):
            if self._among:
                self._share(number)
            else:
                self._search(panel)
            if panel.depth:
                part = slice(panel.start, panel.start + len(panel.factors))
                is_query = self._depths[part] > 0
                matches, failed = self._ranked(panel)
                yield self._order[part][is_query], matches[is_query], failed[is_query]
            panel.queries.clear()
            panel.keys.clear()

    def _share(self, number: int) -> None:
        """Compare a panel with itself and each later panel, and keep the candidates of both.

        The first panel is the sample; comparing it with a panel also sets that panel's reach.
        """
        panel = self._panels[number]
        turned = np.ascontiguousarray(_turned(panel.factors).T)
        for other in self._panels[number:]:
            if not (other.depth or panel.depth):
                continue
            halves = other.factors @ turned
            if other is panel:
                np.fill_diagonal(halves, np.inf)
            if number == 0 and other.depth:
                self._set_reach(other, halves)
            if other.depth:
                self._keep(other, halves, panel.start)
            if other is not panel and panel.depth:
                self._keep(panel, halves, other.start, across=True)

    def _search(self, panel: _Panel) -> None:
        """Compare a panel with the whole gallery, and keep its candidates."""
        turned = _turned(panel.factors)
        for start in range(0, len(self._factors), self._sampled):
            halves = turned @ self._factors[start : start + self._sampled].T
            if start == 0:
                self._set_reach(panel, halves)
            self._keep(panel, halves, start)

    def _set_reach(self, panel: _Panel, halves: Floats32) -> None:
        """Set the reach of a panel's queries from `halves`, their ĥ to the sample (B, S)."""
        last = _sample_rank(len(self._items), panel.depth) - 1
        reach = np.partition(halves, last, axis=1)[:, last] + panel.error
        # a query with many ties within reach keeps no candidates, and is left to full search
        crowded = np.count_nonzero(halves <= reach[:, None], axis=1) > 4 * (last + 1)
        panel.reach[~crowded] = reach[~crowded]

    def _keep(self, panel: _Panel, halves: Floats32, start: int, *, across: bool = False) -> None:
        """Keep the candidates of a panel, from its ĥ to the items from position `start` on.

        The queries are the rows of `halves` or, with `across`, its columns.
        """
        if across:
            reach = panel.reach
        else:
            reach = panel.reach[:, None]
        position = np.flatnonzero(halves <= reach)
        row = position // halves.shape[1]
        column = position - row * halves.shape[1]
        query, item = (column, row) if across else (row, column)
        # 16 bits hold any query of a panel, and NumPy sorts them by radix
        panel.queries.append(query.astype(np.uint16))
        panel.keys.append(_keys(halves.ravel()[position], item + start))

    def _ranked(self, panel: _Panel) -> tuple[Bools, Bools]:
        """Return a panel's matches (B, k), and whether a query needs full search (B,)."""
        size = len(panel.factors)
        matches = np.zeros((size, panel.depth), np.bool_)
        failed = np.ones(size, np.bool_)
        queries = np.concatenate(panel.queries)
        if len(queries) > _MOST:
            return matches, failed
        keys = np.concatenate(panel.keys)[np.argsort(queries, kind="stable")]
        counts = np.bincount(queries, minlength=size)
        ends = np.cumsum(counts)
        # a few more ranks nearly always include the end of the run that holds the last needed rank
        width = panel.depth + panel.depth // 16 + 9
        columns = np.arange(max(width, int(counts.max())))
        step = max(1, _RANKS // len(columns))
        for start in range(0, size, step):
            rows = np.arange(start, min(start + step, size))
            # keys of no item, at the query's reach, fill the row after its candidates
            ranked = _keys(panel.reach[rows, None], len(self._items) + columns)
            first = ends[start] - counts[start]
            ranked[columns < counts[rows, None]] = keys[first : ends[rows[-1]]]
            ranked.sort(axis=1)
            near = (ranked[:, :width] >> 32).astype(np.int32).view(np.float32)
            item = ranked[:, :width] & 0xFFFFFFFF
            matches[rows], failed[rows] = self._settled(panel, rows, near, item)
        return matches, failed

    def _settled(
        self, panel: _Panel, rows: Ints, near: Floats32, item: Ints
    ) -> tuple[Bools, Bools]:
        """Return matches (B, k) in the true order, and whether a query needs full search (B,).

        Args:
            panel: the panel of the queries.
            rows: (B,), the queries within the panel.
            near: (B, W + 1), ĥ in ascending order; the last column only bounds the W ranked items.
            item: (B, W + 1), the items' positions.
        """
        # imported here: checking a recipe needs this module, but no search
        from retrieval.store.exact_search import squared_distances

        positions = panel.start + rows
        item = item[:, :-1]
        joined = near[:, 1:] - near[:, :-1] <= panel.error[rows, None]
        failed = joined[:, panel.depth - 1 :].all(axis=1)
        # keys that fill a row have positions beyond the last item
        match = self._item_class.take(item, mode="clip") == self._classes[positions, None]
        joined[failed] = False
        joined[:, -1] = False
        row, rank, run = _in_doubt(joined, match, panel.depth)
        costly = np.bincount(row, minlength=len(rows)) * _DOUBT > len(self._items)
        failed |= costly
        measured = ~costly[row]
        row = row[measured]
        rank = rank[measured]
        run = run[measured]
        column = self._item_order[item[row, rank]]
        codes = self._codes[self._order[positions]]
        squared = squared_distances(codes.astype(np.float64), self._items, row, column)
        order = np.lexsort((rounded_keys(squared, column), run))
        match[row, rank] = match[row[order], rank[order]]
        return np.asarray(match[:, : panel.depth]), failed


def _sample_size(size: int) -> int:
    return min(size, _PANEL, max(size // 8, _PANEL // 2))


def _sample_rank(size: int, depth: int) -> int:
    """Return a sample's rank that lies beyond the set's rank `depth` for 994 queries in 1,000."""
    expected = depth * _sample_size(size) / size
    return math.ceil(((_SIGMAS + math.sqrt(_SIGMAS**2 + 4 * expected)) / 2) ** 2)


def _largest(codes: Array) -> float:
    """Return the largest absolute value of codes."""
    return max(float(codes.max(initial=0)), -float(codes.min(initial=0)))


def _factored(codes: Array, rows: Ints, mean: Floats64, exponent: int) -> tuple[Floats32, Floats64]:
    """Return x, with |x|²/2 and 1 appended (A, C + 2), and the lengths |x| (A,).

    x are the codes of rows (A,), minus `mean` (C,), divided by 2 to the power of `exponent`.
    """
    width = codes.shape[1]
    # Within float32; further scaling would be of no use.
    scale = 2.0 ** -max(-_MOST_EXPONENT, min(_MOST_EXPONENT, exponent))
    # Any centre will do, if it is the same for all codes, so it is rounded to their type.
    centre = (mean * scale).astype(codes.dtype)
    out = np.ones((len(rows), width + 2), np.float32)
    squares = np.empty(len(rows))
    for start in range(0, len(rows), _PANEL):
        part = slice(start, start + _PANEL)
        block = out[part, :width]
        np.subtract(codes[rows[part]] * scale, centre, out=block, casting="same_kind")
        np.einsum("ij,ij->i", block, block, dtype=np.float64, out=squares[part])
    out[:, width] = squares / 2
    return out, np.sqrt(squares)


def _turned(factors: Floats32) -> Floats32:
    """Return −x, 1 and |x|²/2 (B, C + 2); times factors, they are half squared distances."""
    out = -factors
    out[:, -2] = 1
    out[:, -1] = factors[:, -2]
    return out


def _keys(halves: Floats32, item: Ints) -> Ints:
    """Return ĥ (at least 0) and the item in 32 bits each, which compare by ĥ, then by item."""
    near = np.maximum(halves, 0) + np.float32(0)  # adding 0 turns −0, whose bits differ, into 0
    return near.view(np.int32).astype(np.int64) << 32 | item


def _in_doubt(joined: Bools, match: Bools, depth: int) -> tuple[Ints, Ints, Ints]:
    """Return query, rank and run (M,) of each item whose run has matching and other items.

    Args:
        joined: (B, W), whether an item and the next one share a run; false in the last column.
        match: (B, W), whether the items match.
        depth: number of first ranks in which a run must begin.
    """
    width = joined.shape[1]
    matches = match.ravel()
    # positions in the table, row by row; consecutive positions belong to one run
    position = np.flatnonzero(joined)
    first = np.diff(position, prepend=-2) != 1
    run = np.cumsum(first) - 1
    begins = position[first]
    mixed = np.zeros(len(begins), np.bool_)
    mixed[run[matches[position] != matches[position + 1]]] = True
    mixed &= begins % width < depth
    # a run has one item more than it has joints
    sizes = np.bincount(run, minlength=len(begins))[mixed] + 1
    run = np.repeat(np.arange(len(sizes)), sizes)
    offsets = begins[mixed] - (np.cumsum(sizes) - sizes)
    position = np.arange(len(run)) + offsets[run]
    return position // width, position % width, run
