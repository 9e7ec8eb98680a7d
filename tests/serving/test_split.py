"""A bundle whose encoder is two graphs: features to keep, and heads that are applied to those that were kept."""

from __future__ import annotations

import json
import shutil

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from retrieval.errors import BundleError, DataError
from retrieval.serving.bundle import Bundle
from retrieval.serving.index.creating import create_index
from retrieval.serving.index.index import open_index
from retrieval.serving.manifest import checksum_of, read_manifest, write_manifest

KINDS = [{}, {"rescorer": True}, {"query_vectors": True}, {"normalized": False, "variant": True}]


def save(path, graph):
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    onnx.save(model, path)


def edited(path, change):
    content = json.loads((path / "manifest.json").read_text())
    change(content)
    content["checksum"] = checksum_of(content)
    (path / "manifest.json").write_text(json.dumps(content))
    return path


@pytest.fixture
def two(makers, tmp_path):
    """A bundle as it is and the same split, made with these options."""

    def make(**options):
        whole = makers.make_bundle(tmp_path / "whole", **options)
        split = makers.cut_in_two(shutil.copytree(whole, tmp_path / "split"))
        return Bundle.open(whole, threads=1), Bundle.open(split, threads=1)

    return make


@pytest.fixture
def split_path(makers, tmp_path):
    return makers.cut_in_two(makers.make_bundle(tmp_path / "b"))


def pixels(makers, count=70):
    return makers.digits()[0][:count, None]


@pytest.mark.parametrize("options", KINDS)
def test_a_split_encoder_gives_what_the_whole_one_gives(options, two, makers):
    whole, split = two(**options)
    given = pixels(makers)
    features = split.features(given)
    assert features.dtype == np.float32
    assert np.allclose(features, given.reshape(70, -1) / np.float32(255), atol=1e-7)
    wanted, found, after = whole.encode(given), split.encode(given), split.encode_features(features)
    for name in ("vector", "query", "code"):
        if getattr(wanted, name) is None:
            assert getattr(found, name) is None
            continue
        assert np.allclose(getattr(found, name), getattr(wanted, name), atol=1e-6)
        assert np.array_equal(getattr(found, name), getattr(after, name))
    assert (found.query is found.vector) == (wanted.query is wanted.vector)
    assert np.array_equal(split.encode_images(list(given[:, 0]), progress=False), found.vector)
    assert len(split.encode(given[:0])) == 0 and split.features(given[:0]).shape == (0, 64)


def test_another_head_is_applied_to_features_that_were_kept(makers, tmp_path):
    old, new = (
        Bundle.open(makers.cut_in_two(makers.make_bundle(tmp_path / str(seed), seed=seed)), threads=1)
        for seed in (0, 1)
    )
    assert old.sha256 != new.sha256 and old.backbone_sha256 == new.backbone_sha256
    assert len(old.backbone_sha256) == 64
    kept = old.features(pixels(makers))
    assert np.array_equal(new.encode_features(kept).vector, new.encode(pixels(makers)).vector)
    assert not np.allclose(new.encode_features(kept).vector, old.encode(pixels(makers)).vector, atol=0.1)


def test_a_bundle_of_features_is_a_head_as_a_whole(makers, tmp_path, split_path):
    head = Bundle.open(makers.make_bundle(tmp_path / "f", kind="features"), threads=1)
    kept = Bundle.open(split_path, threads=1).features(pixels(makers))
    assert np.array_equal(head.encode_features(kept).vector, head.encode(kept).vector)
    assert np.array_equal(head.features(kept), kept) and head.backbone_sha256 is None
    with pytest.raises(DataError, match=r"shape \(N, 64\), not \(2, 63\)"):
        head.encode_features(np.zeros((2, 63)))


def test_a_backbone_is_another_one_when_anything_of_its_features_is(makers, tmp_path):
    path = makers.cut_in_two(makers.make_bundle(tmp_path / "b"))
    names = {Bundle.open(path, threads=1).backbone_sha256}
    content = json.loads((path / "manifest.json").read_text())
    said = {"graph": content["files"]["backbone.onnx"]["sha256"], "input": content["input"]}
    assert names == {checksum_of(said)}
    model = onnx.load(path / "backbone.onnx")
    full = next(each for each in model.graph.initializer if each.name == "full")
    full.CopyFrom(numpy_helper.from_array(np.float32(254), "full"))
    onnx.save(model, path / "backbone.onnx")
    write_manifest(path, read_manifest(path))
    names.add(Bundle.open(path, threads=1).backbone_sha256)
    edited(path, lambda c: c["input"]["preprocessing"].update(interpolation="nearest"))
    names.add(Bundle.open(path, threads=1).backbone_sha256)
    assert len(names) == 3


def test_what_cannot_be_had_apart_is_a_sentence(two, split_path, makers):
    whole, split = two(variant=True)
    variant = Bundle.open(split.path, variant="fp16", threads=1)
    for bundle, why in ((whole, "one graph.*--split"), (variant, "variant 'fp16'.*without a variant")):
        assert bundle.backbone_sha256 is None
        with pytest.raises(BundleError, match=f"(?s){why}"):
            bundle.features(pixels(makers))
        with pytest.raises(BundleError, match=f"(?s){why}"):
            bundle.encode_features(np.zeros((1, 64)))
    assert np.allclose(variant.encode(pixels(makers)).vector, split.encode(pixels(makers)).vector, atol=1e-2)


def test_wrong_features_are_sentences(split_path):
    bundle = Bundle.open(split_path, threads=1)
    with pytest.raises(DataError, match=r"takes inputs of shape \(N, 64\), not \(2, 16\)"):
        bundle.encode_features(np.zeros((2, 16)))
    with pytest.raises(DataError, match="real numbers, not complex128"):
        bundle.encode_features(np.zeros((2, 64), complex))
    for bad in (np.nan, np.inf, 1e300):
        values = np.ones((3, 64))
        values[1, 5] = bad
        with pytest.raises(DataError, match="Vector 1 holds NaN"):
            bundle.encode_features(values)
    with pytest.raises(DataError, match="batch must be at least 1"):
        bundle.encode_features(np.ones((3, 64)), batch=0)
    with pytest.raises(DataError, match=r"takes inputs of shape \(N, 1, 8, 8\)"):
        bundle.features(np.zeros((2, 8, 8), np.uint8))


def test_an_index_of_a_split_bundle_answers_as_one_of_the_whole(two, photos, tmp_path):
    answers = []
    for number, bundle in enumerate(two()):
        create_index(tmp_path / f"i{number}", bundle.path, [photos / "1", photos / "2"], progress=False)
        with open_index(tmp_path / f"i{number}", threads=1) as opened:
            hits = opened.search(photos / "1" / "0001.png", 5)
            answers.append([(hit.id, round(hit.distance, 5)) for hit in hits])
    assert (tmp_path / "i1" / "bundle" / "head.onnx").is_file()
    assert answers[0] == answers[1] and len(answers[0]) == 5


def test_a_bundle_of_one_graph_says_nothing_of_splits(makers, tmp_path):
    content = json.loads((makers.make_bundle(tmp_path / "b") / "manifest.json").read_text())
    assert "split" not in content and content["encoder"] == "encoder.onnx"


def test_any_flipped_bit_of_either_graph_is_noticed(split_path):
    random = np.random.default_rng(0)
    for name in ("backbone.onnx", "head.onnx"):
        content = (split_path / name).read_bytes()
        for bit in random.integers(0, 8 * len(content), 30):
            altered = bytearray(content)
            altered[bit // 8] ^= 1 << (bit % 8)
            (split_path / name).write_bytes(altered)
            with pytest.raises(BundleError, match=rf"{name} was altered"):
                Bundle.open(split_path)
        (split_path / name).write_bytes(content[:-1])
        with pytest.raises(BundleError, match=rf"{name} has {len(content) - 1:,} bytes"):
            Bundle.open(split_path)
        (split_path / name).unlink()
        with pytest.raises(BundleError, match=rf"{name} is missing"):
            Bundle.open(split_path)
        (split_path / name).write_bytes(content)
    assert Bundle.open(split_path, threads=1).backbone_sha256


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda c: c.update(encoder="head.onnx"), "either an 'encoder' of one graph or a 'split' one"),
        (lambda c: c.update(split=None), "either an 'encoder' of one graph or a 'split' one"),
        (lambda c: c["split"].update(head="../head.onnx"), "not the plain name of a file"),
        (lambda c: c["split"].update(backbone="/dev/zero"), "not the plain name of a file"),
        (lambda c: c["split"].update(features=0), "features"),
        (lambda c: c["split"].update(features=1 << 40), "features"),
        (lambda c: c["split"].update(more=1), "more"),
        (lambda c: c["files"].pop("backbone.onnx"), "gives no SHA-256 for backbone.onnx"),
        (lambda c: c["files"].pop("head.onnx"), "gives no SHA-256 for head.onnx"),
        (lambda c: c["split"].update(features=63), r"'features' has shape \(N, \(64,\)\)"),
        (lambda c: c["split"].update(head="backbone.onnx"), "'input' has shape|has no output 'vector'"),
        (lambda c: c["split"].update(backbone="head.onnx"), "has no output 'features'|'input' has shape"),
        (lambda c: c.update(vector=17), r"'vector' has shape \(N, \(16,\)\)"),
        (
            lambda c: c.update(input={"kind": "features", "dtype": "float32", "shape": [64], "preprocessing": None}),
            "no backbone to be split off",
        ),
    ],
)  # fmt: skip
def test_a_manifest_that_lies_about_its_halves(change, says, split_path):
    with pytest.raises(BundleError, match=says):
        Bundle.open(edited(split_path, change))


def test_a_manifest_names_files_that_are_there(split_path):
    (split_path / "head.onnx").unlink()
    with pytest.raises(BundleError, match=r"head.* was not written"):
        write_manifest(split_path, read_manifest(split_path))


def put(path, name, nodes, constants, given, out):
    held = [numpy_helper.from_array(value, key) for key, value in constants.items()]
    save(path / f"{name}.onnx", helper.make_graph(nodes, name, [given], [out], held))
    write_manifest(path, read_manifest(path))
    return path


IMAGE = helper.make_tensor_value_info("input", TensorProto.UINT8, ["N", 1, 8, 8])
FEATURES = helper.make_tensor_value_info("features", TensorProto.FLOAT, None)
GIVEN = helper.make_tensor_value_info("input", TensorProto.FLOAT, ["N", 64])
VECTOR = helper.make_tensor_value_info("vector", TensorProto.FLOAT, None)
FLOAT = [helper.make_node("Cast", ["input"], ["f"], to=TensorProto.FLOAT), helper.make_node("Flatten", ["f"], ["x"])]  # fmt: skip


def test_halves_that_give_other_rows_than_they_are_given(split_path, makers):
    """On one item they are as the manifest says; with several, a row is missing."""
    nodes = [*FLOAT, helper.make_node("ReduceMean", ["x"], ["features"], axes=[0], keepdims=1)]
    bundle = Bundle.open(put(split_path, "backbone", nodes, {}, IMAGE, FEATURES), threads=1)
    with pytest.raises(BundleError, match=r"'features' of shape \(1, 64\) for 7 items"):
        bundle.features(pixels(makers, 7))
    with pytest.raises(BundleError, match=r"'vector' of shape \(1, 16\) for 7 items"):
        bundle.encode(pixels(makers, 7))


def test_a_head_that_gives_one_vector_for_all(split_path):
    nodes = [
        helper.make_node("ReduceMean", ["input"], ["m"], axes=[0], keepdims=1),
        helper.make_node("MatMul", ["m", "W"], ["vector"]),
    ]
    made = put(split_path, "head", nodes, {"W": np.ones((64, 16), np.float32)}, GIVEN, VECTOR)
    with pytest.raises(BundleError, match=r"'vector' of shape \(1, 16\) for 3 items"):
        Bundle.open(made, threads=1).encode_features(np.zeros((3, 64)))


def test_features_that_are_not_finite_are_refused(split_path, makers):
    nodes = [*FLOAT, helper.make_node("Log", ["x"], ["features"])]  # of a black pixel
    bundle = Bundle.open(put(split_path, "backbone", nodes, {}, IMAGE, FEATURES), threads=1)
    with pytest.raises(DataError, match=r"The backbone gives NaN or infinity in 'features' for item 0"):
        bundle.features(pixels(makers, 3))


def hostile(width=16):
    """Graphs that no half of an encoder may be, and what the refusal says."""
    branch = helper.make_graph(
        [helper.make_node("Identity", ["input"], ["t"])], "t", [],
        [helper.make_tensor_value_info("t", TensorProto.FLOAT, None)],
    )  # fmt: skip
    inside = numpy_helper.from_array(np.ones((64, width), np.float32), "W")
    outside = onnx.TensorProto.FromString(inside.SerializeToString())
    outside.data_location = TensorProto.EXTERNAL
    outside.external_data.add(key="location", value="../../etc/passwd")
    outside.ClearField("raw_data")
    product = helper.make_node("MatMul", ["input", "W"], ["vector"])
    huge = {"shape": np.array([1 << 17, 1 << 17], np.int64), "axes": np.array([0, 1], np.int64)}
    return {
        "branch": (
            [helper.make_node("If", ["yes"], ["vector"], then_branch=branch, else_branch=branch)],
            [numpy_helper.from_array(np.array(True), "yes")], "loops or branches",
        ),
        "weights elsewhere": ([product], [outside], "weights in another file"),
        "another domain": ([helper.make_node("Own", ["input"], ["vector"], domain="acme")], [], "operator acme.Own"),
        "memory": (
            [
                helper.make_node("MatMul", ["input", "W"], ["v"]),
                helper.make_node("ReduceSum", ["input", "axes"], ["s"], keepdims=0),
                helper.make_node("Expand", ["s", "shape"], ["big"]),
                helper.make_node("ReduceSum", ["big", "axes"], ["t"], keepdims=0),
                helper.make_node("Add", ["v", "t"], ["vector"]),
            ],
            [inside, *(numpy_helper.from_array(value, name) for name, value in huge.items())], "cannot run",
        ),
        "no graph": (None, None, "not an ONNX file"),
    }  # fmt: skip


@pytest.mark.parametrize("kind", list(hostile()))
@pytest.mark.parametrize("half", ["backbone", "head"])
def test_hostile_halves_are_refused(kind, half, split_path):
    nodes, constants, says = hostile(16 if half == "head" else 64)[kind]
    if nodes is None:
        (split_path / f"{half}.onnx").write_bytes(b"not a graph")
    else:
        given, out = (GIVEN, VECTOR) if half == "head" else (IMAGE, FEATURES)
        if half == "backbone":
            nodes = [onnx.NodeProto.FromString(node.SerializeToString()) for node in nodes]
            for node in nodes:
                node.input[:] = ["x" if each == "input" else each for each in node.input]
                node.output[:] = ["features" if each == "vector" else each for each in node.output]
            nodes = [*FLOAT, *nodes]
        save(split_path / f"{half}.onnx", helper.make_graph(nodes, half, [given], [out], constants))
    write_manifest(split_path, read_manifest(split_path))
    with pytest.raises(BundleError, match=says):
        Bundle.open(split_path, threads=1)
