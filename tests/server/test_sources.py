"""What can be indexed: folders, CSV manifests, features, odd names."""

import io
import os
import weakref
import zipfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from PIL import Image
from pyarrow import parquet
from retrieval.bundle.bundle import Bundle
from retrieval.errors import DataError, MissingDependency
from retrieval.index import adding
from retrieval.index.adding import embed
from retrieval.index.index import create_index, open_index
from retrieval.index.sources import collect, originals
from retrieval.store.local import LocalStore


def test_a_csv_manifest_keeps_its_columns(photos, bundle_path, tmp_path):
    table = tmp_path / "items.csv"
    paths = sorted(photos.rglob("*.png"))[:5]
    lines = ["label,path,colour,price", f',{os.path.relpath(paths[0], tmp_path)},"grün, hell",0']
    lines += [f'día {n},{path},"grün, hell",{n}' for n, path in enumerate(paths) if n]
    table.write_text("\n".join(lines), encoding="utf-8-sig")
    summary = create_index(tmp_path / "i", bundle_path, [table, paths[1]], progress=False)
    assert (summary.count, summary.repeated) == (5, 1)
    with open_index(tmp_path / "i", threads=1) as index:
        items = {item.path.resolve(): item for item in index.scan()}
        item = items[paths[2].resolve()]
        assert (item.label, item.metadata) == ("día 2", {"colour": "grün, hell", "price": 2})
        assert (item.width, item.height) == (8, 8)
        assert items[paths[0].resolve()].label is None


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("paht,file\na.png,b\n", r"has no column 'path' \(it has: paht, file\)\. Rename 'paht'"),
        ("path,label\n", "lists no item"),
        ("path,label\na.png\n", "line 2: it has 1 value; the header names 2"),
        ("path,label\n,x\n", "line 2: 'path' is empty"),
    ],
)
def test_a_bad_csv_is_a_sentence(content, says, bundle_path, tmp_path):
    table = tmp_path / "items.csv"
    table.write_text(content)
    with pytest.raises(DataError, match=says):
        create_index(tmp_path / "i", bundle_path, [table], progress=False)
    assert [path.name for path in tmp_path.iterdir()] == ["items.csv"]


@pytest.mark.parametrize(
    ("arrays", "says"),
    [
        ({"x": np.zeros((2, 64))}, r"needs an array 'features' \(it has: x\)"),
        ({"features": np.zeros(64)}, r"must be numbers of shape \(N, F\)"),
        ({"features": np.zeros((2, 64)), "labels": np.zeros(3, int)}, "'labels' must be 2 strings"),
        ({"features": np.array([[object()]])}, "damaged, or not an .npz file of plain arrays"),
        ({"features": np.zeros((2, 63))}, r"takes inputs of shape \(N, 64\)"),
        ({"features": np.array([[1.0] * 64, [np.nan] * 64])}, "1 of 2 items cannot be used"),
    ],
)
def test_bad_features_are_sentences(arrays, says, makers, tmp_path):
    bundle = makers.make_bundle(tmp_path / "b", kind="features", normalized=False)
    np.savez(tmp_path / "f.npz", **arrays)
    with pytest.raises(DataError, match=says):
        create_index(tmp_path / "i", bundle, [tmp_path / "f.npz"], progress=False)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["b", "f.npz"]


def compressed(path: Path) -> bytes:
    """Return an `.npz` file of 800,128 zero bytes whose array cannot be decompressed."""
    np.savez_compressed(path, features=np.zeros((100, 1000)))
    content = path.read_bytes()
    return content[:80] + bytes(10) + content[90:]


def test_a_damaged_npz_is_a_sentence(tmp_path):
    path, endless, packed = tmp_path / "f.npz", io.BytesIO(), io.BytesIO()
    header = {"descr": "<f4", "fortran_order": False, "shape": (10**15, 4)}
    np.lib.format.write_array_header_1_0(endless, header)
    with zipfile.ZipFile(packed, "w") as archive:
        archive.writestr("features.npy", endless.getvalue())
    spoilt = compressed(path)
    for content in (packed.getvalue(), spoilt, spoilt[:-30]):
        path.write_bytes(content)
        with pytest.raises(DataError, match=r"damaged, or not an \.npz"):
            collect([path], "features")
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("features.npy", "text")
    with pytest.raises(DataError, match="must be numbers"):
        collect([path], "features")
    with path.open("wb") as file:
        np.save(file, np.zeros((2, 64)))
    with pytest.raises(DataError, match="is a single array; save"):
        collect([path], "features")


def test_an_npz_that_would_grow_without_bound_is_not_read(tmp_path):
    path = tmp_path / "f.npz"
    content = compressed(path)
    size = (800_128).to_bytes(4, "little")
    path.write_bytes(content.replace(size, (1 << 30).to_bytes(4, "little")))
    with pytest.raises(DataError, match=r"damaged, or not an \.npz"):
        collect([path], "features")
    path.write_bytes(content.replace(size, (1 + (1 << 30)).to_bytes(4, "little")))
    with pytest.raises(DataError, match="would take 1,073,741,825 bytes of memory, more than 16"):
        collect([path], "features")
    np.savez(path, features=np.zeros((100, 1000)), vectors=np.array([None]))
    assert len(collect([path], "features").items) == 100  # the other arrays are not read


def test_originals_are_written_before_they_fill_the_memory(
    photos, bundle_path, tmp_path, monkeypatch
):
    upsert, sizes = LocalStore.upsert, []

    def counted(self, items, bundle):
        sizes.append(len(items))
        return upsert(self, items, bundle)

    monkeypatch.setattr(LocalStore, "upsert", counted)
    monkeypatch.setattr(adding, "_SECONDS", 3600.0)
    for name, limit in (("i", adding._BYTES), ("j", 10)):
        monkeypatch.setattr(adding, "_BYTES", limit)
        create_index(
            tmp_path / name, bundle_path, [photos], keep="copy", batch_size=8, progress=False
        )
    assert sizes[0] == sum(sizes[1:]) and max(sizes[1:]) == 8


def test_at_most_three_batches_are_decoded_at_a_time(photos, bundle_path, monkeypatch):
    decode, decoded, most = adding._decode_item, [], []

    def counted(*arguments):
        item, inputs = decode(*arguments)
        decoded.append(weakref.ref(inputs))
        most.append(sum(reference() is not None for reference in decoded))
        return item, inputs

    monkeypatch.setattr(adding, "_decode_item", counted)
    images = originals(collect([photos], "image").items, None)
    batches = embed(Bundle.open(bundle_path, threads=1), images, adding.Options(batch_size=20))
    assert [len(batch) for batch in batches] == [20] * 10
    assert max(most) <= 3 * 20


def test_sources_of_the_wrong_kind(makers, bundle_path, photos, tmp_path):
    np.savez(tmp_path / "f.npz", features=np.zeros((2, 64)))
    features = makers.make_bundle(tmp_path / "b", kind="features")
    for bundle, sources, says in (
        (bundle_path, [tmp_path / "f.npz"], "holds features; this bundle takes images"),
        (features, [photos], "takes features, not images"),
        (bundle_path, [tmp_path / "nowhere"], "does not exist"),
        (bundle_path, ["milvus://host/photos"], "reads no photos at milvus://"),
        (bundle_path, [tmp_path / "b"], "holds no image"),
    ):
        with pytest.raises((DataError, MissingDependency), match=says):
            create_index(tmp_path / "i", bundle, sources, progress=False)


def test_file_names_that_are_not_utf_8(bundle_path, makers, tmp_path):
    folder = tmp_path / "odd"
    folder.mkdir()
    try:
        odd = Path(os.fsdecode(bytes(folder) + b"/caf\xe9.png"))
        Image.fromarray(makers.digits()[0][0]).save(odd)
    except OSError:
        pytest.skip("this file system takes only names that are text")
    create_index(tmp_path / "i", bundle_path, [folder], progress=False)
    with open_index(tmp_path / "i", threads=1) as index:
        assert index.get("caf\\xe9.png")["caf\\xe9.png"].path == odd


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_a_file_with_two_ids_is_two_items(kind, photos, bundle_path, tmp_path):
    path = min(photos.rglob("*.png"))
    columns = {"path": [str(path)] * 4, "id": ["a", "b", "a", "c"], "label": ["A", "B", "A", "C"]}
    table = tmp_path / f"items.{kind}"
    if kind == "csv":
        rows = zip(*columns.values(), strict=True)
        table.write_text("".join(",".join(row) + "\n" for row in [tuple(columns), *rows]))
    else:
        parquet.write_table(pa.table(columns), table)
    summary = create_index(tmp_path / "i", bundle_path, [table], progress=False)
    assert (summary.count, summary.repeated) == (3, 1)
    with open_index(tmp_path / "i", threads=1) as index:
        assert {item.id: item.label for item in index.scan()} == {"a": "A", "b": "B", "c": "C"}
        assert np.array_equal(index.vector("a"), index.vector("c"))
        again = index.add([table, path.parent], progress=False)
        assert (again.changed, again.unchanged) == (0, 3)
        assert again.repeated == 2  # the row, and the file in its folder


def test_a_table_without_ids_names_a_file_once(photos, bundle_path, tmp_path):
    path = min(photos.rglob("*.png"))
    table = tmp_path / "items.csv"
    table.write_text(f"path\n{path}\n{path}\n")
    summary = create_index(tmp_path / "i", bundle_path, [table], progress=False)
    assert (summary.count, summary.repeated) == (1, 1)


def test_the_label_minus_one_of_features_is_none(tmp_path):
    path = tmp_path / "f.npz"
    for labels, expected in (
        ([-1, 0, 7], [None, "0", "7"]),
        (["-1", "nan", "b"], ["-1", None, "b"]),
    ):
        np.savez(path, features=np.eye(3), labels=np.array(labels))
        assert [item.label for item in collect([path], "features").items] == expected
