"""A server under load while its index changes and migrates: no failed or mixed answer."""

import subprocess
import sys
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import httpx
import numpy as np
from retrieval.bundle.bundle import Bundle
from retrieval.index.index import create_index

ROUNDS = 3
WRITER = """
import sys
from retrieval.index.index import Index

index_path, other, extra, rounds = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])
for number in range(rounds):
    with Index.open(index_path, threads=1) as index:
        index.add([extra], progress=False)
        index.migrate(other, progress=False)
        index.delete(filter="label = '1'")
        index.store.compact()
        index.add([extra], progress=False)
        index.rollback(progress=False)
        index.delete(filter="label = '1'")
        index.drop_old()
    print("round", number, flush=True)
"""


def bundle_or_fault(hits, expected, always):
    """Return the bundle that gives an answer's distances, or what is wrong with the answer.

    `expected` has the distance to each item, by bundle and id; `always` the ids that every answer
    must have.
    """
    distances = {hit["id"]: hit["distance"] for hit in hits}
    fits = [
        bundle
        for bundle, own in expected.items()
        if all(abs(distance - own[id]) < 1e-4 for id, distance in distances.items())
    ]
    if len(fits) != 1:
        return f"{len(fits)} bundles give these distances"
    missing = always - set(distances)
    if missing or len(distances) != len(hits):
        return f"{len(distances)} of {len(hits)} items, {len(missing)} missing"
    return fits[0]


def search_until(stop, url, content, expected, always):
    """Search with an image again and again; count the answers by bundle or fault."""
    counts = Counter()
    with httpx.Client(base_url=url, timeout=30) as client:
        while not stop.is_set():
            for path in ("/v1/index", "/readyz"):
                answer = client.get(path)
                if answer.status_code != 200 or answer.json()["bundle"] not in expected:
                    counts[f"{path}: {answer.status_code} {answer.text}"] += 1
            files = {"image": ("q", content)}
            answer = client.post("/v1/search", files=files, data={"k": "500"})
            if answer.status_code == 200:
                counts[bundle_or_fault(answer.json()["results"], expected, always)] += 1
            else:
                counts[f"{answer.status_code} {answer.text}"] += 1
            image = client.get(f"/v1/items/{next(iter(always))}/image")
            if image.status_code != 200:
                counts[f"image: {image.status_code} {image.text}"] += 1
    return counts


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
    line = [sys.executable, "-c", WRITER, *map(str, (index, bundles[1], extra, ROUNDS))]
    options = {"capture_output": True, "text": True, "timeout": 240, "cwd": tmp_path}
    with ThreadPoolExecutor(3) as pool:
        arguments = (stop, server.url, query.read_bytes(), expected, always)
        clients = [pool.submit(search_until, *arguments) for _ in range(3)]
        try:
            writer = subprocess.run(line, **options)
        finally:
            stop.set()
        counts = sum((client.result(60) for client in clients), Counter())
    assert writer.returncode == 0, writer.stderr
    assert set(counts) == set(expected) and min(counts.values()) >= ROUNDS, counts
    assert server.client.get("/v1/index").json()["bundle"] == next(iter(expected))
    server.process.terminate()
    assert server.process.communicate(timeout=20)[1] == ""  # the log is empty
