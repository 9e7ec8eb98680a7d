"""A server under load while its index changes and migrates: no failed or mixed answer."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path

import httpx
import numpy as np
from retrieval.serving.bundle import Bundle
from retrieval.serving.index.index import create_index

ROUNDS = 3
WRITER = """
import sys
from retrieval.serving.index.index import Index

index_path, other, extra, rounds = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])
for number in range(rounds):
    with Index.open(index_path, threads=1) as index:
        index.add([extra], progress=False, workers=1)
        index.migrate(other, progress=False)
        index.delete(where="label = '1'")
        index.store.compact()
        index.add([extra], progress=False, workers=1)
        index.rollback(progress=False)
        index.delete(where="label = '1'")
        index.drop_old()
    print("round", number, flush=True)
"""


class Client(threading.Thread):
    """Searches with one image again and again, and judges each answer.

    Args:
        url: of the server.
        content: the image.
        expected: distances to every file, by bundle and item.
        always: ids that every answer holds.
        stop: when to end.
    """

    def __init__(self, url, content, expected, always, stop):
        super().__init__()
        self._url, self._content, self._expected, self._always, self._stop_ = (
            url,
            content,
            expected,
            always,
            stop,
        )
        self.seen: Counter[str] = Counter()
        self.wrong: list[str] = []

    def run(self):
        with httpx.Client(base_url=self._url, timeout=30) as client:
            while not self._stop_.is_set():
                for path in ("/v1/index", "/readyz"):
                    answer = client.get(path)
                    if answer.status_code != 200 or answer.json()["bundle"] not in self._expected:
                        self.wrong.append(f"{path}: {answer.status_code} {answer.text}")
                answer = client.post(
                    "/v1/search", files={"image": ("q", self._content)}, data={"k": "500"}
                )
                if answer.status_code != 200:
                    self.wrong.append(f"{answer.status_code} {answer.text}")
                    continue
                self._judge(answer.json()["results"])
                image = client.get(f"/v1/items/{next(iter(self._always))}/image")
                if image.status_code != 200:
                    self.wrong.append(f"image: {image.status_code} {image.text}")

    def _judge(self, hits):
        matches = {hit["id"]: hit["distance"] for hit in hits}
        fits = [
            name
            for name, distances in self._expected.items()
            if all(abs(distance - distances[id]) < 1e-4 for id, distance in matches.items())
        ]
        if len(fits) != 1:
            self.wrong.append(f"{len(fits)} bundles give these distances")
        elif self._always - set(matches) or len(matches) != len(hits):
            self.wrong.append(
                f"{len(matches)} of {len(hits)} items, {len(self._always - set(matches))} missing"
            )
        else:
            self.seen[fits[0]] += 1


def test_no_request_fails_and_no_answer_is_of_two_bundles(makers, served, tmp_path):
    paths = makers.write_digits(tmp_path / "photos", 90)
    extra = tmp_path / "photos" / "1"
    bundles = [
        makers.make_bundle(tmp_path / "one"),
        makers.make_bundle(
            tmp_path / "other", seed=7, side=16
        ),  # images are prepared for it in another way
    ]
    kept = [path for path in paths if path.parent != extra]
    create_index(tmp_path / "i", bundles[0], [tmp_path / "photos"], progress=False)
    keys = {path: path.relative_to(tmp_path / "photos").as_posix() for path in kept}
    keys |= {path: f"1/{path.name}" for path in paths if path.parent == extra}
    expected, query = {}, kept[5]
    for folder in bundles:
        bundle = Bundle.open(folder, threads=1)
        vectors = bundle.encode_images(paths, progress=False).astype(np.float64)
        distances = np.linalg.norm(vectors - vectors[paths.index(query)], axis=1)
        expected[bundle.sha256] = dict(zip((keys[path] for path in paths), distances, strict=True))
        # added from its own folder, an item is called otherwise
        expected[bundle.sha256] |= {
            path.name: expected[bundle.sha256][keys[path]] for path in paths if path.parent == extra
        }
    server = served(tmp_path / "i", "--workers", "2", "--images", str(tmp_path / "photos"))
    stop = threading.Event()
    content, always = query.read_bytes(), {keys[path] for path in kept}
    clients = [Client(server.url, content, expected, always, stop) for _ in range(3)]
    for client in clients:
        client.start()
    writer = subprocess.run(
        [sys.executable, "-c", WRITER, *map(str, (tmp_path / "i", bundles[1], extra, ROUNDS))],
        capture_output=True,
        text=True,
        timeout=240,
        cwd=Path(tmp_path),
    )
    stop.set()
    for client in clients:
        client.join(60)
    assert writer.returncode == 0, writer.stderr
    assert [wrong for client in clients for wrong in client.wrong] == []
    seen = sum((client.seen for client in clients), Counter())
    assert set(seen) == set(expected) and min(seen.values()) >= ROUNDS
    assert server.client.get("/v1/index").json()["bundle"] == next(iter(expected))
    server.process.terminate()
    assert server.process.communicate(timeout=20)[1] == ""  # nothing was worth a line of the log
