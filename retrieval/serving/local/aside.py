"""Long work beside searches, which leaves them a core."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

from retrieval.host.cores import cores
from retrieval.serving.runtime import load_faiss

T = TypeVar("T")

_NICER = 5  # than others: where they want the time, Linux gives such a thread a third of theirs, so that it also ends where there is never a pause


def aside(work: Callable[[], T]) -> T:
    """Return what `work` gives, done in a thread of its own: with all cores but one, and less time than the threads that want it too.

    OpenMP counts threads for each thread that calls it, so that searches keep theirs; and Linux knows a priority of each thread,
    which the threads that it starts have, too. `work` should be in FAISS nearly always: while it holds Python's lock, whatever puts it aside puts
    aside every other thread of Python.
    """
    faiss = load_faiss()
    threads = max(1, min(faiss.omp_get_max_threads(), cores() - 1))
    done: list[T] = []
    failed: list[BaseException] = []

    def run() -> None:
        if sys.platform == "linux":
            with suppress(OSError):
                tid = threading.get_native_id()
                os.setpriority(os.PRIO_PROCESS, tid, os.getpriority(os.PRIO_PROCESS, tid) + _NICER)
        faiss.omp_set_num_threads(threads)
        try:
            done.append(work())
        except BaseException as fault:
            failed.append(fault)

    thread = threading.Thread(target=run, name="aside", daemon=True)
    thread.start()
    thread.join()
    if failed:
        raise failed[0]
    return done[0]
