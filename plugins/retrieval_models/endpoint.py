"""Embeddings from an HTTP endpoint with OpenAI's API; its responses are not trusted."""

from __future__ import annotations

import base64
import hashlib
import os
import sqlite3
import time
from collections.abc import Sequence
from contextlib import closing
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import numpy as np
from retrieval.base.arrays import Array, Floats32, Ints, unit_rows
from retrieval.errors import DataError, first_line, needing, printable
from retrieval.helpers import Meter, cache_folder, strict_loads, to_png
from retrieval.plugin import Dataset

from retrieval_models.pictures import pictures

KEY = "RETRIEVAL_ENDPOINT_KEY"
"""Environment variable of the key that is sent to the endpoint."""
LONGEST_SIDE = 1024
"""Longest side in pixels of an image that is sent; larger images are scaled down."""
BATCH = 16
WAIT_SECONDS = 60.0
"""Longest wait for a connection, or for the next bytes of an answer."""
ANSWER_SECONDS = 300.0
"""Longest time that a whole answer may take."""
MAX_BYTES = 1 << 25
"""Largest answer to one batch."""
MAX_NUMBERS = 1 << 16
"""Largest dimension of a vector."""


class Endpoint:
    """An HTTP endpoint that embeds images: `https://HOST/v1/embeddings?model=NAME`.

    Images are sent as data URLs of PNG in `input`, and all parameters of the address beside them.
    Vectors are scaled to length 1, and kept in the cache folder, so that no image is sent twice.

    Args:
        address: the address. A key is read from the environment variable RETRIEVAL_ENDPOINT_KEY.

    Raises:
        DataError: the address names no host or no model, or holds a password, or the key would be
            sent unencrypted.
        MissingDependency: httpx is not installed.
    """

    def __init__(self, address: str) -> None:
        with needing("httpx is not installed", "client"):
            import httpx
        self.http = httpx
        self.url, _, query = address.partition("?")
        self.parameters = dict(parse_qsl(query))
        parts = urlsplit(self.url)
        if not parts.hostname or "@" in parts.netloc or "model" not in self.parameters:
            raise DataError(
                "An endpoint's address is https://HOST/v1/embeddings?model=NAME, without a user or"
                f" password. A key belongs in the environment variable {KEY}."
            )
        # A response in plain bytes cannot grow when it is unpacked.
        self.headers = {"Accept-Encoding": "identity"}
        if key := os.environ.get(KEY):
            self.headers["Authorization"] = f"Bearer {key}"
            if parts.scheme != "https" and parts.hostname not in ("127.0.0.1", "::1", "localhost"):
                raise DataError(f"{self.url} would get the key of {KEY} unencrypted. Use https.")
        digest = hashlib.sha256(address.encode()).hexdigest()
        self.cache_file = cache_folder() / "endpoints" / f"{digest}.sqlite"

    def __call__(self, dataset: Dataset, items: Ints) -> Array:
        """Return the vectors (N, D) of items by index (N,).

        Raises:
            DataError: the endpoint cannot be reached, or its answer is refused.
        """
        vectors: list[Floats32] = []
        self.cache_file.parent.mkdir(parents=True, exist_ok=True)
        try:
            with (
                closing(sqlite3.connect(self.cache_file)) as cache,
                self.http.Client(timeout=WAIT_SECONDS, headers=self.headers) as client,
                Meter("embedding", len(items), "images") as meter,
            ):
                cache.execute("CREATE TABLE IF NOT EXISTS vectors (image PRIMARY KEY, vector)")
                for start in range(0, len(items), BATCH):
                    urls = []
                    for picture in pictures(dataset, items[start : start + BATCH]):
                        picture.thumbnail((LONGEST_SIDE, LONGEST_SIDE))
                        content = base64.b64encode(to_png(picture)).decode()
                        urls.append(f"data:image/png;base64,{content}")
                    vectors += self._embedded(client, cache, urls)
                    meter.update(len(urls))
        except self.http.HTTPError as error:
            reason = first_line(error) or type(error).__name__
            raise DataError(
                f"{self.url} cannot be reached: {reason}. The same command goes on where it ended."
            ) from error
        except sqlite3.Error as error:
            raise DataError(
                f"{self.cache_file}: {error}. Delete this file, or free space."
            ) from error
        if len({len(vector) for vector in vectors}) > 1:
            raise DataError(f"{self.url} gave vectors of different dimensions.")
        return unit_rows(np.stack(vectors))

    def _embedded(
        self, client: Any, cache: sqlite3.Connection, urls: Sequence[str]
    ) -> list[Floats32]:
        """Return the vectors of images; the endpoint is asked for those that are not kept."""
        images = [hashlib.sha256(url.encode()).digest() for url in urls]
        marks = ", ".join("?" * len(images))
        rows = cache.execute(f"SELECT * FROM vectors WHERE image IN ({marks})", images)
        vectors = {image: np.frombuffer(vector, np.float32) for image, vector in rows}
        new = {image: url for image, url in zip(images, urls, strict=True) if image not in vectors}
        if new:
            answer = self._answer(client, {**self.parameters, "input": [*new.values()]})
            vectors |= zip(new, self._vectors(answer, len(new)), strict=True)
            cache.executemany(
                "INSERT INTO vectors VALUES (?, ?)",
                [(name, vectors[name].tobytes()) for name in new],
            )
            cache.commit()
        return [vectors[image] for image in images]

    def _answer(self, client: Any, body: dict[str, Any]) -> bytes:
        content = bytearray()  # grows in place
        began = time.monotonic()
        with client.stream("POST", self.url, json=body) as response:
            for chunk in response.iter_raw():
                content += chunk
                if len(content) > MAX_BYTES or time.monotonic() - began > ANSWER_SECONDS:
                    raise DataError(
                        f"{self.url} answers with more than {MAX_BYTES >> 20} MiB, or for more"
                        f" than {ANSWER_SECONDS:.0f} seconds."
                    )
        if response.status_code != 200:
            text = printable(content[:200].decode(errors="replace"))
            raise DataError(
                f"{self.url} answers {response.status_code}: {text}. A key is read from the"
                f" environment variable {KEY}. The same command goes on where it ended."
            )
        return bytes(content)

    def _vectors(self, answer: bytes, count: int) -> Floats32:
        """Return the vectors (`count`, D) of an answer."""
        try:
            rows = strict_loads(answer)["data"]
            by_index = {row["index"]: row["embedding"] for row in rows}
            numbers = np.array([by_index[index] for index in range(count)])
            with np.errstate(over="ignore"):
                vectors = numbers.astype(np.float32)
            is_whole = len(rows) == count and numbers.ndim == 2 and numbers.dtype.kind in "fi"
            if is_whole and 1 <= vectors.shape[1] <= MAX_NUMBERS and np.isfinite(vectors).all():
                return vectors
        except (ValueError, KeyError, TypeError, ArithmeticError, RecursionError):
            pass
        raise DataError(
            f"{self.url} does not answer with `data`, a list of {count} objects with `index` and"
            f" `embedding`, of finite numbers and one dimension of at most {MAX_NUMBERS:,}."
        )
