"""Where work is done: the same calls here, and on a cluster."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol, TypeVar

from retrieval.serving.threads import ahead

T = TypeVar("T")
R = TypeVar("R")
T_contra = TypeVar("T_contra", contravariant=True)


class Runner(Protocol):
    """Does tasks, a bounded number ahead of the use of their results."""

    def __call__(
        self, setup: Callable[..., Callable[[T], R]], given: tuple[Any, ...], tasks: Iterable[T]
    ) -> Iterator[R]:
        """Give the tasks' results, in whatever order they are done.

        Args:
            setup: gives what does a task; called once by each worker.
            given: what `setup` is called with.
            tasks: what is to be done.
        """


def here(
    setup: Callable[..., Callable[[T], R]], given: tuple[Any, ...], tasks: Iterable[T], workers: int = 2
) -> Iterator[R]:
    """Do tasks in threads of this process; see `Runner`. By default two at a time: one is decoded to its end while the next begins."""
    yield from ahead(setup(*given), tasks, workers=workers, most=workers)
