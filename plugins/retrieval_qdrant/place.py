"""The place of an index in Qdrant, on a server or in a local folder."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar, cast

from retrieval.errors import MissingDependency, StoreError
from retrieval.plugin import stores

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}")


def _name(address: stores.Address) -> str:
    """Return the name of the index; raise an error if it is invalid or qdrant-client missing."""
    if not NAME.fullmatch(address.name) or ".." in address.name:
        raise StoreError(
            f"{address} names no index. A name has at most 100 characters, which are letters,"
            f" digits, '_', '-' and single '.', as in {address.scheme}://HOST/photos."
        )
    if find_spec("qdrant_client") is None:
        raise MissingDependency(
            "The store qdrant needs a package. Install it with: pip install"
            " 'embedding-retrieval[qdrant]'"
        )
    return address.name


class QdrantPlace(stores.RemotePlace):
    """A Qdrant server or cluster.

    Its API key comes from the environment variable RETRIEVAL_QDRANT_KEY.

    Args:
        address: `qdrant://host:6333/photos`; the port is 6333 by default.
        tls: whether to connect over TLS.
        timeout: time limit of one request to the server, including retries, in seconds.
        exact: whether to search exactly. Otherwise Qdrant searches an HNSW graph, which is faster
            but may miss items.
    """

    def __init__(
        self, address: stores.Address, tls: bool = False, timeout: float = 30.0, exact: bool = True
    ) -> None:
        super().__init__(address)
        self.name = _name(address)
        self._tls, self._timeout, self._exact = tls, timeout, exact

    def store(self) -> stores.RemoteStore:
        """Return a store that is connected; see `RemotePlace`."""
        from qdrant_client import QdrantClient

        from retrieval_qdrant.store import QdrantStore

        client = QdrantClient(
            host=self.address.host or "localhost",
            port=self.address.port or 6333,
            https=self._tls,
            api_key=os.environ.get("RETRIEVAL_QDRANT_KEY"),
            timeout=max(1, round(self._timeout)),
            check_compatibility=False,
        )
        return QdrantStore(client, str(self.address), self.name, self._timeout, self._exact)


class QdrantLocalPlace(stores.RemotePlace):
    """Qdrant's in-process mode, which keeps all items of a local folder in memory.

    Only one process at a time can open the folder. Use it for up to some ten thousand items.

    Args:
        address: `qdrant_local:///data/photos` names the index `photos` in the folder `/data`.
    """

    def __init__(self, address: stores.Address) -> None:
        super().__init__(address)
        self.name = _name(address)
        self._folder = address.path.rstrip("/").rpartition("/")[0] or "/"

    def store(self) -> stores.RemoteStore:
        """Return a store that is connected; see `RemotePlace`."""
        from retrieval_qdrant.store import QdrantStore

        client = _LocalClient(str(Path(self._folder).resolve()), str(self.address))
        return QdrantStore(cast(Any, client), str(self.address), self.name, local=True)


class _LocalClient:
    """Thread-safe `QdrantClient` of a local folder.

    All clients of a folder in this process share one `QdrantClient`, because a folder can be opened
    only once.
    """

    _clients: ClassVar[dict[str, Any]] = {}
    _users: ClassVar[dict[str, int]] = {}
    _lock = threading.RLock()

    def __init__(self, folder: str, address: str) -> None:
        from qdrant_client import QdrantClient

        self._folder: str | None = folder
        with self._lock:
            if folder not in self._clients:
                try:
                    self._clients[folder] = QdrantClient(
                        path=folder, force_disable_check_same_thread=True
                    )
                except RuntimeError:
                    raise StoreError(
                        f"Another process has {address} open, and Qdrant's in-process mode allows"
                        " only one. Use a server: qdrant://HOST/NAME."
                    ) from None
                except OSError as fault:
                    raise StoreError(
                        f"{address} cannot be opened: {fault.strerror or fault}."
                    ) from None
            self._users[folder] = self._users.get(folder, 0) + 1
            self._client = self._clients[folder]

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self.__dict__["_client"], name)

        def call(*arguments: Any, **named: Any) -> Any:
            with self._lock:
                return method(*arguments, **named)

        return call

    def close(self) -> None:
        """Close the folder if no other client of this process uses it."""
        with self._lock:
            folder, self._folder = self._folder, None
            if folder is not None:
                self._users[folder] -= 1
                if not self._users[folder]:
                    self._clients.pop(folder).close()
