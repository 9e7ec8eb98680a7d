"""Send requests, repeat them after temporary failures, and describe errors."""

from __future__ import annotations

import asyncio
import ipaddress
import json
import math
import random
import re
import ssl
import time
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import Any, Self, TypeVar
from urllib.parse import quote
from urllib.request import getproxies_environment

from pydantic import TypeAdapter, ValidationError
from retrieval.base.runtime import installed_version
from retrieval.errors import DataError, MissingDependency, ServerError

try:
    import httpx
except ImportError:
    raise MissingDependency(
        "A client of a server needs httpx. Install it with: pip install"
        " 'embedding-retrieval[client]'"
    ) from None

T = TypeVar("T")

MAX_ANSWER_BYTES = 256_000_000
_MAX_TEXT = 2000
"""Largest number of characters of a server's message that is shown."""
_TEMPORARY = {408, 429, 502, 503, 504}
"""Statuses of temporary failures."""

_NEVER_SENT = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout)
"""Errors before anything is sent, after which every request may be repeated."""
_FAILED = {
    httpx.TimeoutException: "did not answer in time",
    TimeoutError: "took too long",
    httpx.ConnectError: "cannot be reached",
    httpx.RequestError: "broke off the connection",
}
_adapter = cache(TypeAdapter)


@dataclass(frozen=True)
class Retries:
    """How often, and for how long, a request is repeated after a temporary failure.

    The wait doubles from `first` up to `longest`, and is multiplied by a random factor between 0.5
    and 1. The server's `Retry-After`, if it sends one, is added.

    Attributes:
        times: maximum number of repetitions.
        seconds: time limit for a request and its repetitions together, in seconds.
        first: wait before the first repetition, in seconds.
        longest: longest wait, in seconds.
    """

    times: int = 4
    seconds: float = 60.0
    first: float = 0.25
    longest: float = 10.0

    def __post_init__(self) -> None:
        numbers = (self.times, self.seconds, self.first, self.longest)
        if not self.seconds or not all(0 <= number < math.inf for number in numbers):
            raise DataError(
                "Retries: seconds must be more than 0, and the other numbers 0 or more."
            )


class Sender:
    """Sends requests to one index of a server, in one event loop; see `AsyncClient`."""

    def __init__(
        self,
        url: str,
        *,
        key: str | None = None,
        index: str | None = None,
        timeout: float = 30.0,
        retries: Retries | None = None,
        verify: ssl.SSLContext | bool = True,
    ) -> None:
        address = _address_of(url)
        # Only visible ASCII can stand in the header.
        if key is not None and not re.fullmatch("[!-~]+", key):
            raise DataError(
                "The API key is empty or holds characters that an HTTP header cannot contain. Copy"
                " the whole key again."
            )
        if not timeout > 0:
            raise DataError(f"timeout must be more than 0 seconds, not {timeout}.")
        self._url = str(address).rstrip("/")
        self._timeout = timeout
        self._retries = retries or Retries()
        self._path = "/v1" if index is None else f"/v1/indexes/{quote(index, safe='')}"
        headers = {"Accept-Encoding": "identity", "User-Agent": f"retrieval/{installed_version()}"}
        if key is not None:
            headers["Authorization"] = f"Bearer {key}"
        try:
            # A proxy cannot reach this machine's loopback address.
            proxied = not _is_loopback(address.host)
            self._proxies = _proxies() if proxied else ""
            self._http = httpx.AsyncClient(headers=headers, verify=verify, trust_env=proxied)
        except (ValueError, ImportError, OSError, httpx.InvalidURL) as error:
            raise DataError(
                "A proxy or certificate that the environment names cannot be used:"
                f" {str(error).rstrip('.')}.{self._proxies}"
            ) from None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def _send(
        self,
        method: str,
        path: str,
        answer: type[T],
        *,
        repeats: bool = True,
        gone_is_done: bool = False,
        seconds: float | None = None,
        **content: Any,
    ) -> T:
        """Send a request, repeat it after temporary failures, and return the parsed response.

        Args:
            method: HTTP method.
            path: path below that of the index.
            answer: class of the response; `bytes` returns the content as it is.
            repeats: whether the request may be repeated although the server may have acted on it.
            gone_is_done: whether a repetition that gets status 404 has succeeded.
            seconds: time limit, by default that of `Retries`.
            content: parameters and body, as arguments of httpx.

        Raises:
            DataError: the request holds text that cannot be sent.
            ServerError: the server refuses the request, fails or cannot be reached.
        """
        end = time.monotonic() + (seconds or self._retries.seconds)
        repetitions = 0
        url = f"{self._url}{self._path}{path}"
        while True:
            remaining = max(end - time.monotonic(), 0.001)
            retry_after = 0.0
            timeout = min(seconds or self._timeout, remaining)
            try:
                async with asyncio.timeout(remaining):
                    response = await self._once(method=method, url=url, timeout=timeout, **content)
                # An earlier attempt may have deleted the item, although its answer was lost.
                gone = response.status_code == 404 and gone_is_done and repetitions > 0
                if response.is_success or gone:
                    return self._parsed(response, answer)
                retry_after = _retry_after(response)
                # A server or proxy that answers 429 has not acted on the request.
                repeatable = response.status_code in (_TEMPORARY if repeats else {429})
                error = self._refused(response)
            except (httpx.RequestError, TimeoutError) as fault:
                repeatable = repeats or isinstance(fault, _NEVER_SENT)
                error = ServerError(self._failed(fault))
            except UnicodeEncodeError:
                raise DataError(
                    "The request holds text that is not valid Unicode (a lone surrogate)."
                ) from None
            remaining = end - time.monotonic()
            # Without the random factor, clients that failed together would return together.
            backoff = min(self._retries.first * 2.0**repetitions, self._retries.longest)
            pause = backoff * random.uniform(0.5, 1.0) + retry_after
            if not repeatable or repetitions >= self._retries.times or pause >= remaining:
                later = f" Retry in {retry_after:,.0f} seconds." * (retry_after > remaining)
                tried = f" The request was tried {repetitions + 1} times." * (repetitions > 0)
                name = f" (request {error.request_id})" * bool(error.request_id)
                text = f"{error}{later}{tried}{name}"
                raise ServerError(text, error.status, error.request_id, error.detail) from None
            repetitions += 1
            await asyncio.sleep(pause)

    async def _once(self, **request: Any) -> httpx.Response:
        content = bytearray()
        async with self._http.stream(**request) as response:
            async for chunk in response.aiter_raw():
                content += chunk
                if len(content) > MAX_ANSWER_BYTES:
                    raise httpx.RemoteProtocolError(
                        f"its answer has more than {MAX_ANSWER_BYTES:,} bytes"
                    )
        # httpx would decompress the content, and a small response could fill the memory.
        response.headers.pop("content-encoding", None)
        return httpx.Response(
            response.status_code, headers=response.headers, content=bytes(content)
        )

    def _parsed(self, response: httpx.Response, answer: type[T]) -> T:
        if answer is bytes:
            return response.content  # type: ignore[return-value]
        try:
            parsed: T = _adapter(answer).validate_json(response.content)  # type: ignore[arg-type]
            return parsed
        except ValidationError:
            raise ServerError(
                f"The server at {self._url} sent a response that is not of the /v1 API. Is this"
                " address a `retrieval serve`?",
                response.status_code,
                response.headers.get("x-request-id"),
            ) from None

    def _refused(self, response: httpx.Response) -> ServerError:
        status = response.status_code
        problem: Any = None
        with suppress(ValueError, RecursionError):
            problem = json.loads(response.content[:100_000])
        # A proxy may answer with HTML, or with JSON of another form.
        if not isinstance(problem, dict):
            problem = {}
        unknown = "it gives no reason."
        if where := response.headers.get("location"):
            # The client follows no redirect, so that no other server gets the key.
            unknown = f"it redirects to {where}; use that address."
        sentence = str(problem.get("detail") or unknown)[:_MAX_TEXT]
        request = str(problem.get("instance") or response.headers.get("x-request-id", ""))[:200]
        text = f"The server at {self._url} answered {status}: {sentence}"
        return ServerError(text, status, request or None, sentence)

    def _failed(self, error: Exception) -> str:
        """Return the error message for a request that got no response."""
        failed = next(text for kind, text in _FAILED.items() if isinstance(error, kind))
        reason = ""
        if str(error):
            reason = f": {error}".rstrip(".")
        return f"The server at {self._url} {failed}{reason}.{self._proxies}"


def _address_of(url: str) -> httpx.URL:
    """Parse a server's address; raise a `DataError` if it is not a plain http or https address."""
    try:
        address = httpx.URL(url)
    except (httpx.InvalidURL, TypeError):
        raise DataError(f"The server's address is not a URL: {str(url)[:200]!r}.") from None
    odd = address.query or address.fragment or any(character.isspace() for character in url)
    if address.scheme not in ("http", "https") or not address.host or odd or address.userinfo:
        raise DataError(
            "The server's address must be like http://127.0.0.1:8000, without user name or"
            f" password, not {str(address.copy_with(userinfo=b''))[:200]!r}."
        )
    return address


def _is_loopback(host: str) -> bool:
    try:
        return host.lower().rstrip(".") == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _proxies() -> str:
    """Return a sentence on the proxies that the environment sets, without their passwords."""
    proxies = sorted(item for item in getproxies_environment().items() if item[0] != "no")
    texts = [f"{name}_proxy={re.sub('//[^/@]*@', '//…@', url)}" for name, url in proxies]
    if texts:
        return f" The environment sets a proxy: {', '.join(texts)}."
    return ""


def _retry_after(response: httpx.Response) -> float:
    """Return the seconds of a `Retry-After` header, or 0 without one."""
    text = response.headers.get("retry-after", "")
    if text.isascii() and text.isdecimal():
        return float(text[:9])
    return 0.0
