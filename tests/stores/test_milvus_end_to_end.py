"""Two processes serve an index in Milvus, which migrates, is written to, and ends meanwhile."""

import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import retrieval
from retrieval.client import Client, Retries
from retrieval.errors import ServerError, StoreError
from retrieval.serving.store.place import store_place

pytest.importorskip("pymilvus", reason="the extra `milvus` is not installed")
CHOSEN = "label in ('1', '3', '5', '7')"
SECONDS = 100.0


@contextmanager
def serving(address: str, folder: Path) -> Iterator[str]:
    """`retrieval serve` in a process of its own; gives its url."""
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


class Load(threading.Thread):
    """Searches of one process, one after another, until it is stopped.

    `answers` has, of each search, the number of the query, and the ids that were found or the
    status of the refusal; `sentences` has those of refusals.
    """

    def __init__(self, url: str, queries: list[Path]) -> None:
        super().__init__()
        self.url, self.queries, self.stopped = url, queries, False
        self.answers: list[tuple[int, list[str] | int]] = []
        self.sentences: set[str] = set()

    def run(self) -> None:
        with Client(self.url, retries=Retries(times=0)) as client:
            while not self.stopped:
                number = len(self.answers) % len(self.queries)
                try:
                    hits = client.search(self.queries[number], k=5, filter=CHOSEN)
                    self.answers.append((number, [hit.id for hit in hits.results]))
                except ServerError as fault:
                    self.answers.append((number, fault.status or 0))
                    self.sentences.add(str(fault))
                    time.sleep(0.05)


@contextmanager
def loaded(urls: list[str], queries: list[Path]) -> Iterator[list[Load]]:
    """Search the processes at some urls meanwhile."""
    loads = [Load(url, queries) for url in urls]
    for load in loads:
        load.start()
    try:
        yield loads
    finally:
        for load in loads:
            load.stopped = True
            load.join()


def until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + SECONDS
    while not true():
        assert time.monotonic() < end, "never"
        time.sleep(0.05)


def answers(index: Any, queries: list[Path]) -> list[list[str]]:
    """What an index finds of each query."""
    return [[hit.id for hit in index.search(query, k=5, where=CHOSEN)] for query in queries]


def copy(images: list[Path], folder: Path) -> None:
    """Copy images into a folder, one folder per class."""
    for image in images:
        (folder / image.parent.name).mkdir(parents=True, exist_ok=True)
        shutil.copy(image, folder / image.parent.name)


class Writer(threading.Thread):
    """Adds one image after another to a folder and the folder to an index: again, where that
    fails. `kept` has the ids that the index said it has.
    """

    def __init__(self, index: Any, folder: Path, more: list[Path]) -> None:
        super().__init__()
        self.index, self.folder, self.more = index, folder, more
        self.kept: set[str] = set()
        self.refused = 0

    def run(self) -> None:
        for image in self.more:
            copy([image], self.folder)
            while True:
                try:
                    self.index.add(self.folder, progress=False)
                    break
                except StoreError:
                    self.refused += 1
            self.kept.add(f"{image.parent.name}/{image.name}")


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

        # It migrates: no search fails, and each finds what the one or the other generation has.
        before = answers(local, queries)
        assert answers(index, queries) == before
        local.migrate(other_bundle, progress=False)
        after = answers(local, queries)
        assert before != after
        with loaded(urls, queries) as loads:
            until(lambda: all(len(load.answers) > 10 for load in loads))
            index.migrate(other_bundle, progress=False)
            done = [len(load.answers) for load in loads]
            for load, count in zip(loads, done, strict=True):
                until(lambda load=load, count=count: len(load.answers) > 20 + count)
        for load, count in zip(loads, done, strict=True):
            assert all(hits in (before[query], after[query]) for query, hits in load.answers)
            assert all(hits == after[query] for query, hits in load.answers[count + 1 :])
        index.drop_old()

        # A folder is added: no search fails.
        with loaded(urls, queries) as loads:
            index.add(late, progress=False)
        assert all(isinstance(hits, list) for load in loads for _, hits in load.answers)
        kept = {f"{image.parent.name}/{image.name}" for image in images[46:]}
        assert kept <= {item.id for item in index.store.scan()}

        # The server ends while it migrates: searches and writes are refused meanwhile, and go on.
        writer, ended = Writer(writing, folder, queries), threading.Event()

        def end(what, done, total):
            if what == "embedding" and not ended.is_set():
                ended.set()
                writer.start()
                until(lambda: len(writer.kept) > 2)
                milvus.kill()
                for load in loads:
                    until(lambda load=load: load.answers[-1][1] == 503)
                milvus.start()

        with loaded(urls, queries) as loads:
            index.migrate(plain_bundle, progress=end)
            writer.join()
            until(lambda: all(isinstance(load.answers[-1][1], list) for load in loads))
        assert ended.is_set() and writer.refused
        for load in loads:
            assert {hits for _, hits in load.answers if isinstance(hits, int)} == {503}
            for sentence in load.sentences:
                assert "The store of this index cannot be reached now." in sentence
        ids = {item.id for item in index.store.scan()}
        assert writer.kept | kept <= ids and len(ids) == 60 == index.store.count()
        assert len(writer.kept | kept) == 20

        # The index, and whoever serves it, finds what the folder finds.
        copy(images[46:], folder)
        local.add(folder, progress=False)
        local.migrate(plain_bundle, progress=False)
        expected = answers(local, queries)
        assert answers(index, queries) == expected
        for url in urls:
            with Client(url) as client:
                hits = [client.search(query, k=5, filter=CHOSEN).results for query in queries]
            assert [[hit.id for hit in entry] for entry in hits] == expected
