"""When a request is sent again, and what is said when it is not."""

from __future__ import annotations

import json
import math
import random
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any

import httpx

from retrieval.client.requests import Call
from retrieval.errors import DataError, ServerError

_PASSING = {408, 429, 502, 503, 504}  # what may be otherwise in a moment
_NEVER_SENT = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout)
_LONGEST = 2000  # characters of a server's sentence


@dataclass(frozen=True)
class Retries:
    """How often, and for how long, a request that failed in passing is sent again.

    Waits double from `first` to `longest`, each shortened by chance down to half; a server's `Retry-After` is waited for in full.

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
        if (
            self.times < 0
            or not all(math.isfinite(one) for one in numbers)
            or self.seconds <= 0
            or min(numbers) < 0
        ):
            raise DataError(
                "Retries: times must be 0 or more, seconds more than 0, first and longest 0 or more."
            )


@dataclass(frozen=True)
class Answer:
    """A server's answer, whole."""

    status: int
    headers: Mapping[str, str]
    content: bytes


class TooLong(httpx.TransportError):
    """The time that a request and its repetitions have is over."""


class Tries:
    """The tries of one request.

    Args:
        call: the request.
        retries: how often and how long.
        url: the server's, for sentences.
    """

    def __init__(self, call: Call[Any], retries: Retries, url: str) -> None:
        self._call, self._retries, self._url = call, retries, url
        self._end = time.monotonic() + (call.seconds or retries.seconds)
        self._done = 0

    @property
    def left(self) -> float:
        """Seconds that are left, a millisecond at least."""
        return max(self._end - time.monotonic(), 0.001)

    def finished(self, outcome: Answer | httpx.TransportError) -> bool:
        """Tell whether an outcome is what was asked for."""
        if not isinstance(outcome, Answer):
            return False
        gone = outcome.status == 404 and self._call.gone_is_done and self._done > 0
        return gone or 200 <= outcome.status < 300

    def wait(self, outcome: Answer | httpx.TransportError) -> float:
        """Return the seconds to wait before the next try.

        Raises:
            ServerError: there is none.
        """
        asked = _retry_after(outcome.headers) if isinstance(outcome, Answer) else None
        backoff = min(self._retries.first * 2.0**self._done, self._retries.longest)
        seconds = backoff * random.uniform(0.5, 1.0) + (asked or 0.0)
        if not self._may(outcome) or self._done >= self._retries.times or seconds >= self.left:
            raise self._error(outcome, asked)
        self._done += 1
        return seconds

    def _may(self, outcome: Answer | httpx.TransportError) -> bool:
        if isinstance(outcome, Answer):
            return outcome.status in _PASSING and (self._call.repeats or outcome.status == 429)
        return self._call.repeats or isinstance(outcome, _NEVER_SENT)

    def _error(self, outcome: Answer | httpx.TransportError, asked: float | None) -> ServerError:
        tried = f" It was tried {self._done + 1} times." if self._done else ""
        if not isinstance(outcome, Answer):
            said = {TooLong: "took too long", httpx.ConnectError: "cannot be reached"}.get(type(outcome))
            if said is None:
                slow = isinstance(outcome, httpx.TimeoutException)
                said = "did not answer in time" if slow else "broke the connection off"
            more = f": {outcome}" if str(outcome) else ""
            return ServerError(f"The server at {self._url} {said}{more.rstrip('.')}.{tried}")
        sentence, request = _problem(outcome)
        later = f" It asks to come again in {asked:,.0f} seconds." if asked and asked >= self.left else ""
        name = f" (request {request})" if request else ""
        return ServerError(
            f"The server at {self._url} answered {outcome.status}: {sentence}{later}{tried}{name}",
            outcome.status,
            request,
            sentence,
        )


def not_understood(answer: Answer, url: str) -> ServerError:
    """Return the error for an answer that /v1 does not have."""
    request = answer.headers.get("x-request-id")
    return ServerError(
        f"The server at {url} answered something that is not of /v1. Is it `retrieval serve`?",
        answer.status,
        request,
    )


def _problem(answer: Answer) -> tuple[str, str | None]:
    """Return a server's sentence, and the request's id."""
    request: Any = answer.headers.get("x-request-id")
    sentence: Any = None
    try:
        said = json.loads(answer.content[:100_000])
    except (ValueError, RecursionError):
        said = None
    if isinstance(said, dict):
        sentence, request = said.get("detail"), said.get("instance") or request
    if not isinstance(sentence, str) or not sentence:
        where = answer.headers.get("location")
        sentence = (
            f"it sends on to {where[:_LONGEST]}; give that address." if where else "no reason is given."
        )
    return sentence[:_LONGEST], request[:200] if isinstance(request, str) else None


def _retry_after(headers: Mapping[str, str]) -> float | None:
    """Return the seconds that a server asks to wait, from a number or a date; None where it asks for none that can be read."""
    text = headers.get("retry-after", "").strip()
    if text.isascii() and text.isdecimal():
        return float(text[:9])
    try:
        when = parsedate_to_datetime(text)
    except (ValueError, IndexError):
        return None
    aware = when if when.tzinfo else when.replace(tzinfo=UTC)
    return max((aware - datetime.now(UTC)).total_seconds(), 0.0)
