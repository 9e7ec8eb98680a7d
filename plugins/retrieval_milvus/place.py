"""Where an index in Milvus is."""

from __future__ import annotations

import os
import re
import socket
import ssl
from importlib.util import find_spec
from typing import Any

from retrieval import stores
from retrieval.errors import MissingDependency, StoreError

_NAME = re.compile(r"[A-Za-z_](?:_?[A-Za-z0-9])*_?")
_LONGEST = 200


class MilvusPlace(stores.RemotePlace):
    """A server of Milvus, or a cluster.

    Its token is taken from the environment: RETRIEVAL_MILVUS_TOKEN.

    Args:
        address: `milvus://host:19530/photos`; the port is 19530 by default.
        database: the database of the server.
        tls: whether to talk over TLS.
        ca: file of the certificates that vouch for the server's, as PEM; empty for those that this
            system trusts.
        timeout: seconds that one question to the server may take, with what is asked again
            meanwhile.
        exact: whether every vector is looked at, rather than a graph of Milvus's, which is faster
            and may miss some. A generation keeps what it was made with.
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
        if not _NAME.fullmatch(address.name) or len(address.name) > _LONGEST:
            raise StoreError(
                f"{address} names no index: a name has letters, digits and single '_', {_LONGEST}"
                f" at most, such as {address.scheme}://HOST/photos."
            )
        if ca and not tls:
            raise StoreError(
                f"{address} names certificates and does not talk over TLS: write ?tls=true&ca=FILE."
            )
        self._database, self._tls, self._ca = database, tls, ca
        self._timeout, self._exact = timeout, exact

    def store(self) -> stores.RemoteStore:
        """Return a store that is connected; see `RemotePlace`."""
        if find_spec("pymilvus") is None:
            raise MissingDependency(
                "Milvus needs a package: pip install 'embedding-retrieval[milvus]'."
            )
        from retrieval_milvus.store import MilvusStore

        host, port = self.address.host or "localhost", self.address.port or 19530
        server: dict[str, Any] = {
            "token": os.environ.get("RETRIEVAL_MILVUS_TOKEN", ""),
            "db_name": self._database,
        }
        if self._tls:
            # empty for the client's own list, where the system has none
            ca = self._ca or ssl.get_default_verify_paths().cafile or ""
            self._shake_hands(host, port, ca)
            server |= {"secure": True, "server_pem_path": ca}
        host = f"[{host}]" if ":" in host else host
        server["uri"] = f"{'https' if self._tls else 'http'}://{host}:{port}"
        name = self.address.name
        return MilvusStore(server, str(self.address), name, self._timeout, self._exact)

    def _shake_hands(self, host: str, port: int, ca: str) -> None:
        """Try TLS: the client only ever says that nobody answers.

        Raises:
            StoreError: the certificates cannot be read; the server's is not trusted, or is another
                host's; or nobody speaks TLS there. That nobody answers at all is left to the
                client.
        """
        try:
            context = ssl.create_default_context(cafile=ca or None)
        except (OSError, ssl.SSLError) as fault:
            raise StoreError(f"The certificates {ca} cannot be read: {_reason(fault)}.") from None
        try:
            with socket.create_connection((host, port), self._timeout) as plain:
                context.wrap_socket(plain, server_hostname=host).close()
        except ssl.SSLCertVerificationError as fault:
            raise StoreError(
                f"{self.address}: the certificate of {host}:{port} is not trusted:"
                f" {fault.verify_message}. Name the file of the certificate that vouches for it:"
                " ?tls=true&ca=FILE."
            ) from None
        except ssl.SSLError as fault:
            raise StoreError(
                f"{self.address}: {host}:{port} does not speak TLS as it should ({_reason(fault)})."
                " Leave '?tls=true' away if it speaks none."
            ) from None
        except OSError:
            return


def _reason(fault: Exception) -> str:
    reason = getattr(fault, "reason", None) or getattr(fault, "strerror", None) or str(fault)
    return str(reason).replace("_", " ").lower()
