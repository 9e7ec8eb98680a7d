"""A real server in a process of its own, asked over real HTTP."""

import io
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from PIL import Image
from retrieval.serving.index.index import create_index, open_index
from starlette.requests import ClientDisconnect

EVERY = ["/", "/page.css", "/page.js", "/v1/index", "/livez", "/readyz"]


@pytest.fixture(scope="module")
def server(shared, index_path, photos):
    return shared(
        index_path, "--max-bytes", "100000", "--max-pixels", "1000000", "--images", str(photos)
    )


def post(server, content, k=None, name="query.png"):
    return server.client.post(
        "/v1/search", files={"image": (name, content)}, data={} if k is None else {"k": str(k)}
    )


def test_search_answers_as_the_index_does(server, index_path, photos):
    with open_index(index_path, threads=1) as index:
        for path in sorted(photos.rglob("*.png"))[::40]:
            answer = post(server, path.read_bytes(), 4)
            assert answer.status_code == 200
            content = answer.json()
            hits = index.search(index.bundle.encode_image(path), 4)[0]
            assert [(r["id"], r["key"], r["label"]) for r in content["results"]] == [
                (hit.id, hit.id, hit.label) for hit in hits
            ]
            distances = [r["distance"] for r in content["results"]]
            assert distances == pytest.approx([hit.distance for hit in hits], abs=1e-6)
            assert distances == sorted(distances)
            assert 0 < content["took_ms"] < 10_000
            picture = server.client.get(content["results"][0]["image_url"])
            assert picture.content == path.read_bytes()
            assert picture.headers["content-type"] == "image/png"
        assert len(post(server, path.read_bytes()).json()["results"]) == 10
        vector = index.vector("3/0003.png").tolist()
        matches = server.client.post("/v1/search", json={"vector": vector, "k": 1}).json()[
            "results"
        ]
        assert matches[0]["id"] == "3/0003.png"


def test_pages_and_health(server, index_path):
    for path in EVERY:
        answer = server.client.get(path)
        assert answer.status_code == 200, path
        assert "default-src 'none'" in answer.headers["content-security-policy"]
        assert answer.headers["x-content-type-options"] == "nosniff"
    ready = server.client.get("/readyz").json()
    assert set(ready.pop("checks").values()) == {"ok"}
    assert len(ready.pop("bundle")) == 64 and ready == {"status": "ready", "items": 200}
    about = server.client.get("/v1/index").json()
    assert str(index_path.parent) not in str(about)
    assert about["items"] == 200
    assert about["limits"] == {
        "bytes": 100_000,
        "pixels": 1_000_000,
        "batch": 100,
        "batch_bytes": 64_000_000,
    }
    page = server.client.get("/").text
    assert "http://" not in page
    assert "https://" not in page
    first = server.client.get("/v1/items/3%2F0003.png/image")
    again = server.client.get(
        "/v1/items/3%2F0003.png/image", headers={"If-None-Match": first.headers["etag"]}
    )
    assert again.status_code == 304


def png(width, height):
    out = io.BytesIO()
    Image.new("1", (width, height)).save(out, "PNG")
    return out.getvalue()


def test_bad_images_get_a_sentence_and_the_server_lives(server, photos):
    sound = next(photos.rglob("*.png")).read_bytes()
    jpeg = io.BytesIO()
    Image.effect_noise((64, 64), 50).save(jpeg, "JPEG")
    for content, status, says in (
        (b"", 422, "is empty"),
        (b"this is text", 422, "not an image in a known format"),
        (jpeg.getvalue()[:700], 422, "damaged"),
        (sound[:60], 422, "damaged|known format"),
        (png(2000, 2000), 422, "2000 × 2000 pixels; the limit is 1,000,000"),
        (png(20_000, 20_000), 422, "pixels"),
        (sound + bytes(100_000), 413, "100,000"),
        (bytes(5_000_000), 413, "100,000"),
    ):
        answer = post(server, content)
        assert answer.status_code == status, (answer.text, says)
        assert answer.json().keys() == {"type", "title", "status", "detail", "instance"}
        assert any(word in answer.json()["detail"] for word in says.split("|"))
        assert post(server, sound).status_code == 200


def test_bad_requests_get_a_sentence(server, photos):
    url = "/v1/search"
    sound = next(photos.rglob("*.png")).read_bytes()
    vector = [0.0] * 16
    for request, status, says in (
        ({"content": b"x"}, 415, "multipart/form-data"),
        ({"data": {"image": "text"}}, 415, "multipart/form-data"),
        ({"files": {"picture": sound}}, 400, 'a file in its field "image"'),
        ({"files": {"image": (None, "text")}}, 400, 'a file in its field "image"'),
        ({"files": [("image", sound), ("image", sound)]}, 400, "Too many files"),
        ({"files": {"image": sound}, "data": {"k": "0"}}, 400, "whole number from 1 to 1000"),
        ({"files": {"image": sound}, "data": {"k": "²"}}, 400, "whole number from 1 to 1000"),
        (
            {"files": {"image": sound}, "data": {"k": "9" * 5000}},
            400,
            "Part exceeded|part exceeded|from 1 to 1000",
        ),
        ({"content": b"x", "headers": {"content-type": "multipart/form-data"}}, 400, "boundary"),
        (
            {"content": b"x", "headers": {"content-type": "multipart/form-data; boundary=a"}},
            400,
            "form",
        ),
        ({"content": b"{", "headers": {"content-type": "application/json"}}, 400, "not JSON"),
        (
            {"content": b"[" * 100_000, "headers": {"content-type": "application/json"}},
            400,
            "not JSON",
        ),
        (
            {"content": b"[" * 3_000_000, "headers": {"content-type": "application/json"}},
            413,
            "too large",
        ),
        ({"json": []}, 400, "JSON must be"),
        ({"json": {"vector": vector, "kk": 3}}, 400, "JSON must be"),
        ({"json": {"vector": "no"}}, 400, "finite numbers"),
        ({"json": {"vector": [True] * 16}}, 400, "finite numbers"),
        ({"json": {"vector": [10**400] * 16}}, 400, "finite numbers"),
        ({"json": {"vector": []}}, 400, "finite numbers"),
        (
            {"content": b'{"vector": [NaN]}', "headers": {"content-type": "application/json"}},
            400,
            "finite numbers",
        ),
        ({"json": {"vector": vector[1:]}}, 422, "has 16 numbers, not 15"),
        ({"json": {"vector": [1e300] * 16}}, 422, "beyond float32"),
        ({"json": {"vector": vector, "k": 2.5}}, 400, "whole number"),
        ({"json": {"vector": vector, "k": True}}, 400, "whole number"),
    ):
        answer = server.client.post(url, **request)
        assert answer.status_code == status, (request.keys(), answer.text)
        assert any(word in answer.json()["detail"] for word in says.split("|")), answer.text
    assert server.client.get(url).status_code == 405
    for path in (
        "/nowhere",
        "/v1/items/200/image",
        "/v1/items/-1/image",
        "/v1/items/x/image",
        f"/v1/items/{10**30}/image",
    ):
        answer = server.client.get(path)
        assert answer.status_code == 404
        assert answer.json()["detail"].endswith(".")
    assert post(server, sound).status_code == 200


def test_originals_are_shown_only_below_folders_that_the_operator_names(
    served, index_path, photos, tmp_path
):
    """An index names files of this machine, and may be a stranger's."""
    query = {"vector": [0.0] * 16, "k": 1}
    url = "/v1/items/3%2F0003.png"
    plain = served(index_path).client
    (hit,) = plain.post("/v1/search", json=query).json()["results"]
    assert hit["image_url"] is None and plain.get(url).json()["thumbnail_url"] is None
    assert "outside the folders that may be shown" in plain.get(f"{url}/image").json()["detail"]
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "link").symlink_to(photos)
    for folder, status in (
        (tmp_path / "elsewhere", 404),
        (photos / "3", 200),
        (tmp_path / "link", 200),
    ):
        client = served(index_path, "--images", str(folder)).client
        for what in ("image", "thumbnail"):
            assert client.get(f"{url}/{what}").status_code == status, folder
    assert (
        client.get("/v1/items/3%2F0003.png/image").content
        == (photos / "3" / "0003.png").read_bytes()
    )


def test_an_image_that_changed_or_went_is_not_given_out(makers, bundle_path, served, tmp_path):
    folder = tmp_path / "photos"
    paths = makers.write_digits(folder, 4)
    Image.fromarray(makers.digits()[0][9]).save(folder / "x.tiff")
    create_index(tmp_path / "i", bundle_path, [folder], progress=False)
    server = served(tmp_path / "i", "--images", str(folder))
    keys = {
        row: server.client.post("/v1/search", json={"vector": [0.0] * 16}).json()["results"][row]
        for row in range(5)
    }
    urls = {hit["key"]: hit["image_url"] for hit in keys.values()}
    shown = server.client.get(urls["x.tiff"])
    assert shown.headers["content-type"] == "image/png"  # browsers show no TIFF
    assert np.array_equal(np.asarray(Image.open(io.BytesIO(shown.content))), makers.digits()[0][9])
    paths[0].unlink()
    paths[1].write_bytes(b"something else")
    for path, says in ((paths[0], "no longer where"), (paths[1], "was changed after")):
        answer = server.client.get(urls[path.relative_to(folder).as_posix()])
        assert answer.status_code == 404
        assert says in answer.json()["detail"]
    assert server.client.get(urls[paths[2].relative_to(folder).as_posix()]).status_code == 200


def test_features_and_rescorer(makers, served, tmp_path):
    bundle = makers.make_bundle(tmp_path / "b", kind="features", normalized=False, rescorer=True)
    features = np.random.default_rng(0).normal(size=(50, 64))
    np.savez(tmp_path / "f.npz", features=features, keys=[f"f{row}" for row in range(50)])
    create_index(tmp_path / "i", bundle, [tmp_path / "f.npz"], progress=False)
    server = served(tmp_path / "i")
    answer = server.client.post("/v1/search", json={"vector": features[7].tolist(), "k": 2}).json()
    assert answer["results"][0]["id"] == "f7"
    assert answer["results"][0]["image_url"] is None
    codes = features @ makers.weights().astype(np.float64)
    second = sorted(
        (sum(abs(a - b) for a, b in zip(codes[7], code, strict=True)), row)
        for row, code in enumerate(codes)
    )[1]
    assert answer["results"][1]["id"] == f"f{second[1]}"
    assert answer["results"][1]["distance"] == pytest.approx(second[0], rel=1e-5)
    assert (
        "not images" in post(server, b"x").json()["detail"] or post(server, b"x").status_code == 422
    )
    assert (
        "64 features, not 63"
        in server.client.post("/v1/search", json={"vector": [1.0] * 63}).json()["detail"]
    )
    assert server.client.get("/v1/items/f3/image").status_code == 404


def test_the_event_loop_stays_free_while_pictures_are_decoded(served, index_path):
    server = served(index_path, "--workers", "1")
    noise = np.random.default_rng(0).integers(0, 256, (2200, 2200, 3), dtype=np.uint8)
    out = io.BytesIO()
    Image.fromarray(noise).save(out, "PNG", compress_level=1)
    slow = out.getvalue()
    with ThreadPoolExecutor(4) as pool:
        waiting = [pool.submit(post, server, slow, 1) for _ in range(4)]
        worst = 0.0
        while not all(request.done() for request in waiting):
            began = time.perf_counter()
            assert server.client.get("/livez").status_code == 200
            worst = max(worst, time.perf_counter() - began)
        assert {request.result().status_code for request in waiting} == {200}
    assert worst < 1.0


def test_what_waits_is_begun_beside_long_work_unless_its_client_has_left():
    import asyncio

    from retrieval.serving.http.turns import Turns
    from retrieval.serving.stages import TRAIL, Trail

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


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_it_stops_in_good_order(how, served, index_path):
    server = served(index_path)
    answers = []
    noise = np.random.default_rng(0).integers(0, 256, (1800, 1800, 3), dtype=np.uint8)
    out = io.BytesIO()
    Image.fromarray(noise).save(out, "PNG", compress_level=1)
    asking = threading.Thread(
        target=lambda: answers.append(post(server, out.getvalue(), 1).status_code)
    )
    asking.start()
    time.sleep(0.15)
    server.process.send_signal(how)
    asking.join(15)
    assert server.process.wait(15) == 0
    assert answers == [200]  # what was under way is finished
    assert server.process.stderr.read() == ""


TOLD_EARLY = """
import gc, os, signal, sys
import retrieval

freeze = gc.freeze

def told():
    freeze()
    os.kill(os.getpid(), signal.SIGTERM)

gc.freeze = told
retrieval.serve(sys.argv[1], port=0)
print("ended in good order")
"""


def test_a_signal_that_comes_before_it_listens_ends_the_server(index_path):
    """One that came just before uvicorn takes signals was lost, and the server ran on."""
    done = subprocess.run(
        [sys.executable, "-c", TOLD_EARLY, str(index_path)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert "ended in good order" in done.stdout
