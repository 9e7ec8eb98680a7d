"""The routes of /v1 over real HTTP."""

from __future__ import annotations

import base64
import json
import shutil
from pathlib import Path
from urllib.parse import quote

import numpy as np
import pytest
import wire
from retrieval.serving.index.index import Index, create_index, open_index

WIDTH = 16


@pytest.fixture
def empty(bundle_path, tmp_path) -> Path:
    create_index(tmp_path / "i", bundle_path, progress=False)
    return tmp_path / "i"


@pytest.fixture
def living(index_path, tmp_path) -> Path:
    return Path(shutil.copytree(index_path, tmp_path / "i"))


def path_of(id: str, end: str = "") -> str:
    """Return an item's address; a client tidies dots away, so these two go behind the question
    mark.
    """
    if id in (".", ".."):
        return f"/v1/item{end}?id={id}"
    return f"/v1/items/{quote(id, safe='')}{end}"


def test_a_search_takes_an_image_in_three_ways_a_vector_or_an_id(shared, index_path, photos):
    server = shared(index_path)
    path = sorted(photos.rglob("*.png"))[5]
    image, key = path.read_bytes(), path.relative_to(photos).as_posix()
    form = server.client.post(
        "/v1/search", files={"image": image}, data={"k": "5", "filter": "label = '0'"}
    )
    raw = server.client.post(
        "/v1/search",
        params={"k": "5", "filter": '{"label": "0"}'},
        content=image,
        headers={"Content-Type": "image/png"},
    )
    vector = server.client.get(path_of(key), params={"vector": "true"}).json()["vector"]
    numbers = server.client.post(
        "/v1/search", json={"vector": vector, "k": 5, "filter": {"label": "0"}}
    )
    with open_index(index_path, threads=1) as index:
        expected = [hit.id for hit in index.search(path, 6, where="label = '0'")]
    assert expected[0] == key
    for answer in (form, raw, numbers):
        assert [hit["id"] for hit in answer.json()["results"]] == expected[:5], answer.text
    neighbours = server.client.post(
        "/v1/search", json={"id": key, "k": 5, "filter": {"label": "0"}}
    )
    assert [hit["id"] for hit in neighbours.json()["results"]] == expected[1:]
    wire.refused(server.client.post("/v1/search", json={"id": "nobody"}), 404, "no such item")
    wire.refused(
        server.client.post("/v1/search", json={"id": key, "vector": vector}), 400, "JSON must be"
    )
    wire.refused(server.client.post("/v1/search?k=1", files={"image": image}), 400, "query string")
    wrong = server.client.post(
        "/v1/search?kk=1", content=image, headers={"Content-Type": "image/png"}
    )
    wire.refused(wrong, 400, "no parameter 'kk'")


def test_explain_says_what_was_done_and_fields_what_is_told(served, empty):
    with Index.open(empty, threads=1) as index:
        from retrieval.serving.store.contract import Item

        vectors = np.eye(3, WIDTH, dtype=np.float32)
        index.upsert(
            [Item(f"i{n}", "x", {"a": n, "b": -n}, arrays={"vector": vectors[n]}) for n in range(3)]
        )
    server = served(empty)
    requests = {"vector": [1.0] * WIDTH, "explain": True, "fields": ["b", "none"], "candidates": 20}
    reply = server.client.post("/v1/search", json=requests).json()
    assert [hit["metadata"] for hit in reply["results"]] == [{"b": -n} for n in range(3)]
    stages, searched = reply["explain"]["stages_ms"], reply["explain"]["searched"]
    assert set(stages) >= {"read", "wait", "search"} and all(ms >= 0 for ms in stages.values())
    assert reply["took_ms"] > 0
    assert (
        searched["items"],
        searched["generation"],
        searched["rows"],
        searched["candidates"],
    ) == (3, 1, 3, 20)
    assert (
        server.client.post("/v1/search", json={**requests, "fields": []}).json()["results"][0][
            "metadata"
        ]
        == {}
    )


def test_a_batch_answers_as_its_searches_do(shared, index_path, photos):
    server = shared(index_path)
    paths = sorted(photos.rglob("*.png"))[:40:5]
    images = [("image", (path.name, path.read_bytes())) for path in paths]
    together = server.client.post("/v1/search/batch", files=images, data={"k": "3"}).json()[
        "answers"
    ]
    alone = [
        server.client.post("/v1/search", files=[image], data={"k": "3"}).json() for image in images
    ]
    assert [element["results"] for element in together] == [element["results"] for element in alone]
    key = together[0]["results"][0]["id"]
    mixed = [{"vector": [0.5] * WIDTH}, {"id": key}, {"vector": [-0.5] * WIDTH}]
    hits = server.client.post("/v1/search/batch", json={"queries": mixed, "k": 2}).json()["answers"]
    for element, fields in zip(hits, mixed, strict=True):
        single = server.client.post("/v1/search", json={**fields, "k": 2}).json()["results"]
        assert [hit["id"] for hit in element["results"]] == [hit["id"] for hit in single]
    for answer, status, says in (
        (server.client.post("/v1/search/batch", files=images * 13), 400, "100 at most"),
        (
            server.client.post("/v1/search/batch", json={"queries": mixed * 34}),
            400,
            "102 queries; 100 are the most",
        ),
        (server.client.post("/v1/search/batch", json={"queries": []}), 400, '"queries" must be'),
        (server.client.post("/v1/search/batch", json={"queries": [{}]}), 400, "JSON must be"),
        (
            server.client.post(
                "/v1/search/batch", json={"queries": [{"vector": [1]}, {"vector": [True]}]}
            ),
            400,
            'entry 1: "vector" must be a list',
        ),
        (
            server.client.post(
                "/v1/search/batch", json={"queries": [{"vector": [1]}, {"vector": [1, 2]}]}
            ),
            422,
            "same number",
        ),
        (
            server.client.post("/v1/search/batch", json={"queries": [{"id": key}, {"id": "no"}]}),
            404,
            "Query 2",
        ),
        (
            server.client.post(
                "/v1/search/batch", files=[images[0], ("image", ("x", b"no image"))]
            ),
            422,
            "Image 2",
        ),
    ):
        wire.refused(answer, status, says)


def test_many_items_come_together_or_not_at_all(served, empty, photos):
    server = served(empty, "--open", "admin")
    paths = sorted(photos.rglob("*.png"))[:12]
    images = [("image", (path.name, path.read_bytes())) for path in paths]
    named = [
        {"id": f"p{n}", "label": path.parent.name, "metadata": {"n": n}}
        for n, path in enumerate(paths)
    ]

    def add(items, files, **more):
        return server.client.post(
            "/v1/items", data={"items": json.dumps(items)}, files=files, **more
        )

    assert add(named, images).json() == {"added": 12, "replaced": 0}
    assert add(named[:5], images[:5]).json() == {"added": 0, "replaced": 5}
    broken = [*images[:3], ("image", ("x.png", images[3][1][1][:40]))]
    fresh = [{"id": f"q{n}"} for n in range(4)]
    wire.refused(add(fresh, broken), 422, "Image 4")
    vectors = [{"id": f"v{n}", "vector": [float(n)] * WIDTH} for n in range(3)]
    assert server.client.post("/v1/items", json={"items": vectors}).json() == {
        "added": 3,
        "replaced": 0,
    }
    relabelled = [{"id": "p0", "label": "other", "metadata": {"n": -1}}]
    assert server.client.post("/v1/items", json={"items": relabelled}).json() == {
        "added": 0,
        "replaced": 1,
    }
    item = server.client.get("/v1/items/p0").json()
    assert (item["label"], item["metadata"], item["keep"]) == ("other", {"n": -1}, "copy")
    assert server.client.get("/v1/items/p0/image").content == images[0][1][1]
    for answer, status, says in (
        (add(fresh[:3], images[:4]), 400, "each of the 4 images"),
        (add([fresh[0]] * 2, images[:2]), 400, "an id twice"),
        (add(fresh, []), 415, "multipart/form-data"),
        (
            server.client.post("/v1/items", files={"items": (None, "[]")}),
            400,
            'a file in its field "image"',
        ),
        (add([{"id": "x", "vector": [1.0] * WIDTH}], images[:1]), 400, "without vectors"),
        (add([{"id": ""}], images[:1]), 400, '"id" must be text'),
        (add([{"id": "x\0"}], images[:1]), 400, "NUL"),
        (
            server.client.post("/v1/items", json={"items": [{"id": f"w{n}"} for n in range(101)]}),
            400,
            "100 are the most",
        ),
        (
            server.client.post("/v1/items", json={"items": [{"id": "nobody", "label": "x"}]}),
            422,
            "no item 'nobody'",
        ),
        (
            server.client.post("/v1/items", json={"items": [{"id": "x", "vector": [1.0]}]}),
            422,
            "has 16 numbers, not 1",
        ),
        (
            server.client.post(
                "/v1/items",
                json={"items": [vectors[0] | {"id": "x"}, {"id": "y", "vector": [1e300] * WIDTH}]},
            ),
            422,
            "beyond float32",
        ),
    ):
        wire.refused(answer, status, says)
    assert server.client.get("/v1/index").json()["items"] == 15  # nothing of what was refused


def test_put_replaces_and_patch_changes_what_it_names(served, empty, photos):
    server = served(empty, "--open", "write")
    image = next(photos.rglob("*.png")).read_bytes()
    fields = {"label": "L", "metadata": json.dumps({"price": 1})}

    def now():
        item = server.client.get("/v1/items/a").json()
        return item["label"], item["metadata"], item["keep"]

    assert server.client.put("/v1/items/a", files={"image": image}, data=fields).status_code == 200
    for reply, expected in (
        ({"label": "M"}, ("M", {"price": 1}, "copy")),
        ({"metadata": {"x": 1}}, ("M", {"x": 1}, "copy")),
        ({}, ("M", {"x": 1}, "copy")),
        ({"label": None}, (None, {"x": 1}, "copy")),
        ({"label": "N", "metadata": {}}, ("N", {}, "copy")),
    ):
        changed = server.client.patch("/v1/items/a", json=reply)
        assert changed.json() == {"id": "a", "replaced": True}, changed.text
        assert now() == expected, reply
    many = {"items": [{"id": "a", "metadata": {"y": 2}}]}
    assert server.client.post("/v1/items", json=many).json() == {"added": 0, "replaced": 1}
    assert now() == ("N", {"y": 2}, "copy")
    for reply in ({"label": "M"}, {"metadata": {"x": 1}}, {}):  # the rest of the item would be lost
        wire.refused(server.client.put("/v1/items/a", json=reply), 400, '"vector" (needed)')
    assert (
        now() == ("N", {"y": 2}, "copy") and server.client.get("/v1/items/a/image").content == image
    )
    assert (
        server.client.put("/v1/items/a", json={"vector": [0.5] * WIDTH}).json()["replaced"] is True
    )
    assert now() == (None, {}, "nothing")
    wire.refused(server.client.patch("/v1/items/b", json={"label": "x"}), 422, "no item 'b'")
    wire.refused(
        server.client.patch("/v1/items/a", json={"vector": [0.5] * WIDTH}), 400, "JSON must be"
    )
    wire.refused(
        server.client.patch("/v1/items/a", files={"image": image}), 415, "application/json"
    )


def test_a_list_comes_in_pages_and_its_cursor_is_its_own(shared, index_path):
    server = shared(index_path)

    def pages(**reply):
        hits, cursor = [], None
        while True:
            page = server.client.get(
                "/v1/items", params={**reply, **({"cursor": cursor} if cursor else {})}
            ).json()
            hits += [item["id"] for item in page["items"]]
            cursor = page["cursor"]
            if cursor is None:
                return hits

    with open_index(index_path, threads=1) as index:
        everything = [item.id for item in index.scan(limit=1000)]
        sevens = [item.id for item in index.scan("label = '7'", limit=1000)]
    assert pages(limit=30) == pages() == everything and len(everything) == 200
    assert pages(limit=7, filter="label = '7'") == pages(filter='{"label": "7"}') == sevens
    cursor = server.client.get("/v1/items", params={"limit": 3}).json()["cursor"]
    forged = base64.urlsafe_b64encode(b'["' + b"[" * 5000 + b'", ""]').decode()
    for reply, status, says in (
        ({"cursor": cursor, "filter": "label = '7'"}, 400, "cursor"),
        *(
            ({"cursor": bad}, 400, "cursor")
            for bad in ("", "x", "é", "a" * 9000, forged, "W10=", "e30=", cursor[:-8])
        ),
        *(
            ({"limit": bad}, 400, "1 to 1000")
            for bad in ("0", "1001", "-1", "x", "9" * 20, "1.5", "²")
        ),
        ({"filter": "label ="}, 400, "filter"),
        ({"filter": "lable = '7'"}, 422, "No item of this index has a field 'lable'"),
        ({"filter": "{"}, 400, "not JSON"),
        ({"filter": "label = '3' or " * 900 + "label = '3'"}, 400, "filter"),
        ({"fields": ",".join(map(str, range(101)))}, 400, "100 names"),
        ({"fields": "[1]"}, 400, "100 names"),
        ({"offset": "3"}, 400, "no parameter 'offset'"),
    ):
        wire.refused(server.client.get("/v1/items", params=reply), status, says)
    wire.refused(server.client.get("/v1/items?limit=1&limit=2"), 400, "twice")


def test_deleting_by_filter_ids_or_all_and_never_by_accident(served, living):
    server = served(living, "--open", "admin")

    def delete(**reply):
        return server.client.post("/v1/delete", json=reply)

    sevens = server.client.get("/v1/items", params={"filter": "label = '7'", "limit": 1000}).json()[
        "items"
    ]
    assert delete(filter="label = '7'").json() == {"deleted": len(sevens)}
    ids = [
        item["id"] for item in server.client.get("/v1/items", params={"limit": 3}).json()["items"]
    ]
    assert delete(ids=[*ids, "nobody"]).json() == {"deleted": 3}
    for reply, status, says in (
        ({}, 400, "one of"),
        ({"filter": {}}, 400, "empty object"),
        ({"filter": ""}, 400, "filter"),
        ({"filter": None}, 400, "one of"),
        ({"ids": []}, 400, '"ids" must be'),
        ({"ids": ["x"] * 10_001}, 400, '"ids" must be'),
        ({"all": False}, 400, '"all" must be true'),
        ({"all": True, "ids": ["x"]}, 400, "one of"),
        ({"where": "label = '7'"}, 400, "one of"),
        ({"filter": "lable = '7'"}, 422, "field 'lable'"),
    ):
        wire.refused(delete(**reply), status, says)
    assert server.client.get("/v1/index").json()["items"] == 200 - len(sevens) - 3
    assert delete(all=True).json() == {"deleted": 200 - len(sevens) - 3}
    assert server.client.get("/v1/index").json()["items"] == 0


def test_a_server_is_read_only_unless_told_otherwise(shared, index_path):
    body = {"items": [{"id": "a", "vector": [1.0] * WIDTH}]}

    def writes(server):
        yield server.client.post("/v1/items", json=body)
        yield server.client.put("/v1/items/a", json={"vector": [1.0] * WIDTH})
        yield server.client.delete("/v1/items/a")
        yield server.client.post("/v1/delete", json={"all": True})
        yield server.client.post("/v1/snapshots")

    for answer in writes(shared(index_path)):
        wire.refused(answer, 403, "read-only")
    foreign = {"Origin": "http://evil.example", "Content-Type": "application/json"}
    answer = shared(index_path, "--open", "admin").client.post(
        "/v1/items", json=body, headers=foreign
    )
    wire.refused(answer, 403, "another site's page")


def test_snapshots_go_where_the_operator_says(served, living, tmp_path, cli):
    (tmp_path / "copies").mkdir()
    server = served(living, "--open", "admin", "--snapshots", str(tmp_path / "copies"))
    wire.refused(server.client.post("/v1/snapshots?name=../x"), 400, "query string")
    snapshots = [
        server.client.post("/v1/snapshots", json={"path": "/etc/x", "name": ".."}) for _ in range(2)
    ]
    names = [answer.json()["snapshot"] for answer in snapshots]
    assert [answer.status_code for answer in snapshots] == [201, 201] and len(set(names)) == 2
    assert sorted(
        path.name for path in (tmp_path / "copies").iterdir() if not path.name.startswith(".")
    ) == sorted(names)
    with open_index(tmp_path / "copies" / names[0], threads=1) as copy:
        assert len(copy) == 200
    wire.refused(served(living, "--open", "admin").client.post("/v1/snapshots"), 403, "--snapshots")
    none = cli("serve", living, "--snapshots", tmp_path / "none")
    assert none.code == 2 and "which --snapshots names" in none.err


def test_other_bodies_are_refused(served, empty):
    server = served(empty, "--open", "admin", "--max-bytes", "100000")
    deep = '{"items": [{"id": "x", "metadata": ' + '{"a":' * 100 + "1" + "}" * 100 + "}]}"
    nan = '{"items": [{"id": "x", "vector": [' + "NaN," * 15 + "NaN]}]}"
    large = '{"metadata": {"a": NaN}, "vector": [' + ",".join(["1"] * WIDTH) + "]}"
    for method, path, body, status in (
        ("POST", "/v1/items", deep, 400),
        ("POST", "/v1/items", nan, 400),
        ("POST", "/v1/items", '{"items": [], "items": []}', 400),
        ("POST", "/v1/items", "[" * 200_000, 400),
        ("PUT", "/v1/items/x", "{" * 2_400_000, 413),
        ("POST", "/v1/search", " " * 2_400_000, 413),
        ("POST", "/v1/search/batch", '{"queries": [{"vector": [1e999]}]}', 400),
        ("PUT", "/v1/items/x", large, 422),
        ("PUT", "/v1/items/x", '{"label": 5}', 400),
        ("PUT", "/v1/items/x", '{"metadata": []}', 400),
        ("PUT", "/v1/items/x", '{"path": "/etc/passwd"}', 400),
        ("PUT", f"/v1/items/{'x' * 1001}", "{}", 400),
        ("PUT", "/v1/items/%00", "{}", 400),
        ("PUT", "/v1/items/%ff%fe", "{}", 400),
        ("PUT", "/v1/item", "{}", 400),
        ("PUT", "/v1/item?id=", "{}", 400),
        (
            "PUT",
            "/v1/items/x",
            json.dumps({"vector": [1.0] * WIDTH, "metadata": {"a": "x" * 1_100_000}}),
            422,
        ),
        ("POST", "/v1/delete", "null", 400),
        ("POST", "/v1/delete", '{"filter": ' + '{"not":' * 60 + "1" + "}" * 61, 400),
    ):
        head = {"Content-Type": "application/json"}
        answer = server.client.request(method, path, content=body, headers=head)
        assert answer.status_code == status, (path[:40], body[:60], answer.text[:300])
        assert answer.json()["detail"].endswith("."), answer.text
    for path in ("/v1/items", "/v1/delete", "/v1/search/batch"):
        answer = server.client.post(path, content=b"x", headers={"Content-Type": "text/plain"})
        assert answer.status_code == 415
    assert server.client.get("/v1/index").json()["items"] == 0
    assert wire.ask(server.port, wire.get("/v1/items/..%2F..%2Fetc%2Fpasswd")).status == 404
