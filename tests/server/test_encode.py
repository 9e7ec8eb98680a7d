"""Images become vectors over HTTP, and nothing is stored."""

import json
from base64 import b64decode, b64encode

import numpy as np
import pytest
import wire
from retrieval.bundle.bundle import Bundle
from retrieval.index.index import Index

from retrieval_server.forms import Body
from retrieval_server.keys import add_key, new_key
from retrieval_server.problems import RequestError
from retrieval_server.request_bodies import embeddings_of

ENCODE, EMBEDDINGS = "/v1/encode", "/v1/embeddings"
PNG = {"Content-Type": "image/png"}


def data_url(image: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{b64encode(image).decode()}"


@pytest.fixture(scope="module")
def images(photos):
    return [path.read_bytes() for path in sorted(photos.rglob("*.png"))[:20:8]]


@pytest.fixture(scope="module")
def client(shared, index_path):
    return shared(index_path).client


@pytest.fixture(scope="module")
def bundle(bundle_path):
    return Bundle.open(bundle_path, threads=1)


@pytest.fixture(scope="module")
def expected(bundle, images):
    return np.concatenate([bundle.encode_image(image).vector for image in images])


def test_images_are_encoded_as_the_bundle_encodes_them(client, images, expected, bundle):
    before = client.get("/v1/index").json()
    files = [("image", image) for image in images]
    for answer, rows in (
        (client.post(ENCODE, files=files).json(), expected),
        (client.post(ENCODE, content=images[0], headers=PNG).json(), expected[:1]),
        (
            client.post(f"/v1/indexes/{before['index']}/encode", files=files[:1]).json(),
            expected[:1],
        ),
    ):
        assert answer.keys() == {"vectors", "bundle"}
        np.testing.assert_allclose(answer["vectors"], rows, rtol=1e-5, atol=1e-6)
        assert answer["bundle"] == before["bundle"] == bundle.sha256
    hit = client.post("/v1/search", json={"vector": answer["vectors"][0], "k": 1}).json()
    assert hit["results"][0]["distance"] < 1e-5
    assert client.get("/v1/index").json() == before


def test_embeddings_have_the_shape_of_openai(client, images, expected, bundle):
    name = client.get("/v1/index").json()["index"]
    # What OpenAI's Python client sends, which asks for base64 unless its user names a format.
    request = {"input": [data_url(image) for image in images], "model": bundle.sha256}
    answer = client.post(EMBEDDINGS, json={**request, "encoding_format": "base64"}).json()
    plain = client.post(EMBEDDINGS, json=request).json()
    assert (
        {**answer, "data": []}
        == {**plain, "data": []}
        == {
            "object": "list",
            "data": [],
            "model": bundle.sha256,
            "usage": {"prompt_tokens": 0, "total_tokens": 0},
        }
    )
    for index, (coded, entry) in enumerate(zip(answer["data"], plain["data"], strict=True)):
        assert (coded["object"], coded["index"]) == ("embedding", index)
        vector = np.frombuffer(b64decode(coded["embedding"]), "<f4")
        assert entry == {**coded, "embedding": vector.astype(float).tolist()}
        np.testing.assert_allclose(vector, expected[index], rtol=1e-5, atol=1e-6)
    single = {"input": data_url(images[0], "IMAGE/PNG;x=y"), "model": name}
    (alone,) = client.post(EMBEDDINGS, json=single).json()["data"]
    np.testing.assert_allclose(alone["embedding"], expected[0], rtol=1e-5, atol=1e-6)


def test_what_is_no_image_is_refused_in_a_sentence(shared, index_path, client, images):
    name = client.get("/v1/index").json()["index"]
    sound = data_url(images[0])
    url = "is not an image as a data URL"
    for given, status, says in (
        ("https://example.com/a.png", 400, url),
        ("a red shoe", 400, url),
        (sound.removeprefix("data:"), 400, url),
        (sound.replace("image/png", "text/plain"), 400, url),
        (sound.replace(";base64", ""), 400, url),
        (f"{sound}é", 400, url),
        (f"{sound[:60]}\n{sound[60:]}", 400, url),
        (sound[:-3], 400, url),
        ([sound, "data:,"], 400, f"Input 2 {url}"),
        ("data:image/png;base64,", 422, "empty"),
        ([sound, data_url(b"no image")], 422, "Image 2"),
        ([sound] * 101, 400, "101 inputs; the limit is 100"),
        ([], 400, '"input" must be'),
        ([[1, 2]], 400, '"input" must be'),
        ([sound, 1], 400, '"input" must be'),
        (None, 400, '"input" must be'),
    ):
        answer = client.post(EMBEDDINGS, json={"input": given, "model": name})
        wire.refused(answer, status, says)
        assert answer.json()["message"] == answer.json()["detail"]  # which OpenAI's client shows
    for extra, status, says in (
        ({"model": "another"}, 404, f'The model of this index is "{name}"'),
        ({"encoding_format": "int8"}, 400, "float or base64"),
        ({"dimensions": 8}, 400, "JSON must be"),
    ):
        request = {"input": sound, "model": name, **extra}
        wire.refused(client.post(EMBEDDINGS, json=request), status, says)
    large = json.dumps({"input": "data:image/png;base64," + "A" * 16_000_000, "model": name})
    json_type = {"Content-Type": "application/json"}
    answer = client.post(EMBEDDINGS, content=large, headers=json_type)
    wire.refused(answer, 413, "16,000,000 bytes")
    for request, status, says in (
        ({"files": [("image", images[0])] * 101}, 400, "100 at most"),
        ({"files": {"image": images[0]}, "data": {"k": "1"}}, 400, "unknown field"),
        ({"content": b"no image", "headers": PNG}, 422, "image"),
        ({"json": {"vector": [1.0]}}, 400, 'JSON must be an object of "text"'),
        ({"content": b"one", "headers": {"Content-Type": "text/plain"}}, 415, "application/json"),
        ({"files": {"image": images[0]}, "params": {"k": 1}}, 400, "query string"),
    ):
        wire.refused(client.post(ENCODE, **request), status, says)
    body = Body("json", "", json.dumps({"input": sound, "model": name}).encode())
    with pytest.raises(RequestError, match="--max-bytes"):
        embeddings_of(body, 1, 10)


def test_a_key_that_may_read_may_encode(served, living, images):
    key, kept = new_key("reader", "read")
    add_key(living.parent / "keys", kept)
    client = served(living, "--keys", str(living.parent / "keys")).client
    for path, request in (
        (ENCODE, {"files": {"image": images[0]}}),
        (EMBEDDINGS, {"json": {"input": data_url(images[0]), "model": "i"}}),
    ):
        assert client.post(path, **request).status_code == 401
        allowed = client.post(path, **request, headers={"Authorization": f"Bearer {key}"})
        assert allowed.status_code == 200, allowed.text


def test_the_bundle_that_is_served_now_encodes(served, living, makers, images, tmp_path):
    client = served(living).client
    path = makers.make_bundle(tmp_path / "other", seed=1, query_vectors=True)
    with Index.open(living, threads=1) as index:
        index.migrate(path, progress=False)
    answer = client.post(ENCODE, content=images[0], headers=PNG).json()
    other = Bundle.open(path, threads=1)
    assert answer["bundle"] == other.sha256
    encoded = other.encode_image(images[0])
    for name, vectors in (("vectors", encoded.vector), ("query_vectors", encoded.query)):
        np.testing.assert_allclose(answer[name], vectors, rtol=1e-5, atol=1e-6)
    assert answer["vectors"] != answer["query_vectors"]
