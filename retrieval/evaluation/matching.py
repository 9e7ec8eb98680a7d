"""For each query and rank, whether the item there has the query's label: what every figure is made of.

Euclidean codes go through `Ranking` where it is the faster way, which a small part of the queries tells; all others, and the
queries that it leaves, are searched in full.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from retrieval.evaluation.exclusion import Hidden
from retrieval.evaluation.neighbors import Candidates, Codes, DistanceBlock, Neighbors, as_tensor, rows_of
from retrieval.evaluation.ranking import Precision, Ranking

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

_PILOT = 32


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
        candidates: see `exact_neighbors`.
        hidden: which items are hidden from which queries; None: each query from itself only, where it is in the gallery.
    """

    queries: Codes
    query_class: Ints
    gallery: Codes | None
    item_class: Ints
    distance: DistanceBlock | None = None
    block: int | None = None
    device: str = "auto"
    candidates: Candidates = "auto"
    hidden: Hidden | None = None

    def __call__(self, asked: Ints, depths: Ints) -> Iterator[tuple[Ints, Bools]]:
        """Yield queries (B,) and their matches (B, k), block by block; k is at least the depth of each.

        Args:
            asked: (A,) rows of the queries, in order of depth.
            depths: (A,) how many ranks each wants, ascending.
        """
        ranked = 0
        if self._here and self.distance is None and self.hidden is None:
            ranked = int(np.searchsorted(depths, Ranking.deepest(len(self.item_class)), side="right"))
        left = [np.flatnonzero(np.arange(len(asked)) >= ranked)]
        ranking = self._ranking(asked[:ranked], depths[:ranked]) if ranked else None
        if ranking is None:
            left = [np.arange(len(asked))]
        else:
            place = np.empty(len(self.query_class), np.int64)
            place[asked] = np.arange(len(asked))
            for rows, matches, failed in ranking:
                if not failed.all():
                    yield rows[~failed], matches[~failed]
                left.append(place[rows[failed]])
        rest = np.sort(np.concatenate(left))
        yield from self._searched(asked[rest], depths[rest])

    @property
    def _here(self) -> bool:
        """Whether the work is NumPy's: on a GPU, full search is fast, and codes in bfloat16 on some CPUs."""
        wanted = self.device == "cpu" or (self.device == "auto" and not torch.cuda.is_available())
        return wanted and self.candidates != "bfloat16"

    @cached_property
    def _tensors(self) -> tuple[Tensor, Tensor | None]:
        """The gallery's codes and the queries', None where they are the same."""
        gallery = as_tensor(self.queries if self.gallery is None else self.gallery, "gallery").cpu()
        return gallery, None if self.gallery is None else as_tensor(self.queries, "queries").cpu()

    def _ranking(self, asked: Ints, depths: Ints) -> Ranking | None:
        """Return a ranking in the precision that leaves little in doubt, as a few queries tell; None if neither does."""
        gallery, queries = self._tensors
        if queries is not None and (
            queries.shape[1] != gallery.shape[1]
            or float(queries.abs().max()) > 2.0**60 * float(gallery.abs().max())
        ):
            return None  # full search says what is wrong
        precisions: list[Precision] = ["float64"] if self.candidates == "none" else ["float32", "float64"]
        for precision in precisions:
            ranking = Ranking(
                gallery, self.item_class, queries, self.query_class, asked, depths,
                precision=precision, block=self.block,
            )  # fmt: skip
            measured, failed = ranking.pilot(_PILOT)
            # To measure a pair alone costs as much as some 60 in a product of double precision save.
            if failed <= 0.25 and measured <= len(gallery) / (64 if precision == "float32" else 16):
                return ranking
        return None

    def _searched(self, asked: Ints, depths: Ints) -> Iterator[tuple[Ints, Bools]]:
        """Do as a call does, by full search."""
        if not len(asked):
            return
        itself = self.gallery is None
        search = Neighbors(
            self.queries if self.gallery is None else self.gallery, distance=self.distance, block=self.block,
            device=self.device, candidates=self.candidates,
        )  # fmt: skip
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
                order = np.argsort(~shown, axis=1, kind="stable")[:, : int(depths[done : done + size].max())]
                matches = np.take_along_axis(matches & shown, order, 1)
            yield rows, matches
            done += len(rows)
