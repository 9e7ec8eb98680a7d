"""Where an index in Qdrant is."""

from __future__ import annotations

import os
import re
from importlib.util import find_spec
from typing import Any, cast

from retrieval import MissingDependency, StoreError, stores

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}")


def _name(address: stores.Address) -> str:
    name = address.name
    if not NAME.fullmatch(name) or ".." in name:
        raise StoreError(
            f"{address} names no index: a name has letters, digits, '_', '-' and single '.', 100 at most, such as {address.scheme}://HOST/photos."
        )
    return name


class QdrantPlace(stores.RowPlace):
    """A server of Qdrant, or a cluster. Its API key is taken from the environment: RETRIEVAL_QDRANT_KEY.

    Args:
        address: `qdrant://host:6333/photos`; the port is 6333 by default.
        tls: whether to talk over TLS.
        timeout: seconds that one question to the server may take.
        wait: seconds that another process that writes is waited for.
        exact: whether every vector is looked at, rather than Qdrant's graph, which is faster and may miss some.
    """

    def __init__(
        self,
        address: stores.Address,
        tls: bool = False,
        timeout: float = 30.0,
        wait: float = 60.0,
        exact: bool = True,
    ) -> None:
        super().__init__(address)
        self.name, self.wait = _name(address), wait
        self._tls, self._timeout, self._exact = tls, timeout, exact

    def engine(self) -> stores.Engine:
        """Return the engine of this index."""
        _require()
        from qdrant_client import QdrantClient

        from retrieval_qdrant.engine import QdrantEngine

        port, host = self.address.port or 6333, self.address.host or "localhost"
        made = QdrantClient(
            host=host, port=port, https=self._tls, api_key=os.environ.get("RETRIEVAL_QDRANT_KEY"),
            timeout=max(1, round(self._timeout)), check_compatibility=False,
        )  # fmt: skip
        return QdrantEngine(made, self.name, str(self.address), self._timeout, self._exact)


class QdrantLocalPlace(stores.RowPlace):
    """Qdrant's in-process mode: a folder that one process opens at a time, all of it in memory. It suits some ten thousand items.

    Args:
        address: `qdrant_local:///data/photos`: the index `photos` in the folder `/data`.
    """

    def __init__(self, address: stores.Address) -> None:
        super().__init__(address)
        self.name = _name(address)
        self._folder = address.path.rstrip("/").rpartition("/")[0] or "/"

    def engine(self) -> stores.Engine:
        """Return the engine of this index."""
        _require()
        from retrieval_qdrant.engine import QdrantEngine
        from retrieval_qdrant.local import LocalClient

        return QdrantEngine(
            cast(Any, LocalClient(self._folder, str(self.address))), self.name, str(self.address), None
        )


def _require() -> None:
    if find_spec("qdrant_client") is None:
        raise MissingDependency("Qdrant needs a package: pip install 'embedding-retrieval[qdrant]'.")
