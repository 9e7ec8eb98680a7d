"""For each query and rank, whether the item there has the query's label: what metrics are made of."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from retrieval.evaluation.exclusion import Hidden
from retrieval.evaluation.neighbors import Codes, DistanceBlock, Neighbors, as_tensor, rows_of
from retrieval.evaluation.ranking import Ranking

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


@dataclass(frozen=True)
class Matching:
    """Queries and a gallery, with the class numbers of both.

    Attributes:
        queries: (Q, C) codes.
        query_class: (Q,) class numbers.
        gallery: (N, C) codes; None: the queries are the gallery, each left out of its own answer.
        item_class: (N,) class numbers.
        distance: see `exact_neighbors`, as for the rest.
        block: queries at a time.
        device: see `exact_neighbors`.
        hidden: which items are hidden from which queries; None: each query from itself only, where
            it is in the gallery.
    """

    queries: Codes
    query_class: Ints
    gallery: Codes | None
    item_class: Ints
    distance: DistanceBlock | None = None
    block: int | None = None
    device: str = "auto"
    hidden: Hidden | None = None

    def __call__(self, asked: Ints, depths: Ints) -> Iterator[tuple[Ints, Bools]]:
        """Yield queries (B,) and matches (B, k), block by block; k is at least the depth of each.

        Args:
            asked: (A,) rows of the queries, in order of depth.
            depths: (A,) how many ranks each wants, ascending.
        """
        ranked = Ranking.serves(len(self.item_class), depths) if self._ranks else 0
        left = [np.arange(ranked, len(asked))]
        if ranked:
            codes = as_tensor(self.queries, "gallery").cpu()
            if codes.dtype != torch.float64:
                codes = codes.float()  # exactly, of half precision
            place = np.empty(len(self.query_class), np.int64)
            place[asked] = np.arange(len(asked))
            ranking = Ranking(codes.numpy(), self.item_class, asked[:ranked], depths[:ranked])
            for rows, matches, failed in ranking:
                yield rows[~failed], matches[~failed]
                left.append(place[rows[failed]])
        rest = np.sort(np.concatenate(left))
        if len(rest):
            yield from self._searched(asked[rest], depths[rest])

    @property
    def _ranks(self) -> bool:
        """Whether items are searched for one another on a CPU, by distance alone."""
        here = self.device == "cpu" or (self.device == "auto" and not torch.cuda.is_available())
        plain = self.gallery is None and self.distance is None and self.hidden is None
        return here and plain and self.block is None

    def _searched(self, asked: Ints, depths: Ints) -> Iterator[tuple[Ints, Bools]]:
        """Do as a call does, by `Neighbors`."""
        itself = self.gallery is None
        search = Neighbors(
            self.queries if self.gallery is None else self.gallery,
            distance=self.distance,
            block=self.block,
            device=self.device,
        )
        # Items that are hidden take ranks of the search: so many more are asked for.
        more = 0 if self.hidden is None else self.hidden.every()[asked]
        reach = np.minimum(depths + more, search.size)
        done = 0
        while done < len(asked):
            size = search.block(int(reach[done : done + 1024].max()))
            rows = asked[done : done + size]
            k = int((depths if self.hidden is None else reach)[done : done + size].max())
            found, _ = search(rows_of(self.queries, rows), k, rows if itself else None)
            matches = self.item_class[found] == self.query_class[rows, None]
            if k >= search.size:  # fewer than k are there: index −1, which matches nothing
                matches &= found >= 0
            if self.hidden is not None:
                shown = self.hidden.visible(rows, found)
                most = int(depths[done : done + size].max())
                order = np.argsort(~shown, axis=1, kind="stable")[:, :most]
                matches = np.take_along_axis(matches & shown, order, 1)
            yield rows, matches
            done += len(rows)
