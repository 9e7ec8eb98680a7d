"""Join a Ray cluster, which `retrieval compare` trains on."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from retrieval.errors import DataError, MissingDependency
from retrieval.serving.runtime import Device

_CPUS = 4  # cores per worker, unless the user names a number
_CONNECT_SECONDS = 5.0


class Cluster:
    """A Ray cluster that this process has joined.

    Attributes:
        ray: the module `ray`.
        gpu: whether each worker has a GPU.
        cpus: number of cores per worker.
    """

    def __init__(self, ray: Any, device: Device, cpus: int | None) -> None:
        self.ray = ray
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        self.gpu = device != "cpu" and any(node.get("GPU", 0) >= 1 for node in nodes)
        if device == "cuda" and not self.gpu:
            raise DataError(
                "No node of the cluster has a GPU. Omit --device cuda, or add a node with a GPU."
            )
        fitting = [node for node in nodes if not self.gpu or node.get("GPU", 0) >= 1]
        shares = [int(node.get("CPU", 0) // (node["GPU"] if self.gpu else 1)) for node in fitting]
        self.cpus = cpus or max(1, min([_CPUS, *(share for share in shares if share >= 1)]))

    @classmethod
    @contextmanager
    def joined(cls, address: str, device: Device, cpus: int | None) -> Iterator[Cluster]:
        """Context manager that joins a cluster, unless this process has already joined one.

        Args:
            address: "auto" for the cluster of this machine, or HOST:PORT of the head node.
            device: see `Bundle.open`.
            cpus: cores per worker. `None` stands for 4, or for all cores of the smallest node if
                it has fewer.

        Raises:
            MissingDependency: Ray is not installed.
            DataError: there is no cluster at the address.
        """
        try:
            import ray
        except ImportError:
            raise MissingDependency(
                "A cluster needs Ray. Install it on every node with: pip install"
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


def _refuse_unreachable(address: str) -> None:
    """Raise a `DataError` if nothing listens at an address; Ray would try for minutes."""
    if address == "auto":
        address = os.environ.get("RAY_ADDRESS", "auto")
    if address == "auto":
        return
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdigit() or "/" in host:
        raise DataError(
            f"'{address}' is not the address of a Ray cluster. Write HOST:PORT of its head node"
            " (usually port 6379), or auto on one of its nodes."
        )
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_SECONDS).close()
    except (OSError, OverflowError) as fault:
        reason = getattr(fault, "strerror", None) or str(fault)
        raise DataError(
            f"No Ray cluster answers at {address} ({reason}). Start its head node with: ray start"
            " --head"
        ) from None
