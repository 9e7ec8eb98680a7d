"""Writes to Qdrant that are larger than one request."""

import hashlib
from typing import Any

import numpy as np
import pytest
from retrieval.plugin import stores
from retrieval.store.contract import Item

from retrieval_engines import RemotePlace
from retrieval_engines.testing.small_bundles import shared_bundle

pytest.importorskip("qdrant_client", reason="the extra `qdrant` is not installed")
from qdrant_client import QdrantClient

from retrieval_engines.qdrant.store import BATCH_BYTES, QdrantStore

pytestmark = pytest.mark.scale

COUNT = 1200
WIDTH = 2048


class Memory(RemotePlace):
    """An index in Qdrant's in-process mode."""

    client: Any = QdrantClient(":memory:")

    def store(self):
        name = hashlib.sha256(self.address.path.encode()).hexdigest()[:16]
        return QdrantStore(self.client, str(self.address), name, exact=False)


def test_a_write_of_several_requests():
    assert COUNT * WIDTH * 4 > BATCH_BYTES
    bundle = shared_bundle(width=WIDTH)
    vectors = np.random.default_rng(0).integers(-9, 10, (COUNT, WIDTH)).astype(np.float32)
    items = [
        Item(f"{row:04}", None, {"number": row}, arrays={"vector": vectors[row]})
        for row in range(COUNT)
    ]
    place = Memory(stores.Address.parse("memory://scale"))
    with place.create(bundle, stores.widths_of(bundle)) as store:
        store.upsert(items, bundle.sha256)
        assert store.count() == COUNT
        hits = store.search(vectors[[0, 700]], 5, bundle.sha256)
        for row, group in zip((0, 700), hits, strict=True):
            squared = np.square(vectors - vectors[row]).sum(axis=1)
            assert {f"{near:04}" for near in squared.argsort()[:5]} == {item.id for item in group}
