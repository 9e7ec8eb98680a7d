"""Hostile searches: malformed, truncated, mislabelled, slow. Each is made from its number.

request = Generator(images, sound, width, seed).make(number)
answer = request.send(port, source)
"""

from __future__ import annotations

import json
import random
import socket
import struct
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from wire import FORM, Answer, chunked, connect, form, get, post, read_answer

_TIMEOUT = 20.0
_HEADERS = [
    *("Host: localhost", "Host: evil.example", "Host:", "Host: [::1", "Connection: close"),
    *("Connection: upgrade", "Upgrade: websocket", "Upgrade: h2c", "Transfer-Encoding: chunked"),
    *("Transfer-Encoding: \x0bchunked", "Content-Length: 0", "Content-Length: -1"),
    *("Content-Length: 9" + "9" * 30, "Content-Length: 0, 0", "Origin: null", " folded"),
    *("Sec-Fetch-Site: cross-site", "X: " + "y" * 20_000, "X:\ty\x00", "Expect: 100-continue"),
    *("If-None-Match: *", "Range: bytes=0-", "Accept-Encoding: gzip", "Cookie: " + "a=b;" * 1000),
]
_METHODS = ["GET", "POST", "PUT", "HEAD", "OPTIONS", "TRACE", "CONNECT", "BREW", "get", "PRI"]
_PATHS = ["/", "/v1/search", "*", "http://evil.example/", "//x", "/%", "/%ff%fe", "/\xff"]
_VERSIONS = ["HTTP/1.1"] * 4 + ["HTTP/1.0", "HTTP/0.9", "HTTP/2.0", "HTTP/9.9", "", "HTTP/1.1 x"]
VALUES = [b'"",', b"[],", b"{},", b"null,", b'{"a":1},', b"9" * 400 + b","]
_BYTES = [
    *(b"\r\n", b"\n", b"\0", b"\r\n ", b": ", b"%00", b"\xff" * 5, b"A" * 5000),
    b"Host: evil.example\r\n",
]


@dataclass
class Request:
    """One hostile request.

    Attributes:
        kind: kind of the request, for reports.
        content: bytes to send.
        manner: "whole" sends all and reads the answer; "vanish" sends all and closes; "cut" sends
            half and closes; "reset" sends half and resets the connection; "drip" sends slowly;
            "idle" sends 20 bytes and waits; "deaf" sends all, waits and does not read.
        patience: seconds of a slow manner.
    """

    kind: str
    content: bytes
    manner: str = "whole"
    patience: float = 1.0

    def send(self, port: int, source: str) -> Answer | None:
        """Send the request; return the answer, or `None` if the manner reads none."""
        with suppress(OSError), connect(port, _TIMEOUT, source) as connection:
            return self._send(connection)
        return None

    def _send(self, connection: socket.socket) -> Answer | None:
        content = self.content
        if self.manner == "idle":
            connection.sendall(content[:20])
            time.sleep(self.patience)
            return None
        if self.manner == "drip":
            end = time.monotonic() + self.patience
            for start in range(0, len(content), max(1, len(content) // 50)):
                connection.sendall(content[start : start + max(1, len(content) // 50)])
                time.sleep(self.patience / 50)
                if time.monotonic() > end:
                    return None
        elif self.manner in ("cut", "reset"):
            connection.sendall(content[: max(1, len(content) // 2)])
        else:
            with suppress(ConnectionError):  # answered before all was sent
                connection.sendall(content)
        if self.manner == "deaf":
            time.sleep(self.patience)
        if self.manner in ("whole", "drip"):
            return read_answer(connection)
        if self.manner == "reset":
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        return None


class Generator:
    """Makes hostile searches; the same number gives the same request.

    Args:
        images: hostile and damaged images by name.
        sound: a sound image.
        width: width of a query vector.
        seed: random seed.
    """

    def __init__(
        self, images: Sequence[tuple[str, bytes]], sound: bytes, width: int, seed: int = 0
    ) -> None:
        self._images, self.sound, self._width, self._seed = images, sound, width, seed
        self._makers: list[tuple[float, Callable[[random.Random], Request]]] = [
            (3, self._image),
            (1, self._mislabelled),
            (3, self._malformed),
            (2, self._header),
            (2, self._form),
            (2, self._json),
            (1, self._chunks),
            (1, self._pipelined),
            (1, self._gallery),
            (3, self._question),
            (1, self._identify),
            (1, self._feedback),
        ]

    def make(self, number: int) -> Request:
        """Return the request with this number."""
        chance = random.Random(f"{self._seed} {number}")
        weights, makers = zip(*self._makers, strict=True)
        request = chance.choices(makers, weights)[0](chance)
        if chance.random() < 0.2:
            request.manner = chance.choice(["vanish", "cut", "reset", "drip", "idle", "deaf"])
            request.patience = chance.choice([0.1, 0.5, 2.0])
        return request

    def _query(self, chance: random.Random) -> bytes:
        """Return a valid request."""
        if chance.random() < 0.5:
            return post(form(self.sound, chance.choice([None, "1", "50"])), FORM)
        vector = [chance.uniform(-1, 1) for _ in range(self._width)]
        return post(json.dumps({"vector": vector, "k": chance.randint(1, 20)}).encode())

    def _image(self, chance: random.Random) -> Request:
        name, content = chance.choice(self._images)
        return Request(f"image, {name.partition(':')[0]}", post(form(content), FORM))

    def _mislabelled(self, chance: random.Random) -> Request:
        content = chance.choice(self._images)[1][:200_000]
        many, odd = chance.choice([1, 70, 500]), ["undefined", "punycode", "idna", "utf-7"]
        form_ = "multipart/form-data"
        kinds = ["application/json", "image/png", "text/plain", "", form_]
        kinds += ["application/json; charset=idna", f"{form_}; boundary=" + "b" * many]
        kinds += [f'{form_}; boundary="', f"{form_}; boundary=b; charset={chance.choice(odd)}"]
        kind = chance.choice([*kinds, "MULTIPART/FORM-DATA; BOUNDARY=b"])
        body = chance.choice([content, form(content), b'{"vector": [1]}'])
        expected = [("Expect: 100-continue",), ("Expect: 200-ok",)]
        encoding = chance.choice([(), ("Content-Encoding: gzip",), *expected])
        return Request("mislabelled", post(body, kind, *encoding))

    def _malformed(self, chance: random.Random) -> Request:
        content = bytearray(self._query(chance))
        for _ in range(chance.choice([1, 1, 2, 5, 20])):
            most = len(content) if chance.random() < 0.3 else min(len(content), 200)
            place = chance.randrange(most)
            match chance.randrange(4):
                case 0:
                    content[place] = chance.randrange(256)
                case 1:
                    del content[place : place + chance.randrange(1, 10)]
                case 2:
                    content[place:place] = chance.choice(_BYTES)
                case _:
                    content[place:place] = content[: chance.randrange(1, 200)]
        # The server waits for the rest if the Content-Length is too large now.
        manner = "whole" if chance.random() < 0.3 else "vanish"
        return Request("malformed", bytes(content), manner)

    def _header(self, chance: random.Random) -> Request:
        line = chance.choice([*_METHODS, "G" * 500])
        long = "/" + "a" * chance.choice([10, 5000, 70_000])
        item = "/v1/items/" + "9" * chance.choice([5, 5000]) + "/image"
        path = chance.choice([*_PATHS, "/v1/search?k=1", "/v1/../etc", long, item])
        version = chance.choice(_VERSIONS)
        headers = chance.choices(_HEADERS, k=chance.choice([0, 1, 2, 3, 6, 100]))
        end = chance.choice(["\r\n"] * 5 + ["\n", "\r", ""])
        lines = [f"{line} {path} {version}", *headers, "", ""]
        return Request("header", end.join(lines).encode("latin-1"))

    def _form(self, chance: random.Random) -> Request:
        part = b'--b\r\nContent-Disposition: form-data; name="k"\r\n\r\n3\r\n'
        digits, parts = chance.choice([1, 9, 5000, 100_000]), chance.choice([2, 5000])
        bodies = [
            form(self.sound, "9" * digits),
            form(self.sound, name="\u00e9"),
            form(self.sound) * 3,
            form(self.sound, filename=None),
            form(self.sound, filename="../../x\0"),
            part * parts,
            b"--b\r\n" + b"A: b\r\n" * 50_000 + b"\r\n\r\n--b--",
            b"--b\r\n" + b"A" * 500_000,
            *(b"--b--", b"", b"\r\n--b" * 100_000, form(self.sound)[:-3]),
            *(form(b"\r\n--" * 200_000), b"x" * 300_000, form(bytes(3_000_000))),
        ]
        return Request("form", post(chance.choice(bodies), FORM))

    def _json(self, chance: random.Random) -> Request:
        many, width = chance.choice([10, 1000, 200_000]), self._width
        bodies = [
            b"[" * many,
            b'{"vector":' * many,
            b'{"vector": [' + b"1," * many + b"1]}",
            b'{"vector": [' + b"1" * many + b"]}",
            *(b'{"vector": [' + chance.choice(VALUES) * many + b"1]}" for _ in range(3)),
            b'{"id": "a", "filter": {"a": {"in": [' + chance.choice(VALUES) * many + b"1]}}}",
            b'{"id": "a", "filter": {"and": [' + b'{"a":1},' * many + b'{"a":1}]}}',
            b'{"' + b"a" * many * 9 + b'": 1}',
            b'{"vector": [1e' + b"9" * many + b"]}",
            b'{"vector": "' + b"\\u0000" * many + b'"}',
            *(b'{"a": 1, "a": 2}', b"null", b"\xef\xbb\xbf{}", b'{"vector": [NaN]}'),
            *(b'{"vector": [0.5], "k": true}', b'{"k": 5}', b"\xff" * many, b" " * many * 10),
            json.dumps({str(n): n for n in range(many)}).encode(),
            (json.dumps({str(n): 0 for n in range(many)})[:-1] + ', "9": 1}').encode(),
            json.dumps({"vector": [0.5] * width, "k": 10**6}).encode(),
            json.dumps({"vector": [1e39] * width}).encode(),
            json.dumps({"vector": [0.0] * (width + 1)}).encode(),
        ]
        return Request("json", post(chance.choice(bodies)))

    def _question(self, chance: random.Random) -> Request:
        """Return a search with options at their limits, or beyond."""
        many = chance.choice([1, 100, 101, 50_000])
        id = chance.choice(
            [*["3/0003.png"] * 5, "item/1", "../../etc/passwd", "\ud800", "x" * 5000, ""]
        )
        field = chance.choice(["label", "id", "price", "tags", "a" + ".a" * many, '"', "-", ""])
        # Many of the long ones would be gigabytes, of which the server reads the first few.
        short_id = id[:100]
        short_field = field[:100]
        options: dict[str, list[object]] = {
            "like": [[short_id] * many, [[id]] * many, id, None, [[]]],
            "dislike": [[short_id] * many, {}],
            "group_by": [field, [field]],
            "group_size": [1, 10, 100, 101, 10**400],
            "max_distance": [0, 1e308, -1, "nan", float("nan"), float("inf")],
            "offset": [1, 10_000, 10_001, -1, 1e300],
            "diversity": [0, 0.5, 1, 1.1, float("nan")],
            "facets": [[field] * min(many, 11), ["id"] * 10, [short_field] * many, field],
            "order_by": [field, f"-{field}", "-" * many],
            "scores": [True, False, 1],
            "k": [1, 10, 1000],
        }
        names = chance.sample(list(options), chance.choice([1, 2, 3, len(options)]))
        # Half of the requests have only sound values, so that they reach the search.
        sound = chance.random() < 0.5
        chosen = {
            name: options[name][0] if sound else chance.choice(options[name]) for name in names
        }
        if chance.random() < 0.3:
            files = [(chance.choice(["like", "dislike", "image"]), self.sound)] * min(many, 101)
            files += [("like", chance.choice(self._images)[1][:300_000])]
            texts = [(name, json.dumps(value).encode()) for name, value in chosen.items()]
            return Request("question", post(_form(files, texts), FORM))
        body = {"vector": [0.5] * self._width, **chosen}
        return Request("question", post(json.dumps(body).encode("utf-8", "surrogatepass")))

    def _identify(self, chance: random.Random) -> Request:
        many = chance.choice([1, 16, 17, 100])
        far = chance.choice(["0.5", "0.01", "nan", "1e-99", "-1", "9" * 5000])
        images = [chance.choice(self._images)[1][:300_000]] * many
        body = _form([("image", image) for image in images], [("far", far.encode())])
        if chance.random() < 0.4:
            vector = chance.choice([[0.5] * self._width, [1e39] * self._width, [0.5] * 50_000])
            body = json.dumps(
                {"vector": vector, "far": chance.choice([0.5, 1, -1, 1e-300])}
            ).encode()
            return Request("identify", named("POST", "/v1/identify", post(body)))
        return Request("identify", named("POST", "/v1/identify", post(body, FORM)))

    def _feedback(self, chance: random.Random) -> Request:
        many = chance.choice([1, 1000, 1001, 60_000])
        id = chance.choice(["3/0003.png", "", "x" * 1001, "\ud800", "../../etc/passwd"])
        short_id = id[:100]
        lists = [[id], [short_id] * many, [[id]], id, None, {id: id}, [1] * many]
        ids = ["A" * 22, "B" * 22, "A" * 5000, "' or 1=1; --", "", None, ["A" * 22]]
        body = {
            "search_id": chance.choice([*ids[:2], *ids]),
            **{name: chance.choice(lists) for name in chance.sample(["liked", "clicked"], 2)},
            "user": chance.choice(["ann", "u" * 65, "\u0000", "/", "\u202e" * 60, None, 5]),
        }
        if chance.random() < 0.5:
            body = {"search_id": "C" * 22, "liked": ["3/0003.png"], "disliked": ["3/0004.png"]}
        content = json.dumps(body).encode("utf-8", "surrogatepass")
        return Request("feedback", named("POST", "/v1/feedback", post(content)))

    def _chunks(self, chance: random.Random) -> Request:
        body = form(bytes(chance.choice([10, 5000, 100_000])))
        size = chance.choice([1, 7, 1000, 1_000_000])
        content = chunked([body[i : i + size] for i in range(0, len(body), size)], FORM)
        harm, end = chance.randrange(5), b"\r\n\r\n"
        if harm == 0:
            content = content.replace(b"\r\n1\r\n", b"\r\n-1\r\n").replace(b"0\r\n\r\n", b"")
        elif harm == 1:
            content = content[:-2] + b"X: y\r\n" * chance.choice([3, 20_000]) + b"\r\n"
        elif harm == 2:
            content = content.replace(end, end + b"ffffffffffffffffff\r\n", 1)
        elif harm == 3:
            extension = b"1;" + b"e" * chance.choice([10, 300_000]) + b"\r\nx\r\n"
            content = content.replace(end, end + extension, 1)
        return Request("chunks", content, "vanish" if harm in (0, 2) else "whole")

    def _pipelined(self, chance: random.Random) -> Request:
        count = chance.choice([2, 8, 200])
        return Request("pipelined", b"".join(self._query(chance) for _ in range(count)))

    def _gallery(self, chance: random.Random) -> Request:
        odd = ["-1", "x", "9" * 30, "1" * 5000, "%00", "0/../0", "1e3"]
        number = chance.choice(["0", "5", "199", "200", *odd])
        headers = chance.choice([(), ('If-None-Match: "x"',), ("Range: bytes=5-1",)])
        content = get(f"/v1/items/{number}/image", *headers)
        return Request("gallery", content * chance.choice([1, 1, 30]))


def _form(files: Sequence[tuple[str, bytes]], texts: Sequence[tuple[str, bytes]]) -> bytes:
    """Return the body of a form with the boundary `b`, with files and texts by field."""
    parts = [(f'name="{name}"; filename="x"', content) for name, content in files]
    parts += [(f'name="{name}"', content) for name, content in texts]
    head = "--b\r\nContent-Disposition: form-data; "
    body = b"".join(f"{head}{name}\r\n\r\n".encode() + part + b"\r\n" for name, part in parts)
    return body + b"--b--\r\n"


def named(method: str, path: str, content: bytes) -> bytes:
    """Return a request of `wire.post` with another method and path."""
    return content.replace(b"POST /v1/search HTTP/1.1", f"{method} {path} HTTP/1.1".encode(), 1)
