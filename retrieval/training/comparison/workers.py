"""Run the jobs of a comparison in this process, in worker processes, or on a Ray cluster."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import signal
import socket
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import BrokenExecutor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeAlias

import torch

from retrieval.base.cores import cores
from retrieval.base.progress import Meter
from retrieval.base.runtime import quiet_threads
from retrieval.base.version import installed_version
from retrieval.errors import DataError, Interrupted, MissingDependency, RetrievalError
from retrieval.host.main_script import refuse_unguarded
from retrieval.training.comparison.jobs import Do, Job, Metrics, known, perform

MOST_CORES = 4
"""Number of cores for a training on a cluster; fewer if the smallest node has fewer."""
PATIENCE = 30.0
"""Seconds that stopped trainings on a cluster have to write their checkpoints."""
TRIES = 3
"""Number of times that Ray restarts a job whose node or process died."""
STOPPED = "The comparison was asked to stop."
Answer: TypeAlias = tuple[Metrics, str, int]
"""A job's metrics, and the message ("" on success) and exit code of its error.

Another process returns these instead of the error, because not every error can be pickled.
"""


class Worker:
    """Runs jobs in this process, one after another, and counts them."""

    def __init__(self, meter: Meter) -> None:
        self.meter, self.lock = meter, threading.Lock()

    def __call__(self, jobs: Sequence[Job]) -> list[Metrics]:
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

    lost: type[Exception] = BrokenExecutor
    """The error of a job whose process died."""

    def __init__(self, meter: Meter) -> None:
        super().__init__(meter)
        self.stopped = False

    @abstractmethod
    def submit(self, job: Job) -> Future[Answer]:
        """Start a job in another process."""

    @abstractmethod
    def stop(self) -> None:
        """Stop the workers; trainings first write their checkpoints."""

    def __call__(self, jobs: Sequence[Job]) -> list[Metrics]:
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
            if not isinstance(error, self.lost):
                raise
            reason = " ".join(str(error).split())[:300].rstrip(".")
            raise DataError(
                f"A process that trains was lost, perhaps for lack of memory: {reason}. The same"
                " command continues. Fewer workers need less memory."
            ) from None
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
            multiprocessing.get_context("spawn"),
            initializer=_begin_worker,
            initargs=(max(1, cores() // count),),
        )

    def submit(self, job: Job) -> Future[Answer]:
        """Start a job in a process of the pool."""
        return self.pool.submit(_perform_in_worker, job)

    def stop(self) -> None:
        """Send SIGTERM to the processes."""
        running = list((self.pool._processes or {}).values())
        self.pool.shutdown(wait=False, cancel_futures=True)
        for process in running:
            if process.is_alive() and process.pid is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGTERM)


class OnRay(Parallel):
    """Runs jobs as tasks of a Ray cluster whose nodes share the comparison's folder."""

    def __init__(self, ray: Any, device: str, folder: Path, meter: Meter) -> None:
        super().__init__(meter)
        self.ray, self.refs, self.lost = ray, list[Any](), ray.exceptions.RayError
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        gpu = device != "cpu" and any(node.get("GPU", 0) >= 1 for node in nodes)
        cpus = min([MOST_CORES, *(int(n["CPU"]) for n in nodes if n.get("CPU", 0) >= 1)])
        self.arguments = installed_version(), folder, cpus
        self.remote = ray.remote(_perform_on_node).options(
            num_cpus=cpus, num_gpus=int(gpu), max_retries=TRIES, retry_exceptions=False
        )

    def submit(self, job: Job) -> Future[Answer]:
        """Start a task on the cluster."""
        with self.lock:
            if self.stopped:
                raise Interrupted(STOPPED)
            self.refs.append(self.remote.remote(job, *self.arguments))
            future: Future[Answer] = self.refs[-1].future()
            return future

    def stop(self) -> None:
        """Cancel the tasks, and kill those that take longer than `PATIENCE`."""
        with self.lock:
            running = [*self.refs]
        for force in (False, True):
            for ref in running:
                with contextlib.suppress(Exception):
                    self.ray.cancel(ref, force=force)
            if running and not force:
                _, running = self.ray.wait(running, num_returns=len(running), timeout=PATIENCE)


@contextlib.contextmanager
def workers(
    count: int, ray: str | None, device: str, folder: Path, meter: Meter
) -> Iterator[Worker]:
    """Context manager that yields the worker for the jobs.

    Args:
        count: number of processes; 1 means this process.
        ray: see `compare`.
        device: the `[train] device` of the recipes, which decides whether a job needs a GPU.
        folder: the comparison's folder, with its `plan.json`.
        meter: counts the finished jobs.

    Raises:
        MissingDependency: Ray is not installed.
        DataError: no cluster can be reached.
    """
    if ray is not None:
        with _joined(ray) as module:
            yield OnRay(module, device, folder, meter)
    elif count == 1:
        yield Worker(meter)
    else:
        processes = Processes(count, meter)
        try:
            yield processes
        finally:
            processes.pool.shutdown(cancel_futures=True)


@contextlib.contextmanager
def _joined(address: str) -> Iterator[Any]:
    """Context manager that yields the module `ray` after joining a cluster.

    If this process has joined a cluster already, that cluster is used and stays joined.
    """
    try:
        import ray
    except ImportError:
        raise MissingDependency(
            "A cluster needs Ray. Install it on every node with: pip install"
            " 'embedding-retrieval[ray]'"
        ) from None
    if ray.is_initialized():
        yield ray
        return
    try:
        if address != "auto":  # checked here, because Ray would try for minutes
            host, _, port = address.rpartition(":")
            socket.create_connection((host.strip("[]"), int(port)), timeout=5).close()
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except (OSError, RuntimeError, ValueError, OverflowError, AssertionError) as fault:
        reason = " ".join(str(fault).split())[:300].rstrip(".") or "no cluster runs here"
        raise DataError(
            f"The Ray cluster at {address} cannot be joined: {reason}. Name HOST:PORT of its head"
            " node, or auto on one of its nodes. `ray start --head` starts one."
        ) from None
    try:
        yield ray
    finally:
        ray.shutdown()


def _answer(job: Job) -> Answer:
    try:
        return perform(job), "", 0
    except RetrievalError as error:
        return {}, str(error), error.exit_code


_stopped: list[str] = []
"""Message of the stopped job of this worker process, which then starts no further job."""


def _perform_in_worker(job: Job) -> Answer:
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


def _perform_on_node(job: Job, version: str, folder: Path, cpus: int) -> Answer:
    node = socket.gethostname()
    if version != installed_version() or not (folder / "plan.json").is_file():
        sentence = (
            f"Node {node} needs version {version} of embedding-retrieval and the folder {folder}."
            f" It has version {installed_version()}; all nodes must share the output."
        )
        return {}, sentence, DataError.exit_code
    quiet_threads()
    torch.set_num_threads(cpus)
    try:
        return _answer(job)
    except KeyboardInterrupt:  # raised only between two trainings, so no file is half written
        return {}, STOPPED, Interrupted.exit_code
