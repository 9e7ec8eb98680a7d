"""Which of a query's nearest items have its label, in the order of exact search, without measuring every pair exactly.

Figures ask of each rank only whether the item there matches. So half squared distances h = |q − g|² / 2 come from a product of
single precision, and only what that leaves in doubt is measured again. By the standard bound on a sum of n products
(Higham, "Accuracy and Stability of Numerical Algorithms", 2nd edition, section 3.1), whatever order it is added in,

    |h − ĥ| ≤ n u (|q||g| + |q|²/2 + |g|²/2) + what rounding the codes and the answer loses =: E,

so items whose ĥ are more than 2 E apart are in their true order. Items closer than that form a run. The order within a run
matters only if it holds matches and others, among the ranks that are asked for: its items are measured in
double precision and ordered as `exact_neighbors` does, by distance rounded to float32 and then by row.

A sample of the gallery says how far each query must look, its reach. The items within reach are its candidates. A query
whose candidates turn out too few, or too crowded to tell its last ranks from what lies outside, is left to full search.

Where the queries are the gallery, a block of pairs serves both its rows and its columns, so that half of them are computed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from retrieval.evaluation.candidate_keys import grouped, parts, true_places
from retrieval.evaluation.selection import direct, make_keys

Ints = NDArray[np.int64]
Floats = NDArray[np.float32]
Bools = NDArray[np.bool_]
Precision = Literal["float32", "float64"]
Factors = NDArray[Any]
Found = list[tuple[Ints, Ints]]
"""Candidates of a panel, in pieces: how many each query has (B,), and their keys, query by query; see `Ranking._keep`."""

SMALLEST = 2048
_SIGMAS = 3.0
_PANEL = 1024
_PAIRS = 2**20
_GROUP = 8  # items of the sample of which the nearest stands for all
_DENSE = 64  # where one item of so many is a candidate, to look at each place of a mask is quicker than at words of it
_RANKS = 2**17  # settled at a time: what is made of them stays in a core's cache
_MOST = 2**22  # candidates of a panel
_KEPT_BYTES = 96 * 2**20
_CANDIDATE_BYTES = 8
_UNIT = 2.0**-24


@dataclass
class _Panel:
    """Some queries, how far each of them looks, and what was found there.

    Attributes:
        rows: (B,) their rows.
        depth: how many ranks are asked for.
        factors: (B, C + 2), see `Ranking._factored`.
        error: (B,) 2 E, see the module.
        reach: (B,) the largest ĥ that is a candidate.
        found: candidates.
    """

    rows: Ints
    depth: int
    factors: Factors
    error: Floats
    reach: Floats
    found: Found = field(default_factory=list)


class Ranking:
    """A gallery and what is asked of it.

    Args:
        gallery: (N, C) finite codes.
        item_class: (N,) class numbers.
        queries: (Q, C) codes; None: the gallery's items are the queries, each left out of its own answer.
        query_class: (Q,) class numbers.
        asked: (A,) rows of the queries, in order of depth.
        depths: (A,) how many ranks each wants, ascending, up to `deepest`.
        precision: of the product.
        block: queries at a time; None fits it to the memory.

    Attributes:
        measured: how many pairs were measured in double precision so far.
    """

    def __init__(
        self,
        gallery: Tensor,
        item_class: Ints,
        queries: Tensor | None,
        query_class: Ints,
        asked: Ints,
        depths: Ints,
        *,
        precision: Precision = "float32",
        block: int | None = None,
    ) -> None:
        self._gallery, self._itself, self._size = gallery, queries is None, len(gallery)
        self._queries, self._query_class = gallery if queries is None else queries, query_class
        self._type = np.float32 if precision == "float32" else np.float64
        self.measured = 0
        self._plan(asked, depths, block)
        largest = float(gallery.abs().max().double()) if gallery.numel() else 0.0
        self._scale = 2.0 ** -max(-1000, min(1000, math.frexp(largest)[1]))
        self._centre = _mean(gallery, self._scale)
        self._factors, self._norms = self._factored(gallery, self._order)
        self._largest = float(self._norms.max())
        # as few bytes as it takes: they are sooner looked up
        kind = np.min_scalar_type(int(item_class.max(initial=0)))
        self._classes = item_class[self._order].astype(kind)
        self._sample_factors = self._factors[self._column[self._sample]]
        room = -(-self._panel * max(self._panel, self._sampled, _PAIRS // self._panel) // 8) * 8
        self._product, self._mask = np.empty(room, self._type), np.empty(room, np.bool_)
        self._halves = np.empty(room if precision == "float64" else 0, np.float32)

    @staticmethod
    def deepest(size: int) -> int:
        """Return how many ranks of a gallery can at most be asked for; 0: to measure all pairs is as fast."""
        return size // 4 if size >= SMALLEST else 0

    def _plan(self, asked: Ints, depths: Ints, block: int | None) -> None:
        """Decide how many queries share a panel, in which order, and whether a block serves its rows and columns."""
        size = self._size
        self._sampled = min(_PANEL, max(size // 16, _PANEL // 2))
        spread = size / self._sampled
        step = max(1, len(depths) // 64)
        kept = step * sum(self._sample_rank(int(k)) for k in depths[::step]) * spread * _CANDIDATE_BYTES / 4
        deepest = math.ceil(self._sample_rank(int(depths[-1])) * spread)
        self._panel = max(1, min(_PANEL, _PAIRS // deepest, block or _PANEL))
        self._both = (
            self._itself
            and 2 * len(asked) > size
            and kept <= _KEPT_BYTES
            and deepest * self._sampled <= 2 * _PAIRS
            and (block is None or block >= self._sampled)
        )
        self._asked, self._depths, self._order = asked, depths, np.arange(size)
        sample = np.random.default_rng(0).choice(size, self._sampled, replace=False)
        if self._both:
            # The sample is the first panel, so that its blocks are computed once. Items that nothing is asked of come next:
            # they share no panel with queries that look far.
            self._panel = self._sampled
            wanted = np.zeros(size, np.int64)
            wanted[asked] = depths
            first = np.full(size, True)
            first[sample] = False
            rest = np.flatnonzero(first)
            self._order = np.concatenate([sample, rest[np.argsort(wanted[rest], kind="stable")]])
            self._asked, self._depths = self._order, wanted[self._order]
        self._column = np.argsort(self._order) if self._both else self._order
        self._sample = sample

    def _sample_rank(self, depth: int) -> int:
        """Return a rank in the sample that lies beyond rank `depth` of the gallery, but for one query in a thousand."""
        expected = depth * self._sampled / self._size
        return math.ceil(((_SIGMAS + math.sqrt(_SIGMAS**2 + 4 * expected)) / 2) ** 2)

    def _factored(self, codes: Tensor, rows: Ints) -> tuple[Factors, NDArray[np.float64]]:
        """Return (M, C + 2) centred codes x, |x|²/2 and 1, and the lengths |x| (M,)."""
        width = codes.shape[1]
        out, norms = np.ones((len(rows), width + 2), self._type), np.empty(len(rows))
        for start in range(0, len(rows), _PANEL):
            part = slice(start, start + _PANEL)
            taken = codes[torch.from_numpy(rows[part])].double()
            out[part, :width] = taken.mul_(self._scale).sub_(self._centre).numpy()
            rounded = out[part, :width].astype(np.float64)
            squares = np.einsum("ij,ij->i", rounded, rounded)
            out[part, width], norms[part] = squares / 2, np.sqrt(squares)
        return out, norms

    def _error(self, norms: NDArray[np.float64]) -> Floats:
        """Return 2 E (B,) for queries of these lengths."""
        terms = self._factors.shape[1]
        # In units of (|q| + |g|)²: a rounding a term, of half of it; the codes'; the half norms'; the answer's to float32.
        roundings = (terms + 1) / 2 + 2 if self._type is np.float32 else 1 + terms * 2.0**-29
        return np.asarray(2.02 * _UNIT * roundings * (norms + self._largest) ** 2 + 1e-30, np.float32)

    def pilot(self, count: int) -> tuple[float, float]:
        """Return, of some queries, how many pairs each had measured, and the share that is left to full search."""
        wanted = np.flatnonzero(self._depths)
        places = wanted[np.unique(np.linspace(0, len(wanted) - 1, count).astype(np.int64))]
        before, failed = self.measured, 0
        for part in np.array_split(places, -(-len(places) // self._panel)):
            panel = self._open(part)
            self._search(panel)
            failed += int(self._ranked(panel)[1].sum())
        return (self.measured - before) / len(places), failed / len(places)

    def _open(self, place: slice | Ints) -> _Panel:
        """Return a panel that looks nowhere yet."""
        rows, depth = self._asked[place], int(self._depths[place].max())
        if self._both:
            factors, norms = self._factors[place], self._norms[place]
        else:
            factors, norms = self._factored(self._queries, rows)
        error = self._error(norms)
        return _Panel(rows, depth, factors, error, np.full_like(error, -np.inf))

    def _look(self, panel: _Panel, halves: Floats) -> None:
        """Decide how far each query of a panel looks, by its ĥ to the sample (B, S)."""
        last = self._sample_rank(panel.depth) - 1
        near, width = halves, halves.shape[1] // _GROUP
        # of few, the nearest of each group tell nearly as well, and are sooner selected from
        if last < width // 4:
            near = halves[:, : width * _GROUP].reshape(-1, _GROUP, width).min(axis=1)
        reach = np.partition(near, last, axis=1)[:, last] + panel.error
        crowded = np.count_nonzero(halves <= reach[:, None], axis=1) > 4 * (last + 1)
        panel.reach[~crowded] = reach[~crowded]

    def _multiply(self, left: Factors, right: Factors) -> Floats:
        """Return half squared distances (B, W), in memory that the next call takes."""
        shape = len(left), len(right)
        product = np.matmul(left, right.T, out=self._product[: math.prod(shape)].reshape(shape))
        if self._type is np.float32:
            return product
        halves = self._halves[: math.prod(shape)].reshape(shape)
        np.copyto(halves, product, casting="same_kind")
        return halves

    def __iter__(self) -> Iterator[tuple[Ints, Bools, Bools]]:
        """Yield queries (B,), their matches (B, k) and which of them are left to full search (B,), panel by panel.

        k is the panel's largest depth.
        """
        total = len(self._asked)
        places = [slice(start, min(start + self._panel, total)) for start in range(0, total, self._panel)]
        panels = [self._open(place) for place in places] if self._both else []
        for number, place in enumerate(places):
            if self._both:
                panel = panels[number]
                self._share(panels, number)
            else:
                panel = self._open(place)
                self._search(panel)
            if panel.depth:
                asked = self._depths[place] > 0
                matches, failed = self._ranked(panel)
                yield panel.rows[asked], matches[asked], failed[asked]
            panel.found.clear()

    def _search(self, panel: _Panel) -> None:
        """Find one panel's candidates in the whole gallery."""
        left, wide = _turned(panel.factors), len(self._mask) // len(panel.rows)
        halves = self._multiply(left, self._sample_factors)
        if self._itself:
            halves[panel.rows[:, None] == self._sample] = np.inf
        self._look(panel, halves)
        for start in range(0, self._size, wide):
            halves = self._multiply(left, self._factors[start : start + wide])
            if self._itself:
                column = self._column[panel.rows] - start
                inside = np.flatnonzero((column >= 0) & (column < halves.shape[1]))
                halves[inside, column[inside]] = np.inf
            self._keep(panel, halves, start)

    def _share(self, panels: list[_Panel], number: int) -> None:
        """Find candidates among a panel and those after it, for both: the panels before it have done so.

        The first panel is the sample: its blocks say how far the others look.
        """
        panel, start = panels[number], number * self._panel
        for later, other in enumerate(panels[number:], number):
            if not (other.depth or panel.depth):
                continue
            halves = self._multiply(_turned(other.factors), panel.factors)
            if other is panel:
                np.fill_diagonal(halves, np.inf)
            if number == 0 and other.depth:
                self._look(other, halves)
            if other.depth:
                self._keep(other, halves, start)
            if other is not panel and panel.depth:
                self._keep(panel, halves, later * self._panel, across=True)

    def _keep(self, panel: _Panel, halves: Floats, start: int, *, across: bool = False) -> None:
        """Keep what is within reach of a panel's queries, the block's rows or, `across`, its columns, among the items from `start` on.

        A key is ĥ and the item, 32 bits each, and so compares as ĥ does from 0 on, and then as the item.
        """
        rows, width = halves.shape
        mask = self._mask[: halves.size]
        np.less_equal(halves, panel.reach if across else panel.reach[:, None], out=mask.reshape(halves.shape))
        dense = panel.depth * _DENSE > self._size
        found = np.flatnonzero(mask) if dense else true_places(self._mask, halves.size)
        first = np.arange(rows + 1) * width
        counts = np.diff(np.searchsorted(found, first))
        item = found - np.repeat(first[:-1], counts)  # the column, of each row in turn
        if across:
            order = np.argsort(item.astype(np.uint16), kind="stable")
            item, counts = np.repeat(np.arange(rows), counts)[order], np.bincount(item, minlength=width)
            found = found[order]
        keys = np.empty(len(found), np.int64)
        near, items = parts(keys)
        np.maximum(halves.ravel()[found], 0, out=near)
        np.add(item, start, out=items, casting="same_kind")
        panel.found.append((counts, keys))

    def _ranked(self, panel: _Panel) -> tuple[Bools, Bools]:
        """Return a panel's matches (B, k), and which queries have too few candidates or too crowded ones (B,)."""
        counts = np.sum([each for each, _ in panel.found], axis=0)
        ends = np.cumsum(counts)
        matches, failed = np.zeros((len(counts), panel.depth), np.bool_), counts < panel.depth
        if ends[-1] > _MOST:
            return matches, np.ones_like(failed)
        keys = grouped(panel.found, ends - counts)
        for stop, count, left in zip(ends.tolist(), counts.tolist(), failed.tolist(), strict=True):
            if not left:
                keys[stop - count : stop].sort()
        rest = np.flatnonzero(~failed)
        # A few ranks more than asked nearly always show where the run at the last one ends; if not, all of them.
        for more in (panel.depth // 16 + 8, self._size):
            open_ended = []
            width = min(int(counts[rest].max(initial=0)), panel.depth + more) + 1
            step = max(1, _RANKS // width)
            for some in (rest[at : at + step] for at in range(0, len(rest), step)):
                ranked = np.empty((len(some), width), np.int64)
                near, item = parts(ranked)
                near[:], item[:] = panel.reach[some, None], 0
                for row, stop, count in zip(ranked, ends[some].tolist(), counts[some].tolist(), strict=True):
                    row[:count] = keys[stop - count : stop][:width]
                matches[some], open_end = self._settled(panel, some, near, item)
                open_ended.append(some[open_end])
            rest = np.concatenate([rest[:0], *open_ended])
        failed[rest] = True
        return matches, failed

    def _settled(
        self, panel: _Panel, chosen: Ints, near: Floats, item: NDArray[np.int32]
    ) -> tuple[Bools, Bools]:
        """Return matches (B, k) in the true order, and for which queries the run at the last rank has no end (B,).

        Args:
            panel: whose queries they are.
            chosen: (B,) which of them.
            near: (B, W + 1) ĥ, ascending; the last column is where the ranked ones end.
            item: (B, W + 1) the items.
        """
        asked, item = panel.rows[chosen], item[:, :-1]
        joined = near[:, 1:] - near[:, :-1] <= panel.error[chosen, None]
        open_end = joined[:, panel.depth - 1 :].all(axis=1)
        match = self._classes.take(item) == self._query_class[asked, None]
        joined[open_end], joined[:, -1] = False, False
        row, rank, run = _in_doubt(joined, match, panel.depth)
        column = self._order[item[row, rank]]
        apart = direct(self._queries, self._gallery, asked[row], column, self._scale)
        order = np.lexsort((make_keys(apart, column), run))
        match[row, rank] = match[row[order], rank[order]]
        self.measured += len(row)
        return np.asarray(match[:, : panel.depth]), np.asarray(open_end)


def _in_doubt(joined: Bools, match: Bools, depth: int) -> tuple[Ints, Ints, Ints]:
    """Return query, rank and number (M,) of the items of each run that holds matches and others and begins among the first `depth` ranks.

    Args:
        joined: (B, W) whether an item and the next one are of one run; no row's last one is.
        match: (B, W) whether the items match.
        depth: how many ranks are asked for.
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


def _turned(factors: Factors) -> Factors:
    """Return (B, C + 2) −x, 1 and |x|²/2: its product with another's factors is half the squared distances."""
    out = -factors
    out[:, -2], out[:, -1] = 1, factors[:, -2]
    return out


def _mean(codes: Tensor, scale: float) -> Tensor:
    """Return the mean (C,) of scaled codes, float64."""
    total = torch.zeros(codes.shape[1], dtype=torch.float64)
    for part in torch.split(codes, 4096):
        total += (part.double() * scale).sum(0)
    return total / len(codes)
