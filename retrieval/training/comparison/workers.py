"""Run the jobs of a comparison in this process, in worker processes, or on a Ray cluster."""

from __future__ import annotations

import contextlib
import hashlib
import multiprocessing
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any, TypeAlias

import torch

from retrieval.errors import DataError, Interrupted, RetrievalError
from retrieval.host.cores import cores
from retrieval.host.lazy import keep_compiler_out
from retrieval.host.version import installed_version
from retrieval.recipe.read import Recipe
from retrieval.serving.embedding.runners import Cluster
from retrieval.serving.progress import Meter
from retrieval.serving.runtime import quiet_threads
from retrieval.training.comparison.jobs import Do, Job, Metrics, known, perform

PATIENCE = 30.0
"""Seconds that stopped trainings on a cluster have to write their checkpoints."""
TRIES = 3
"""Number of times that Ray restarts a job whose node or process was lost."""
Answer: TypeAlias = tuple[Metrics, str, int]
"""A job's metrics, and the message ("" on success) and exit code of its error.

They stand for the error, because not every error can be pickled.
"""


class Worker:
    """Runs jobs in this process, one after another, and counts them."""

    def __init__(self, meter: Meter) -> None:
        self.meter = meter
        self.counting = threading.Lock()

    def __call__(self, jobs: Sequence[Job]) -> list[Metrics]:
        """Return the metrics of jobs, in order; finished jobs are not repeated."""
        return [self.counted(perform(job)) for job in jobs]

    def counted(self, metrics: Metrics) -> Metrics:
        """Count a finished job and return its metrics."""
        with self.counting:
            self.meter.update()
        return metrics

    def all(self, tasks: Sequence[Callable[[Do], Any]]) -> list[Any]:
        """Run tasks, each with this worker as the function that runs its jobs.

        Raises:
            RetrievalError: the error of the first job that failed.
            KeyboardInterrupt: Ctrl-C; all workers have stopped.
        """
        return [task(self) for task in tasks]


class Parallel(Worker):
    """Runs tasks in parallel threads, and their jobs in other processes."""

    def _submit(self, job: Job) -> Future[Answer]:
        raise NotImplementedError

    def _stop(self) -> None:
        """Stop the workers; trainings first write their checkpoints."""
        raise NotImplementedError

    def _error(self, error: Exception) -> Exception:
        """Return the error for a job whose worker was lost."""
        raise NotImplementedError

    def __call__(self, jobs: Sequence[Job]) -> list[Metrics]:
        """Return the metrics of jobs, in order; finished jobs are not repeated."""
        pending: list[Metrics | Future[Answer]] = []
        for job in jobs:
            before = known(job)
            pending.append(self._submit(job) if before is None else before)
        return [
            self.counted(self._result(item) if isinstance(item, Future) else item)
            for item in pending
        ]

    def _result(self, future: Future[Answer]) -> Metrics:
        try:
            metrics, sentence, code = future.result()
        except Exception as error:
            raise self._error(error) from None
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
                self._stop()
                raise


class Processes(Parallel):
    """Runs jobs in processes of this machine, each with its share of the cores."""

    def __init__(self, count: int, meter: Meter) -> None:
        super().__init__(meter)
        self.pool = ProcessPoolExecutor(
            count,
            multiprocessing.get_context("spawn"),
            initializer=_begin_worker,
            initargs=(max(1, cores() // count),),
        )

    def _submit(self, job: Job) -> Future[Answer]:
        return self.pool.submit(_perform_in_worker, job)

    def _stop(self) -> None:
        running = list((self.pool._processes or {}).values())
        self.pool.shutdown(wait=False, cancel_futures=True)
        for process in running:
            if process.is_alive() and process.pid is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGTERM)

    def _error(self, error: Exception) -> Exception:
        if not isinstance(error, BrokenProcessPool):
            return error
        return DataError(
            "A worker process ended before its work was done, perhaps for lack of memory. The same"
            " command continues. Fewer workers need less memory."
        )


class OnRay(Parallel):
    """Runs jobs as tasks of a Ray cluster whose nodes share the comparison's folder."""

    def __init__(self, cluster: Cluster, folder: Path, meter: Meter) -> None:
        super().__init__(meter)
        self.ray, plan = cluster.ray, folder / "plan.json"
        self._stopped = False
        self._running: dict[Future[Any], Any] = {}
        self.arguments = installed_version(), plan, _checksum(plan), cluster.cpus
        self.remote = self.ray.remote(_perform_on_node).options(
            num_cpus=cluster.cpus,
            num_gpus=int(cluster.gpu),
            max_retries=TRIES,
            retry_exceptions=False,
        )

    def _submit(self, job: Job) -> Future[Answer]:
        with self.counting:
            if self._stopped:
                raise Interrupted("The comparison was asked to stop.")
            ref = self.remote.remote(job, *self.arguments)
            future: Future[Any] = ref.future()
            self._running[future] = ref
            return future

    def _stop(self) -> None:
        """Stop the trainings, and kill those that do not stop within `PATIENCE`."""
        with self.counting:
            self._stopped = True
            refs = [ref for future, ref in self._running.items() if not future.done()]
        for ref in refs:
            with contextlib.suppress(Exception):
                self.ray.cancel(ref)
        if refs:
            _, late = self.ray.wait(refs, num_returns=len(refs), timeout=PATIENCE)
            for ref in late:
                with contextlib.suppress(Exception):
                    self.ray.cancel(ref, force=True)

    def _error(self, error: Exception) -> Exception:
        if self._stopped or isinstance(error, self.ray.exceptions.TaskCancelledError):
            return Interrupted("The comparison was asked to stop.")
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        reason = " ".join([*lines[:1], *lines[-1:]])[:400].rstrip(".")
        return DataError(
            f"A training on the cluster was lost: {reason}. The same command continues. With more"
            " cpus per training, each training gets more of its node's memory."
        )


@contextlib.contextmanager
def workers(
    count: int, ray: str | None, cpus: int | None, recipe: Recipe, folder: Path, meter: Meter
) -> Iterator[Worker]:
    """Context manager that yields the worker for the jobs.

    Args:
        count: number of processes; 1 means this process.
        ray: the address of a Ray cluster to use instead; see `Cluster.joined`.
        cpus: cores per training on the cluster; `None` means 4, or all cores of the smallest node
            if it has fewer.
        recipe: one of the compared recipes; its `[train] device` decides whether a job needs a GPU.
        folder: the comparison's folder, with its `plan.json`.
        meter: the progress bar of the jobs.

    Raises:
        MissingDependency: Ray is not installed.
        DataError: no cluster can be reached.
    """
    if ray is not None:
        with Cluster.joined(ray, recipe.train.device, cpus) as cluster:
            yield OnRay(cluster, folder, meter)
    elif count == 1:
        yield Worker(meter)
    else:
        processes = Processes(count, meter)
        try:
            yield processes
        finally:
            processes.pool.shutdown(cancel_futures=True)


def _checksum(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def _answer(job: Job) -> Answer:
    try:
        return perform(job), "", 0
    except RetrievalError as error:
        return {}, str(error), error.exit_code


_stopped: list[str] = []
"""The message of this worker process if it was stopped; it then starts no further job."""


def _perform_in_worker(job: Job) -> Answer:
    """Run a job in a worker process of this machine."""
    if _stopped:
        return {}, _stopped[0], Interrupted.exit_code
    answer = _answer(job)
    if answer[2] == Interrupted.exit_code:
        _stopped.append(answer[1])
    return answer


def _begin_worker(threads: int) -> None:
    """Set up a worker process with `threads` threads, which exits when its parent exits."""
    keep_compiler_out()
    if hasattr(os, "setpgid"):
        os.setpgid(0, 0)  # Ctrl-C reaches only the main process, which stops each worker
    quiet_threads()
    torch.set_num_threads(threads)
    parent = multiprocessing.parent_process()

    def follow() -> None:
        if parent is not None:
            parent.join()
            os._exit(1)  # safe, because all files are written atomically

    threading.Thread(target=follow, daemon=True).start()


def _perform_on_node(job: Job, version: str, plan: Path, checksum: str, cpus: int) -> Answer:
    """Run a job on a node of a cluster."""
    node, sentence = socket.gethostname(), ""
    if version != installed_version():
        sentence = (
            f"Node {node} has retrieval {installed_version()}, this machine {version}. Install the"
            " same version on every node."
        )
    elif not plan.is_file() or _checksum(plan) != checksum:
        sentence = (
            f"Node {node} does not have {plan.parent}. On a cluster, the output must be in a folder"
            " that all nodes share."
        )
    if sentence:
        return {}, sentence, DataError.exit_code
    quiet_threads()
    torch.set_num_threads(cpus)
    try:
        return _answer(job)
    except KeyboardInterrupt:  # raised only between two trainings, so no file is half written
        return {}, "The comparison was asked to stop.", Interrupted.exit_code
