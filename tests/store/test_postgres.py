"""The suite of stores on a real Postgres with pgvector, which is also killed."""

import hashlib

import pytest
from agreeing import agree
from hypothesis import HealthCheck, given, settings, strategies as st
from retrieval.plugin import stores

from retrieval_engines import testing
from retrieval_engines.testing.small_bundles import shared_bundle

pytest.importorskip("psycopg", reason="the extra `postgres` is not installed")
from retrieval_engines.postgres.place import PostgresPlace

SERVED = shared_bundle().sha256


@pytest.fixture(scope="session")
def server(tmp_path_factory):
    from postgres_server import PostgresServer

    server = PostgresServer(tmp_path_factory.mktemp("postgres"))
    with pytest.MonkeyPatch.context() as patch:
        for name, value in server.environment.items():
            patch.setenv(name, value)
        yield server
    server.stop()


pytestmark = pytest.mark.usefixtures("server")


def address(*words: object, options: str = "") -> stores.Address:
    """Return the address of an index whose name is a hash of `words`."""
    name = "t" + hashlib.sha256(repr(words).encode()).hexdigest()[:16]
    return stores.Address.parse(f"postgresql:///postgres/{name}{options}")


class TestPostgres(testing.StoreSuite):
    def store_at(self, place):
        return PostgresPlace(address(str(place)))


class TestPostgresGraph(testing.StoreSuite):
    recall = 0.7
    many = 2000

    def store_at(self, place):
        return PostgresPlace(address(str(place), "graph"), exact=False)


@pytest.fixture
def index(tmp_path):
    """An empty index."""
    place = PostgresPlace(address(str(tmp_path)))
    with place.create(shared_bundle(), stores.widths_of(shared_bundle())) as store:
        yield store
    place.drop()


@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_filters_agree_with_the_language(index, data):
    agree(index, data)
