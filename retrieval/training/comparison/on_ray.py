"""The jobs of a comparison as tasks of a Ray cluster.

Runs lie in the comparison's folder, which all nodes see.
"""

from __future__ import annotations

import contextlib
import hashlib
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from retrieval.errors import DataError, Interrupted, RetrievalError
from retrieval.host.version import installed_version
from retrieval.recipe.read import Recipe
from retrieval.serving.embedding.runners import Cluster
from retrieval.serving.progress import Meter
from retrieval.training.comparison.jobs import Figures, Job, known, outcome, perform
from retrieval.training.comparison.search import Do

PATIENCE = 30.0
"""Seconds that trainings which are asked to stop have to write their checkpoints."""
TRIES = 3
"""Times that a job is begun anew after its node or process was lost."""


@contextlib.contextmanager
def on_ray(
    address: str, recipe: Recipe, cpus: int | None, folder: Path, meter: Meter
) -> Iterator[RayWorkers]:
    """Join a cluster, for a comparison.

    Args:
        address: see `Cluster.joined`.
        recipe: one of the compared; it says whether a GPU is wanted.
        cpus: cores of each training; None for 4, or as many as the smallest node has.
        folder: the comparison's, with its `plan.json`.
        meter: shows how many jobs are done.

    Raises:
        MissingDependency: Ray is not installed.
        DataError: there is no cluster.
    """
    with Cluster.joined(address, recipe.train.device, cpus) as cluster:
        yield RayWorkers(cluster, folder, meter)


class RayWorkers:
    """Does jobs on a cluster, and counts them; see `Workers`."""

    def __init__(self, cluster: Cluster, folder: Path, meter: Meter) -> None:
        self._ray, self._meter = cluster.ray, meter
        self._counted = threading.Lock()
        self._stopped = threading.Event()
        self._running: set[Any] = set()
        self._given = (
            installed_version(),
            folder / "plan.json",
            _sum(folder / "plan.json"),
            cluster.cpus,
        )
        self._remote = self._ray.remote(_perform_there).options(
            num_cpus=cluster.cpus,
            num_gpus=int(cluster.gpu),
            max_retries=TRIES,
            retry_exceptions=False,
        )

    def __call__(self, jobs: Sequence[Job]) -> list[Figures]:
        """Do jobs and return their figures in order; those that are done already are not done
        again.
        """
        waiting: list[Any] = []
        for job in jobs:
            before = known(job)
            waiting.append(before if before is not None else self._begun(job))
        found = []
        for each in waiting:
            found.append(each if isinstance(each, dict) else self._get(each))
            with self._counted:
                self._meter.update()
        return found

    def _begun(self, job: Job) -> Any:
        with self._counted:
            if self._stopped.is_set():
                raise Interrupted("The comparison was asked to stop.")
            ref = self._remote.remote(job, *self._given)
            self._running.add(ref)
            return ref

    def _get(self, ref: Any) -> Figures:
        faults = self._ray.exceptions
        try:
            return outcome(self._ray.get(ref))
        except faults.TaskCancelledError:
            raise Interrupted("The comparison was asked to stop.") from None
        except faults.RayError as fault:
            if self._stopped.is_set():
                raise Interrupted("The comparison was asked to stop.") from None
            lines = [line.strip() for line in str(fault).splitlines() if line.strip()]
            raise DataError(
                "A training on the cluster was lost:"
                f" {' '.join([*lines[:1], *lines[-1:]])[:400].rstrip('.')}. The same command goes"
                " on; more --cpus leave each training more of its node's memory."
            ) from None
        finally:
            with self._counted:
                self._running.discard(ref)

    def all(self, tasks: Sequence[Callable[[Do], Any]]) -> list[Any]:
        """Do tasks side by side, each of which asks for jobs as it goes.

        Raises:
            RetrievalError: what refused the first job that was refused.
            KeyboardInterrupt: Ctrl-C; trainings were asked to stop.
        """
        with ThreadPoolExecutor(len(tasks)) as threads:
            try:
                waiting = [threads.submit(task, self) for task in tasks]
                return [each.result() for each in waiting]
            except BaseException:
                self._stop()
                raise

    def _stop(self) -> None:
        """Ask the trainings to stop: each writes its checkpoint first.

        Those that do not end with this process.
        """
        with self._counted:
            self._stopped.set()
            running = list(self._running)
        for ref in running:
            with contextlib.suppress(Exception):
                self._ray.cancel(ref)
        if running:
            _, late = self._ray.wait(running, num_returns=len(running), timeout=PATIENCE)
            for ref in late:
                with contextlib.suppress(Exception):
                    self._ray.cancel(ref, force=True)


def _sum(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def _perform_there(
    job: Job, version: str, plan: Path, plan_sum: str, cpus: int
) -> tuple[Figures, str, int]:
    """Do a job on a node: its figures, or a sentence that refuses and the exit code, since not
    every error can be sent.
    """
    import torch

    from retrieval.serving.runtime import quiet_threads

    node = socket.gethostname()
    if version != installed_version():
        sentence = (
            f"Node {node} has retrieval {installed_version()}, this machine {version}: install the"
            " same on every node."
        )
        return {}, sentence, DataError.exit_code
    if not plan.is_file() or _sum(plan) != plan_sum:
        sentence = (
            f"Node {node} does not see {plan.parent}: with --ray, --output lies in a folder that"
            " all nodes share."
        )
        return {}, sentence, DataError.exit_code
    quiet_threads()
    torch.set_num_threads(cpus)
    try:
        return perform(job), "", 0
    except KeyboardInterrupt:  # between two trainings: nothing is half written
        return {}, "The comparison was asked to stop.", Interrupted.exit_code
    except RetrievalError as error:
        return {}, str(error), error.exit_code
