"""Qdrant against every case of the contract of a store: in its in-process mode, and on a server where QDRANT_URL names one."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import retrieval
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from retrieval import stores, testing
from retrieval.serving.store.testing.bundles import opened

pytest.importorskip("qdrant_client", reason="the extra `qdrant` is not installed")
from retrieval_qdrant.place import QdrantLocalPlace, QdrantPlace


@pytest.fixture(scope="module")
def memory() -> Iterator[Path]:
    """A folder in memory, where that can be: the in-process mode waits for the disk once for every row."""
    shared = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shared if shared.is_dir() else None) as folder:
        yield Path(folder)


class TestQdrantLocal(testing.StoreSuite):
    """The in-process mode, which is Python throughout and takes milliseconds for an item: fewer items than of others."""

    many, kept, filtered, searched = 1000, 250, 120, 300
    folder: Path

    @pytest.fixture(autouse=True)
    def _memory(self, memory: Path) -> None:
        type(self).folder = memory

    def at(self, place: Path) -> QdrantLocalPlace:
        return QdrantLocalPlace(stores.Address.parse(f"qdrant_local://{self.folder}{place}/items"))


@pytest.mark.skipif("QDRANT_URL" not in os.environ, reason="QDRANT_URL names no server")
class TestQdrantServer(testing.StoreSuite):
    """A server."""

    def at(self, place: Path) -> QdrantPlace:
        host = os.environ["QDRANT_URL"].rpartition("//")[2].rstrip("/")
        name = hashlib.sha256(str(place).encode()).hexdigest()[:16]
        return QdrantPlace(stores.Address.parse(f"qdrant://{host}/{name}"))


@pytest.fixture
def index(tmp_path: Path) -> Iterator[stores.RemoteStore]:
    place = QdrantLocalPlace(stores.Address.parse(f"qdrant_local://{tmp_path}/items"))
    with place.create(opened(), stores.widths_of(opened())) as store:
        yield store


@settings(max_examples=10, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_filters_agree_with_the_language(index: stores.RemoteStore, agree: Any, data: st.DataObject) -> None:
    """Whatever is written in a filter means what the filter language says; what Qdrant cannot order is looked at item by item."""
    agree(index, data)


def test_one_process_opens_a_folder(index: stores.RemoteStore, process: Any) -> None:
    """Another one is told so, in a sentence."""
    told = process("-m", "retrieval.cli", "index", "list", index.address)
    assert told.code == 2 and "takes one" in told.err and "Traceback" not in told.err


def test_names_and_servers_that_are_not_there(cli: Any) -> None:
    for name in ("a~b", "a..b", "", ".a", "a%20b", "a" * 200):
        with pytest.raises(retrieval.StoreError, match="names no index"):
            QdrantPlace(stores.Address.parse(f"qdrant://host/{name}"))
    told = cli("index", "list", "qdrant://127.0.0.1:9/photos?timeout=1")
    assert told.code == 2 and "does not answer" in told.err and "Traceback" not in told.err
