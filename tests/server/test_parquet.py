"""Parquet tables of images' paths and of features, in an index; damaged and hostile tables."""

import datetime
import os
import resource
import sys
from decimal import Decimal
from pathlib import Path

import numpy as np
import pytest
from retrieval.errors import DataError, MissingDependency
from retrieval.index.index import Index, create_index, open_index
from retrieval.index.sources import collect

pa = pytest.importorskip("pyarrow", reason="the extra parquet is not installed")
pq = pytest.importorskip("pyarrow.parquet", reason="the extra parquet is not installed")


@pytest.fixture
def table(photos, tmp_path):
    """A table of 50 paths in row groups of 15, with ids, labels and metadata."""
    path = tmp_path / "items.parquet"
    paths = [os.path.relpath(file, tmp_path) for file in sorted(photos.rglob("*.png"))[:50]]
    columns = {
        "id": [f"item {number}" for number in range(50)],
        "path": paths,
        "label": [None, *range(49)],
        "price": list(range(50)),
    }
    pq.write_table(pa.table(columns), path, row_group_size=15)
    return path


def created(path: Path, bundle: Path, sources: list[Path], **options) -> Index:
    create_index(path, bundle, sources, progress=False, **options)
    return open_index(path, threads=1)


def test_a_table_of_images_is_indexed_and_synced(table, photos, bundle_path, tmp_path):
    file = sorted(photos.rglob("*.png"))[33]
    with created(tmp_path / "i", bundle_path, [table]) as index:
        assert len(index) == 50
        item = index.get("item 33", arrays=True)["item 33"]
        assert (item.label, item.metadata) == ("32", {"price": 33})
        assert item.path.samefile(file) and index.get("item 0")["item 0"].label is None
        assert item.vector == pytest.approx(index.bundle.encode_image(file).vector[0])
        again = index.add(table, progress=False)
        assert (again.added, again.changed, again.unchanged) == (0, 0, 50)
        pq.write_table(pq.read_table(table).slice(0, 20), table)
        less = index.add(table, sync=True, progress=False)
        assert (less.unchanged, less.removed, len(index)) == (20, 30, 20)


def test_metadata_of_every_type_become_json(makers, empty, tmp_path):
    (image,) = makers.write_digits(tmp_path / "digits", 1)
    when = datetime.datetime(2024, 5, 6, 7, 8, 9, tzinfo=datetime.UTC)
    nan = float("nan")
    values = {
        "whole": ([2**40], 2**40),
        "float": ([1.5], 1.5),
        "infinite": ([float("inf")], None),
        "truth": ([True], True),
        "nothing": (pa.nulls(1), None),
        "list": ([[1, 2, None]], [1, 2, None]),
        "nested": ([{"a": {"b": [{"c": nan}]}}], {"a": {"b": [{"c": None}]}}),
        "when": (pa.array([when], pa.timestamp("s", "UTC")), "2024-05-06 07:08:09.000Z"),
        "day": ([datetime.date(2024, 5, 6)], "2024-05-06"),
        "price": ([Decimal("12.30")], "12.30"),
        "kind": (pa.array(["red"]).dictionary_encode(), "red"),
    }
    columns = {name: column for name, (column, _) in values.items()}
    columns |= {"key": [7], "path": [str(image)], "raw": [b"\0\1"], "deep": [[{"raw": b""}]]}
    table = tmp_path / "t.parquet"
    pq.write_table(pa.table(columns), table)
    with open_index(empty, threads=1) as index:
        added = index.add(table, progress=False)
        assert [note.partition(" is left out")[0] for note in added.left_out] == [
            f"{table}: the column '{name}'" for name in ("raw", "deep")
        ]
        assert index.get("7")["7"].metadata == {name: text for name, (_, text) in values.items()}


@pytest.mark.parametrize("fixed", [True, False])
def test_features_are_added_and_searched(fixed, makers, tmp_path):
    bundle = makers.make_bundle(tmp_path / "b", kind="features", normalized=False, features=20)
    features = np.random.default_rng(0).normal(size=(1300, 20)).astype(np.float32)
    kind = pa.list_(pa.float32(), 20) if fixed else pa.list_(pa.float64())
    for name, rows in (("one", slice(0, 700)), ("two", slice(700, 1300))):
        column = pa.array(features[rows].tolist(), kind)
        table = pa.table({"vector": column, "label": [row % 3 for row in range(len(column))]})
        pq.write_table(table, tmp_path / f"{name}.parquet", row_group_size=300)
    keys = [f"k{row}" for row in range(5)]
    np.savez(tmp_path / "three.npz", vectors=features[:5], labels=np.arange(5) % 4, keys=keys)
    np.savez(tmp_path / "four.npz", features=features[5:6])
    sources = [tmp_path / name for name in ("one.parquet", "three.npz", "two.parquet", "four.npz")]
    rows = {"one/0": 0, "one/699": 699, "k4": 4, "two/1": 701, "two/599": 1299, "four/0": 5}
    with created(tmp_path / "i", bundle, sources) as index:
        assert len(index) == 1306
        for key, row in rows.items():
            own = index.bundle.encode(features[row : row + 1]).vector[0]
            assert index.vector(key) == pytest.approx(own, abs=1e-5)
        items = index.get(["two/1", "k4"])
        assert [items[id].label for id in ("two/1", "k4")] == ["1", "0"]
        assert items["k4"].path is None
        assert index.add(sources, progress=False).unchanged == 1306


@pytest.mark.parametrize(
    ("columns", "says"),
    [
        (
            {"pahts": ["a.png"]},
            r"needs a column 'path' of image files \(it has: pahts\).*Did you mean",
        ),
        ({"path": ["a.png", "b\0"]}, "row 1: 'path' is empty or is not a path"),
        ({"path": ["a.png", None]}, "row 1: 'path' is empty or is not a path"),
        ({"path": ["a.png"], "id": [None]}, "row 0: 'id' is empty"),
        ({"path": ["a.png"], "id": [1.5]}, "row 0: 'id' is neither text nor a whole number"),
        ({"path": ["a.png"], "id": ["x" * 1001]}, "row 0: has an id of 1,001 characters"),
        ({"path": ["a.png"], "label": [["x"]]}, "row 0: 'label' is neither text nor a number"),
        (
            {"path": ["a.png"], "note": ["x" * 1_000_001]},
            "row 0: has more than 1,000,000 characters",
        ),
        (
            {"path": ["a.png"], "note": ["x" * 9_000_000]},
            "text in 'note' has more than 1,000,000",
        ),
        ({"path": ["a.png"], "note": ["a\0b"]}, "row 0: metadata.note has a NUL character"),
        (
            {"path": ["a.png", "b.png"], "id": ["x", "x"]},
            "'x' is the id of 2 items(.|\n)*the column 'key' or 'id'",
        ),
        ({"path": pa.array([], pa.string())}, "lists no item"),
    ],
)
def test_bad_tables_are_sentences(columns, says, bundle_path, tmp_path):
    pq.write_table(pa.table(columns), tmp_path / "t.parquet")
    with pytest.raises(DataError, match=says):
        create_index(tmp_path / "i", bundle_path, tmp_path / "t.parquet", progress=False)
    assert [path.name for path in tmp_path.iterdir()] == ["t.parquet"]


@pytest.mark.parametrize(
    ("vectors", "says"),
    [
        (pa.array([[1.0] * 20, None]), "row 1 has no vector"),
        (pa.array([[1.0] * 20, [1.0] * 19]), "row 1 has a vector of 19 numbers instead of 20"),
        (pa.array(["a"]), "'features' must be a list of numbers, not string"),
        (pa.array([[1.0] * 20, [1.0] * 19 + [None]]), r"t\.parquet: the vector of t/1 holds NaN"),
    ],
)
def test_bad_features_are_sentences(vectors, says, makers, tmp_path):
    bundle = makers.make_bundle(tmp_path / "b", kind="features", normalized=False, features=20)
    pq.write_table(pa.table({"features": vectors}), tmp_path / "t.parquet")
    with pytest.raises(DataError, match=says):
        create_index(tmp_path / "i", bundle, tmp_path / "t.parquet", progress=False)


def test_damaged_tables_are_sentences(table, bundle_path, tmp_path):
    whole = table.read_bytes()
    random = np.random.default_rng(0)
    kinds, names_the_table = set(), {True}
    for number in range(24):
        spoilt = bytearray(whole)
        if number < 8:
            spoilt = spoilt[: random.integers(len(whole))]
        else:
            for at in random.integers(len(whole), size=1 + number % 5):
                spoilt[at] ^= 1 << random.integers(8)
        table.write_bytes(spoilt)
        try:
            create_index(tmp_path / "i", bundle_path, [table], replace=True, progress=False)
            kinds.add("items")
        except DataError as fault:
            kinds.add("sentence")
            names_the_table.add("items.parquet" in str(fault))
    assert "sentence" in kinds
    assert names_the_table == {True}


BOMB = """
import resource, sys
resource.setrlimit(resource.RLIMIT_AS, (int(sys.argv[2]), int(sys.argv[2])))
from retrieval.errors import DataError, MissingDependency
from retrieval.index.sources import collect
try:
    print(len(collect([sys.argv[1]], sys.argv[3]).items))
except DataError as fault:
    print(fault)
"""


@pytest.mark.skipif(not hasattr(resource, "RLIMIT_AS"), reason="the system has no limit on memory")
def test_a_small_table_of_huge_texts_takes_little_memory(tmp_path, process):
    text, file = "x" * 3_000_000, tmp_path / "t.parquet"  # 4.8 GB in 1,600 rows, some kB in a file
    column = pa.DictionaryArray.from_arrays(pa.array([0] * 1600, pa.int32()), [text])
    table = pa.table({"path": [f"{row}.png" for row in range(1600)], "note": column})
    pq.write_table(table, file, compression="zstd")
    assert file.stat().st_size < 1_000_000
    environment = {"OMP_NUM_THREADS": "1", "ARROW_DEFAULT_MEMORY_POOL": "system"}
    done = process("-c", BOMB, file, 4 << 30, "image", cwd=tmp_path, seconds=200, **environment)
    assert "row 0: has more than 1,000,000 characters" in done.out, done.err[-500:]


def test_a_small_file_of_very_many_rows_is_refused(tmp_path):
    npz, table, rows = tmp_path / "f.npz", tmp_path / "t.parquet", 2_000_000
    np.savez_compressed(npz, features=np.zeros((rows, 1), np.uint8))
    pq.write_table(pa.table({"path": ["a.png"] * rows}), table)
    for path, kind in ((npz, "features"), (table, "image")):
        assert path.stat().st_size < 10_000
        with pytest.raises(DataError, match="has 2,000,000 rows; a file of its size may"):
            collect([path], kind)


def test_a_small_table_of_huge_lists_is_refused(tmp_path, monkeypatch):
    width = 1_000_001  # 4 MB of zeros a row, but some hundred bytes in the file
    lists = pa.ListArray.from_arrays([0, width, 2 * width], np.zeros(2 * width, np.float32))
    pq.write_table(pa.table({"features": lists}), tmp_path / "t.parquet")
    assert (tmp_path / "t.parquet").stat().st_size < 10_000
    with pytest.raises(DataError, match="at most 1,000,000 are allowed"):
        collect([tmp_path / "t.parquet"], "features")
    for limit in ("_GROUP_BYTES", "_GROUP_VALUES"):
        with monkeypatch.context() as patch:
            patch.setattr(f"retrieval.index.parquet.{limit}", 10)
            with pytest.raises(DataError, match="Write the table with smaller row groups"):
                collect([tmp_path / "t.parquet"], "features")


def test_without_pyarrow_an_error_names_the_extra(tmp_path, monkeypatch):
    (tmp_path / "t.parquet").write_bytes(b"PAR1")
    for name in ("pyarrow", "pyarrow.parquet"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MissingDependency, match=r"pip install 'embedding-retrieval\[parquet\]'"):
        collect([tmp_path / "t.parquet"], "image")


@pytest.fixture
def stranger():
    """A registered extension type like those of Hugging Face's `datasets`: nested lists."""

    class Array2D(pa.ExtensionType):
        value_type = "float32"
        shape = (1, 64)

        def __init__(self):
            super().__init__(pa.list_(pa.list_(pa.float32())), "tests.array2d")

        def __arrow_ext_serialize__(self):
            return b""

        @classmethod
        def __arrow_ext_deserialize__(cls, storage, serialized):
            return cls()

    pa.register_extension_type(Array2D())
    yield Array2D()
    pa.unregister_extension_type("tests.array2d")


def test_vectors_of_an_extension_type(makers, tmp_path, stranger):
    vectors = np.random.default_rng(0).normal(size=(5, 64)).astype(np.float32)
    storage = pa.FixedSizeListArray.from_arrays(pa.array(vectors.ravel()), 64)

    def tensor(shape):
        return pa.ExtensionArray.from_storage(pa.fixed_shape_tensor(pa.float32(), shape), storage)

    rows = pa.array([[row.tolist()] for row in vectors], stranger.storage_type)
    nested = pa.ExtensionArray.from_storage(stranger, rows)
    bundle = makers.make_bundle(tmp_path / "bundle", kind="features")
    path = tmp_path / "t.parquet"
    pq.write_table(
        pa.table({"features": tensor([64]), "extra": tensor([64]), "more": nested}), path
    )
    sources = collect([path], "features")
    assert np.array_equal(sources.features, vectors)
    assert [item.metadata for item in sources.items] == [{}] * 5
    assert len(sources.left_out) == 2 and "'extra' is left out" in sources.left_out[0]
    for column in (tensor([8, 8]), nested):
        pq.write_table(pa.table({"features": column}), path)
        with pytest.raises(
            DataError, match=r"'features' must be a list of numbers, not extension<"
        ):
            create_index(tmp_path / "i", bundle, [path], progress=False)


class Pixels(pa.ExtensionType):
    """A type of somebody's own, whose values are lists of numbers."""

    def __init__(self):
        super().__init__(pa.list_(pa.float32()), "tests.pixels")

    def __arrow_ext_serialize__(self):
        return b""

    @classmethod
    def __arrow_ext_deserialize__(cls, storage, serialized):
        return cls()


def test_lists_of_an_extension_type_are_vectors_whether_or_not_it_is_registered(tmp_path):
    vectors = np.random.default_rng(0).normal(size=(5, 64)).astype(np.float32)
    rows = pa.array(vectors.tolist(), pa.list_(pa.float32()))
    column = pa.ExtensionArray.from_storage(Pixels(), rows)
    path = tmp_path / "t.parquet"
    pq.write_table(pa.table({"features": column}), path)
    assert np.array_equal(collect([path], "features").features, vectors)
    pa.register_extension_type(Pixels())
    try:
        assert pq.read_schema(path).field("features").type == Pixels()
        assert np.array_equal(collect([path], "features").features, vectors)
    finally:
        pa.unregister_extension_type("tests.pixels")


def test_only_the_new_rows_of_a_longer_table_are_encoded(makers, tmp_path):
    vectors = np.random.default_rng(0).normal(size=(8, 64)).astype(np.float32)
    bundle = makers.make_bundle(tmp_path / "bundle", kind="features")
    path = tmp_path / "t.parquet"
    pq.write_table(pa.table({"features": list(vectors[:5])}), path)
    with created(tmp_path / "i", bundle, [path]) as index:
        pq.write_table(pa.table({"features": list(vectors)}), path, row_group_size=3)
        added = index.add(path, progress=False)
    assert (added.added, added.changed, added.unchanged) == (3, 0, 5)
