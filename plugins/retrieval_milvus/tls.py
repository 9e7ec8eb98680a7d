"""TLS to a server of Milvus."""

from __future__ import annotations

import socket
import ssl

from retrieval import StoreError


class Tls:
    """What a server's certificate is measured by. The client only ever says that nobody answers, so a handshake before it finds out why.

    Args:
        ca: file of the certificates that vouch for the server's, as PEM; empty for those that this system trusts.

    Attributes:
        ca: the file that is read; empty for the client's own list, where the system has none.

    Raises:
        StoreError: the file cannot be read, or holds no certificate.
    """

    def __init__(self, ca: str = "") -> None:
        self.ca = ca or ssl.get_default_verify_paths().cafile or ""
        try:
            self._context = ssl.create_default_context(cafile=self.ca or None)
        except (OSError, ssl.SSLError) as fault:
            raise StoreError(f"The certificates {self.ca} cannot be read: {_reason(fault)}.") from None

    def try_(self, host: str, port: int, address: str, timeout: float) -> None:
        """Shake hands, and hang up.

        Args:
            host: of the server.
            port: of the server.
            address: what sentences call the index.
            timeout: seconds that it may take.

        Raises:
            StoreError: the certificate is not trusted, is another host's, or nobody speaks TLS there. That nobody answers at all is left to the client.
        """
        try:
            with socket.create_connection((host, port), timeout) as plain:
                self._context.wrap_socket(plain, server_hostname=host).close()
        except ssl.SSLCertVerificationError as fault:
            raise StoreError(
                f"{address}: the certificate of {host}:{port} is not trusted: {fault.verify_message}. Name the file of the certificate that vouches for it: ?tls=true&ca=FILE."
            ) from None
        except ssl.SSLError as fault:
            raise StoreError(
                f"{address}: {host}:{port} does not speak TLS as it should ({_reason(fault)}). Leave '?tls=true' away if it speaks none."
            ) from None
        except OSError:
            return


def _reason(fault: Exception) -> str:
    said = getattr(fault, "reason", None) or getattr(fault, "strerror", None) or str(fault)
    return str(said).replace("_", " ").lower()
