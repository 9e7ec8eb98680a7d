"""Changes while the index is locked, and uploads of which the index keeps only a thumbnail."""

import io
import sqlite3
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import numpy as np
import wire
from PIL import Image
from retrieval.index.index import Index

WIDTH = 16
_BUSY = "too many changes are waiting"


@contextmanager
def held(index: Path) -> Iterator[None]:
    """Context manager that keeps all writers of an index waiting."""
    record = sqlite3.connect(index / "items.sqlite", isolation_level=None)
    try:
        record.execute("begin immediate")
        yield
        record.execute("rollback")
    finally:
        record.close()


def test_changes_beyond_the_limit_of_the_queue_are_refused(served, empty):
    server, vector = served(empty, "--open", "write"), {"vector": [0.5] * WIDTH}
    server.client.put("/v1/items/first", json=vector)

    def put(number: int) -> httpx.Response:
        return httpx.put(f"{server.url}/v1/items/{number}", json=vector, timeout=30)

    with ThreadPoolExecutor(25) as pool:
        with held(empty):
            writers = [pool.submit(put, number) for number in range(25)]
            # One change is being written, and sixteen wait.
            wire.until(lambda: sum(writer.done() for writer in writers) == 8)
            assert server.client.post("/v1/search", json={"id": "first"}).status_code == 200
            refused = [writer.result() for writer in writers if writer.done()]
        statuses = {str(number): writers[number].result().status_code for number in range(25)}
    assert sorted(statuses.values()) == [200] * 17 + [503] * 8
    for answer in refused:
        assert answer.headers["retry-after"] == "1" and _BUSY in answer.json()["detail"]
        assert answer.headers["content-type"] == "application/problem+json"
    with Index.open(empty, threads=1) as index:
        place = {item.id for item in index.scan(limit=100)}
    assert place == {"first"} | {id for id, status in statuses.items() if status == 200}
    assert server.client.put("/v1/items/again", json=vector).status_code == 200


def photo(seed: int, size: tuple[int, int] = (900, 600)) -> bytes:
    """A JPEG that does not compress well."""
    pixels = np.random.default_rng(seed).integers(0, 256, (*reversed(size), 3), np.uint8)
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "JPEG", quality=95)
    return out.getvalue()


def test_an_upload_may_keep_only_a_thumbnail(served, empty, makers, tmp_path, cli):
    server, image = served(empty, "--open", "write"), photo(1)
    content = {"files": {"image": image}, "data": {"keep": "thumbnail", "label": "a"}}
    for replaced in (False, True):
        answer = server.client.put("/v1/items/a%2Fb", **content).json()
        assert answer == {"id": "a/b", "replaced": replaced}
    plain = {"label": "b", "metadata": {"price": 3}}
    assert server.client.patch("/v1/items/a%2Fb", json=plain).status_code == 200

    def look(client):
        item = client.get("/v1/items/a%2Fb").json()
        size = {"bytes": len(image), "width": 900, "height": 600}
        assert item | size | {"keep": "thumbnail", **plain} == item
        (hit,) = client.post("/v1/search", files={"image": image}).json()["results"]
        assert hit["id"] == "a/b" and hit["distance"] < 0.01
        urls = {entry[f"{kind}_url"] for entry in (hit, item) for kind in ("image", "thumbnail")}
        for url in urls:
            shown = client.get(url)
            assert shown.headers["content-type"] == "image/jpeg"
            assert Image.open(io.BytesIO(shown.content)).size == (256, 171)

    look(server.client)
    wire.log_of(server)
    assert sum(path.stat().st_size for path in empty.rglob("*.sqlite*")) < len(image)
    look(served(empty).client)
    other = makers.make_bundle(tmp_path / "other", seed=5)
    done = cli("index", "migrate", empty, other)
    assert done.code == 2 and "a/b" in done.err


def test_an_image_without_a_thumbnail_changes_nothing(served, empty):
    client = served(empty, "--open", "write", "--max-pixels", "100000").client
    for content in (photo(1), photo(2, (300, 200))[:5000], b"\x89PNG\r\n\x1a\n" + bytes(100)):
        upload = {"files": {"image": content}, "data": {"keep": "thumbnail"}}
        answer = client.put("/v1/items/a", **upload)
        assert answer.status_code == 422, answer.text
    assert client.get("/v1/index").json()["items"] == 0
