"""What a store asks of an index back end, how it searches one, and how good one is."""

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
    """Proposes the nearest of N vectors (N, P), float32, by Euclidean distance.

    A plugin offers one through the hook `retrieval_indexes`; its parameters are its factory's
    signature. The store calls `build` then `save`, once, in one thread; or `load`, once, and
    `search` from then on, from many threads at a time. Row numbers are positions in `vectors`.
    """

    @abstractmethod
    def build(self, vectors: Floats, report: Callable[[int], object]) -> None:
        """Index vectors.

        Args:
            vectors: (N, P), float32, C-contiguous, N ≥ 1; may be mapped from a file.
            report: call it with how many more vectors are in, for the progress bar.
        """

    @abstractmethod
    def search(self, queries: Floats, k: int) -> tuple[Floats, Rows]:
        """Return the nearest vectors of each query, nearest first.

        Must be thread-safe and change nothing.

        The store measures the distances again, so approximate ones are welcome.

        Args:
            queries: (Q, P), float32, C-contiguous.
            k: how many, 1 ≤ k ≤ N.

        Returns:
            Euclidean distances (Q, k) and row numbers (Q, k), int64; -1 where there are fewer.
        """

    @property
    def expand(self) -> int:
        """How many times as many candidates an index asks for as it wants.

        Coarse vectors come in another order than the vectors themselves.
        """
        return 1

    @property
    def selective(self) -> bool:
        """Whether `search_selected` is there; if not, filtered searches are exact."""
        return False

    def search_selected(
        self, queries: Floats, k: int, keep: NDArray[np.bool_]
    ) -> tuple[Floats, Rows]:
        """Search among some of the vectors; see `search`.

        Args:
            queries: (Q, P), float32, C-contiguous.
            k: how many, 1 ≤ k ≤ N.
            keep: (N,), True for those to search among.
        """
        raise NotImplementedError(
            f"{type(self).__name__} has no search_selected. Write it, or let its `selective` be"
            " False"
        )

    @abstractmethod
    def save(self, path: Path) -> None:
        """Write all that `load` needs to one new file. An OSError (a full disk) is passed on."""

    @abstractmethod
    def load(self, path: Path) -> None:
        """Read what `save` wrote; its checksum has been verified. May move it to a GPU.

        The path is of a private copy, which is gone when this returns; what was mapped from it
        stays.
        """

    def save_beside(self, path: Path) -> None:
        """Write all that `load_beside` needs to one new file, without the vectors.

        The vectors lie beside it.

        By default it holds what `save` writes.
        """
        self.save(path)

    def load_beside(self, path: Path, vectors: Floats) -> None:
        """Read what `save_beside` wrote, now or in an earlier version; see `load`.

        Args:
            path: the file.
            vectors: (N, P), those that it was built over: columns of an array that may be mapped
                from a file, and stays as long as somebody holds it.
        """
        self.load(path)

    def check(self, count: int, width: int) -> None:  # noqa: B027 (a back end need not)
        """Refuse what was loaded if it cannot be an index of `count` vectors of `width` numbers.

        Called once after `load`.

        Raises:
            StoreError: the end of a sentence: "it holds 3 vectors instead of 5".
        """

    @property
    def exact(self) -> bool:
        """Whether `search` always finds the true nearest; if not, building measures its recall."""
        return False


def using(name: str, doing: str) -> AbstractContextManager[None]:
    """Turn whatever a back end raises into one sentence that names it and its task.

    Raises:
        PluginError: the back end raised anything but an error of this package or an OSError.
        DataError: the back end ran out of memory.
    """
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
    """Search, and refuse an answer that breaks the contract.

    A plugin's fault is named as such.

    Args:
        backend: loaded over `count` vectors.
        name: of the back end, for errors.
        queries: (Q, P).
        k: how many.
        count: of the vectors.
        keep: (count,), True for those to search among; None: all.

    Returns:
        Row numbers (Q, k), -1 where there are fewer.

    Raises:
        PluginError: the back end fails.
        StoreError: the back end answers with something else.
    """
    queries = np.ascontiguousarray(queries, dtype=np.float32)
    with using(name, "search"):
        _, answer = (
            backend.search(queries, k)
            if keep is None
            else backend.search_selected(queries, k, keep)
        )
        rows = np.asarray(answer)
    if (
        rows.shape != (len(queries), k)
        or rows.dtype.kind != "i"
        or rows.min(initial=0) < -1
        or rows.max(initial=0) >= count
    ):
        raise StoreError(
            f"The index back end '{name}' answered with {rows.dtype} rows of shape {rows.shape} for"
            f" {len(queries)} queries and k = {k}, or with rows beyond the {count:,} items. Report"
            " it to the back end's author."
        )
    if keep is not None and not keep[rows[rows >= 0]].all():
        raise StoreError(
            f"The index back end '{name}' found vectors that it was not to find. Report it to the"
            " back end's author."
        )
    return rows.astype(np.int64, copy=False)


def recall_at_10(backend: IndexBackend, name: str, vectors: Floats) -> float:
    """Return the share of the exact ten nearest that `backend` finds.

    Queries are items of the index, each left out of its own answer.

    Args:
        backend: built over `vectors`.
        name: of the back end, for errors.
        vectors: (N, P), float32, C-contiguous. The queries are 200 of them.
    """
    count = len(vectors)
    k = min(10, count - 1)
    if k < 1:
        return 1.0
    sample = np.sort(
        np.random.default_rng(0).choice(count, min(_RECALL_QUERIES, count), replace=False)
    )
    queries = vectors[sample]
    # The item itself is the nearest. Whatever is as near as the last counts: duplicates would
    # otherwise look like misses.
    limits = nearest(queries, vectors, k + 1)[0][:, k] + 2e-6 * np.square(queries).sum(axis=1).max()
    hits = 0
    for row, query, limit, rows in zip(
        sample, queries, limits, checked_search(backend, name, queries, k + 1, count), strict=True
    ):
        neighbours = rows[(rows >= 0) & (rows != row)]
        squared = np.square(vectors[neighbours] - query).sum(axis=1)
        hits += min(k, int((squared <= limit).sum()))
    return hits / (k * len(sample))
