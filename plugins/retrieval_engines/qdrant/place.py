"""The place of an index on a Qdrant server."""

from __future__ import annotations

import os

from retrieval.plugin import stores

from retrieval_engines.remote_place import RemotePlace, check_name, need_client
from retrieval_engines.remote_store import RemoteStore

# "~" separates the parts of a collection's name.
_NAME = r"(?!.*\.\.)[A-Za-z0-9][A-Za-z0-9_.-]{0,99}"


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
        super().__init__(address, timeout, exact)
        rule = "100 characters, which are letters, digits, '_', '-' and single '.'"
        check_name(address, _NAME, rule)
        self._tls = tls

    def store(self) -> RemoteStore:
        """Return a store that is connected; see `RemotePlace`."""
        need_client("qdrant_client", "qdrant")
        from qdrant_client import QdrantClient

        from retrieval_engines.qdrant.store import QdrantStore

        client = QdrantClient(
            host=self.address.host or "localhost",
            port=self.address.port or 6333,
            https=self._tls,
            api_key=os.environ.get("RETRIEVAL_QDRANT_KEY"),
            timeout=max(1, round(self._timeout)),
            # The client would warn beside the error of a server that is away.
            check_compatibility=False,
        )
        name = self.address.name
        return QdrantStore(client, str(self.address), name, self._timeout, self._exact)
