"""The interface of index back ends, checked searches with one, and a measurement of its recall."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np

from retrieval.base.arrays import Bools, Floats32, Ints
from retrieval.errors import StoreError
from retrieval.host.factory import calling
from retrieval.store.exact_search import nearest

_MAX_RECALL_QUERIES = 200


class IndexBackend(ABC):
    """Interface of a search structure over N float32 vectors of P numbers, by Euclidean distance.

    A plugin registers the factory of a back end with the hook `retrieval_indexes`; the parameters
    of the factory are those of the back end. One instance either builds and saves (`build`, then
    `save`, each called once from one thread), or loads and searches (`load` once, then `search`
    from many threads). A row number is the position of a vector in `vectors`.
    """

    expand = 1
    """Number of candidates that the store requests per hit.

    Set more than 1 if the back end compresses vectors and so orders them inexactly.
    """

    @abstractmethod
    def build(self, vectors: Floats32, report: Callable[[int], object]) -> None:
        """Build the structure over vectors.

        Args:
            vectors: (N, P), float32, C-contiguous, N ≥ 1; may be a memory map.
            report: advances the progress bar: call `report` with the number of vectors added since
                its last call.
        """

    @property
    def wider(self) -> dict[str, Any]:
        """Parameters with which a search finds more, for a structure that `adopt` took over."""
        return {}

    def adopt(self, other: IndexBackend, rows: Ints, vectors: Floats32) -> bool:
        """Take over the structure of changed vectors, instead of `build`; return whether it could.

        The store measures afterwards how many neighbours are found. A back end need not implement
        it.

        Args:
            other: a back end of the same parameters that has been loaded.
            rows: (N,), ascending: row of each vector in `other`.
            vectors: (N, P), as in `build`.
        """
        return False

    @abstractmethod
    def search(self, queries: Floats32, k: int) -> tuple[Floats32, Ints]:
        """Return the nearest vectors of each query, nearest first.

        The method must be thread-safe and must not change the back end. The distances may be
        approximate, because the store computes them again.

        Args:
            queries: (Q, P), float32, C-contiguous.
            k: number of neighbours, 1 ≤ k ≤ N.

        Returns:
            Euclidean distances (Q, k) and row numbers (Q, k), int64. If fewer than k vectors are
            returned for a query, its row numbers end with -1.
        """

    def intact(self) -> bool:
        """Return whether the files that `load` mapped have kept their content."""
        return True

    @property
    def selective(self) -> bool:
        """Whether `search_selected` is implemented; otherwise filtered searches are exact."""
        return type(self).search_selected is not IndexBackend.search_selected

    def search_selected(self, queries: Floats32, k: int, keep: Bools) -> tuple[Floats32, Ints]:
        """Search only the vectors that `keep` (N,) selects; otherwise like `search`.

        A back end need not implement it.
        """
        raise NotImplementedError

    @abstractmethod
    def save(self, path: Path) -> None:
        """Write to the new file `path` what `load` needs besides the vectors.

        An OSError may propagate.
        """

    @abstractmethod
    def load(self, path: Path, vectors: Floats32) -> None:
        """Read a file that `save` wrote; the store has verified its checksum.

        The back end may keep a memory map of the file, and may move its data to a GPU.

        Args:
            path: the file.
            vectors: vectors (N, P) that the structure was built over. They may be columns of a
                memory map, which stays open as long as it is referenced.

        Raises:
            StoreError: the structure does not fit the vectors, such as "It holds 3 vectors instead
                of 5."
        """


def using(name: str, doing: str) -> AbstractContextManager[None]:
    """Context manager whose errors name the back end and its task, such as "build" or "search"."""
    return calling(
        f"The index back end {name}, asked to {doing},",
        "Choose parameters of the back end that need less memory, or index fewer items.",
    )


def checked_search(
    backend: IndexBackend,
    name: str,
    queries: Floats32,
    k: int,
    count: int,
    keep: Bools | None = None,
) -> Ints:
    """Search a back end of `count` vectors with queries (Q, P), and check its answer.

    `keep` (count,) is True for the vectors to search; `None` searches all. Returns the row numbers
    (Q, k), padded with -1.

    Raises:
        PluginError: the back end fails.
        StoreError: the back end returns an invalid result.
    """
    try:
        if keep is None:
            _, rows = backend.search(queries, k)
        else:
            _, rows = backend.search_selected(queries, k, keep)
        rows = np.asarray(rows)
    except Exception:
        with using(name, "search"):
            raise
    fault = None
    if rows.shape != (len(queries), k) or rows.dtype.kind != "i":
        fault = f"{rows.dtype} of shape {rows.shape}"
    elif rows.size and (
        np.minimum.reduce(rows, None) < -1 or np.maximum.reduce(rows, None) >= count
    ):
        fault = f"rows {rows.min():,} to {rows.max():,}"
    if fault:
        raise StoreError(
            f"The index back end '{name}' returned {fault} instead of int64 rows of shape"
            f" {(len(queries), k)} from -1 to {count - 1:,}. Report this to the back end's author."
        )
    if keep is not None and not keep[rows[rows >= 0]].all():
        raise StoreError(
            f"The index back end '{name}' returned vectors that the filter excludes. Report this to"
            " the back end's author."
        )
    return rows.astype(np.int64, copy=False)


def recall_at_10(backend: IndexBackend, name: str, vectors: Floats32) -> float:
    """Return the share of the exact ten nearest neighbours that `backend` finds.

    Up to 200 of the vectors (N, P), over which the back end was built, are the queries. A query
    does not count as its own neighbour.
    """
    count = len(vectors)
    k = min(10, count - 1)
    if k < 1:
        return 1.0
    sample = np.sort(
        np.random.default_rng(0).choice(count, min(_MAX_RECALL_QUERIES, count), replace=False)
    )
    queries = vectors[sample]
    # Request k + 1 neighbours, because each query finds itself. Any vector as near as the k-th
    # neighbour counts as a hit, since which of two duplicates is returned does not matter. The
    # second term allows for rounding.
    limits = nearest(queries, vectors, k + 1)[0][:, k] + 2e-6 * np.square(queries).sum(axis=1).max()
    hits = 0
    for row, query, limit, rows in zip(
        sample, queries, limits, checked_search(backend, name, queries, k + 1, count), strict=True
    ):
        neighbours = rows[(rows >= 0) & (rows != row)]
        squared = np.square(vectors[neighbours] - query).sum(axis=1)
        hits += min(k, int((squared <= limit).sum()))
    return hits / (k * len(sample))
