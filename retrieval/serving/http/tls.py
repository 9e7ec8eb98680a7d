"""TLS on a connection: a certificate that can be renewed while the server runs, and handshakes bounded in number and time.

asyncio's own servers count no connection before its handshake is over, so that whoever connects and says nothing would take one file each.
Here a connection is counted from its first moment, and the oldest handshake gives way.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Any

from retrieval.errors import RetrievalError

log = logging.getLogger("retrieval.serving.http")

PASSWORD = "RETRIEVAL_PRIVATE_KEY_PASSWORD"
_PAUSE = 0.1  # seconds


class Certificate:
    """A certificate and its private key.

    Args:
        certificate: file with the certificate, PEM, followed by those between it and the root.
        private_key: file with the key, PEM; None: it is in the same file. Its password is the environment variable
            RETRIEVAL_PRIVATE_KEY_PASSWORD.

    Attributes:
        context: what connections are secured with.

    Raises:
        RetrievalError: the files cannot be used.
    """

    def __init__(self, certificate: Path, private_key: Path | None) -> None:
        self._certificate = certificate
        self._private_key = private_key
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._load(self.context)

    def again(self) -> None:
        """Read the files again, for connections to come; broken ones change nothing, and the log says why."""
        try:
            self._load(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))
            self._load(self.context)
        except RetrievalError as fault:
            log.warning("The certificate stays as it was. %s", fault)
        else:
            log.warning("Read the certificate %s again.", self._certificate)

    def _load(self, context: ssl.SSLContext) -> None:
        for path in filter(None, (self._certificate, self._private_key)):
            try:
                with path.open("rb"):
                    pass
            except OSError as fault:
                raise RetrievalError(f"{path} cannot be read: {fault.strerror or fault}.") from None
        try:
            # an empty password, lest OpenSSL asks for one at the terminal
            context.load_cert_chain(
                self._certificate, self._private_key, lambda: os.environ.get(PASSWORD, "")
            )
        except ssl.SSLError as fault:
            if "MISMATCH" in (fault.reason or ""):
                why = "the private key is another certificate's"
            else:
                why = f"they must be PEM, and the password of an encrypted key is the environment variable {PASSWORD}"
            files = " and ".join(str(path) for path in (self._certificate, self._private_key) if path)
            raise RetrievalError(f"{files} cannot be used for TLS: {why}.") from None


class Handshakes:
    """Takes connections of listening sockets, and hands them over once they are secured; for the event loop.

    One at a time: of a socket that several processes listen to, the one that has time takes the next.

    Args:
        certificate: what they are secured with; None: they are not.
        most: handshakes at a time; beyond it the oldest is cut.
        seconds: how long one may take.
    """

    def __init__(self, certificate: Certificate | None, most: int, seconds: float) -> None:
        self._certificate = certificate
        self._most = most
        self._seconds = seconds
        self._accepting: list[asyncio.Task[None]] = []
        self._pending: dict[asyncio.Task[None], None] = {}  # the oldest first

    def __len__(self) -> int:
        return len(self._pending)

    def listen(self, listener: socket.socket, make: Callable[[], asyncio.Protocol]) -> None:
        """Take connections from now on.

        Args:
            listener: it listens already.
            make: gives a secured connection its protocol.
        """
        listener.setblocking(False)
        self._accepting.append(asyncio.create_task(self._accept(listener, make)))

    async def close(self) -> None:
        """Take no more connections, and cut those whose handshake is not over."""
        tasks = [*self._accepting, *self._pending]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _accept(self, listener: socket.socket, make: Callable[[], asyncio.Protocol]) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = await loop.sock_accept(listener)
            except OSError:  # it is gone already, or no more files may be open
                await asyncio.sleep(_PAUSE)
                continue
            if len(self._pending) >= self._most:
                next(iter(self._pending)).cancel()
            task = asyncio.create_task(self._secure(connection, make))
            self._pending[task] = None
            task.add_done_callback(self._pending.pop)

    async def _secure(self, connection: socket.socket, make: Callable[[], asyncio.Protocol]) -> None:
        secured: dict[str, Any] = {}
        if self._certificate is not None:
            secured = {"ssl": self._certificate.context, "ssl_handshake_timeout": self._seconds}
        try:
            await asyncio.get_running_loop().connect_accepted_socket(make, connection, **secured)
        except (OSError, TimeoutError):  # it spoke no TLS, or not in time
            connection.close()
        except asyncio.CancelledError:
            connection.close()
            raise
