from __future__ import annotations

import gzip
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from layouts import idx
from PIL import Image
from refusals import refusal
from retrieval.data.datasets import Dataset
from retrieval.data.loading import inputs
from retrieval.data.splits import make_splits
from retrieval.errors import DataError
from retrieval.host.plugins import create
from retrieval.images.preprocessing import Preprocessing
from retrieval.recipe.read import read_recipe
from retrieval.recipe.tables import Split
from retrieval.training.check import run_one_batch
from sklearn.datasets import load_digits

from retrieval_core.small_images import DEBIAN

PRE = Preprocessing((6, 6))


def build(name: str, **values: Any) -> Dataset:
    texts = {k: str(v) if isinstance(v, Path) else v for k, v in values.items()}
    return create("dataset", f"core.{name}", **texts)


def refused(name: str, says: str, **values: Any) -> None:
    with pytest.raises(DataError, match=says):
        build(name, **values)


def picture(path: Path, grey: int = 100) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (7, 9), (grey, grey, grey)).save(path)
    return path


def pixel_sum(data: Dataset) -> int:
    return sum(int(x.sum()) for x in inputs(data, range(len(data)), PRE, 2))


def test_digits():
    data = build("digits")
    actual = load_digits()
    assert data.labels == [str(label) for label in actual.target]
    assert data.arrays.dtype == np.uint8
    np.testing.assert_allclose(data.arrays, actual.images * 255 / 16, atol=0.5)
    assert data.keys[17] == "digits/17"
    item = data[17]
    assert isinstance(item, Image.Image) and np.array_equal(item, data.arrays[17])


@pytest.fixture
def fashion(tmp_path):
    """A folder in Fashion-MNIST's layout, of 30 and 20 images."""
    folder = tmp_path / "fashion"
    folder.mkdir()
    generator = np.random.default_rng(0)
    for prefix, count in (("train", 30), ("t10k", 20)):
        pixels = generator.integers(0, 256, (count, 28, 28), np.uint8)
        file = folder / f"{prefix}-images-idx3-ubyte.gz"
        file.write_bytes(gzip.compress(idx(pixels)))
        labels = np.arange(count, dtype=np.uint8) % 10
        (folder / f"{prefix}-labels-idx1-ubyte").write_bytes(idx(labels))
    return folder


def test_fashion_mnist_layout(fashion):
    data = build("fashion_mnist", folder=fashion)
    assert len(data) == 50 and data.keys[30] == "test/0"
    assert data.labels[:12] == [*"0123456789", "0", "1"]
    assert data.splits == ["train"] * 30 + ["test"] * 20
    assert data.metadata[7] == {"class": "Sneaker"}
    actual = make_splits(data, Split(validation=0.0))
    assert actual.train.tolist() == list(range(30)) and actual.query.tolist() == list(range(30, 50))


def test_fashion_mnist_faults(fashion, monkeypatch):
    labels = fashion / "t10k-labels-idx1-ubyte"
    for values in (np.arange(9), np.arange(20) % 10 + 1):
        labels.write_bytes(idx(values.astype(np.uint8)))
        refused("fashion_mnist", r"test images and labels .* not belong", folder=fashion)
    labels.unlink()
    refused("fashion_mnist", "holds neither t10k-labels-idx1-ubyte nor", folder=fashion)
    refused("fashion_mnist", "is not a folder", folder=fashion / "no")
    monkeypatch.setattr("retrieval_core.small_images.DEBIAN", fashion / "nowhere")
    refused("fashion_mnist", "apt install dataset-fashion-mnist")


@pytest.mark.skipif(
    not DEBIAN.is_dir(), reason="Debian's package dataset-fashion-mnist is not installed"
)
def test_fashion_mnist_itself():
    data = build("fashion_mnist")
    assert data.arrays.shape == (70_000, 28, 28)
    actual = make_splits(data, Split(by="class"))
    assert actual.train_classes == list("01234")
    assert (len(actual.train), len(actual.validation), len(actual.query)) == (28_000, 7_000, 35_000)
    assert abs(data.arrays[:60_000].mean() / 255 - 0.2860) < 1e-4  # the mean that is usually quoted


def test_image_folder(tmp_path):
    names = ["cat/1.png", "cat/2.PNG", "cat/more/3.jpg", "dog 2/x.png", "dog 10/y.webp"]
    for i, name in enumerate(names):
        picture(tmp_path / name, 10 * i)
    picture(tmp_path / ".hidden" / "z.png")
    (tmp_path / "cat" / "notes.txt").write_text("no image")
    data = build("image_folder", folder=tmp_path)
    labels = dict(zip(data.keys, data.labels, strict=True))
    assert labels == dict(zip(names, ["cat", "cat", "cat", "dog 2", "dog 10"], strict=True))
    assert data.splits is None and data.roles is None
    x = next(inputs(data, [list(data.keys).index("dog 2/x.png")], PRE, 1))
    assert x.shape == (1, 3, 6, 6) and (x == 30).all()


def test_image_folder_with_a_split(tmp_path):
    for name in ("train/a/1.png", "train/b/1.png", "val/a/2.png", "test/a/3.png"):
        picture(tmp_path / name)
    data = build("image_folder", folder=tmp_path)
    rows = set(zip(data.keys, data.labels, data.splits or (), strict=True))
    assert rows == {
        ("train/a/1.png", "a", "train"),
        ("train/b/1.png", "b", "train"),
        ("val/a/2.png", "a", "validation"),
        ("test/a/3.png", "a", "test"),
    }
    assert data.roles is None
    shutil.move(tmp_path / "test", tmp_path / "query")
    picture(tmp_path / "gallery/a/9.png")
    data = build("image_folder", folder=tmp_path)
    assert data.roles is not None and data.splits is not None
    actual = {key: (data.splits[i], data.roles[i]) for i, key in enumerate(data.keys)}
    assert actual["query/a/3.png"] == ("test", "query")
    assert actual["gallery/a/9.png"] == ("test", "gallery")
    assert actual["train/a/1.png"] == ("train", "")


def test_folders_without_class_folders_are_classes_even_if_called_like_sides(tmp_path):
    for name in ("train/1.png", "test/1.png"):
        picture(tmp_path / name)
    assert sorted(build("image_folder", folder=tmp_path).labels) == ["test", "train"]


def test_image_folder_faults(tmp_path, caplog):
    refused("image_folder", r"is not a folder\. Relative paths start at", folder=tmp_path / "none")
    refused("image_folder", "holds no image", folder=tmp_path)
    (tmp_path / "empty").mkdir()
    picture(tmp_path / "a" / "1.png")
    build("image_folder", folder=tmp_path)
    assert "no image in empty" in caplog.text
    picture(tmp_path / "stray.png")
    says = r"1 image is in no class folder, .*: stray\.png\. Move it"
    refused("image_folder", says, folder=tmp_path)


@pytest.fixture
def damaged(tmp_path):
    """Three good images, a truncated one with an intact header, an empty file, a text, and an image
    that is too large.
    """
    folder = tmp_path / "mixed"
    noise = np.random.default_rng(0).integers(0, 256, (40, 40, 3), dtype=np.uint8)
    for name in ("a/1.png", "a/2.png", "b/1.png"):
        picture(folder / name)
    cut = folder / "a" / "cut.jpg"
    Image.fromarray(noise).save(cut)
    cut.write_bytes(cut.read_bytes()[: cut.stat().st_size // 2])
    (folder / "b" / "empty.png").touch()
    (folder / "b" / "text.png").write_text("hello")
    Image.new("1", (5001, 5001)).save(folder / "b" / "huge.png")
    return folder


def test_skip_bad_names_and_leaves_out(damaged, tmp_path, caplog, monkeypatch):
    monkeypatch.setenv("RETRIEVAL_CACHE", str(tmp_path / "cache"))
    data = build("image_folder", folder=damaged)
    with pytest.raises(DataError, match=r"skip_bad = true"):
        list(inputs(data, range(len(data)), PRE, 2))
    for _ in range(2):  # checked, then cached
        caplog.clear()
        data = build("image_folder", folder=damaged, skip_bad=True)
        assert sorted(data.keys) == ["a/1.png", "a/2.png", "b/1.png"]
        assert "4 of 7 images cannot be read" in caplog.text
        for name in ("cut.jpg", "empty.png", "text.png", "huge.png"):
            assert name in caplog.text
        assert pixel_sum(data) == 3 * 3 * 36 * 100
    with monkeypatch.context() as patch:
        patch.setattr("retrieval.data.unreadable_images.decode", None)
        assert len(build("image_folder", folder=damaged, skip_bad=True)) == 3
    (cached,) = (tmp_path / "cache" / "readable").iterdir()
    for content in ("{broken", "{}", "3", '["", ""]'):
        cached.write_text(content)
        assert len(build("image_folder", folder=damaged, skip_bad=True)) == 3
    picture(damaged / "b" / "text.png")  # now a good image
    assert len(build("image_folder", folder=damaged, skip_bad=True)) == 4
    names = sorted(path.relative_to(damaged).as_posix() for path in damaged.rglob("*.*"))
    manifest = damaged / "list.csv"
    manifest.write_text("path,label\n" + "".join(f"{name},{name[0]}\n" for name in names))
    readable = ["a/1.png", "a/2.png", "b/1.png", "b/text.png"]
    assert build("csv", manifest=manifest, skip_bad=True).keys == readable
    monkeypatch.setenv("RETRIEVAL_CACHE", str(manifest))  # a file, so nothing can be cached
    assert len(build("image_folder", folder=damaged, skip_bad=True)) == 4
    for name in readable:
        (damaged / name).unlink()
    refused("image_folder", "none of its 3 images can be read", folder=damaged, skip_bad=True)


def test_csv(tmp_path):
    for name in ("x/1.png", "x/2.png", "x/a, b.png", "x/4.png"):
        picture(tmp_path / name)
    manifest = tmp_path / "list.csv"
    manifest.write_text(
        "\ufefflabel, path ,split,role,price\nred,x/1.png,train,,3\nred,x/2.png,validation,,\n\n"
        '"blue\nish","x/a, b.png",test,query,"1,5"\nred,x/4.png,,gallery,9\n',
        encoding="utf-8",
    )
    data = build("csv", manifest=manifest)
    assert data.keys == ["x/1.png", "x/2.png", "x/a, b.png", "x/4.png"]
    assert data.labels == ["red", "red", "blue\nish", "red"]
    assert data.splits == ["train", "validation", "test", ""]
    assert data.roles == ["", "", "query", "gallery"]
    assert data.metadata == [{"price": "3"}, {"price": ""}, {"price": "1,5"}, {"price": "9"}]
    assert next(inputs(data, [2], PRE, 1)).shape == (1, 3, 6, 6)


def test_csv_of_two_columns_and_a_root(tmp_path):
    absolute = picture(tmp_path / "elsewhere" / "1.png")
    picture(tmp_path / "root" / "2.png")
    manifest = tmp_path / "list.csv"
    manifest.write_text(f"path,label\n{absolute},a\n2.png,b\n")
    data = build("csv", manifest=manifest, root=tmp_path / "root")
    assert (data.splits, data.roles, data.metadata) == (None, None, None)
    assert pixel_sum(data) == 2 * 3 * 36 * 100


def test_all_problems_of_a_csv_at_once(tmp_path):
    picture(tmp_path / "1.png")
    manifest = tmp_path / "list.csv"
    manifest.write_text(
        "path,label,split,role\n1.png,a,train,\n1.png,b,train,\ngone.png,a,test,\n,a,train,\n"
        "1.png,,train,\n1.png,a,tset,\n1.png,a,test,gallary\n1.png,a\n" + "no.png,a,test,\n" * 5
    )
    text = refusal(DataError, build, "csv", manifest=manifest)
    sentences = ["12 problems", "line 3: 1.png is already listed in line 2", "line 4: "]
    sentences += ["gone.png is not a file", "line 5: path is empty", "line 6: 1.png has no label"]
    sentences += ["line 7: split must be", "Did you mean 'test'?", "line 8: role must be"]
    sentences += ["Did you mean 'gallery'?", "line 9: it has 2 values; the header names 4 columns"]
    for sentence in (*sentences, "and 2 more"):
        assert sentence in text


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"", "no column 'path'"),
        (b"path,label\n", "it lists no image"),
        (b"path;label\nx;y\n", "separated by commas"),
        (b"path,label\n\0x,a\n", "list.csv"),
        (b"path,label\n" + b"x" * 5000 + b",a\n", "list.csv"),
    ],
)
def test_wrong_csv_files(tmp_path, content, sentence):
    (tmp_path / "list.csv").write_bytes(content)
    refused("csv", sentence, manifest=tmp_path / "list.csv")


def test_features(tmp_path):
    vectors = np.random.default_rng(0).normal(size=(6, 4))
    file = tmp_path / "vectors.npz"
    np.savez(file, features=vectors, labels=np.array([3, 1, 1, 2, 2, 3]), other=np.zeros(3))
    data = build("features", file=file)
    assert data.kind == "features" and data.labels == ["3", "1", "1", "2", "2", "3"]
    np.testing.assert_array_equal(data.arrays, vectors.astype(np.float32))
    splits, roles = ["train", "test"] * 3, ["", "query", "", "gallery", "", ""]
    columns = {"labels": list("aabbcc"), "keys": list("uvwxyz"), "splits": splits, "roles": roles}
    arrays = {name: np.array(column) for name, column in columns.items()}
    np.savez_compressed(file, features=vectors.astype(np.float16), **arrays)
    data = build("features", file=file)
    assert (data.labels, data.keys) == (list("aabbcc"), list("uvwxyz"))
    assert (data.splits, data.roles) == (splits, roles)


GOOD = {"features": np.zeros((3, 2), np.float32), "labels": np.array(["a", "b", "a"])}
SHAPE = "features must have the shape (N, F), not "


@pytest.mark.parametrize(
    ("arrays", "sentences"),
    [
        ({"labels": None}, ["no array 'labels' (it has: features)"]),
        ({"features": None, "labels": None}, ["no array 'features'", "no array 'labels'"]),
        ({"features": np.zeros((3, 2), complex)}, ["must be real numbers, not complex128"]),
        ({"features": np.zeros(3)}, [f"{SHAPE}(3,)"]),
        ({"features": np.zeros((0, 2))}, ["(0, 2)"]),
        ({"features": np.float32(3)}, [f"{SHAPE}()"]),
        (
            {"labels": np.zeros(3), "splits": np.array(["train"] * 2)},
            [
                "2 problems",
                "labels must be text or whole numbers, not float64",
                "splits must have the shape (3,)",
            ],
        ),
        ({"labels": np.array(["a", None], dtype=object)}, ["Python objects are never read"]),
    ],
)
def test_wrong_features(tmp_path, arrays, sentences):
    file = tmp_path / "vectors.npz"
    np.savez(file, **{k: v for k, v in (GOOD | arrays).items() if v is not None})
    text = refusal(DataError, build, "features", file=file)
    assert all(sentence in text for sentence in sentences), text


def test_damaged_feature_files(tmp_path):
    file = tmp_path / "vectors.npz"
    np.savez(file, **GOOD)
    whole = file.read_bytes()
    mangled = whole[:100] + b"\0" * 40 + whole[140:]
    for content in (b"", b"PK", b"text", whole[: len(whole) // 2], mangled):
        file.write_bytes(content)
        refused("features", r"vectors\.npz is damaged, or not an \.npz file", file=file)
    np.save(tmp_path / "one.npy", np.zeros((3, 2)))
    refused("features", "is a single array", file=tmp_path / "one.npy")
    refused("features", "does not exist", file=tmp_path / "none.npz")


def test_a_feature_file_that_would_take_too_much_memory(tmp_path, monkeypatch):
    monkeypatch.setattr("retrieval.index.sources._ARRAY_BYTES", 100_000)
    file, labels = tmp_path / "vectors.npz", list("ab") * 50
    np.savez_compressed(file, features=np.zeros((100, 1000)), labels=labels)
    refused("features", "would take 800,128 bytes of memory", file=file)
    np.savez_compressed(file, features=np.eye(100), labels=labels, other=np.zeros((100, 1000)))
    assert build("features", file=file).arrays.shape == (100, 100)  # `other` is not read


def test_parquet_reads_tables_and_folders_of_embeddings(tmp_path):
    pa = pytest.importorskip("pyarrow", reason="the extra parquet is not installed")
    pq = pytest.importorskip("pyarrow.parquet", reason="the extra parquet is not installed")
    values = np.arange(12, dtype=np.float32).reshape(6, 2)
    columns = {"id": list("abcdef"), "features": values.tolist(), "label": [1, 2, 1, 2, 1, 2]}
    columns |= {"price": [5] * 6, "split": ["train"] * 4 + ["test"] * 2}
    pq.write_table(pa.table(columns), tmp_path / "t.parquet")
    data = build("parquet", path=tmp_path / "t.parquet")
    assert data.kind == "features" and data.labels == ["1", "2"] * 3 and data.keys == list("abcdef")
    assert data.splits == columns["split"] and data.roles is None
    assert data.metadata[0] == {"price": 5}
    assert (np.stack([data[place] for place in range(6)]) == values).all()
    refused("parquet", "is not a folder of embeddings", path=tmp_path)
    refused("parquet", "does not exist", path=tmp_path / "none")


def test_image_folder_with_levels(tmp_path):
    for name in ("audi/a3/1.png", "audi/a3/2.png", "audi/gt/1.png", "ford/gt/side/1.png"):
        picture(tmp_path / "cars" / name)
    levels = ["brand", "model"]
    data = build("image_folder", folder=tmp_path / "cars", levels=levels)
    assert list(data.labels) == ["a3", "a3", "gt", "gt"]
    assert data.metadata[3] == {"brand": "ford"}
    assert "2 levels of folders (brand/model), and the label is the model" in data.notes[-1]
    assert "images are up to 3 levels deep" in data.notes[-1]
    data = build("image_folder", folder=tmp_path / "cars", levels=levels, label="brand")
    assert list(data.labels) == ["audi"] * 3 + ["ford"]
    assert data.metadata[2] == {"model": "gt"}
    (note,) = build("image_folder", folder=tmp_path / "cars").notes
    assert "1 level of folders (class)" in note and "images are up to 3 levels deep" in note
    shutil.copytree(tmp_path / "cars", tmp_path / "sides" / "train")
    shutil.copytree(tmp_path / "cars", tmp_path / "sides" / "test")
    data = build("image_folder", folder=tmp_path / "sides", levels=levels)
    assert data.splits == ["test"] * 4 + ["train"] * 4 and data.labels[0] == "a3"


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"levels": ["brand", "model"]}, r"1 image is in fewer than 2 folders.*audi/1\.png"),
        ({"levels": ["brand"], "label": "brnd"}, "Did you mean 'brand'"),
        ({"levels": ["brand", "brand"]}, "name each level of folders once"),
        ({"levels": []}, "name each level of folders once"),
        ({"label": "brand"}, "name each level of folders once"),
    ],
)
def test_wrong_levels(tmp_path, values, says):
    picture(tmp_path / "audi" / "1.png")
    refused("image_folder", says, folder=tmp_path, **values)


def test_the_folder_of_a_split_is_not_one_of_the_levels(tmp_path):
    for side in ("train", "test"):
        picture(tmp_path / side / "audi" / "1.png")
    says = "2 images are in fewer than 3 folders"
    refused("image_folder", says, folder=tmp_path, levels=["brand", "model"])


def test_csv_with_columns_of_other_names(tmp_path):
    picture(tmp_path / "a.png")
    picture(tmp_path / "b.png")
    file = tmp_path / "m.csv"
    file.write_text("File,class,label\na.png,cat,1\nb.png,dog,2\n")
    data = build("csv", manifest=file, path="File", label="class")
    assert list(data.labels) == ["cat", "dog"] and list(data.keys) == ["a.png", "b.png"]
    assert data.metadata == [{"label": 1}, {"label": 2}]
    refused("csv", "no column 'kind'", manifest=file, path="File", label="kind")
    file.write_text("File,class\na.png,\n")
    refused("csv", r"line 2: a\.png has no class", manifest=file, path="File", label="class")


def test_csv_of_oml(tmp_path):
    for i in range(4):
        picture(tmp_path / f"{i}.png", 40 * i)
    file = tmp_path / "df.csv"
    head = "label,path,split,is_query,is_gallery,category,x_1,x_2,y_1,y_2,sequence\n"
    train = "0,0.png,train,,,cat,,,,,\n0,1.png,train,,,cat,1,3,0,2,\n"
    both = "1,2.png,validation,True,True,dog,,,,,s\n1,3.png,validation,True,True,dog,,,,,s\n"
    file.write_text(head + train + both)
    data = build("csv", manifest=file)
    assert data.splits == ["train"] * 2 + ["test"] * 2 and not any(data.roles or ())
    assert data.metadata[2] == {"category": "dog", "sequence": "s"}
    assert data.boxes == [None, (1.0, 0.0, 3.0, 2.0), None, None] and data[1].size == (2, 2)
    apart = both.replace("True,True", "True,False", 1).replace("True,True", "False,True")
    file.write_text(head + train + apart)
    assert build("csv", manifest=file).roles == ["", "", "query", "gallery"]
    file.write_text(head + train + both.replace("True,True", "True,False", 1))
    refused("csv", "line 5: is_query and is_gallery are both true", manifest=file)
    file.write_text(head + train + both.replace("True,True", ",", 1))
    refused("csv", "line 4: is_query or is_gallery must be true", manifest=file)
    file.write_text(head + train.replace("1,3,0,2", "3,1,0,2").replace(",,,,,\n", ",x,1,2,3,\n"))
    refused("csv", r"(?s)line 2: x_1, .*must be finite .*line 3: its box is", manifest=file)
    file.write_text(head + train.replace("1,3,0,2", "1,inf,0,2"))
    refused("csv", r"line 3: x_1, .*must be finite numbers, not '1', 'inf'", manifest=file)
    near = train.replace("1,3,0,2", "0,1000.001,0,2") + "0,1.png,train,,,cat,0,1000.002,0,2,\n"
    file.write_text(head + near + both)
    assert build("csv", manifest=file).keys[1:3] == ["1.png 0,0,1000.001,2", "1.png 0,0,1000.002,2"]


def test_a_check_of_a_recipe_prints_the_notes_on_its_data(tmp_path):
    for number in range(8):
        picture(tmp_path / "ab"[number % 2] / "cd"[number // 2 % 2] / f"{number}.png", 30 * number)
    data = {"name": "core.image_folder", "folder": str(tmp_path), "levels": ["brand", "model"]}
    recipe = {
        "data": data,
        "split": {"by": "item", "validation": 0},
        "sampler": {"classes": 2, "items": 2},
        "backbone": {"name": "core.convnet", "size": 8, "width": 4, "depth": 1, "layers": 1},
        "loss": {"name": "pml.triplet_margin"},
    }
    lines = run_one_batch(read_recipe(recipe))
    assert any(line.startswith("note: ") and "2 levels of folders" in line for line in lines)
