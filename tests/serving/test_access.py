"""Who may do what on a real server: keys, roles, limits, other sites, proxies."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import wire
from retrieval.serving.http.access.key_file import add_key, remove_key
from retrieval.serving.http.access.keys import Allowance, new_key

BODY = json.dumps({"vector": [0.25] * 16, "k": 1}).encode()


def made(path: Path, name: str, role="read", indexes=(), **limits) -> str:
    sent, kept = new_key(name, role, indexes, Allowance(**limits))
    add_key(path, kept)
    return sent


def search(port: int, key: str | None = None, *headers: str, source: str = "127.0.0.1") -> wire.Answer:
    said = [] if key is None else [f"Authorization: Bearer {key}"]
    return wire.ask(port, wire.post(BODY, "application/json", *said, *headers), source=source)


@pytest.fixture
def keys(tmp_path) -> Path:
    return tmp_path / "keys.jsonl"


def test_a_key_opens_what_its_role_may(served, index_path, keys):
    reader = made(keys, "reader")
    port = served(index_path, "--keys", str(keys)).port
    for path in ("/", "/page.js", "/livez", "/readyz", "/v1/openapi.json"):
        assert wire.ask(port, wire.get(path)).status == 200, path
    for request in (
        wire.post(BODY),
        wire.get("/v1/index"),
        wire.get("/v1/items/0/image"),
        wire.get("/nowhere"),
        wire.get("/metrics"),
        wire.get("/v1/items"),
        wire.get("/v1/indexes"),
        wire.post(BODY).replace(b"/v1/search", b"/v1/search/batch"),
        wire.post(BODY).replace(b"/v1/search", b"/v1/items"),
        wire.post(BODY).replace(b"/v1/search", b"/v1/delete"),
        wire.post(BODY).replace(b"/v1/search", b"/v1/snapshots"),
        wire.get("/v1/items/x").replace(b"GET", b"DELETE"),
    ):
        answer = wire.ask(port, request)
        assert answer.status == 401 and answer.headers["www-authenticate"] == 'Bearer realm="retrieval"', (
            request
        )
        assert answer.headers["content-type"] == "application/problem+json"
        assert answer.error.startswith("A key is needed for ") and "Authorization: Bearer KEY" in answer.error
    assert len(wire.found(search(port, reader))) == 1
    assert wire.ask(port, wire.get("/v1/index", f"authorization: bearer  {reader}")).status == 200
    for method in ("PUT", "DELETE", "PATCH"):
        request = wire.get("/v1/items/x", f"Authorization: Bearer {reader}").replace(b"GET", method.encode())
        answer = wire.ask(port, request)
        assert answer.status == 403, method
        assert 'error="insufficient_scope", scope="write"' in answer.headers["www-authenticate"]
        assert answer.error == (
            "This key has the role read; adding, changing and deleting takes a key with the role write."
        )
    for request in (wire.get("/metrics"), wire.get("/v1/indexes/digits/snapshots").replace(b"GET", b"POST")):
        asked = wire.ask(
            port, request.replace(b"\r\n\r\n", f"\r\nAuthorization: Bearer {reader}\r\n\r\n".encode())
        )
        assert asked.status == 403 and "role admin" in asked.error
    admin = made(keys, "admin", "admin")
    wire.until(lambda: wire.ask(port, wire.get("/metrics", f"Authorization: Bearer {admin}")).status == 200)


def test_a_wrong_key_is_refused_and_shown_to_nobody(served, index_path, keys):
    reader, stranger = made(keys, "reader"), new_key("stranger", "admin")[0]
    server = served(index_path, "--keys", str(keys), "--debug")
    port = server.port
    seen = b""
    for header in (
        f"Authorization: Bearer {stranger}",
        f"Authorization: Bearer {reader}x",
        "Authorization: Bearer",
        f"Authorization: Basic {reader}",
        f"Authorization: {reader}",
        f"Authorization: Bearer {reader}\r\nAuthorization: Bearer {reader}",
        f"Authorization: Bearer {reader} {reader}",
        "Authorization: Bearer " + "x" * 20_000,
        "Authorization: Bearer \xe9\xff",
    ):
        answer = wire.ask(port, wire.get("/v1/index", header))
        assert answer.status == 401 and 'error="invalid_' in answer.headers["www-authenticate"], header[:60]
        seen += answer.body + str(answer.headers).encode()
    for header in (f"X-Key: {reader}", f"Cookie: key={reader}", "authorization : Bearer x"):
        assert wire.ask(port, wire.get("/v1/index", header)).status in (400, 401)
    assert wire.ask(port, wire.get(f"/v1/index?key={reader}")).status in (400, 401)
    assert (
        wire.ask(port, wire.get("/v1/index", f"Authorization: Bearer {reader}", "X: " + "y" * 40_000)).status
        == 431
    )
    server.process.terminate()
    log = server.process.communicate(timeout=20)
    for text in (seen.decode("latin-1"), *log):
        assert reader not in text and stranger not in text
        assert (
            reader.split("_")[2] not in text
            and json.loads(keys.read_text().splitlines()[1])["hash"] not in text
        )


def test_a_changed_file_is_taken_up_with_no_failed_request(served, index_path, keys):
    """While another client searches all the time, keys come, go and are damaged."""
    steady, gone = made(keys, "steady"), made(keys, "gone")
    server = served(index_path, "--keys", str(keys))
    port, stop, failed, done = server.port, threading.Event(), [], [0]

    def search_on() -> None:
        while not stop.is_set():
            answer = search(port, steady)
            done[0] += 1
            if answer.status != 200:
                failed.append(answer)

    client = threading.Thread(target=search_on)
    client.start()
    try:
        assert search(port, gone).status == 200
        remove_key(keys, "gone")
        new = made(keys, "new")
        wire.until(lambda: search(port, gone).status == 401 and search(port, new).status == 200)
        good = keys.read_bytes()
        keys.write_bytes(b"")
        keys.write_bytes(good[: len(good) // 2])
        server.process.send_signal(signal.SIGHUP)
        time.sleep(1.5)  # it looks twice a second
        keys.write_bytes(good)
        last = made(keys, "last", "write")
        wire.until(lambda: search(port, last).status == 200)
    finally:
        stop.set()
        client.join()
    assert not failed and done > [10]
    server.process.terminate()
    log = server.process.communicate(timeout=20)[1]
    assert "The keys stay as they were" in log and "it has 3 keys" in log and steady not in log


def test_without_keys_it_is_for_this_machine_only(served, index_path, keys, cli):
    def start(*options: str) -> str:
        refused = cli("serve", index_path, "--port", "0", *options)
        assert refused.code == 2 and not refused.out
        return str(refused.err)

    for options in (("--host", "0.0.0.0"), ("--host", "::"), ("--proxy-header-from", "10.0.0.5")):
        told = start(*options)
        assert "has no keys" in told and "--open read" in told, options
    assert "There is no file of keys" in start("--keys", str(keys))
    assert "not '10.0.0.0/33'" in start("--proxy-header-from", "10.0.0.0/33")
    made(keys, "reader")
    port = served(index_path, "--host", "0.0.0.0", "--keys", str(keys)).port
    assert search(port).status == 401
    port = served(index_path, "--host", "0.0.0.0", "--open", "read").port
    assert search(port).status == 200
    refused = wire.ask(port, wire.get("/v1/items/x").replace(b"GET", b"DELETE"))
    assert refused.status == 403 and "read-only" in refused.error


def test_everybody_reads_and_a_key_does_more(served, index_path, keys):
    writer = made(keys, "writer", "write")
    port = served(index_path, "--keys", str(keys), "--open", "read").port
    assert search(port).status == search(port, writer).status == 200
    assert search(port, f"{writer}x").status == 401  # a mistyped key is no reason to go on without one
    delete = wire.get("/v1/index").replace(b"GET", b"DELETE")
    assert wire.ask(port, delete).status == 401
    keyed = wire.get("/v1/index", f"Authorization: Bearer {writer}").replace(b"GET", b"DELETE")
    assert wire.ask(port, keyed).status == 405


def test_a_key_of_one_index_uses_no_other(served, index_path, keys):
    key = made(keys, "one", indexes=["digits"])
    port = served(index_path, f"other={index_path}", "--keys", str(keys)).port
    said = f"Authorization: Bearer {key}"
    assert wire.ask(port, wire.get("/v1/indexes/digits/index", said)).status == 200
    for name in ("other", "nowhere"):
        answer = wire.ask(port, wire.get(f"/v1/indexes/{name}/index", said))
        assert answer.status == 403 and answer.error == "This key is for other indexes.", name
    assert json.loads(wire.ask(port, wire.get("/v1/indexes", said)).body) == {"indexes": ["digits"]}
    unnamed = wire.ask(port, wire.get("/v1/index", said))
    assert unnamed.status == 404 and json.loads(unnamed.body)["indexes"] == ["digits"]


def test_limits_by_key_and_by_address(served, index_path, keys):
    slow, free = (
        made(keys, "slow", requests_per_second=0.01, burst=3),
        made(keys, "free", requests_per_second=0),
    )
    port = served(
        index_path, "--keys", str(keys), "--open", "read", "--requests-per-second", "0.01", "--burst", "2"
    ).port
    assert [search(port, slow).status for _ in range(5)] == [200] * 3 + [429] * 2
    answer = search(port, slow)
    assert 1 <= int(answer.headers["retry-after"]) <= 100
    assert answer.headers["content-type"] == "application/problem+json"
    assert "0.01 requests a second, 3 at once. Try again in" in answer.error
    assert {search(port, free).status for _ in range(10)} == {200}
    assert [search(port).status for _ in range(3)] == [200, 200, 429]
    assert [search(port, source="127.0.0.2").status for _ in range(3)] == [200, 200, 429]
    assert {wire.ask(port, wire.get("/readyz")).status for _ in range(10)} == {200}
    assert search(port, free, source="127.0.0.2").status == 200


def test_bytes_and_requests_at_a_time(served, index_path, photos, keys):
    key = made(keys, "shop", concurrent=2, bytes_per_minute=300_000)
    port = served(index_path, "--keys", str(keys)).port
    head = wire.post(wire.form(bytes(50_000)), wire.FORM, f"Authorization: Bearer {key}")[:-100]
    held = [wire.connect(port) for _ in range(2)]
    for connection in held:
        connection.sendall(head)
    answer = wire.until(lambda: (a := search(port, key)).status == 429 and a)
    assert "2 requests under way at a time" in answer.error and answer.headers["retry-after"] == "1"
    for connection in held:
        connection.close()
    wire.until(lambda: search(port, key).status == 200)
    large = wire.post(wire.form(bytes(400_000)), wire.FORM, f"Authorization: Bearer {key}")
    assert wire.ask(port, large).status == 422  # it was read: no image
    answer = search(port, key)
    assert answer.status == 429 and "300,000 bytes a minute" in answer.error


def test_a_proxy_says_who_asks_only_where_it_is_named(served, index_path):
    options = ("--open", "read", "--requests-per-second", "0.01", "--burst", "1")
    port = served(index_path, *options).port
    assert search(port, None, "X-Forwarded-For: 198.51.100.1").status == 200
    assert search(port, None, "X-Forwarded-For: 198.51.100.2").status == 429  # nobody believes it
    port = served(
        index_path, *options, "--proxy-header-from", "127.0.0.1", "--proxy-header-from", "10.0.0.0/8"
    ).port
    assert search(port, None, "X-Forwarded-For: 198.51.100.1").status == 200
    assert search(port, None, "X-Forwarded-For: 198.51.100.2").status == 200
    for said in ("198.51.100.1", "1.2.3.4, 198.51.100.1", "8.8.8.8,198.51.100.1, 10.1.1.1"):
        assert search(port, None, f"X-Forwarded-For: {said}").status == 429, (
            said
        )  # what the client wrote counts for nothing
    assert search(port, None, "X-Forwarded-For: 198.51.100.3", source="127.0.0.2").status == 200
    assert search(port, None, "X-Forwarded-For: 198.51.100.4", source="127.0.0.2").status == 429
    statuses = {search(port, None, f"X-Forwarded-For: {'x' * length}").status for length in (1, 100, 10_000)}
    assert statuses <= {200, 429}


def test_other_sites_may_use_it_only_where_they_are_named(served, index_path, keys, cli):
    key = made(keys, "page")
    port = served(
        index_path,
        "--keys",
        str(keys),
        "--cors-origin",
        "https://Shop.example:443",
        "--cors-origin",
        "http://localhost:3000",
    ).port

    def preflight(origin: str) -> wire.Answer:
        request = wire.get("/v1/search", f"Origin: {origin}", "Access-Control-Request-Method: POST",
                           "Access-Control-Request-Headers: authorization, content-type")  # fmt: skip
        return wire.ask(port, request.replace(b"GET", b"OPTIONS"))

    asked = preflight("https://shop.example")
    assert asked.status == 200 and asked.headers["access-control-allow-origin"] == "https://shop.example"
    assert "access-control-allow-credentials" not in asked.headers
    answer = search(port, key, "Origin: https://shop.example", "Sec-Fetch-Site: cross-site")
    assert answer.status == 200 and answer.headers["access-control-allow-origin"] == "https://shop.example"
    without = search(port, None, "Origin: https://shop.example", "Sec-Fetch-Site: cross-site")
    assert without.status == 401 and without.headers["access-control-allow-origin"] == "https://shop.example"
    for origin in (
        "https://evil.example",
        "https://shop.example.evil.example",
        "http://shop.example",
        "null",
    ):
        assert preflight(origin).status >= 400, origin
        assert "access-control-allow-origin" not in preflight(origin).headers
        refused = search(port, key, f"Origin: {origin}", "Sec-Fetch-Site: cross-site")
        assert refused.status == 403 and "access-control-allow-origin" not in refused.headers
    port = served(index_path).port
    refused = search(port, None, "Origin: https://shop.example")
    assert refused.status == 403 and "access-control-allow-origin" not in refused.headers
    for origin in (
        "*",
        "shop.example",
        "https://shop.example/page",
        "https://*.example",
        "null",
        "https://a@b.example",
        "http://x:y",
    ):
        refused = cli("serve", index_path, "--port", "0", "--cors-origin", origin)
        assert refused.code == 2 and "--cors-origin takes" in refused.err, origin


def test_nobody_fills_the_server_with_wrong_keys(served, index_path, keys):
    """The attack: a flood of made-up keys and addresses, while an honest client searches."""
    honest = made(keys, "honest", requests_per_second=0)
    server = served(index_path, "--keys", str(keys), "--requests-per-second", "50")
    port, answers = server.port, []

    def flood(number: int) -> None:
        for turn in range(150):
            fake = f"rk_{turn:06x}{number:06x}_{'A' * 43}"
            answers.append(search(port, fake, source=f"127.0.{number}.{turn % 250 + 1}").status)

    threads = [threading.Thread(target=flood, args=(number,)) for number in range(1, 4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        assert search(port, honest).status == 200
    for thread in threads:
        thread.join()
    assert set(answers) == {401} and len(answers) == 450
    server.process.terminate()
    assert server.process.wait(15) == 0
    assert server.process.stderr.read() == ""


def test_a_server_in_a_program_takes_keys_too(index_path, keys, tmp_path):
    own = Path(shutil.copytree(index_path, tmp_path / "own"))
    key = made(keys, "program")
    code = f"""
import urllib.request, urllib.error
from pathlib import Path
from retrieval.serving.http.server import serve
from retrieval.serving.http.settings import Settings
with serve({str(own)!r}, port=0, settings=Settings(keys=Path({str(keys)!r})), wait=False) as server:
    ask = urllib.request.Request(server.url + "v1/index", headers={{"Authorization": "Bearer {key}"}})
    print(urllib.request.urlopen(ask).status)
    try:
        urllib.request.urlopen(server.url + "v1/index")
    except urllib.error.HTTPError as fault:
        print(fault.code)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, timeout=60
    )
    assert done.stdout.split()[-2:] == ["200", "401"], done
