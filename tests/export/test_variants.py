"""fp16 and int8 encoders: their drift, measured again by plain loops."""

from __future__ import annotations

import math

import numpy as np
import onnx
import pytest
import torch
from retrieval.bundle.bundle import Bundle
from retrieval.export.variants import measure, row_cosine
from retrieval.model.model import Model, Normalise, build_head
from torch import nn


def cosine(a, b):
    dot = sum(float(x) * float(y) for x, y in zip(a, b, strict=True))
    return dot / math.sqrt(sum(float(x) ** 2 for x in a) * sum(float(y) ** 2 for y in b))


def plain_recall(query, vectors, labels):
    hits, queries = 0, 0
    for q in range(len(vectors)):
        if sum(label == labels[q] for label in labels) < 2:
            continue
        queries += 1
        distances = [math.dist(query[q].tolist(), v.tolist()) for v in vectors]
        distances[q] = math.inf
        hits += labels[distances.index(min(distances))] == labels[q]
    return hits / queries


@pytest.fixture(scope="module")
def trained(parts, digits):
    """The net after some seconds of real training, so that Recall@1 means something."""
    torch.manual_seed(0)
    model = Model(parts.Net(), build_head(96, 16))
    pixels, labels = torch.from_numpy(digits[0][:150]), torch.from_numpy(digits[1][:150]).long()
    optimiser = torch.optim.Adam(model.parameters(), 0.01)
    classifier = nn.Linear(16, 10)
    for _ in range(60):
        loss = nn.functional.cross_entropy(classifier(model(pixels)[1]) * 10, labels)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    return model


BOTH = ["fp16", "int8"]


@pytest.mark.parametrize("exporter", ["dynamo", "torchscript"])
def test_drift_and_recall_are_measured_on_the_items(
    trained, digits, tmp_path, exporter, exported, monkeypatch
):
    monkeypatch.setattr("retrieval.export.agreement.EXPORTERS", (exporter,))
    held_out, labels = digits[0][150:], digits[1][150:]
    options = {"labels": labels, "calibration": digits[0][:150], "variants": BOTH}
    manifest = exported(trained, held_out, **options)
    plain = Bundle.open(tmp_path / "b", threads=1).encode(held_out).vector
    for name, floor in (("fp16", 0.9999), ("int8", 0.99)):
        entry = manifest.variants[name]
        onnx.checker.check_model(onnx.load(tmp_path / "b" / entry.file))
        bundle = Bundle.open(tmp_path / "b", variant=name, threads=1)
        drifted = bundle.encode(held_out).vector
        assert drifted.dtype == np.float32 and not np.array_equal(drifted, plain)
        assert np.array_equal(bundle.encode(held_out[:1]).vector, drifted[:1]) or name == "fp16"
        cosines = [cosine(a, b) for a, b in zip(plain, drifted, strict=True)]
        # fp16: a CPU rounds less than the manifest assumes
        slack = 1e-6 if name == "int8" else 1e-5
        assert entry.cosine.mean == pytest.approx(sum(cosines) / len(cosines), abs=slack)
        assert entry.cosine.min == pytest.approx(min(cosines), abs=slack)
        assert entry.cosine.min <= min(cosines) + 1e-6
        assert entry.cosine.min > floor
        before, after = (plain_recall(x, x, labels) for x in (plain, drifted))
        assert entry.recall_at_1.before == pytest.approx(before, abs=1e-9)
        slack = 1e-9 if name == "int8" else 0.01
        assert entry.recall_at_1.after == pytest.approx(after, abs=slack)
        assert entry.recall_at_1.before > 0.6
        sizes = manifest.files
        assert sizes[entry.file].bytes < sizes["encoder.onnx"].bytes * 1.5


def test_weights_are_really_narrower(trained, digits, exported, tmp_path):
    exported(trained, digits[0][150:], calibration=digits[0][:40], variants=BOTH)

    def graph(name):
        return onnx.load(tmp_path / "b" / f"encoder_{name}.onnx").graph

    def numbers(name, kind):
        code = onnx.TensorProto.DataType.Value(kind)
        return sum(math.prod(t.dims) for t in graph(name).initializer if t.data_type == code)

    weights = 16 * 9 + 24 * 16 * 9 + 96 * 16
    head = 96 * 16  # stays float32
    assert numbers("fp16", "FLOAT16") >= weights
    assert numbers("int8", "INT8") >= weights - head
    assert numbers("int8", "FLOAT") < head + weights / 4
    scales = [t for t in graph("int8").initializer if t.name.endswith("_scale")]
    assert any(list(t.dims) == [24] for t in scales), "one scale a channel"


def test_a_variant_that_drifts_is_not_written_unless_allowed(trained, digits, refused):
    says = r"int8 variant drifts too far.*0\.99 and 0\.9 are required.*--allow-drift"
    black = digits[0][:150] * 0
    refused(trained, digits[0][150:], says, calibration=black, variants=["int8"])


def test_int8_needs_and_uses_the_calibration_items(trained, digits, exported, refused, tmp_path):
    says = "without calibration items from the training set"
    refused(trained, digits[0], says, variants=["int8"])
    found = []  # black images for calibration cut real ones off
    for calibration in (digits[0][:150], digits[0][:150] * 0):
        options = {"calibration": calibration, "variants": ["int8"], "replace": True}
        manifest = exported(trained, digits[0][150:], **options, allow_drift=bool(found))
        found.append(manifest.variants["int8"].cosine.mean)
        assert manifest.variants["int8"].recall_at_1 is None
    assert found[0] > 0.99 and found[1] < found[0] - 0.01


def test_lengths_beyond_float16_survive_scaling_to_unit_length(parts, vectors, exported):
    torch.manual_seed(0)
    head = nn.Sequential(nn.Linear(64, 8), Normalise())
    with torch.no_grad():
        head[0].weight.mul_(250)  # entries near 20,000: their squares do not fit float16
    manifest = exported(Model(parts.Vectors(), head), vectors[0], variants=["fp16"])
    assert manifest.variants["fp16"].cosine.min > 0.9999


def test_a_model_beyond_float16_is_refused(parts, vectors, refused):
    head = nn.Sequential(nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 8))
    with torch.no_grad():
        head[0].weight.mul_(1e4)
    says = "fp16.*NaN or infinity in 'vector'.*Leave this variant out"
    refused(Model(parts.Vectors(), head), vectors[0], says, variants=["fp16"])


def test_int8_without_a_layer_to_quantise_is_refused(parts, vectors, refused):
    options = {"variants": ["int8"], "calibration": vectors[0]}
    model = Model(parts.Vectors(), Normalise())
    refused(model, vectors[0], "no convolution or linear layer", **options)


@pytest.mark.parametrize("combiner", ["Sum", "Inner"])
def test_variants_of_every_output(combiner, parts, vectors, exported, tmp_path):
    features, labels = vectors[0][:120], vectors[1][:120]
    torch.manual_seed(5)
    combiner = getattr(parts, combiner)()
    model = Model(parts.Vectors(), combiner.build_head(64), combiner)
    options = {"labels": labels, "calibration": vectors[0][120:], "variants": BOTH}
    for name, entry in exported(model, features, **options).variants.items():
        bundle = Bundle.open(tmp_path / "b", variant=name, threads=1)
        encoded = bundle.encode(features)
        if bundle.has_code:
            distances = bundle.rescore(encoded.code, encoded.code).astype(float)
        else:
            distances = ((encoded.query[:, None].astype(float) - encoded.vector[None]) ** 2).sum(-1)
        hits = 0
        for q in range(120):
            others = sorted((i for i in range(120) if i != q), key=lambda i, q=q: distances[q, i])
            hits += labels[others[0]] == labels[q]
        assert entry.recall_at_1.after == pytest.approx(hits / 120, abs=1 / 120 + 1e-9)


def test_recall_leaves_out_labels_that_occur_once():
    outputs = {"vector": np.array([[0.0], [1.0], [2.5]], np.float32)}
    # item 0 finds 1, item 2 finds 1
    for labels, share in ((["a", "b", "a"], 0.0), (["a", "a", "c"], 1.0), (["a", "b", "c"], None)):
        recall = measure("f", outputs, [outputs], np.array(labels), None, None).recall_at_1
        assert (recall and recall.after) == share


def test_cosine_of_zero_rows():
    a = np.array([[0, 0], [1, 0], [1, 0]], np.float32)
    b = np.array([[0, 0], [0, 0], [1, 1]], np.float32)
    assert row_cosine(a, b) == pytest.approx([1, 0, math.sqrt(0.5)])
