"""Further processes: the contract of a cluster, and the check of a script that spawns some.

A cluster's processes train for `compare` and embed for `embed`. Each process that multiprocessing
spawns imports the main script again.
"""

from __future__ import annotations

import ast
import multiprocessing
import socket
import sys
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Self

from retrieval.base.runtime import installed_version
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
    def submit(
        self,
        function: Callable[..., Any],
        *arguments: Any,
        gpu: bool,
    ) -> Future[Any]:
        """Run a function once in some process, again if the process or its node dies.

        The future's error is a `BrokenExecutor` if the processes of all tries died. `gpu` reserves
        a GPU, if the cluster has any.
        """

    @abstractmethod
    def map(
        self,
        start: Callable[[], Callable[[Any], Any]],
        items: Sequence[Any],
        *,
        gpu: bool,
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


def cluster_at(
    name: str,
    address: str,
    plugins: Plugins | None = None,
) -> Cluster:
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


GUARD = 'if __name__ == "__main__":'
WHY = f"Each new process imports the main script, so put the script's calls below `{GUARD}`."


def exit_if_imported() -> None:
    """End a spawned process whose main script trains again while it is imported."""
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        sys.exit(WHY)


def refuse_unguarded() -> None:
    """Refuse to spawn processes that would run the main script again.

    Raises:
        DataError: the call is not below the script's guard, or the script came from standard input.
    """
    main = sys.modules["__main__"]
    file = getattr(main, "__file__", None)
    spec = getattr(main, "__spec__", None)
    # Spawned processes import neither a notebook nor a package's `__main__`.
    if file is None or (spec is not None and spec.name.endswith("__main__")):
        return
    remedy = "Or use no further processes: workers = 0 in [train], workers=1 in a comparison."
    if file == "<stdin>":
        raise DataError(
            "A script from standard input cannot start further processes, which import the main"
            f" script. Save it to a file, with its calls below `{GUARD}`. {remedy}"
        )
    try:
        nodes = [*ast.walk(ast.parse(Path(file).read_bytes()))]
    except (OSError, SyntaxError, ValueError):  # not a script, such as an archive
        return
    guards = [n for n in nodes if isinstance(n, ast.If) and "'__name__'" in ast.dump(n.test)]
    # The lines at which the script's code waits for this call, in any thread.
    lines = [
        line
        for bottom in sys._current_frames().values()
        for frame, line in traceback.walk_stack(bottom)
        if frame.f_globals is vars(main)
    ]
    bodies = [range(guard.body[0].lineno, (guard.body[-1].end_lineno or 0) + 1) for guard in guards]
    if lines and not any(line in body for line in lines for body in bodies):
        fault = "calls this outside" if guards else "has no"
        raise DataError(f"{file} {fault} `{GUARD}`. {WHY} {remedy}")
