"""Vector queries that wait for a thread at the same time are searched at once."""

import asyncio
import threading
from contextlib import closing

import numpy as np
import pytest
from retrieval.base.timing import TRAIL, Trail
from retrieval.errors import DataError
from retrieval.index.index import Index

from retrieval_server.request_bodies import Options, Query, QueryInput
from retrieval_server.served_index import Served, Workers
from retrieval_server.settings import Settings


@pytest.fixture
def queries(index_path):
    with Index.open(index_path) as index:
        width = index.bundle.manifest.vector
    vectors = np.random.default_rng(0).normal(size=(8, width))
    return [Query((QueryInput(vector=vector),), Options(k=5), None) for vector in vectors]


def answers(
    index: Index, queries: list[Query], monkeypatch: pytest.MonkeyPatch
) -> tuple[list[object], list[int], list[Trail]]:
    """Search with all queries while the only thread is busy; one more client leaves meanwhile.

    Returns:
        The queries' hits or errors, the number of vectors of each search, and the trails.
    """
    workers, sizes, trails = Workers(Settings(workers=1)), list[int](), [Trail() for _ in queries]
    search, served = index.search, Served("i", index, Settings(), workers)

    def counted(vectors, *given, **more):
        sizes.append(len(vectors))
        return search(vectors, *given, **more)

    async def ask(query, trail):
        hits: list[object] = []
        TRAIL.set(trail)
        await served.search(query, lambda _, found, index: hits.extend(found[0]) or b"")
        return hits

    async def ask_all():
        gate = threading.Event()
        busy = asyncio.create_task(workers.searches.run(gate.wait))
        await asyncio.sleep(0.05)
        leaving = asyncio.create_task(ask(queries[0], Trail()))
        tasks = [asyncio.create_task(ask(*pair)) for pair in zip(queries, trails, strict=True)]
        await asyncio.sleep(0.05)
        leaving.cancel()
        await asyncio.wait([leaving])
        gate.set()
        await busy
        return await asyncio.gather(*tasks, return_exceptions=True)

    monkeypatch.setattr(index, "search", counted)
    with closing(workers):
        results = asyncio.run(ask_all())
    assert not served._vectors
    return results, sizes, trails


def test_vectors_searched_together_get_the_hits_of_separate_searches(
    index_path, queries, monkeypatch
):
    queries[3] = queries[3]._replace(options=Options(k=2))
    with Index.open(index_path, threads=1) as index:
        alone = [
            index.search(query.inputs[0].vector[None], query.options.k)[0] for query in queries
        ]
        results, sizes, trails = answers(index, queries, monkeypatch)
    assert results == alone
    assert sizes == [7, 1]  # one with another k
    assert all({"search", "items", "wait"} <= set(trail.seconds) for trail in trails)
    batches = [count for trail in trails for name, count in trail.batches if name == "search"]
    assert sorted(batches) == [1, 7]


def test_an_invalid_vector_fails_alone(index_path, queries, monkeypatch):
    queries[2].inputs[0].vector[0] = 1e300  # beyond float32
    with Index.open(index_path, threads=1) as index:
        results, _, _ = answers(index, queries, monkeypatch)
    refused = [isinstance(result, DataError) for result in results]
    assert refused == [number == 2 for number in range(8)]
