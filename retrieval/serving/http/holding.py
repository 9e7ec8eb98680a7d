"""The index that is served, held for one search."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType

from retrieval.errors import StoreError
from retrieval.serving.bundle import Bundle
from retrieval.serving.http.current import Current
from retrieval.serving.index.index import Index
from retrieval.serving.runtime import load_faiss
from retrieval.serving.store.contract import StoreUnavailable, Superseded, TooSlow, patience

PASSING = (TooSlow, StoreUnavailable)
"""Of which an index's files are not the cause."""


class Holding:
    """A block in which the index is searched, within a deadline; for a thread.

    Args:
        current: which index.
        bundle: that has encoded what is searched for.
        seconds: that the index may take over what it is asked.
        damaged: is told where the index proves damaged.

    Raises:
        Superseded: another bundle is served.
    """

    __slots__ = ("_bundle", "_current", "_damaged", "_held", "_patience", "_seconds")

    def __init__(self, current: Current, bundle: Bundle, seconds: float, damaged: Callable[[], None]) -> None:
        self._current, self._bundle, self._seconds, self._damaged = current, bundle, seconds, damaged

    def __enter__(self) -> Index:
        # Several searches run at a time: FAISS's threads would wait for each other.
        load_faiss().omp_set_num_threads(1)
        self._held = self._current.hold()
        try:
            index = self._held.index
            if index.bundle is not self._bundle:
                raise Superseded("Another bundle is served.")
            self._patience = patience(self._seconds)
            self._patience.__enter__()
        except BaseException:
            self._current.let_go(self._held)
            raise
        return index

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._patience.__exit__(None, None, None)
        self._current.let_go(self._held)
        if isinstance(error, StoreError) and not isinstance(error, (Superseded, *PASSING)):
            self._damaged()
