"""Several indexes behind one server: their names, addresses and answers."""

import pytest
import wire
from retrieval.errors import StoreError
from retrieval.index.index import create_index
from retrieval.store.folder import INDEX_FORMAT

from retrieval_server.server import named

WIDTH = 16


def test_several_indexes_behind_one_server(served, living, makers, photos, tmp_path):
    other, names = makers.make_bundle(tmp_path / "b", seed=3), ["frozen", "i", "third"]
    create_index(tmp_path / "frozen.index", other, [photos / "1"], progress=False)
    create_index(tmp_path / "j", other, progress=False)
    places = (str(tmp_path / "frozen.index"), f"third={tmp_path / 'j'}")
    client = served(living, *places, "--open", "admin", "--images", str(photos)).client
    assert client.get("/v1/indexes").json() == {"indexes": names}
    missing = client.post("/v1/search", json={"vector": [0.5] * WIDTH})
    wire.refused(missing, 404, "several indexes")
    assert missing.json()["indexes"] == names
    wire.refused(client.get("/v1/indexes/none/index"), 404, "no index with this name")
    wire.refused(client.get("/v1/indexes/..%2Fi/index"), 404, "")
    content = {name: client.get(f"/v1/indexes/{name}/index").json() for name in names}
    items = {name: entry["items"] for name, entry in content.items()}
    assert [entry["format"] for entry in content.values()] == [INDEX_FORMAT] * 3 and items[
        "i"
    ] == 200
    image = {"image": next(photos.rglob("*.png")).read_bytes()}
    for name, count in items.items():
        hits = client.post(f"/v1/indexes/{name}/search", files=image).json()["results"]
        assert len(hits) == min(10, count)
        for hit in hits[:1]:
            assert hit["image_url"].startswith(f"/v1/indexes/{name}/items/")
            assert client.get(hit["image_url"]).status_code == 200
    third = "/v1/indexes/third/items/a%2Fb"
    assert client.put(third, files=image).status_code == 200
    assert client.get(third).json()["id"] == "a/b"
    wire.refused(client.get("/v1/indexes/i/items/a%2Fb"), 404, "no such item")
    ready = client.get("/readyz").json()["indexes"]
    assert {name: entry["items"] for name, entry in ready.items()} == items
    assert 'retrieval_index_items{index="i"} 200.0' in client.get("/metrics").text


def test_names_of_indexes(tmp_path):
    assert named(["a/photos.index", "b=c/photos.index", "/x/ü"]) == {
        "photos": "a/photos.index",
        "b": "c/photos.index",
        "index": "/x/ü",
    }
    (tmp_path / "a=b").mkdir()
    assert named([str(tmp_path / "a=b")]) == {"index": str(tmp_path / "a=b")}
    for texts, says in (
        (["a/x", "b/x"], "Two indexes are called 'x'"),
        (["=x"], "cannot be called"),
        (["ü=x"], "cannot be called"),
        (["x" * 101 + "=y"], "cannot be called"),
    ):
        with pytest.raises(StoreError, match=says):
            named(texts)
