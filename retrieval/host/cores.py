"""The number of cores this process may use, from its CPU affinity and its cgroup's quota."""

from __future__ import annotations

import math
import os
from contextlib import suppress
from pathlib import Path


def cores(root: Path = Path("/")) -> int:
    """Return how many cores this process may use, at least 1; a quota of 1.5 cores counts as 2."""
    return max(1, math.ceil(min(_affinity(), _quota(root))))


def default_threads() -> int:
    """Return `OMP_NUM_THREADS` if it is set, otherwise the number of cores."""
    setting = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    return int(setting) if setting.isdecimal() and int(setting) > 0 else cores()


def limit_threads(root: Path = Path("/")) -> None:
    """Limit the threads of torch, FAISS and BLAS to the cgroup's quota; call it before they load.

    These libraries respect the affinity but not the quota. A user's own `OMP_NUM_THREADS` stays.
    """
    allowed = cores(root)
    if allowed < _affinity():
        os.environ.setdefault("OMP_NUM_THREADS", str(allowed))


def _affinity() -> int:
    if hasattr(os, "process_cpu_count"):  # Python 3.13; it also reads PYTHON_CPU_COUNT
        return os.process_cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _quota(root: Path) -> float:
    """Return how many cores' time the process's cgroups (version 2) allow; infinity for no limit.

    A parent's limit holds for its children. In a container, a path may be that of the host and not
    exist.
    """
    limits = [math.inf]
    with suppress(OSError):  # not Linux, or no /proc
        groups = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
        names = [n for line in groups if line.startswith("0::") for n in line[3:].split("/") if n]
        for depth in range(len(names) + 1):
            file = root.joinpath("sys/fs/cgroup", *names[:depth], "cpu.max")
            with suppress(OSError, ValueError, ZeroDivisionError):  # "max" means no limit
                quota, period = map(int, file.read_text(encoding="utf-8").split())
                limits.append(quota / period)
    return min(limits)
