"""Send requests, repeat them after temporary failures, and describe errors."""

from __future__ import annotations

import asyncio
import ipaddress
import json
import math
import random
import re
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any, NamedTuple, TypeVar
from urllib.parse import quote
from urllib.request import getproxies_environment

from retrieval.client.answers import NotUnderstood
from retrieval.errors import DataError, MissingDependency, ServerError
from retrieval.host.version import installed_version

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
_PASSING = {408, 429, 502, 503, 504}
"""Statuses of temporary failures."""

_NEVER_SENT = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout)


@dataclass(frozen=True)
class Retries:
    """How often, and for how long, a request is repeated after a temporary failure.

    The wait doubles from `first` up to `longest`, and is multiplied by a random factor between 0.5
    and 1. A server's `Retry-After` is added to it.

    Attributes:
        times: maximum number of repetitions.
        seconds: time limit of a request with its repetitions, in seconds.
        first: wait before the first repetition, in seconds.
        longest: longest wait, in seconds.
    """

    times: int = 4
    seconds: float = 60.0
    first: float = 0.25
    longest: float = 10.0

    def __post_init__(self) -> None:
        waits = (self.seconds, self.first, self.longest)
        if (
            self.times < 0
            or self.seconds <= 0
            or min(waits) < 0
            or not all(map(math.isfinite, waits))
        ):
            raise DataError(
                "Retries: times must be 0 or more, seconds more than 0, first and longest 0 or"
                " more."
            )


class _Answer(NamedTuple):
    status: int
    headers: Mapping[str, str]
    content: bytes


class _TooLong(httpx.TransportError):
    """The time limit of a request and its repetitions has passed."""


class Sender:
    """Sends requests to one index of a server, in one event loop.

    Args:
        url: address of the server, such as "https://search.example.com".
        key: API key for `Authorization: Bearer`, or None.
        index: name of the index, if the server has several.
        timeout: seconds to wait for a connection or for the next bytes.
        retries: how failed requests are repeated.
        verify: TLS verification, as in httpx.

    Raises:
        DataError: an argument is invalid, or the environment names an invalid proxy or certificate.
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
        odd = address.query or address.fragment or any(character.isspace() for character in url)
        if address.scheme not in ("http", "https") or not address.host or odd:
            raise DataError(
                "The server's address must be like http://127.0.0.1:8000, not"
                f" {str(address)[:200]!r}."
            )
        if address.userinfo:
            raise DataError(
                "The server's address holds a name or password. A key is given as `key`."
            )
        if key is not None and not (
            key.isascii() and key.isprintable() and key.strip() == key and key
        ):
            raise DataError(
                "The key holds characters that a header cannot have. Is it copied whole?"
            )
        if not timeout > 0:
            raise DataError(f"timeout must be more than 0 seconds, not {timeout}.")
        self._url, self._timeout, self._retries = (
            str(address).rstrip("/"),
            timeout,
            retries or Retries(),
        )
        self._path = "/v1" if index is None else f"/v1/indexes/{quote(index, safe='')}"
        headers = {"Accept-Encoding": "identity", "User-Agent": f"retrieval/{installed_version()}"}
        if key is not None:
            headers["Authorization"] = f"Bearer {key}"
        local = _is_loopback(address.host)
        self._proxies = "" if local else _proxies()
        try:
            # A proxy cannot reach this machine's loopback address.
            self._http = httpx.AsyncClient(headers=headers, verify=verify, trust_env=not local)
        except (ValueError, ImportError, OSError, httpx.InvalidURL) as error:
            where = f" These are set: {self._proxies}." if self._proxies else ""
            raise DataError(
                "A proxy or certificate that the environment names cannot be used:"
                f" {str(error).rstrip('.')}.{where}"
            ) from None

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def send(
        self,
        method: str,
        path: str,
        read: Callable[[bytes], T],
        *,
        repeats: bool = True,
        gone_is_done: bool = False,
        seconds: float | None = None,
        **content: Any,
    ) -> T:
        """Send a request, repeat it after temporary failures, and return its parsed response.

        Args:
            method: HTTP method.
            path: path relative to the index.
            read: parses the body of the response.
            repeats: whether the request may be repeated if its outcome is unknown.
            gone_is_done: whether status 404 after a repetition counts as success.
            seconds: time limit that replaces the client's own.
            content: `params`, `data`, `files`, `content` and `headers` of httpx.

        Raises:
            DataError: the request holds text that cannot be sent.
            ServerError: the server refuses the request, fails or cannot be reached.
        """
        end, done = time.monotonic() + (seconds or self._retries.seconds), 0
        while True:
            left = max(end - time.monotonic(), 0.001)
            outcome: _Answer | httpx.TransportError
            try:
                async with asyncio.timeout(left):
                    wait = min(seconds or self._timeout, left)
                    url = f"{self._url}{self._path}{path}"
                    outcome = await self._once(method=method, url=url, timeout=wait, **content)
            except TimeoutError:
                outcome = _TooLong("its answer came too slowly")
            except httpx.TransportError as error:
                outcome = error
            except UnicodeEncodeError:
                raise DataError(
                    "Text that is sent must be Unicode without lone surrogates."
                ) from None
            wait_asked = None
            if isinstance(outcome, _Answer):
                if 200 <= outcome.status < 300 or (outcome.status == 404 and gone_is_done and done):
                    return self._understood(outcome, read)
                wait_asked = _retry_after(outcome.headers)
                again = outcome.status in _PASSING and (repeats or outcome.status == 429)
            else:
                again = repeats or isinstance(outcome, _NEVER_SENT)
            left = max(end - time.monotonic(), 0.001)
            backoff = min(self._retries.first * 2.0**done, self._retries.longest)
            pause = backoff * random.uniform(0.5, 1.0) + (wait_asked or 0.0)
            if not again or done >= self._retries.times or pause >= left:
                later = wait_asked if wait_asked and wait_asked >= left else None
                raise self._error(outcome, done, later)
            done += 1
            await asyncio.sleep(pause)

    async def _once(self, **request: Any) -> _Answer:
        chunks, size = list[bytes](), 0
        async with self._http.stream(**request) as response:
            async for chunk in response.aiter_raw():
                size += len(chunk)
                if size > MAX_ANSWER_BYTES:
                    raise httpx.RemoteProtocolError(
                        f"its answer has more than {MAX_ANSWER_BYTES:,} bytes"
                    )
                chunks.append(chunk)
            return _Answer(response.status_code, response.headers, b"".join(chunks))

    def _understood(self, answer: _Answer, read: Callable[[bytes], T]) -> T:
        try:
            return read(answer.content)
        except NotUnderstood:
            raise ServerError(
                f"The server at {self._url} answered something that is not of /v1. Is it `retrieval"
                " serve`?",
                answer.status,
                answer.headers.get("x-request-id"),
            ) from None

    def _error(
        self, outcome: _Answer | httpx.TransportError, done: int, later: float | None
    ) -> ServerError:
        tried = f" It was tried {done + 1} times." if done else ""
        if isinstance(outcome, _Answer):
            sentence, request = _problem(outcome)
            retry = f" It asks to retry after {later:,.0f} seconds." if later else ""
            name = f" (request {request})" if request else ""
            text = (
                f"The server at {self._url} answered {outcome.status}:"
                f" {sentence}{retry}{tried}{name}"
            )
            return ServerError(text, outcome.status, request, sentence)
        failed = "broke the connection off"
        if isinstance(outcome, httpx.TimeoutException):
            failed = "did not answer in time"
        failed = {_TooLong: "took too long", httpx.ConnectError: "cannot be reached"}.get(
            type(outcome), failed
        )
        more = f": {outcome}".rstrip(".") if str(outcome) else ""
        proxies = (
            f" It was asked through a proxy of the environment: {self._proxies}."
            if self._proxies
            else ""
        )
        return ServerError(f"The server at {self._url} {failed}{more}.{proxies}{tried}")


def _is_loopback(host: str) -> bool:
    try:
        return (
            host.lower().rstrip(".") == "localhost"
            or ipaddress.ip_address(host.strip("[]")).is_loopback
        )
    except ValueError:
        return False


def _proxies() -> str:
    """Describe the proxies of the environment, without passwords."""
    proxies = {name: url for name, url in getproxies_environment().items() if name != "no"}
    return ", ".join(
        f"{name}_proxy={re.sub('//[^/@]*@', '//…@', url)}" for name, url in sorted(proxies.items())
    )


def _problem(answer: _Answer) -> tuple[str, str | None]:
    """Return the server's error message and the request's id."""
    request: Any = answer.headers.get("x-request-id")
    sentence: Any = None
    with suppress(ValueError, RecursionError):
        problem = json.loads(answer.content[:100_000])
        if isinstance(problem, dict):
            sentence, request = problem.get("detail"), problem.get("instance") or request
    if not isinstance(sentence, str) or not sentence:
        where = answer.headers.get("location", "")[:_MAX_TEXT]
        sentence = f"it sends on to {where}; give that address." if where else "no reason is given."
    return sentence[:_MAX_TEXT], request[:200] if isinstance(request, str) else None


def _retry_after(headers: Mapping[str, str]) -> float | None:
    """Return the seconds of a `Retry-After` header, which may hold a number or a date, or None."""
    text = headers.get("retry-after", "").strip()
    if text.isascii() and text.isdecimal():
        return float(text[:9])
    try:
        when = parsedate_to_datetime(text)
    except (ValueError, IndexError):
        return None
    aware = when if when.tzinfo else when.replace(tzinfo=UTC)
    return max((aware - datetime.now(UTC)).total_seconds(), 0.0)
