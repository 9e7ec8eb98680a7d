"""The interface of index back ends, and how a store searches and measures one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from retrieval.errors import StoreError
from retrieval.host.plugin_calls import calling
from retrieval.serving.store.search import nearest

Floats = NDArray[np.float32]
Rows = NDArray[np.int64]
_RECALL_QUERIES = 200


class IndexBackend(ABC):
    """Search structure over N vectors (N, P), float32, by Euclidean distance.

    A plugin offers one through the hook `retrieval_indexes`; its parameters are its factory's
    signature. The store calls either `build` and then `save`, once and in one thread, or `load`
    once and then `search` from many threads. Row numbers are positions in `vectors`.
    """

    @abstractmethod
    def build(self, vectors: Floats, report: Callable[[int], object]) -> None:
        """Index vectors.

        Args:
            vectors: (N, P), float32, C-contiguous, N ≥ 1; may be mapped from a file.
            report: call it with the number of vectors added since the last call (progress bar).
        """

    @abstractmethod
    def search(self, queries: Floats, k: int) -> tuple[Floats, Rows]:
        """Return the nearest vectors of each query, nearest first.

        Must be thread-safe and change nothing. Distances may be approximate, because the store
        measures them again.

        Args:
            queries: (Q, P), float32, C-contiguous.
            k: number of neighbours, 1 ≤ k ≤ N.

        Returns:
            Euclidean distances (Q, k) and row numbers (Q, k), int64, padded with -1.
        """

    @property
    def expand(self) -> int:
        """How many times more candidates than hits the store requests.

        More than 1 if the back end compresses vectors, which changes their order.
        """
        return 1

    @property
    def selective(self) -> bool:
        """Whether `search_selected` is implemented; otherwise filtered searches are exact."""
        return False

    def search_selected(
        self, queries: Floats, k: int, keep: NDArray[np.bool_]
    ) -> tuple[Floats, Rows]:
        """Search among some of the vectors; see `search`.

        Args:
            queries: (Q, P), float32, C-contiguous.
            k: number of neighbours, 1 ≤ k ≤ N.
            keep: (N,), True for the vectors to search.
        """
        raise NotImplementedError(
            f"{type(self).__name__} has no search_selected. Implement it, or return False from"
            " `selective`"
        )

    @abstractmethod
    def save(self, path: Path) -> None:
        """Write everything that `load` needs to one new file; an OSError may propagate."""

    @abstractmethod
    def load(self, path: Path) -> None:
        """Read a file that `save` wrote, after its checksum was verified; may move it to a GPU.

        `path` is a private copy that is deleted afterwards; memory maps of it stay valid.
        """

    def save_beside(self, path: Path) -> None:
        """Write everything that `load_beside` needs except the vectors to one new file.

        Calls `save` by default.
        """
        self.save(path)

    def load_beside(self, path: Path, vectors: Floats) -> None:
        """Read a file that this or an earlier version of `save_beside` wrote; see `load`.

        Args:
            path: the file.
            vectors: vectors (N, P) that it was built over. They may be columns of a memory-mapped
                array, which stays open as long as it is referenced.
        """
        self.load(path)

    def check(self, count: int, width: int) -> None:  # noqa: B027 (a back end need not)
        """Check that the loaded index has `count` vectors of `width` numbers.

        Called once after `load`.

        Raises:
            StoreError: it does not; the message ends a sentence: "it holds 3 vectors instead of 5".
        """

    @property
    def exact(self) -> bool:
        """Whether `search` is exact; otherwise the store measures its recall when it builds one."""
        return False


def using(name: str, doing: str) -> AbstractContextManager[None]:
    """Context manager that turns a back end's errors into a sentence with its name and task."""
    return calling(
        f"The index back end {name}, asked to {doing},",
        "Give it parameters that need less, or index fewer items.",
    )


def checked_search(
    backend: IndexBackend,
    name: str,
    queries: Floats,
    k: int,
    count: int,
    keep: NDArray[np.bool_] | None = None,
) -> Rows:
    """Return the row numbers (Q, k) of a search, padded with -1, after checking them.

    Args:
        backend: back end with `count` vectors.
        name: its name in error messages.
        queries: (Q, P).
        k: number of neighbours.
        count: number of vectors.
        keep: (count,), True for the vectors to search. `None` searches all.

    Raises:
        PluginError: the back end fails.
        StoreError: the back end returns an invalid result.
    """
    with using(name, "search"):
        if keep is None:
            _, rows = backend.search(queries, k)
        else:
            _, rows = backend.search_selected(queries, k, keep)
        rows = np.asarray(rows)
    if (
        rows.shape != (len(queries), k)
        or rows.dtype.kind != "i"
        or (rows.size and (rows.min() < -1 or rows.max() >= count))
    ):
        raise StoreError(
            f"The index back end '{name}' answered with {rows.dtype} rows of shape {rows.shape} for"
            f" {len(queries)} queries and k = {k}, or with rows beyond the {count:,} items. Report"
            " it to the back end's author."
        )
    if keep is not None and not keep[rows[rows >= 0]].all():
        raise StoreError(
            f"The index back end '{name}' returned vectors that the filter excludes. Report it to"
            " the back end's author."
        )
    return rows.astype(np.int64, copy=False)


def recall_at_10(backend: IndexBackend, name: str, vectors: Floats) -> float:
    """Return the share of the exact ten nearest neighbours that `backend` finds.

    Args:
        backend: back end built over `vectors`.
        name: its name in error messages.
        vectors: (N, P), float32, C-contiguous. Up to 200 of them are the queries; each is excluded
            from its own result.
    """
    count = len(vectors)
    k = min(10, count - 1)
    if k < 1:
        return 1.0
    sample = np.sort(
        np.random.default_rng(0).choice(count, min(_RECALL_QUERIES, count), replace=False)
    )
    queries = vectors[sample]
    # k + 1, because each query finds itself first. Any vector as near as the last one counts as a
    # hit; otherwise duplicates would look like misses.
    limits = nearest(queries, vectors, k + 1)[0][:, k] + 2e-6 * np.square(queries).sum(axis=1).max()
    hits = 0
    for row, query, limit, rows in zip(
        sample, queries, limits, checked_search(backend, name, queries, k + 1, count), strict=True
    ):
        neighbours = rows[(rows >= 0) & (rows != row)]
        squared = np.square(vectors[neighbours] - query).sum(axis=1)
        hits += min(k, int((squared <= limit).sum()))
    return hits / (k * len(sample))
