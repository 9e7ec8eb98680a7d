"""Adapter bundles: the base's encoder, then a head; and the refusal of damaged and hostile ones."""

import json
import shutil
from pathlib import Path

import numpy as np
import onnx
import pytest
from makers import read_manifest
from onnx import TensorProto, helper
from retrieval.bundle.bundle import Bundle
from retrieval.bundle.manifest import write_manifest
from retrieval.bundle.probe import probe_fault, probe_of
from retrieval.errors import BundleError, DataError
from retrieval.index.adapter_bundles import make_adapter_bundle, write_base
from retrieval.index.adding import by_name
from retrieval.store.contract import widths_of

from retrieval_engines.testing.small_bundles import graph_bytes, linear_head

WIDTH = 16


def opened(path: Path, **options) -> Bundle:
    return Bundle.open(path, threads=1, **options)


def with_probe(path: Path) -> Path:
    """Give a bundle the probe that an export gives it."""
    manifest = read_manifest(path)
    bundles = {name: opened(path, variant=name) for name in (None, *manifest.variants)}
    write_manifest(path, manifest.model_copy(update={"probe": probe_of(bundles, (0.0, 1.0))}))
    return path


@pytest.fixture
def base(makers, tmp_path):
    return opened(with_probe(makers.make_bundle(tmp_path / "base", variant=True)))


@pytest.fixture
def adapter(base, tmp_path):
    return opened(make_adapter_bundle(base, linear_head(WIDTH, 5), tmp_path / "adapter"))


def matrix(head: bytes) -> np.ndarray:
    (constant,) = onnx.load_from_string(head).graph.initializer
    return onnx.numpy_helper.to_array(constant).astype(np.float64)


@pytest.mark.parametrize("kind", ["image", "split", "features"])
def test_vectors_are_those_of_the_base_and_then_the_head(kind, makers, tmp_path):
    path = makers.make_bundle(tmp_path / "base", kind="image" if kind == "split" else kind)
    if kind == "split":
        makers.cut_in_two(path)
    base = opened(path)
    pixels = makers.digits()[0][:7]
    inputs = pixels.reshape(7, -1).astype(np.float32) if kind == "features" else pixels[:, None]
    head = linear_head(WIDTH, 5)
    bundle = opened(make_adapter_bundle(base, head, tmp_path / "adapter"))
    encoded = bundle.encode(inputs)
    before = base.encode(inputs).vector
    assert np.array_equal(encoded.base, before)
    assert np.allclose(encoded.vector, before.astype(np.float64) @ matrix(head), atol=1e-4)
    assert encoded.query is encoded.vector
    assert encoded.bundle == bundle.sha256
    assert np.array_equal(encoded[2:4].base, before[2:4])
    assert np.array_equal(bundle.adapt(before).vector, encoded.vector)
    assert {name: array.shape[1] for name, array in by_name(encoded).items()} == widths_of(bundle)
    assert widths_of(bundle) == {"vector": 5, "base": WIDTH}
    assert bundle.compares_vectors_alone
    if kind == "image":
        images = list(pixels)
        assert np.allclose(bundle.encode_images(images, progress=False), encoded.vector, atol=1e-5)
        return
    assert bundle.backbone_sha256 == base.backbone_sha256
    features = bundle.features(inputs)
    assert np.array_equal(bundle.encode_features(features).base, before)


def test_variants_and_probe_go_through_the_head(base, adapter, tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (3, 1, 8, 8), np.uint8)
    fp16 = opened(adapter.path, variant="fp16")
    expected = opened(base.path, variant="fp16").encode(pixels).vector
    assert not np.array_equal(expected, base.encode(pixels).vector)
    assert np.array_equal(fp16.encode(pixels).base, expected)
    assert adapter.manifest.probe is not None
    assert probe_fault(adapter) is None
    assert probe_fault(fp16) is None
    shutil.copy(adapter.path / "adapter.onnx", tmp_path / "first")
    other = opened(make_adapter_bundle(base, linear_head(WIDTH, 5, seed=1), tmp_path / "other"))
    manifest = read_manifest(other.path).model_copy(update={"probe": adapter.manifest.probe})
    write_manifest(other.path, manifest)
    assert "differs by" in probe_fault(opened(other.path))


def test_the_same_base_and_head_give_the_same_bundle_and_the_base_comes_back(
    base, adapter, tmp_path
):
    again = opened(make_adapter_bundle(base, linear_head(WIDTH, 5), tmp_path / "again"))
    assert again.sha256 == adapter.sha256
    assert adapter.manifest.adapter.base == base.sha256
    # An adapter over an adapter is one over the base.
    second = linear_head(WIDTH, 9, seed=1)
    chained = opened(make_adapter_bundle(adapter, second, tmp_path / "chained"))
    direct = opened(make_adapter_bundle(base, second, tmp_path / "direct"))
    assert chained.sha256 == direct.sha256
    shutil.rmtree(base.path)
    back = write_base(adapter, tmp_path / "back")
    assert opened(back).sha256 == base.sha256
    with pytest.raises(BundleError, match="has no adapter, so it has no base"):
        write_base(opened(back), tmp_path / "none")
    with pytest.raises(BundleError, match="has no adapter: its encoder returns the vectors"):
        opened(back).adapt(np.zeros((1, WIDTH)))


def test_wrong_vectors_of_the_base_are_sentences(adapter):
    with pytest.raises(DataError, match=r"takes inputs of shape \(N, 16\), not \(1, 5\)"):
        adapter.adapt(np.zeros((1, 5)))
    with pytest.raises(DataError, match="Vector 1 holds NaN"):
        adapter.adapt(np.array([np.zeros(WIDTH), np.full(WIDTH, np.nan)]))
    beyond = np.full((1, WIDTH), 3e38)
    with pytest.raises(DataError, match="The adapter returns NaN or infinity in 'vector'"):
        adapter.adapt(beyond * np.sign(matrix((adapter.path / "adapter.onnx").read_bytes())[:, 0]))


@pytest.mark.parametrize("option", ["rescorer", "subspaces", "query_vectors", "inner"])
def test_a_base_that_compares_otherwise_is_refused(option, makers, tmp_path):
    path = makers.make_bundle(tmp_path / "base", **{option: True})
    with pytest.raises(BundleError, match="an adapter needs a bundle whose results are ordered by"):
        make_adapter_bundle(opened(path), linear_head(WIDTH), tmp_path / "adapter")
    assert not (tmp_path / "adapter").exists()


def free_width() -> bytes:
    nodes = [helper.make_node("Identity", ["input"], ["vector"])]
    given = helper.make_tensor_value_info("input", TensorProto.FLOAT, ["N", "P"])
    output = helper.make_tensor_value_info("vector", TensorProto.FLOAT, ["N", "P"])
    return graph_bytes(nodes, [given], [output], {})


def other_output() -> bytes:
    return linear_head(WIDTH).replace(b"vector", b"vektor")


@pytest.mark.parametrize(
    ("head", "says"),
    [
        (b"", "The head of the adapter is refused: it is not an ONNX file"),
        (b"\x08" * 50, "The head of the adapter"),
        (linear_head(WIDTH)[:-9], "The head of the adapter"),
        (linear_head(7), "cannot run .*adapter.onnx"),
        (free_width(), "needs an output 'vector' .N, P. of a fixed width P"),
        (other_output(), "needs an output 'vector' .N, P. of a fixed width P"),
        (linear_head(WIDTH).replace(b"input", b"inpud"), "adapter.onnx has no input 'input'"),
    ],
)
def test_a_head_that_cannot_be_used_leaves_nothing(head, says, base, tmp_path):
    with pytest.raises(BundleError, match=says):
        make_adapter_bundle(base, head, tmp_path / "adapter")
    assert [path.name for path in tmp_path.iterdir()] == ["base"]


def test_a_folder_that_exists_is_refused(base, adapter):
    with pytest.raises(BundleError, match="exists already"):
        make_adapter_bundle(base, linear_head(WIDTH), adapter.path)
    assert opened(adapter.path).sha256 == adapter.sha256


def test_a_base_with_a_file_of_the_adapters_name_is_refused(makers, tmp_path):
    path = makers.make_bundle(tmp_path / "base")
    (path / "adapter.onnx").write_bytes(b"notes")
    write_manifest(path, read_manifest(path))
    with pytest.raises(BundleError, match=r"has a file adapter\.onnx"):
        make_adapter_bundle(opened(path), linear_head(WIDTH), tmp_path / "adapter")


def test_a_bundle_without_an_adapter_does_not_mention_it(base):
    assert "adapter" not in json.loads((base.path / "manifest.json").read_text())


def test_any_flipped_bit_of_head_and_base_is_noticed(adapter):
    random = np.random.default_rng(0)
    for name in ("adapter.onnx", "base.json"):
        content = (adapter.path / name).read_bytes()
        for bit in random.integers(0, 8 * len(content), 30):
            altered = bytearray(content)
            altered[bit // 8] ^= 1 << (bit % 8)
            (adapter.path / name).write_bytes(altered)
            with pytest.raises(BundleError, match=rf"{name} was altered"):
                opened(adapter.path)
        (adapter.path / name).unlink()
        with pytest.raises(BundleError, match=f"{name} is missing"):
            opened(adapter.path)
        (adapter.path / name).write_bytes(content)
    assert opened(adapter.path).sha256 == adapter.sha256


RECORD = {"sha256": "0" * 64, "bytes": 1}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda c: c["adapter"].update(file="../adapter.onnx"), "not the plain name of a file"),
        (lambda c: c["adapter"].update(file="gone.onnx"), "has no SHA-256 for gone.onnx"),
        (lambda c: c["adapter"].update(base="x"), "adapter.base: "),
        (lambda c: c["adapter"].update(base="0" * 64), "needs base.json, the manifest of its base"),
        (lambda c: c["files"].pop("base.json"), "needs base.json, the manifest of its base"),
        (lambda c: c["files"].update({"base.json": RECORD}), "needs base.json, the manifest"),
        (lambda c: c["adapter"].update(width=0), "adapter.width: "),
        (lambda c: c["adapter"].update(width=10**9), "adapter.width: "),
        (lambda c: c["adapter"].update(width=15), r"'vector' as float32 \(1, 16\); the manifest"),
        (lambda c: c["adapter"].update(more=1), "adapter.more: "),
        (lambda c: c.update(vector=6), r"'vector' as float32 \(1, 5\); the manifest says"),
        (lambda c: c.update(code=5), "compared whole, by their Euclidean distance"),
        (lambda c: c.update(query_vectors=True), "compared whole, by their Euclidean distance"),
        (lambda c: c.update(merge="score"), "compared whole, by their Euclidean distance"),
        (lambda c: c["distance"].update(measure="inner"), "compared whole"),
        (
            lambda c: c.update(subspaces=[{"name": "a", "start": 0, "stop": 5}]),
            "compared whole, by their Euclidean distance",
        ),
    ],
)
def test_a_hostile_manifest_is_refused(change, says, adapter, makers):
    makers.change_manifest(adapter.path, change)
    with pytest.raises(BundleError, match=says):
        opened(adapter.path)


def test_a_base_json_that_is_no_manifest_is_refused_when_the_base_is_needed(
    adapter, makers, tmp_path
):
    """A hostile bundle may hold any file there, with a true hash."""
    (adapter.path / "base.json").write_bytes(b'{"format": 1}')
    manifest = write_manifest(adapter.path, read_manifest(adapter.path))

    def change(content):
        content["adapter"]["base"] = manifest.files["base.json"].sha256

    makers.change_manifest(adapter.path, change)
    hostile = opened(adapter.path)
    with pytest.raises(BundleError, match="cannot be used"):
        make_adapter_bundle(hostile, linear_head(WIDTH), tmp_path / "second")
    assert not (tmp_path / "second").exists()
