"""`retrieval export-items`: what it writes opens in the programs that it is for."""

import io
import json
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import makers
import numpy as np
import pytest
from PIL import Image
from retrieval.bundle.bundle import Bundle
from retrieval.index.index import create_index, open_index

pq = pytest.importorskip("pyarrow.parquet", reason="the extra parquet is not installed")


@pytest.fixture(scope="module")
def bundle_path(tmp_path_factory):
    return makers.make_bundle(tmp_path_factory.mktemp("bundle") / "bundle")


@pytest.fixture(scope="module")
def place(tmp_path_factory, bundle_path):
    """An index of 150 digits with metadata. Not to be changed."""
    folder = tmp_path_factory.mktemp("index")
    paths = makers.write_digits(folder / "digits", 150)
    rows = [f"{path},{path.parent.name},{number % 40}" for number, path in enumerate(paths)]
    (folder / "t.csv").write_text("\n".join(["path,label,price", *rows]))
    create_index(folder / "i", bundle_path, [folder / "t.csv"], progress=False)
    return folder / "i"


@pytest.fixture
def small_pages(monkeypatch):
    """Pages of 40 items, so that there are several."""
    from retrieval_exports import layouts

    monkeypatch.setattr(layouts, "_PAGE", 40)


def export(cli, *words):
    done = cli("export-items", *words)
    assert done.code == 0, done.err
    return done


def test_duckdb_searches_the_file_as_the_index_does(cli, place, tmp_path, small_pages):
    duckdb = pytest.importorskip("duckdb")
    file = tmp_path / "p.parquet"
    assert "Exported 150 items" in export(cli, place, file).out
    with open_index(place) as index:
        ids = [item.id for item in index.scan()]
        vector = index.vector(ids[7])
        hits = index.search(vector, k=5, filter="price < 20")
    width = len(vector)
    with duckdb.connect() as base:
        rows = base.execute(
            f"select id, array_distance(vector::float[{width}], $vector::float[{width}]) as d"
            f" from '{file}' where (metadata->>'price')::int < 20 order by d, id limit 5",
            {"vector": vector.tolist()},
        ).fetchall()
        labels = base.execute(f"select label, count(*) from '{file}' group by label").fetchall()
    assert [row[0] for row in rows] == [hit.id for hit in hits]
    assert np.allclose([row[1] for row in rows], [hit.distance for hit in hits], atol=1e-5)
    assert sum(count for _, count in labels) == 150 and len(labels) == 10


def test_the_file_carries_the_name_of_its_embedding(cli, place, tmp_path, bundle_path):

    page = Path(__file__).parents[2] / "docs" / "identity.md"
    body = re.search(
        r":caption: read_vectors.py\n\n(.*?)^```", page.read_text("utf-8"), re.M | re.S
    )
    names = {}
    exec(body[1].replace('table["key"]', 'table["id"]'), names)
    export(cli, place, tmp_path / "p.parquet", "--filter", "label = '3'")
    ids, vectors = names["read_vectors"](tmp_path / "p.parquet", bundle_path)
    with open_index(place) as index:
        expected = index.get(ids, arrays=True)
        assert sorted(ids) == sorted(item.id for item in index.scan("label = '3'"))
    assert np.array_equal(vectors, np.stack([expected[id].vector for id in ids]))
    other = makers.make_bundle(tmp_path / "other", seed=3)
    with pytest.raises(ValueError, match="holds vectors of"):
        names["read_vectors"](tmp_path / "p.parquet", other)


def test_atlas_gets_pictures_and_neighbours(cli, place, tmp_path, small_pages):
    file = tmp_path / "a.parquet"
    export(cli, place, file, "--to", "atlas", "--neighbors", 5)
    rows = pq.read_table(file).to_pylist()
    assert len(rows) == 150
    with open_index(place) as index:
        for number in (0, 41, 149):
            row = rows[number]
            hits = [h for h in index.search(index.vector(row["id"]), k=6) if h.id != row["id"]]
            assert [rows[near]["id"] for near in row["neighbors"]["ids"]] == [h.id for h in hits]
            assert np.allclose(row["neighbors"]["distances"], [h.distance for h in hits])
            assert Image.open(io.BytesIO(row["image"]["bytes"])).format == "JPEG"


def test_embedding_atlas_opens_it(cli, place, tmp_path):
    """The program itself loads the file, ranks its items by our neighbours, and exports a site."""
    pytest.importorskip("embedding_atlas.cli", reason="needs embedding-atlas")
    file = tmp_path / "a.parquet"
    export(cli, place, file, "--to", "atlas")
    line = [sys.executable, "-m", "embedding_atlas.cli", str(file), "--vector", "vector"]
    line += ["--image", "image", "--neighbors", "neighbors", "--degree", "--disable-projection"]
    site = tmp_path / "site.zip"
    done = subprocess.run(
        [*line, "--export-application", str(site)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    with zipfile.ZipFile(site) as archive:
        table = pq.read_table(io.BytesIO(archive.read("data/dataset.parquet")))
        settings = json.loads(archive.read("data/metadata.json"))
    assert settings["props"]["data"]["neighbors"] == "neighbors"
    assert settings["props"]["data"]["image"] == "image"
    assert table.num_rows == 150 and set(table["out_degree"].to_pylist()) == {15}


def test_fiftyone_gets_the_layout_that_it_documents(cli, place, tmp_path, small_pages):
    """`FiftyOneImageClassificationDataset`: data/UUID.EXT, and labels.json with a dict per UUID.

    FiftyOne itself brings a database server, and is not installed for this test.
    """
    folder = tmp_path / "f"
    export(cli, place, folder, "--to", "fiftyone")
    said = json.loads((folder / "labels.json").read_text("utf-8"))
    vectors = np.load(folder / "vectors.npy")
    files = sorted((folder / "data").iterdir())
    assert [file.stem for file in files] == sorted(said["labels"]) and len(files) == 150
    with open_index(place) as index:
        assert said["embedding"] == index.bundle.sha256
        for number, file in enumerate(files):
            entry = said["labels"][file.stem]
            item = index.get(entry["attributes"]["item"], arrays=True)
            (item,) = item.values()
            assert entry["label"] == item.label
            assert entry["attributes"]["metadata"] == dict(item.metadata)
            assert file.read_bytes() == item.path.read_bytes() and file.suffix == ".png"
            assert np.array_equal(vectors[number], item.vector)


def test_outputs_are_whole_or_not_there(cli, place, tmp_path, monkeypatch, small_pages):
    from retrieval_exports import layouts

    (tmp_path / "there").write_text("mine")
    for to in ("parquet", "fiftyone"):
        done = cli("export-items", place, tmp_path / "there", "--to", to)
        assert done.code == 2 and "exists already" in done.err
    assert (tmp_path / "there").read_text() == "mine"
    done = cli("export-items", place, tmp_path / "none", "--filter", "label = 'none'")
    assert done.code == 2 and "no item to export that matches the filter" in done.err
    real = layouts._columns
    calls = []

    def fails_later(*words):
        calls.append(1)
        if len(calls) == 3:
            raise OSError(28, "No space left on device")
        return real(*words)

    monkeypatch.setattr(layouts, "_columns", fails_later)
    done = cli("export-items", place, tmp_path / "full.parquet")
    assert done.code == 2 and "No space left" in done.err
    assert [path.name for path in tmp_path.iterdir()] == ["there"]
    export(cli, place, tmp_path / "there", "--replace")
    assert pq.read_table(tmp_path / "there").num_rows == 150


def test_neighbors_without_atlas_are_refused(cli, place, tmp_path):
    done = cli("export-items", place, tmp_path / "p.parquet", "--neighbors", "3")
    assert done.code == 2 and "Leave --neighbors out without --to atlas" in done.err
    assert not (tmp_path / "p.parquet").exists()


def test_replacing_keeps_folders_that_are_no_export(cli, place, tmp_path):
    (photo,) = makers.write_digits(tmp_path / "photos", 1)
    for to in ("parquet", "fiftyone"):
        done = cli("export-items", place, tmp_path / "photos", "--to", to, "--replace")
        assert done.code == 2 and "Choose another name" in done.err
        assert "--replace" not in done.err and photo.exists()
    output = tmp_path / "empty"
    output.mkdir()
    for replace in ((), ("--replace",)):
        export(cli, place, output, "--to", "fiftyone", *replace)
        assert len(list((output / "data").iterdir())) == 150


def test_a_migration_meanwhile_is_refused(cli, place, tmp_path, monkeypatch, small_pages):
    from retrieval_exports import layouts

    copy = shutil.copytree(place, tmp_path / "i")
    other = makers.make_bundle(tmp_path / "other", seed=7)
    real = layouts._columns

    def migrates(*words):
        with open_index(copy) as index:
            if index.bundle.sha256 != Bundle.open(other).sha256:
                index.migrate(other, progress=False)
        return real(*words)

    monkeypatch.setattr(layouts, "_columns", migrates)
    done = cli("export-items", copy, tmp_path / "p.parquet")
    assert done.code == 2 and "was migrated to another bundle" in done.err
    assert not (tmp_path / "p.parquet").exists()


def test_items_without_an_image_are_counted(cli, tmp_path):
    bundle = makers.make_bundle(tmp_path / "b", kind="features")
    rng = np.random.default_rng(0)
    np.savez(tmp_path / "f.npz", features=rng.normal(size=(20, 64)).astype(np.float32))
    create_index(tmp_path / "i", bundle, [tmp_path / "f.npz"], progress=False)
    done = export(cli, tmp_path / "i", tmp_path / "a.parquet", "--to", "atlas")
    assert "20 items have no image" in done.err
    assert pq.read_table(tmp_path / "a.parquet")["image"].null_count == 20
    done = cli("export-items", tmp_path / "i", tmp_path / "f", "--to", "fiftyone")
    assert done.code == 2 and "No item of" in done.err
    assert not (tmp_path / "f").exists()
