"""One request changes the label or metadata of all items that match a filter."""

import json

import pytest
import wire
from retrieval.errors import DataError
from retrieval.index.index import Index

ITEMS = "/v1/items"


def content_of(index: Index) -> dict[str, tuple]:
    """Return the label, metadata, stamp and vector of each item."""
    items = index.get(list(index), arrays=True).values()
    return {
        item.id: (item.label, item.metadata, item.stamp, item.vector.tolist()) for item in items
    }


def test_matching_items_change_and_others_stay(served, living, tmp_path):
    audit = tmp_path / "audit.jsonl"
    client = served(living, "--open", "write", "--audit", str(audit)).client

    def patch(**body):
        answer = client.patch(ITEMS, json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    with Index.open(living, threads=1) as index:
        expected = content_of(index)
        sevens = [id for id, (label, *_) in expected.items() if label == "7"]
        assert sevens
        for body, label, metadata in (
            ({"metadata": {"price": 3, "at": {"hall": 1}}}, "7", {"price": 3, "at": {"hall": 1}}),
            ({"metadata": {"price": None, "at": {"row": 2}}}, "7", {"at": {"hall": 1, "row": 2}}),
            ({"label": "seven"}, "seven", {"at": {"hall": 1, "row": 2}}),
        ):
            assert patch(filter={"label": "7"}, **body) == {"changed": len(sevens)}
            expected |= {id: (label, metadata, *expected[id][2:]) for id in sevens}
            assert content_of(index) == expected
        assert patch(filter="label = '7'", label="x") == {"changed": 0}
        assert patch(filter="at.row = 2", label=None, metadata=None) == {"changed": len(sevens)}
        expected |= {id: (None, {}, *expected[id][2:]) for id in sevens}
        assert content_of(index) == expected
        vector = expected[sevens[0]][3]
    hit = client.post("/v1/search", json={"vector": vector, "k": 1}).json()["results"][0]
    assert (hit["id"], hit["label"], hit["metadata"]) == (sevens[0], None, {})
    begun, done = map(json.loads, audit.read_text().splitlines()[-2:])
    assert (begun["what"], begun["filter"]) == ("change", "at.row = 2")
    assert (done["outcome"], done["count"]) == ("done", len(sevens))


def test_a_refused_change_changes_nothing(served, shared, living, index_path):
    client = served(living, "--open", "write").client
    huge = {"a": "x" * 1_100_000}
    with Index.open(living, threads=1) as index:
        before = content_of(index)
        for body, status, says in (
            ({"label": "x"}, 400, '"filter" (needed)'),
            ({"filter": None, "label": "x"}, 400, '"filter" must be'),
            ({"filter": {}, "label": "x"}, 400, "empty object"),
            ({"filter": "label = '7'"}, 400, 'send a "label" or "metadata"'),
            ({"filter": "label = '7'", "label": 7}, 400, '"label" must be'),
            ({"filter": "label = '7'", "vector": [1]}, 400, "JSON must be"),
            ({"filter": "lable = '7'", "label": "x"}, 422, "field 'lable'"),
            ({"filter": "label = '7'", "metadata": huge}, 422, "bytes of label and metadata"),
            ({"filter": "label = '7'", "metadata": {"n": 2**63}}, 422, "64 bits"),
        ):
            wire.refused(client.patch(ITEMS, json=body), status, says)
        wire.refused(client.patch(f"{ITEMS}?filter=x", json={}), 400, "query string")
        assert content_of(index) == before
    body = {"filter": "label = '7'", "label": "x"}
    wire.refused(shared(index_path).client.patch(ITEMS, json=body), 403, "read-only")


def test_an_index_changes_items_by_id_or_filter(living):
    with Index.open(living, threads=1) as index:
        expected = content_of(index)
        first, second, *_ = expected
        assert index.update(first, label="one") == 1
        assert index.update([first, second, "nobody"], metadata={"n": 1, "m": 2}) == 2
        assert index.update(filter="n = 1 and label = 'one'", label=None, metadata={"m": None}) == 1
        expected[first] = (None, {"n": 1}, *expected[first][2:])
        expected[second] = (expected[second][0], {"n": 1, "m": 2}, *expected[second][2:])
        assert content_of(index) == expected
        assert index.update(filter="n = 1", metadata=None) == 2
        assert index[second].metadata == {}
        with pytest.raises(DataError, match="never"):
            index.update(filter="never = 1", label="x")
