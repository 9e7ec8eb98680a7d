"""From images to two processes that serve one index on a real server of Milvus, which is migrated,
written to, and ended in the middle of it.

Where Ray is installed, the index begins with what a cluster of two nodes has embedded with the
demo's model, and takes what that cluster embeds while one of its nodes ends.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from importlib.resources import as_file, files
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import retrieval
from retrieval.client import Client, Retries
from retrieval.errors import ServerError, StoreError
from retrieval.serving.embedding.embedding import embed_sources
from retrieval.serving.store.place import store_place

pytest.importorskip("pymilvus", reason="the extra `milvus` is not installed")
# what Ray itself leaves open, and says of its next versions
pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
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


@dataclass
class Load:
    """Searches of one process, one after another, until it is stopped.

    Attributes:
        url: of the process.
        queries: images.
        answers: to each search: the place of the query, and what was found; or the status of the
            refusal.
        said: sentences of refusals.
    """

    url: str
    queries: list[Path]
    answers: list[tuple[int, list[str] | int]] = field(default_factory=list)
    message: set[str] = field(default_factory=set)
    stopped: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        with Client(self.url, retries=Retries(times=0)) as client:
            while not self.stopped.is_set():
                at = len(self.answers) % len(self.queries)
                try:
                    hits = client.search(self.queries[at], k=5, filter=CHOSEN)
                    self.answers.append((at, [hit.id for hit in hits.results]))
                except ServerError as fault:
                    self.answers.append((at, fault.status or 0))
                    self.message.add(str(fault))
                    time.sleep(0.05)


@contextmanager
def running(*loads: Load) -> Iterator[None]:
    threads = [threading.Thread(target=load.run) for load in loads]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        for load in loads:
            load.stopped.set()
        for thread in threads:
            thread.join()


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
    """Adds one image after another to a folder and the folder to an index: again, where that fails.

    Args:
        index: opened.
        folder: of the images that it has.
        more: images to come.
    """

    def __init__(self, index: Any, folder: Path, more: list[Path]) -> None:
        super().__init__()
        self.index, self.folder, self.more = index, folder, more
        self.kept: set[str] = set()  # ids that the index said it has
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


@pytest.fixture
def cluster() -> Iterator[SimpleNamespace | None]:
    """A cluster of Ray with two nodes, one of which `remove` ends at once; None where Ray is not
    installed.
    """
    if not (find_spec("ray") and find_spec("pyarrow")):
        yield None
        return
    import ray
    from ray.cluster_utils import Cluster

    store = {"object_store_memory": 100 * 2**20}
    started = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False, **store}
    )
    try:
        node = started.add_node(num_cpus=1, **store)
        yield SimpleNamespace(
            address=started.address, remove=lambda: started.remove_node(node, allow_graceful=False)
        )
    finally:
        if ray.is_initialized():
            ray.shutdown()
        started.shutdown()


@pytest.fixture
def model(cluster: SimpleNamespace | None, plain_bundle: Path, tmp_path: Path) -> Path:
    """The bundle that the index begins with: with Ray the demo's model, trained for two epochs;
    else one that was not trained.
    """
    if cluster is None:
        return plain_bundle
    with as_file(files("retrieval.cli") / "demo.toml") as recipe:
        run = retrieval.train(
            recipe, tmp_path / "run", overrides=["train.epochs=2"], progress=False
        )
    return run.export(tmp_path / "demo").path


def embed_on(cluster: SimpleNamespace, bundle: Path, folder: Path, output: Path) -> Path:
    """`retrieval embed --ray`; return the folder of vectors."""
    command = [
        sys.executable,
        "-m",
        "retrieval.cli",
        "embed",
        str(bundle),
        str(folder),
        "--output",
        str(output),
    ]
    subprocess.run([*command, "--part", "5", "--ray", cluster.address], check=True, timeout=200)
    return output


def embed_as_a_node_ends(
    cluster: SimpleNamespace, bundle: Path, folder: Path, output: Path
) -> Path:
    """The same, while one of its two nodes ends."""
    parts: list[int] = []

    def end(what: str, done: int, total: int) -> None:
        if what == "embedding":
            parts.append(done)
            if len(parts) == 3:
                cluster.remove()

    created = embed_sources(bundle, folder, output, ray=cluster.address, part=1, progress=end)
    assert created.items == created.parts == len(parts) > 3 and created.bad == 0
    return output


@dataclass
class Scene:
    """What the acts of the test have in common.

    Attributes:
        milvus: the server.
        index: in Milvus, opened.
        local: the same in a folder, opened.
        urls: of the processes that serve the index in Milvus.
        queries: images.
    """

    milvus: Any
    index: Any
    local: Any
    urls: list[str]
    queries: list[Path]

    def loads(self) -> list[Load]:
        return [Load(url, self.queries) for url in self.urls]

    def migrates(self, bundle: Path) -> None:
        """No search fails, and each finds what the one or the other generation has."""
        before = answers(self.local, self.queries)
        assert answers(self.index, self.queries) == before
        self.local.migrate(bundle, progress=False)
        after = answers(self.local, self.queries)
        assert before != after
        loads = self.loads()
        with running(*loads):
            until(lambda: all(len(load.answers) > 10 for load in loads))
            self.index.migrate(bundle, progress=False)
            done = [len(load.answers) for load in loads]
            until(
                lambda: all(
                    len(load.answers) > 20 + at for load, at in zip(loads, done, strict=True)
                )
            )
        for load, at in zip(loads, done, strict=True):
            assert all(hits in (before[query], after[query]) for query, hits in load.answers)
            assert all(hits == after[query] for query, hits in load.answers[at + 1 :])
        self.index.drop_old()

    def takes(self, source: Callable[[], Path]) -> None:
        """No search fails while a folder is made and added."""
        loads = self.loads()
        with running(*loads):
            self.index.add(source(), progress=False)
        assert all(isinstance(hits, list) for load in loads for _, hits in load.answers)

    def migrates_as_the_server_ends(self, bundle: Path, writer: Writer) -> None:
        """Searches and writes are refused meanwhile, and go on."""
        loads, ended = self.loads(), threading.Event()

        def end(what: str, done: int, total: int) -> None:
            if what == "embedding" and not ended.is_set():
                ended.set()
                writer.start()
                until(lambda: len(writer.kept) > 2)
                self.milvus.kill()
                for load in loads:
                    until(lambda load=load: load.answers[-1][1] == 503)  # type: ignore[misc]
                self.milvus.start()

        with running(*loads):
            self.index.migrate(bundle, progress=end)
            writer.join()
            until(lambda: all(isinstance(load.answers[-1][1], list) for load in loads))
        assert ended.is_set() and writer.refused
        for load in loads:
            assert {hits for _, hits in load.answers if isinstance(hits, int)} == {503}, (
                load.message
            )
            assert all(
                "The store of this index cannot be reached now." in entry for entry in load.message
            ), load.message

    def agrees(self) -> None:
        """The index, and whoever serves it, finds what the folder finds."""
        expected = answers(self.local, self.queries)
        assert answers(self.index, self.queries) == expected
        for url in self.urls:
            with Client(url) as client:
                hits = [client.search(query, k=5, filter=CHOSEN).results for query in self.queries]
            assert [[hit.id for hit in entry] for entry in hits] == expected


def recall(hits: list[list[str]], expected: list[list[str]]) -> float:
    """Return the share of what was expected that was found."""
    same = sum(len({*entry} & {*other}) for entry, other in zip(hits, expected, strict=True))
    return same / sum(map(len, expected))


def test_two_processes_serve_an_index_that_migrates_and_loses_its_server(
    milvus: Any,
    makers: Any,
    cluster: SimpleNamespace | None,
    model: Path,
    other_bundle: Path,
    tmp_path: Path,
) -> None:
    """No search fails while the index migrates; while the server is away they are told 503; no
    acknowledged item is lost; answers are those of a folder.

    Nor does a node of Ray that ends cost an item.
    """
    if not hasattr(milvus, "kill"):
        pytest.skip("the server of MILVUS_URI is not ours to end")
    images = makers.write_digits(tmp_path / "all", 60)
    folder, late = tmp_path / "digits", tmp_path / "late"
    copy(images[:40], folder)
    copy(images[46:], late)
    address = f"milvus://{milvus.place}/end_to_end"
    with ExitStack() as stack:
        stack.callback(store_place(address).drop)
        first = (
            folder if cluster is None else embed_on(cluster, model, folder, tmp_path / "vectors")
        )
        retrieval.Index.create(address, [first], model=model, progress=False)
        retrieval.Index.create(tmp_path / "local.index", [folder], model=model, progress=False)
        local = stack.enter_context(retrieval.Index.open(tmp_path / "local.index"))
        index = stack.enter_context(retrieval.Index.open(f"{address}?timeout={SECONDS}"))
        writing = stack.enter_context(retrieval.Index.open(f"{address}?timeout=2"))
        urls = [stack.enter_context(serving(f"{address}?timeout=2", tmp_path)) for _ in range(2)]
        scene = Scene(milvus, index, local, urls, images[40:46])

        scene.migrates(other_bundle)
        more = tmp_path / "more"
        scene.takes(
            lambda: (
                late if cluster is None else embed_as_a_node_ends(cluster, other_bundle, late, more)
            )
        )
        kept = {f"{image.parent.name}/{image.name}" for image in images[46:]}
        assert kept <= {item.id for item in index.store.scan()}
        writer = Writer(writing, folder, images[40:46])
        scene.migrates_as_the_server_ends(model, writer)
        ids = {item.id for item in index.store.scan()}
        assert writer.kept | kept <= ids and len(ids) == 60 == index.store.count()
        assert len(writer.kept | kept) == 20

        copy(images[46:], folder)
        local.add(folder, progress=False)
        local.migrate(model, progress=False)
        scene.agrees()
        if cluster is not None:
            expected = answers(local, scene.queries)
            assert recall(answers(index, scene.queries), expected) >= 0.99
