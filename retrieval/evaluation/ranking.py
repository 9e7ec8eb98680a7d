"""Whether an item's nearest have its label, for all items of a set among the others.

Metrics ask of each rank only whether the item there matches. So half squared distances
h = |q − g|² / 2 come from a product in float32, and only what that leaves in doubt is measured
again. By the standard bound on a sum of n products (N. Higham, Accuracy and Stability of Numerical
Algorithms, 2002, §3.1), whatever order it is added in,

    |h − ĥ| ≤ n u (|q||g| + |q|²/2 + |g|²/2) + what rounding the codes and the answer loses =: E,

so items whose ĥ are more than 2 E apart are in their true order. Items closer than that form a run.
The order within a run matters only if it holds matches and others, among the ranks that are asked
for: its items are measured in float64 and ordered as `exact_neighbors` orders them.

A block of products serves its rows and its columns, so that half of the pairs are computed. FAISS
and `serving.store.search` compute all of them, which alone takes half of AccuracyCalculator's time.

A sample of the set says how far each query must look, its reach. The items within reach are its
candidates. A query with too few of them, or too many in doubt, is left to full search.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from retrieval.evaluation.neighbors import rounded_keys
from retrieval.serving.store.search import measured

Ints = NDArray[np.int64]
Floats = NDArray[np.float32]
Bools = NDArray[np.bool_]

_SMALLEST = 2048
"""Items from which on the sample is a small part of them."""
_SIGMAS = 2.5
_PANEL = 1024
"""Queries of a panel, and items of the sample, at most."""
_PAIRS = 2**20
_GROUP = 8
"""Items of the sample of which the nearest stands for all."""
_RANKS = 2**17
"""Ranks settled at a time: what is made of them stays in a core's cache."""
_KEPT_BYTES = 96 * 2**20
"""Candidates of all panels together, at most."""
_MOST = 2**22
"""Candidates of a panel, at most."""
_DOUBT = 16
"""A query with one pair in doubt of so many items is left to full search, which costs less."""
_UNIT = 2.0**-24


@dataclass
class _Panel:
    """Some queries, how far each of them looks, and the candidates found there.

    Attributes:
        start: place of the first one in the order of all.
        factors: (B, C + 2), see `_factored`.
        depth: how many ranks are asked for.
        error: (B,) 2 E, see the module.
        reach: (B,) the largest ĥ of a candidate.
        queries: pieces (M,): the query of each candidate.
        keys: pieces (M,): each candidate's key, see `_keys`.
    """

    start: int
    factors: Floats
    depth: int
    error: Floats
    reach: Floats
    queries: list[NDArray[np.uint16]] = field(default_factory=list)
    keys: list[Ints] = field(default_factory=list)


class Ranking:
    """Ranks the items of a set for one another.

    Args:
        codes: (N, C) finite, float32 or float64.
        classes: (N,) class numbers.
        asked: (A,) the items that are queries, in order of depth.
        depths: (A,) how many ranks each wants, ascending.
    """

    def __init__(self, codes: NDArray[Any], classes: Ints, query_rows: Ints, depths: Ints) -> None:
        if codes.dtype == np.float64:  # by a power of two: no square overflows
            codes = np.ldexp(codes, -math.frexp(float(np.abs(codes).max(initial=0)))[1])
        size, self._codes = len(codes), codes
        self._sampled = _sample_size(size)
        self._mask = np.empty(self._sampled**2, np.bool_)
        self._product = np.empty(self._sampled**2, np.float32)
        # The sample is the first panel. Items that nothing is asked of come next: they share no
        # panel with queries that look far.
        sample = np.random.default_rng(0).choice(size, self._sampled, replace=False)
        depth_of_item = np.zeros(size, np.int64)
        depth_of_item[query_rows] = depths
        first = np.full(size, True)
        first[sample] = False
        rest = np.flatnonzero(first)
        self._order = np.concatenate([sample, rest[np.argsort(depth_of_item[rest], kind="stable")]])
        self._depths = depth_of_item[self._order]
        kind = np.min_scalar_type(int(classes.max(initial=0)))  # few bytes are sooner looked up
        self._classes = classes[self._order].astype(kind)
        factors, norms = _factored(codes, self._order)
        # In units of (|q| + |g|)²: half a rounding a term; the codes', the half norms', the
        # answer's.
        roundings = (factors.shape[1] + 1) / 2 + 2
        error = 2.02 * _UNIT * roundings * (norms + norms.max()) ** 2 + 1e-30
        self._panels = []
        for start in range(0, size, self._sampled):
            part = slice(start, start + self._sampled)
            reach = np.full(len(factors[part]), -np.inf, np.float32)
            depth = int(self._depths[part].max())
            panel = _Panel(start, factors[part], depth, error[part].astype(np.float32), reach)
            self._panels.append(panel)

    @staticmethod
    def serves(size: int, depths: Ints) -> int:
        """Return how many of the queries, which ask for so many ranks (A,) ascending, to rank."""
        if size < _SMALLEST:
            return 0
        count = int(np.searchsorted(depths, size // 4, side="right"))
        if 2 * count <= size:
            return 0
        step, spread = max(1, count // 64), size / _sample_size(size)
        ranks = sum(_sample_rank(size, int(depth)) for depth in depths[:count:step])
        deepest = _sample_rank(size, int(depths[count - 1])) * _sample_size(size) * spread
        return count if step * ranks * spread * 2 <= _KEPT_BYTES and deepest <= 2 * _PAIRS else 0

    def __iter__(self) -> Iterator[tuple[Ints, Bools, Bools]]:
        """Yield queries (B,), their matches (B, k) and which are left to full search (B,).

        k is the panel's largest depth.
        """
        for number, panel in enumerate(self._panels):
            self._share(number)
            if panel.depth:
                part = slice(panel.start, panel.start + len(panel.factors))
                query_rows = self._depths[part] > 0
                matches, failed = self._ranked(panel)
                yield self._order[part][query_rows], matches[query_rows], failed[query_rows]
            panel.queries.clear()
            panel.keys.clear()

    def _share(self, number: int) -> None:
        """Find candidates among a panel and those after it, for both.

        The first panel is the sample: its blocks say how far the others look.
        """
        panel = self._panels[number]
        turned = np.ascontiguousarray(_turned(panel.factors).T)  # a twentieth faster than a view
        for other in self._panels[number:]:
            if not (other.depth or panel.depth):
                continue
            shape = len(other.factors), len(panel.factors)
            halves = self._product[: math.prod(shape)].reshape(shape)
            np.matmul(other.factors, turned, out=halves)
            if other is panel:
                np.fill_diagonal(halves, np.inf)
            if number == 0 and other.depth:
                self._look(other, halves)
            if other.depth:
                self._keep(other, halves, panel.start)
            if other is not panel and panel.depth:
                self._keep(panel, halves, other.start, across=True)

    def _look(self, panel: _Panel, halves: Floats) -> None:
        """Decide how far each query of a panel looks, by its ĥ to the sample (B, S)."""
        last = _sample_rank(len(self._order), panel.depth) - 1
        near, width = halves, halves.shape[1] // _GROUP
        # of few, the nearest of each group tell nearly as well, and are sooner selected from
        if last < width // 4:
            near = halves[:, : width * _GROUP].reshape(-1, _GROUP, width).min(axis=1)
        reach = np.partition(near, last, axis=1)[:, last] + panel.error
        crowded = np.count_nonzero(halves <= reach[:, None], axis=1) > 4 * (last + 1)
        panel.reach[~crowded] = reach[~crowded]

    def _keep(self, panel: _Panel, halves: Floats, start: int, *, across: bool = False) -> None:
        """Keep what a panel's queries reach: they are a block's rows or, `across`, its columns."""
        mask = self._mask[: halves.size].reshape(halves.shape)
        np.less_equal(halves, panel.reach if across else panel.reach[:, None], out=mask)
        place = np.flatnonzero(mask)
        row = place // halves.shape[1]
        column = place - row * halves.shape[1]
        query, item = (column, row) if across else (row, column)
        panel.queries.append(query.astype(np.uint16))
        panel.keys.append(_keys(halves.ravel()[place], item + start))

    def _ranked(self, panel: _Panel) -> tuple[Bools, Bools]:
        """Return a panel's matches (B, k), and which queries are left to full search (B,)."""
        size = len(panel.factors)
        matches, failed = np.zeros((size, panel.depth), np.bool_), np.ones(size, np.bool_)
        queries = np.concatenate(panel.queries)
        if len(queries) > _MOST:
            return matches, failed
        keys = np.concatenate(panel.keys)[np.argsort(queries, kind="stable")]  # 16 bits: radix sort
        counts = np.bincount(queries, minlength=size)
        ends = np.cumsum(counts)
        # A few ranks more than asked nearly always show where the run at the last one ends.
        width = panel.depth + panel.depth // 16 + 9
        columns = np.arange(max(width, int(counts.max())))
        step = max(1, _RANKS // len(columns))
        for start in range(0, size, step):
            some = np.arange(start, min(start + step, size))
            ranked = _keys(panel.reach[some, None], len(self._order) + columns)
            first = ends[start] - counts[start]
            ranked[columns < counts[some, None]] = keys[first : ends[some[-1]]]
            ranked.sort(axis=1)
            near = (ranked[:, :width] >> 32).astype(np.int32).view(np.float32)
            item = ranked[:, :width] & 0xFFFFFFFF
            matches[some], failed[some] = self._settled(panel, some, near, item)
        return matches, failed

    def _settled(
        self, panel: _Panel, chosen: Ints, near: Floats, item: Ints
    ) -> tuple[Bools, Bools]:
        """Return matches (B, k) in the true order, and which queries are left to full search (B,).

        Args:
            panel: whose queries they are.
            chosen: (B,) which of them.
            near: (B, W + 1) ĥ, ascending; the last column is where the ranked ones end.
            item: (B, W + 1) the items' places.
        """
        own, item = panel.start + chosen, item[:, :-1]
        joined = near[:, 1:] - near[:, :-1] <= panel.error[chosen, None]
        failed = joined[:, panel.depth - 1 :].all(axis=1)
        match = self._classes.take(item, mode="clip") == self._classes[own, None]
        joined[failed], joined[:, -1] = False, False
        row, rank, run = _in_doubt(joined, match, panel.depth)
        costly = np.bincount(row, minlength=len(own)) * _DOUBT > len(self._order)
        failed |= costly
        kept = ~costly[row]
        row, rank, run = row[kept], rank[kept], run[kept]
        column, codes = self._order[item[row, rank]], self._codes[self._order[own]]
        squared = measured(codes.astype(np.float64), self._codes, row, column)
        order = np.lexsort((rounded_keys(squared, column), run))
        match[row, rank] = match[row[order], rank[order]]
        return np.asarray(match[:, : panel.depth]), failed


def _sample_size(size: int) -> int:
    return min(_PANEL, max(size // 8, _PANEL // 2))


def _sample_rank(size: int, depth: int) -> int:
    """Return a rank in the sample that lies beyond `depth`, but for 6 queries in a thousand."""
    expected = depth * _sample_size(size) / size
    return math.ceil(((_SIGMAS + math.sqrt(_SIGMAS**2 + 4 * expected)) / 2) ** 2)


def _factored(codes: NDArray[Any], rows: Ints) -> tuple[Floats, NDArray[np.float64]]:
    """Return (N, C + 2) centred codes x, |x|²/2 and 1, and the lengths |x| (N,)."""
    width, largest = codes.shape[1], float(np.abs(codes).max(initial=0))
    scale = 2.0 ** -max(-1000, min(1000, math.frexp(largest)[1]))
    parts = range(0, len(codes), _PANEL)
    sums = [(codes[start : start + _PANEL] * np.float64(scale)).sum(0) for start in parts]
    centre = np.sum(sums, axis=0) / len(codes)
    out, norms = np.ones((len(codes), width + 2), np.float32), np.empty(len(codes))
    for start in parts:
        part = slice(start, start + _PANEL)
        out[part, :width] = codes[rows[part]] * np.float64(scale) - centre
        squares = np.square(out[part, :width], dtype=np.float64).sum(1)
        out[part, width], norms[part] = squares / 2, np.sqrt(squares)
    return out, norms


def _turned(factors: Floats) -> Floats:
    """Return (B, C + 2) −x, 1 and |x|²/2: times another's factors, half the squared distances."""
    out = -factors
    out[:, -2], out[:, -1] = 1, factors[:, -2]
    return out


def _keys(halves: Floats, item: Ints) -> Ints:
    """Return ĥ and the item in 32 bits each: keys compare as ĥ does from 0 on, then as the item."""
    near = np.maximum(halves, 0) + np.float32(0)  # −0, whose bits are a negative number, becomes 0
    return near.view(np.int32).astype(np.int64) << 32 | item


def _in_doubt(joined: Bools, match: Bools, depth: int) -> tuple[Ints, Ints, Ints]:
    """Return query, rank and run (M,) of each item whose run holds matches and others.

    Args:
        joined: (B, W) whether an item and the next one are of one run; no row's last one is.
        match: (B, W) whether the items match.
        depth: ranks among which a run must begin.
    """
    width = joined.shape[1]
    place = np.flatnonzero(joined)
    first = np.diff(place, prepend=-2) != 1
    run, begins = np.cumsum(first) - 1, place[first]
    mixed = np.zeros(len(begins), np.bool_)
    mixed[run[match.ravel()[place] != match.ravel()[place + 1]]] = True
    mixed &= begins % width < depth
    sizes = np.bincount(run, minlength=len(begins))[mixed] + 1
    run = np.repeat(np.arange(len(sizes)), sizes)
    place = np.arange(len(run)) + (begins[mixed] - (np.cumsum(sizes) - sizes))[run]
    return place // width, place % width, run
