"""When a client repeats a request to a server that drops, hangs, drips or refuses."""

import gc
import gzip
import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import pytest
import wire
from retrieval.client import Client, Retries
from retrieval.errors import DataError, ServerError

SOON = Retries(times=3, seconds=20, first=0.01, longest=0.02)
BUSY = {"detail": "The server is busy.", "instance": "urn:uuid:1"}
FINE = (200, {}, {"results": [], "took_ms": 1.0, "new": "member"})


class Server(ThreadingHTTPServer):
    """Answers each request with the next entry of `script`, and repeats the last entry.

    An entry is (status, headers, JSON or bytes), or a word: "drop" closes the connection, "hang"
    sends nothing, "half" a part of a body, "endless" an endless body, "drip" a body byte by byte,
    and "header" a header that never ends.
    """

    daemon_threads = True

    def __init__(self, *script: tuple) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.script, self.seen, self.over = script, [], threading.Event()
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self._thread = threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()

    def __exit__(self, *fault):
        self.over.set()
        self.shutdown()
        self._thread.join()
        self.server_close()

    def handle_error(self, request, client_address):
        """Print nothing about clients that disconnect."""


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *reply):
        """Print nothing."""

    def act(self):
        server: Server = self.server
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        server.seen.append(SimpleNamespace(path=self.path, body=body, moment=time.monotonic()))
        what = server.script[min(len(server.seen), len(server.script)) - 1]
        self.close_connection = True
        match what:
            case "drop":
                return
            case "hang":
                server.over.wait(30)
            case "header":
                self.wfile.write(b"HTTP/1.1 200 OK\r\nX: ")
                while not server.over.wait(0.05):
                    self.wfile.write(b"y")
            case "half" | "drip" | "endless":
                self.answer(200, {"Content-Length": "1000000000"})
                size, pause = (1, 0.05) if what == "drip" else (1_000_000, 0)
                while what != "half" and not server.over.wait(pause):
                    self.wfile.write(b" " * size)
            case status, headers, reply:
                content = reply if isinstance(reply, bytes) else json.dumps(reply).encode()
                self.answer(status, {**headers, "Content-Length": str(len(content))})
                self.wfile.write(content)

    def answer(self, status, headers):
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()

    do_GET = do_POST = do_PUT = do_DELETE = act


def call(url, work, **settings):
    with Client(url, **{"retries": SOON, **settings}) as client:
        return work(client)


def search_id(client):
    return client.search(id="a")


@pytest.mark.parametrize(
    "wrong",
    ["drop", "half", (503, {"Retry-After": "0"}, BUSY), (429, {}, BUSY), (502, {}, b"<html>")],
)
def test_a_search_is_repeated_until_it_succeeds(wrong):
    with Server(wrong, wrong, FINE) as server:
        assert call(server.url, lambda client: client.search(b"image", k=3)).results == ()
        assert len(server.seen) == 3
        assert all(b"image" in sent.body and sent.path == "/v1/search" for sent in server.seen)


def test_a_request_that_hangs_is_repeated():
    with Server("hang", FINE) as server:
        assert call(server.url, search_id, timeout=0.2).took_ms == 1
        assert len(server.seen) == 2


@pytest.mark.parametrize("what", ["drip", "header", "hang"])
def test_all_attempts_together_have_a_time_limit(what):
    bounded = Retries(times=100, seconds=0.6, first=0.01, longest=0.02)
    with Server(what) as server:
        with pytest.raises(ServerError, match=r"did not answer in time|took too long") as fault:
            call(server.url, search_id, timeout=0.3, retries=bounded)
        assert fault.value.status is None and len(server.seen) < 100


def test_the_number_of_attempts_is_limited_and_the_error_quotes_the_server():
    sentence = r"503: The server is busy\. The request was tried 4 times\."
    with Server((503, {"Retry-After": "0"}, BUSY)) as server:
        with pytest.raises(ServerError, match=sentence) as fault:
            call(server.url, lambda client: client.index())
        facts = (fault.value.status, fault.value.request_id, fault.value.detail)
        assert facts == (503, "urn:uuid:1", "The server is busy.")
        assert len(server.seen) == 4


def test_retry_after_is_obeyed_within_the_time_limit():
    with Server((503, {"Retry-After": "1"}, BUSY), FINE) as server:
        call(server.url, search_id)
        assert server.seen[1].moment - server.seen[0].moment >= 1
    with Server((503, {"Retry-After": "3600"}, BUSY)) as server:
        with pytest.raises(ServerError, match="Retry in 3,600 seconds"):
            call(server.url, search_id)
        assert len(server.seen) == 1


@pytest.mark.parametrize("wrong", ["drop", (503, {}, BUSY)])
def test_a_request_that_is_not_idempotent_is_sent_once(wrong):
    for work in (lambda client: client.delete_items("a = 1"), lambda client: client.snapshot()):
        with Server(wrong) as server:
            with pytest.raises(ServerError):
                call(server.url, work)
            assert len(server.seen) == 1


def test_a_refused_request_is_not_repeated():
    for status in (400, 401, 403, 404, 422, 500):
        with Server((status, {}, {"detail": "So it is.", "instance": "urn:uuid:2"})) as server:
            with pytest.raises(ServerError, match="So it is") as fault:
                call(server.url, lambda client: client.delete("a"))
            assert (fault.value.status, len(server.seen)) == (status, 1)


def test_a_repeated_deletion_may_get_404():
    with Server("drop", (404, {}, BUSY)) as server:
        assert call(server.url, lambda client: client.delete("a")) is None


def test_large_and_foreign_responses_and_redirects_are_refused():
    endless = Server("endless")
    with endless as server, pytest.raises(ServerError, match="more than 256,000,000 bytes"):
        call(server.url, lambda client: client.image("a"), timeout=120)  # on a busy machine
    packed = gzip.compress(bytes(6_000_000))  # must not be decompressed
    with Server((200, {"Content-Encoding": "gzip"}, packed)) as server:
        assert len(call(server.url, lambda client: client.image("a"))) < 5_000_000
    for reply in (b"<html>", b"[" * 100_000, {"results": "none"}):
        with Server((200, {}, reply)) as server, pytest.raises(ServerError, match="not of the /v1"):
            call(server.url, search_id)
    with Server((301, {"Location": "http://elsewhere.example/"}, b"")) as server:
        with pytest.raises(ServerError, match="redirects to http://elsewhere"):
            call(server.url, search_id, key="secret")
        assert len(server.seen) == 1


def test_a_server_that_cannot_be_reached():
    with Server() as server:
        url = server.url
    with pytest.raises(ServerError, match=r"cannot be reached.*tried 4 times"):
        call(url, lambda client: client.snapshot())


def test_invalid_settings_are_refused():
    odd = ("http://a b", "http://a?b=c", "http://me:secret@host")
    for url in ("photos", "ftp://a", "http://", *odd):
        with pytest.raises(DataError, match="address"):
            Client(url)
    for key in ("", "a\nb", "é", " a"):
        with pytest.raises(DataError, match="key"):
            Client("http://a", key=key)
    with pytest.raises(DataError, match="timeout"):
        Client("http://a", timeout=0)
    with pytest.raises(DataError, match="Retries"):
        Retries(times=-1)


@pytest.mark.filterwarnings(
    "ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"
)
def test_a_blocking_client_leaves_no_thread():
    before = threading.active_count()
    with Server(FINE) as server:
        client = Client(server.url)
        search_id(client)
        client.close()
        client.close()
        with pytest.raises(DataError, match="closed"):
            search_id(client)
        forgotten = Client(server.url, retries=SOON)
        search_id(forgotten)
        del forgotten
        gc.collect()
    wire.until(lambda: threading.active_count() <= before)


def test_closing_a_client_ends_the_requests_of_other_threads():
    with Server("hang") as server, ThreadPoolExecutor(1) as pool:
        client = Client(server.url)
        request = pool.submit(search_id, client)
        wire.until(lambda: server.seen)
        client.close()
        with pytest.raises(DataError, match="closed during the request"):
            request.result(10)


def test_threads_share_a_blocking_client():
    with Server(FINE) as server, Client(server.url, retries=SOON) as client:
        with ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(lambda _: search_id(client), range(8)))
        assert [answer.took_ms for answer in answers] == [1.0] * 8
