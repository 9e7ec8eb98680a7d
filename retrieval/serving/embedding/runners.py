"""Run tasks in threads of this process (`in_threads`) or on a Ray cluster (`Cluster`)."""

from __future__ import annotations

import logging
import os
import socket
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeAlias, TypeVar

from retrieval.errors import DataError, MissingDependency, RetrievalError
from retrieval.host.version import installed_version
from retrieval.serving.runtime import Device
from retrieval.serving.sessions import ahead

T = TypeVar("T")
R = TypeVar("R")
Setup: TypeAlias = Callable[..., Callable[[T], R]]
Runner: TypeAlias = Callable[[Setup[Any, Any], tuple[Any, ...], Iterable[Any]], Iterator[Any]]
"""Function `(setup, arguments, tasks)` that yields the results of tasks as they finish.

Each worker calls `setup(*arguments)` once and applies the function that it returns to its tasks.
The number of running tasks is bounded.
"""

_CPUS = 4
_TRIES = 4
"""A task fails after it has lost this many workers."""
_PATIENCE_SECONDS = 600.0
"""How long to wait for a node with room for a worker."""
_FETCH_SECONDS = 60.0
_CONNECT_SECONDS = 5.0


def in_threads(
    setup: Setup[T, R], arguments: tuple[Any, ...], tasks: Iterable[T], workers: int = 2
) -> Iterator[R]:
    """Run tasks in threads of this process; see `Runner`.

    With two workers, one task starts decoding while the other finishes.
    """
    yield from ahead(setup(*arguments), tasks, workers=workers, most=workers)


class Cluster:
    """A Ray cluster that this process has joined; a `Runner`.

    Attributes:
        ray: the module `ray`.
        gpu: whether each worker has a GPU.
        cpus: number of cores per worker.
    """

    def __init__(self, ray: Any, device: Device, cpus: int | None) -> None:
        self.ray = ray
        nodes = self._nodes()
        self.gpu = device != "cpu" and any(node.get("GPU", 0) >= 1 for node in nodes)
        if device == "cuda" and not self.gpu:
            raise DataError(
                "No node of the cluster has a GPU. Leave out --device cuda, or add one."
            )
        fitting = [node for node in nodes if not self.gpu or node.get("GPU", 0) >= 1]
        shares = [int(node.get("CPU", 0) // (node["GPU"] if self.gpu else 1)) for node in fitting]
        self.cpus = cpus or max(1, min([_CPUS, *(share for share in shares if share >= 1)]))

    @classmethod
    @contextmanager
    def joined(cls, address: str, device: Device, cpus: int | None) -> Iterator[Cluster]:
        """Context manager that joins a cluster, or uses the one this process has already joined.

        Args:
            address: "auto" for the cluster of this machine, or HOST:PORT of the head node.
            device: see `Bundle.open`.
            cpus: cores per worker. `None` is 4, or all cores of the smallest node if fewer.

        Raises:
            MissingDependency: Ray is not installed.
            DataError: there is no cluster at the address.
        """
        try:
            import ray
        except ImportError:
            raise MissingDependency(
                "A cluster needs Ray. Install it, on every node: pip install"
                " 'embedding-retrieval[ray]'"
            ) from None
        if ray.is_initialized():
            yield cls(ray, device, cpus)
            return
        _refuse_unreachable(address)
        try:
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
        except (ConnectionError, RuntimeError, ValueError, OSError, AssertionError) as fault:
            reason = " ".join(str(fault).split())[:300].rstrip(".") or "no cluster runs here"
            raise DataError(f"The Ray cluster at {address} cannot be joined: {reason}.") from None
        try:
            yield cls(ray, device, cpus)
        finally:
            ray.shutdown()

    def __call__(
        self, setup: Setup[T, R], arguments: tuple[Any, ...], tasks: Iterable[T]
    ) -> Iterator[R]:
        """Run tasks on all nodes; see `Runner`.

        Ray starts one process per worker and reuses it. Tasks lost with a process or node are
        repeated.

        Raises:
            DataError: no node has room for a worker, or a task keeps killing its worker.
            RetrievalError: a task raised it.
        """
        # max_calls=0 keeps workers alive, also those with a GPU, so `setup` runs once in each.
        # Retries are counted here, because Ray's own never end if memory runs out.
        options = {
            "num_cpus": self.cpus,
            "num_gpus": int(self.gpu),
            "max_retries": 0,
            "max_calls": 0,
        }
        remote = self.ray.remote(**options)(_do)
        shared = [self.ray.put((setup, arguments))]
        version = installed_version()
        fresh = ((task, 1) for task in tasks)
        lost = deque[tuple[T, int]]()
        running: dict[Any, tuple[T, int]] = {}
        room_seen = time.monotonic()
        try:
            while True:
                slots = self.slots()
                room_seen = time.monotonic() if slots else room_seen
                if time.monotonic() - room_seen > _PATIENCE_SECONDS:
                    raise DataError(
                        f"No node of the cluster had {self.cpus} free CPU cores in the last"
                        f" {_PATIENCE_SECONDS / 60:.0f} minutes. Finished parts are kept; request"
                        " fewer cores with --cpus, or run the same command later."
                    )
                while len(running) < max(1, 2 * slots):
                    if (order := lost.popleft() if lost else next(fresh, None)) is None:
                        break
                    running[remote.remote(version, shared, order[0])] = order
                if not running:
                    return
                for ref in self.ray.wait(list(running), num_returns=1, timeout=1.0)[0]:
                    task, tries = running.pop(ref)
                    try:
                        yield self._get(ref)
                    except _Lost as fault:
                        if tries == _TRIES:
                            raise DataError(
                                f"One task has killed {_TRIES} workers, the last with: {fault}."
                                " Finished parts are kept. The task's items may need more memory"
                                " than a worker has: use fewer workers with more --cpus each, or"
                                " smaller parts."
                            ) from None
                        lost.append((task, tries + 1))
        finally:
            for ref in running:
                with suppress(Exception):
                    self.ray.cancel(ref, force=True)

    def slots(self) -> int:
        """Return how many workers the current nodes have room for."""
        if self.gpu:
            return sum(int(node.get("GPU", 0)) for node in self._nodes())
        return sum(int(node.get("CPU", 0) // self.cpus) for node in self._nodes())

    def _get(self, ref: Any) -> Any:
        """Return the result of a worker's task.

        Raises:
            RetrievalError: the task raised it.
            _Lost: the worker ended or cannot be reached.
        """
        faults = self.ray.exceptions
        try:
            return self.ray.get(ref, timeout=_FETCH_SECONDS)
        except faults.RayTaskError as fault:
            if isinstance(fault.cause, RetrievalError):
                raise fault.cause from None
            raise
        except faults.RayError as fault:
            lines = [line.strip() for line in str(fault).splitlines() if line.strip()]
            reason = " ".join([*lines[:1], *lines[-1:]])[:400].rstrip(".")
            raise _Lost(reason or type(fault).__name__) from None

    def _nodes(self) -> list[dict[str, float]]:
        return [node["Resources"] for node in self.ray.nodes() if node["Alive"]]


class _Lost(Exception):
    """A worker ended before its task did."""


_ready: dict[str, Callable[[Any], Any]] = {}
"""What `setup` returned in this worker process, by the id of the `Cluster` call it works for."""


def _do(version: str, shared: list[Any], task: Any) -> Any:
    """Run a task in a worker process; the first task fetches what all of them share."""
    if version != installed_version():
        raise DataError(
            f"Node {socket.gethostname()} has retrieval {installed_version()}, this machine"
            f" {version}: install the same on every node."
        )
    call = shared[0].hex()
    if call not in _ready:
        import ray

        setup, arguments = ray.get(shared[0])
        _ready.clear()
        _ready[call] = setup(*arguments)
    return _ready[call](task)


def _refuse_unreachable(address: str) -> None:
    """Refuse an address where nothing listens; Ray itself would try for minutes.

    Raises:
        DataError: the address is invalid, or nothing listens there.
    """
    if address == "auto":
        address = os.environ.get("RAY_ADDRESS", "auto")
    if address == "auto":
        return
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdigit() or "/" in host:
        raise DataError(
            f"'{address}' is no address of a Ray cluster: it is HOST:PORT of its head (6379 as a"
            " rule), or auto on one of its nodes."
        )
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_SECONDS).close()
    except (OSError, OverflowError) as fault:
        reason = getattr(fault, "strerror", None) or str(fault)
        raise DataError(
            f"No Ray cluster answers at {address} ({reason}). Start its head with: ray start --head"
        ) from None
