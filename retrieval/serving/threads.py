"""Work on many items in threads, a bounded number ahead of its use."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")


def ahead(work: Callable[[T], R], items: Iterable[T], *, workers: int, most: int) -> Iterator[R]:
    """Yield `work(item)` of each item, in order.

    Args:
        work: runs in a thread; what it raises is raised where its result would be yielded.
        items: what to work on.
        workers: number of threads.
        most: how many results exist at a time, finished or under way: this bounds the memory.
    """
    pool = ThreadPoolExecutor(workers, thread_name_prefix="decode")
    try:
        waiting: deque[Future[R]] = deque()
        for item in items:
            waiting.append(pool.submit(work, item))
            if len(waiting) >= most:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
