"""A real server in its own process: searches, images of items, refusals, order of its end."""

import asyncio
import gc
import io
import os
import resource
import signal
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import wire
from PIL import Image
from retrieval.base.regular_files import read_beneath
from retrieval.base.timing import TRAIL, Trail
from retrieval.index.index import create_index, open_index
from starlette.requests import ClientDisconnect

from retrieval_server.served_index import Turns, Workers
from retrieval_server.settings import Settings

PATHS = ["/", "/page.css", "/page.js", "/v1/index", "/livez", "/readyz"]
IMAGE = "/v1/items/3%2F0003.png/image"
JSON, FORM = ({"content-type": kind} for kind in ("application/json", "multipart/form-data"))


@pytest.fixture(scope="module")
def server(shared, index_path, photos):
    return shared(
        index_path, "--max-bytes", "100000", "--max-pixels", "1000000", "--images", str(photos)
    )


def post(server, content, k=10):
    return server.client.post("/v1/search", files={"image": content}, data={"k": str(k)})


def test_search_answers_as_the_index_does(server, index_path, photos):
    with open_index(index_path, threads=1) as index:
        for path in sorted(photos.rglob("*.png"))[::40]:
            answer = post(server, path.read_bytes(), 4)
            assert answer.status_code == 200
            results = answer.json()["results"]
            hits = index.search(index.bundle.encode_image(path), 4)[0]
            shown = [(hit["id"], hit["key"], hit["label"]) for hit in results]
            assert shown == [(hit.id, hit.id, hit.label) for hit in hits]
            distances = [hit["distance"] for hit in results]
            assert distances == pytest.approx([hit.distance for hit in hits], abs=1e-6)
            assert distances == sorted(distances)
            assert 0 < answer.json()["took_ms"] < 10_000
            picture = server.client.get(results[0]["image_url"])
            assert picture.content == path.read_bytes()
            assert picture.headers["content-type"] == "image/png"
        assert len(post(server, path.read_bytes()).json()["results"]) == 10
        query = {"vector": index.vector("3/0003.png").tolist(), "k": 1}
        answer = server.client.post("/v1/search", json=query)
        assert answer.json()["results"][0]["id"] == "3/0003.png"


def test_pages_and_health(server, index_path):
    client = server.client
    for path in PATHS:
        answer = client.get(path)
        assert answer.status_code == 200, path
        assert "default-src 'none'" in answer.headers["content-security-policy"]
        assert answer.headers["x-content-type-options"] == "nosniff"
    ready = client.get("/readyz").json()
    assert set(ready.pop("checks").values()) == {"ok"}
    assert len(ready.pop("bundle")) == 64 and ready == {"status": "ready", "items": 200}
    about = client.get("/v1/index").json()
    assert str(index_path.parent) not in str(about) and about["items"] == 200
    limits = {"bytes": 100_000, "pixels": 1_000_000, "batch": 100, "batch_bytes": 64_000_000}
    assert about["limits"] == limits
    page = client.get("/").text
    assert "http://" not in page and "https://" not in page
    tag = client.get(IMAGE).headers["etag"]
    for sent, status in (
        (tag, 304),
        (f'"x", W/{tag} , "y"', 304),
        (f"W/{tag}", 304),
        (f'"x",{tag}', 304),
        ("*", 304),
        ('"x"', 200),
        (tag.strip('"'), 200),
        ("", 200),
    ):
        assert client.get(IMAGE, headers={"If-None-Match": sent}).status_code == status, sent
    twice = [("If-None-Match", '"x"'), ("If-None-Match", tag)]
    assert client.get(IMAGE, headers=twice).status_code == 304


def png(width, height, mode="1"):
    """A PNG: black in one bit, noise that takes long to decode in colour."""
    image = Image.new("1", (width, height))
    if mode == "RGB":
        random = np.random.default_rng(0)
        image = Image.fromarray(random.integers(0, 256, (height, width, 3), dtype=np.uint8))
    out = io.BytesIO()
    image.save(out, "PNG", compress_level=1 if mode == "RGB" else 9)
    return out.getvalue()


def test_bad_images_get_a_sentence_and_the_server_lives(server, photos):
    sound = next(photos.rglob("*.png")).read_bytes()
    jpeg = io.BytesIO()
    Image.effect_noise((64, 64), 50).save(jpeg, "JPEG")
    for content, status, says in (
        (b"", 422, "is empty"),
        (b"this is text", 422, "not an image in a known format"),
        (jpeg.getvalue()[:700], 422, "damaged"),
        (png(2000, 2000), 422, "2000 × 2000 pixels; the limit is 1,000,000"),
        (sound + bytes(100_000), 413, "100,000"),
        (bytes(5_000_000), 413, "100,000"),
    ):
        answer = post(server, content)
        assert answer.status_code == status, (answer.text, says)
        assert answer.json().keys() == {"type", "title", "status", "detail", "instance"}
        assert says in answer.json()["detail"]
        assert post(server, sound).status_code == 200


def test_bad_requests_get_a_sentence(server, photos):
    sound = next(photos.rglob("*.png")).read_bytes()
    image, vector, url = {"image": sound}, [0.0] * 16, "/v1/search"
    for request, status, says in (
        ({"content": b"x"}, 415, "multipart/form-data"),
        ({"data": {"image": "text"}}, 415, "multipart/form-data"),
        ({"files": {"picture": sound}}, 400, 'a file in its field "image"'),
        ({"files": {"image": (None, "text")}}, 400, 'a file in its field "image"'),
        ({"files": image, "data": {"k": "0"}}, 400, "whole number from 1 to 1000"),
        ({"content": b"x", "headers": FORM}, 400, "boundary"),
        ({"content": b"{", "headers": JSON}, 400, "not JSON"),
        ({"content": b"[" * 3_000_000, "headers": JSON}, 413, "too large"),
        ({"content": b'{"vector": [NaN]}', "headers": JSON}, 400, "finite numbers"),
        ({"json": []}, 400, "JSON must be"),
        ({"json": {"vector": vector, "kk": 3}}, 400, "JSON must be"),
        ({"json": {"vector": "no"}}, 400, "finite numbers"),
        ({"json": {"vector": [10**400] * 16}}, 400, "finite numbers"),
        ({"json": {"vector": []}}, 400, "finite numbers"),
        ({"json": {"vector": vector[1:]}}, 422, "has 16 numbers, not 15"),
        ({"json": {"vector": [1e300] * 16}}, 422, "beyond float32"),
        ({"json": {"vector": vector, "k": 2.5}}, 400, "whole number"),
        ({"json": {"vector": vector, "k": True}}, 400, "whole number"),
    ):
        answer = server.client.post(url, **request)
        assert answer.status_code == status, (request.keys(), answer.text)
        assert says in answer.json()["detail"]
    assert server.client.get(url).status_code == 405
    for path in ("/nowhere", "/v1/items/x/image"):
        answer = server.client.get(path)
        assert answer.status_code == 404 and answer.json()["detail"].endswith(".")
    assert post(server, sound).status_code == 200


def test_originals_are_shown_only_below_folders_that_the_operator_names(
    served, index_path, photos, tmp_path
):
    """An index may come from a stranger and name any file of this machine."""
    plain, url = served(index_path).client, "/v1/items/3%2F0003.png"
    (hit,) = plain.post("/v1/search", json={"vector": [0.0] * 16, "k": 1}).json()["results"]
    assert hit["image_url"] is None and plain.get(url).json()["thumbnail_url"] is None
    assert "outside the folders that may be shown" in plain.get(IMAGE).json()["detail"]
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "link").symlink_to(photos)  # permits the folder that it leads to
    for folder, status in (("elsewhere", 404), (photos / "3", 200), ("link", 200)):
        client = served(index_path, "--images", str(tmp_path / folder)).client
        for what in ("image", "thumbnail"):
            assert client.get(f"{url}/{what}").status_code == status, folder
    assert client.get(IMAGE).content == (photos / "3" / "0003.png").read_bytes()


def test_a_server_without_a_free_file_descriptor_is_busy_and_recovers(served, index_path, photos):
    """Its first search once broke its threads for ever, and it spoke of damage."""
    program = ("-m", "retrieval.cli")
    server = served(index_path, "--images", str(photos), program=program, wait=False)
    client, pid = server.client, server.process.pid
    client.get("/livez")
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (3, before[1]))
    try:
        for _ in range(2):
            answers = [
                client.post("/v1/search", json={"vector": [0.0] * 16}),
                client.post("/v1/search", json={"vector": [0.0] * 16, "filter": "label = '1'"}),
                client.get("/v1/items/3%2F0003.png/image"),
            ]
            assert {answer.status_code for answer in answers} <= {200, 503}, answers
            assert answers[1].status_code == answers[2].status_code == 503
            assert not any("damage" in a.text.replace("known to be damaged", "") for a in answers)
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, before)
    assert client.post("/v1/search", json={"vector": [0.0] * 16}).status_code == 200
    assert client.get("/v1/items/3%2F0003.png/image").status_code == 200
    wire.until(lambda: client.get("/readyz").status_code == 200)


def test_a_folder_that_is_exchanged_with_a_link_shows_nothing_from_outside(
    served, bundle_path, tmp_path
):
    inside, outside = tmp_path / "images" / "d", tmp_path / "outside"
    aside, link = tmp_path / "images" / "e", tmp_path / "images" / "x"
    for folder, grey in ((inside, 10), (outside, 200)):
        folder.mkdir(parents=True)
        Image.new("L", (16, 16), grey).save(folder / "a.bmp")
    create_index(tmp_path / "i", bundle_path, [inside.parent], progress=False)
    link.symlink_to(outside)
    client = served(tmp_path / "i", "--images", str(inside.parent)).client
    over = threading.Event()

    def exchange() -> None:
        while not over.is_set():
            for folder, other in ((inside, aside), (link, inside), (inside, link), (aside, inside)):
                folder.rename(other)

    thread = threading.Thread(target=exchange)
    thread.start()
    try:
        answers = [client.get("/v1/items/d%2Fa.bmp/image") for _ in range(400)]
    finally:
        over.set()
        thread.join()
    assert {answer.status_code for answer in answers} <= {200, 404}
    shown = {answer.content for answer in answers if answer.status_code == 200}
    assert shown <= {(inside / "a.bmp").read_bytes()}
    assert client.get("/v1/items/d%2Fa.bmp/image").status_code == 200
    for path in (Path("d/a.bmp"), Path("a.bmp")):  # the race, lost in either folder
        (tmp_path / "linked").unlink(missing_ok=True)
        (tmp_path / "linked").symlink_to(inside.parent if path.parts[1:] else inside)
        with pytest.raises(OSError, match=r"Not a directory|link"):
            read_beneath(tmp_path / "linked", path, 10)
    with pytest.raises(OSError, match=r"Not a directory|link"):
        read_beneath(inside.parent, Path("x/a.bmp"), 10)


def test_names_that_are_not_utf_8_are_served_or_refused(served, cli, bundle_path, tmp_path):
    folder = tmp_path / os.fsdecode(b"caf\xe9")
    (folder / "d").mkdir(parents=True)
    Image.new("L", (16, 16), 10).save(folder / "d" / os.fsdecode(b"\xe9.bmp"), "BMP")
    create_index(tmp_path / "i", bundle_path, [folder], progress=False)
    client = served(tmp_path / "i", "--images", str(folder)).client
    (item,) = client.get("/v1/items").json()["items"]
    assert client.get(item["image_url"]).content == Path(*folder.glob("d/*")).read_bytes()
    for words in (
        ("serve", folder),
        ("index", "show", folder),
        ("index", "create", folder, "--bundle", bundle_path),
        ("index", "snapshot", tmp_path / "i", folder),
    ):
        run = cli(*words)
        assert run.code == 2 and run.err.count("\n") == 1 and "not valid UTF-8" in run.err, run


def test_an_image_that_was_changed_or_deleted_is_not_shown(makers, bundle_path, served, tmp_path):
    folder = tmp_path / "photos"
    paths = makers.write_digits(folder, 4)
    Image.fromarray(makers.digits()[0][9]).save(folder / "x.tiff")
    create_index(tmp_path / "i", bundle_path, [folder], progress=False)
    client = served(tmp_path / "i", "--images", str(folder)).client
    hits = client.post("/v1/search", json={"vector": [0.0] * 16}).json()["results"]
    urls = {hit["key"]: hit["image_url"] for hit in hits}
    assert len(urls) == 5
    shown = client.get(urls["x.tiff"])
    assert shown.headers["content-type"] == "image/png"  # browsers show no TIFF
    assert np.array_equal(np.asarray(Image.open(io.BytesIO(shown.content))), makers.digits()[0][9])
    paths[0].unlink()
    paths[1].write_bytes(b"something else")
    gone, changed, sound = (client.get(urls[f"{p.parent.name}/{p.name}"]) for p in paths[:3])
    assert gone.status_code == 404 and "no longer where" in gone.json()["detail"]
    assert changed.status_code == 404 and "was changed after" in changed.json()["detail"]
    assert sound.status_code == 200


def test_features_and_rescorer(makers, served, tmp_path):
    bundle = makers.make_bundle(tmp_path / "b", kind="features", normalized=False, rescorer=True)
    features = np.random.default_rng(0).normal(size=(50, 64))
    np.savez(tmp_path / "f.npz", features=features, keys=[f"f{row}" for row in range(50)])
    create_index(tmp_path / "i", bundle, [tmp_path / "f.npz"], progress=False)
    server = served(tmp_path / "i")
    client = server.client
    query = {"vector": features[7].tolist(), "k": 2}
    first, second = client.post("/v1/search", json=query).json()["results"]
    assert first["id"] == "f7" and first["image_url"] is None
    codes = features @ makers.weights().astype(np.float64)
    apart = [sum(abs(a - b) for a, b in zip(codes[7], code, strict=True)) for code in codes]
    nearest = sorted(range(50), key=apart.__getitem__)[1]
    assert second["id"] == f"f{nearest}"
    assert second["distance"] == pytest.approx(apart[nearest], rel=1e-5)
    assert "not images" in post(server, b"x").json()["detail"]
    narrow = client.post("/v1/search", json={"vector": [1.0] * 63})
    assert "64 features, not 63" in narrow.json()["detail"]
    assert client.get("/v1/items/f3/image").status_code == 404


def test_the_event_loop_stays_free_while_pictures_are_decoded(served, index_path):
    server, slow = served(index_path, "--workers", "1"), png(2200, 2200, "RGB")
    with ThreadPoolExecutor(4) as pool:
        waiting = [pool.submit(post, server, slow, 1) for _ in range(4)]
        worst = 0.0
        while not all(request.done() for request in waiting):
            began = time.perf_counter()
            assert server.client.get("/livez").status_code == 200
            worst = max(worst, time.perf_counter() - began)
        assert {request.result().status_code for request in waiting} == {200}
    assert worst < 1.0


def test_jobs_run_beside_long_jobs_unless_their_client_has_left():
    async def quick_and_long():
        turns, gate, begun = Turns("images", 2, 16), threading.Event(), []
        quick = asyncio.create_task(turns.run(lambda: 5))
        long = [asyncio.create_task(turns.run(gate.wait)) for _ in range(2)]
        assert await asyncio.wait_for(quick, 5) == 5
        TRAIL.set(Trail(has_left=lambda: True))
        gone = asyncio.create_task(turns.run(lambda: begun.append(1)))
        await asyncio.sleep(0.05)
        assert not any(task.done() for task in (*long, gone))
        gate.set()
        assert await asyncio.gather(*long) == [True, True]
        with pytest.raises(ClientDisconnect):
            await gone
        assert not begun
        turns.close()

    asyncio.run(quick_and_long())


@pytest.mark.parametrize("pool", ["images", "searches", "changes", "pictures", "snapshots"])
def test_an_index_is_in_use_while_a_thread_of_any_pool_works(pool):
    """A search with an image runs in the pool of images."""

    async def work():
        workers, gate = Workers(Settings()), threading.Event()
        assert workers.idle
        hanging = asyncio.create_task(getattr(workers, pool).run(gate.wait))
        await asyncio.sleep(0.05)
        assert not workers.idle
        gate.set()
        await hanging
        workers.close()

    asyncio.run(work())


def test_jobs_whose_callers_gave_up_hold_no_data_behind_a_job_that_hangs():
    class Body(bytearray):
        __hash__ = object.__hash__

    async def waves():
        turns, gate = Turns("searches", 1, 8), threading.Event()
        hanging = asyncio.create_task(turns.run(lambda: gate.wait(20)))
        await asyncio.sleep(0.05)
        bodies: weakref.WeakSet[Body] = weakref.WeakSet()
        for _ in range(3):
            body = Body(1000)
            bodies.add(body)
            late = [asyncio.create_task(turns.run(body.clear)) for _ in range(8)]
            await asyncio.sleep(0.01)
            assert turns.waiting == 8
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)
            del body, late, task
        await asyncio.sleep(0.01)
        gc.collect()
        assert turns.waiting == 0 and not bodies
        gate.set()
        await hanging
        turns.close()

    asyncio.run(waves())


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_a_server_finishes_its_requests_before_it_stops(how, served, index_path):
    server, slow = served(index_path), png(1800, 1800, "RGB")
    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(post, server, slow, 1)
        time.sleep(0.15)
        server.process.send_signal(how)
        assert asking.result(15).status_code == 200
    assert server.process.wait(15) == 0
    assert server.process.stderr.read() == ""


EARLY_SIGNAL = """
import gc, os, signal, sys
import retrieval

freeze = gc.freeze

def freeze_and_signal():
    freeze()
    os.kill(os.getpid(), signal.SIGTERM)

gc.freeze = freeze_and_signal
retrieval.serve(sys.argv[1], port=0)
print("ended in good order")
"""


def test_a_signal_before_uvicorn_handles_signals_ends_the_server(index_path, process):
    done = process("-c", EARLY_SIGNAL, index_path, seconds=60)
    assert done.code == 0 and "ended in good order" in done.out, done.err
