"""Run functions on a Ray cluster: tasks of Ray for trainings, Ray Data for parts of embeddings."""

from __future__ import annotations

import contextlib
import logging
import pickle
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import BrokenExecutor, Future
from typing import Any, Self

from retrieval.errors import DataError, Interrupted, MissingDependency, RetrievalError
from retrieval.plugin import Cluster

MAX_CORES = 4
"""Number of cores for a process; fewer if the smallest node has fewer."""
PATIENCE = 30.0
"""Seconds that stopped trainings have to write their checkpoints."""
TRIES = 3
"""Number of times that Ray repeats a task or an item whose node or process died."""
_SECONDS_TO_CONNECT = 5
_REASON_CHARACTERS = 300


class RayCluster(Cluster):
    """A Ray cluster whose nodes share the folders of the output and the data.

    If this process has joined a cluster already, that cluster is used and stays joined.

    Args:
        address: HOST:PORT of the cluster's head, or "auto" on one of its nodes.
    """

    def __init__(self, address: str) -> None:
        self._address = address
        self._lock = threading.Lock()
        self._stopped = False
        self.running: list[Any] = []

    def __enter__(self) -> Self:
        try:
            import ray
        except ImportError:
            raise MissingDependency(
                "A cluster needs Ray. Install it on every node with: pip install"
                " 'embedding-retrieval[ray]'"
            ) from None
        self._leaves = not ray.is_initialized()
        if self._leaves:
            self._join(ray)
        self.use(ray)
        return self

    def __exit__(self, *_: object) -> None:
        if self._leaves:
            self._ray.shutdown()

    def _join(self, ray: Any) -> None:
        try:
            # The address is tried here first, because Ray would try for minutes.
            if self._address != "auto":
                host, _, port = self._address.rpartition(":")
                address = host.strip("[]"), int(port)
                socket.create_connection(address, timeout=_SECONDS_TO_CONNECT).close()
            ray.init(address=self._address, log_to_driver=False, logging_level=logging.ERROR)
        except (OSError, RuntimeError, ValueError, OverflowError, AssertionError) as fault:
            raise DataError(
                f"The Ray cluster at {self._address} cannot be joined:"
                f" {_reason(fault) or 'no cluster runs here'}. Name HOST:PORT of its head node, or"
                " auto on one of its nodes. `ray start --head` starts one."
            ) from None

    def use(self, ray: Any) -> None:
        """Use a module `ray` that has joined a cluster."""
        self._ray = ray
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        self._gpus = sum(int(node.get("GPU", 0)) for node in nodes)
        cores = [int(node["CPU"]) for node in nodes if node.get("CPU", 0) >= 1]
        self.threads = min([MAX_CORES, *cores])
        # A process does not span nodes, so the cores that a node has left over stay idle.
        self._processes = max(1, sum(count // self.threads for count in cores))

    def submit(self, function: Callable[..., Any], *arguments: Any, gpu: bool) -> Future[Any]:
        """See `Cluster.submit`."""
        task = self._ray.remote(function).options(
            num_cpus=self.threads,
            num_gpus=int(gpu and self._gpus > 0),
            max_retries=TRIES,
            retry_exceptions=False,
        )
        with self._lock:
            if self._stopped:
                raise Interrupted("The work on the cluster was asked to stop.")
            reference = task.remote(*arguments)
            self.running.append(reference)
        future: Future[Any] = Future()
        reference.future().add_done_callback(lambda done: self._settle(done, future))
        return future

    def _settle(self, done: Future[Any], future: Future[Any]) -> None:
        """Give a task's result or error to the future of `submit`."""
        error = done.exception()
        if error is None:
            future.set_result(done.result())
        elif isinstance(error, self._ray.exceptions.RayError):
            future.set_exception(BrokenExecutor(_reason(error)))
        else:
            future.set_exception(error)

    def stop(self) -> None:
        """Cancel the tasks, and kill those that take longer than `PATIENCE`."""
        with self._lock:
            self._stopped = True
            running = list(self.running)
        for force in (False, True):
            for reference in running:
                with contextlib.suppress(Exception):
                    self._ray.cancel(reference, force=force)
            if running and not force:
                _, running = self._ray.wait(running, num_returns=len(running), timeout=PATIENCE)

    def map(
        self, start: Callable[[], Callable[[Any], Any]], items: Sequence[Any], *, gpu: bool
    ) -> Iterator[Any]:
        """See `Cluster.map`."""
        import ray.data

        if not items:
            return
        context = ray.data.DataContext.get_current()
        context.enable_progress_bars = False
        logging.getLogger("ray.data").setLevel(logging.ERROR)
        on_gpu = gpu and self._gpus > 0
        size = min(self._gpus if on_gpu else self._processes, len(items))
        # One block an item, so that an item is what a process takes at a time, and takes again.
        # Ray's types know functions only.
        process: Any = _Process
        rows = [{"item": pickle.dumps(item)} for item in items]
        answers = ray.data.from_items(rows, override_num_blocks=len(rows)).map(
            process,
            fn_constructor_args=(start,),
            compute=ray.data.ActorPoolStrategy(size=size),
            num_cpus=self.threads,
            num_gpus=int(on_gpu),
            # Ray Data would retry without end, and an item may itself crash its process.
            max_task_retries=TRIES,
        )
        try:
            for row in answers.iter_rows():
                sentence, result = pickle.loads(row["answer"])
                if sentence:
                    raise DataError(sentence)
                yield result
        except ray.exceptions.RayError as error:
            raise DataError(
                f"The Ray cluster lost its work: {_reason(error)}. The same command continues."
            ) from None


class _Process:
    """What a process of the cluster does with each item; made once in the process."""

    def __init__(self, start: Callable[[], Callable[[Any], Any]]) -> None:
        self._start = start
        self._work: Callable[[Any], Any] | None = None

    def __call__(self, row: dict[str, Any]) -> dict[str, bytes]:
        # An error is an answer, since Ray Data would start a process that raises again and again.
        try:
            if self._work is None:
                self._work = self._start()
            answer = "", self._work(pickle.loads(row["item"]))
        except RetrievalError as error:
            answer = str(error), None
        return {"answer": pickle.dumps(answer)}


def _reason(error: BaseException) -> str:
    """Return an error's message on one line, without its last full stop."""
    return " ".join(str(error).split())[:_REASON_CHARACTERS].rstrip(".")
