"""Access to a real server: keys, roles, indexes of a key, proxies and host names."""

import json
import re
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import wire

from retrieval_server.keys import add_key, new_key, remove_key

BODY = json.dumps({"vector": [0.25] * 16, "k": 1}).encode()


def stored(path: Path, name: str, role="read", indexes=()) -> str:
    """Store a new key in a file and return its text."""
    sent, kept = new_key(name, role, indexes)
    add_key(path, kept)
    return sent


def get(port: int, path: str, key: str, method: str = "GET") -> wire.Answer:
    request = wire.get(path, f"Authorization: Bearer {key}")
    return wire.ask(port, request.replace(b"GET", method.encode(), 1))


def search(port: int, key: str | None = None, *headers: str, source="127.0.0.1") -> wire.Answer:
    own = [] if key is None else [f"Authorization: Bearer {key}"]
    return wire.ask(port, wire.post(BODY, "application/json", *own, *headers), source=source)


@pytest.fixture
def keys(tmp_path):
    return tmp_path / "keys.jsonl"


def test_a_key_permits_what_its_role_permits(served, index_path, keys):
    reader = stored(keys, "reader")
    port = served(index_path, "--keys", str(keys)).port
    page = wire.ask(port, wire.get("/"))
    files = re.findall(r'(?:src|href)="(page[^"]*)"', page.body.decode())
    for path in ("/", *(f"/{name}" for name in files), "/livez", "/readyz", "/v1/openapi.json"):
        assert wire.ask(port, wire.get(path)).status == 200, path
    # each route of the document: test_openapi.py
    for request in (wire.post(BODY), *map(wire.get, ("/v1/index", "/nowhere", "/metrics"))):
        answer = wire.ask(port, request)
        assert answer.status == 401, request
        assert answer.headers["www-authenticate"] == 'Bearer realm="retrieval"', request
        assert answer.headers["content-type"] == "application/problem+json"
        assert answer.error.startswith("A key is needed for ")
        assert "Authorization: Bearer KEY" in answer.error
    assert len(wire.found(search(port, reader))) == 1
    assert wire.ask(port, wire.get("/v1/index", f"authorization: bearer  {reader}")).status == 200
    for method in ("PUT", "DELETE", "PATCH"):
        answer = get(port, "/v1/items/x", reader, method)
        assert answer.status == 403 and "has the role read" in answer.error, method
        assert "need a key with the role write" in answer.error, method
    refused = get(port, "/metrics", reader)
    assert refused.status == 403 and "role admin" in refused.error
    admin = stored(keys, "admin", "admin")
    wire.until(lambda: get(port, "/metrics", admin).status == 200)


def test_a_wrong_key_is_refused_and_no_key_is_shown(served, index_path, keys):
    reader, stranger = stored(keys, "reader"), new_key("stranger", "admin")[0]
    server = served(index_path, "--keys", str(keys))
    port, seen = server.port, b""
    for value in (
        f" Bearer {stranger}",
        f" Bearer {reader}x",
        " Bearer",
        f" Basic {reader}",
        f" {reader}",
        f" Bearer {reader}\r\nAuthorization: Bearer {reader}",
        f" Bearer {reader} {reader}",
        " Bearer " + "x" * 20_000,
        " Bearer \xe9\xff",
    ):
        answer = wire.ask(port, wire.get("/v1/index", f"Authorization:{value}"))
        assert answer.status == 401, value[:60]
        assert answer.headers["www-authenticate"] == 'Bearer realm="retrieval"', value[:60]
        seen += answer.body + str(answer.headers).encode()
    for header in (f"X-Key: {reader}", f"Cookie: key={reader}", "authorization : Bearer x"):
        assert wire.ask(port, wire.get("/v1/index", header)).status in (400, 401)
    assert wire.ask(port, wire.get(f"/v1/index?key={reader}")).status in (400, 401)
    large = wire.get("/v1/index", f"Authorization: Bearer {reader}", "X: " + "y" * 40_000)
    assert wire.ask(port, large).status == 431
    text = seen.decode("latin-1") + wire.log_of(server)
    kept = json.loads(keys.read_text().splitlines()[1])["hash"]
    assert not any(secret in text for secret in (reader, stranger, reader.split("_", 2)[2], kept))


def test_a_changed_file_of_keys_is_read_and_no_request_fails(served, index_path, keys):
    steady, gone = stored(keys, "steady"), stored(keys, "gone")
    server, stop = served(index_path, "--keys", str(keys)), threading.Event()
    port = server.port

    def search_until_stop() -> list[int]:
        statuses = []
        while not stop.is_set():
            statuses.append(search(port, steady).status)
        return statuses

    with ThreadPoolExecutor(1) as pool:
        searching = pool.submit(search_until_stop)
        try:
            assert search(port, gone).status == 200
            remove_key(keys, "gone")
            new = stored(keys, "new")
            wire.until(lambda: search(port, gone).status == 401 and search(port, new).status == 200)
            sound = keys.read_bytes()
            keys.write_bytes(b"")
            keys.write_bytes(sound[: len(sound) // 2])
            server.process.send_signal(signal.SIGHUP)
            time.sleep(1.5)  # the server looks twice a second
            keys.write_bytes(sound)
            last = stored(keys, "last", "write")
            wire.until(lambda: search(port, last).status == 200)
        finally:
            stop.set()
        assert len(searching.result()) > 10 and set(searching.result()) == {200}
    log = wire.log_of(server)
    assert "The keys stay as they were" in log and "it has 3 keys" in log and steady not in log


def test_a_server_without_keys_is_only_for_its_own_machine(served, index_path, keys, cli):
    no_keys = "has no keys, .*--open read"
    for option, value, says in (
        ("--host", "0.0.0.0", no_keys),
        ("--host", "::", no_keys),
        ("--proxy-header-from", "10.0.0.5", no_keys),
        ("--proxy-header-from", "10.0.0.0/33", "not '10.0.0.0/33'"),
        ("--keys", keys, "There is no file of keys"),
    ):
        refused = cli("serve", index_path, "--port", "0", option, value)
        assert refused.code == 2 and not refused.out and re.search(says, refused.err), refused
    stored(keys, "reader")
    port = served(index_path, "--host", "0.0.0.0", "--keys", str(keys)).port
    assert search(port).status == 401
    port = served(index_path, "--host", "0.0.0.0", "--open", "read").port
    assert search(port).status == 200
    refused = wire.ask(port, wire.get("/v1/items/x").replace(b"GET", b"DELETE"))
    assert refused.status == 403 and "read-only" in refused.error


def test_a_server_open_for_reading_needs_a_key_for_changes(served, index_path, keys):
    writer = stored(keys, "writer", "write")
    port = served(index_path, "--keys", str(keys), "--open", "read").port
    assert search(port).status == search(port, writer).status == 200
    assert search(port, f"{writer}x").status == 401  # a mistyped key does not count as no key
    delete = wire.get("/v1/index").replace(b"GET", b"DELETE")
    assert wire.ask(port, delete).status == 401
    assert get(port, "/v1/index", writer, "DELETE").status == 405


def test_a_key_of_one_index_uses_no_other(served, index_path, keys):
    key = stored(keys, "one", indexes=["digits"])
    port = served(index_path, f"other={index_path}", "--keys", str(keys)).port
    assert get(port, "/v1/indexes/digits/index", key).status == 200
    for name in ("other", "nowhere"):
        answer = get(port, f"/v1/indexes/{name}/index", key)
        assert answer.status == 403, name
        assert answer.error == "This key does not permit the use of this index."
    assert json.loads(get(port, "/v1/indexes", key).body) == {"indexes": ["digits"]}
    unnamed = get(port, "/v1/index", key)
    assert unnamed.status == 404 and json.loads(unnamed.body)["indexes"] == ["digits"]


def clients_of(server) -> list[str]:
    lines = wire.log_of(server).splitlines()
    return [json.loads(line)["client"] for line in lines if '"route"' in line]


@pytest.mark.parametrize(
    ("host", "proxy"), [("127.0.0.1", "127.0.0.0/24"), ("::", "::ffff:127.0.0.1")]
)
def test_a_trusted_proxy_names_the_client(served, index_path, host, proxy):
    """An IPv4 address has another form on a socket for both versions of IP."""
    options = ("--open", "read", "--log-format", "json", "--host", host)
    proxies = ("--proxy-header-from", proxy, "--proxy-header-from", "10.0.0.0/8")
    server = served(index_path, *options, *proxies)
    for chain in ("198.51.100.1", "1.2.3.4, 198.51.100.2", "8.8.8.8,198.51.100.3, 10.1.1.1"):
        assert search(server.port, None, f"X-Forwarded-For: {chain}").status == 200
    search(server.port, None, "X-Forwarded-For: 198.51.100.4", source="127.0.1.2")
    for length in (1, 100, 10_000):
        assert search(server.port, None, f"X-Forwarded-For: {'x' * length}").status == 200
    *addresses, x, y, z = clients_of(server)
    assert addresses == ["198.51.100.1", "198.51.100.2", "198.51.100.3", "127.0.1.2"]
    assert len(x) == 1 and len(y) == 100 and len(z) == 10_000


def test_an_unknown_proxy_is_not_believed(served, index_path):
    server = served(index_path, "--log-format", "json")
    search(server.port, None, "X-Forwarded-For: 198.51.100.1")
    assert clients_of(server) == ["127.0.0.1"]


def test_host_names_that_no_request_can_contain_are_refused(index_path, served, cli):
    odd = ("", "a b", "[::1]", "https://photos.example", "photos.example:8000")
    for name in ("*", "*.example", *odd):
        refused = cli("serve", index_path, "--port", "0", "--allow-host", name)
        assert refused.code == 2 and "would never match" in refused.err, name
    port = served(index_path, "--allow-host", "Photos.example.").port
    for host in ("photos.example", "photos.example.:80"):
        assert wire.ask(port, wire.get("/v1/index", host=host)).status == 200


def test_a_flood_of_wrong_keys_stops_nobody_and_fills_no_log(served, index_path, keys):
    honest = stored(keys, "honest")
    server = served(index_path, "--keys", str(keys))

    def attack(number: int) -> int:
        wrong, source = f"rk_{number:012x}_{'A' * 43}", f"127.0.{number % 3}.{number % 250 + 2}"
        return search(server.port, wrong, source=source).status

    with ThreadPoolExecutor(3) as pool:
        attacks = [pool.submit(attack, number) for number in range(450)]
        while not all(entry.done() for entry in attacks):
            assert search(server.port, honest).status == 200
    assert {entry.result() for entry in attacks} == {401}
    assert wire.log_of(server) == ""
