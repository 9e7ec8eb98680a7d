"""How much a queue holds: as many as have their turn in time, as measured."""

from __future__ import annotations

import pytest
from retrieval.serving.http import throughput
from retrieval.serving.http.throughput import Throughput


@pytest.fixture
def clock(monkeypatch) -> list[float]:
    """The time, to be set."""
    now = [100.0]
    monkeypatch.setattr(throughput.time, "monotonic", lambda: now[0])
    return now


def worked(of: Throughput, clock: list[float], turns: int, seconds: float, done: int = 1) -> None:
    """Have some turns pass while others wait."""
    of.note(1, more=True)
    for _ in range(turns):
        clock[0] += seconds
        of.note(done, more=True)


def test_a_queue_holds_what_has_its_turn_in_time(clock):
    quick, slow, together = (Throughput(16, 0.5) for _ in range(3))
    assert quick.room == 16  # nothing is known yet
    worked(quick, clock, 100, 0.002)
    assert quick.room == pytest.approx(250, abs=1)
    worked(slow, clock, 100, 0.1)
    assert slow.room == 16
    worked(together, clock, 100, 0.01, done=4)
    assert together.room == pytest.approx(200, abs=1)


def test_it_follows_what_turns_take_by_now_and_is_bounded(clock):
    one = Throughput(16, 1.0)
    worked(one, clock, 1000, 0.00001)
    assert one.room == 1000
    worked(one, clock, 300, 0.01)
    assert 95 < one.room < 110


def test_time_in_which_nobody_waited_says_nothing(clock):
    one = Throughput(16, 1.0)
    for _ in range(50):
        one.note(1, more=True)
        clock[0] += 0.01
        one.note(1, more=False)
        clock[0] += 60.0
    assert one.room == pytest.approx(100, abs=2)
