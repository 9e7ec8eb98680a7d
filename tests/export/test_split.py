"""`retrieval export --split`: two graphs, and one backbone known again under another head."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from exporting import export_backbone
from retrieval import train
from retrieval.bundle.bundle import Bundle
from retrieval.cli.app import app
from retrieval.export import agreement
from retrieval.export.export_model import export_model
from retrieval.export.export_run import export
from retrieval.model.model import Model, Normalise, build_head
from torch import nn


def opened(path, **options):
    return Bundle.open(path, threads=1, device="cpu", **options)


def halves(content):
    return sorted(name for name in content["files"] if name.endswith(".onnx"))


@pytest.mark.parametrize("combiner", [None, "Sum", "Inner"])
def test_a_split_bundle_gives_what_the_whole_one_gives(combiner, net, digits, parts, tmp_path):
    model = net
    if combiner is not None:
        made = parts.Sum() if combiner == "Sum" else parts.Inner(radius=2.0)
        model = Model(net.backbone, nn.Sequential(made.build_head(96), Normalise()), made)
    items = digits[0][:40]
    export_model(model, items, tmp_path / "whole", name="m")
    manifest = export_model(model, items, tmp_path / "split", name="m", split=True)
    assert manifest.encoder is None and manifest.split.features == 96
    assert manifest.verified.largest_difference < 1e-4 and manifest.verified.items == 40
    whole, split = opened(tmp_path / "whole"), opened(tmp_path / "split")
    rescorer = ["rescorer.onnx"] if combiner == "Sum" else []
    assert sorted(manifest.files) == ["backbone.onnx", "head.onnx", *rescorer]
    features = split.features(items)
    model.eval()
    with torch.no_grad():
        assert np.allclose(features, model.features(torch.from_numpy(items)).numpy(), atol=1e-4)
    wanted, found, after = whole.encode(items), split.encode(items), split.encode_features(features)
    for name in ("vector", "query", "code"):
        values = getattr(wanted, name)
        assert (values is None) == (getattr(found, name) is None)
        if values is not None:
            assert np.allclose(getattr(found, name), values, atol=1e-5)
            assert np.array_equal(getattr(found, name), getattr(after, name))


def test_the_backbone_is_the_same_file_under_any_head_and_items(net, digits, tmp_path, monkeypatch):
    """By the default exporter of torch, whose graph is the same to the byte."""
    monkeypatch.setattr(agreement, "EXPORTERS", ("dynamo",))
    found = []
    for number, head in enumerate((build_head(96, 5, (12,)), nn.Identity())):
        place = tmp_path / str(number)
        items = digits[0][number : number + 9]
        export_model(Model(net.backbone, head), items, place, name="m", split=True)
        found.append(opened(place))
    assert len({each.backbone_sha256 for each in found}) == 1
    kept = found[0].features(digits[0][:20])
    for each in found:
        assert np.array_equal(each.encode_features(kept).vector, each.encode(digits[0][:20]).vector)
    moved = []
    for place in ("moved", "again"):
        export_model(net, digits[0][:9], tmp_path / place, name="m", split=True)
        moved.append(opened(tmp_path / place).backbone_sha256)
        with torch.no_grad():
            net.backbone.layers[0].weight[0, 0, 0, 0] += 1e-3
    assert moved[0] == found[0].backbone_sha256 != moved[1]


def test_variants_of_a_split_encoder_are_whole(net, digits, tmp_path, exported):
    options = {"variants": ["fp16", "int8"], "calibration": digits[0][40:80], "allow_drift": True}
    manifest = exported(net, digits[0][:40], split=True, **options)
    whole = ["encoder_fp16.onnx", "encoder_int8.onnx"]
    assert sorted(manifest.files) == ["backbone.onnx", *whole, "head.onnx"]
    split, half = opened(tmp_path / "b"), opened(tmp_path / "b", variant="fp16")
    assert np.allclose(half.encode(digits[0]).vector, split.encode(digits[0]).vector, atol=0.02)
    assert split.backbone_sha256 and half.backbone_sha256 is None


FROZEN = """
import torch
from retrieval.plugin import Backbone, Preprocessing, hookimpl

class Filters(Backbone):
    '''Sixteen fixed filters and a batch normalisation whose statistics are not the initial ones.'''

    def __init__(self):
        super().__init__()
        self.preprocessing = Preprocessing((12, 12), 1)
        self.features = 64
        self.filters = torch.nn.Conv2d(1, 16, 5, stride=2)
        self.norm = torch.nn.BatchNorm2d(16)
        numbers = torch.sin(torch.arange(16 * 25) * 1.7)
        with torch.no_grad():
            self.filters.weight.copy_(numbers.view(16, 1, 5, 5))
            self.filters.bias.copy_(numbers[:16])
            self.norm.running_mean.copy_(numbers[16:32])

    def forward(self, x):
        x = torch.relu(self.norm(self.filters(x)))
        return torch.nn.functional.max_pool2d(x, 2).flatten(1)

@hookimpl
def retrieval_backbones():
    return {"filters": Filters}
"""


@pytest.fixture(scope="module")
def frozen(tmp_path_factory):
    """A head that was trained on a frozen backbone, and the plugin's file."""
    folder = tmp_path_factory.mktemp("frozen")
    plugin = folder / "own.py"
    plugin.write_text(FROZEN)
    recipe = {
        "plugins": [str(plugin)],
        "data": {"name": "core.digits"},
        "split": {"by": "class"},
        "backbone": {"name": "own.filters", "frozen": True},
        "head": {"embedding_size": 8},
        "loss": {"name": "pml.contrastive"},
        "sampler": {"classes": 5},
        "train": {"epochs": 2},
    }
    return train(recipe, folder / "run", progress=False), plugin


def test_a_later_head_applies_to_the_features_of_the_first_bundle(frozen, digits, tmp_path):
    run, plugin = frozen
    first = export_backbone(
        "own.filters", tmp_path / "first", plugins=[str(plugin)], split=True, progress=False
    )
    later = export(run, tmp_path / "later", split=True, progress=False).bundle
    assert first.backbone_sha256 == later.backbone_sha256 is not None
    images = np.stack([first.preprocess(image[0]) for image in digits[0][:50]])
    kept = first.features(images)
    assert np.array_equal(kept, first.encode(images).vector)  # its head is the identity
    assert np.array_equal(later.encode_features(kept).vector, later.encode(images).vector)
    assert later.manifest.vector == 8


def test_the_command_splits(frozen, tmp_path):
    run, plugin = frozen
    for words in ([run.path], ["--model", "own.filters", "--plugin", plugin]):
        output = tmp_path / str(len(words))
        command = ["export", *map(str, words), "--split", "--output", str(output)]
        done = CliRunner().invoke(app, command)
        assert done.exit_code == 0, done.output
        content = json.loads((output / "manifest.json").read_text())
        assert halves(content) == ["backbone.onnx", "head.onnx"] and content["encoder"] is None
