"""Several indexes behind one server: their names, addresses and answers."""

from __future__ import annotations

from pathlib import Path

import pytest
import wire
from retrieval.serving.index.index import create_index

WIDTH = 16


@pytest.fixture
def living(bundle_path, photos, tmp_path) -> Path:
    create_index(tmp_path / "i", bundle_path, [photos], progress=False)
    return tmp_path / "i"


def test_several_indexes_behind_one_server(served, living, makers, photos, tmp_path):
    other = makers.make_bundle(tmp_path / "b", seed=3)
    create_index(tmp_path / "frozen.index", other, [photos / "1"], progress=False)
    create_index(tmp_path / "j", other, progress=False)
    server = served(
        living,
        str(tmp_path / "frozen.index"),
        f"third={tmp_path / 'j'}",
        "--open",
        "admin",
        "--images",
        str(photos),
    )
    assert server.client.get("/v1/indexes").json() == {"indexes": ["frozen", "i", "third"]}
    missing = server.client.post("/v1/search", json={"vector": [0.5] * WIDTH})
    wire.refused(missing, 404, "several indexes")
    assert missing.json()["indexes"] == ["frozen", "i", "third"]
    wire.refused(server.client.get("/v1/indexes/none/index"), 404, "no index of this name")
    wire.refused(server.client.get("/v1/indexes/..%2Fi/index"), 404, "")
    content = {
        name: server.client.get(f"/v1/indexes/{name}/index").json()
        for name in ("frozen", "i", "third")
    }
    assert [entry["format"] for entry in content.values()] == [3, 3, 3] and content["i"][
        "items"
    ] == 200
    image = next(photos.rglob("*.png")).read_bytes()
    for name, entry in content.items():
        answer = server.client.post(f"/v1/indexes/{name}/search", files={"image": image}).json()[
            "results"
        ]
        assert len(answer) == min(10, entry["items"])
        for hit in answer[:1]:
            assert hit["image_url"].startswith(f"/v1/indexes/{name}/items/")
            assert server.client.get(hit["image_url"]).status_code == 200
    put = server.client.put("/v1/indexes/third/items/a%2Fb", files={"image": image})
    assert (
        put.status_code == 200
        and server.client.get("/v1/indexes/third/items/a%2Fb").json()["id"] == "a/b"
    )
    wire.refused(server.client.get("/v1/indexes/i/items/a%2Fb"), 404, "no such item")
    ready = server.client.get("/readyz").json()
    assert {name: entry["items"] for name, entry in ready["indexes"].items()} == {
        name: entry["items"] for name, entry in content.items()
    }
    metrics = server.client.get("/metrics").text
    assert 'retrieval_index_items{index="i"} 200.0' in metrics


def test_names_of_indexes(tmp_path):
    from retrieval.errors import StoreError
    from retrieval.serving.http.server import named

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
