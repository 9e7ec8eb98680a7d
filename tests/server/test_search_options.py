"""Each option of a search, and identify, give over HTTP what Python gives on the same index."""

import json
import shutil
from pathlib import Path

import httpx
import numpy as np
import pytest
import wire
from retrieval.client import Client
from retrieval.errors import DataError
from retrieval.index.index import Index, open_index

SEARCH, BATCH, IDENTIFY = "/v1/search", "/v1/search/batch", "/v1/identify"
PNG = {"Content-Type": "image/png"}


@pytest.fixture(scope="module")
def path(index_path, tmp_path_factory):
    """A calibrated index of 200 digits with metadata. Not to be changed."""
    folder = Path(shutil.copytree(index_path, tmp_path_factory.mktemp("calibrated") / "i"))
    with Index.open(folder, threads=1) as index:
        for number in range(7):
            ids = list(index)[number::7]
            price = {} if number == 6 else {"price": 10 - number if number else "free"}
            index.update(ids, metadata={**price, "at": {"hall": number % 2}, "tags": [number, "a"]})
        index.calibrate(progress=False)
    return folder


@pytest.fixture(scope="module")
def index(path):
    with open_index(path, threads=1) as opened:
        yield opened


@pytest.fixture(scope="module")
def server(shared, path):
    return shared(path)


@pytest.fixture(scope="module")
def client(server):
    return server.client


@pytest.fixture(scope="module")
def pictures(photos):
    return sorted(photos.rglob("*.png"))


def agree(answer: httpx.Response | dict, hits, facets: bool = False) -> None:
    """Assert that an answer has these hits."""
    if isinstance(answer, httpx.Response):
        assert answer.status_code == 200, answer.text
        answer = answer.json()
    results = answer["results"]
    assert [hit["id"] for hit in results] == [hit.id for hit in hits]
    assert [hit["label"] for hit in results] == [hit.label for hit in hits]
    assert [hit["metadata"] for hit in results] == [hit.metadata for hit in hits]
    distances = [hit["distance"] for hit in results]
    np.testing.assert_allclose(distances, [hit.distance for hit in hits], atol=1e-5)
    assert [hit["score"] for hit in results] == [hit.score for hit in hits]
    assert ("facets" in answer) == facets
    if facets:
        expected = {
            name: [{"value": value, "count": count} for value, count in counts]
            for name, counts in hits.facets.items()
        }
        assert answer["facets"] == expected


OPTIONS = (
    {"group_by": "label"},
    {"group_by": "at.hall", "group_size": 3},
    {"max_distance": 0.9},
    {"offset": 5},
    {"offset": 190, "k": 20},
    {"diversity": 0.5},
    {"facets": ["label", "price", "tags"]},
    {"order_by": "price"},
    {"order_by": "-price", "filter": "at.hall = 0"},
    {"scores": True},
    {"like": ["3/0003.png", "5/0005.png"]},
    {"like": ["3/0003.png"], "dislike": ["0/0000.png"]},
    {
        **{"group_by": "label", "group_size": 2, "offset": 1, "facets": ["label"], "scores": True},
        **{"order_by": "id", "max_distance": 3.0, "diversity": 0.2, "like": ["1/0001.png"]},
    },
)


def texts(options: dict) -> dict:
    """Return options as the fields of a form or the parameters of a URL."""
    return {
        name: json.dumps(value) if not isinstance(value, str) else value
        for name, value in options.items()
    }


@pytest.mark.parametrize("options", OPTIONS, ids=" ".join)
def test_each_option_answers_as_python_does(client, index, pictures, options):
    options = {"k": 6, **options}
    picture = pictures[30]
    image = picture.read_bytes()
    facets = "facets" in options
    expected = index.search(picture, **options)
    assert expected
    agree(client.post(SEARCH, files={"image": image}, data=texts(options)), expected, facets)
    agree(client.post(SEARCH, params=texts(options), content=image, headers=PNG), expected, facets)
    vector = index.bundle.encode_image(image).vector[0]
    expected = index.search(vector, **options)
    agree(client.post(SEARCH, json={"vector": vector.tolist(), **options}), expected, facets)
    # Python finds the neighbours of an item by `like`.
    id = "4/0014.png"
    liked = {**options, "like": [id, *options.get("like", [])]}
    expected = index.search(None, **liked)
    agree(client.post(SEARCH, json={"id": id, **options}), expected, facets)
    agree(client.post(SEARCH, json=liked), expected, facets)


@pytest.mark.parametrize("options", OPTIONS[:10], ids=" ".join)
def test_a_batch_answers_as_its_searches_do(client, index, pictures, options):
    images = [path.read_bytes() for path in pictures[:60:20]]
    files = [("image", image) for image in images]
    vectors = [index.bundle.encode_image(image).vector[0].tolist() for image in images]
    requests = (
        ({"files": files, "data": texts(options)}, [{"vector": vector} for vector in vectors]),
        *(
            ({"json": {"queries": queries, **options}}, queries)
            for queries in (
                [{"vector": vector} for vector in vectors],
                [{"id": "4/0014.png"}, {"id": "3/0003.png"}],
            )
        ),
    )
    for request, queries in requests:
        answer = client.post(BATCH, **request)
        assert answer.status_code == 200, answer.text
        for result, query in zip(answer.json()["answers"], queries, strict=True):
            alone = client.post(SEARCH, json={**query, **options}).json()
            assert result.keys() == alone.keys() - {"bundle", "took_ms"}
            assert [hit["id"] for hit in result["results"]] == [
                hit["id"] for hit in alone["results"]
            ]


def test_pictures_to_like_come_in_a_form(client, index, pictures):
    query, first, second, third = (path.read_bytes() for path in pictures[:80:20])
    like, dislike = ("like", first), ("dislike", third)
    for files, data, expected in (
        (
            [("image", query), like, ("like", second), dislike],
            {"k": "7"},
            index.search(pictures[0], 7, like=[pictures[20], pictures[40]], dislike=[pictures[60]]),
        ),
        ([like], {}, index.search(like=[pictures[20]])),
        (
            [like, dislike],
            {"like": '["3/0003.png"]', "dislike": "0/0000.png", "group_by": "label"},
            index.search(
                like=["3/0003.png", pictures[20]],
                dislike=["0/0000.png", pictures[60]],
                group_by="label",
            ),
        ),
        ([("image", query), dislike], {}, index.search(pictures[0], dislike=pictures[60])),
    ):
        agree(client.post(SEARCH, files=files, data=data), expected)
    refusals = (
        ([dislike], {}, 400, 'needs a file in its field "image"'),
        ([like] * 100, {}, 400, "at most 99 to like or dislike"),
        ([("image", query)] * 2, {}, 400, "send one"),
        ([("image", query), ("like", b"no image")], {}, 422, "Image 2"),
        ([like], {"like": "[1]"}, 400, '"like" must be a list'),
        ([like], {"like": "["}, 400, "A list of ids is not JSON"),
        ([("other", query)], {}, 400, "takes no other file"),
    )
    for files, data, status, says in refusals:
        wire.refused(client.post(SEARCH, files=files, data=data), status, says)
    wire.refused(client.post(BATCH, files=[("image", query), like]), 400, "no other file")


def test_text_to_like_is_never_a_path(client, pictures):
    for like in (str(pictures[0]), "/etc/passwd", "nobody", "\u0000"):
        for name in ("like", "dislike"):
            body = {"id": "3/0003.png", "like": ["3/0003.png"], name: [like]}
            wire.refused(client.post(SEARCH, json=body), 404, "to like or dislike")


def test_an_option_has_its_bounds(client):
    id = "3/0003.png"
    for options, says in (
        ({"like": [id] * 101}, "at most 100 ids"),
        ({"like": [""]}, '"like" must be'),
        ({"like": id}, '"like" must be'),
        ({"group_by": 3}, '"group_by" must be'),
        ({"group_by": "a..b"}, "is not a field"),
        ({"group_by": "a." * 600}, '"group_by" must be'),
        ({"group_by": "label", "group_size": 0}, "from 1 to 100"),
        ({"group_by": "label", "group_size": 101}, "from 1 to 100"),
        ({"group_size": 2}, "needs group_by"),
        ({"group_by": "label", "group_size": 11, "k": 100}, "at most 1,000"),
        ({"group_by": "label", "group_size": 11, "offset": 1000}, "at most 10,000"),
        ({"max_distance": -1}, "a number from 0"),
        ({"max_distance": "1"}, "a number from 0"),
        ({"offset": 10_001}, "0 to 10000"),
        ({"offset": 1.5}, "0 to 10000"),
        ({"diversity": 1.1}, "from 0 to 1"),
        ({"facets": ["label"] * 11}, "at most 10 fields"),
        ({"facets": [""]}, "is not a field"),
        ({"order_by": "-"}, "is not a field"),
        ({"scores": 1}, "true or false"),
    ):
        wire.refused(client.post(SEARCH, json={"id": id, **options}), 400, says)
        if "like" not in options:
            batch = {"queries": [{"id": id}], **options}
            wire.refused(client.post(BATCH, json=batch), 400, says)
    for text in (b"NaN", b"Infinity", b"1e999"):
        for name in (b"max_distance", b"diversity"):
            body = b'{"id": "3/0003.png", "' + name + b'": ' + text + b"}"
            answer = client.post(SEARCH, content=body, headers={"Content-Type": "application/json"})
            wire.refused(answer, 400, "must be a number")
    for name in ("max_distance", "diversity"):
        for text in ("nan", "inf", "-1", "1_0", " 1", "١", "1" * 30, "0x1", ""):
            answer = client.post(SEARCH, params={name: text}, content=b"x", headers=PNG)
            wire.refused(answer, 400, "must be a number")
    for body, says in (
        ({"dislike": [id]}, "or like alone"),
        ({"like": []}, "or like alone"),
        ({"vector": [0.5] * 16, "id": id, "like": [id]}, "exactly one of vector, id"),
    ):
        wire.refused(client.post(SEARCH, json=body), 400, says)
    wire.refused(client.post(BATCH, json={"queries": [{"id": id}], "like": [id]}), 400, "JSON must")
    for field in ("nobody", "a." * 400 + "a"):
        for name in ("group_by", "order_by"):
            answer = client.post(SEARCH, json={"id": id, name: field})
            wire.refused(answer, 422, "No item of this index has a field")


def test_the_largest_questions_are_answered_in_time(client, index):
    for options in (
        {"k": 1000, "offset": 10_000, "diversity": 1.0},
        {"k": 10, "offset": 100, "group_by": "id", "group_size": 100},
        {"k": 1000, "group_by": "at.hall", "facets": ["id"] * 10},
        {"k": 1000, "group_by": "tags"},
        {"like": list(index)[:100], "dislike": list(index)[100:]},
    ):
        answer = client.post(SEARCH, json={"id": "3/0003.png", **options})
        assert answer.status_code == 200, answer.text
        queries = [{"id": id} for id in list(index)[:100]]
        if "like" not in options:
            answer = client.post(BATCH, json={"queries": queries, **options})
            assert answer.status_code in (200, 503), answer.text


def verdict_of(answer: httpx.Response) -> tuple:
    assert answer.status_code == 200, answer.text
    content = answer.json()
    assert content["took_ms"] > 0
    return tuple(content[name] for name in ("label", "second", "stale", "far", "rate"))


def test_identify_answers_as_python_does(client, index, pictures):
    images = [path.read_bytes() for path in pictures[30:33]]
    vector = index.bundle.encode_image(images[0]).vector[0]
    id = next(iter(index))
    png = {"content": images[0], "headers": PNG}
    for request, expected in (
        ({"params": {"far": "0.2"}, **png}, index.identify(pictures[30], 0.2)),
        ({"files": {"image": images[0]}, "data": {"far": "0.2"}}, index.identify(images[0], 0.2)),
        (
            {"files": [("image", image) for image in images], "data": {"far": "0.95"}},
            index.identify(images, 0.95),
        ),
        ({"json": {"vector": vector.tolist(), "far": 0.3}}, index.identify(vector, 0.3)),
        (
            {"json": {"id": id, "far": 0.3}},
            index.identify(index.vector(id), 0.3, without=[id]),
        ),
    ):
        answer = client.post(IDENTIFY, **request)
        far = float({**request.get("json", request.get("data", request.get("params")))}["far"])
        shown = (expected.label, expected.second, expected.stale, far, expected.rate)
        assert verdict_of(answer) == shown
        agree(answer, expected.hits)
    assert (
        client.post(IDENTIFY, json={"id": id, "far": 0.3, "fields": []}).json()["results"][0][
            "metadata"
        ]
        == {}
    )
    for request, status, says in (
        (png, 422, "Too few classes"),
        ({"json": {"id": id, "far": 1.0}}, 400, "between 0 and 1"),
        ({"params": {"far": "0"}, **png}, 400, "between 0 and 1"),
        ({"params": {"k": "1"}, **png}, 400, "no parameter 'k'"),
        ({"json": {"id": id, "k": 1}}, 400, "exactly one of vector, id"),
        ({"json": {"id": "nobody", "far": 0.2}}, 404, "no such item"),
        ({"json": {}}, 400, "exactly one of vector, id"),
        ({"json": {"vector": [0.5], "far": 0.2}}, 422, "has 16 numbers, not 1"),
        ({"files": [("image", images[0])] * 17}, 400, "16 at most"),
        ({"files": [("image", images[0]), ("like", images[0])]}, 400, "no other file"),
        ({"files": [("image", images[0]), ("image", b"x")]}, 422, "Image 2"),
    ):
        wire.refused(client.post(IDENTIFY, **request), status, says)


def test_an_index_without_calibration_says_so(shared, index_path, pictures):
    client = shared(index_path).client
    assert client.get("/v1/index").json()["calibration"] is None
    image = {"files": {"image": pictures[0].read_bytes()}}
    says = "This index is not calibrated"
    wire.refused(client.post(IDENTIFY, **image), 422, says)
    wire.refused(client.post(SEARCH, **image, data={"scores": "true"}), 422, says)
    answer = client.post(SEARCH, **image).json()
    assert answer.keys() == {"bundle", "results", "took_ms"}
    assert {hit["score"] for hit in answer["results"]} == {None}


def test_the_index_tells_its_calibration_and_when_it_is_stale(served, path, tmp_path):
    living = Path(shutil.copytree(path, tmp_path / "i"))
    client = served(living).client

    def told() -> dict:
        return client.get("/v1/index").json()["calibration"]

    with Index.open(living, threads=1) as index:
        measured = index.calibration()
        assert told() == {
            "classes": 10,
            "items": 200,
            "least_rate": measured.least_rate,
            "created": measured.created,
            "stale": False,
            "label": None,
            "distinct": None,
        }
        index.delete(list(index)[:30])
        assert told()["stale"] is True
        assert client.post(IDENTIFY, json={"id": "9/0009.png", "far": 0.5}).json()["stale"] is True
        index.calibrate("at.hall", distinct="price", progress=False)
        again = told()
        assert (again["label"], again["distinct"], again["stale"]) == ("at.hall", "price", False)
        assert (again["classes"], again["items"]) == (2, 170)


def test_items_are_listed_newest_first(served, living):
    client = served(living, "--open", "write").client

    def pages(limit: int, **parameters) -> list[str]:
        ids, cursor = [], {}
        while True:
            query = {"order": "newest", "limit": limit, **parameters, **cursor}
            page = client.get("/v1/items", params=query)
            assert page.status_code == 200, page.text
            ids += [item["id"] for item in page.json()["items"]]
            if page.json()["cursor"] is None:
                return ids
            cursor = {"cursor": page.json()["cursor"]}

    with Index.open(living, threads=1) as index:
        before = pages(1000)
        assert sorted(before) == list(index)
        sevens = [id for id in before if index[id].label == "7"]
    assert pages(7) == before
    assert pages(7, filter="label = '7'") == sevens
    vector = [0.5] * 16
    client.post("/v1/items", json={"items": [{"id": id, "vector": vector} for id in "ba"]})
    changed = before[100]
    page = client.get("/v1/items", params={"order": "newest", "limit": 150}).json()
    client.put("/v1/items/c", json={"vector": vector})
    client.patch(f"/v1/item?id={changed}", json={"label": "x"})
    first = [item["id"] for item in page["items"]]
    assert first == ["a", "b", *before[:148]]
    # Changes while a client pages repeat no other item.
    query = {"order": "newest", "cursor": page["cursor"]}
    rest = [item["id"] for item in client.get("/v1/items", params=query).json()["items"]]
    assert rest == before[148:]
    left = [id for id in before if id != changed]
    assert pages(1000) == [changed, "c", "a", "b", *left]
    by_id = client.get("/v1/items", params={"limit": 1}).json()["cursor"]
    for parameters, status, says in (
        ({"cursor": by_id}, 400, "not a cursor"),
        ({"cursor": "OTk5OTk5OTk5OTk5OTk5OTk5OQ=="}, 400, "not a cursor"),
        ({"filter": "lable = '7'"}, 422, "has a field 'lable'"),
        ({"order": "oldest"}, 400, '"order" must be id or newest'),
    ):
        answer = client.get("/v1/items", params={"order": "newest", **parameters})
        wire.refused(answer, status, says)


def test_the_clients_ask_as_python_does(server, index, pictures):
    def same(answer, hits) -> None:
        assert [hit.id for hit in answer] == [hit.id for hit in hits]
        assert [hit.score for hit in answer] == [hit.score for hit in hits]

    first, second, third, fourth = pictures[:80:20]
    options = {"k": 4, "group_by": "label", "group_size": 2, "facets": ["label"], "scores": True}
    with Client(server.url) as client:
        for own, likes in (
            ({"like": "3/0003.png"}, None),
            ({"like": ["3/0003.png", second], "dislike": third}, None),
            ({"like": [second.read_bytes()], "dislike": ["0/0000.png"]}, first),
            ({"dislike": [third, fourth]}, first),
            ({"max_distance": 1e16, "order_by": "-price", "offset": 2}, first),
        ):
            answer = client.search(likes, **own, **options)
            hits = index.search(likes, **own, **options)
            same(answer, hits)
            counted = [(entry.value, entry.count) for entry in answer.facets["label"]]
            assert counted == hits.facets["label"]
            assert repr(answer) == repr(hits)
        assert client.search(first).facets is None
        batch = client.search_batch([first, second], **options)
        for answer, hits in zip(
            batch.answers, index.search([first, second], **options), strict=True
        ):
            same(answer, hits)
            assert answer.facets is not None
        vector = index.vector("3/0003.png")
        for answer, verdict in (
            (client.identify(first, 0.2), index.identify(first, 0.2)),
            (client.identify([first, second], far=0.9), index.identify([first, second], 0.9)),
            (client.identify(vector=vector, far=0.5), index.identify(vector, 0.5)),
            (
                client.identify(id="3/0003.png", far=0.5, fields=[]),
                index.identify(vector, 0.5, without=["3/0003.png"]),
            ),
        ):
            shown = (answer.label, answer.rate, answer.second, answer.stale)
            assert shown == (verdict.label, verdict.rate, verdict.second, verdict.stale)
            same(answer, verdict.hits)
        assert client.index().calibration.classes == 10
        for work, says in (
            (lambda: client.search(dislike="a"), "or only for likes"),
            (lambda: client.search(vector=vector, like=first), "not images"),
            (lambda: client.identify(), "exactly one of"),
            (lambda: client.identify(first, id="a"), "exactly one of"),
        ):
            with pytest.raises(DataError, match=says):
                work()
