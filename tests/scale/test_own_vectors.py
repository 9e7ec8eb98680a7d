"""60,000 vectors of tables, on their way to an index, with every threshold where it is."""

import hashlib
import os
import signal
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet
from retrieval import Index
from retrieval.errors import DataError
from retrieval.index.write_embeddings import embed_sources
from retrieval.store.local import LocalStore

from retrieval_engines.testing.small_bundles import make_bundle

pytestmark = pytest.mark.scale

COUNT, HALF, FEATURES, WIDTH = 60_000, 30_000, 16, 64


def facts_of(row):
    """Return the label and the metadata of an item; those of the second half have a list."""
    label = None if row % 50 == 0 else f"class {row % 100}"
    price = None if row % 7 == 0 else row * 61 % 10_000 / 100
    metadata = {"100 %": price, "shop": f'shop "{row % 37}" – ü', "sold": row % 3 == 0, "n": row}
    return label, metadata | ({"tags": [row % 2, row % 5]} if row >= HALF else {})


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A bundle, and two tables of vectors, the second with a column that is no plain value."""
    folder = tmp_path_factory.mktemp("own")
    make_bundle(folder / "bundle", features=FEATURES, width=WIDTH)
    vectors = np.random.default_rng(0).integers(-50, 51, (COUNT, FEATURES)).astype(np.float32)
    np.save(folder / "vectors.npy", vectors)
    for rows in (range(HALF), range(HALF, COUNT)):
        facts = [facts_of(row) for row in rows]
        columns = {name: [entry[name] for _, entry in facts] for name in facts[0][1]}
        # NaN becomes null
        columns["100 %"] = [float("nan") if x is None else x for x in columns["100 %"]]
        columns |= {"key": [f"{row:06}" for row in rows], "label": [label for label, _ in facts]}
        columns["vector"] = list(vectors[rows.start : rows.stop])
        parquet.write_table(pa.table(columns), folder / f"{rows.start}.parquet")
    return folder


def holds_all(index, folder):
    """Compare every item and vector with the tables; the matrix is that of `make_bundle`."""
    vectors = np.load(folder / "vectors.npy")
    matrix = np.random.default_rng(0).integers(-9, 10, (FEATURES, WIDTH)).astype(np.float32)
    assert len(index) == COUNT
    for start in range(0, COUNT, 10_000):
        ids = [f"{row:06}" for row in range(start, start + 10_000)]
        items = index.get(ids, arrays=True)
        for row, id in enumerate(ids, start):
            item = items[id]
            assert (item.label, item.metadata) == facts_of(row)
            assert item.stamp == hashlib.sha256(vectors[row].tobytes()).hexdigest()
            assert np.array_equal(item.arrays["vector"], vectors[row] @ matrix)


def test_vectors_of_tables_and_embedded_ones_are_indexed(folder, tmp_path):
    tables = [folder / "0.parquet", folder / f"{HALF}.parquet"]
    bundle = folder / "bundle"
    with Index.create(tmp_path / "i", tables, model=bundle, progress=False) as index:
        holds_all(index, folder)
        assert list(index.store.settings()["fields"]) == ["100 %", "n", "shop", "sold", "tags"]
    assert embed_sources(bundle, tables, tmp_path / "e", progress=False).items == COUNT
    with Index.create(tmp_path / "j", tmp_path / "e", model=bundle, progress=False) as index:
        holds_all(index, folder)
        assert index.add(tables, progress=False).unchanged == COUNT


def test_a_killed_run_goes_on_where_it_stopped(folder, tmp_path, killed, monkeypatch):
    upsert, parent, written = LocalStore.upsert, os.getpid(), []

    def counted(self, items, bundle):
        if os.getpid() != parent and len(written) == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        written.append(len(items))
        return upsert(self, items, bundle)

    def create():
        tables = [folder / "0.parquet", folder / f"{HALF}.parquet"]
        bundle = folder / "bundle"
        return Index.create(tmp_path / "i", tables, model=bundle, progress=False)

    monkeypatch.setattr(LocalStore, "upsert", counted)
    killed(create)
    with create() as index:
        assert index.summary.resumed > 0
        assert index.summary.resumed + sum(written) == COUNT
        holds_all(index, folder)


PEAK = """
import sys
from pathlib import Path
from retrieval.index.sources import collect

def peak():
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0])

collect([sys.argv[1]], "features")
before = peak()
items = collect([sys.argv[2]], "features").items
print(len(items), len(items.texts[-1]), peak() - before)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the system is not Linux")
def test_long_metadata_are_not_held_in_memory(tmp_path, process):
    for name, count in (("small", 100), ("large", COUNT)):
        note = pa.DictionaryArray.from_arrays(pa.array([0] * count, pa.int32()), ["x" * 5000])
        vectors = pa.array([[1.0]] * count, pa.list_(pa.float32()))
        parquet.write_table(pa.table({"vector": vectors, "note": note}), tmp_path / name)
        (tmp_path / name).rename(tmp_path / f"{name}.parquet")
    done = process("-c", PEAK, tmp_path / "small.parquet", tmp_path / "large.parquet")
    count, characters, kib = map(int, done.out.split())
    assert (count, characters) == (COUNT, len('{"note": ""}') + 5000)
    # 300 MB of text; a block of it is held three times
    assert kib < 130_000, kib


def test_a_part_that_changes_while_it_is_read_is_refused(folder, tmp_path, monkeypatch):
    tables = [folder / "0.parquet", folder / f"{HALF}.parquet"]
    embed_sources(folder / "bundle", tables, tmp_path / "e", progress=False)
    parts = sorted((tmp_path / "e").glob("part-*.parquet"))
    upsert, written = LocalStore.upsert, []

    def changing(self, items, bundle):
        written.append(len(items))
        os.utime(parts[-1])
        return upsert(self, items, bundle)

    monkeypatch.setattr(LocalStore, "upsert", changing)
    with pytest.raises(DataError, match="was changed while it was read"):
        Index.create(tmp_path / "i", tmp_path / "e", model=folder / "bundle", progress=False)
    assert written and sum(written) < COUNT
    assert not (tmp_path / "i").exists()
