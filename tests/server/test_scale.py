"""A server of 60,000 vectors that are added to, changed and deleted while it answers.

Every threshold is the product's own: a write of more than 64 kB, 256 small writes, the log of the
record, the rebuilding of the companion, and the removal of dead rows.
"""

import threading

import numpy as np
import pytest
import wire
from retrieval import Index
from retrieval.index.integrity import check_index
from retrieval.store.contract import Item

from retrieval_engines.testing.small_bundles import make_bundle

pytestmark = pytest.mark.scale

COUNT = 60_000
FEATURES = 16
WIDTH = 192  # so 100 items, the most of a request, are more than 64 kB


class Oracle:
    """What the server should have, with exact distances between vectors of whole numbers."""

    def __init__(self, features):
        matrix = np.random.default_rng(0).integers(-9, 10, (FEATURES, WIDTH))  # as `make_bundle`
        self.features, self.matrix = features, matrix
        self.vectors = (features @ matrix).astype(float)
        self.alive = np.zeros(len(features), bool)

    def nearest(self, row, count, keep=True):
        difference = self.vectors - self.vectors[row]
        squared = np.einsum("ij,ij->i", difference, difference)
        squared[~(self.alive & keep)] = np.inf
        rows = np.lexsort((np.arange(len(squared)), squared))[:count]
        return [f"{row:06}" for row in rows if squared[row] < np.inf]

    def json_of(self, rows):
        return [
            {
                "id": f"{row:06}",
                "label": f"class {row % 100}",
                "metadata": {"number": int(row)},
                "vector": self.features[row].tolist(),
            }
            for row in rows
        ]


@pytest.fixture(scope="module")
def scene(tmp_path_factory):
    """An index of 60,000 items, and the features of 10,000 more."""
    folder = tmp_path_factory.mktemp("served")
    features = np.random.default_rng(0).integers(-50, 51, (COUNT + 10_000, FEATURES))
    oracle = Oracle(features)
    bundle = make_bundle(folder / "bundle", features=FEATURES, width=WIDTH)
    vectors = oracle.vectors.astype(np.float32)
    items = [
        Item(f"{row:06}", f"class {row % 100}", {"number": row}, arrays={"vector": vectors[row]})
        for row in range(COUNT)
    ]
    with Index.create(folder / "i", model=bundle) as index:
        index.upsert(items)
        index.store.compact()
    oracle.alive[:COUNT] = True
    return folder / "i", oracle


def test_a_server_whose_index_passes_every_threshold(served, scene):
    path, oracle = scene
    (path.parent / "snapshots").mkdir()
    server = served(path, "--open", "admin", "--snapshots", str(path.parent / "snapshots"))
    client = server.client
    statuses, stop = set(), threading.Event()

    def ask_all_the_while():
        body = {"vector": oracle.features[7].tolist(), "k": 3}
        while not stop.wait(0.05):
            statuses.add(client.post("/v1/search", json=body).status_code)

    def hits(row, **options):
        body = {"vector": oracle.features[row].tolist(), **options}
        answer = client.post("/v1/search", json=body)
        assert answer.status_code == 200, answer.text
        return [hit["id"] for hit in answer.json()["results"]]

    def check(*rows):
        for row in rows:
            assert hits(row, k=20) == oracle.nearest(row, 20)
        queries = [{"vector": oracle.features[row].tolist()} for row in range(0, 5000, 50)]
        answer = client.post("/v1/search/batch", json={"queries": queries, "k": 5}).json()
        for place in (0, 50, 99):
            ids = [hit["id"] for hit in answer["answers"][place]["results"]]
            assert ids == oracle.nearest(50 * place, 5)

    def details():
        with Index.open(path) as index:
            return index.stats().details

    background = threading.Thread(target=ask_all_the_while)
    background.start()
    try:
        assert details()["structure"] == "companion"
        check(0, 12_345, COUNT - 1)
        assert hits(3, k=1000) == oracle.nearest(3, 1000)
        below = np.arange(len(oracle.alive)) < 30_000
        assert hits(3, filter="number < 30000") == oracle.nearest(3, 10, below)
        many = {"vector": oracle.features[3].tolist(), "candidates": 10_000}
        assert client.post("/v1/search", json=many).status_code == 200
        many["candidates"] += 1
        assert client.post("/v1/search", json=many).status_code == 400

        # 300 small writes, which fill the copies of unsynced rows and the record's log
        log, record = path / "items.sqlite-wal", path / "items.sqlite"
        size = record.stat().st_size
        for row in range(COUNT, COUNT + 300):
            (item,) = oracle.json_of([row])
            answer = client.put(f"/v1/items/{item.pop('id')}", json=item)
            assert answer.status_code == 200, answer.text
            oracle.alive[row] = True
        check(COUNT, COUNT + 299)

        # Large writes, until the companion is built again
        for start in range(COUNT + 300, COUNT + 9000, 100):
            rows = range(start, start + 100)
            answer = client.post("/v1/items", json={"items": oracle.json_of(rows)})
            assert answer.json() == {"added": len(rows), "replaced": 0}
            oracle.alive[rows] = True
        wire.until(lambda: details()["covered"] > COUNT)
        assert record.stat().st_size > size and log.stat().st_size < 24_000_000
        check(COUNT + 5000, 12_345)

        for row in (5, COUNT + 5):
            answer = client.patch(f"/v1/items/{row:06}", json={"label": "other"})
            assert answer.json()["replaced"]
        found = client.get("/v1/items", params={"filter": "label = 'other'"}).json()["items"]
        assert [item["id"] for item in found] == ["000005", f"{COUNT + 5:06}"]
        check(5, COUNT + 5)

        # More than a quarter of the rows die, and are removed
        answer = client.post("/v1/delete", json={"filter": "number >= 20000 and number < 45000"})
        assert answer.json() == {"deleted": 25_000}
        oracle.alive[20_000:45_000] = False
        check(19_999, 20_000, 45_000)
        wire.until(lambda: details()["rows"] == oracle.alive.sum())
        assert details()["deleted"] == 0
        check(19_999, 20_000, COUNT + 8999)
        assert client.get("/v1/index").json()["items"] == oracle.alive.sum()
        name = client.post("/v1/snapshots").json()["snapshot"]
        assert check_index(path.parent / "snapshots" / name) == ([], [])
    finally:
        stop.set()
        background.join()
    assert statuses == {200}
    assert "Traceback" not in wire.log_of(server)
