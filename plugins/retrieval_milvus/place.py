"""Where an index in Milvus is."""

from __future__ import annotations

import os
import re
from importlib.util import find_spec
from typing import Any

from retrieval import MissingDependency, StoreError, stores

from retrieval_milvus.tls import Tls

_NAME = re.compile(r"[A-Za-z_](?:_?[A-Za-z0-9])*_?")
_LONGEST = 200


class MilvusPlace(stores.RowPlace):
    """A server of Milvus, or a cluster. Its token is taken from the environment: RETRIEVAL_MILVUS_TOKEN.

    Args:
        address: `milvus://host:19530/photos`; the port is 19530 by default.
        database: the database of the server.
        tls: whether to talk over TLS.
        ca: file of the certificates that vouch for the server's, as PEM; empty for those that this system trusts.
        partition: a field of metadata by whose values an index that is made keeps its items apart, so that a search whose filter names values looks
            at their partitions only; empty for none.
        timeout: seconds that one question to the server may take, with what is asked again meanwhile.
        wait: seconds that another process that writes is waited for.
    """

    def __init__(
        self,
        address: stores.Address,
        database: str = "default",
        tls: bool = False,
        ca: str = "",
        partition: str = "",
        timeout: float = 30.0,
        wait: float = 60.0,
    ) -> None:
        super().__init__(address)
        if not _NAME.fullmatch(address.name) or len(address.name) > _LONGEST:
            raise StoreError(
                f"{address} names no index: a name has letters, digits and single '_', {_LONGEST} at most, such as {address.scheme}://HOST/photos."
            )
        self.wait = wait
        if ca and not tls:
            raise StoreError(
                f"{address} names certificates and does not talk over TLS: write ?tls=true&ca=FILE."
            )
        self._database, self._timeout, self._partition = database, timeout, partition
        self._tls = Tls(ca) if tls else None

    def engine(self) -> stores.Engine:
        """Return the engine of this index, connected."""
        if find_spec("pymilvus") is None:
            raise MissingDependency("Milvus needs a package: pip install 'embedding-retrieval[milvus]'.")
        from retrieval_milvus.engine import MilvusEngine

        host, port = self.address.host or "localhost", self.address.port or 19530
        named: dict[str, Any] = {}
        if self._tls is not None:
            self._tls.try_(host, port, str(self.address), self._timeout)
            named = {"secure": True, "server_pem_path": self._tls.ca}
        host = f"[{host}]" if ":" in host else host
        return MilvusEngine(
            {
                "uri": f"{'https' if self._tls else 'http'}://{host}:{port}",
                "token": os.environ.get("RETRIEVAL_MILVUS_TOKEN", ""),
                "db_name": self._database,
                **named,
            },
            self.address.name,
            str(self.address),
            self._timeout,
            self._partition,
        )
