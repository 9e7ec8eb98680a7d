"""Searches that wait are done together: with the answers of one by one, each with its own fault, none for a client that has left."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families
from retrieval.errors import DataError
from retrieval.serving.decoding.pool import Busy
from retrieval.serving.filters import as_filter
from retrieval.serving.http.metrics import Metrics
from retrieval.serving.http.pool import Job, Pool, ends
from retrieval.serving.http.queries import Given, Query
from retrieval.serving.http.searcher import Searcher
from retrieval.serving.http.settings import Settings
from retrieval.serving.http.together import Pace
from retrieval.serving.index.index import open_index
from retrieval.serving.stages import Trail, following

QUERIES = np.random.default_rng(5).normal(size=(24, 16))


@pytest.fixture
def index(index_path):
    with open_index(index_path, threads=1) as opened:
        yield opened


def said(found: Any) -> bytes:
    return json.dumps([[str(hit.id), hit.distance] for hits in found.hits for hit in hits]).encode()


def alone(index: Any, vector: Any, k: int = 10, where: str | None = None) -> bytes:
    hits = index.search(vector, k, where=where)
    return json.dumps([[str(hit.id), hit.distance] for hit in hits]).encode()


def noted(index: Any, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that gets the number of queries of each search of an index."""
    sizes: list[int] = []
    search = index.search

    def counted(queries: Any, *rest: Any, **more: Any) -> Any:
        sizes.append(len(queries))
        return search(queries, *rest, **more)

    monkeypatch.setattr(index, "search", counted)
    return sizes


def waiting(
    index: Any, scenario: Callable[[Searcher, Callable[[], None]], Coroutine[Any, Any, Any]], **more: Any
) -> Any:
    """Run a scenario while the one thread that searches is held, until it calls what it is given."""

    async def run() -> Any:
        searcher = Searcher(index, Settings(workers=1, waiting=64, **more))
        gate = threading.Event()
        held = asyncio.create_task(searcher.machinery.searches.run(lambda job: gate.wait(20)))
        await asyncio.sleep(0.02)
        try:
            return await scenario(searcher, gate.set)
        finally:
            gate.set()
            await held
            searcher.close()

    return asyncio.run(run())


def asked(searcher: Searcher, vector: Any, k: int = 10, client: str = "", where: Any = None) -> Any:
    query = Query((Given(vector=np.array(vector, np.float64)),), k, where)
    return asyncio.create_task(searcher.search(query, said, client))


def test_the_answers_are_those_of_one_by_one(index, monkeypatch):
    expected = [alone(index, vector) for vector in QUERIES]
    sizes = noted(index, monkeypatch)

    async def scenario(searcher: Searcher, go: Callable[[], None]) -> Any:
        tasks = [asked(searcher, vector, client=str(at % 5)) for at, vector in enumerate(QUERIES)]
        await asyncio.sleep(0)
        go()
        return await asyncio.gather(*tasks)

    answers = [json.loads(one) for one in waiting(index, scenario)]
    assert sizes == [24]
    for answer, own in zip(answers, map(json.loads, expected), strict=True):
        assert [id for id, _ in answer] == [id for id, _ in own]
        assert np.allclose([far for _, far in answer], [far for _, far in own], rtol=0, atol=1e-12)


def test_only_what_is_alike_is_done_together(index, monkeypatch):
    filters = [None, "label = '3'"] if hasattr(index, "store") else [None]
    kinds = [(k, where) for k in (3, 5) for where in filters]
    expected = [alone(index, QUERIES[at], *kinds[at % len(kinds)]) for at in range(16)]
    sizes = noted(index, monkeypatch)

    async def scenario(searcher: Searcher, go: Callable[[], None]) -> Any:
        tasks = []
        for at in range(16):
            k, where = kinds[at % len(kinds)]
            tasks.append(asked(searcher, QUERIES[at], k, where=None if where is None else as_filter(where)))
        await asyncio.sleep(0)
        go()
        return await asyncio.gather(*tasks)

    assert waiting(index, scenario) == expected
    assert sizes == [16 // len(kinds)] * len(kinds)


@pytest.mark.parametrize(("most", "sizes"), [(1, [1] * 6), (4, [4, 2])])
def test_no_more_than_the_operator_says(index, monkeypatch, most, sizes):
    found = noted(index, monkeypatch)

    async def scenario(searcher: Searcher, go: Callable[[], None]) -> Any:
        tasks = [asked(searcher, vector) for vector in QUERIES[:6]]
        await asyncio.sleep(0)
        go()
        return await asyncio.gather(*tasks)

    waiting(index, scenario, together=most)
    assert [one if most > 1 else 1 for one in found] == sizes


def test_a_batch_of_long_searches_meets_the_deadline():
    pace, settings = Pace(), Settings(deadline=8.0)
    assert pace.most(settings) == settings.together == 32
    for _ in range(100):
        pace.note(4.0, 8)  # half a second each
    assert pace.most(settings) == 4
    for _ in range(100):
        pace.note(20.0, 1)
    assert pace.most(settings) == 1


def test_one_at_fault_fails_alone(index):
    bad = {2: np.ones(3), 5: np.full(16, 1e300)}
    given = [bad.get(at, vector) for at, vector in enumerate(QUERIES[:8])]
    expected = [alone(index, vector) for vector in QUERIES[:8]]

    async def scenario(searcher: Searcher, go: Callable[[], None]) -> Any:
        tasks = [asked(searcher, vector) for vector in given]
        await asyncio.sleep(0)
        go()
        return await asyncio.gather(*tasks, return_exceptions=True)

    answers = waiting(index, scenario)
    assert isinstance(answers[2], DataError) and "16 numbers, not 3" in str(answers[2])
    assert isinstance(answers[5], DataError) and "beyond float32" in str(answers[5])
    for at in set(range(8)) - set(bad):
        assert answers[at] == expected[at]


def test_an_answer_that_cannot_be_made_is_one_requests_own(index):
    def broken(found: Any) -> bytes:
        raise ZeroDivisionError

    async def scenario(searcher: Searcher, go: Callable[[], None]) -> Any:
        tasks = [asked(searcher, vector) for vector in QUERIES[:3]]
        tasks.append(asyncio.create_task(searcher.search(Query((Given(vector=QUERIES[3]),)), broken)))
        await asyncio.sleep(0)
        go()
        return await asyncio.gather(*tasks, return_exceptions=True)

    answers = waiting(index, scenario)
    assert isinstance(answers[3], ZeroDivisionError)
    assert answers[:3] == [alone(index, vector) for vector in QUERIES[:3]]


def test_those_who_left_or_are_too_late_are_not_worked_on(index, monkeypatch):
    sizes = noted(index, monkeypatch)

    async def late(searcher: Searcher, vector: Any) -> Any:
        ends.set(time.monotonic())  # as the deadline has it, which a busy event loop may notice later
        query = Query((Given(vector=vector),))
        return await searcher.search(query, said)

    async def scenario(searcher: Searcher, go: Callable[[], None]) -> Any:
        tasks = [asked(searcher, vector) for vector in QUERIES[:6]]
        too_late = asyncio.create_task(late(searcher, QUERIES[6]))
        await asyncio.sleep(0.01)
        tasks[1].cancel()
        tasks[4].cancel()
        await asyncio.sleep(0)
        go()
        answers = await asyncio.gather(*tasks, return_exceptions=True)
        assert not too_late.done()  # its own time-out answers it
        too_late.cancel()
        return answers

    answers = waiting(index, scenario)
    assert [type(one).__name__ for one in answers] == [
        "CancelledError" if at in (1, 4) else "bytes" for at in range(6)
    ]
    assert sizes == [4]


def test_clients_take_turns_in_a_batch_too():
    async def scenario() -> list[list[str]]:
        from retrieval.serving.http.pool import Alike

        pool, gate, done = Pool("search", 1, 100), threading.Event(), []

        def together(jobs: Any) -> list[None]:
            done.append([job.client for job in jobs])
            return [None] * len(jobs)

        def one(job: Job[None]) -> None:
            done.append([job.client])

        held = asyncio.create_task(pool.run(lambda job: gate.wait(20)))
        await asyncio.sleep(0.02)
        flood = [asyncio.create_task(pool.run(one, "flood", Alike(1, together, 4))) for _ in range(9)]
        await asyncio.sleep(0)
        late = asyncio.create_task(pool.run(one, "late", Alike(1, together, 4)))
        await asyncio.sleep(0)
        gate.set()
        await asyncio.gather(held, late, *flood)
        assert pool.close(5)
        return done

    done = asyncio.run(scenario())
    assert "late" in done[0] and sorted(map(len, done)) == [2, 4, 4]


def test_the_sizes_are_told(index):
    trails = [Trail(str(at)) for at in range(5)]

    async def scenario(searcher: Searcher, go: Callable[[], None]) -> Metrics:
        metrics, tasks = Metrics({"index": searcher}, ["/v1/search"]), []
        for trail, vector in zip(trails, QUERIES[:5], strict=True):
            with following(trail):
                tasks.append(asked(searcher, vector))
        await asyncio.sleep(0)
        go()
        await asyncio.gather(*tasks)
        for trail in trails:
            metrics.answered(trail, "POST", "/v1/search", 200, 0.1)
        return metrics

    metrics = waiting(index, scenario)
    samples = {
        sample.name: sample.value
        for family in text_string_to_metric_families(metrics.exposition().decode())
        if family.name == "retrieval_search_batch"
        for sample in family.samples
    }
    assert samples["retrieval_search_batch_count"] == 1 and samples["retrieval_search_batch_sum"] == 5
    for trail in trails:  # each request has waited for all of it
        assert {span.stage for span in trail.spans} >= {"wait", "search", "items"}


def test_images_are_searched_for_together_where_a_search_is_long(index, photos, monkeypatch):
    """A GPU encodes all that wait at once, and where a search is long they wait for each other after their encoding."""
    files = [path.read_bytes() for path in sorted(photos.rglob("*.png"))[:6]]
    expected = [alone(index, content) for content in files]
    for device in ("cpu", "cuda"):
        with monkeypatch.context() as patch:
            sizes = noted(index, patch)
            encoded: list[int] = []
            encode = index.bundle.encode

            def counted(pixels: Any, encode: Any = encode, encoded: list[int] = encoded, **rest: Any) -> Any:
                encoded.append(len(pixels))
                return encode(pixels, **rest)

            patch.setattr(index.bundle, "encode", counted)
            patch.setattr(index.bundle, "device", device)

            async def scenario(searcher: Searcher, go: Callable[[], None]) -> Any:
                searcher._pace.note(0.1, 1)  # a long one
                tasks = [
                    asyncio.create_task(searcher.search(Query((Given(image=content),)), said))
                    for content in files
                ]
                while searcher.waiting()["search"] < len(files) and not any(task.done() for task in tasks):
                    await asyncio.sleep(0.01)
                go()
                return await asyncio.gather(*tasks)  # one that was refused says why

            answers = waiting(index, scenario)
        assert sizes == [6] and encoded == ([1] * 6 if device == "cpu" else [6])
        for answer, own in zip(map(json.loads, answers), map(json.loads, expected), strict=True):
            assert [id for id, _ in answer] == [id for id, _ in own]
            assert np.allclose([far for _, far in answer], [far for _, far in own], rtol=0, atol=1e-6)


def test_an_image_is_not_decoded_after_its_deadline(index, photos):
    content = next(photos.rglob("*.png")).read_bytes()

    async def scenario() -> None:
        searcher = Searcher(index, Settings(workers=1))
        decoders = searcher.machinery.decoders
        with decoders._lock:  # as if every process were at work
            held, decoders._idle = decoders._idle, []
            most, decoders._most = decoders._most, 0
        jobs = [decoders.pixels(content, ends=time.monotonic() - 1.0), decoders.pixels(content)]
        decoders._most = most
        for worker in held:
            decoders.next_for(worker)
        assert (await asyncio.wrap_future(jobs[1].future)).pixels.shape == (1, 8, 8)
        with pytest.raises(Busy):
            await asyncio.wrap_future(jobs[0].future)
        assert jobs[0].begun is None
        searcher.close()

    asyncio.run(scenario())
