"""The quick reading of forms gives what the library's gives, or leaves them to it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from retrieval.errors import RetrievalError
from retrieval.serving.http import forms
from retrieval.serving.http.body import Body
from retrieval.serving.http.budget import Budget
from retrieval.serving.http.forms import Form
from retrieval.serving.http.queries import read_quickly, read_search

KIND = "multipart/form-data; boundary=b-1"
IMAGE = b'Content-Disposition: form-data; name="image"; filename="q.png"'
K = b'Content-Disposition: form-data; name="k"'


def form(*parts: tuple[bytes, bytes], end: bytes = b"--b-1--\r\n") -> bytes:
    """Return a form's body, of headers and content of each part."""
    return b"".join(b"--b-1\r\n" + head + b"\r\n\r\n" + value + b"\r\n" for head, value in parts) + end


GOOD = form((IMAGE, b"\x89PNG\r\n--b\r\n\r\n--"), (K, b"3"))
TEXTS = [
    GOOD, form((IMAGE + b"\r\nContent-Type: image/png", b"x"), (K, b"3")), form((IMAGE, b"")), form((K, b"3")), form((IMAGE, b"x"), (K, b"1"), (K, b"2")),
    form((IMAGE, b"x"), (IMAGE, b"y")), form((IMAGE, b"x" * 101)), form((b'Content-Disposition: form-data; name="image"', b"x")), form(), b"", b"--b-1--",
    form((b'Content-Disposition: form-data; name="other"', b"x")), form((b'Content-Disposition: form-data; name="other"; filename="f"', b"x")),
    form((IMAGE.lower(), b"x")), form((b"X-More: 1\r\n" + IMAGE, b"x")), form((IMAGE.replace(b"q.png", "süß.png".encode()), b"x")),
    form((IMAGE.replace(b"q.png", b'a\\"b'), b"x")), form((IMAGE.replace(b"q.png", b""), b"x")), form((K.replace(b'"', b""), b"3"), (IMAGE, b"x")),
    form((IMAGE + b"\r\n" + IMAGE, b"x")), form((b"Content-Type: image/png", b"x")), form((IMAGE, b"x"), end=b"--b-1--"), form((IMAGE, b"x"), end=b""),
    form((IMAGE, b"x"), end=b"--b-1--\r\nafter"), b"before\r\n" + GOOD, b"\r\n" + GOOD, form((IMAGE, b"x\r\n--b-1y")), form((IMAGE, b"x\r\n--b-1--\r\n")),
    form((IMAGE, b"x\r\n--b-1 \r\n")), form((IMAGE, b"x")).replace(b"\r\n", b"\n"), GOOD.replace(b"\r\n\r\n", b"\r\n", 1), GOOD[:-1], GOOD[:-20], GOOD * 2,
    b"--b-1\r\n--b-1--\r\n", b"--b-1--\r\n--b-1--\r\n", form((IMAGE, b"x")).replace(b"b-1", b"c-1"), form((K, b"\xff"), (IMAGE, b"x")),
    form((IMAGE.replace(b"name", b"Name"), b"x")), form((IMAGE + b";", b"x")), form((IMAGE.replace(b": form", b":form"), b"x")), form((b"", b"x")),
    *(form(*[(IMAGE, b"x")] * count) for count in (127, 128, 129)), form((K.replace(b"k", b"candidates"), b"x\r\n\r\ny"), (IMAGE, b"\r\n\r\n")),
]  # fmt: skip
KINDS = [
    KIND, 'multipart/form-data; boundary="b-1"', "multipart/form-data;boundary=b-1", "Multipart/Form-Data; boundary=b-1",
    "multipart/form-data; boundary=b-1; charset=utf-8", "multipart/form-data", "multipart/form-data; boundary=", "multipart/form-data; boundary=b",
    "multipart/form-data; boundary=b-1; boundary=c", "multipart/form-data; boundary=" + "b" * 71,
]  # fmt: skip


def read(kind: str, content: bytes, images: int = 1) -> tuple[Any, ...]:
    """Return what a form has, or what is said of it."""
    try:
        found = Form(kind, content, ("k", "candidates"), 100, images)
    except RetrievalError as fault:
        return type(fault).__name__, str(fault)
    return found.images, found.get("k"), found.get("candidates")


@pytest.mark.parametrize("images", [1, 128])
def test_both_readings_agree(images, monkeypatch):
    asked = [(KIND, text) for text in TEXTS] + [(kind, GOOD) for kind in KINDS]
    quick = [read(*each, images) for each in asked]
    read_by_it = sum(forms.quick_parts(*each) is not None for each in asked)
    monkeypatch.setattr(forms, "quick_parts", lambda kind, content: None)
    for each, mine in zip(asked, quick, strict=True):
        assert mine == read(*each, images), each
    assert 10 < read_by_it < len(asked) - 10


def test_what_programs_send_is_read_quickly():
    assert forms.quick_parts(KIND, GOOD) == [("image", True, b"\x89PNG\r\n--b\r\n\r\n--"), ("k", False, b"3")]


def body_of(kind: str, content: bytes) -> Body:
    """Return a body that has arrived."""
    limits = {"form": 10**6, "json": 10**6, "image": 10**6}
    body = Body({"content-type": kind, "content-length": str(len(content))}, limits, "")

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": content}

    async def arrive() -> None:
        budget = Budget(10**7)
        with budget.upload() as upload:
            await body.read(receive, budget, upload, 10)

    asyncio.run(arrive())
    return body


FILTER = K.replace(b'"k"', b'"filter"')


@pytest.mark.parametrize(
    ("kind", "content", "quick"),
    [
        (KIND, GOOD, True),
        (KIND, form((IMAGE, bytes(200_000)), (K, b"3")), True),
        (KIND, form((IMAGE, bytes(300_000)), (K, b"3")), False),
        (KIND, form((IMAGE, b"x"), (FILTER, b'{"label": "a"}' + b" " * 20_000)), False),
        (KIND, form((IMAGE.replace(b"q.png", "süß.png".encode()), b"x"), (K, b"3")), False),
        ("image/png", bytes(200_000), True),
        ("image/png", bytes(300_000), False),
        ("application/json", b'{"vector": [1, 2], "k": 3}', True),
        ("application/json", b'{"vector": [1, 2]}' + b" " * 20_000, False),
    ],
)
def test_the_event_loop_reads_what_takes_no_time_and_leaves_the_rest_whole(kind, content, quick):
    body = body_of(kind, content)
    found = read_quickly(body, {}, 10**6)
    assert (found is not None) == quick
    whole = read_search(body_of(kind, content) if quick else body, {}, 10**6)
    mine = whole if found is None else found
    assert mine.given[0].image == whole.given[0].image
    assert (mine.k, mine.where) == (whole.k, whole.where)
    assert (whole.given[0].image is None) == (kind == "application/json")
