"""Search that learns from clicks on an index in an engine, by HTTP and by the commands."""

import hashlib
import subprocess
import sys
import time
from contextlib import contextmanager

import numpy as np
import pytest
from clicks import digits, pixel_bundle
from qdrant_memory import Memory
from retrieval.bundle.bundle import Bundle
from retrieval.client import Client
from retrieval.feedback.feedback_record import FeedbackRecord
from retrieval.index.index import Index
from retrieval.store.contract import Item, widths_of
from retrieval.store.find_store import store_place

from retrieval_server.server import serve
from retrieval_server.settings import Settings

COUNT = 600
LEARN = ("--learner", "feedback.low_rank", "--learner", "feedback.diagonal")


@pytest.fixture
def qdrant(monkeypatch):
    """The host and port of Qdrant's in-process mode, which needs none."""
    memory = Memory()
    monkeypatch.setattr("qdrant_client.QdrantClient", lambda **options: memory)
    return "qdrant://memory"


@pytest.fixture
def postgres(postgres_server):
    """A database of the server."""
    return "postgresql:///postgres"


@pytest.fixture(params=["qdrant", "postgres", pytest.param("milvus", marks=pytest.mark.engine)])
def address(request, tmp_path):
    """The address of an index of 600 digits in an engine."""
    host = request.getfixturevalue(request.param)
    if request.param == "milvus":
        host = f"milvus://{host.place}"
    address = f"{host}/t{hashlib.sha256(str(tmp_path).encode()).hexdigest()[:16]}"
    bundle = Bundle.open(pixel_bundle(tmp_path / "bundle"), device="cpu")
    store_place(address).create(bundle, widths_of(bundle)).close()
    x, _ = digits()
    with Index.open(address) as index:
        index.upsert([Item(str(n), arrays={"vector": row}) for n, row in enumerate(x[:COUNT])])
    yield address
    store_place(address).drop()


@contextmanager
def serving(address, file, explore):
    """Serve an index in a thread, and yield a client."""
    settings = Settings(workers=1, feedback=True, feedback_file=file, explore=explore)
    server = serve(address, port=0, settings=settings, wait=False)
    try:
        with Client(server.url) as client:
            yield client
    finally:
        server.close()


def click(client, count: int, seed: int) -> float:
    """Let 60 users search and click; return the share of hits that are as thick as the query."""
    _, thickness = digits()
    rng = np.random.default_rng(seed)
    right = 0
    for _ in range(count):
        user, query = f"u{rng.integers(60)}", int(rng.integers(COUNT))
        answer = client.search(id=str(query), k=10, user=user)
        liked = [hit.id for hit in answer.results if thickness[int(hit.id)] == thickness[query]]
        right += len(liked)
        if liked:
            assert client.feedback(answer.search_id, clicked=liked, user=user) == len(liked)
    return right / (10 * count)


def exact(address, row: int) -> list[str]:
    """Return the ten nearest other digits by the arrays that the index serves."""
    with Index.open(address) as index:
        items = index.get([str(n) for n in range(COUNT)], arrays=True)
        served = np.stack([items[str(n)].arrays["vector"] for n in range(COUNT)])
        adapter = index.bundle.manifest.adapter
        if adapter is not None:
            x = digits()[0][:COUNT]
            np.testing.assert_allclose(served, index.bundle.adapt(x).vector, atol=1e-5)
            np.testing.assert_allclose(
                np.stack([items[str(n)].arrays["base"] for n in range(COUNT)]), x, atol=1e-6
            )
    distances = np.linalg.norm(served - served[row], axis=1)
    return [str(n) for n in np.argsort(distances) if n != row][:10]


def test_an_index_in_an_engine_learns_switches_goes_back_and_forgets(address, tmp_path, cli):
    file = tmp_path / "feedback.sqlite"

    def learn() -> str:
        done = cli("learn", address, "--feedback-file", file, *LEARN)
        assert done.code == 0, done.err
        return done.out

    def served(client, row: int = 7) -> list[str]:
        return [hit.id for hit in client.search(id=str(row), k=10).results]

    with serving(address, file, 1.0) as client:
        before = click(client, 170, 0)
        assert "Trial 1, of feedback." in learn()
        time.sleep(2)  # the server looks for a trial once a second
        click(client, 250, 1)
        out = learn()
        assert "Trial 1, of feedback." in out and "switched" in out
        assert "The metric that is served is on trial against the model alone." in out

    # Without exploring, the server shows what it serves.
    with serving(address, file, 0.0) as client:
        assert click(client, 100, 2) > before + 0.1
        learned = exact(address, 7)
        assert served(client) == learned
        assert cli("index", "rollback", address).code == 0
        base = exact(address, 7)
        assert served(client) == base != learned
        assert "another model is served by now" in learn()
        assert cli("index", "rollback", address).code == 0
        assert served(client) == learned

        with FeedbackRecord.open(file) as record:
            teacher = min(record.trials()[0].voters)
        forget = cli("feedback", "forget", file, "--key", "", "--user", teacher.removeprefix("/"))
        assert forget.code == 0 and "metrics had learned from them" in forget.out
        assert "was forgotten" in learn()
        assert served(client) == exact(address, 7) == base


@pytest.mark.parametrize("address", ["postgres"], indirect=True)
def test_a_follower_outlives_an_outage_of_the_engine(address, postgres_server, tmp_path):
    file = tmp_path / "feedback.sqlite"
    FeedbackRecord.open(file, create=True).close()
    command = [sys.executable, "-m", "retrieval.cli", "learn", f"{address}?timeout=1"]
    command += ["--feedback-file", str(file), "--follow", "--every", "0.1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            waiting = process.stdout.readline()
            assert waiting == "Waiting for 150 more judged searches.\n"
            postgres_server.kill()
            sentence = process.stdout.readline()
            assert sentence.startswith("Postgres does not answer for postgresql:///postgres/")
            assert sentence.endswith("The worker goes on once that works again.\n")
            postgres_server.start()
            # The sentence changes while the server starts.
            while (sentence := process.stdout.readline()) != waiting:
                assert sentence.startswith("Postgres does not answer")
        finally:
            process.kill()


def test_an_index_in_an_engine_needs_a_file_for_its_feedback(address, cli):
    for words in (("learn", address), ("serve", address, "--feedback", "--port", "0")):
        done = cli(*words)
        assert done.code == 2 and "Traceback" not in done.err
        assert "is not in a folder" in done.err and "--feedback-file FILE" in done.err
