"""Every method of the blocking and the asyncio client against a real server; pushed folders."""

import asyncio
import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
from urllib.parse import quote
from urllib.request import urlopen

import numpy as np
import pytest
import retrieval
from PIL import Image
from retrieval.client import AsyncClient, Client, Hit, NewItem
from retrieval.errors import DataError, ServerError
from retrieval.index.index import open_index
from retrieval.store.folder import INDEX_FORMAT

WRITE = "--open=admin"
IDS = ["plain", "a/b/image", "100% sure?#&=+", "日本語 🐟", "line\nbreak", "..", ".", "%2e%2e"]
IDS += ["image", "é" * 900]


@pytest.fixture
def folder(photos, tmp_path):
    """A folder with 40 images in two subfolders, and two files that are no images."""
    place = tmp_path / "pictures"
    for label in ("0", "1"):
        shutil.copytree(photos / label, place / label)
    (place / "notes.txt").write_text("no image")
    (place / ".hidden.png").write_bytes(b"no image")
    return place


def push(process, server, folder, *options, **environment):
    words = ("-m", "retrieval.cli", "push", folder, server.url, *options)
    return process(*words, seconds=60, cwd=folder.parent, **environment)


def test_every_method_of_a_client(served, empty, photos, tmp_path):
    server = served(empty, WRITE, "--snapshots", str(tmp_path))
    paths = sorted(photos.rglob("*.png"))[: len(IDS)]
    with Client(server.url) as client:
        for id, path in zip(IDS, paths, strict=True):
            metadata = {"length": len(id)}
            numbers = {"length": np.int64(len(id))}
            put = client.put(id, path, label="digit", metadata=numbers)
            assert (put.id, put.replaced) == (id, False)
            assert client.image(id) == path.read_bytes()
            assert client.thumbnail(id).startswith(b"\xff\xd8\xff")
            with urlopen(f"{server.url}/v1/items/{quote(id, safe='')}") as answer:
                assert json.load(answer)["id"] == id
            item = client.get(id)
            seen = (item.id, item.label, item.metadata, item.vector)
            assert seen == (id, "digit", metadata, None)
        plain, second = IDS[:2]
        assert client.put(plain, paths[0], keep="thumbnail").replaced is True
        assert client.patch(plain, label="other").replaced is True
        assert client.get(plain).metadata == {}
        assert client.patch(plain, metadata={"length": 5}).replaced is True
        assert client.get(plain).label == "other"
        vector = client.get(second, vector=True).vector
        path = paths[1]
        with Image.open(path) as picture:
            images = [path, str(path), path.read_bytes(), picture.copy(), np.asarray(picture)]
        for image in images:
            hits = client.search(image, k=2, filter={"label": "digit"}, fields=[], explain=True)
            first = hits[0]
            assert isinstance(first, Hit) and hits.explain
            assert (first.id, first.metadata) == (second, {})
        assert client.search(vector=vector, k=1)[0].id == second
        assert client.search(vector=np.array(vector), k=1)[0].id == second
        assert second not in {hit.id for hit in client.search(id=second)}
        batch = client.search_batch(paths[:3], k=1)
        assert [hits[0].id for hits in batch.answers] == IDS[:3]
        assert list(map(len, client.search_batch(ids=IDS[:2], k=2).answers)) == [2, 2]
        with open_index(empty, threads=1) as local:
            encoded = client.encode(paths[1], Image.open(paths[2]))
            expected = [local.vector(id) for id in IDS[1:3]]
            np.testing.assert_allclose(encoded.vectors, expected, rtol=1e-5, atol=1e-6)
            assert (encoded.bundle, encoded.query_vectors) == (local.bundle.sha256, None)
            assert repr(batch.answers[0]) == repr(local.search(paths[0], k=1))
            assert batch.answers[0]._repr_html_().count("<tr>") == 2
        assert len(client.search_batch(vectors=[vector], k=1).answers) == 1
        assert sorted(item.id for item in client.items(page=2)) == sorted(IDS)
        assert [item.id for item in client.items("label = 'other'")] == [plain]
        by_age = [item.id for item in client.items(page=2, order="newest")]
        # It was changed last.
        assert by_age[0] == plain and sorted(by_age) == sorted(IDS)
        about = client.index()
        assert (about.items, about.input.kind, about.format) == (len(IDS), "image", INDEX_FORMAT)
        added = client.add([NewItem("x", paths[0]), NewItem(second, paths[1])])
        assert (added.added, added.replaced) == (1, 1)
        twice = [client.add([NewItem("y", paths[0])]) for _ in range(2)]
        assert [(entry.added, entry.replaced) for entry in twice] == [(1, 0), (0, 1)]
        assert client.put("y", vector=np.array(vector)).replaced is True
        with open_index(tmp_path / client.snapshot(), threads=1) as copy:
            assert len(copy) == len(IDS) + 2
        named = "id in ('x', 'y')"
        assert client.patch_items(named, label="L", metadata={"a": {"b": 1}}) == 2
        assert client.patch_items("label = 'L'", metadata={"a": {"c": 2}}) == 2
        changed = [(item.id, item.label, item.metadata) for item in client.items(named)]
        assert changed == [(id, "L", {"a": {"b": 1, "c": 2}}) for id in "xy"]
        assert client.delete_items("id in ('x', 'y')") == 2
        for id in IDS:
            client.delete(id)
        assert list(client.items()) == []
        with pytest.raises(ServerError, match="no such item") as fault:
            client.delete("x")
        assert fault.value.status == 404 and fault.value.request_id.startswith("urn:uuid:")
    with pytest.raises(dataclasses.FrozenInstanceError):
        first.label = "x"


def test_asyncio_answers_the_same(served, index_path, photos):
    server = served(index_path, "--images", str(photos))
    paths = sorted(photos.rglob("*.png"))[:8]

    async def ask():
        async with AsyncClient(server.url) as client:
            hits = await asyncio.gather(*(client.search(path, k=3) for path in paths))
            items = [item async for item in client.items(page=150)]
            newest = [item async for item in client.items(page=150, order="newest")]
            with pytest.raises(ServerError) as fault:
                await client.put("a", paths[0])
            return hits, items, newest, await client.index(), fault.value.status

    hits, items, newest, about, status = asyncio.run(ask())
    with Client(server.url, index=about.index) as client:
        assert client.index() == about and len(client.search(paths[0], k=3)) == 3
    with Client(server.url) as client:
        assert list(map(list, hits)) == [list(client.search(path, k=3)) for path in paths]
        assert items == list(client.items()) and len(items) == about.items == 200
        assert newest == list(client.items(order="newest"))
        assert sorted(item.id for item in newest) == [item.id for item in items]
        assert about == client.index() and status == 403
    refused = pytest.raises(ServerError, match="no index")
    with Client(server.url, index="nowhere") as client, refused:
        client.index()


def test_invalid_arguments_are_refused_before_a_request(tmp_path):
    (tmp_path / "pipe.png").mkdir()
    with Client("http://127.0.0.1:1") as client:
        for work, says in (
            (lambda: client.search(), "exactly one of"),
            (lambda: client.search(b"x", id="a"), "exactly one of"),
            (lambda: client.search(tmp_path / "none.png"), "cannot be read"),
            (lambda: client.search(tmp_path / "pipe.png"), "is not a file"),
            (lambda: client.search(np.zeros((2, 2))), "uint8 array"),
            (lambda: client.search(vector=["a"]), "sequence of numbers"),
            (lambda: client.search(vector=[float("nan")]), "JSON"),
            (lambda: client.search(id="\ud800"), "surrogate"),
            (lambda: client.search_batch(), "list of images, vectors, ids or texts"),
            (lambda: client.encode(), "one image"),
            (lambda: client.put("", b"x"), "one character"),
            (lambda: client.put("a", b"x", vector=[1.0]), "not both"),
            (lambda: client.put("a", b"x", metadata={"a": object()}), "type object"),
            (lambda: client.put("a", vector=[1.0], keep="copy"), "keep"),
            (lambda: client.put("a", label="x"), "`patch` changes"),
            (lambda: client.add([]), "one item"),
            (lambda: client.push(tmp_path, connections=0), "connections"),
        ):
            with pytest.raises(DataError, match=says):
                work()


def test_a_push_sends_only_new_and_changed_images(served, empty, folder):
    server = served(empty, WRITE)
    images = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("[0-9]*.png"))
    reports, count = [], len(images)
    with Client(server.url) as client:
        options = {
            "connections": 3,
            "batch_size": 5,
            "progress": lambda *pair: reports.append(pair),
        }
        first = client.push(folder, **options)
        assert (first.added, first.replaced, first.unchanged, first.left_out) == (count, 0, 0, 1)
        assert first.bad == ()
        assert max(reports) == (count, count)
        items = {item.id: item for item in client.items()}
        assert sorted(items) == images
        assert all(item.label == id.partition("/")[0] for id, item in items.items())
        assert client.image(images[0]) == (folder / images[0]).read_bytes()
        shutil.copy(folder / images[-1], folder / images[0])
        again = client.push(folder)
        assert (again.added, again.replaced, again.unchanged) == (0, 1, count - 1)
        # `index add` and `push` agree on what has changed.
        with open_index(empty) as index:
            added = index.add([folder], progress=False)
            assert (added.added, added.changed, added.unchanged) == (0, 0, count)
        again = client.push(folder)
        assert (again.added, again.replaced, again.unchanged) == (0, 0, count)
        client.put("vector", vector=[0.5] * 16)
        assert client.get("vector").sha256 is None


def test_a_push_reports_every_bad_file_and_adds_the_others(served, empty, folder, process):
    server = served(empty, WRITE, "--max-bytes", "5000")
    sound = len(list(folder.rglob("[0-9]*.png")))
    (folder / "0" / "text.png").write_text("text")
    (folder / "1" / "large.jpg").write_bytes(bytes(6000))
    (folder / "empty.gif").touch()
    (folder / "gone.png").symlink_to("nowhere")
    (folder / os.fsdecode(b"\xff.png")).write_bytes(b"x")
    done = push(process, server, folder, "--batch-size", "100")
    assert done.code == 2, done.err
    counts = f"{sound} images added, 0 replaced, 0 there already, 5 refused; 1 left out"
    assert counts in done.out
    for name in ("0/text.png: ", "1/large.jpg: ", "empty.gif: ", "gone.png: ", ".png: Its name"):
        assert name in done.err
    assert "Traceback" not in done.err and "5 of the images below" in done.err
    with Client(server.url) as client:
        assert client.index().items == sound


def test_an_interrupted_push_resumes(served, empty, folder, process):
    server = served(empty, WRITE)
    total = len(list(folder.rglob("[0-9]*.png")))
    command = [sys.executable, "-m", "retrieval.cli", "push", str(folder), server.url]
    command += ["--batch-size", "1", "--connections", "1"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    pushing = subprocess.Popen(command, cwd=folder.parent, **pipes)
    with Client(server.url) as client:
        while client.index().items < 2:
            assert pushing.poll() is None, pushing.communicate()
        pushing.send_signal(signal.SIGINT)
        _, content = pushing.communicate(timeout=30)
        assert pushing.returncode == 130, content
        assert "Run the same command again" in content and "Traceback" not in content
        there = client.index().items
        assert 2 <= there < total
        done = push(process, server, folder)
        assert done.code == 0, done.err
        assert f"{total - there} images added, 0 replaced, {there} there already" in done.out
        assert client.index().items == total


def test_a_push_that_is_impossible_is_one_sentence(served, empty, folder, tmp_path, process):
    server = served(empty)
    refused = push(process, server, folder, RETRIEVAL_KEY="rk_a_b")
    assert refused.code == 2 and "Traceback" not in refused.err
    assert "answered 403" in refused.err and "rk_a_b" not in refused.err + refused.out
    (tmp_path / "none").mkdir()
    with Client(server.url) as client, pytest.raises(DataError, match="holds no image"):
        client.push(tmp_path / "none")
    with Client("http://127.0.0.1:1") as client, pytest.raises(DataError, match="is not a folder"):
        client.push(tmp_path / "nowhere")  # refused before the first request


def test_a_client_imports_nothing_heavy(process):
    code = "from retrieval.client import Client; Client('http://a').close()"
    done = process("-c", f"{code}; import sys; print(*sys.modules)")
    heavy = {"torch", "faiss", "onnxruntime", "starlette", "uvicorn", "PIL"}
    rooms = {"retrieval.bundle", "retrieval.store", "retrieval.index"}
    assert done.code == 0 and not (heavy | rooms) & {*done.out.split()}, done.err


def test_a_loopback_address_uses_no_proxy(served, empty, monkeypatch):
    server = served(empty)
    for variables in (
        {"http_proxy": "http://127.0.0.1:9"},
        {"http_proxy": "http://127.0.0.1:9", "no_proxy": "127.0.0.0/8"},
        {"ALL_PROXY": "socks4://127.0.0.1:9"},
        {"NO_PROXY": "[::1]"},
        {"SSL_CERT_FILE": "/nonexistent"},
    ):
        with monkeypatch.context() as patch, Client(server.url) as client:
            for name, value in variables.items():
                patch.setenv(name, value)
            assert client.index().items == 0, variables


def test_an_error_names_the_proxy_or_certificate_of_the_environment(monkeypatch):
    monkeypatch.setenv("http_proxy", "http://me:secret@127.0.0.1:9")
    client = Client("http://photos.example", retries=retrieval.client.Retries(times=0))
    with client, pytest.raises(ServerError, match=r"http_proxy=http://…@127\.0\.0\.1:9") as fault:
        client.index()
    assert "secret" not in str(fault.value)
    monkeypatch.setenv("all_proxy", "socks4://127.0.0.1:9")
    with pytest.raises(DataError, match=r"cannot be used: .*all_proxy=socks4://127\.0\.0\.1:9"):
        Client("http://photos.example")
    for name in ("http_proxy", "all_proxy"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("SSL_CERT_FILE", "/nonexistent")
    with pytest.raises(DataError, match="certificate that the environment names"):
        Client("https://photos.example")
