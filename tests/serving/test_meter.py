"""Limits by key or address, by a clock that is given."""

from __future__ import annotations

import random

import pytest
from retrieval.serving.http.access.meter import Limits, Meter, TooMuch, network


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def allowed(meter: Meter, name: str, limits: Limits) -> bool:
    try:
        meter.begin(name, limits).close()
    except TooMuch:
        return False
    return True


def test_a_rate_with_a_burst(clock):
    meter, limits = Meter(clock=clock), Limits(rate=2, burst=5)
    assert [allowed(meter, "a", limits) for _ in range(7)] == [True] * 5 + [False] * 2
    assert allowed(meter, "b", limits)  # another's is another's
    with pytest.raises(TooMuch, match=r"2 requests a second, 5 at once\. Try again in 1 second") as caught:
        meter.begin("a", limits)
    assert (caught.value.status, caught.value.headers) == (429, {"Retry-After": "1"})
    clock.now += 0.49
    assert not allowed(meter, "a", limits)
    clock.now += 0.02
    assert [allowed(meter, "a", limits) for _ in range(2)] == [True, False]
    clock.now += 100
    assert [allowed(meter, "a", limits) for _ in range(6)] == [True] * 5 + [False]


def test_a_slow_rate_says_when_to_come_again(clock):
    meter, limits = Meter(clock=clock), Limits(rate=0.1)
    assert allowed(meter, "a", limits)
    clock.now += 2.5
    with pytest.raises(TooMuch, match="in 8 seconds") as caught:
        meter.begin("a", limits)
    clock.now += int(caught.value.headers["Retry-After"])
    assert allowed(meter, "a", limits)


def test_the_rate_holds_over_any_time(clock):
    """Against the definition: in no window of t seconds are there more than burst + rate × t requests, and none is refused that would fit."""
    seeded = random.Random(0)
    meter, limits = Meter(clock=clock), Limits(rate=7, burst=3)
    tokens, last, times = 3.0, clock.now, []
    for _ in range(2000):
        clock.now += seeded.choice([0, 0.01, 0.1, 0.5])
        tokens, last = min(3.0, tokens + (clock.now - last) * 7), clock.now
        expected = tokens >= 1 - 1e-6
        assert allowed(meter, "a", limits) == expected
        if expected:
            tokens -= 1
            times.append(clock.now)
    for first in range(0, len(times), 10):
        for after in range(first, len(times), 10):
            assert after - first + 1 <= 3 + 7 * (times[after] - times[first]) + 1e-6


def test_requests_at_a_time(clock):
    meter, limits = Meter(clock=clock), Limits(concurrent=2)
    one, two = meter.begin("a", limits), meter.begin("a", limits)
    with pytest.raises(TooMuch, match="2 requests under way"):
        meter.begin("a", limits)
    assert allowed(meter, "b", limits)
    one.close()
    assert allowed(meter, "a", limits)
    two.close()


def test_a_refused_request_costs_nothing(clock):
    meter, limits = Meter(clock=clock), Limits(rate=1, burst=2, concurrent=1)
    use = meter.begin("a", limits)
    for _ in range(50):
        assert not allowed(meter, "a", limits)
    use.close()
    assert allowed(meter, "a", limits)


def test_bytes_a_minute(clock):
    meter, limits = Meter(clock=clock), Limits(bytes_per_minute=6000)
    use = meter.begin("a", limits)
    for _ in range(59):
        use.spend(100)
    use.close()
    assert allowed(meter, "a", limits)
    use = meter.begin("a", limits)
    use.spend(6100)  # what has begun is not cut off, and is paid back later
    use.close()
    with pytest.raises(TooMuch, match=r"6,000 bytes a minute\. Try again in 60 seconds"):
        meter.begin("a", limits)
    clock.now += 59
    assert not allowed(meter, "a", limits)
    clock.now += 1.1
    assert allowed(meter, "a", limits)


def test_countless_addresses_take_no_memory_and_free_nobody(clock):
    """The attack: a client with endless addresses, each used once, while one that has used up its own goes on."""
    meter, limits = Meter(most=100, clock=clock), Limits(rate=1, burst=2)
    while allowed(meter, "spent", limits):
        pass
    passed = 0
    for number in range(50_000):
        clock.now += 0.0001
        passed += allowed(meter, network(f"10.{number >> 16}.{number >> 8 & 255}.{number & 255}"), limits)
        if number % 100 == 0 and clock.now < 1000.9:
            assert not allowed(meter, "spent", limits)
    assert len(meter) <= 100
    # in five seconds at a request a second each: as many clients as are remembered, and one for all the others
    assert passed <= 101 * (2 + 5)
    clock.now += 60
    assert allowed(meter, "honest", limits)  # and afterwards there is room again
    for number in range(200):
        clock.now += 10
        assert allowed(meter, f"later {number}", limits)
    assert len(meter) < 10


def test_one_that_is_under_way_is_not_forgotten(clock):
    meter, limits = Meter(most=3, clock=clock), Limits(concurrent=1)
    use = meter.begin("long", limits)
    for number in range(100):
        clock.now += 100
        allowed(meter, str(number), limits)
    assert not allowed(meter, "long", limits)
    use.close()
    assert allowed(meter, "long", limits)


def test_what_an_address_counts_as():
    assert network("192.0.2.1") == "192.0.2.1" == network("::ffff:192.0.2.1")
    assert network("2001:db8::1") == network("2001:db8::ffff:1") != network("2001:db8:0:1::1")
    assert network("::1") == "::/64" and network("fe80::1%eth0") == "fe80::/64"
    assert network("unknown") == network("x" * 30_000) == network("") == "?"
