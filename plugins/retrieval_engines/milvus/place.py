"""The place of an index in Milvus."""

from __future__ import annotations

import os
import re
import ssl
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from retrieval.errors import MissingDependency, StoreError
from retrieval.plugin import stores

from retrieval_engines.remote import RemotePlace, RemoteStore

_NAME = re.compile(r"[A-Za-z_](?:_?[A-Za-z0-9])*_?")
_MAX_NAME = 200


class MilvusPlace(RemotePlace):
    """A Milvus server or cluster.

    Its token comes from the environment variable RETRIEVAL_MILVUS_TOKEN.

    Args:
        address: `milvus://host:19530/photos`; the port is 19530 by default.
        database: database on the server.
        tls: whether to connect over TLS.
        ca: PEM file of the certificate authorities to trust; empty for those that the system
            trusts.
        timeout: time limit of one request to the server, including retries, in seconds.
        exact: whether to search exactly. Otherwise Milvus searches an HNSW graph, which is faster
            but may miss items. A generation keeps the setting that it was created with.
    """

    def __init__(
        self,
        address: stores.Address,
        database: str = "default",
        tls: bool = False,
        ca: str = "",
        timeout: float = 30.0,
        exact: bool = True,
    ) -> None:
        super().__init__(address)
        if not _NAME.fullmatch(address.name) or len(address.name) > _MAX_NAME:
            raise StoreError(
                f"{address} names no index. A name has at most {_MAX_NAME} characters, which are"
                f" letters, digits and single '_', as in {address.scheme}://HOST/photos."
            )
        if ca and not tls:
            raise StoreError(
                f"{address} has the option 'ca' without 'tls'. Write ?tls=true&ca=FILE."
            )
        if ca and not Path(ca).is_file():
            raise StoreError(f"{address}: there is no file {ca}. Name a PEM file with ca=FILE.")
        self._database, self._tls, self._ca = database, tls, ca
        self._timeout, self._exact = timeout, exact

    def store(self) -> RemoteStore:
        """Return a connected store; see `RemotePlace`."""
        if find_spec("pymilvus") is None:
            raise MissingDependency(
                "The store milvus needs a package. Install it with: pip install"
                " 'embedding-retrieval[milvus]'"
            )
        os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # errors have what gRPC would print
        from retrieval_engines.milvus.store import MilvusStore

        host, port = self.address.host or "localhost", self.address.port or 19530
        server: dict[str, Any] = {
            "token": os.environ.get("RETRIEVAL_MILVUS_TOKEN", ""),
            "db_name": self._database,
        }
        if self._tls:
            # If the system has no list of authorities, the client uses the list that it contains.
            ca = self._ca or ssl.get_default_verify_paths().cafile or ""
            server |= {"secure": True, "server_pem_path": ca}
        host = f"[{host}]" if ":" in host else host
        server["uri"] = f"{'https' if self._tls else 'http'}://{host}:{port}"
        name = self.address.name
        return MilvusStore(server, str(self.address), name, self._timeout, self._exact)
