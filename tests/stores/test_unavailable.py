"""A store that goes away while its index is served, and comes back: a plugin's, which raises
`StoreUnavailable`; and the local one, held by another.
"""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from email.message import Message
from pathlib import Path
from typing import Any

import apsw
import numpy as np
import pytest
import retrieval
from retrieval.serving.bundle import Bundle
from retrieval.serving.http import readiness
from retrieval.serving.http.settings import Settings
from retrieval.serving.store import record
from retrieval.serving.store.contract import Item, StoreUnavailable, widths_of
from retrieval.serving.store.folder import create_local
from retrieval.serving.store.local import LocalStore

FLAKY = """
from retrieval.plugin import hookimpl, stores
from retrieval.serving.store.local import LocalPlace
from retrieval.serving.store.local import LocalStore

def asked(name):
    def call(self, *given, **named):
        if self.folder.with_name("away").exists():
            raise stores.StoreUnavailable(f"flaky://{self.folder} does not answer: connection refused.")
        return getattr(LocalStore, name)(self, *given, **named)
    return call

NAMES = ["upsert", "delete", "get", "original", "scan", "count", "search", "propose", "generations", "stats", "changed", "snapshot", "answered"]
Flaky = type("Flaky", (LocalStore,), {name: asked(name) for name in NAMES})

class FlakyPlace(LocalPlace):
    '''A folder whose engine goes away.'''
    def open(self):
        return Flaky(self.folder)

@hookimpl
def retrieval_stores():
    return {"flaky": FlakyPlace}
"""  # noqa: E501


def _asked(
    url: str, method: str = "GET", content: Any = None, kind: str = "application/json"
) -> tuple[int, Message, Any]:
    body = content if isinstance(content, bytes | None) else json.dumps(content).encode()
    request = urllib.request.Request(url, body, {"Content-Type": kind}, method=method)
    try:
        with urllib.request.urlopen(request, timeout=60) as done:
            return done.status, done.headers, json.load(done)
    except urllib.error.HTTPError as refused:
        return refused.code, refused.headers, json.load(refused)


def test_a_store_that_goes_away_is_503_until_it_is_back(
    tmp_path: Path, makers: Any, plain_bundle: Path, cli: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    makers.write_digits(tmp_path / "digits", 12)
    plugin, address = tmp_path / "flaky.py", f"flaky://{tmp_path}/d.index"
    plugin.write_text(FLAKY)
    assert (
        cli(
            "index",
            "create",
            address,
            tmp_path / "digits",
            "--bundle",
            plain_bundle,
            "--plugin",
            plugin,
        ).code
        == 0
    )
    image = sorted((tmp_path / "digits").rglob("*.png"))[0].read_bytes()
    form = (
        b'--x\r\nContent-Disposition: form-data; name="image"; filename="a.png"\r\n\r\n'
        + image
        + b"\r\n--x--\r\n"
    )
    away = tmp_path / "away"
    monkeypatch.setattr(readiness, "PROBE_SECONDS", 0.2)
    settings = Settings(open="write")
    with retrieval.serve(
        address, port=0, plugins=[str(plugin)], settings=settings, wait=False
    ) as server:
        first = _asked(f"{server.url}v1/items?limit=1")[2]["items"][0]["id"]
        requests = {
            "search": (f"{server.url}v1/search", "POST", form, "multipart/form-data; boundary=x"),
            "items": (f"{server.url}v1/items?limit=1",),
            "item": (f"{server.url}v1/items/{first}",),
            "put": (f"{server.url}v1/items/mine", "PUT", {"vector": [0.0] * 16}),
            "index": (f"{server.url}v1/index",),
        }
        for name, request in requests.items():
            assert _asked(*request)[0] in (200, 201), name
        away.touch()
        for name, request in requests.items():
            status, headers, message = _asked(*request)
            assert (status, headers["Retry-After"]) == (503, "1"), (name, message)
            assert (
                "cannot be reached now" in message["detail"] and "try again" in message["detail"]
            ), (
                name,
                message,
            )
            assert "it is damaged" not in message["detail"] and "disk" not in message["detail"], (
                name,
                message,
            )
        while (ready := _asked(f"{server.url}readyz"))[0] == 200:
            time.sleep(0.05)
        assert "cannot be reached now" in ready[2]["checks"]["search"], ready
        with urllib.request.urlopen(f"{server.url}metrics", timeout=60) as figures:
            assert 'retrieval_refused_total{reason="unreachable"}' in figures.read().decode()
        result = cli("index", "list", address, "--plugin", plugin)
        assert result.code == 2 and "does not answer: connection refused" in result.err
        away.unlink()
        for name, request in requests.items():
            assert _asked(*request)[0] in (200, 201), name
        while _asked(f"{server.url}readyz")[0] != 200:
            time.sleep(0.05)


def test_a_record_that_another_process_holds_is_unavailable(
    tmp_path: Path, plain_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record, "_BUSY_SECONDS", 0.05)
    bundle, folder = Bundle.open(plain_bundle, threads=1), tmp_path / "a.index"
    create_local(folder, bundle, widths_of(bundle))
    with LocalStore(folder) as store:
        store.upsert([Item("a", arrays={"vector": np.zeros(16, np.float32)})], bundle.sha256)
        other = apsw.Connection(str(folder / record.FILE), vfs="cksmvfs")
        other.execute("begin immediate")
        with pytest.raises(
            StoreUnavailable, match=r"others have been writing to it for 0\.05 seconds\. Try again"
        ):
            store.delete(["a"])
        other.close()
        assert store.delete(["a"]) == 1
