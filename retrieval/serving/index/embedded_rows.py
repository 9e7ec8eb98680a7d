"""Vectors of a folder of embeddings: all in memory, or as many rows as are asked for."""

from __future__ import annotations

import bisect
import os
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from retrieval.errors import DataError
from retrieval.serving.index.embedded import ARRAYS, ROWS, Plan, numbers_of, part_file, rows, unfinished
from retrieval.serving.index.locations import Location
from retrieval.serving.index.origins import Source
from retrieval.serving.index.tables import Table


def in_memory(folder: Path, column: str | None = None) -> tuple[list[Source], NDArray[np.float32]]:
    """Return the items of a complete folder and one of their columns (N, width).

    Args:
        folder: what `retrieval embed` wrote.
        column: "vector", "code" or "features"; None: the features where there are any, else the vector.

    Raises:
        DataError: it is not complete, has no such column, or is damaged.
    """
    plan = Plan.read(folder)
    if not plan.complete:
        raise unfinished(folder)
    name = column or ("features" if "features" in plan.widths else "vector")
    if name not in plan.widths:
        raise DataError(
            f"{folder} has no column '{name}'. Embed again with --features, for a bundle that has them."
        )
    items: list[Source] = []
    parts: list[NDArray[np.float32]] = []
    for some, numbers in rows(folder, plan, [name]):
        items += [item for item, _ in some]
        parts.append(numbers[ARRAYS[name]])
    return items, np.concatenate(parts)


class VectorRows:
    """The vectors of a complete folder of embeddings, read as they are needed: the folder may be larger than the memory.

    Args:
        folder: what `retrieval embed` wrote.

    Raises:
        DataError: it is not complete, or damaged.

    Attributes:
        width: numbers of a vector.
        bundle: whose vectors they are: SHA-256, and the variant.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder.absolute()
        self._plan = Plan.read(folder)
        if not self._plan.complete:
            raise unfinished(folder)
        self.width = self._plan.widths["vector"]
        self.bundle = self._plan.bundle, self._plan.variant
        self._groups: list[tuple[int, int]] = []  # of each row group: its part, its number in it
        self._starts = [0]
        for number in range(self._plan.parts):
            with self._table(number) as table:
                ends = table.starts()[1:]
            self._groups += [(number, group) for group in range(len(ends))]
            before = self._starts[-1]
            self._starts += [before + end for end in ends]

    def __len__(self) -> int:
        return self._starts[-1]

    def labels(self) -> list[str]:
        """Return the labels, in order.

        Raises:
            DataError: an item has none.
        """
        found: list[str] = []
        for some, _ in rows(self._folder, self._plan, ()):
            found += [item.label for item, _ in some if item.label is not None]
        if len(found) < len(self):
            raise DataError(
                f"{len(self) - len(found):,} items of {self._folder} have no label: figures compare labels."
            )
        return found

    def read(self, start: int, stop: int) -> NDArray[np.float32]:
        """Return some vectors (stop − start, P)."""
        out = np.empty((stop - start, self.width), np.float32)
        at = bisect.bisect_right(self._starts, start) - 1
        while at < len(self._groups) and self._starts[at] < stop:
            number, group = self._groups[at]
            first = self._starts[at]
            with self._table(number) as table:
                for batch in table.batches(["vector"], ROWS, group):
                    low, high = max(first, start), min(first + batch.num_rows, stop)
                    if low < high:
                        values = numbers_of(table.location, batch, "vector", self._plan)
                        out[low - start : high - start] = values[low - first : high - first]
                    first += batch.num_rows
            at += 1
        return out

    def _table(self, number: int) -> Table:
        return Table(Location(os.fspath(part_file(self._folder, number))), "features")
