"""What the machine gives this process: cores, memory, and work on all cores at once."""

from __future__ import annotations

import ctypes
import gc
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

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of mallopt(3)
_LARGE = 1_000_000  # bytes
_KEEP_ALL = 1 << 30  # bytes
_USERS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")
"""Environment variables by which a user sets glibc's thresholds."""


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
    # Python 3.13 has this function, which also reads PYTHON_CPU_COUNT.
    if hasattr(os, "process_cpu_count"):
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
    except OSError:
        # This is not Linux, or there is no /proc.
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
        # "max" means no limit.
        with suppress(OSError, ValueError, ZeroDivisionError):
            text = " ".join((folder / name).read_text(encoding="utf-8") for name in files)
            quota, period = map(int, text.split()[:2])
            if quota > 0:
                return quota / period
            return math.inf
    return math.inf


def available_memory() -> int:
    """Return how many bytes of memory this process can use on its machine and in its container."""
    room = []
    with suppress(OSError, ValueError, IndexError):
        text = Path("/proc/meminfo").read_text()
        room.append(int(text.split("MemAvailable:")[1].split()[0]) * 1024)
    with suppress(OSError, ValueError):
        room.append(int(Path("/sys/fs/cgroup/memory.max").read_text()))
    with suppress(OSError, ValueError, AttributeError):
        room.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    return min(room, default=1 << 40)


def return_large_blocks(size: int = _LARGE) -> None:
    """Make the C library return freed blocks of `size` bytes or more, and keep smaller ones.

    By default, glibc raises its thresholds to the size of the largest block freed so far. If they
    grow to tens of megabytes, threads keep much free memory. If they stay small, the memory of each
    photo is returned, and then allocated again page by page.

    Args:
        size: threshold in bytes.
    """
    with suppress(OSError, AttributeError, TypeError):
        for threshold in (_TRIM_THRESHOLD, _MMAP_THRESHOLD):
            ctypes.CDLL(None).mallopt(threshold, size)


def keep_large_blocks() -> None:
    """Make the C library keep freed blocks of any size, unless the user has set thresholds.

    torch allocates blocks of the same sizes for each batch. If the C library returns them, the
    system must clear their pages again, which took two thirds of the time of EfficientNet-Lite0 on
    a CPU, and two fifths of the time of a training step. The cost of keeping blocks is
    fragmentation, which raises the peak memory of training by up to a half.
    """
    if not any(name in os.environ for name in _USERS):
        return_large_blocks(_KEEP_ALL)


def give_back() -> None:
    """Collect garbage and return free memory to the system; takes some milliseconds."""
    # An upload may be held by a cycle of an exception and its frames.
    gc.collect()
    with suppress(OSError, AttributeError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)
