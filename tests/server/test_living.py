"""An index behind a server: kept originals, filters, damage, and a folder that is replaced."""

import asyncio
import io
import shutil
import subprocess
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import httpx
import numpy as np
import pytest
import wire
from PIL import Image
from retrieval.errors import StoreError
from retrieval.index.index import Index, create_index
from retrieval.store.contract import Item

from retrieval_server.request_bodies import Options, Query, QueryInput
from retrieval_server.served_index import Served, Workers
from retrieval_server.settings import Settings

WIDTH = 16
ONES = {"vector": np.ones(WIDTH, np.float32)}


def with_limits(**limits: float) -> list[str]:
    """Return Python's arguments that run the command line with other limits of the server."""
    changes = "; ".join(f"settings.{name} = {value}" for name, value in limits.items())
    imports = "from retrieval_server import settings"
    return ["-c", f"{imports}; {changes}; from retrieval.cli.app import main; main()"]


def post(server, **content):
    return server.client.post("/v1/search", json={"vector": [0.0] * WIDTH, **content})


def found(server, **content):
    answer = post(server, **content)
    assert answer.status_code == 200, answer.text
    return answer.json()["results"]


def items(server):
    return server.client.get("/v1/index").json()["items"]


def test_the_tag_changes_with_the_item(makers, empty, served, tmp_path):
    paths = makers.write_digits(tmp_path / "photos", 4)
    client = served(empty, "--images", str(tmp_path / "photos")).client

    def tag(known=None):
        headers = {} if known is None else {"If-None-Match": known}
        answer = client.get("/v1/items/one/image", headers=headers)
        return answer.status_code, answer.headers.get("etag")

    states = [
        {"path": paths[0]},
        {"path": paths[1]},
        {"keep": "copy", "original": paths[3].read_bytes()},
        {"keep": "copy", "original": paths[2].read_bytes()},
    ]
    seen = []
    with Index.open(empty, threads=1) as index:
        for state in states:
            index.upsert([Item("one", arrays=ONES, **state)])
            status, now = tag(seen[-1] if seen else None)
            assert status == 200 and now not in seen and tag(now) == (304, now)
            seen.append(now)


def test_kept_originals_are_served_without_their_files(empty, served, tmp_path):
    colours = np.random.default_rng(0).integers(0, 256, (300, 400, 3), dtype=np.uint8)
    contents = {}
    with Index.open(empty, threads=1) as index:
        for keep in ("copy", "thumbnail", "reference", "nothing"):
            folder = tmp_path / keep
            folder.mkdir()
            for end in ("png", "tiff"):
                Image.fromarray(colours).save(folder / f"{keep}.{end}")
            contents[keep] = (folder / f"{keep}.png").read_bytes()
            index.add([folder], keep=keep, progress=False)
    assert len(contents["copy"]) > 262_144  # more than one piece of an answer
    server = served(empty, "--max-bytes", "1000000", "--images", str(tmp_path))

    def image(name):
        return server.client.get(f"/v1/items/{name}/image")

    for keep in ("copy", "thumbnail", "reference"):
        assert image(f"{keep}.png").content == contents[keep]
        assert image(f"{keep}.tiff").headers["content-type"] == "image/png"
    for keep in contents:
        shutil.rmtree(tmp_path / keep)
    assert image("copy.png").content == contents["copy"]
    shown = Image.open(io.BytesIO(image("copy.tiff").content))  # decoded in another process
    assert np.array_equal(np.asarray(shown), colours)
    small = Image.open(io.BytesIO(image("thumbnail.png").content))
    assert small.format == "JPEG" and max(small.size) == 256
    assert "no longer where" in image("reference.png").json()["detail"]
    assert image("nothing.png").status_code == 404
    urls = {hit["id"]: hit["image_url"] for hit in found(server, k=20)}
    assert urls["nothing.png"] is None and urls["copy.png"] and urls["thumbnail.png"]


def test_a_kept_original_beyond_the_limits(empty, served):
    """A TIFF is decoded within the server's limits; originals count as memory of uploads."""
    bomb = io.BytesIO()
    Image.new("1", (20_000, 20_000)).save(bomb, "TIFF", compression="group4")
    cases = {
        "bomb": (bomb.getvalue(), 404, "cannot be shown"),
        "text": (b"<script>alert(1)</script>", 404, "cannot be shown"),
        "large": (b"\x89PNG\r\n\x1a\n" + bytes(3_000_000), 503, "memory"),
        "long": (b"II*\0" + bytes(1_500_000), 404, "too large to be shown"),
    }
    with Index.open(empty, threads=1) as index:
        index.upsert(
            [
                Item(id, keep="copy", original=content, arrays=ONES)
                for id, (content, *_) in cases.items()
            ]
        )
    limits = with_limits(BODY_MEMORY=2_000_000)
    server = served(empty, "--max-bytes", "1000000", program=limits)
    for id, (_, status, says) in cases.items():
        answer = server.client.get(f"/v1/items/{id}/image")
        assert (answer.status_code, says in answer.json()["detail"]) == (status, True), answer.text
    assert len(found(server)) == 4


def test_filters(living, photos, served):
    server = served(living)
    image = next(photos.rglob("*.png")).read_bytes()

    def form(filter):
        data = {"filter": filter, "k": "300"}
        return server.client.post("/v1/search", files={"image": ("q", image)}, data=data)

    chosen = sum(1 for path in photos.rglob("*.png") if path.parent.name in "37")
    for answer in (
        post(server, filter={"label": {"in": ["3", "7"]}}, k=300),
        post(server, filter="label in ('3', '7')", k=300),
        form("label in ('3', '7')"),
        form('{"label": {"in": ["3", "7"]}}'),
    ):
        hits = answer.json()["results"]
        assert len(hits) == chosen and {hit["label"] for hit in hits} == {"3", "7"}
    assert len(form("").json()["results"]) == len(found(server, filter=None, k=300)) == 200
    for filter, status, says in (
        ("label ==", 400, "filter"),
        ({}, 400, "empty object"),
        ("(" * 9000, 400, "filter"),
        ([], 400, "must be text or an object"),
        ({"lable": "3"}, 422, "No item of this index has a field 'lable'"),
        ({"label": {"in": list(map(str, range(1001)))}}, 400, "too large"),
        ({"or": [{"label": str(n)} for n in range(101)]}, 400, "too large"),
    ):
        answer = post(server, filter=filter)
        assert answer.status_code == status, (filter, answer.text)
        assert says in answer.json()["detail"] and str(living) not in answer.text, answer.text
    for filter in ('{"label": "3", "label": "4"}', "{" * 10_000, '{"a":' * 5000, b"\xff"):
        assert form(filter).status_code == 400, filter
    nested = '{"vector": [0.5], "filter": ' + '{"not":' * 50_000 + "1" + "}" * 50_001
    kind = {"Content-Type": "application/json"}
    assert server.client.post("/v1/search", content=nested, headers=kind).status_code == 400
    assert len(found(server)) == 10


def test_an_empty_index_is_ready(empty, served, photos):
    server = served(empty, program=with_limits(PROBE_SECONDS=0.1))
    assert found(server) == []
    ready = server.client.get("/readyz").json()
    assert (ready["status"], ready["items"]) == ("ready", 0)
    with Index.open(empty, threads=1) as index:
        index.add([photos / "1"], progress=False)
        count = len(index)
        wire.until(lambda: server.client.get("/readyz").json()["items"] == count)
        assert items(server) == count == len(found(server, k=100))
        index.delete(hit["id"] for hit in found(server, k=100))
    assert found(server) == []
    wire.until(lambda: server.client.get("/readyz").json()["items"] == 0)


def test_damage_is_reported_without_a_path(living, served):
    (segment,) = (living / "arrays").glob("*.vector")
    content = bytearray(segment.read_bytes())
    content[500] ^= 1
    segment.write_bytes(content)
    server = served(living, program=with_limits(PROBE_SECONDS=0.1), wait=False)
    wire.until(lambda: "damaged" in server.client.get("/readyz").text)
    answer = server.client.get("/readyz")
    assert answer.status_code == 503
    assert str(living) not in answer.text and segment.name not in answer.text


def test_damage_that_a_search_finds_ends_readiness(empty, served):
    with Index.open(empty, threads=1) as index:
        vectors = np.random.default_rng(0).normal(size=(200, WIDTH)).astype(np.float32)
        long = {"text": "x" * 20_000}  # fills pages that are read only for a hit
        index.upsert(
            [Item(f"id{n}", None, long, arrays={"vector": v}) for n, v in enumerate(vectors)]
        )
    server = served(empty, program=with_limits(PROBE_SECONDS=0.1))
    assert len(found(server)) == 10
    record = empty / "items.sqlite"
    content = record.read_bytes().replace(b"x" * 1000, b"y" * 1000)
    with record.open("r+b") as file:
        file.write(content)
    answer = post(server, k=200)
    assert answer.status_code == 503
    assert "damaged" in answer.json()["detail"] and str(empty) not in answer.text
    assert wire.not_ready(server) and str(empty) not in wire.not_ready(server)
    time.sleep(0.5)  # the probe repeats the failed search, since another may miss the damage
    assert wire.not_ready(server)
    assert server.client.get("/livez").status_code == 200


def test_a_hostile_filter_holds_a_worker_no_longer_than_the_deadline(empty, served):
    tags = {"tags": [f"tag {n}" for n in range(10_000)]}
    with Index.open(empty, threads=1) as index:
        index.upsert([Item(f"id{n}", metadata=tags, arrays=ONES) for n in range(300)])
    server = served(empty, "--workers", "1", "--deadline", "1")
    slow = {"or": [{"tags": f"y{n}"} for n in range(100)]}
    answer = post(server, filter=slow, k=1)
    assert answer.status_code == 503 and "retry-after" in answer.headers
    wire.until(lambda: post(server, k=1).status_code == 200, 10)


def test_several_queries_get_the_hits_of_single_ones(empty):
    random = np.random.default_rng(0)
    vectors = np.tile(random.integers(-2, 3, (30, WIDTH)).astype(np.float32), (2, 1))
    with Index.open(empty, threads=1) as index:
        index.upsert(
            [
                Item(f"{n * 7 % 60}", metadata={"n": n, "of": [n]}, arrays={"vector": v})
                for n, v in enumerate(vectors)
            ]
        )
        queries = vectors[::4] + random.integers(0, 2, (15, WIDTH)).astype(np.float32) / 3
        for filter, k, count in ((None, 7, 7), ("n < 3", 10, 3), ("n < 0", 4, 0), (None, 100, 60)):
            together = index.search(queries, k, filter=filter)
            assert together == [index.search(query, k, filter=filter) for query in queries]
            assert {len(hits) for hits in together} == {count}
        together[0][0].metadata["of"].append("mine")  # changes only this answer
        again = index.search(queries, 100)
        assert all("mine" not in hit.metadata["of"] for hits in again for hit in hits)


# A folder that is removed, or replaced by another index, while a server has it open.


def test_a_removed_folder_ends_readiness_until_it_is_restored(living, served, cli, tmp_path):
    server = served(living, "--open", "write")
    assert cli("index", "snapshot", living, tmp_path / "copy").code == 0
    shutil.rmtree(living)
    wire.until(lambda: "tries again every few seconds" in (wire.not_ready(server) or ""))
    assert str(living) not in wire.not_ready(server)
    put = partial(server.client.put, "/v1/items/a", json={"vector": [0.5] * WIDTH})
    assert put().status_code == 503
    assert cli("index", "restore", tmp_path / "copy", living).code == 0
    assert put().status_code == 200
    wire.until(lambda: not wire.not_ready(server))
    assert server.client.get("/v1/items/a").status_code == 200


def test_a_change_is_not_lost_in_the_files_of_an_index_that_was_replaced(
    living, served, cli, tmp_path
):
    server = served(living, "--open", "write")
    put = partial(server.client.put, json={"vector": [0.5] * WIDTH})
    assert {put("/v1/items/a").status_code, put("/v1/items/b").status_code} == {200}
    assert cli("index", "snapshot", living, tmp_path / "copy").code == 0
    assert cli("index", "snapshot", living, tmp_path / "other").code == 0
    for copy, change in (
        ("copy", partial(server.client.delete, "/v1/items/a")),
        ("other", partial(put, "/v1/items/c")),
    ):
        shutil.rmtree(living)
        (tmp_path / copy).rename(living)
        assert change().status_code == 200
        with Index.open(living) as index:
            assert set(index.get(["a", "b", "c"])) == ({"b"} if copy == "copy" else {"a", "b", "c"})


def test_an_index_is_written_to_once_it_becomes_writable(living, served, mount, tmp_path):
    view = mount(tmp_path / "view", "--bind", living)
    subprocess.run(["mount", "-o", "remount,ro,bind", view], check=True)
    server = served(view, "--open", "write")
    put = partial(server.client.put, "/v1/items/a", json={"vector": [0.5] * WIDTH})
    wire.refused(put(), 503, "it is read-only")
    subprocess.run(["mount", "-o", "remount,rw,bind", view], check=True)
    assert put().status_code == 200
    server.process.terminate()  # it holds files of the mount
    assert server.process.wait(15) == 0


def test_a_replaced_folder_is_taken_up_without_a_failed_request(
    makers, living, bundle_path, photos, served, tmp_path
):
    other = makers.make_bundle(tmp_path / "other", seed=7)
    server = served(living, "--open", "admin", "--workers", "2")
    vector = {"vector": [0.5] * WIDTH}
    queries = [{"files": {"image": next(photos.rglob("*.png")).read_bytes()}}, {"json": vector}]
    stop = threading.Event()

    def search():
        counts = Counter()
        with httpx.Client(base_url=server.url, timeout=30) as client:
            while not stop.is_set():
                for query in queries:
                    answer = client.post("/v1/search", **query)
                    counts["" if answer.status_code == 200 else answer.text] += 1
        return counts

    with ThreadPoolExecutor(2) as pool:
        searches = [pool.submit(search) for _ in range(2)]
        try:
            for turn, bundle in enumerate((bundle_path, other, bundle_path)):
                create_index(living, bundle, [photos / str(turn)], replace=True, progress=False)
                count = len(list((photos / str(turn)).iterdir()))
                wire.until(lambda count=count: items(server) == count)
            assert server.client.put("/v1/items/new", json=vector).status_code == 200
        finally:
            stop.set()
        counts = sum((search.result(30) for search in searches), Counter())
    assert set(counts) == {""} and counts[""] > 10, counts
    with Index.open(living, threads=1) as index:
        assert index.get("new")
    assert server.client.get("/readyz").status_code == 200


@pytest.mark.parametrize("has_written", [False, True])
def test_a_store_of_a_replaced_folder_refuses_to_write(has_written, living, bundle_path, photos):
    """The write would be acknowledged, but go to a folder that was removed."""
    item = Item("new", arrays={"vector": np.ones(WIDTH, np.float32)})
    with Index.open(living, threads=1) as index:
        assert len(index) == 200
        if has_written:
            index.upsert([item])
        create_index(living, bundle_path, [photos / "1"], replace=True, progress=False)
        for write in (
            lambda: index.upsert([item]),
            lambda: index.delete(["new"]),
            lambda: index.store.update(["new"], {"label": "x"}, index.bundle.sha256),
        ):
            with pytest.raises(StoreError, match="replaced or removed"):
                write()
    with Index.open(living, threads=1) as index:
        index.upsert([item])
        assert index.get("new")


@pytest.mark.parametrize("does", ["search", "read"])
def test_a_request_on_the_old_folder_is_repeated_on_the_new_one(
    does, living, bundle_path, photos, monkeypatch
):
    """Two requests fail on the old folder; the second finds the new folder served already."""
    count = len(list((photos / "1").iterdir()))
    old = Index.open(living, threads=1)
    create_index(living, bundle_path, [photos / "1"], replace=True, progress=False)
    workers = Workers(Settings())
    searcher = Served("i", old, Settings(), workers, reopen=lambda: Index.open(living, threads=1))

    def late(*given, **more):
        assert searcher.take_up() is None  # the other request takes up the new folder
        raise StoreError("The folder was replaced or removed.")

    monkeypatch.setattr(old, "search", late)
    query = Query((QueryInput(vector=np.full(WIDTH, 0.5)),), Options(k=100), None)
    try:
        if does == "search":
            work = searcher.search(query, lambda query, hits, index: b"%d" % len(hits[0]))
        else:
            work = searcher.read(lambda index: late() if index is old else len(index))
        assert int(asyncio.run(work)) == count
        assert searcher.index is not old
    finally:
        searcher.index.close()
        workers.close()
