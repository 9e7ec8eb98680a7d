"""What both clients share: the server's address, the key, time-outs, and how a request is made and an answer read."""

from __future__ import annotations

import asyncio
from typing import Any, TypeVar

import httpx

from retrieval.client.answers import NotUnderstood
from retrieval.client.requests import Call, path_of
from retrieval.client.retrying import Answer, Retries, TooLong, Tries, not_understood
from retrieval.errors import DataError
from retrieval.host.version import installed_version

T = TypeVar("T")

MOST = 256_000_000
"""Bytes of an answer that is read."""


class Connection:
    """A server's index, as a client reaches it.

    Args:
        url: of the server: "https://search.example.com".
        key: for `Authorization: Bearer`; None for none.
        index: name of the index, where the server has several.
        timeout: seconds to wait for a connection, or for the next bytes.
        retries: what is repeated, and for how long.
        verify: whether, or with which certificates, a TLS server is checked; as httpx takes it.

    Raises:
        DataError: one of them cannot be.
    """

    def __init__(
        self,
        url: str,
        key: str | None,
        index: str | None,
        timeout: float,
        retries: Retries | None,
        verify: Any,
    ) -> None:
        try:
            address = httpx.URL(url)
        except (httpx.InvalidURL, TypeError):
            raise DataError(f"The server's address is not a URL: {str(url)[:200]!r}.") from None
        odd = address.query or address.fragment or any(one.isspace() for one in url)
        if address.scheme not in ("http", "https") or not address.host or odd:
            raise DataError(
                f"The server's address must be like http://127.0.0.1:8000, not {str(address)[:200]!r}."
            )
        if address.userinfo:
            raise DataError("The server's address holds a name or password. A key is given as `key`.")
        if key is not None and not (key.isascii() and key.isprintable() and key.strip() == key and key):
            raise DataError("The key holds characters that a header cannot have. Is it copied whole?")
        if not timeout > 0:
            raise DataError(f"timeout must be more than 0 seconds, not {timeout}.")
        self.url = str(address).rstrip("/")
        self.retries, self._timeout = retries or Retries(), timeout
        self._path = path_of(index)
        headers = {"Accept-Encoding": "identity", "User-Agent": f"retrieval/{installed_version()}"}
        if key is not None:
            headers["Authorization"] = f"Bearer {key}"
        self.settings: dict[str, Any] = {"headers": headers, "verify": verify, "follow_redirects": False}

    def tries(self, call: Call[Any]) -> Tries:
        """Begin a request."""
        return Tries(call, self.retries, self.url)

    def sent(self, call: Call[Any], tries: Tries) -> dict[str, Any]:
        """Return what httpx is to send."""
        wait = min(call.seconds or self._timeout, tries.left)
        return {
            "method": call.method,
            "url": f"{self.url}{self._path}{call.path}",
            "timeout": wait,
            **call.content,
        }

    def read(self, call: Call[T], answer: Answer) -> T:
        """Return what an answer says.

        Raises:
            ServerError: it is not of /v1.
        """
        try:
            return call.read(answer.content)
        except NotUnderstood:
            raise not_understood(answer, self.url) from None


class Exchange:
    """Sends requests and takes answers; for one event loop.

    Args:
        connection: where to, and how.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._http = httpx.AsyncClient(**connection.settings)

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def send(self, call: Call[T]) -> T:
        """Send a request, again where that helps, and return what the answer says; bounded in time from the first byte to the last.

        Raises:
            DataError: it holds what cannot be sent.
            ServerError: the server refuses, fails or cannot be reached.
        """
        tries = self._connection.tries(call)
        while True:
            outcome: Answer | httpx.TransportError
            try:
                async with asyncio.timeout(tries.left):
                    outcome = await self._once(self._connection.sent(call, tries))
            except TimeoutError:
                outcome = TooLong("its answer came too slowly")
            except httpx.TransportError as fault:
                outcome = fault
            except UnicodeEncodeError:
                raise DataError("Text that is sent must be Unicode without lone surrogates.") from None
            if isinstance(outcome, Answer) and tries.finished(outcome):
                return self._connection.read(call, outcome)
            await asyncio.sleep(tries.wait(outcome))

    async def _once(self, sent: dict[str, Any]) -> Answer:
        parts, size = list[bytes](), 0
        async with self._http.stream(**sent) as response:
            async for piece in response.aiter_raw():
                size += len(piece)
                if size > MOST:
                    raise httpx.RemoteProtocolError(f"its answer has more than {MOST:,} bytes")
                parts.append(piece)
            return Answer(response.status_code, response.headers, b"".join(parts))
