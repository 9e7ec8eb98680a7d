"""The suite of stores on Milvus Lite, the newest Milvus that runs without a server."""

import hashlib
from pathlib import Path

import pytest
from retrieval.plugin import stores

from retrieval_engines import RemotePlace, testing

pytest.importorskip("milvus_lite", reason="the package `milvus-lite` is not installed")
pytest.importorskip("pymilvus", reason="the extra `milvus` is not installed")
from retrieval_engines.milvus.store import MilvusStore


class LitePlace(RemotePlace):
    """An index in a file; the process starts what reads it."""

    folder: Path

    def store(self):
        server = {"uri": f"{self.folder}/lite.db", "db_name": "default"}
        name = "t" + hashlib.sha256(self.address.path.encode()).hexdigest()[:16]
        return MilvusStore(server, str(self.address), name, 20.0)


@pytest.fixture(autouse=True, scope="module")
def _folder(tmp_path_factory):
    LitePlace.folder = tmp_path_factory.mktemp("lite")


class TestMilvusLite(testing.StoreSuite):
    """Milvus Lite returns a page's rows in the order in which they were written, not of their keys.

    So `many` items fit into one page.
    """

    many = 900

    @pytest.mark.skip("`not` leaves out items without the field: a comparison with null is unknown")
    def test_filters(self):
        """Milvus 2.3.5 passes this."""

    def store_at(self, place):
        return LitePlace(stores.Address.parse(f"milvus://lite/{place}"))
