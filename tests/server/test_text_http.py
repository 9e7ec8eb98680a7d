"""Texts over HTTP: searches, batches, encoding, feedback, the client, and what is refused."""

import numpy as np
import pytest
import wire
from makers import WORDS
from retrieval.bundle.bundle import Bundle
from retrieval.client import Client
from retrieval.errors import DataError, ServerError
from retrieval.feedback.feedback_record import FEEDBACK_FILE, FeedbackRecord

SEARCH, BATCH, ENCODE = "/v1/search", "/v1/search/batch", "/v1/encode"


@pytest.fixture(scope="module")
def folder(makers, tmp_path_factory):
    """An index of digits, with their names as labels, by a bundle that takes texts."""
    return makers.make_text_index(tmp_path_factory.mktemp("text") / "digits").parent


@pytest.fixture(scope="module")
def server(shared, folder):
    return shared(folder / "digits")


@pytest.fixture(scope="module")
def bundle(folder):
    return Bundle.open(folder / "bundle", threads=1)


def hits_of(answer):
    assert answer.status_code == 200, answer.text
    return [(hit["id"], hit["distance"]) for hit in answer.json()["results"]]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"filter": "odd = true and row < 300"},
        {"like": ["000", "001"], "dislike": ["002"]},
        {"group_by": "label", "group_size": 2},
        {"diversity": 0.5, "offset": 2, "facets": ["label"], "order_by": "row"},
        {"max_distance": 0.6, "candidates": 40},
    ],
)
def test_a_search_by_text_is_the_search_by_its_vector(server, bundle, options):
    vector = bundle.encode_text("three").vector[0].tolist()
    by_text = server.client.post(SEARCH, json={"text": "three", "k": 7, **options})
    by_vector = server.client.post(SEARCH, json={"vector": vector, "k": 7, **options})
    assert hits_of(by_text) == hits_of(by_vector)
    assert by_text.json().get("facets") == by_vector.json().get("facets")
    assert len(hits_of(by_text)) > 0


def test_the_index_says_that_it_takes_texts(server, shared, index_path):
    assert server.client.get("/v1/index").json()["text"] is True
    assert shared(index_path).client.get("/v1/index").json()["text"] is False


def test_batches_and_encoding_of_texts(server, bundle):
    answer = server.client.post(BATCH, json={"queries": [{"text": w} for w in WORDS], "k": 1})
    assert [entry["results"][0]["label"] for entry in answer.json()["answers"]] == list(WORDS)
    expected = bundle.encode_text(WORDS).vector
    encoded = server.client.post(ENCODE, json={"text": list(WORDS)}).json()
    np.testing.assert_allclose(encoded["vectors"], expected, rtol=1e-5, atol=1e-6)
    assert encoded["bundle"] == bundle.sha256
    single = server.client.post(ENCODE, json={"text": "two"}).json()
    np.testing.assert_allclose(single["vectors"], expected[2:3], rtol=1e-5, atol=1e-6)


def test_the_clients_send_texts(server, bundle):
    with Client(server.url) as client:
        hits = client.search(text="five", k=3, filter="odd = true")
        assert hits[0].label == "five"
        batch = client.search_batch(texts=["six", "one"], k=1)
        assert [answer[0].label for answer in batch.answers] == ["six", "one"]
        vectors = client.encode(texts=["six", "one"]).vectors
        np.testing.assert_allclose(vectors, bundle.encode_text(["six", "one"]).vector, atol=1e-6)
        assert client.index().text is True
        with pytest.raises(DataError, match="exactly one of an image, a vector, an id and a text"):
            client.search(text="one", id="000")
        with pytest.raises(DataError, match="not both"):
            client.encode(b"image", texts=["one"])
        with pytest.raises(ServerError, match="must be text of 1 to 10,000 characters"):
            client.search(text="a" * 10_001)


@pytest.mark.parametrize(
    ("path", "body", "status", "says"),
    [
        (SEARCH, {"text": ""}, 400, '"text" must be text of 1 to 10,000 characters'),
        (SEARCH, {"text": "a" * 10_001}, 400, "text of 1 to 10,000 characters"),
        (SEARCH, {"text": 5}, 400, "text of 1 to 10,000 characters"),
        (SEARCH, {"text": ["one"]}, 400, "text of 1 to 10,000 characters"),
        (SEARCH, {"text": " \t"}, 400, "The text is empty"),
        (SEARCH, {"text": "a\0"}, 400, "NUL"),
        (SEARCH, {"text": "one", "id": "000"}, 400, "exactly one of vector, id, text among them"),
        (SEARCH, {"text": "one", "vector": [1.0]}, 400, "exactly one of vector, id, text"),
        (SEARCH, {"text": "one", "scores": True}, 400, "not for texts"),
        (BATCH, {"queries": [{"text": "one"}, {"id": "000"}]}, 400, "or all texts"),
        (BATCH, {"queries": [{"text": "one"}, {"text": " "}]}, 400, r"text[1]: The text is empty"),
        (BATCH, {"queries": [{"text": "one"}] * 101}, 400, "101 queries; the limit is 100"),
        (ENCODE, {"text": []}, 400, '"text" must be'),
        (ENCODE, {"text": ["one", 1]}, 400, '"text" must be'),
        (ENCODE, {"text": ["one"] * 101}, 400, "101 texts; the limit is 100"),
        (ENCODE, {"texts": ["one"]}, 400, 'JSON must be an object of "text"'),
        ("/v1/identify", {"text": "one"}, 400, "exactly one of vector, id among them"),
    ],
)
def test_what_cannot_be_asked_is_refused_in_a_sentence(server, path, body, status, says):
    wire.refused(server.client.post(path, json=body), status, says)


def test_half_a_surrogate_pair_is_refused(server):
    content = b'{"text": "\\ud83d"}'
    json_type = {"Content-Type": "application/json"}
    for path in (SEARCH, ENCODE):
        answer = server.client.post(path, content=content, headers=json_type)
        assert answer.status_code == 400, answer.text
        assert answer.json()["detail"]


def test_a_model_without_texts_says_so(shared, index_path):
    client = shared(index_path).client
    for path, body in (
        (SEARCH, {"text": "one"}),
        (SEARCH, {"text": "one", "like": ["3/0003.png"]}),
        (BATCH, {"queries": [{"text": "one"}]}),
        (ENCODE, {"text": "one"}),
    ):
        wire.refused(client.post(path, json=body), 422, "This index takes no texts")


def test_searches_by_text_are_noted_and_can_be_marked(served, folder, bundle):
    client = served(folder / "digits", "--feedback").client
    plain = client.post(SEARCH, json={"text": "three", "k": 3}).json()
    grouped = client.post(SEARCH, json={"text": "four", "k": 3, "group_by": "label"}).json()
    liked = client.post(SEARCH, json={"text": "four", "k": 3, "like": ["000"]}).json()
    for answer in (plain, grouped, liked):
        first = answer["results"][0]["id"]
        marks = {"search_id": answer["search_id"], "liked": [first]}
        assert client.post("/v1/feedback", json=marks).json() == {"counted": 1}
    with FeedbackRecord.open(folder / "digits" / FEEDBACK_FILE) as record:
        noted = {entry.search.id: entry.search for entry in record.judged()}
    for answer, text in ((plain, "three"), (grouped, "four")):
        vector = noted[answer["search_id"]].query
        np.testing.assert_allclose(vector, bundle.encode_text(text).vector[0], atol=1e-6)
    # Its vector stands for the liked item, too, so nothing can be learned from it.
    assert noted[liked["search_id"]].query is None
