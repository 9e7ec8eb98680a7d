"""Hostile requests to all routes of a server with several indexes, with and without keys.

They include the searches of `hostile_requests`, and each is made from its number too.
"""

from __future__ import annotations

import json
import random
from base64 import b64encode
from collections.abc import Mapping, Sequence

from hostile_requests import VALUES, Generator, Request, named
from wire import FORM, form, get, post

_NAMES = 300  # number of ids of new items
_FILTERS = (
    "price < 30",
    "label = 'a' and not price >= 3",
    "(" * 60 + "price < 3" + ")" * 60,
    "(" * 5000,
    "price < 1e999",
    "price = nan",
    "'",
    "label like '%%%%'",
    "nobody = 3",
    " or ".join(["price < 3"] * 101),
    "price in (" + ", ".join(["1"] * 1001) + ")",
    "label = '" + "x" * 100_000 + "'",
    "\u0000",
    "1 = 1; drop table items",
)
_TEXTS = [
    *("%00", "..%2f" * 50, "%ff%fe", "a" * 3000, "(" * 3000, "%5B" * 1000),
    *("%7B%22a%22%3A" * 300, "1+OR+1=1"),
]
_LISTS = ["items", "item", "index", "item/image"]
_NAMED = ["cursor", "limit", "filter", "fields", "id", "vector", "k", "x" * 300]

_IDS = [
    *("%00", "%2e%2e", "x" * 1000, "x" * 1001, "%ff", "%F0%9F%90%9F" * 200, "a%0Ab"),
    *("..%2F..%2Fetc", "image", "%25", "-"),
]
_OTHERS = ["still", "nobody", "..", "%2e%2e%2fstill", "still%00", "x" * 3000, "STILL"]
_ROUTES = ["GET index", "GET items", "POST delete", "PUT items/x", "POST search", "POST items"]
_ROUTES += ["POST snapshots", "DELETE items/x"]


class WritingGenerator(Generator):
    """Makes hostile requests; the same number gives the same request.

    Args:
        images: hostile and damaged images by name.
        sound: a sound image.
        width: width of a vector.
        keys: values of the header `Authorization`, by role or fault; `None` sends no header.
        index: name of the attacked index.
        seed: random seed.
    """

    def __init__(
        self,
        images: Sequence[tuple[str, bytes]],
        sound: bytes,
        width: int,
        keys: Mapping[str, str | None],
        index: str,
        seed: int = 0,
    ) -> None:
        super().__init__(images, sound, width, seed)
        self._keys, self._index = dict(keys), index
        self._makers += [
            (4, self._put_image),
            (4, self._put_json),
            (3, self._several),
            (3, self._batch),
            (2, self._encode),
            (2, self._delete),
            (1, self._patch_items),
            (2, self._list),
            (0.05, self._snapshot),
            (1, self._other_index),
        ]

    def make(self, number: int) -> Request:
        """Return the request with this number, usually with a key and the name of the index."""
        request = super().make(number)
        chance = random.Random(f"{self._seed} {number} key")
        if chance.random() < 0.9 and request.kind.partition(",")[0] != "other index":
            index = f" /v1/indexes/{self._index}/".encode()
            request.content = request.content.replace(b" /v1/", index, 1)
        # Most requests have the admin's key, so that the code behind the check of keys is attacked.
        weights = [6 if name == "admin" else 1 for name in self._keys]
        key = self._keys[chance.choices(list(self._keys), weights)[0]]
        if key is not None:
            header = f"\r\nAuthorization: {key}\r\n".encode("latin-1")
            request.content = request.content.replace(b"\r\n", header, 1)
        return request

    def _id(self, chance: random.Random) -> str:
        return chance.choice([f"item%2F{chance.randrange(_NAMES)}"] * 6 + _IDS)

    def _metadata(self, chance: random.Random) -> str:
        many = chance.choice([3, 70, 5000])
        return chance.choice(
            [
                *('{"price": 3}', '{"price": "3"}', '{"price": ' + "9" * many + "}"),
                *('{"a": ' * many + "1" + "}" * many, '{"a": 1, "a": 2}', "[]", "null"),
                *('{"\\u0000": 1}', '{"a": NaN}', '{"a": "' + "x" * many * 300 + '"}'),
                *(json.dumps({str(n): n for n in range(many)}), '{"\\ud800": 1}', "{", ""),
            ]
        )

    def _put_image(self, chance: random.Random) -> Request:
        content = self.sound if chance.random() < 0.5 else chance.choice(self._images)[1]
        fields = []
        if chance.random() < 0.5:
            fields.append(("metadata", self._metadata(chance)))
        if chance.random() < 0.5:
            keep = ["copy", "thumbnail", "nothing", "reference", "", "\u00e9"]
            fields.append(("keep", chance.choice(keep)))
        if chance.random() < 0.3:
            fields.append(("label", chance.choice(["a", "", "x" * 10_000, "x" * 60_000, "\x00"])))
        body = form(content)
        for name, value in fields:
            part = f'--b\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n{value}\r\n'
            body = part.encode("utf-8", "surrogatepass") + body
        return Request("put image", named("PUT", f"/v1/items/{self._id(chance)}", post(body, FORM)))

    def _numbers(self, chance: random.Random) -> str:
        sound = json.dumps([chance.uniform(-1, 1) for _ in range(self._width)])
        odd = [json.dumps([value] * self._width) for value in (0.0, 1e38, 1e39)]
        odd += [json.dumps([0.5] * 5000), "[]", "[null]", "[true]", "0.5", '["0.5"]', "[1e400]"]
        return chance.choice([sound] * 4 + [*odd, "[[" * 50])

    def _put_json(self, chance: random.Random) -> Request:
        parts = []
        if chance.random() < 0.7:
            parts.append(f'"vector": {self._numbers(chance)}')
        if chance.random() < 0.5:
            parts.append(f'"metadata": {self._metadata(chance)}')
        if chance.random() < 0.3:
            labels = ['"a"', "3", "null", '"' + "x" * 999_990 + '"', '"\\u0000"']
            parts.append('"label": ' + chance.choice(labels))
        if chance.random() < 0.05:
            parts.append('"unknown": 1')
        content = post(("{" + ", ".join(parts) + "}").encode("utf-8", "surrogatepass"))
        return Request("put json", named("PUT", f"/v1/items/{self._id(chance)}", content))

    def _several(self, chance: random.Random) -> Request:
        many = chance.choice([1, 5, 100, 101, 3000])
        ids = [f"item/{chance.randrange(_NAMES)}" for _ in range(many)]
        if chance.random() < 0.7:
            ids = list(dict.fromkeys(ids))
        if chance.random() < 0.5:
            items = [{"id": id, "vector": [0.5] * self._width} for id in ids]
            content = post(json.dumps({"items": items}).encode())
        else:
            images = [
                self.sound if chance.random() < 0.9 else chance.choice(self._images)[1][:300_000]
                for _ in ids[:120]
            ]
            count = len(images) + chance.choice([0, 0, 0, 1, -1])
            listed = json.dumps([{"id": id} for id in ids[:count]])
            head = '--b\r\nContent-Disposition: form-data; name="items"\r\n\r\n'
            body = _parts(images) + f"{head}{listed}\r\n--b--\r\n".encode()
            content = post(body, FORM)
        return Request("several", named("POST", "/v1/items", content))

    def _batch(self, chance: random.Random) -> Request:
        many, path = chance.choice([1, 3, 30, 101]), "/v1/search/batch"
        if chance.random() < 0.5:
            images = [
                self.sound if chance.random() < 0.8 else chance.choice(self._images)[1][:500_000]
                for _ in range(many)
            ]
            body = _parts(images) + b"--b--\r\n"
            return Request("batch", named("POST", path, post(body, FORM)))
        if chance.random() < 0.2:
            name, path = chance.choice([(b"queries", path), (b"items", "/v1/items")])
            value, values = chance.choice(VALUES), chance.choice([1000, 100_000, 2_000_000])
            start = chance.choice([b"", b'{"vector": [', b'{"id": "a", "metadata": {"a": ['])
            body = b'{"' + name + b'": [' + start + value * values + b"1]}"
            return Request("batch", named("POST", path, post(body)))
        if chance.random() < 0.2:
            many = chance.choice([50, 5000])
            nested = b'{"filter": ' + b'{"not":' * many + b"1" + b"}" * many + b"}"
            kind = chance.choice(["application/json", FORM, "image/png"])
            body = chance.choice(
                [b'{"queries":[' * many, nested, form(self.sound) * min(many, 200)]
            )
            return Request("batch", named("POST", path, post(body, kind)))
        kinds = [{"vector": [0.5] * self._width}, {"id": "item/1"}, {"id": "nobody"}]
        kinds += [{}, {"vector": [1]}]
        reply = {
            "queries": [chance.choice(kinds) for _ in range(many)],
            "k": chance.choice([1, 1000, 1001, -1]),
            "filter": chance.choice([None, *_FILTERS]),
            "fields": chance.choice([None, [], ["x"] * 5000]),
            "candidates": chance.choice([None, 10_000, 10**18]),
            "explain": True,
        }
        return Request("batch", named("POST", path, post(json.dumps(reply).encode())))

    def _encode(self, chance: random.Random) -> Request:
        sound = b"data:image/png;base64," + b64encode(self.sound)
        hostile = b64encode(chance.choice(self._images)[1][:300_000])
        urls = [
            *(sound, b"data:image/jpeg;base64," + hostile, b"data:image/png;base64"),
            *(b"data:,", b"data:" + b";" * 50_000 + b",", sound[:-3], sound + b"=" * 10_000),
            *(sound.replace(b"base64", b"base64;base64"), b"%64ata:image/png;base64,AA==", b""),
            *(b"http://127.0.0.1/", b"file:///etc/passwd", b"A" * 500_000, b"\\ud800", b"\\u0000"),
        ]
        if chance.random() < 0.2:
            url = b"data:image/png;base64," + b"A" * chance.choice(
                [3_999_996, 11_999_997, 17_000_000]
            )
            body = b'{"model": "open", "input": "' + url + b'"}'
        else:
            many = chance.choice([1, 3, 100, 101, 50_000])
            texts = [sound] * many if many > 3 else [chance.choice(urls) for _ in range(many)]
            listed = b", ".join(b'"' + text + b'"' for text in texts)
            nested = chance.choice([0] * 5 + [1, 60, 5000])
            body = b'{"input": [' + b"[" * nested + listed + b"]" * nested + b'], "model": "open"'
            form_ = chance.choice([b"base64", b"float", b"x" * 10_000])
            body += b', "encoding_format": "' + form_ + b'"}'
        if chance.random() < 0.2:
            images = [chance.choice(self._images)[1][:500_000]] * chance.choice([1, 101])
            body = _parts(images) + b"--b--\r\n"
            return Request("encode", named("POST", "/v1/encode", post(body, FORM)))
        return Request("encode", named("POST", "/v1/embeddings", post(body)))

    def _patch_items(self, chance: random.Random) -> Request:
        filter = json.dumps(chance.choice([*_FILTERS, {"exists": "id"}, {}, None]))
        parts = [f'"filter": {filter}'] * chance.choice([1, 1, 1, 0, 2])
        parts += [f'"metadata": {self._metadata(chance)}'] * chance.choice([1, 1, 0])
        parts += [f'"label": {chance.choice(["null", "[]", json.dumps("x" * 100_000)])}']
        content = post(("{" + ", ".join(parts) + "}").encode("utf-8", "surrogatepass"))
        return Request("patch items", named("PATCH", "/v1/items", content))

    def _delete(self, chance: random.Random) -> Request:
        ids = [[f"item/{chance.randrange(_NAMES)}"], ["x"] * 10_001, [], [""], ["\ud800"]]
        filters = [None, {"price": {"<": 3, "in": [1]}}, {"and": [{}] * 3000}]
        replies = [{"filter": {"id": {"in": entry}}} for entry in ids]
        replies += [{"filter": entry} for entry in _FILTERS] + [{"filter": {"exists": "id"}}]
        reply = chance.choice([*replies, *({"filter": entry} for entry in filters), {}])
        if chance.random() < 0.2:
            return Request("delete", named("DELETE", f"/v1/items/{self._id(chance)}", post(b"")))
        return Request("delete", named("POST", "/v1/delete", post(json.dumps(reply).encode())))

    def _list(self, chance: random.Random) -> Request:
        if chance.random() < 0.4:
            text = chance.choice(_TEXTS)
            path = chance.choice([*_LISTS, f"items/{text}", f"indexes/{text}/index"])
            return Request("list", get(f"/v1/{path}?{chance.choice(_NAMED)}={text}"))
        text = chance.choice(_FILTERS).replace("%", "%25").replace(" ", "+").replace("\x00", "%00")
        long = ["&cursor=" + "A" * 9000, "&fields=" + "a," * 300]
        more = chance.choice(["", "&limit=1000", "&limit=0", "&cursor=x", *long])
        return Request("list", get(f"/v1/items?filter={text}{more}"))

    def _snapshot(self, chance: random.Random) -> Request:
        path = chance.choice(["/v1/snapshots", "/v1/snapshots?name=../x"])
        body = chance.choice([b"", b'{"path": "/etc"}', b"\xff" * 5000])
        return Request("snapshot", named("POST", path, post(body)))

    def _other_index(self, chance: random.Random) -> Request:
        """Return a request to an index that no key permits."""
        name, (method, end) = chance.choice(_OTHERS), chance.choice(_ROUTES).split()
        body = chance.choice(
            [b'{"filter": {"exists": "id"}}', b'{"vector": [0.5]}', form(self.sound)]
        )
        return Request("other index", named(method, f"/v1/indexes/{name}/{end}", post(body)))


def _parts(images: list[bytes]) -> bytes:
    """Return the parts of a form with several images, without the end of the form."""
    return b"".join(form(image).removesuffix(b"--b--\r\n") for image in images)
