import os
from types import SimpleNamespace

import makers
import pytest
from retrieval.bundle.bundle import Bundle
from retrieval.store.contract import widths_of
from retrieval.store.folder import create_local
from retrieval.store.local import LocalStore


@pytest.fixture(scope="session")
def plain_bundle(tmp_path_factory):
    """A bundle of images with vectors of 16 numbers and no rescorer. Tests must not change it."""
    return makers.make_bundle(tmp_path_factory.mktemp("bundle") / "bundle")


@pytest.fixture(scope="session")
def other_bundle(tmp_path_factory):
    """Another bundle with vectors of 16 numbers. Tests must not change it."""
    return makers.make_bundle(tmp_path_factory.mktemp("other") / "bundle", seed=1)


@pytest.fixture
def bundle(plain_bundle):
    return Bundle.open(plain_bundle, threads=1)


@pytest.fixture
def other(other_bundle):
    return Bundle.open(other_bundle, threads=1)


@pytest.fixture(scope="module")
def postgres_server():
    """A new server of Postgres, which libpq's variables name."""
    pytest.importorskip("psycopg", reason="the extra `postgres` is not installed")
    from postgres_server import PostgresServer

    server = PostgresServer()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in server.environment.items():
            patch.setenv(name, value)
        yield server
    server.stop()


@pytest.fixture
def index(tmp_path, bundle):
    """The folder of an empty index."""
    create_local(tmp_path / "i", bundle, widths_of(bundle))
    return tmp_path / "i"


@pytest.fixture
def store(index):
    """An empty store, without upkeep."""
    with LocalStore(index, upkeep=False) as opened:
        yield opened


@pytest.fixture(scope="session")
def milvus(tmp_path_factory):
    """The Milvus server of MILVUS_URI, or a new one; `place` is its host and port."""
    if uri := os.environ.get("MILVUS_URI"):
        yield SimpleNamespace(place=uri.rpartition("//")[2].rstrip("/"))
        return
    pytest.importorskip(
        "milvus", reason="the package `milvus`, which carries a server, is not installed"
    )
    from milvus_server import MilvusServer

    server = MilvusServer(tmp_path_factory.mktemp("milvus"))
    try:
        server.start()
        yield server
    finally:
        server.stop()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests that need a Milvus server."""
    for item in items:
        if "milvus" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.engine)
