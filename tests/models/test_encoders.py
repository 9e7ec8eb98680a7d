"""Models at addresses: vectors in files, endpoints, models of MTEB, in every command."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import retrieval
import small_models
import torch
from embedding_server import answer, embedding, send, serving
from makers import digits, write_digits
from PIL import Image
from refusals import refusal
from retrieval.errors import DataError, PluginError, RecipeError
from retrieval.evaluation.evaluate_run import items_of
from retrieval.host.plugins import load_plugins
from retrieval.index.index import open_index
from retrieval.plugin import ArrayDataset
from retrieval.run.encoders import backbone_at, encoder_at
from retrieval.run.open import Run
from scipy import stats

RECIPE = """
name = "net"
[data]
name = "core.digits"
[split]
by = "class"
test = ["0", "1", "2", "3", "4"]
[backbone]
name = "core.convnet"
size = 16
width = 4
[head]
embedding_size = 16
[sampler]
classes = 4
items = 8
[loss]
name = "pml.multi_similarity"
[train]
epochs = 1
[evaluate]
metrics = ["recall_at_1", "map_at_r"]
"""
PLUGINS = load_plugins()
IMAGES, LABELS = digits()
DATA = ArrayDataset(IMAGES[:40], list(map(str, LABELS[:40])), [f"d/{i}" for i in range(40)])
EVERY = np.arange(40)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("encoders")
    (folder / "net.toml").write_text(RECIPE)
    return retrieval.train(folder / "net.toml", folder / "run", progress=False).path


def at(address: str) -> Any:
    return encoder_at(PLUGINS, address)


def pixel_vectors(dataset: Any, items: Any) -> np.ndarray:
    """Return what the server of `embedding_server` computes, of length 1."""
    rows = np.array([np.asarray(dataset[int(i)].convert("L").resize((8, 8))) for i in items])
    flat = rows.reshape(len(rows), -1).astype(float)
    return flat / np.linalg.norm(flat, axis=1, keepdims=True)


# Vectors in files


def test_vectors_in_the_datas_order_by_key_and_by_path(tmp_path):
    vectors = np.random.default_rng(0).normal(size=(40, 5)).astype(np.float32)
    np.savez(tmp_path / "order.npz", features=vectors)
    items = np.array([7, 3, 39])
    assert np.array_equal(at(f"vectors:{tmp_path}/order.npz")(DATA, items), vectors[items])

    order = np.random.default_rng(1).permutation(40)
    np.savez(
        tmp_path / "keys.npz", vectors=vectors[order], keys=np.array([f"d/{i}" for i in order])
    )
    assert np.array_equal(at(f"vectors:{tmp_path}/keys.npz")(DATA, items), vectors[items])

    paths = write_digits(tmp_path / "photos", 40)
    files = retrieval.plugin.FileDataset(paths, DATA.labels, [f"other/{i}" for i in range(40)])
    np.savez(tmp_path / "paths.npz", features=vectors, keys=np.array(list(map(str, paths))))
    assert np.array_equal(at(f"vectors:{tmp_path}/paths.npz")(files, items), vectors[items])

    pa = pytest.importorskip("pyarrow")
    pytest.importorskip("pyarrow.parquet")
    parts = tmp_path / "parts"
    parts.mkdir()
    for part in (range(0, 25), range(25, 40)):
        columns = {"key": [f"d/{i}" for i in part], "features": vectors[part].tolist()}
        pa.parquet.write_table(pa.table(columns), parts / f"{part.start:02}.parquet")
    assert np.array_equal(at(f"vectors:{parts}")(DATA, items), vectors[items])


def test_vectors_that_do_not_fit_are_refused(tmp_path):
    vectors = np.ones((39, 5), np.float32)
    np.savez(tmp_path / "v.npz", features=vectors)
    says = refusal(DataError, at(f"vectors:{tmp_path}/v.npz"), DATA, EVERY)
    assert "has 39 vectors without keys, and the data 40 items" in says
    keys = np.array([f"d/{i}" for i in range(1, 40)])
    np.savez(tmp_path / "v.npz", features=vectors, keys=keys)
    says = refusal(DataError, at(f"vectors:{tmp_path}/v.npz"), DATA, EVERY)
    assert says.endswith("has no vector with the key d/0.")
    np.savez(tmp_path / "v.npz", features=vectors, keys=np.full(39, "d/0"))
    assert "two vectors of one key" in refusal(DataError, at, f"vectors:{tmp_path}/v.npz")
    assert "does not exist" in refusal(DataError, at, f"vectors:{tmp_path}/gone.npz")


# Addresses


def test_an_address_means_the_model_as_it_comes():
    parsed = backbone_at(PLUGINS, "core.timm:resnet18.a1_in1k?size=64&pool=gem")
    assert parsed == (
        "core.timm",
        {
            "pretrained": True,
            "normalise": True,
            "model": "resnet18.a1_in1k",
            "size": 64,
            "pool": "gem",
        },
    )
    assert backbone_at(PLUGINS, "core.pixels") == ("core.pixels", {})
    assert backbone_at(PLUGINS, "vectors:core.timm") is None


@pytest.mark.parametrize(
    ("address", "error", "words"),
    [
        ("vector:x.npz", PluginError, "Did you mean 'vectors'?"),
        ("vectors:", PluginError, "vectors: names no model"),
        ("core.convnt", PluginError, "Did you mean 'core.convnet'"),
        ("core.pixels:?sise=3", RecipeError, "core.pixels has no such parameter"),
        ("core.pixels:?size", RecipeError, "backbone.size"),
        ("https://127.0.0.1/v1/embeddings", DataError, "is https://HOST/v1/embeddings?model=NAME"),
        ("https://me:secret@127.0.0.1/?model=m", DataError, "without a user or password"),
        ("https:///v1/embeddings?model=m", DataError, "is https://HOST/v1/embeddings?model=NAME"),
    ],
)
def test_wrong_addresses_are_named(run, address, error, words, cli):
    says = refusal(error, at, address)
    assert words in says and "secret" not in says
    done = cli("evaluate", run, "--model", address)
    assert done.code == 2 and words in done.err and "Traceback" not in done.err


def test_vectors_that_break_the_contract_are_refused(tmp_path):
    file = tmp_path / "wrong.py"
    file.write_text(
        "import numpy as np\n"
        "from retrieval.plugin import hookimpl\n"
        "def short(address):\n    return lambda dataset, items: np.ones((len(items) - 1, 2))\n"
        "def nan(address):\n    return lambda dataset, items: np.full((len(items), 2), np.nan)\n"
        "def fails(address):\n    return lambda dataset, items: 1 / 0\n"
        "@hookimpl\n"
        "def retrieval_encoders():\n"
        "    return {'short': short, 'nan': nan, 'fails': fails}\n"
    )
    plugins = load_plugins([str(file)])
    for name, error, words in (
        ("short", PluginError, "must give one vector of numbers for each"),
        ("nan", DataError, "gave NaN or infinity for d/0"),
        ("fails", PluginError, "The model fails:x failed: ZeroDivisionError"),
    ):
        assert words in refusal(error, encoder_at(plugins, f"{name}:x"), DATA, EVERY)


# evaluate


def test_evaluate_measures_another_model_on_the_same_queries(run, tmp_path, cli):
    opened = Run.open(run)
    query, _ = items_of(opened, "test")
    vectors = np.random.default_rng(0).normal(size=(len(opened.dataset), 6))
    vectors += 2 * np.asarray(opened.splits.labels)[:, None] * (np.arange(6) == 2)
    np.savez(tmp_path / "v.npz", features=vectors)
    address = f"vectors:{tmp_path}/v.npz"
    done = cli("evaluate", run, "--model", address, "--json")
    assert done.code == 0, done.err
    result = json.loads(done.out)
    labels = opened.splits.labels[query]
    codes = retrieval.load(run).encode(opened.dataset, progress=False)[query]
    ours = retrieval.evaluate(codes, labels, metrics="map_at_r")
    theirs = retrieval.evaluate(vectors[query].astype(np.float32), labels, metrics="map_at_r")
    assert result["metrics"][address]["map_at_r"] == pytest.approx(theirs.values["map_at_r"])
    assert result["metrics"]["trained"]["map_at_r"] == pytest.approx(ours.values["map_at_r"], 1e-4)

    # classes of unequal size: the ratio estimator by loops
    apart = ours.per_query["map_at_r"] - theirs.per_query["map_at_r"]
    mean = apart.mean()
    classes = np.unique(labels)
    residuals = [(apart[labels == c] - mean).sum() for c in classes]
    error = (sum(r**2 for r in residuals) * len(classes) / (len(classes) - 1)) ** 0.5 / len(labels)
    half = stats.t.ppf(0.975, len(classes) - 1) * error
    value, width = result["differences"][address]["map_at_r"]
    assert value == pytest.approx(mean, abs=1e-4) and width == pytest.approx(half, rel=1e-2)
    assert width > 0.001
    text = cli("evaluate", run, "--model", address).out
    assert f"trained minus {address}, ± 95 % over classes:" in text
    assert f"map_at_r {value:+.4f} ± {width:.4f}" in text


def test_evaluate_measures_a_backbone_as_its_encoder_embeds(run, tmp_path, cli):
    pytest.importorskip("transformers", reason="the extra transformers is not installed")
    folder = small_models.transformers_folder(tmp_path / "clip", "clip")
    address = f"models.transformers:{folder}"
    done = cli("evaluate", run, "--model", address, "--json")
    assert done.code == 0, done.err
    opened = Run.open(run)
    query, _ = items_of(opened, "test")
    encoder = retrieval.load(
        "models.transformers", parameters={"model": str(folder), "normalise": True}
    )
    vectors = encoder.encode([opened.dataset[int(i)] for i in query], progress=False)
    expected = retrieval.evaluate(vectors, opened.splits.labels[query], metrics="map_at_r")
    measured = json.loads(done.out)["metrics"][address]["map_at_r"]
    assert measured == pytest.approx(expected.values["map_at_r"], abs=1e-4)


# compare


def test_compare_has_a_row_for_another_model_and_tests_the_difference(run, tmp_path, cli):
    recipe = run.parent / "net.toml"
    opened = Run.open(run)
    vectors = np.asarray(retrieval.load(run).encode(opened.dataset, progress=False))
    np.savez(tmp_path / "v.npz", features=vectors)
    address = f"vectors:{tmp_path}/v.npz"
    words = ("compare", recipe, "--seeds", "2", "--pretrained", "none", "--output", tmp_path / "c")
    done = cli(*words, "--model", address)
    assert done.code == 0, done.err
    result = json.loads((tmp_path / "c" / "comparison.json").read_text())
    (row,) = [row for row in result["contestants"] if row["kind"] == "model"]
    (net,) = [row for row in result["contestants"] if row["kind"] == "net"]
    # these vectors are those of seed 0, and every seed has the same test items
    assert row["name"] == address and not row["recipe"] and len(row["metrics"]) == 2
    assert row["metrics"][0]["map_at_r"] == pytest.approx(net["metrics"][0]["map_at_r"], abs=1e-4)
    (difference,) = result["differences"]
    assert (difference["contestant"], difference["reference"]) == ("net", address)
    values = [run["map_at_r"] - row["metrics"][0]["map_at_r"] for run in net["metrics"]]
    assert difference["mean"]["value"] == pytest.approx(np.mean(values))
    half = stats.t.ppf(0.975, 1) * stats.sem(values)
    assert difference["mean"]["half"] == pytest.approx(half)
    assert f"| {address} |" in done.out and "Compared with net, with 2 seeds" in done.out
    # the same command goes on without the file, since the row is measured
    (tmp_path / "c" / "comparison.json").unlink()
    assert cli(*words, "--model", address).code == 0
    with (tmp_path / "c" / "comparison.csv").open() as file:
        assert {"model", "baseline"} & {line["kind"] for line in csv.DictReader(file)}


def test_compare_refuses_a_wrong_address_before_it_trains(run, tmp_path, cli):
    done = cli("compare", run.parent / "net.toml", "--model", "vectors:gone", "--output", tmp_path)
    assert done.code == 2 and "gone does not exist" in done.err
    assert not (tmp_path / "runs").exists()


# index create


def test_a_backbone_at_an_address_is_exported_and_searched(tmp_path, cli):
    pytest.importorskip("transformers", reason="the extra transformers is not installed")
    folder = small_models.transformers_folder(tmp_path / "clip", "clip")
    photos = tmp_path / "photos"
    paths = write_digits(photos, 20)
    index = tmp_path / "i.index"
    address = f"models.transformers:{folder}"
    done = cli("index", "create", index, photos, "--model", address)
    assert done.code == 0, done.err
    done = cli("search", index, paths[3], "-k", "1", "--json")
    (hit,) = json.loads(done.out)[0]["results"]
    assert hit["id"] == str(paths[3].relative_to(photos)) and hit["distance"] < 1e-3
    with open_index(index) as opened:
        vector = opened.get(hit["id"], arrays=True)[hit["id"]].arrays["vector"]
    assert np.linalg.norm(vector) == pytest.approx(1, abs=1e-5)


def test_vectors_of_any_other_model_are_indexed(tmp_path, cli):
    pytest.importorskip("pyarrow")
    photos = tmp_path / "photos"
    paths = write_digits(photos, 30)
    lines = [
        "path,label,price",
        *(f"photos/{p.relative_to(photos)},x,{i}" for i, p in enumerate(paths)),
    ]
    (tmp_path / "items.csv").write_text("\n".join(lines))
    index = tmp_path / "i.index"
    with serving() as server:
        address = f"{server.url}?model=pixels"
        done = cli("index", "create", index, tmp_path / "items.csv", "--model", address)
    assert done.code == 0, done.err
    assert "Indexed 30 items" in done.out
    opened_images = [Image.open(path) for path in paths]
    expected = pixel_vectors(opened_images, range(30))
    with open_index(index) as opened:
        for number in (0, 17, 29):
            id = f"photos/{paths[number].relative_to(photos)}"
            item = opened.get(id, arrays=True)[id]
            assert np.allclose(item.arrays["vector"], expected[number], atol=1e-6)
            assert item.label == "x" and item.metadata["price"] == number
            assert Path(item.metadata["path"]) == paths[number]
    first = f"photos/{paths[0].relative_to(photos)}"
    done = cli("search", index, "--like", first, "-k", "2", "--filter", "price > 0", "--json")
    nearest = 1 + int(np.argmin(np.linalg.norm(expected[1:] - expected[0], axis=1)))
    ids = [hit["id"] for hit in json.loads(done.out)[0]["results"]]
    assert f"photos/{paths[nearest].relative_to(photos)}" == ids[0]
    done = cli("search", index, paths[0])
    assert done.code == 2 and "this bundle takes features, not images" in done.err


def test_options_that_concern_images_are_refused_with_vectors(tmp_path, cli):
    write_digits(tmp_path / "photos", 4)
    for option in (("--skip-bad",), ("--keep", "copy"), ("--max-pixels", "9")):
        done = cli(
            "index", "create", tmp_path / "i", tmp_path / "photos", "--model", "vectors:x", *option
        )
        assert done.code == 2 and f"Leave {option[0]} out with vectors:x" in done.err
        assert not (tmp_path / "i").exists()


# Endpoints


def test_an_endpoint_embeds_data_urls(monkeypatch):
    monkeypatch.setenv("RETRIEVAL_ENDPOINT_KEY", "sk-secret")
    with serving() as server:
        vectors = at(f"{server.url}?model=pixels&modality=image")(DATA, EVERY)
    assert np.allclose(vectors, pixel_vectors(DATA, EVERY), atol=1e-6)
    assert [len(body["input"]) for body in server.bodies] == [16, 16, 8]
    assert {(b["model"], b["modality"]) for b in server.bodies} == {("pixels", "image")}
    assert {h["Authorization"] for h in server.headers} == {"Bearer sk-secret"}
    # the key goes to no other host in clear text
    says = refusal(DataError, at, "http://192.0.2.1/v1/embeddings?model=m")
    assert "unencrypted" in says and "sk-secret" not in says


def test_large_images_are_made_smaller_and_no_image_is_sent_twice():
    large = Image.new("RGB", (3000, 40), (200, 10, 10))
    images = [large, Image.fromarray(IMAGES[0]), large]
    data = type("Photos", (ArrayDataset,), {"__getitem__": lambda self, i: images[i]})(
        IMAGES[:3], ["a", "b", "a"]
    )
    with serving() as server:
        vectors = at(f"{server.url}?model=large")(data, np.arange(3))
    (body,) = server.bodies
    assert len(body["input"]) == 2 and np.array_equal(vectors[0], vectors[2])
    assert len(body["input"][0]) < 5000
    assert np.allclose(embedding(body["input"][0])[0], large.convert("L").getpixel((0, 0)) / 255)


def test_an_interrupted_pass_goes_on_where_it_ended():
    asked = []

    def third_fails(handler: Any, body: Any) -> None:
        asked.append(len(body["input"]))
        if len(asked) == 3:
            send(handler, b"\x1b[31mslow down\x1b[0m", 429)
        else:
            send(handler, json.dumps(answer(body)).encode())

    with serving(third_fails) as server:
        encoder = at(f"{server.url}?model=pixels")
        says = refusal(DataError, encoder, DATA, EVERY)
        assert "answers 429: " in says and "slow down" in says and "\x1b" not in says
        assert "The same command goes on where it ended." in says
        vectors = encoder(DATA, EVERY)
    assert asked == [16, 16, 8, 8]
    assert np.allclose(vectors, pixel_vectors(DATA, EVERY), atol=1e-6)
    # the server is gone, but everything is kept
    assert np.array_equal(encoder(DATA, EVERY), vectors)


def test_an_endpoint_that_is_not_there_is_a_sentence():
    with serving() as server:
        pass
    says = refusal(DataError, at(f"{server.url}?model=gone"), DATA, EVERY)
    assert f"{server.url} cannot be reached: " in says


def test_vectors_of_a_dataset_of_vectors_are_no_images():
    data = ArrayDataset(np.ones((2, 3)), ["a", "b"], kind="features")
    with serving() as server:
        says = refusal(DataError, at(f"{server.url}?model=m"), data, np.arange(2))
    assert "the data hold vectors" in says and not server.bodies


# MTEB


def test_a_model_of_mteb_embeds_as_mteb_runs_it(run, cli, monkeypatch):
    mteb = pytest.importorskip("mteb", reason="the extra mteb is not installed")
    seen = []

    class Projection:
        """A small encoder of images: a fixed random projection of 8 × 8 pixels."""

        def __init__(self, name: str, revision: str | None, **_: Any) -> None:
            self.weights = np.random.default_rng(0).normal(size=(64, 16))

        def encode(self, inputs: Any, *, task_metadata: Any, **options: Any) -> Any:
            assert "image" in inputs.dataset.features
            seen.append((task_metadata.name, options["hf_split"], options["hf_subset"]))
            rows = [
                np.asarray(image.convert("L").resize((8, 8)), float).ravel() / 255
                for batch in inputs
                for image in batch["image"]
            ]
            return torch.tensor(np.array(rows) @ self.weights)

    meta = mteb.get_model_meta("mteb/baseline-random-encoder").model_copy(
        update={"name": "small/projection", "loader": Projection, "modalities": ["image"]}
    )
    registry = __import__("mteb.models.get_model_meta", fromlist=["MODEL_REGISTRY"]).MODEL_REGISTRY
    monkeypatch.setitem(registry, "small/projection", meta)
    vectors = at("mteb:small/projection")(DATA, EVERY)
    pixels = IMAGES[:40].reshape(40, -1) / 255
    expected = pixels @ np.random.default_rng(0).normal(size=(64, 16))
    expected /= np.linalg.norm(expected, axis=1, keepdims=True)
    assert np.allclose(vectors, expected, atol=1e-5)
    assert seen == [("CUB200I2IRetrieval", "test", "default")]
    done = cli("evaluate", run, "--model", "mteb:small/projection")
    assert done.code == 0 and "trained minus mteb:small/projection" in done.out

    def unwanted(*_: Any, **__: Any) -> Any:
        raise AssertionError("a model that cannot be used is not downloaded")

    unused = {"name": "small/texts", "modalities": ["text"], "loader": unwanted}
    texts = meta.model_copy(update=unused)
    monkeypatch.setitem(registry, "small/texts", texts)
    says = refusal(DataError, at, "mteb:small/texts")
    assert "embeds text and compares by cosine" in says


def test_a_model_that_mteb_does_not_know_is_named():
    pytest.importorskip("mteb", reason="the extra mteb is not installed")
    assert "MTEB cannot load small/none: " in refusal(DataError, at, "mteb:small/none")
