"""A limit on a task's work: one timer for all of one length, and each ends when it should."""

from __future__ import annotations

import asyncio
import math
import time
from typing import Any

import pytest
from retrieval.serving.http.body import Body
from retrieval.serving.http.budget import Budget
from retrieval.serving.http.limit import Limit

FORM: Any = {"image": 1000}


@pytest.fixture
def loop():
    """An event loop that counts its timers."""
    made = asyncio.new_event_loop()
    made.timers, call_later = [], made.call_later  # type: ignore[attr-defined]

    def counted(seconds: float, *given: Any, **more: Any) -> Any:
        made.timers.append(seconds)  # type: ignore[attr-defined]
        return call_later(seconds, *given, **more)

    made.call_later = counted  # type: ignore[method-assign]
    yield made
    made.close()


async def limited(seconds: float, work: float) -> float:
    """Work under a limit; return how long it took until that was over, negative where it was not."""
    began = time.monotonic()
    try:
        with Limit(seconds):
            await asyncio.get_running_loop().create_task(asyncio.sleep(work))
    except TimeoutError:
        return time.monotonic() - began
    return -1.0


def test_each_ends_at_its_own_time(loop):
    async def scenario() -> list[float]:
        tasks = []
        for number in range(40):
            tasks.append(asyncio.create_task(limited(0.3, 0.1 if number % 2 else 5.0)))
            tasks.append(asyncio.create_task(limited(0.15 + 0.3 * (number % 3 == 0), 0.05)))
            await asyncio.sleep(0.01)
        return await asyncio.gather(*tasks)

    found = loop.run_until_complete(scenario())
    assert all(took == -1.0 for took in found[1::2]) and all(took == -1.0 for took in found[2::4])
    assert all(0.3 <= took < 0.5 for took in found[0::4])


def test_thousands_that_end_in_time_have_a_timer_in_all(loop):
    async def scenario() -> None:
        for _ in range(5000):
            with Limit(30.0):
                pass
        with Limit(math.inf):
            await asyncio.sleep(0)

    loop.run_until_complete(scenario())
    assert loop.timers == [30.0]


def test_limits_inside_limits_and_somebody_elses_cancelling(loop):
    async def scenario() -> None:
        with pytest.raises(TimeoutError), Limit(0.05), Limit(5.0):
            await asyncio.sleep(5)
        with Limit(5.0):
            with pytest.raises(TimeoutError), Limit(0.05):
                await asyncio.sleep(5)
            await asyncio.sleep(0.01)
        task = asyncio.create_task(limited(5.0, 5.0))
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    loop.run_until_complete(scenario())


def test_what_goes_on_after_its_limit_is_left_alone(loop):
    async def scenario() -> None:
        with Limit(0.05):
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.2)

    loop.run_until_complete(scenario())


def test_each_event_loop_has_its_own():
    for _ in range(3):
        assert 0.05 <= asyncio.run(limited(0.05, 5.0)) < 0.5


def test_a_body_that_is_there_needs_none(loop):
    async def read(*, there: bool) -> bytes:
        body, budget = Body({"content-type": "image/png"}, FORM, ""), Budget(1000)

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": b"abc", "more_body": False}

        with budget.upload() as upload:
            await body.read(receive, budget, upload, 7.0, there=there)
            assert not upload.arriving and budget.held == 3
        return body.content()

    assert loop.run_until_complete(read(there=True)) == b"abc" and loop.timers == []
    assert loop.run_until_complete(read(there=False)) == b"abc" and loop.timers == [7.0]
