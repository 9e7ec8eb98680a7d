"""A folder that is removed, or replaced by another index, while a server has it open."""

from __future__ import annotations

import asyncio
import shutil
import threading
from pathlib import Path

import httpx
import numpy as np
import pytest
import wire
from retrieval.errors import StoreError
from retrieval.serving.http.models import Options, Query, QueryInput
from retrieval.serving.http.served import Served
from retrieval.serving.http.settings import Settings
from retrieval.serving.http.turns import Workers
from retrieval.serving.index.index import Index, create_index
from retrieval.serving.store.contract import Item

WIDTH = 16


@pytest.fixture
def living(bundle_path: Path, photos: Path, tmp_path: Path) -> Path:
    create_index(tmp_path / "i", bundle_path, [photos], progress=False)
    return tmp_path / "i"


def test_a_folder_that_is_removed_ends_readiness(living, served):
    server = served(living)
    shutil.rmtree(living)
    wire.until(lambda: wire.not_ready(server))
    wire.until(lambda: "Start the server again" in (wire.not_ready(server) or ""))
    assert str(living) not in wire.not_ready(server)


def test_a_folder_that_is_replaced_is_taken_up_without_a_failed_request(
    makers, living, bundle_path, photos, served, tmp_path
):
    """Also one with another bundle, and back again, under searches and after a write."""
    other = makers.make_bundle(tmp_path / "other", seed=7)
    server = served(living, "--open", "admin", "--workers", "2")
    image = next(photos.rglob("*.png")).read_bytes()
    statuses, failed, stop = [], [], threading.Event()

    def search():
        with httpx.Client(base_url=server.url, timeout=30) as client:
            while not stop.is_set():
                for asked in ({"files": {"image": image}}, {"json": {"vector": [0.5] * WIDTH}}):
                    answer = client.post("/v1/search", **asked)
                    statuses.append(answer.status_code)
                    if answer.status_code != 200:
                        failed.append(answer.text)

    threads = [threading.Thread(target=search) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for turn, bundle in enumerate((bundle_path, other, bundle_path)):
            create_index(living, bundle, [photos / str(turn)], replace=True, progress=False)
            count = len(list((photos / str(turn)).iterdir()))
            wire.until(lambda count=count: server.client.get("/v1/index").json()["items"] == count)
        new = {"vector": [0.5] * WIDTH}
        assert server.client.put("/v1/items/new", json=new).status_code == 200
    finally:
        stop.set()
        for thread in threads:
            thread.join(30)
    assert failed == [] and set(statuses) == {200} and len(statuses) > 10
    with Index.open(living, threads=1) as index:
        assert index.get("new")
    assert server.client.get("/readyz").status_code == 200


def test_a_store_whose_folder_was_replaced_writes_nothing(living, bundle_path, photos):
    """Otherwise the write would go to a folder that is gone, and be acknowledged."""
    item = Item("new", arrays={"vector": np.ones(WIDTH, np.float32)})
    with Index.open(living, threads=1) as index:
        assert len(index) == 200
        create_index(living, bundle_path, [photos / "1"], replace=True, progress=False)
        with pytest.raises(StoreError, match="replaced or removed"):
            index.upsert([item])
    with Index.open(living, threads=1) as index:
        index.upsert([item])
        assert index.get("new")


@pytest.mark.parametrize("does", ["search", "read"])
def test_who_fails_once_another_has_taken_up_the_new_folder_is_answered(
    does, living, bundle_path, photos, monkeypatch
):
    """Two requests meet the old folder at a time; the second to notice finds the new one served
    already.
    """
    count = len(list((photos / "1").iterdir()))
    old = Index.open(living, threads=1)
    create_index(living, bundle_path, [photos / "1"], replace=True, progress=False)
    workers = Workers(Settings())
    searcher = Served("i", old, Settings(), workers, reopen=lambda: Index.open(living, threads=1))

    def late(*given, **more):
        assert searcher.take_up() is None  # as the other request does
        raise StoreError("The folder was replaced or removed.")

    monkeypatch.setattr(old, "search", late)
    try:
        if does == "search":
            query = Query((QueryInput(vector=np.full(WIDTH, 0.5)),), Options(k=100), None)
            found = asyncio.run(searcher.search(query, lambda hits, index: b"%d" % len(hits[0])))
            assert found == b"%d" % count
        else:
            assert (
                asyncio.run(searcher.read(lambda index: late() if index is old else len(index)))
                == count
            )
        assert searcher.index is not old
    finally:
        searcher.index.close()
        workers.close()
