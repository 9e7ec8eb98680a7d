"""The cores that this process may use, by its CPU affinity and its cgroup's quota; work on them."""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")


def cores(root: Path = Path("/")) -> int:
    """Return how many cores this process may use, at least 1; a quota of 1.5 cores counts as 2."""
    return max(1, math.ceil(min(_affinity(), _quota(root))))


def default_threads() -> int:
    """Return `OMP_NUM_THREADS` if it is set, otherwise the number of cores."""
    setting = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    if setting.isdecimal() and int(setting) > 0:
        return int(setting)
    return cores()


def limit_threads(root: Path = Path("/")) -> None:
    """Limit the threads of torch, FAISS and BLAS to the cgroup's quota; call it before they load.

    These libraries respect the affinity but not the quota. A user's own `OMP_NUM_THREADS` stays.
    """
    allowed = cores(root)
    if allowed < _affinity():
        os.environ.setdefault("OMP_NUM_THREADS", str(allowed))


def ahead(work: Callable[[T], R], items: Iterable[T], *, workers: int, most: int) -> Iterator[R]:
    """Yield `work(item)` for each item, in order, computed in threads.

    At most `most` results are finished or running at a time. The error of an item is raised when
    its result would be yielded.
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


def _affinity() -> int:
    if hasattr(os, "process_cpu_count"):  # Python 3.13; it also reads PYTHON_CPU_COUNT
        return os.process_cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _quota(root: Path) -> float:
    """Return how many cores' time the process's cgroups allow; infinity for no limit.

    The limit of a cgroup also holds for the cgroups below it. In a container, /proc may name a path
    of the host, which does not exist here.
    """
    try:
        groups = (root / "proc/self/cgroup").read_text(encoding="utf-8")
    except OSError:  # not Linux, or no /proc
        return math.inf
    limits = [math.inf]
    for line in groups.splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        # A line of cgroup version 2 names no controllers. If version 1 is mounted as well, version
        # 2 lies in the subfolder `unified`.
        names = [name for name in path.split("/") if name]
        for mount in (controllers, "cpu" if controllers else "unified"):
            base = root / "sys/fs/cgroup" / mount
            limits += [_limit(base.joinpath(*names[:depth])) for depth in range(len(names) + 1)]
    return min(limits)


def _limit(folder: Path) -> float:
    """Return how many cores' time one cgroup (version 2 or 1) allows."""
    for files in (["cpu.max"], ["cpu.cfs_quota_us", "cpu.cfs_period_us"]):
        with suppress(OSError, ValueError, ZeroDivisionError):  # "max" means no limit
            text = " ".join((folder / name).read_text(encoding="utf-8") for name in files)
            quota, period = map(int, text.split()[:2])
            if quota > 0:
                return quota / period
            return math.inf
    return math.inf
