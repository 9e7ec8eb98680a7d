"""Run the jobs of a comparison in this process, in worker processes, or on a cluster."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import BrokenExecutor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeAlias

import torch

from retrieval.base.machine import cores
from retrieval.base.progress import Meter
from retrieval.base.runtime import installed_version, quiet_threads
from retrieval.errors import DataError, Interrupted, RetrievalError
from retrieval.host.processes import Cluster, refuse_node, refuse_unguarded
from retrieval.training.comparison.jobs import ComparisonJob, Do, Metrics, known, perform

STOPPED = "The comparison was asked to stop."
Answer: TypeAlias = tuple[Metrics, str, int]
"""A job's metrics, and the message ("" on success) and exit code of its error.

Another process returns these instead of the error, because not every error can be pickled.
"""


class Worker:
    """Runs jobs in this process, one after another, and counts them."""

    def __init__(self, meter: Meter) -> None:
        self.meter = meter
        # the threads of `Parallel` count their jobs in one meter
        self.lock = threading.Lock()

    def __call__(self, jobs: Sequence[ComparisonJob]) -> list[Metrics]:
        """Return the metrics of jobs, in order; finished jobs are not repeated."""
        return [self.counted(perform(job)) for job in jobs]

    def counted(self, metrics: Metrics) -> Metrics:
        """Count a finished job and return its metrics."""
        with self.lock:
            self.meter.update()
        return metrics

    def all(self, tasks: Sequence[Callable[[Do], Any]]) -> list[Any]:
        """Run tasks; a task is called with this worker, which runs its jobs.

        Raises:
            RetrievalError: the error of the first job that failed.
            KeyboardInterrupt: Ctrl-C; all workers have stopped.
        """
        return [task(self) for task in tasks]


class Parallel(Worker, ABC):
    """Runs tasks in parallel threads, and their jobs in other processes."""

    def __init__(self, meter: Meter) -> None:
        super().__init__(meter)
        self.stopped = False

    @abstractmethod
    def submit(self, job: ComparisonJob) -> Future[Answer]:
        """Start a job in another process."""

    @abstractmethod
    def stop(self) -> None:
        """Stop the workers; trainings first write their checkpoints."""

    def __call__(self, jobs: Sequence[ComparisonJob]) -> list[Metrics]:
        """Return the metrics of jobs, in order; finished jobs are not repeated."""
        pending: list[Metrics | Future[Answer]] = []
        for job in jobs:
            before = known(job)
            pending.append(self.submit(job) if before is None else before)
        return [
            self.counted(self._result(item) if isinstance(item, Future) else item)
            for item in pending
        ]

    def _result(self, future: Future[Answer]) -> Metrics:
        try:
            metrics, sentence, code = future.result()
        except Exception as error:
            if self.stopped:
                raise Interrupted(STOPPED) from None
            if not isinstance(error, BrokenExecutor):
                raise
            reason = " ".join(str(error).split())[:300].rstrip(".")
            raise DataError(
                f"A process that trains was lost, perhaps for lack of memory: {reason}. The same"
                " command continues. Fewer workers need less memory."
            ) from None
        # a stopped job is no failure: the comparison says how to go on
        if code == Interrupted.exit_code:
            raise Interrupted(sentence)
        if sentence:
            raise DataError(sentence)
        return metrics

    def all(self, tasks: Sequence[Callable[[Do], Any]]) -> list[Any]:
        """See `Worker.all`."""
        with ThreadPoolExecutor(len(tasks)) as threads:
            try:
                waiting = [threads.submit(task, self) for task in tasks]
                return [future.result() for future in waiting]
            except BaseException:
                self.stopped = True
                self.stop()
                raise


class Processes(Parallel):
    """Runs jobs in processes of this machine, each with its share of the cores."""

    def __init__(self, count: int, meter: Meter) -> None:
        super().__init__(meter)
        refuse_unguarded()
        self.pool = ProcessPoolExecutor(
            count,
            # a forked process would inherit torch's threads and locks, and cannot use CUDA
            multiprocessing.get_context("spawn"),
            initializer=_begin_worker,
            initargs=(max(1, cores() // count),),
        )

    def submit(self, job: ComparisonJob) -> Future[Answer]:
        """Start a job in a process of the pool."""
        return self.pool.submit(_perform_in_worker, job)

    def stop(self) -> None:
        """Send SIGTERM to the processes."""
        # taken first, because `shutdown` forgets the processes
        running = list((self.pool._processes or {}).values())
        self.pool.shutdown(wait=False, cancel_futures=True)
        for process in running:
            if process.is_alive() and process.pid is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGTERM)


class OnCluster(Parallel):
    """Runs jobs on a cluster whose nodes share the comparison's folder."""

    def __init__(self, cluster: Cluster, device: str, folder: Path, meter: Meter) -> None:
        super().__init__(meter)
        self._cluster = cluster
        self._gpu = device != "cpu"
        self._arguments = installed_version(), folder / "plan.json", cluster.threads

    def submit(self, job: ComparisonJob) -> Future[Answer]:
        """Start a job in a process of the cluster."""
        return self._cluster.submit(_perform_on_node, job, *self._arguments, gpu=self._gpu)

    def stop(self) -> None:
        """Interrupt the jobs."""
        self._cluster.stop()


@contextlib.contextmanager
def workers(
    count: int, cluster: Cluster | None, device: str, folder: Path, meter: Meter
) -> Iterator[Worker]:
    """Context manager that yields the worker for the jobs.

    Args:
        count: number of processes; 1 means this process.
        cluster: the cluster that trains, or `None` for this computer.
        device: the `[train] device` of the recipes, which decides whether a job needs a GPU.
        folder: the comparison's folder, with its `plan.json`.
        meter: counts the finished jobs.

    Raises:
        MissingDependency: the cluster's package is not installed.
        DataError: the cluster cannot be reached.
    """
    if cluster is not None:
        with cluster:
            yield OnCluster(cluster, device, folder, meter)
    elif count == 1:
        yield Worker(meter)
    else:
        processes = Processes(count, meter)
        try:
            yield processes
        finally:
            processes.pool.shutdown(cancel_futures=True)


def _answer(job: ComparisonJob) -> Answer:
    try:
        return perform(job), "", 0
    except RetrievalError as error:
        return {}, str(error), error.exit_code


_stopped: list[str] = []
"""Message of the stopped job of this worker process, which then starts no further job."""


def _perform_in_worker(job: ComparisonJob) -> Answer:
    if _stopped:
        return {}, _stopped[0], Interrupted.exit_code
    answer = _answer(job)
    if answer[2] == Interrupted.exit_code:
        _stopped.append(answer[1])
    return answer


def _begin_worker(threads: int) -> None:
    """Set up a worker process that computes with `threads` threads and exits with its parent."""
    if hasattr(os, "setpgid"):
        os.setpgid(0, 0)  # so that Ctrl-C reaches only the main process, which stops the workers
    quiet_threads()
    torch.set_num_threads(threads)
    parent = multiprocessing.parent_process()

    def follow() -> None:
        if parent is not None:
            parent.join()
            os._exit(1)  # safe, because all files are written atomically

    threading.Thread(target=follow, daemon=True).start()


def _perform_on_node(job: ComparisonJob, version: str, plan: Path, threads: int) -> Answer:
    quiet_threads()
    torch.set_num_threads(threads)
    try:
        refuse_node(version, plan)
    except DataError as error:
        return {}, str(error), error.exit_code
    try:
        return _answer(job)
    except KeyboardInterrupt:  # raised only between two trainings, so no file is half written
        return {}, STOPPED, Interrupted.exit_code
