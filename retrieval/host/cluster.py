"""The contract of a cluster, whose processes train for `compare` and embed for `embed`."""

from __future__ import annotations

import socket
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Self

from retrieval.base.version import installed_version
from retrieval.errors import DataError
from retrieval.host.plugins import Plugins, load_plugins


class Cluster(ABC):
    """Processes of other computers; a context manager, which joins the cluster and leaves it.

    A plugin offers a cluster by the hook `retrieval_clusters`. Functions and their arguments are
    pickled, so a function is one of a module that every node has installed.

    Attributes:
        threads: number of cores that each process computes with.
    """

    threads: int = 1

    @abstractmethod
    def __enter__(self) -> Self:
        """Join the cluster; raise a `DataError` if it cannot be reached."""

    @abstractmethod
    def __exit__(self, *_: object) -> None:
        """Leave the cluster."""

    @abstractmethod
    def submit(self, function: Callable[..., Any], *arguments: Any, gpu: bool) -> Future[Any]:
        """Run a function once in some process, again if the process or its node dies.

        The future's error is a `BrokenExecutor` if the processes of all tries died. `gpu` reserves
        a GPU, if the cluster has any.
        """

    @abstractmethod
    def map(
        self, start: Callable[[], Callable[[Any], Any]], items: Sequence[Any], *, gpu: bool
    ) -> Iterator[Any]:
        """Call `start` once in each process, and the function that it returns with each item.

        Yields the results as they come, in any order. An item whose process dies is taken again by
        another process.

        Raises:
            DataError: a call raised a `RetrievalError`, or processes die again and again.
        """

    @abstractmethod
    def stop(self) -> None:
        """Interrupt what `submit` started; functions have time to save their work."""


def cluster_at(name: str, address: str, plugins: Plugins | None = None) -> Cluster:
    """Return the cluster of a plugin that is called as its only cluster, such as "ray".

    Raises:
        PluginError: the plugin is not installed, or blocked.
    """
    table = {"name": f"{name}.cluster"}
    cluster: Cluster = (plugins or load_plugins()).build("clusters", table, {"address": address})
    return cluster


def refuse_node(version: str, shared: Path) -> None:
    """Raise a `DataError` if this node has another version, or does not see the file `shared`."""
    if version == installed_version() and shared.is_file():
        return
    raise DataError(
        f"Node {socket.gethostname()} needs version {version} of embedding-retrieval and the folder"
        f" {shared.parent}. It has version {installed_version()}; all nodes must share the output."
    )
