"""Who does the jobs of a comparison: this process, one after another, or several worker processes
at once.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any

from retrieval.errors import DataError
from retrieval.host.cores import cores
from retrieval.serving.progress import Meter
from retrieval.training.comparison.jobs import (
    Figures,
    Job,
    begin_worker,
    known,
    outcome,
    perform,
    perform_elsewhere,
)
from retrieval.training.comparison.search import Do


class Workers:
    """Does jobs, and counts them.

    Args:
        count: how many processes; 1 is this one.
        meter: shows how many jobs are done.
    """

    def __init__(self, count: int, meter: Meter) -> None:
        self.count, self.meter = count, meter
        self._counted = threading.Lock()
        self._pool: ProcessPoolExecutor | None = None

    def __call__(self, jobs: Sequence[Job]) -> list[Figures]:
        """Do jobs and return their figures in order; those that are done already are not done
        again.
        """
        if self._pool is None:
            return [self._one(job) for job in jobs]
        waiting: list[Figures | Future[Any]] = []
        for job in jobs:
            before = known(job)
            waiting.append(self._pool.submit(perform_elsewhere, job) if before is None else before)
        found = []
        for each in waiting:
            try:
                found.append(outcome(each.result()) if isinstance(each, Future) else each)
            except BrokenProcessPool:
                raise DataError(
                    "A worker process ended before its work was done, perhaps for want of memory."
                    " The same command goes on; fewer --workers take less memory."
                ) from None
            self._count()
        return found

    def _one(self, job: Job) -> Figures:
        found = perform(job)
        self._count()
        return found

    def _count(self) -> None:
        with self._counted:
            self.meter.update()

    def all(self, tasks: Sequence[Callable[[Do], Any]]) -> list[Any]:
        """Do tasks, each of which asks for jobs as it goes: one after another, or side by side
        where there are workers.

        Raises:
            RetrievalError: what refused the first job that was refused.
            KeyboardInterrupt: Ctrl-C; workers were asked to stop, and have.
        """
        if self.count == 1:
            return [task(self) for task in tasks]
        with self._processes(), ThreadPoolExecutor(len(tasks)) as threads:
            try:
                waiting = [threads.submit(task, self) for task in tasks]
                return [each.result() for each in waiting]
            except BaseException:
                self._stop()
                raise

    @contextlib.contextmanager
    def _processes(self) -> Iterator[None]:
        share = max(1, cores() // self.count)
        self._pool = ProcessPoolExecutor(
            self.count,
            multiprocessing.get_context("spawn"),
            initializer=begin_worker,
            initargs=(share,),
        )
        try:
            yield
        finally:
            self._pool.shutdown(cancel_futures=True)
            self._pool = None

    def _stop(self) -> None:
        """Ask the workers to stop: one that trains writes its checkpoint first."""
        assert self._pool is not None
        running = list((self._pool._processes or {}).values())
        self._pool.shutdown(wait=False, cancel_futures=True)
        for process in running:
            if process.is_alive() and process.pid is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGTERM)
