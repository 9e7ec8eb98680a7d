"""The place of an index on a Qdrant server."""

from __future__ import annotations

import os
import re
from importlib.util import find_spec

from retrieval.errors import MissingDependency, StoreError
from retrieval.plugin import stores

from retrieval_engines.remote import RemotePlace, RemoteStore

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}")


class QdrantPlace(RemotePlace):
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
        name = address.name
        if not _NAME.fullmatch(name) or ".." in name:
            raise StoreError(
                f"{address} names no index. A name has at most 100 characters, which are letters,"
                f" digits, '_', '-' and single '.', as in {address.scheme}://HOST/photos."
            )
        self._tls, self._timeout, self._exact = tls, timeout, exact

    def store(self) -> RemoteStore:
        """Return a store that is connected; see `RemotePlace`."""
        if find_spec("qdrant_client") is None:
            raise MissingDependency(
                "The store qdrant needs a package. Install it with: pip install"
                " 'embedding-retrieval[qdrant]'"
            )
        from qdrant_client import QdrantClient

        from retrieval_engines.qdrant.store import QdrantStore

        client = QdrantClient(
            host=self.address.host or "localhost",
            port=self.address.port or 6333,
            https=self._tls,
            api_key=os.environ.get("RETRIEVAL_QDRANT_KEY"),
            timeout=max(1, round(self._timeout)),
            check_compatibility=False,
        )
        name = self.address.name
        return QdrantStore(client, str(self.address), name, self._timeout, self._exact)
