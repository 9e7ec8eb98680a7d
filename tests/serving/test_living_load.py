"""A server under load while its index changes and migrates: no failed or mixed answer."""

import subprocess
import sys
import threading
from collections import Counter

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
        index.add([extra], progress=False)
        index.migrate(other, progress=False)
        index.delete(where="label = '1'")
        index.store.compact()
        index.add([extra], progress=False)
        index.rollback(progress=False)
        index.delete(where="label = '1'")
        index.drop_old()
    print("round", number, flush=True)
"""


class Client(threading.Thread):
    """Searches with one image again and again, and checks each answer.

    `expected` has the distance to each item, by bundle and id; `always` the ids that every answer
    must have.
    """

    def __init__(self, url, content, expected, always, stop):
        super().__init__()
        self.url, self.content, self.stop = url, content, stop
        self.expected, self.always = expected, always
        self.seen: Counter[str] = Counter()
        self.wrong: list[str] = []

    def run(self):
        with httpx.Client(base_url=self.url, timeout=30) as client:
            while not self.stop.is_set():
                for path in ("/v1/index", "/readyz"):
                    answer = client.get(path)
                    if answer.status_code != 200 or answer.json()["bundle"] not in self.expected:
                        self.wrong.append(f"{path}: {answer.status_code} {answer.text}")
                files = {"image": ("q", self.content)}
                answer = client.post("/v1/search", files=files, data={"k": "500"})
                if answer.status_code != 200:
                    self.wrong.append(f"{answer.status_code} {answer.text}")
                    continue
                self.judge(answer.json()["results"])
                image = client.get(f"/v1/items/{next(iter(self.always))}/image")
                if image.status_code != 200:
                    self.wrong.append(f"image: {image.status_code} {image.text}")

    def judge(self, hits):
        distances = {hit["id"]: hit["distance"] for hit in hits}
        fits = [
            bundle
            for bundle, own in self.expected.items()
            if all(abs(distance - own[id]) < 1e-4 for id, distance in distances.items())
        ]
        missing = self.always - set(distances)
        if len(fits) != 1:
            self.wrong.append(f"{len(fits)} bundles give these distances")
        elif missing or len(distances) != len(hits):
            self.wrong.append(f"{len(distances)} of {len(hits)} items, {len(missing)} missing")
        else:
            self.seen[fits[0]] += 1


def test_no_request_fails_and_no_answer_is_of_two_bundles(makers, served, tmp_path):
    photos, index = tmp_path / "photos", tmp_path / "i"
    paths, extra = makers.write_digits(photos, 90), photos / "1"
    # The other bundle scales images to another size
    other = makers.make_bundle(tmp_path / "other", seed=7, side=16)
    bundles = [makers.make_bundle(tmp_path / "one"), other]
    kept = [path for path in paths if path.parent != extra]
    create_index(index, bundles[0], [photos], progress=False)
    keys = [path.relative_to(photos).as_posix() for path in paths]
    expected, query = {}, kept[5]
    for folder in bundles:
        bundle = Bundle.open(folder, threads=1)
        vectors = bundle.encode_images(paths, progress=False).astype(np.float64)
        distances = np.linalg.norm(vectors - vectors[paths.index(query)], axis=1)
        expected[bundle.sha256] = own = dict(zip(keys, distances, strict=True))
        # An item that is added from the subfolder has only the file's name as id
        own |= {path.name: own[f"1/{path.name}"] for path in paths if path.parent == extra}
    server = served(index, "--workers", "2", "--images", str(photos))
    stop, always = threading.Event(), {path.relative_to(photos).as_posix() for path in kept}
    content = query.read_bytes()
    clients = [Client(server.url, content, expected, always, stop) for _ in range(3)]
    for client in clients:
        client.start()
    line = [sys.executable, "-c", WRITER, *map(str, (index, bundles[1], extra, ROUNDS))]
    options = {"capture_output": True, "text": True, "timeout": 240, "cwd": tmp_path}
    writer = subprocess.run(line, **options)
    stop.set()
    for client in clients:
        client.join(60)
    assert writer.returncode == 0, writer.stderr
    assert [wrong for client in clients for wrong in client.wrong] == []
    seen = sum((client.seen for client in clients), Counter())
    assert set(seen) == set(expected) and min(seen.values()) >= ROUNDS
    assert server.client.get("/v1/index").json()["bundle"] == next(iter(expected))
    server.process.terminate()
    assert server.process.communicate(timeout=20)[1] == ""  # the log is empty
