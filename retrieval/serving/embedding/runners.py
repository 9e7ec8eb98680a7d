"""Where tasks are done: `here` in threads of this process, or on all nodes of a Ray `Cluster`."""

from __future__ import annotations

import logging
import os
import socket
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

from retrieval.errors import DataError, MissingDependency, RetrievalError
from retrieval.host.version import installed_version
from retrieval.serving.providers import Device
from retrieval.serving.threads import ahead

T = TypeVar("T")
R = TypeVar("R")
Setup: TypeAlias = Callable[..., Callable[[T], R]]
Runner: TypeAlias = Callable[[Setup[Any, Any], tuple[Any, ...], Iterable[Any]], Iterator[Any]]
"""Gives the results of tasks, in whatever order they are done, with a bounded number under way.

It takes `setup`, which each worker calls once with the given values and which returns what does a task; those values; and the tasks.
"""

_CPUS = 4
_TRIES = 4
"""Workers that one task may take with it."""
_LOOK_SECONDS = 2.0
"""Between two looks at which nodes there are."""
_PATIENCE_SECONDS = 600.0
"""Without a node that has room for a worker."""
_FETCH_SECONDS = 60.0
_CONNECT_SECONDS = 5.0
_SLOW_SECONDS, _SLOW_FACTOR = 10.0, 3.0
"""A task is handed out again, when there is nothing else to do, after so long and so many times as long as tasks take."""


def here(setup: Setup[T, R], given: tuple[Any, ...], tasks: Iterable[T], workers: int = 2) -> Iterator[R]:
    """Do tasks in threads of this process; see `Runner`. By default two at a time: one is decoded to its end while the next begins."""
    yield from ahead(setup(*given), tasks, workers=workers, most=workers)


@dataclass(eq=False)
class _Order:
    """A task on its way to a result."""

    task: Any
    tries: int = 0
    begun: float = 0.0
    copies: int = 0
    done: bool = False


class Cluster:
    """A Ray cluster that this process has joined; a `Runner`.

    Attributes:
        ray: the package.
        gpu: whether each worker has a GPU.
        cpus: cores of each worker.
    """

    def __init__(self, ray: Any, device: Device, cpus: int | None) -> None:
        self.ray = ray
        nodes = self._nodes()
        self.gpu = device != "cpu" and any(node.get("GPU", 0) >= 1 for node in nodes)
        if device == "cuda" and not self.gpu:
            raise DataError("No node of the cluster has a GPU. Leave out --device cuda, or add one.")
        fitting = [node for node in nodes if not self.gpu or node.get("GPU", 0) >= 1]
        each = [int(node.get("CPU", 0) // (node["GPU"] if self.gpu else 1)) for node in fitting]
        self.cpus = cpus or max(1, min([_CPUS, *(number for number in each if number >= 1)]))

    @classmethod
    @contextmanager
    def joined(cls, address: str, device: Device, cpus: int | None) -> Iterator[Cluster]:
        """Join a cluster, or take the one that this process has joined already, and leave it again.

        Args:
            address: "auto", for the cluster of this machine, or HOST:PORT of its head.
            device: see `Bundle.open`.
            cpus: cores of each worker; None for 4, or as many as the smallest node has.

        Raises:
            MissingDependency: Ray is not installed.
            DataError: there is no cluster.
        """
        try:
            import ray
        except ImportError:
            raise MissingDependency(
                "A cluster needs Ray. Install it, on every node: pip install 'embedding-retrieval[ray]'"
            ) from None
        if ray.is_initialized():
            yield cls(ray, device, cpus)
            return
        _refuse_unreachable(address)
        try:
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
        except (ConnectionError, RuntimeError, ValueError, OSError, AssertionError) as fault:
            said = " ".join(str(fault).split())[:300].rstrip(".") or "no cluster runs here"
            raise DataError(f"The Ray cluster at {address} cannot be joined: {said}.") from None
        try:
            yield cls(ray, device, cpus)
        finally:
            ray.shutdown()

    def __call__(self, setup: Setup[T, R], given: tuple[Any, ...], tasks: Iterable[T]) -> Iterator[R]:
        """Do tasks on all nodes; see `Runner`.

        Ray starts a process for each worker and keeps it for the next task. What was lost with a process or a node is done again.

        Raises:
            DataError: no node has room for a worker, or workers end at a task again and again.
            RetrievalError: what a task raises.
        """
        # max_calls: a worker with a GPU, too, keeps what `setup` returned. Retries are counted here: Ray's own never end where
        # memory runs out.
        wanted = {"num_cpus": self.cpus, "num_gpus": int(self.gpu), "max_retries": 0, "max_calls": 0}
        remote = self.ray.remote(**wanted)(_do)
        shared = [self.ray.put((setup, given))]
        left, again = iter(tasks), deque[_Order]()
        running: dict[Any, _Order] = {}
        took: deque[float] = deque(maxlen=100)
        looked, slots = 0.0, 0
        room_since = time.monotonic()

        def next_order() -> _Order | None:
            if again:
                return again.popleft()
            with suppress(StopIteration):
                return _Order(next(left))
            return _late(running.values(), _enough(took))

        try:
            while True:
                if time.monotonic() - looked > _LOOK_SECONDS:
                    looked, slots = time.monotonic(), self.slots()
                    room_since = looked if slots else room_since
                    self._refuse_no_room(looked - room_since)
                while _busy(running.values(), _enough(took)) < max(1, 2 * slots) and (order := next_order()):
                    order.copies += 1
                    order.begun = time.monotonic()
                    running[remote.remote(installed_version(), shared, order.task)] = order
                if all(order.done for order in running.values()) and not again:
                    return
                for ref in self.ray.wait(list(running), num_returns=1, timeout=1.0)[0]:
                    order = running.pop(ref)
                    order.copies -= 1
                    try:
                        result = self._get(ref)
                    except _Lost as fault:
                        if _to_repeat(order, str(fault)):
                            again.append(order)
                        continue
                    took.append(time.monotonic() - order.begun)
                    if not order.done:
                        order.done = True
                        yield result
        finally:
            for ref in running:
                with suppress(Exception):
                    self.ray.cancel(ref, force=True)

    def slots(self) -> int:
        """Return how many workers the nodes that are there have room for."""
        if self.gpu:
            return sum(int(node.get("GPU", 0)) for node in self._nodes())
        return sum(int(node.get("CPU", 0) // self.cpus) for node in self._nodes())

    def _refuse_no_room(self, seconds: float) -> None:
        if seconds > _PATIENCE_SECONDS:
            raise DataError(
                f"No node of the cluster has had {self.cpus} CPU cores for {seconds / 60:.0f} minutes. Finished parts are kept; "
                "ask for fewer with --cpus, or come back later with the same command."
            )

    def _get(self, ref: Any) -> Any:
        """Return what a worker gives.

        Raises:
            RetrievalError: what it raises.
            _Lost: it is gone, or cannot be reached.
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
            raise _Lost(
                " ".join([*lines[:1], *lines[-1:]])[:400].rstrip(".") or type(fault).__name__
            ) from None

    def _nodes(self) -> list[dict[str, float]]:
        return [node["Resources"] for node in self.ray.nodes() if node["Alive"]]


class _Lost(Exception):
    """A worker is gone, with what it was at."""


def _enough(took: deque[float]) -> float:
    """Return after how many seconds a task takes far longer than others: its worker may be cut off."""
    return max(_SLOW_SECONDS, _SLOW_FACTOR * sum(took) / len(took)) if took else float("inf")


def _busy(running: Iterable[_Order], enough: float) -> int:
    """Return how many tasks are under way, without those that may be so on a node that nobody reaches."""
    return sum(time.monotonic() - order.begun <= enough for order in running)


def _late(running: Iterable[_Order], enough: float) -> _Order | None:
    """Return the task that takes far longer than others, for a second worker."""
    alone = [order for order in running if order.copies == 1 and not order.done]
    oldest = min(alone, key=lambda order: order.begun, default=None)
    return oldest if oldest and time.monotonic() - oldest.begun > enough else None


def _to_repeat(order: _Order, reason: str) -> bool:
    """Return whether a task that was lost with its worker has to be handed out again.

    Raises:
        DataError: it has taken too many workers with it.
    """
    order.tries += 1
    if order.done or order.copies:
        return False
    if order.tries >= _TRIES:
        raise DataError(
            f"One task has ended {_TRIES} workers, the last one so: {reason}. What is finished is kept. Its items may need more memory than "
            "a worker has: ask for fewer workers, with more --cpus each, or for smaller parts."
        )
    return True


_ready: dict[str, Callable[[Any], Any]] = {}
"""Of a worker's process: what does the tasks of the call that it works for."""


def _do(version: str, shared: list[Any], task: Any) -> Any:
    """Do a task in a worker's process. What all tasks share is fetched by the first of them."""
    if version != installed_version():
        raise DataError(
            f"Node {socket.gethostname()} has retrieval {installed_version()}, this machine {version}: install the same on every node."
        )
    call = shared[0].hex()
    if call not in _ready:
        import ray

        setup, given = ray.get(shared[0])
        _ready.clear()
        _ready[call] = setup(*given)
    return _ready[call](task)


def _refuse_unreachable(address: str) -> None:
    """Refuse an address where nobody listens; Ray itself would try for minutes.

    Raises:
        DataError: it is none, or nobody listens there.
    """
    if address == "auto":
        address = os.environ.get("RAY_ADDRESS", "auto")
    if address == "auto":
        return
    host, sign, port = address.rpartition(":")
    if not sign or not port.isdigit() or "/" in host:
        raise DataError(
            f"'{address}' is no address of a Ray cluster: it is HOST:PORT of its head (6379 as a rule), or auto on one of its nodes."
        )
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_SECONDS).close()
    except (OSError, OverflowError) as fault:
        reason = getattr(fault, "strerror", None) or str(fault)
        raise DataError(
            f"No Ray cluster answers at {address} ({reason}). Start its head with: ray start --head"
        ) from None
