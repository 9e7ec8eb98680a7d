"""Sends a request to a server, again where that helps, and reads the answer within bounds."""

from __future__ import annotations

import asyncio
import ipaddress
import json
import math
import os
import random
import ssl
import time
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any, Generic, TypeVar
from urllib.parse import quote

from retrieval.client.answers import NotUnderstood
from retrieval.errors import DataError, MissingDependency, ServerError
from retrieval.host.version import installed_version

try:
    import httpx
except ImportError:
    raise MissingDependency(
        "The client needs httpx. Install it with: pip install 'embedding-retrieval[client]'"
    ) from None

T = TypeVar("T")

MAX_ANSWER_BYTES = 200_000_000
MAX_SENTENCE_CHARACTERS = 2000
PASSING_STATUS = {408, 429, 502, 503, 504}  # may be otherwise in a moment
NEVER_SENT = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout)


@dataclass(frozen=True)
class Retries:
    """How often, and for how long, a request that failed in passing is sent again.

    Waits double from `first` to `longest`; chance shortens each down to half. The client waits in
    full for what a server's `Retry-After` asks.

    Attributes:
        times: the most repetitions of a request.
        seconds: the longest that a request and its repetitions take together.
        first: seconds before the first repetition.
        longest: seconds that a wait grows to.
    """

    times: int = 4
    seconds: float = 60.0
    first: float = 0.25
    longest: float = 10.0

    def __post_init__(self) -> None:
        numbers = (self.seconds, self.first, self.longest)
        finite = all(math.isfinite(number) for number in numbers)
        if self.times < 0 or not finite or self.seconds <= 0 or min(numbers) < 0:
            raise DataError(
                "Retries: times must be 0 or more, seconds more than 0, first and longest 0 or more."
            )


@dataclass(frozen=True)
class Call(Generic[T]):
    """A request.

    Attributes:
        method: of HTTP.
        path: below the index's own.
        read: makes the answer of its body.
        repeats: whether it may be sent again when nobody knows what came of it.
        gone_is_done: whether a repetition that finds nothing has done what was asked for.
        seconds: to wait for the answer, in the place of the client's time-outs.
        content: `params`, `data`, `files`, `content` and `headers`, as httpx takes them.
    """

    method: str
    path: str
    read: Callable[[bytes], T]
    repeats: bool = True
    gone_is_done: bool = False
    seconds: float | None = None
    content: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Answer:
    """A server's whole answer."""

    status: int
    headers: Mapping[str, str]
    content: bytes


class AnswerTooSlow(httpx.TransportError):
    """The time for a request and its repetitions is over."""


class Connection:
    """The server's address, the key, the time-outs, and an HTTP client for one event loop.

    The environment's proxies are used, but never for a loopback address.

    Args:
        url: of the server: "https://search.example.com".
        key: for `Authorization: Bearer`; None for none.
        index: name of the index, where the server has several.
        timeout: seconds to wait for a connection, or for the next bytes.
        retries: what is repeated, and for how long.
        verify: whether, or with which certificates, a TLS server is checked; as httpx takes it.

    Raises:
        DataError: one of them, or a setting of the environment, cannot be used.
    """

    def __init__(
        self,
        url: str,
        key: str | None,
        index: str | None,
        timeout: float,
        retries: Retries | None,
        verify: ssl.SSLContext | bool,
    ) -> None:
        address = _address(url)
        if key is not None and not (key and key.isascii() and key.isprintable() and key.strip() == key):
            raise DataError("The key holds characters that a header cannot have. Is it copied whole?")
        if not timeout > 0:
            raise DataError(f"timeout must be more than 0 seconds, not {timeout}.")
        self.url = str(address).rstrip("/")
        self.retries, self.timeout = retries or Retries(), timeout
        self._base = f"{self.url}/v1" + ("" if index is None else f"/indexes/{quote(index, safe='')}")
        headers = {
            "Accept-Encoding": "identity",
            "User-Agent": f"retrieval/{installed_version()}",
            **({} if key is None else {"Authorization": f"Bearer {key}"}),
        }
        proxy, self.way = _proxy(address)
        try:
            self._http = httpx.AsyncClient(
                headers=headers, verify=_trusted(verify), proxy=proxy, trust_env=False
            )
        except (ValueError, ImportError) as fault:
            raise DataError(f"The client cannot go{self.way}: {fault}") from None

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def send(self, call: Call[T]) -> T:
        """Send a request, again where that helps, and return what the answer says.

        `Retries.seconds` bound it from the first byte to the last.

        Raises:
            DataError: it holds what cannot be sent.
            ServerError: the server refuses, fails or cannot be reached.
        """
        end = time.monotonic() + (call.seconds or self.retries.seconds)
        done = 0
        while True:
            left = max(end - time.monotonic(), 0.001)
            outcome: Answer | httpx.TransportError
            try:
                async with asyncio.timeout(left):
                    outcome = await self._once(call, min(call.seconds or self.timeout, left))
            except TimeoutError:
                outcome = AnswerTooSlow("its answer came too slowly")
            except httpx.TransportError as fault:
                outcome = fault
            except UnicodeEncodeError:
                raise DataError("Text that is sent must be Unicode without lone surrogates.") from None
            if isinstance(outcome, Answer):
                gone = outcome.status == 404 and call.gone_is_done and done > 0
                if gone or 200 <= outcome.status < 300:
                    return self._read(call, outcome)
            left = max(end - time.monotonic(), 0.001)
            asked = _retry_after(outcome.headers) if isinstance(outcome, Answer) else None
            backoff = min(self.retries.first * 2.0**done, self.retries.longest)
            wait = backoff * random.uniform(0.5, 1.0) + (asked or 0.0)
            if not _may_repeat(call, outcome) or done >= self.retries.times or wait >= left:
                raise self._error(outcome, done, asked if asked and asked >= left else None)
            done += 1
            await asyncio.sleep(wait)

    async def _once(self, call: Call[Any], timeout: float) -> Answer:
        parts, size = list[bytes](), 0
        async with self._http.stream(
            call.method, self._base + call.path, timeout=timeout, **call.content
        ) as response:
            async for piece in response.aiter_raw():
                size += len(piece)
                if size > MAX_ANSWER_BYTES:
                    raise httpx.RemoteProtocolError(f"its answer has more than {MAX_ANSWER_BYTES:,} bytes")
                parts.append(piece)
            return Answer(response.status_code, response.headers, b"".join(parts))

    def _read(self, call: Call[T], answer: Answer) -> T:
        try:
            return call.read(answer.content)
        except NotUnderstood:
            raise ServerError(
                f"The server at {self.url} answered something that is not of /v1. Is it `retrieval serve`?",
                answer.status,
                answer.headers.get("x-request-id"),
            ) from None

    def _error(self, outcome: Answer | httpx.TransportError, done: int, later: float | None) -> ServerError:
        """Return the error for a request that is not repeated any more."""
        tried = f" It was tried {done + 1} times." if done else ""
        if isinstance(outcome, Answer):
            sentence, request = _problem(outcome)
            wait = f" It asks to come again in {later:,.0f} seconds." if later else ""
            name = f" (request {request})" if request else ""
            return ServerError(
                f"The server at {self.url} answered {outcome.status}: {sentence}{wait}{tried}{name}",
                outcome.status,
                request,
                sentence,
            )
        if isinstance(outcome, AnswerTooSlow):
            what = "took too long"
        elif isinstance(outcome, httpx.ConnectError | httpx.ProxyError):
            what = f"cannot be reached{self.way}"
        elif isinstance(outcome, httpx.TimeoutException):
            what = "did not answer in time"
        else:
            what = "broke the connection off"
        more = f": {outcome}" if str(outcome) else ""
        return ServerError(f"The server at {self.url} {what}{more.rstrip('.')}.{tried}")


def _address(url: str) -> httpx.URL:
    try:
        address = httpx.URL(url)
    except (httpx.InvalidURL, TypeError):
        raise DataError(f"The server's address is not a URL: {str(url)[:200]!r}.") from None
    odd = address.query or address.fragment or any(sign.isspace() for sign in url)
    if address.scheme not in ("http", "https") or not address.host or odd:
        raise DataError(
            f"The server's address must be like http://127.0.0.1:8000, not {str(address)[:200]!r}."
        )
    if address.userinfo:
        raise DataError("The server's address holds a name or password. A key is given as `key`.")
    return address


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


def _proxy(address: httpx.URL) -> tuple[str | None, str]:
    """Return the proxy that the environment names for an address, and words that name it."""
    if _is_loopback(address.host) or urllib.request.proxy_bypass(address.host):
        return None, ""
    proxies = urllib.request.getproxies()
    proxy = proxies.get(address.scheme) or proxies.get("all")
    if proxy is None:
        return None, ""
    shown = proxy.rpartition("@")[2].removeprefix(f"{proxy.partition('://')[0]}://")
    return proxy, f" through the proxy {shown} that the environment names"


def _trusted(verify: ssl.SSLContext | bool) -> ssl.SSLContext | bool:
    """Return the certificates to trust: the environment's file or folder in place of httpx's."""
    places = {name: os.environ.get(name) for name in ("SSL_CERT_FILE", "SSL_CERT_DIR")}
    if verify is not True or not any(places.values()):
        return verify
    try:
        return ssl.create_default_context(
            cafile=places["SSL_CERT_FILE"] or None, capath=places["SSL_CERT_DIR"] or None
        )
    except OSError as fault:
        named = ", ".join(f"{name}={value}" for name, value in places.items() if value)
        raise DataError(
            f"The environment names certificates that cannot be read ({named}): {fault.strerror or fault}."
        ) from None


def _may_repeat(call: Call[Any], outcome: Answer | httpx.TransportError) -> bool:
    if isinstance(outcome, Answer):
        return outcome.status in PASSING_STATUS and (call.repeats or outcome.status == 429)
    return call.repeats or isinstance(outcome, NEVER_SENT)


def _problem(answer: Answer) -> tuple[str, str | None]:
    """Return a server's sentence, and the request's id."""
    request: Any = answer.headers.get("x-request-id")
    sentence: Any = None
    try:
        problem = json.loads(answer.content[:100_000])
    except (ValueError, RecursionError):
        problem = None
    if isinstance(problem, dict):
        sentence, request = problem.get("detail"), problem.get("instance") or request
    if not isinstance(sentence, str) or not sentence:
        where = answer.headers.get("location")
        sentence = f"it sends on to {where}; give that address." if where else "no reason is given."
    return (
        sentence[:MAX_SENTENCE_CHARACTERS],
        request[:200] if isinstance(request, str) else None,
    )


def _retry_after(headers: Mapping[str, str]) -> float | None:
    """Return the seconds that a server asks to wait, from a number or a date; None for neither."""
    text = headers.get("retry-after", "").strip()
    if text.isascii() and text.isdecimal():
        return float(text[:9])
    try:
        when = parsedate_to_datetime(text)
    except (ValueError, IndexError):
        return None
    aware = when if when.tzinfo else when.replace(tzinfo=UTC)
    return max((aware - datetime.now(UTC)).total_seconds(), 0.0)
