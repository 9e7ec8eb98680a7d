"""Where an index in Milvus is."""

from __future__ import annotations

import os
import re
from importlib.util import find_spec

from retrieval import MissingDependency, StoreError, stores

_NAME = re.compile(r"[A-Za-z_](?:_?[A-Za-z0-9])*_?")
_LONGEST = 200


class MilvusPlace(stores.RowPlace):
    """A server of Milvus, or a cluster. Its token is taken from the environment: RETRIEVAL_MILVUS_TOKEN.

    Args:
        address: `milvus://host:19530/photos`; the port is 19530 by default.
        database: the database of the server.
        tls: whether to talk over TLS.
        timeout: seconds that one question to the server may take, with what is asked again meanwhile.
        wait: seconds that another process that writes is waited for.
    """

    def __init__(
        self,
        address: stores.Address,
        database: str = "default",
        tls: bool = False,
        timeout: float = 30.0,
        wait: float = 60.0,
    ) -> None:
        super().__init__(address)
        if not _NAME.fullmatch(address.name) or len(address.name) > _LONGEST:
            raise StoreError(
                f"{address} names no index: a name has letters, digits and single '_', {_LONGEST} at most, such as {address.scheme}://HOST/photos."
            )
        self.wait = wait
        self._database, self._tls, self._timeout = database, tls, timeout

    def engine(self) -> stores.Engine:
        """Return the engine of this index, connected."""
        if find_spec("pymilvus") is None:
            raise MissingDependency("Milvus needs a package: pip install 'embedding-retrieval[milvus]'.")
        from retrieval_milvus.engine import MilvusEngine

        host, port = self.address.host or "localhost", self.address.port or 19530
        host = f"[{host}]" if ":" in host else host
        return MilvusEngine(
            f"{'https' if self._tls else 'http'}://{host}:{port}",
            os.environ.get("RETRIEVAL_MILVUS_TOKEN", ""),
            self._database,
            self.address.name,
            str(self.address),
            self._timeout,
        )
