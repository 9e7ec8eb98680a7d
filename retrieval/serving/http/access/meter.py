"""How much each client has asked for lately: token buckets, in as much memory however many clients there are."""

from __future__ import annotations

import ipaddress
import math
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from retrieval.serving.http.errors import RequestError

MOST_CLIENTS = 20_000
_MINUTE = 60.0
_LOOK = 1.0  # seconds between two looks through a full table
_IPV6_PREFIX = 64  # bits: what one customer of a network has is one client


@dataclass(frozen=True)
class Limits:
    """What one client may ask for; 0 is no limit.

    Attributes:
        rate: requests a second, on average.
        burst: requests at once after a pause; 0: those of one second, at least one.
        concurrent: requests at a time.
        bytes_per_minute: of bodies, sent and received, on average.
    """

    rate: float = 0.0
    burst: int = 0
    concurrent: int = 0
    bytes_per_minute: int = 0

    @property
    def any(self) -> bool:
        """Whether there is a limit."""
        return bool(self.rate or self.concurrent or self.bytes_per_minute)

    def share(self, of: int) -> Limits:
        """Return those of one of several processes, each of which counts for itself: a part, rounded up."""
        if of == 1:
            return self
        return Limits(
            self.rate / of,
            math.ceil(self.burst / of),
            math.ceil(self.concurrent / of),
            math.ceil(self.bytes_per_minute / of),
        )


class TooMuch(RequestError):
    """429: a client asks for more than its limits allow.

    Args:
        sentence: which limit, and when to come again.
        seconds: until then.
    """

    def __init__(self, sentence: str, seconds: float) -> None:
        again = max(1, math.ceil(seconds))
        unit = "second" if again == 1 else "seconds"
        super().__init__(
            429, f"{sentence} Try again in {again:,} {unit}.", headers={"Retry-After": str(again)}
        )


class _Client:
    """What one client has used: the moments at which what it used is paid back, and its requests under way."""

    __slots__ = ("bytes_due", "requests_due", "running")

    def __init__(self) -> None:
        self.requests_due = self.bytes_due = 0.0
        self.running = 0

    def fresh(self, now: float) -> bool:
        """Whether it is like one that was never seen."""
        return not self.running and self.requests_due <= now and self.bytes_due <= now


class Use:
    """One request under way, to be ended by `close`, once."""

    __slots__ = ("_client", "_clock", "_second")

    def __init__(self, client: _Client, limits: Limits, clock: Callable[[], float]) -> None:
        self._client = client
        self._clock = clock
        self._second = _MINUTE / limits.bytes_per_minute if limits.bytes_per_minute else 0.0

    def spend(self, size: int) -> None:
        """Count bytes of a body."""
        if self._second:
            client = self._client
            client.bytes_due = max(client.bytes_due, self._clock()) + size * self._second

    def close(self) -> None:
        """Count the request out."""
        self._client.running -= 1


class Meter:
    """Counts the requests and bytes of clients; for the event loop.

    A client that has used nothing for long is forgotten, as it is like a new one. While as many as fit are remembered, all others
    share one allowance: a flood from countless addresses neither takes memory nor frees anybody from what they have used.

    Args:
        most: clients that are remembered.
        clock: gives seconds.
    """

    def __init__(self, most: int = MOST_CLIENTS, clock: Callable[[], float] = time.monotonic) -> None:
        self._most = most
        self._clock = clock
        self._clients: OrderedDict[str, _Client] = OrderedDict()  # the one seen longest ago first
        self._others = _Client()
        self._looked = -math.inf

    def __len__(self) -> int:
        return len(self._clients)

    def begin(self, name: str, limits: Limits) -> Use:
        """Count a request in.

        Raises:
            TooMuch: it is beyond the limits; nothing is counted then.
        """
        now = self._clock()
        client = self._client(name, now)
        if limits.concurrent and client.running >= limits.concurrent:
            raise TooMuch(f"You may have {limits.concurrent:,} requests under way at a time.", 1)
        if limits.bytes_per_minute and (wait := client.bytes_due - now - _MINUTE) >= 0:
            raise TooMuch(f"You may send and receive {limits.bytes_per_minute:,} bytes a minute.", wait)
        if limits.rate:
            burst = limits.burst or max(1, math.ceil(limits.rate))
            if (wait := client.requests_due - now - (burst - 1) / limits.rate) > 1e-9:
                raise TooMuch(f"You may send {limits.rate:g} requests a second, {burst:,} at once.", wait)
            client.requests_due = max(client.requests_due, now) + 1 / limits.rate
        client.running += 1
        return Use(client, limits, self._clock)

    def _client(self, name: str, now: float) -> _Client:
        found = self._clients.get(name)
        if found is not None:
            self._clients.move_to_end(name)
            return found
        for _ in range(2):  # more go than come, so the table shrinks again after a flood
            oldest = next(iter(self._clients), None)
            if oldest is not None and self._clients[oldest].fresh(now):
                del self._clients[oldest]
        if len(self._clients) >= self._most and now - self._looked >= _LOOK:
            self._looked = now
            for other in [each for each, client in self._clients.items() if client.fresh(now)]:
                del self._clients[other]
        if len(self._clients) >= self._most:
            return self._others
        return self._clients.setdefault(name, _Client())


def network(address: str) -> str:
    """Return what an address counts as: itself, of IPv6 its network of 64 bits, one name for all that are no addresses."""
    try:
        found = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return "?"
    if isinstance(found, ipaddress.IPv4Address):
        return str(found)
    if found.ipv4_mapped is not None:
        return str(found.ipv4_mapped)
    return str(ipaddress.IPv6Network((int(found), _IPV6_PREFIX), strict=False))
