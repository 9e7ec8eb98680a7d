"""What export writes, against torch and against plain float64 loops."""

from __future__ import annotations

import math
import warnings

import numpy as np
import onnx
import pytest
import torch
from makers import read_manifest
from retrieval.bundle.bundle import Bundle
from retrieval.bundle.probe import input_of, pattern_of, probe_fault
from retrieval.errors import BundleError
from retrieval.export import agreement
from retrieval.export.export_model import export_model
from retrieval.model.model import Model
from torch import nn


def torch_codes(model, items):
    model.eval()
    with torch.inference_mode():
        return model(torch.from_numpy(items))[1].numpy()


def test_a_convolutional_net_keeps_its_vectors_at_every_batch_size(net, digits, tmp_path):
    pixels, _ = digits
    manifest = export_model(net, pixels, tmp_path / "b", name="net", evaluation={"MAP@R": 0.5})
    assert manifest == read_manifest(tmp_path / "b")
    assert manifest.verified.largest_difference <= manifest.verified.tolerance == 1e-4
    assert manifest.verified.items == 300 and manifest.normalized and manifest.distance.exact
    assert manifest.input.dtype == "uint8" and manifest.input.shape == (1, 16, 16)
    assert manifest.evaluation == {"MAP@R": 0.5}
    assert manifest.code is None
    assert not manifest.query_vectors
    libraries = {"python", "torch", "onnx", "onnxruntime", "embedding-retrieval"}
    assert libraries <= set(manifest.versions)
    graph = onnx.load(tmp_path / "b" / "encoder.onnx")
    assert graph.opset_import[0].version == manifest.opset == 18
    bundle, expected = Bundle.open(tmp_path / "b", threads=1), torch_codes(net, pixels)
    for batch in (1, 2, 13, 300):
        assert np.abs(bundle.encode(pixels, batch_size=batch).vector - expected).max() < 1e-5


def test_the_probe_of_a_bundle_is_no_item(net, digits, tmp_path):
    pixels = digits[0][:9]
    manifest = export_model(net, pixels, tmp_path / "b", name="net", variants=["fp16"])
    assert set(manifest.probe.variants) == {"fp16"}
    pattern = pattern_of(manifest.probe, manifest.input.shape)
    assert not any((input_of(pattern, manifest.input.shape)[0] == one).all() for one in pixels)
    for variant in (None, "fp16"):
        assert probe_fault(Bundle.open(tmp_path / "b", variant=variant)) is None
    other = export_model(net, pixels[:5], tmp_path / "c", name="net")
    assert other.probe.pattern == manifest.probe.pattern


def test_normalisation_is_inside_the_graph(parts, digits, tmp_path):
    pixels = digits[0][:20]
    backbone = parts.Vectors(256)
    backbone.preprocessing = parts.Net().preprocessing
    backbone.forward = lambda x: x.flatten(1)
    export_model(Model(backbone, nn.Identity()), pixels, tmp_path / "b", name="raw")
    vectors = Bundle.open(tmp_path / "b", threads=1).encode(pixels).vector
    for item in (0, 7, 19):
        plain = [(float(value) / 255 - 0.3) / 0.2 for value in pixels[item].ravel()]
        assert np.allclose(vectors[item], plain, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_model_on_a_cuda_device_stays_there(net, digits, tmp_path):
    export_model(net.cuda(), digits[0][:9], tmp_path / "b", name="net")
    assert {p.device.type for p in net.parameters()} == {"cuda"}


def test_a_distance_that_no_vectors_order_gets_a_rescorer(vectors, parts, tmp_path):
    features, labels = vectors
    torch.manual_seed(2)
    combiner = parts.Sum()
    model = Model(parts.Vectors(), combiner.build_head(64), combiner)
    manifest = export_model(model, features, tmp_path / "b", name="sum", labels=labels)
    assert (manifest.code, manifest.rescorer.candidates) == (24, 40)
    assert not manifest.distance.exact
    spaces = [(s.name, s.start, s.stop) for s in manifest.subspaces]
    assert spaces == [(f"part{k}", 8 * k, 8 * k + 8) for k in range(3)]
    bundle = Bundle.open(tmp_path / "b", threads=1)
    encoded = bundle.encode(features)
    code = torch_codes(model, features)
    assert np.abs(encoded.code - code).max() < 1e-3
    for queries, items in ((1, 1), (1, 300), (5, 2), (40, 70)):
        distances = bundle.rescore(encoded.code[:queries], encoded.code[-items:])
        assert distances.shape == (queries, items)
    found = bundle.rescore(encoded.code[:3], encoded.code[:50])

    def unit(part):
        return [x / math.hypot(*part) for x in part]

    def distance(a, b):
        return sum(math.dist(unit(a[k : k + 8]), unit(b[k : k + 8])) for k in (0, 8, 16))

    rows = code.astype(float).tolist()
    exact = [[distance(rows[q], rows[i]) for i in range(50)] for q in range(3)]
    assert np.abs(found - exact).max() < 1e-4

    # the manifest's overlap, by plain sorting
    everything = bundle.rescore(encoded.code, encoded.code)
    kept = 0
    for q in range(300):
        others = [i for i in range(300) if i != q]
        nearest = set(sorted(others, key=lambda i, q=q: everything[q, i])[:10])
        gap = (encoded.vector[q] - encoded.vector).astype(float).reshape(300, 3, 8)
        first = np.sqrt((gap**2).sum(-1)).min(-1)
        kept += len(nearest & set(sorted(others, key=lambda i, first=first: first[i])[:50]))
    assert manifest.rescorer.overlap["50"] == pytest.approx(kept / 3000, abs=2e-3)
    assert set(manifest.rescorer.overlap) == {"10", "20", "50", "100", "200"}


def test_an_exact_combiner_with_query_vectors_of_its_own(vectors, parts, tmp_path):
    features, _ = vectors
    torch.manual_seed(3)
    combiner = parts.Inner()
    model = Model(parts.Vectors(), combiner.build_head(64), combiner)
    manifest = export_model(model, features, tmp_path / "b", name="inner")
    assert manifest.query_vectors and manifest.vector == 9
    assert manifest.rescorer is None and manifest.code is None
    encoded = Bundle.open(tmp_path / "b", threads=1).encode(features)
    codes = torch.from_numpy(torch_codes(model, features))
    wanted = combiner.compute_mat(codes[:5], codes).detach().numpy().argsort(1)[:, :10]
    gap = encoded.query[:5, None].astype(float) - encoded.vector[None]
    assert ((gap**2).sum(-1).argsort(1)[:, :10] == wanted).mean() > 0.97


def test_a_combiner_that_is_wrongly_exact_is_refused(vectors, parts, refused):
    combiner = parts.Sum()
    combiner.exact = True
    model = Model(parts.Vectors(), combiner.build_head(64), combiner)
    says = r"Sum has exact=True, but compute_mat puts item \d+ nearer .*item \d+.* Set exact=False"
    refused(model, vectors[0], says)


def test_the_callers_model_stays_and_the_graph_names_no_place_of_this_machine(
    net, digits, tmp_path, monkeypatch
):
    """By either exporter of torch, whose graphs agree."""
    net.train()
    net.backbone.layers[1].eval()  # a frozen batch norm inside a training model
    net.channels_last = True
    modes = [module.training for module in net.modules()]
    before = {name: value.clone() for name, value in net.state_dict().items()}
    encoded = []
    for exporter in ("dynamo", "torchscript"):
        monkeypatch.setattr(agreement, "EXPORTERS", (exporter,))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            export_model(net, digits[0][:40], tmp_path / exporter, name="net")
        assert [module.training for module in net.modules()] == modes and net.channels_last
        assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
        assert all(parameter.requires_grad for parameter in net.parameters())
        encoded.append(Bundle.open(tmp_path / exporter, threads=1).encode(digits[0]).vector)
        content = (tmp_path / exporter / "encoder.onnx").read_bytes()
        for machine in (b".py", str(tmp_path).encode(), b"site-packages"):
            assert machine not in content
    assert np.abs(encoded[0] - encoded[1]).max() < 1e-5


def test_the_older_exporter_is_taken_where_the_present_one_fails(
    parts, vectors, tmp_path, monkeypatch
):
    class Breaks(nn.Module):
        def forward(self, x):
            if torch.compiler.is_exporting():
                raise RuntimeError("no")
            return x * 2

    model = Model(parts.Vectors(), Breaks())
    monkeypatch.setattr(agreement, "EXPORTERS", ("dynamo", "torchscript"))
    export_model(model, vectors[0][:9], tmp_path / "b", name="b")
    properties = onnx.load(tmp_path / "b" / "encoder.onnx").metadata_props
    assert {entry.key: entry.value for entry in properties} == {"exporter": "torchscript"}
    monkeypatch.setattr(agreement, "EXPORTERS", ("dynamo",))
    with pytest.raises(BundleError, match="cannot be exported"):
        export_model(model, vectors[0][:9], tmp_path / "c", name="c")
    assert not (tmp_path / "c").exists()
