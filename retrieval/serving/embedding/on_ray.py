"""A Ray cluster as a runner: workers on all nodes that there are, replaced when they are lost, with a bounded number of tasks each."""

from __future__ import annotations

import logging
import os
import socket
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

from retrieval.errors import DataError, MissingDependency, RetrievalError
from retrieval.host.version import installed_version
from retrieval.serving.providers import Device

T = TypeVar("T")
R = TypeVar("R")

_CPUS = 4
_AHEAD = 2
"""Tasks that a worker has at a time: one is decoded to its end while the next begins."""
_TRIES = 4
"""Workers that one task may take with it."""
_LOSSES = 8
"""Workers that may be lost before any has done anything."""
_LOOK = 2.0  # seconds between two looks at which nodes there are
_NOBODY = 600.0  # seconds without a worker
_FETCH = 60.0  # seconds for a result
_CONNECT = 5.0
_SLOW = 10.0, 3.0
"""A task is handed out again, when there is nothing else to do, after so many seconds and so many times as long as tasks take."""


class _Hand:
    """What runs in a worker's process."""

    def begin(self, version: str, setup: Callable[..., Callable[[Any], Any]], given: tuple[Any, ...]) -> None:
        if version != installed_version():
            raise DataError(
                f"Node {socket.gethostname()} has retrieval {installed_version()}, this machine {version}: install the same on every node."
            )
        self._work = setup(*given)

    def do(self, task: Any) -> Any:
        return self._work(task)


@dataclass(eq=False)
class _Worker:
    actor: Any
    load: int = 0
    ready: bool = False


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

    def __call__(
        self, setup: Callable[..., Callable[[T], R]], given: tuple[Any, ...], tasks: Iterable[T]
    ) -> Iterator[R]:
        """Do tasks on all nodes; see `Runner`.

        Raises:
            DataError: no worker can be had, or workers end at a task again and again.
            RetrievalError: what a task raises.
        """
        most = len(tasks) if isinstance(tasks, Sized) else None
        crew = _Crew(self.ray, self, setup, given, most)
        try:
            yield from crew.work(tasks)
        finally:
            crew.dismiss()

    def slots(self) -> int:
        """Return how many workers the nodes that are there have room for."""
        if self.gpu:
            return sum(int(node.get("GPU", 0)) for node in self._nodes())
        return sum(int(node.get("CPU", 0) // self.cpus) for node in self._nodes())

    def hire(self) -> Any:
        """Return a worker, which may have to wait for its place."""
        wanted = {
            "num_cpus": self.cpus,
            "num_gpus": int(self.gpu),
            "max_restarts": 0,
            "max_concurrency": _AHEAD,
        }
        return self.ray.remote(_Hand).options(**wanted).remote()

    def _nodes(self) -> list[dict[str, float]]:
        return [node["Resources"] for node in self.ray.nodes() if node["Alive"]]


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
        socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT).close()
    except (OSError, OverflowError) as fault:
        reason = getattr(fault, "strerror", None) or str(fault)
        raise DataError(
            f"No Ray cluster answers at {address} ({reason}). Start its head with: ray start --head"
        ) from None


@dataclass
class _Crew:
    """The workers of one call, and what they are at."""

    ray: Any
    cluster: Cluster
    setup: Callable[..., Any]
    given: tuple[Any, ...]
    most: int | None
    workers: list[_Worker] = field(default_factory=list)
    beginning: dict[Any, _Worker] = field(default_factory=dict)
    running: dict[Any, tuple[_Worker, _Order]] = field(default_factory=dict)
    again: deque[_Order] = field(default_factory=deque)
    lost: int = 0
    reason: str = ""
    took: list[float] = field(default_factory=list)
    _looked: float = 0.0
    _seen: float = field(default_factory=time.monotonic)

    def work(self, tasks: Iterable[Any]) -> Iterator[Any]:
        """Give the results of tasks."""
        self._shared = self.ray.put(self.given)
        left = iter(tasks)
        while True:
            self._recruit()
            self._hand_out(left)
            if not any(not order.done for _, order in self.running.values()) and self._nothing_left(left):
                return
            waiting = [*self.beginning, *self.running]
            if not waiting:
                time.sleep(0.2)
                continue
            for ref in self.ray.wait(waiting, num_returns=1, timeout=1.0)[0]:
                if ref in self.beginning:
                    self._welcome(ref)
                elif (found := self._fetch(ref)) is not None:
                    yield found[0]

    def dismiss(self) -> None:
        """End all workers."""
        for worker in self.workers:
            with suppress(Exception):
                self.ray.kill(worker.actor)

    def _nothing_left(self, left: Iterator[Any]) -> bool:
        """Whether every task has been handed out; the next one is kept."""
        if not self.again:
            with suppress(StopIteration):
                self.again.append(_Order(next(left)))
        return not self.again

    def _recruit(self) -> None:
        """Have as many workers as there is room for.

        Raises:
            DataError: nobody has been there for long.
        """
        now = time.monotonic()
        if any(worker.ready for worker in self.workers):
            self._seen = now
        elif now - self._seen > _NOBODY:
            raise DataError(
                f"No node of the cluster has had {self.cluster.cpus} free CPU cores for {_NOBODY / 60:.0f} minutes. Finished parts are kept; "
                "ask for fewer with --cpus, or come back later with the same command."
            )
        if now - self._looked < _LOOK:
            return
        self._looked = now
        room = self.cluster.slots()
        for _ in range(min(room, self.most or room) - len(self.workers)):
            worker = _Worker(self.cluster.hire())
            self.workers.append(worker)
            self.beginning[worker.actor.begin.remote(installed_version(), self.setup, self._shared)] = worker

    def _hand_out(self, left: Iterator[Any]) -> None:
        """Give every worker as many tasks as it may have."""
        for worker in sorted(self.workers, key=lambda worker: worker.load):
            while worker.ready and worker.load < _AHEAD:
                if self._nothing_left(left):
                    if worker.load or (order := self._slowest()) is None:
                        break
                else:
                    order = self.again.popleft()
                order.copies += 1
                order.begun = time.monotonic()
                worker.load += 1
                self.running[worker.actor.do.remote(order.task)] = worker, order

    def _slowest(self) -> _Order | None:
        """Return the task that takes far longer than others, for a second worker: the first may be cut off."""
        if not self.took:
            return None
        enough = max(_SLOW[0], _SLOW[1] * sum(self.took) / len(self.took))
        late = [order for _, order in self.running.values() if order.copies == 1 and not order.done]
        slowest = min(late, key=lambda order: order.begun, default=None)
        return slowest if slowest and time.monotonic() - slowest.begun > enough else None

    def _welcome(self, ref: Any) -> None:
        worker = self.beginning.pop(ref)
        try:
            self._get(ref)
            worker.ready = True
        except _Lost as fault:
            self._lose(worker, str(fault))

    def _fetch(self, ref: Any) -> tuple[Any] | None:
        """Return a result; None where its worker is lost, or another one was sooner."""
        worker, order = self.running.pop(ref)
        worker.load -= 1
        order.copies -= 1
        try:
            found = self._get(ref)
        except _Lost as fault:
            self._lose(worker, str(fault))
            self._repeat(order, str(fault))
            return None
        self.took = [*self.took[-99:], time.monotonic() - order.begun]
        self.lost = 0
        if order.done:
            return None
        order.done = True
        return (found,)

    def _repeat(self, order: _Order, reason: str) -> None:
        """Put a task back, unless it is done, or another worker has it.

        Raises:
            DataError: it has taken too many workers with it.
        """
        order.tries += 1
        if order.done or order.copies:
            return
        if order.tries >= _TRIES:
            raise DataError(
                f"One task has ended {_TRIES} workers, the last one so: {reason}. What is finished is kept. Its items may need more memory than "
                "a worker has: ask for fewer workers, with more --cpus each, or for smaller parts."
            )
        self.again.append(order)

    def _lose(self, worker: _Worker, reason: str) -> None:
        """Forget a worker, and put its other tasks back.

        Raises:
            DataError: every worker is lost before it has done anything.
        """
        if worker not in self.workers:
            return
        self.workers.remove(worker)
        self._looked = 0.0
        with suppress(Exception):
            self.ray.kill(worker.actor)
        for ref in [ref for ref, (whose, _) in self.running.items() if whose is worker]:
            _, order = self.running.pop(ref)
            order.copies -= 1
            self._repeat(order, reason)
        self.lost += 1
        if self.lost > _LOSSES and not self.took:
            raise DataError(
                f"{self.lost} workers of the cluster ended before they had done anything, the last one so: {reason}."
            )

    def _get(self, ref: Any) -> Any:
        """Return what a worker gives.

        Raises:
            RetrievalError: what it raises.
            _Lost: it is gone, or cannot be reached.
        """
        faults = self.ray.exceptions
        try:
            return self.ray.get(ref, timeout=_FETCH)
        except faults.RayTaskError as fault:
            if isinstance(fault.cause, RetrievalError):
                raise fault.cause from None
            raise
        except faults.RayError as fault:
            lines = [line.strip() for line in str(fault).splitlines() if line.strip()]
            raise _Lost(
                " ".join([*lines[:1], *lines[-1:]])[:400].rstrip(".") or type(fault).__name__
            ) from None


class _Lost(Exception):
    """A worker is gone."""
