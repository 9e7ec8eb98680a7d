"""The routes of /v1 over real HTTP."""

import json
from urllib.parse import quote

import httpx
import numpy as np
import wire
from retrieval.index.index import Index, open_index
from retrieval.store.contract import Item

WIDTH = 16
PNG = {"Content-Type": "Image/PNG"}  # upper and lower case are the same
SEARCH, BATCH, ITEMS = "/v1/search", "/v1/search/batch", "/v1/items"


def ids(answer) -> list[str]:
    return [hit["id"] for hit in answer.json()["results"]]


def refuses(client, path: str, *cases, method="POST") -> None:
    """Send requests of `httpx`, and check the status and the sentence of each refusal."""
    for request, status, says in cases:
        wire.refused(client.request(method, path, **request), status, says)


def test_a_search_takes_a_form_an_image_a_vector_or_an_id(shared, index_path, photos):
    client = shared(index_path).client
    path = sorted(photos.rglob("*.png"))[5]
    image, key = path.read_bytes(), path.relative_to(photos).as_posix()
    vector = client.get(f"/v1/items/{quote(key, safe='')}?vector=true").json()["vector"]
    with open_index(index_path, threads=1) as index:
        expected = [hit.id for hit in index.search(path, 6, filter="label = '0'")]
    assert expected[0] == key
    for request in (
        {"files": {"image": image}, "data": {"k": "5", "filter": "label = '0'"}},
        {"params": {"k": "5", "filter": '{"label": "0"}'}, "content": image, "headers": PNG},
        {"json": {"vector": vector, "k": 5, "filter": {"label": "0"}}},
    ):
        answer = client.post(SEARCH, **request)
        assert ids(answer) == expected[:5], answer.text
    neighbours = client.post(SEARCH, json={"id": key, "k": 5, "filter": {"label": "0"}})
    assert ids(neighbours) == expected[1:]
    refuses(
        client,
        SEARCH,
        ({"json": {"id": "nobody"}}, 404, "no such item"),
        ({"json": {"id": key, "vector": vector}}, 400, "JSON must be"),
        ({"params": {"k": 1}, "files": {"image": image}}, 400, "query string"),
        ({"params": {"kk": 1}, "content": image, "headers": PNG}, 400, "no parameter 'kk'"),
    )


def test_explain_times_the_stages_and_fields_choose_the_metadata(served, empty):
    with Index.open(empty, threads=1) as index:
        vectors = np.eye(3, WIDTH, dtype=np.float32)
        index.upsert(
            [Item(f"i{n}", "x", {"a": n, "b": -n}, arrays={"vector": vectors[n]}) for n in range(3)]
        )
    client = served(empty).client
    request = {"vector": [1.0] * WIDTH, "explain": True, "fields": ["b", "none"], "candidates": 20}
    reply = client.post(SEARCH, json=request).json()
    assert [hit["metadata"] for hit in reply["results"]] == [{"b": -n} for n in range(3)]
    stages = reply["explain"]["stages_ms"]
    assert set(stages) >= {"read", "wait", "search"} and all(ms >= 0 for ms in stages.values())
    assert reply["took_ms"] > 0
    bare = client.post(SEARCH, json={**request, "fields": []}).json()
    assert bare["results"][0]["metadata"] == {}


def test_a_batch_gives_the_results_of_its_searches(shared, index_path, photos):
    client = shared(index_path).client
    paths = sorted(photos.rglob("*.png"))[:40:5]
    images = [("image", (path.name, path.read_bytes())) for path in paths]
    together = client.post(BATCH, files=images, data={"k": "3"}).json()["answers"]
    alone = [client.post(SEARCH, files=[image], data={"k": "3"}).json() for image in images]
    assert [answer["results"] for answer in together] == [answer["results"] for answer in alone]
    key = together[0]["results"][0]["id"]
    vectors = [{"vector": [n] * WIDTH} for n in (0.5, -0.5)]
    named = [{"id": key}, {"id": "3/0003.png"}]
    for queries in (vectors, named):
        answers = client.post(BATCH, json={"queries": queries, "k": 2}).json()["answers"]
        for answer, query in zip(answers, queries, strict=True):
            single = client.post(SEARCH, json={**query, "k": 2})
            assert [hit["id"] for hit in answer["results"]] == ids(single)
    refuses(
        client,
        BATCH,
        ({"files": images * 13}, 400, "100 at most"),
        ({"files": [images[0], ("image", ("x", b"no image"))]}, 422, "Image 2"),
        *(
            ({"json": {"queries": queries}}, status, says)
            for queries, status, says in (
                (vectors * 51, 400, "102 queries; the limit is 100"),
                ([vectors[0], named[0]], 400, "all vectors, all ids of items, or all texts"),
                ([], 400, '"queries" must be'),
                ([{}], 400, "JSON must be"),
                ([{"vector": [1]}, {"vector": [True]}], 400, 'entry 1: "vector" must be a list'),
                ([{"vector": [1]}, {"vector": [1, 2]}], 422, "same length"),
                ([{"id": key}, {"id": "no"}], 404, "Query 2"),
            )
        ),
    )


def test_several_items_are_added_together_or_not_at_all(served, empty, photos):
    client = served(empty, "--open", "admin").client
    paths = sorted(photos.rglob("*.png"))[:12]
    images = [("image", (path.name, path.read_bytes())) for path in paths]
    named = [
        {"id": f"p{n}", "label": path.parent.name, "metadata": {"n": n}}
        for n, path in enumerate(paths)
    ]

    def form(items, files):
        return {"data": {"items": json.dumps(items)}, "files": files}

    def plain(*items):
        return {"json": {"items": items}}

    def add(request):
        return client.post(ITEMS, **request).json()

    assert add(form(named, images)) == {"added": 12, "replaced": 0}
    assert add(form(named[:5], images[:5])) == {"added": 0, "replaced": 5}
    vectors = [{"id": f"v{n}", "vector": [float(n)] * WIDTH} for n in range(3)]
    assert add(plain(*vectors)) == {"added": 3, "replaced": 0}
    item = client.get("/v1/items/p0").json()
    assert (item["label"], item["metadata"], item["keep"]) == ("0", {"n": 0}, "copy")
    assert client.get("/v1/items/p0/image").content == images[0][1][1]
    broken = [*images[:3], ("image", ("x.png", images[3][1][1][:40]))]
    fresh = [{"id": f"q{n}"} for n in range(4)]
    huge = {"id": "y", "vector": [1e300] * WIDTH}
    refuses(
        client,
        ITEMS,
        (form(fresh, broken), 422, "Image 4"),
        (form(fresh[:3], images[:4]), 400, "each of the 4 images"),
        (form([fresh[0]] * 2, images[:2]), 400, "an id twice"),
        (form(fresh, []), 415, "multipart/form-data"),
        ({"files": {"items": (None, "[]")}}, 400, 'a file in its field "image"'),
        (form([vectors[0]], images[:1]), 400, '"label", "metadata", "id" (needed)'),
        (form([{"id": ""}], images[:1]), 400, '"id" must be text'),
        (form([{"id": "x\0"}], images[:1]), 400, "NUL"),
        (plain(*({**vectors[0], "id": f"w{n}"} for n in range(101))), 400, "the limit is 100"),
        (plain({"id": "p0", "label": "x"}), 400, '"vector" (needed)'),
        (plain({"id": "x", "vector": [1.0]}), 422, "has 16 numbers, not 1"),
        (plain(vectors[0] | {"id": "x"}, huge), 422, "beyond float32"),
    )
    assert client.get("/v1/index").json()["items"] == 15  # no refused request changed the index


def test_put_replaces_an_item_and_patch_changes_the_members_in_the_body(served, empty, photos):
    client = served(empty, "--open", "write").client
    image = next(photos.rglob("*.png")).read_bytes()
    fields = {"label": "L", "metadata": json.dumps({"price": 1})}
    a, vector = "/v1/items/a", {"vector": [0.5] * WIDTH}

    def put(number: int) -> httpx.Response:
        return client.put(a, json=vector | {"metadata": {"n": [number]}})

    def now() -> tuple:
        item = client.get(a).json()
        return item["label"], item["metadata"], item["keep"]

    assert client.put(a, files={"image": image}, data=fields).status_code == 200
    for reply, expected in (
        ({"label": "M"}, ("M", {"price": 1}, "copy")),
        ({"metadata": {"x": 1}}, ("M", {"price": 1, "x": 1}, "copy")),
        ({"metadata": {"price": None, "y": {"z": 1}}}, ("M", {"x": 1, "y": {"z": 1}}, "copy")),
        ({}, ("M", {"x": 1, "y": {"z": 1}}, "copy")),
        ({"metadata": {"y": {"z": None}}}, ("M", {"x": 1, "y": {}}, "copy")),
        ({"label": None, "metadata": {}}, (None, {"x": 1, "y": {}}, "copy")),
        ({"label": "N", "metadata": None}, ("N", {}, "copy")),
    ):
        merge = {"Content-Type": "application/merge-patch+json"}
        changed = client.patch(a, content=json.dumps(reply), headers=merge)
        assert changed.json() == {"id": "a", "replaced": True}, changed.text
        assert now() == expected, reply
    bare = ({"label": "M"}, {"metadata": {"x": 1}}, {})  # the rest of the item would be lost
    refuses(client, a, *(({"json": body}, 400, '"vector" (needed)') for body in bare), method="PUT")
    assert now() == ("N", {}, "copy") and client.get(f"{a}/image").content == image
    assert client.put(a, json=vector).json()["replaced"] is True
    assert now() == (None, {}, "nothing")
    wire.refused(client.patch("/v1/items/b", json={"label": "x"}), 404, "no such item")
    for id in ("%FF", "x" * 1001, "%00"):
        wire.refused(client.patch(f"/v1/items/{id}", json={"label": "x"}), 404, "no such item")
    wire.refused(client.patch(a, json=vector), 400, "JSON must be")
    for big in (2**63, 10**29 + 1, -(10**30)):  # a float would lose digits
        for reply in (client.patch(a, json={"metadata": {"n": big}}), put(big)):
            wire.refused(reply, 422, "64 bits")
    wire.refused(client.patch(a, files={"image": image}), 415, "application/json")


def test_items_are_listed_in_pages(shared, index_path):
    client = shared(index_path).client

    def pages(**reply):
        hits, cursor = [], {}
        while True:
            page = client.get(ITEMS, params={**reply, **cursor}).json()
            hits += [item["id"] for item in page["items"]]
            if page["cursor"] is None:
                return hits
            cursor = {"cursor": page["cursor"]}

    with open_index(index_path, threads=1) as index:
        everything = [item.id for item in index.scan(limit=1000)]
        sevens = [item.id for item in index.scan("label = '7'", limit=1000)]
    assert pages(limit=30) == pages() == everything and len(everything) == 200
    assert pages(limit=7, filter="label = '7'") == pages(filter='{"label": "7"}') == sevens
    for parameters, status, says in (
        *(({"cursor": bad}, 400, "cursor") for bad in ("", "x", "é", "a" * 9000, "gA==")),
        *(
            ({"limit": bad}, 400, "1 to 1000")
            for bad in ("0", "1001", "-1", "x", "9" * 5000, "1.5", "²")
        ),
        ({"limit": ["1", "2"]}, 400, "twice"),
        ({"filter": "label ="}, 400, "filter"),
        ({"filter": "lable = '7'"}, 422, "No item of this index has a field 'lable'"),
        ({"filter": "{"}, 400, "not JSON"),
        ({"filter": "label = '3' or " * 900 + "label = '3'"}, 400, "filter"),
        ({"fields": ",".join(map(str, range(101)))}, 400, "100 names"),
        ({"fields": "[1]"}, 400, "100 names"),
        ({"offset": "3"}, 400, "no parameter 'offset'"),
    ):
        wire.refused(client.get(ITEMS, params=parameters), status, says)


def test_items_are_deleted_by_filter_and_never_by_accident(served, living):
    client = served(living, "--open", "admin").client

    def delete(**reply):
        return client.post("/v1/delete", json=reply)

    def listed(**parameters):
        return [item["id"] for item in client.get(ITEMS, params=parameters).json()["items"]]

    sevens = listed(filter="label = '7'", limit=1000)
    assert delete(filter="label = '7'").json() == {"deleted": len(sevens)}
    assert delete(filter={"id": {"in": [*listed(limit=3), "nobody"]}}).json() == {"deleted": 3}
    for reply, status, says in (
        ({}, 400, 'object of "filter" (needed)'),
        ({"filter": {}}, 400, "empty object"),
        ({"filter": ""}, 400, "filter"),
        ({"filter": None}, 400, '"filter" must be'),
        ({"filter": "label = '1'", "where": "label = '7'"}, 400, "JSON must be"),
        ({"filter": "lable = '7'"}, 422, "field 'lable'"),
    ):
        wire.refused(delete(**reply), status, says)
    assert client.get("/v1/index").json()["items"] == 200 - len(sevens) - 3


def test_a_filter_that_can_never_match_is_refused(served, empty, cli):
    item = Item("a", metadata={"price": 3}, arrays={"vector": np.ones(WIDTH, np.float32)})
    with Index.open(empty) as index:
        index.upsert([item])
    text = "price = '3'"
    says = f"`{text}` can never match"
    for verb in ("list", "delete"):
        result = cli("index", verb, empty, "--filter", text)
        assert result.code == 2 and says in result.err
    client = served(empty, "--open", "admin").client
    wire.refused(client.post(SEARCH, json={"vector": [1] * WIDTH, "filter": text}), 422, says)
    wire.refused(client.get(ITEMS, params={"filter": text}), 422, says)
    wire.refused(client.post("/v1/delete", json={"filter": text}), 422, says)
    assert client.post("/v1/delete", json={"filter": "price = 4"}).json() == {"deleted": 0}


def test_a_server_is_read_only_by_default(shared, index_path):
    body = {"items": [{"id": "a", "vector": [1.0] * WIDTH}]}
    for method, path, content in (
        ("POST", ITEMS, body),
        ("PUT", "/v1/items/a", {"vector": [1.0] * WIDTH}),
        ("DELETE", "/v1/items/a", None),
        ("POST", "/v1/delete", {"filter": "label = '7'"}),
        ("POST", "/v1/snapshots", None),
    ):
        answer = shared(index_path).client.request(method, path, json=content)
        wire.refused(answer, 403, "read-only")
    foreign = {"json": body, "headers": {"Origin": "http://evil.example"}}
    admin = shared(index_path, "--open", "admin").client
    refuses(admin, ITEMS, (foreign, 403, "another site's page"))


def test_snapshots_are_written_into_the_operators_folder(served, living, tmp_path, cli):
    (tmp_path / "copies").mkdir()
    client = served(living, "--open", "admin", "--snapshots", str(tmp_path / "copies")).client
    refuses(client, "/v1/snapshots?name=../x", ({}, 400, "query string"))
    hostile = {"path": "/etc/x", "name": ".."}
    answers = [client.post("/v1/snapshots", json=hostile) for _ in range(2)]
    names = [answer.json()["snapshot"] for answer in answers]
    assert [answer.status_code for answer in answers] == [201, 201] and len(set(names)) == 2
    visible = (path.name for path in (tmp_path / "copies").iterdir() if path.name[0] != ".")
    assert sorted(visible) == sorted(names)
    with open_index(tmp_path / "copies" / names[0], threads=1) as copy:
        assert len(copy) == 200
    wire.refused(served(living, "--open", "admin").client.post("/v1/snapshots"), 403, "--snapshots")
    none = cli("serve", living, "--snapshots", tmp_path / "none")
    assert none.code == 2 and "which --snapshots names" in none.err


def test_invalid_bodies_and_ids_are_refused(served, empty):
    server = served(empty, "--open", "admin", "--max-bytes", "100000")
    client, head = server.client, {"Content-Type": "application/json"}
    deep = '{"items": [{"id": "x", "metadata": ' + '{"a":' * 100 + "1" + "}" * 100 + "}]}"
    no_json = '{"metadata": {"a": NaN}, "vector": [' + ",".join(["1"] * WIDTH) + "]}"
    large = json.dumps({"vector": [1.0] * WIDTH, "metadata": {"a": "x" * 1_100_000}})
    for method, path, body, status in (
        ("POST", ITEMS, deep, 400),
        ("PUT", "/v1/items/x", "{" * 2_400_000, 413),
        ("PUT", "/v1/items/x", no_json, 422),
        ("PUT", "/v1/items/x", '{"label": 5}', 400),
        ("PUT", "/v1/items/x", '{"metadata": []}', 400),
        ("PUT", "/v1/items/x", '{"path": "/etc/passwd"}', 400),
        ("PUT", f"/v1/items/{'x' * 1001}", "{}", 400),
        ("PUT", "/v1/items/%00", "{}", 400),
        ("PUT", "/v1/items/%ff%fe", "{}", 400),
        ("PUT", "/v1/item", "{}", 400),
        ("PUT", "/v1/item?id=", "{}", 400),
        ("PUT", "/v1/items/x", large, 422),
        ("POST", "/v1/delete", "null", 400),
        ("POST", "/v1/delete", '{"filter": ' + '{"not":' * 60 + "1" + "}" * 61, 400),
    ):
        answer = client.request(method, path, content=body, headers=head)
        assert answer.status_code == status, (path[:40], body[:60], answer.text[:300])
        assert answer.json()["detail"].endswith("."), answer.text
    for path in (ITEMS, "/v1/delete", BATCH):
        refuses(
            client, path, ({"content": b"x", "headers": {"Content-Type": "text/plain"}}, 415, "")
        )
    assert client.get("/v1/index").json()["items"] == 0
    assert wire.ask(server.port, wire.get("/v1/items/..%2F..%2Fetc%2Fpasswd")).status == 404
