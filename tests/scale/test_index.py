"""The verbs of `retrieval index` on up to 60,000 vectors; every threshold is the product's own."""

import json
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from numpy.typing import NDArray
from pyarrow import parquet
from retrieval import Index

from retrieval_engines.testing.small_bundles import make_bundle

pytestmark = pytest.mark.scale

COUNT = 60_000
ENDS = (0, 30_000, COUNT, 65_000, 69_000)
"""Ends of the tables of items. A structure is built again if the last table is added, too."""
WIDTH = 64
FEATURES = 16


@dataclass
class Oracle:
    """The items of an index in memory. Their vectors are whole numbers, so distances are exact."""

    features: NDArray[np.float64]
    alive: NDArray[np.bool_]
    seed: int = 0
    """Seed of the bundle that is served."""

    def nearest(self, row: int, count: int, keep: NDArray[np.bool_] | None = None) -> list[str]:
        """Return the ids of the exact nearest items, in the order of distance and id."""
        # The matrix A that `make_bundle` draws: |d A|² = d A Aᵀ dᵀ, for a difference d of features
        matrix = np.random.default_rng(self.seed).integers(-9, 10, (FEATURES, WIDTH)).astype(float)
        difference = self.features[: len(self.alive)] - self.features[row]
        squared = np.einsum("ij,ij->i", difference @ (matrix @ matrix.T), difference)
        squared[~self.alive if keep is None else ~(self.alive & keep[: len(squared)])] = np.inf
        rows = np.flatnonzero(squared <= np.partition(squared, count)[count])
        return [id_of(row) for row in rows[np.lexsort((rows, squared[rows]))][:count]]


def id_of(row: int) -> str:
    return f"{row:06}"


def write_table(path: Path, features: NDArray[np.float32], first: int, stop: int) -> None:
    """Write the items of a range of rows to a Parquet table."""
    rows = range(first, stop)
    columns = {
        "key": [id_of(row) for row in rows],
        "label": [f"class {row % 100}" for row in rows],
        "number": list(rows),
        "word": [f"word {row}" for row in rows],
        "features": list(features[first:stop]),
    }
    parquet.write_table(pa.table(columns), path)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with two bundles and the features of items, which are near one another in groups."""
    folder = tmp_path_factory.mktemp("scale")
    for seed in (0, 1):
        make_bundle(folder / f"bundle-{seed}", features=FEATURES, width=WIDTH, seed=seed)
    random = np.random.default_rng(0)
    centres = random.integers(-50, 51, (2000, FEATURES))
    centres = centres[random.integers(0, 2000, ENDS[-1])]
    features = centres + random.integers(-9, 10, centres.shape)
    features[500:510] = features[100:110]
    np.save(folder / "features.npy", features.astype(np.float32))
    for first, stop in pairwise(ENDS):
        write_table(folder / f"{first}.parquet", features.astype(np.float32), first, stop)
    return folder


# Back end, and parameters with which it builds in seconds
BACKENDS = [
    ("auto", []),
    ("ivf", ["--set", "lists=250"]),
    ("hnsw", ["--set", "m=8", "--set", "ef_construction=32"]),
    ("ivfpq", ["--set", "lists=250", "--set", "bytes=16"]),
    ("cagra", ["--set", "degree=16", "--set", "ef_construction=16"]),
]


@pytest.mark.parametrize(("backend", "parameters"), BACKENDS)
def test_every_verb(folder, tmp_path, cli, backend, parameters):
    def run(verb, *arguments):
        outcome = cli("index", verb, *arguments, "--json")
        assert outcome.code == 0, outcome.err
        return json.loads(outcome.out)

    index = tmp_path / "i"
    exact = backend == "auto"
    features = np.load(folder / "features.npy")
    oracle = Oracle(features.astype(float), np.ones(COUNT, bool))
    numbers = np.arange(len(features))
    filters = {  # up to 4,096 items are searched exactly
        "number < 4000": numbers < 4000,
        "number >= 8000": numbers >= 8000,
        "label = 'class 7'": numbers % 100 == 7,
        "word >= 'word 2' and word < 'word 3'": np.array([str(n)[0] == "2" for n in numbers]),
    }

    def check_searches(filters):
        """Compare searches, 300 at once and one by one, with distances by NumPy."""
        rows = np.flatnonzero(oracle.alive)
        rows = rows[:: len(rows) // 300]
        with Index.open(index) as opened:
            answers = opened.search(features[rows], k=20)
            assert answers[0] == opened.search(features[rows[0]], k=20)
            compared = range(0, 300, 50)
            found = [[hit.id for hit in answers[place]] for place in compared]
            right = [oracle.nearest(rows[place], 20) for place in compared]
            assert found == right or not exact
            assert sum(len(set(a) & set(b)) for a, b in zip(found, right, strict=True)) > 100
            for text, keep in filters.items():
                ids = [hit.id for hit in opened.search(features[0], k=20, filter=text)]
                expected = oracle.nearest(0, 20, keep)
                assert ids == expected or not (exact or keep[: len(oracle.alive)].sum() <= 4096)
                assert len(set(ids) & set(expected)) > 12

    def migrate_and_roll_back():
        run("migrate", index, folder / "bundle-1")
        oracle.seed = 1
        check_searches({})
        run("rollback", index)
        oracle.seed = 0

    tables = [folder / f"{first}.parquet" for first in ENDS[:-1]]
    options = ["--bundle", folder / "bundle-0", "--backend", backend, *parameters]
    created = run("create", index, *tables[:2], "--keep-features", *options)
    assert created["count"] == COUNT
    assert created["backend"] == ("flat" if exact else backend)
    assert (created["recall_at_10"] is None) == exact
    check_searches({})

    # To build the structure again would take the others seconds
    grown = ENDS[-1] if exact else ENDS[-2]
    added = run("add", index, *(tables[1:] if exact else tables[2:3]))
    assert added["added"] == grown - COUNT
    assert added["unchanged"] == (COUNT - ENDS[1] if exact else 0)
    oracle.alive = np.ones(grown, bool)
    if exact:
        run("compact", index)
    shown = run("show", index)
    assert (shown["items"], shown["deleted"]) == (grown, 0)
    assert shown["covered"] == (grown if exact else COUNT)
    assert shown["structure"] == ("companion" if exact else backend)
    check_searches(filters)
    assert run("check", index)["damaged"] == []
    if exact:
        listed = run("list", index, "--limit", grown)["items"]
        assert [item["id"] for item in listed] == [id_of(row) for row in range(grown)]

    # All that a structure proposes for this query is deleted, so the search is exact
    hole = [int(id) for id in oracle.nearest(0, grown // 5)]
    assert run("delete", index, *map(id_of, hole))["deleted"] == len(hole)
    oracle.alive[hole] = False
    with Index.open(index) as opened:
        answer = [hit.id for hit in opened.search(features[0], k=20)]
    assert len(answer) == 20 and not set(answer) & set(map(id_of, hole))
    assert answer == oracle.nearest(0, 20) or backend == "ivfpq"

    # The others migrate when half of the items are gone, which takes them half as long
    if exact:
        copy = tmp_path / "copy"
        run("snapshot", index, tmp_path / "snapshot")
        run("restore", tmp_path / "snapshot", copy)
        assert run("check", copy)["damaged"] == []
        assert run("show", copy)["items"] == grown - len(hole)
        migrate_and_roll_back()
        run("migrate", index, "--drop-old")

    # More than a quarter of the rows die, so upkeep compacts
    synced = run("add", index, tables[0], "--sync")
    assert synced["removed"] == oracle.alive[ENDS[1] :].sum()
    oracle.alive = numbers[:grown] < ENDS[1]
    run("compact", index)
    assert run("show", index)["deleted"] == 0
    check_searches(filters)
    if not exact:
        migrate_and_roll_back()

    # Exact search takes a quarter of a minute for all of them
    compared = [] if backend == "ivf" else ["--filter", "number < 1000"]
    groups = run("duplicates", index, "--within", "0", *compared)["groups"]
    pairs = [[id_of(row), id_of(row + 400)] for row in range(100, 110)]
    assert [group["ids"] for group in groups] == pairs


def test_wide_vectors_get_a_graph(tmp_path, cli):
    # `auto` chooses by the number of numbers. Few vectors differ, so the graph is built at once.
    count = 32_000_000 // 1600 + 1
    bundle = make_bundle(tmp_path / "bundle", features=FEATURES, width=1600)
    values = np.random.default_rng(0).integers(-50, 51, (200, FEATURES)).astype(np.float32)
    features = values[np.arange(count) % 200]
    np.savez(tmp_path / "t.npz", features=features, keys=[id_of(row) for row in range(count)])
    index = tmp_path / "i"
    created = cli("index", "create", index, tmp_path / "t.npz", "--bundle", bundle, "--json")
    assert json.loads(created.out)["backend"] == "hnsw"
    with Index.open(index) as opened:
        hits = opened.search(features[7], k=20)
    assert [(hit.id, hit.distance) for hit in hits] == [(id_of(7 + 200 * n), 0) for n in range(20)]
