"""Threads that work for an event loop: which one is woken, that no job is left, and what is kept of those that are done."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
import weakref
from typing import Any

import numpy as np
from retrieval.serving.http.machinery import Machinery
from retrieval.serving.http.pool import Alike, Pool
from retrieval.serving.http.settings import Settings

SECONDS = 20


def ident(job: Any) -> int:
    """Return which thread works."""
    return threading.get_ident()


def test_the_thread_that_has_worked_last_works_next():
    async def scenario() -> None:
        pool, all_there = Pool("search", 4, 16), threading.Barrier(4)
        await asyncio.gather(*(pool.run(lambda job: all_there.wait(SECONDS)) for _ in range(4)))
        assert len({await pool.run(ident) for _ in range(200)}) == 1
        assert pool.close(5)

    asyncio.run(scenario())


def test_what_comes_at_once_is_done_at_once():
    """One thread is woken, and wakes the next one for what it leaves."""

    async def scenario() -> None:
        for threads in (2, 4):
            pool, all_there = Pool("search", threads, 16), threading.Barrier(threads)
            for _ in range(20):
                jobs = [pool.run(lambda job, all=all_there: all.wait(SECONDS)) for _ in range(threads)]
                assert sorted(await asyncio.gather(*jobs)) == list(range(threads))
            assert pool.close(5)

    asyncio.run(scenario())


def test_alike_jobs_that_come_at_once_are_one_batch_of_one_thread():
    async def scenario() -> None:
        pool, sizes = Pool("search", 4, 64), []

        def together(jobs: Any) -> list[int]:
            sizes.append(len(jobs))
            return [threading.get_ident()] * len(jobs)

        def one(job: Any) -> int:
            return together([job])[0]

        for _ in range(50):
            await asyncio.gather(*(pool.run(one, "", Alike(1, together, 64)) for _ in range(16)))
        assert sum(sizes) == 800 and len(sizes) < 200  # a thread for each job would be 800 batches
        assert pool.close(5)

    asyncio.run(scenario())


def test_no_job_is_left_when_many_come_from_everywhere():
    """Threads rest and are woken at all moments; whoever asks again at once finds room, since a thread rests before its answer is heard."""

    async def scenario() -> None:
        pool, random = Pool("search", 3, 8), np.random.default_rng(0)
        pauses = random.integers(0, 4, 3000) * random.integers(0, 2, 3000) * 1e-4

        async def client(name: str, own: Any) -> int:
            for pause in own:
                assert await pool.run(lambda job, p=pause: time.sleep(p) if p else 5, name) in (None, 5)
                if pause > 2e-4:
                    await asyncio.sleep(pause)
            return len(own)

        async with asyncio.timeout(60):
            done = await asyncio.gather(*(client(f"{n}", own) for n, own in enumerate(np.split(pauses, 10))))
        assert sum(done) == 3000 and pool.waiting == 0
        assert pool.close(5)

    asyncio.run(scenario())


def test_who_asks_again_at_once_finds_room():
    async def scenario() -> None:
        pool = Pool("search", 1, 0)
        for number in range(500):
            pool.require_room("")
            assert await pool.run(lambda job, number=number: number) == number
        assert pool.close(5)

    asyncio.run(scenario())


def test_a_closed_pool_ends_what_waits_first():
    async def scenario() -> None:
        pool, gate = Pool("search", 2, 16), threading.Event()
        held = [asyncio.create_task(pool.run(lambda job: gate.wait(SECONDS))) for _ in range(2)]
        await asyncio.sleep(0.1)
        late = [asyncio.create_task(pool.run(ident)) for _ in range(5)]
        await asyncio.sleep(0.1)
        assert not pool.close(0.1)
        gate.set()
        assert all(await asyncio.gather(*held, *late))
        assert pool.close(5)

    asyncio.run(scenario())


def test_an_image_that_is_answered_is_let_go_of_at_once(photos):
    """Not when Python looks for garbage next: nothing that holds its pixels is a circle."""
    content, kept = next(photos.rglob("*.png")).read_bytes(), []

    async def scenario() -> None:
        from retrieval.serving.images import Preprocessing

        machinery = Machinery(Settings(workers=1), Preprocessing((8, 8), 1))

        def work(decoded: Any, job: Any) -> int:
            kept.append(weakref.ref(decoded))
            return int(decoded.width)

        for _ in range(3):
            assert await machinery.decoded(machinery.decoders.pixels, content, "", work) == 8
        for _ in range(200):
            if all(one() is None for one in kept):
                break
            await asyncio.sleep(0.05)
        assert [one() for one in kept] == [None] * 3
        machinery.close(5)

    gc.collect()
    gc.disable()
    try:
        asyncio.run(scenario())
    finally:
        gc.enable()
