"""The server fetches no URL from a request, and opens no path from a request."""

import json
import socket
from pathlib import Path
from urllib.parse import quote

import pytest
import wire
from retrieval.index.index import create_index

MARK = "zzmarker"
WATCH = """
import os, sys
_out = os.open(os.environ["WATCHED"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
def _hook(event, arguments):
    if event == "open" or event.split(".")[0] in ("os", "shutil", "socket", "subprocess", "urllib", "http", "ftplib", "glob", "pathlib", "tempfile", "sqlite3", "webbrowser"):
        os.write(_out, (event + " " + repr(arguments)[:2000] + "\\n").encode("utf-8", "replace"))
sys.addaudithook(_hook)
"""  # noqa: E501


@pytest.fixture
def watched(monkeypatch, tmp_path):
    """The file in which every Python process started from now on records its opens and calls."""
    (tmp_path / "hook").mkdir()
    (tmp_path / "hook" / "sitecustomize.py").write_text(WATCH)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "hook"))
    monkeypatch.setenv("WATCHED", str(tmp_path / "events"))
    return tmp_path / "events"


def request(method: str, path: str, body=b"", kind="application/json", *headers: str) -> bytes:
    """Return a request; a body that is not bytes is sent as JSON."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = [f"{method} {path} HTTP/1.1", "Host: localhost", f"Content-Type: {kind}"]
    lines += [f"Content-Length: {len(content)}", *headers, "", ""]
    return "\r\n".join(lines).encode("latin-1") + content


def of_text(text: str, image: bytes):
    """Yield requests with a text in every place that a server could take for a path or URL."""
    quoted, vector = quote(text, safe=""), [0.25] * 16
    item, index = f"/v1/items/{quoted}", f"/v1/indexes/{quoted}/index"
    for path in (
        *(f"/{text}", f"/{quoted}", f"/page.js/../{text}", index),
        *(item, f"{item}/image", f"{item}/thumbnail"),
        *(f"/v1/item?id={quoted}", f"/v1/item/image?id={quoted}"),
        *(f"/v1/items?filter={quoted}", f"/v1/items?cursor={quoted}"),
    ):
        if path.isascii() and path.isprintable() and " " not in path:
            yield request("GET", path)
    metadata = {"path": text, "image": text, "url": text}
    named = {"id": f"v {text}", "label": text, "metadata": metadata, "vector": vector}
    for path, content in (
        ("/v1/search", {"image": text}),
        ("/v1/search", {"url": text}),
        ("/v1/search", {"vector": text}),
        ("/v1/search", {"id": text}),
        ("/v1/search", {"id": text, "filter": text}),
        ("/v1/search", {"vector": vector, "fields": [text], "filter": {"id": text}}),
        ("/v1/search/batch", {"queries": [{"id": text}, {"image": text}]}),
        ("/v1/items", {"items": [{"id": text, "image": text}]}),
        ("/v1/items", {"items": [{"id": text, "path": text, "vector": vector}]}),
        ("/v1/items", {"items": [named]}),
        ("/v1/delete", {"filter": {"id": text}}),
        ("/v1/delete", {"filter": {"metadata": text}}),
        ("/v1/snapshots", {"path": text, "name": text, "folder": text}),
    ):
        yield request("POST", path, content)
    yield request("PUT", item, {"image": text, "path": text, "vector": vector})
    yield request("PUT", item, {"vector": vector})
    yield request("GET", f"{item}/image")
    if text.isprintable():
        name = text.replace("\\", "\\\\").replace('"', "'")
        yield request("PUT", item, wire.form(image, filename=name), wire.FORM)
        yield request("POST", "/v1/search", wire.form(image, filename=name), wire.FORM)
        headers = [f"X-Original-URL: {text}", f"X-Rewrite-URL: {text}", f"Referer: {text}"]
        headers += [f"X-Forwarded-Host: {MARK}", f"Forwarded: for={MARK}"]
        authorization = f"Authorization: Bearer {text}"
        yield request("GET", "/v1/index", b"", "text/plain", *headers, authorization)
    yield request("POST", "/v1/search", wire.form(text.encode(), filename=None), wire.FORM)
    yield request("POST", "/v1/search", wire.form(text.encode()), wire.FORM)


def attacks(url: str, folder: Path, image: bytes):
    """Yield requests with paths, URLs, images that name files, and functions of SQLite."""
    for text in (
        f"../../../../{folder}/{MARK}",
        f"{folder}/{MARK}",
        f"..\\..\\{MARK}",
        f"....//....//{MARK}",
        f"{MARK}\0.png",
        f"~/{MARK}",
        f"\\\\host\\{MARK}",
        f"file://{folder}/{MARK}",
        f"{url}/{MARK}",
        url.replace("http", "ftp") + f"/{MARK}",
        url.replace("http:", "") + f"/{MARK}",
        f"s3://{MARK}/x",
        f"memory://{MARK}",
        f"/proc/self/cwd/{MARK}",
        f"{MARK}; touch {folder}/{MARK}",
        f"$(touch {folder}/{MARK})",
        f"data:image/png;base64,{MARK}",
    ):
        yield from of_text(text, image)
    for text in (
        f'<svg xmlns="http://www.w3.org/2000/svg"><image href="{url}/{MARK}"/></svg>',
        f"#EXTM3U\n{url}/{MARK}\n",
        f'push graphic-context\nfill "url({url}/{MARK})"\n',
        f'<?xml version="1.0"?><!DOCTYPE a [<!ENTITY b SYSTEM "{url}/{MARK}">]><a>&b;</a>',
        f"%!PS\n({folder}/{MARK}) (w) file\n",
        f"P6 @{folder}/{MARK}",
    ):
        yield request("POST", "/v1/search", wire.form(text.encode()), wire.FORM)
        yield request("PUT", "/v1/items/x", wire.form(text.encode()), wire.FORM)
    for text in (
        f"readfile('{folder}/{MARK}') = 'x'",
        f"load_extension('{MARK}')",
        f"id in (select '{MARK}')",
        f"id = 'x'; attach '{folder}/{MARK}' as y",
    ):
        yield request("POST", "/v1/delete", {"filter": text})
        yield request("POST", "/v1/search", {"vector": [0.25] * 16, "filter": text})


CALLS = ("socket.connect", "socket.getaddrinfo", "socket.gethostbyname", "subprocess")
CALLS += ("os.system", "os.exec", "urllib", "http")


def test_no_request_opens_a_file_or_calls_anybody(bundle_path, photos, watched, served, tmp_path):
    create_index(tmp_path / "i", bundle_path, [photos / "3"], progress=False)
    (tmp_path / "copies").mkdir()
    with socket.create_server(("127.0.0.1", 0)) as trap:
        url = f"http://127.0.0.1:{trap.getsockname()[1]}"
        options = ("--open", "admin", "--snapshots", str(tmp_path / "copies"))
        port = served(tmp_path / "i", *options, program=("-m", "retrieval.cli")).port
        image = (photos / "3" / "0003.png").read_bytes()
        plain = request("PUT", "/v1/items/plain", wire.form(image), wire.FORM)
        assert wire.ask(port, plain).status == 200
        begun = watched.read_text()
        assert "open " in begun and "sitecustomize" not in begun.splitlines()[-1]  # the hook works
        sent = [wire.ask(port, attack).status for attack in attacks(url, tmp_path, image)]
        trap.settimeout(0.2)
        with pytest.raises(TimeoutError):
            trap.accept()
    assert 500 not in sent and len(sent) > 300
    assert sent.count(200) > 50  # some requests are valid: ids and file names may be any text
    events = watched.read_text()[len(begun) :].splitlines()
    assert [event for event in events if MARK in event] == []
    assert [event for event in events if event.startswith(CALLS) and "retrieval" not in event] == []
    assert not list(tmp_path.rglob(f"*{MARK}*"))
    assert wire.ask(port, wire.get("/readyz")).status == 200
