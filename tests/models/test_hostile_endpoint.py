"""A hostile endpoint gets one sentence: no crash, huge memory or endless wait, no vector kept."""

from __future__ import annotations

import gzip
import json
import threading
from typing import Any

import numpy as np
import pytest
from embedding_server import answer, send, serving
from makers import digits
from refusals import refusal
from retrieval.errors import DataError
from retrieval.host.plugins import load_plugins
from retrieval.plugin import ArrayDataset
from retrieval.run.encoders import encoder_at

from retrieval_models import endpoint
from retrieval_models.endpoint import Endpoint

IMAGES, LABELS = digits()
DATA = ArrayDataset(IMAGES[:20], list(map(str, LABELS[:20])))
ALL = np.arange(20)
SHAPE = "does not answer with `data`, a list of 16 objects with `index` and `embedding`"


def changed(change: Any) -> Any:
    """Return a reply that changes the rows of a good answer."""

    def reply(handler: Any, body: Any) -> None:
        good = answer(body)
        good["data"] = change(good["data"])
        send(handler, json.dumps(good).encode())

    return reply


def text(content: bytes, **more: str) -> Any:
    return lambda handler, body: send(handler, content, **more)


def each(value: Any) -> Any:
    return changed(lambda rows: [{**row, "embedding": value} for row in rows])


WRONG = {
    "not JSON": text(b"hello"),
    "not UTF-8": text(b'{"data": "\xff\xfe"}'),
    "no object": text(b"[1, 2]"),
    "no data": text(b"{}"),
    "null": text(b"null"),
    "deep": text(b"[" * 1_000_000),
    "deep data": text(b'{"data": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"),
    "one too few": changed(lambda rows: rows[1:]),
    "one too many": changed(lambda rows: [*rows, {**rows[0], "index": 99}]),
    "an index twice": changed(lambda rows: [rows[0], *rows[:-1]]),
    "an index that is a list": changed(lambda rows: [{**row, "index": [0]} for row in rows]),
    "rows that are numbers": changed(lambda rows: list(range(16))),
    "NaN": each([float("nan"), 1.0]),
    "infinity": each([float("inf"), 1.0]),
    "beyond float32": each([1e300, 1.0]),
    "beyond float64": text(
        json.dumps({"data": [{"index": i, "embedding": [0]} for i in range(16)]})
        .replace("[0]", "[1e999]")
        .encode()
    ),
    "text": each(["1", "2"]),
    "booleans": each([True, False]),
    "null in a vector": each([None, 1.0]),
    "a number": each(1.0),
    "nested": each([[1.0]]),
    "empty": each([]),
    "base64": each("AACAPwAAAEA="),
    "an object": each({"0": 1.0}),
    "a huge whole number": each([10**400, 1]),
    "ragged": changed(lambda rows: [{**r, "embedding": [0.5] * (r["index"] + 1)} for r in rows]),
    "too wide": each([0] * (endpoint.MAX_NUMBERS + 1)),
    "a key twice": text(b'{"data": [], "data": []}'),
    "gzip": lambda handler, body: send(
        handler, gzip.compress(json.dumps(answer(body)).encode()), Content_Encoding="gzip"
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_an_answer_of_another_shape_is_refused(name):
    with serving(WRONG[name]) as server:
        embedded = Endpoint(f"{server.url}?model=m")
        says = refusal(DataError, embedded, DATA, ALL)
        assert SHAPE in says and says.count("\n") == 0 and len(server.bodies) == 1
    # nothing of it was kept: the next, honest server is asked for every image
    with serving() as honest:
        embedded.url = honest.url
        assert embedded(DATA, ALL).shape == (20, 64)
        assert sum(len(body["input"]) for body in honest.bodies) == 20


def test_vectors_that_change_their_dimension_are_refused():
    def reply(handler: Any, body: Any) -> None:
        good = answer(body)
        for row in good["data"]:
            row["embedding"] = row["embedding"][: len(good["data"])]
        send(handler, json.dumps(good).encode())

    with serving(reply) as server:
        says = refusal(DataError, encoder_at(load_plugins(), f"{server.url}?model=m"), DATA, ALL)
    assert says == f"{server.url} gave vectors of different dimensions."


def test_an_endless_answer_is_cut_off():
    sent = []

    def endless(handler: Any, body: Any) -> None:
        handler.send_response(200)
        handler.end_headers()
        while True:
            handler.wfile.write(b" " * (1 << 20))
            sent.append(1)

    with serving(endless) as server:
        says = refusal(DataError, encoder_at(load_plugins(), f"{server.url}?model=m"), DATA, ALL)
    assert "answers with more than 32 MiB" in says and len(sent) < 64


def test_an_answer_that_drips_is_cut_off(monkeypatch):
    monkeypatch.setattr(endpoint, "ANSWER_SECONDS", 0.5)

    over = threading.Event()

    def dripping(handler: Any, body: Any) -> None:
        handler.send_response(200)
        handler.end_headers()
        while not over.wait(0.05):
            handler.wfile.write(b" ")

    with serving(dripping) as server:
        says = refusal(DataError, encoder_at(load_plugins(), f"{server.url}?model=m"), DATA, ALL)
        over.set()
    assert "for more than 0 seconds" in says


def test_silence_ends(monkeypatch):
    monkeypatch.setattr(endpoint, "WAIT_SECONDS", 0.3)
    over = threading.Event()
    with serving(lambda handler, body: over.wait()) as server:
        says = refusal(DataError, encoder_at(load_plugins(), f"{server.url}?model=m"), DATA, ALL)
        over.set()
    assert "cannot be reached: " in says


def test_a_redirect_is_not_followed_with_the_key(monkeypatch):
    monkeypatch.setenv("RETRIEVAL_ENDPOINT_KEY", "sk-secret")
    with serving() as elsewhere:
        reply = lambda handler, body: send(handler, b"", 307, Location=elsewhere.url)  # noqa: E731
        with serving(reply) as server:
            encoder = encoder_at(load_plugins(), f"{server.url}?model=m")
            says = refusal(DataError, encoder, DATA, ALL)
        assert "answers 307" in says and "sk-secret" not in says and not elsewhere.headers


def test_an_error_page_is_quoted_briefly_and_printably():
    page = ("\x1b]0;title\x07\x1b[2J" + "<b>no</b>" * 100_000).encode()
    with serving(lambda handler, body: send(handler, page, 500)) as server:
        says = refusal(DataError, encoder_at(load_plugins(), f"{server.url}?model=m"), DATA, ALL)
    assert "answers 500" in says and "\x1b" not in says and "\x07" not in says and len(says) < 600


@pytest.mark.parametrize(
    "bytes_", [b"", b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n{", b"\0" * 99]
)
def test_a_connection_that_breaks_is_a_sentence(bytes_):
    def broken(handler: Any, body: Any) -> None:
        handler.wfile.write(bytes_)
        handler.close_connection = True

    with serving(broken) as server:
        says = refusal(DataError, encoder_at(load_plugins(), f"{server.url}?model=m"), DATA, ALL)
    assert "cannot be reached: " in says


def test_a_damaged_cache_is_named():
    with serving() as server:
        endpoint = Endpoint(f"{server.url}?model=damaged")
        endpoint(DATA, ALL)
        endpoint.cache_file.write_bytes(b"nonsense" * 1000)
        says = refusal(DataError, endpoint, DATA, ALL)
    assert f"{endpoint.cache_file}: " in says and "Delete this file" in says
