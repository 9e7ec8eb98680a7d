"""The place of an index in Milvus."""

from __future__ import annotations

import os
import ssl
from pathlib import Path
from typing import Any

from retrieval.errors import StoreError
from retrieval.plugin import stores

from retrieval_engines.remote_place import RemotePlace, check_name, need_client
from retrieval_engines.remote_store import RemoteStore

# Milvus allows no other characters. "__" separates the parts of a collection's name.
_NAME = r"(?=.{1,200}$)[A-Za-z_](?:_?[A-Za-z0-9])*_?"


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
        super().__init__(address, timeout, exact)
        check_name(address, _NAME, "200 characters, which are letters, digits and single '_'")
        if ca and not tls:
            raise StoreError(
                f"{address} has the option 'ca' without 'tls'. Write ?tls=true&ca=FILE."
            )
        if ca and not Path(ca).is_file():
            raise StoreError(f"{address}: there is no file {ca}. Name a PEM file with ca=FILE.")
        self._database = database
        self._tls = tls
        self._ca = ca

    def store(self) -> RemoteStore:
        """Return a connected store; see `RemotePlace`."""
        need_client("pymilvus", "milvus")
        # gRPC would print beside the error, which has the same words.
        os.environ.setdefault("GRPC_VERBOSITY", "NONE")
        from retrieval_engines.milvus.store import MilvusStore

        host = self.address.host or "localhost"
        if ":" in host:
            host = f"[{host}]"
        port = self.address.port or 19530
        server: dict[str, Any] = {
            "uri": f"http://{host}:{port}",
            "token": os.environ.get("RETRIEVAL_MILVUS_TOKEN", ""),
            "db_name": self._database,
        }
        if self._tls:
            server["uri"] = f"https://{host}:{port}"
            server["secure"] = True
            # If the system has no list of authorities, the client uses the list that it contains.
            server["server_pem_path"] = self._ca or ssl.get_default_verify_paths().cafile or ""
        name = self.address.name
        return MilvusStore(server, str(self.address), name, self._timeout, self._exact)
