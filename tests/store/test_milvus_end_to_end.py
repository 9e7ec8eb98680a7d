"""Two servers of an index in Milvus, during a migration, writes and a kill of Milvus."""

import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import retrieval
import wire
from retrieval.client import Client, Retries
from retrieval.errors import ServerError, StoreError
from retrieval.store.find_store import store_place

pytest.importorskip("pymilvus", reason="the extra `milvus` is not installed")
CHOSEN = "label in ('1', '3', '5', '7')"
SECONDS = 100.0
until = partial(wire.until, seconds=SECONDS)


@contextmanager
def serving(address: str, folder: Path) -> Iterator[str]:
    """Run `retrieval serve` in a process; yields its URL."""
    process = subprocess.Popen(
        [sys.executable, "-m", "retrieval.cli", "serve", address, "--port", "0"],
        stdout=subprocess.PIPE,
        text=True,
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        yield line.split(" at ")[1].split("/ ")[0]
    finally:
        process.terminate()
        process.wait(30)
        process.stdout.close()


Answer = tuple[int, list[str] | int, str]
"""Number of a query, and the ids of its hits or the status and sentence of its refusal."""


@contextmanager
def loaded(urls: list[str], queries: list[Path]) -> Iterator[list[list[Answer]]]:
    """Search each server, query after query; yields a growing list of answers per server."""
    stopped, answers = threading.Event(), [list[Answer]() for _ in urls]

    def search(url: str, own: list[Answer]) -> None:
        with Client(url, retries=Retries(times=0)) as client:
            while not stopped.wait(0.05 if own and own[-1][2] else 0):
                number = len(own) % len(queries)
                try:
                    hits = client.search(queries[number], k=5, filter=CHOSEN).results
                    own.append((number, [hit.id for hit in hits], ""))
                except ServerError as fault:
                    own.append((number, fault.status or 0, str(fault)))

    with ThreadPoolExecutor(len(urls)) as pool:
        searches = [pool.submit(search, *pair) for pair in zip(urls, answers, strict=True)]
        try:
            yield answers
        finally:
            stopped.set()
    for searched in searches:
        searched.result()


def answers(index: Any, queries: list[Path]) -> list[list[str]]:
    """Return the ids of the hits of each query."""
    return [[hit.id for hit in index.search(query, k=5, filter=CHOSEN)] for query in queries]


def copy(images: list[Path], folder: Path) -> None:
    """Copy images into a folder, one folder per class."""
    for image in images:
        (folder / image.parent.name).mkdir(parents=True, exist_ok=True)
        shutil.copy(image, folder / image.parent.name)


def add(index: Any, folder: Path, images: list[Path], kept: set[str]) -> int:
    """Add images one by one, each until the index accepts it; return the number of refusals.

    `kept` receives the ids that the index has acknowledged.
    """
    refused = 0
    for image in images:
        copy([image], folder)
        name = f"{image.parent.name}/{image.name}"
        while name not in kept:
            try:
                index.add(folder, progress=False)
                kept.add(name)
            except StoreError:
                refused += 1
    return refused


def test_two_processes_serve_an_index_that_migrates_and_loses_its_server(
    milvus, makers, plain_bundle, other_bundle, tmp_path
):
    if not hasattr(milvus, "kill"):
        pytest.skip("the server of MILVUS_URI is not ours to end")
    images = makers.write_digits(tmp_path / "all", 60)
    folder, late, queries = tmp_path / "digits", tmp_path / "late", images[40:46]
    copy(images[:40], folder)
    copy(images[46:], late)
    address = f"milvus://{milvus.place}/end_to_end"
    with ExitStack() as stack:
        stack.callback(store_place(address).drop)
        for place in (address, tmp_path / "local.index"):
            retrieval.Index.create(place, [folder], model=plain_bundle, progress=False)
        local = stack.enter_context(retrieval.Index.open(tmp_path / "local.index"))
        index = stack.enter_context(retrieval.Index.open(f"{address}?timeout={SECONDS}"))
        writing = stack.enter_context(retrieval.Index.open(f"{address}?timeout=2"))
        urls = [stack.enter_context(serving(f"{address}?timeout=2", tmp_path)) for _ in range(2)]

        # A migration: no search fails, and each answer is that of one generation.
        before = answers(local, queries)
        assert answers(index, queries) == before
        local.migrate(other_bundle, progress=False)
        after = answers(local, queries)
        assert before != after
        with loaded(urls, queries) as loads:
            until(lambda: min(map(len, loads)) > 10)
            index.migrate(other_bundle, progress=False)
            done = [len(load) for load in loads]
            until(lambda: min(len(load) - done[n] for n, load in enumerate(loads)) > 20)
        for load, count in zip(loads, done, strict=True):
            assert all(hits in (before[query], after[query]) for query, hits, _ in load)
            assert all(hits == after[query] for query, hits, _ in load[count + 1 :])
        index.drop_old()

        # A folder is added: no search fails.
        with loaded(urls, queries) as loads:
            index.add(late, progress=False)
        assert not any(sentence for load in loads for _, _, sentence in load)
        kept = {f"{image.parent.name}/{image.name}" for image in images[46:]}
        assert kept <= {item.id for item in index.store.scan()}

        # Milvus is killed during a migration: searches and writes get 503, and then go on.
        pool, added, writers = stack.enter_context(ThreadPoolExecutor(1)), set(), []

        def end(what, done, total):
            if what == "embedding" and not writers:
                writers.append(pool.submit(add, writing, folder, queries, added))
                until(lambda: len(added) > 2)
                milvus.kill()
                until(lambda: all(load[-1][1] == 503 for load in loads))
                milvus.start()

        with loaded(urls, queries) as loads:
            index.migrate(plain_bundle, progress=end)
            assert writers[0].result() > 0
            until(lambda: not any(load[-1][2] for load in loads))
        for load in loads:
            refusals = [answer for answer in load if answer[2]]
            assert {status for _, status, _ in refusals} == {503}
            for _, _, sentence in refusals:
                assert "The store of this index cannot be reached now." in sentence
        ids = {item.id for item in index.store.scan()}
        assert added | kept <= ids and len(ids) == 60 == index.store.count()
        assert len(added | kept) == 20

        # The index and its servers return the same hits as an index in a folder.
        copy(images[46:], folder)
        local.add(folder, progress=False)
        local.migrate(plain_bundle, progress=False)
        expected = answers(local, queries)
        assert answers(index, queries) == expected
        for url in urls:
            with Client(url) as client:
                hits = [client.search(query, k=5, filter=CHOSEN).results for query in queries]
            assert [[hit.id for hit in entry] for entry in hits] == expected
