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


class MilvusPlace(stores.RemotePlace):
    """A server of Milvus, or a cluster. Its token is taken from the environment: RETRIEVAL_MILVUS_TOKEN.

    Args:
        address: `milvus://host:19530/photos`; the port is 19530 by default.
        database: the database of the server.
        tls: whether to talk over TLS.
        ca: file of the certificates that vouch for the server's, as PEM; empty for those that this system trusts.
        timeout: seconds that one question to the server may take, with what is asked again meanwhile.
    """

    def __init__(
        self,
        address: stores.Address,
        database: str = "default",
        tls: bool = False,
        ca: str = "",
        timeout: float = 30.0,
    ) -> None:
        super().__init__(address)
        if not _NAME.fullmatch(address.name) or len(address.name) > _LONGEST:
            raise StoreError(
                f"{address} names no index: a name has letters, digits and single '_', {_LONGEST} at most, such as {address.scheme}://HOST/photos."
            )
        if ca and not tls:
            raise StoreError(
                f"{address} names certificates and does not talk over TLS: write ?tls=true&ca=FILE."
            )
        self._database, self._timeout = database, timeout
        self._tls = Tls(ca) if tls else None

    def store(self) -> stores.RemoteStore:
        """Return a store that is connected; see `RemotePlace`."""
        if find_spec("pymilvus") is None:
            raise MissingDependency("Milvus needs a package: pip install 'embedding-retrieval[milvus]'.")
        from retrieval_milvus.store import MilvusStore

        host, port = self.address.host or "localhost", self.address.port or 19530
        named: dict[str, Any] = {}
        if self._tls is not None:
            self._tls.try_(host, port, str(self.address), self._timeout)
            named = {"secure": True, "server_pem_path": self._tls.ca}
        host = f"[{host}]" if ":" in host else host
        return MilvusStore(
            {
                "uri": f"{'https' if self._tls else 'http'}://{host}:{port}",
                "token": os.environ.get("RETRIEVAL_MILVUS_TOKEN", ""),
                "db_name": self._database,
                **named,
            },
            str(self.address),
            self.address.name,
            self._timeout,
        )
