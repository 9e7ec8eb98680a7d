"""The local store against brute force, through what a user has in hand: an opened index."""

import json
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from retrieval.errors import StoreError
from retrieval.serving.bundle import Bundle
from retrieval.serving.index.index import open_index
from retrieval.serving.store.contract import Item, widths_of
from retrieval.serving.store.folder import create_local
from retrieval.serving.store.view import View
from stored import VECTORS, items


@pytest.fixture
def living(tmp_path, plain_bundle):
    bundle = Bundle.open(plain_bundle, threads=1)
    create_local(tmp_path / "i", bundle, widths_of(bundle))
    with open_index(tmp_path / "i", threads=1) as index:
        yield index


def test_a_field_stays_known_when_its_last_item_goes(living):
    """A filter that was good yesterday finds nothing today; it does not become an error."""
    living.upsert([*items([1]), Item("sale", None, {"discount": 5}, arrays={"vector": VECTORS[2]})])
    assert [hit.id for hit in living.search(VECTORS[0], 5, where="discount > 1")] == ["sale"]
    living.delete("sale")
    for _ in range(2):
        assert living.search(VECTORS[0], 5, where="discount > 1") == []
        assert living.scan("discount > 1") == [] and living.count("not exists(discount)") == 1
        assert living.delete(where="discount > 1") == 0
        living.store.compact()


def test_closing_waits_for_the_search_that_runs(living, monkeypatch):
    living.upsert(items(range(50)))
    reader = open_index(living.path, threads=1)  # one that writes waits for its log, too
    running, go = threading.Event(), threading.Event()
    search = View.search

    def slow(*arguments):
        running.set()
        assert go.wait(30)
        return search(*arguments)

    monkeypatch.setattr(View, "search", slow)
    with ThreadPoolExecutor(2) as pool:
        answer = pool.submit(reader.search, VECTORS[3], 1)
        assert running.wait(30)
        closed = pool.submit(reader.close)
        with pytest.raises(TimeoutError):
            closed.result(0.2)
        go.set()
        assert [hit.id for hit in answer.result(30)] == ["id3"]
        closed.result(30)
    with pytest.raises(StoreError, match="closed"):
        reader.search(VECTORS[3], 1)


def test_an_index_of_a_newer_format_says_which_version_reads_it(living, tmp_path):
    living.close()
    file = tmp_path / "i" / "index.json"
    message = json.loads(file.read_text())
    file.write_text(json.dumps({**message, "format": message["format"] + 1, "version": "7.8.9"}))
    says = r"has format 6, which retrieval 7\.8\.9 wrote; .* reads format 5"
    with pytest.raises(StoreError, match=says):
        open_index(tmp_path / "i")
    file.write_text(json.dumps({**message, "format": 4}))
    with pytest.raises(StoreError, match=r"index\.json has format 4"):
        open_index(tmp_path / "i")
    file.write_text(json.dumps({"format": message["format"], "hd": message["id"]}))
    with pytest.raises(StoreError, match=r"index\.json is damaged: it has no 'id'"):
        open_index(tmp_path / "i")
