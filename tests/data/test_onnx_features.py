"""Frozen features by ONNX Runtime equal torch's; torch computes them if ONNX Runtime cannot."""

import logging
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image
from retrieval.data import features
from retrieval.data.datasets import Dataset, FileDataset
from retrieval.data.features import OnnxBackbone, backbone_features, runtime_for
from retrieval.data.loading import RawInputs
from retrieval.errors import DataError, PluginError
from retrieval.images.preprocessing import Preprocessing
from retrieval.model.contracts import Backbone
from retrieval.model.graph import TOLERANCE
from retrieval.model.model import Model
from torch import Tensor, nn

pytest.importorskip("onnxruntime")
pytest.importorskip("onnx")

CPU = torch.device("cpu")
PRE = Preprocessing((24, 20), 3, (0.5, 0.4, 0.3), (0.2, 0.3, 0.4))


class Net(Backbone):
    """A net with batch norm, padding that depends on the image's size, and a residual branch."""

    features = 12
    preprocessing = PRE

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, stride=2)
        self.norm = nn.BatchNorm2d(8)
        self.second = nn.Conv2d(8, 12, 3, padding=1)
        with torch.no_grad():
            for value in (self.norm.running_mean, self.norm.running_var):
                value.uniform_(0.5, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.pad(x, (0, x.shape[-1] % 2 + 1, 0, x.shape[-2] % 2 + 1))
        x = self.second(self.norm(self.first(x)).clamp(0, 6))
        return (x + x.sigmoid()).mean((2, 3))


class OfTheBatch(Net):
    """Features of an item depend on the whole batch, so a graph of another batch size differs."""

    def forward(self, x: Tensor) -> Tensor:
        features = super().forward(x)
        return features - features.mean(0, keepdim=True) * 0.5


class Refused(Net):
    """A net with an operator that torch's exporter does not know."""

    def forward(self, x: Tensor) -> Tensor:
        features = super().forward(x)
        return features + torch.linalg.eigvals(x[:, 0, :2, :2]).abs().sum(1, keepdim=True)


@pytest.fixture(autouse=True)
def small(monkeypatch, tmp_path):
    """Use ONNX Runtime for few items too, and run four images at once."""
    monkeypatch.setattr(features, "LEAST", 1)
    monkeypatch.setattr(features, "_MAX_IMAGES", 4)
    monkeypatch.setenv("RETRIEVAL_CACHE", str(tmp_path / "cache"))
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(threads)


def model(backbone: type[Backbone] = Net) -> Model:
    torch.manual_seed(3)
    return Model(backbone(), nn.Identity())


@pytest.fixture
def photos(tmp_path):
    rng = np.random.default_rng(0)
    files = [tmp_path / f"{i}.jpg" for i in range(27)]
    for i, file in enumerate(files):
        pixels = rng.integers(0, 256, (5, 4, 3), dtype=np.uint8)
        Image.fromarray(pixels).resize((30 + i, 41), Image.Resampling.BICUBIC).save(file)
    return FileDataset(files, ["a"] * len(files))


def of_torch(net: Model, data: Dataset) -> NDArray[np.float32]:
    net.eval()
    pixels = RawInputs(data, net.preprocessing).batch(np.arange(len(data)))
    with torch.no_grad():
        return net.features(torch.from_numpy(pixels)).numpy()


def entries(tmp_path: Path) -> set[str]:
    return {sums.parent.name for sums in tmp_path.glob("cache/features/*/sums") if done(sums)}


def done(sums: Path) -> int:
    """Return the number of finished blocks."""
    content = sums.read_bytes()
    return sum(any(content[i : i + 16]) for i in range(0, len(content), 16))


def test_the_features_equal_torchs(photos, tmp_path):
    net = model().train()
    # 27 items in blocks of 10, four images at once: the last run of each block is filled up.
    actual = backbone_features(net, photos, CPU, 10).arrays
    assert net.backbone.norm.training  # as before
    expected = of_torch(net, photos)
    scale = float(np.linalg.norm(expected, axis=1).mean())
    assert actual.shape == (27, 12) and np.abs(actual - expected).max() <= TOLERANCE * scale
    # The items differ by much more than the tolerance.
    assert np.ptp(expected, axis=0).min() > 10 * TOLERANCE * scale


def test_onnx_runtime_and_torch_have_separate_entries(photos, tmp_path, monkeypatch):
    first = np.array(backbone_features(model(), photos, CPU, 10).arrays)
    quick = entries(tmp_path)
    assert len(quick) == 1

    def refuse(*_):
        raise AssertionError("made again")

    with monkeypatch.context() as patch:  # nothing is exported or computed
        patch.setattr(OnnxBackbone, "_agreed", refuse)
        np.testing.assert_array_equal(first, backbone_features(model(), photos, CPU, 10).arrays)
        patch.setattr(features, "version", lambda _: "0.0")
        with pytest.raises(PluginError, match="made again"):
            backbone_features(model(), photos, CPU, 10)
    with monkeypatch.context() as patch:
        patch.setattr(features, "LEAST", 1 << 60)
        plain = backbone_features(model(), photos, CPU, 10).arrays
    assert len(entries(tmp_path) - quick) == 1
    assert not np.array_equal(plain, first)


def test_an_interrupted_run_continues(photos, tmp_path, monkeypatch):
    whole = np.array(backbone_features(model(), photos, CPU, 5).arrays)
    monkeypatch.setenv("RETRIEVAL_CACHE", str(tmp_path / "other"))
    run, counts = OnnxBackbone.__call__, []

    def interrupted(net, pixels):
        counts.append(len(pixels))
        if len(counts) == 4:
            raise KeyboardInterrupt
        return run(net, pixels)

    with monkeypatch.context() as patch:
        patch.setattr(OnnxBackbone, "__call__", interrupted)
        with pytest.raises(KeyboardInterrupt):
            backbone_features(model(), photos, CPU, 5)
    (sums,) = (tmp_path / "other").rglob("sums")
    blocks = done(sums)
    assert 0 < blocks < 6
    counts[:] = [0] * 4  # no further interruption
    monkeypatch.setattr(OnnxBackbone, "__call__", interrupted)
    np.testing.assert_array_equal(whole, backbone_features(model(), photos, CPU, 5).arrays)
    assert sum(counts) == 27 - 5 * blocks


@pytest.mark.parametrize("backbone", [OfTheBatch, Refused])
def test_without_a_usable_graph_torch_computes(photos, tmp_path, backbone, caplog):
    net = model(backbone)
    with caplog.at_level(logging.INFO):
        actual = backbone_features(net, photos, CPU, len(photos)).arrays
    np.testing.assert_allclose(actual, of_torch(net, photos), rtol=1e-5, atol=1e-6)
    assert "Features are computed by torch: " in caplog.text
    assert len(entries(tmp_path)) == 1


def test_an_item_that_cannot_be_read(photos):
    assert photos.files is not None
    photos.files[13].write_bytes(b"nothing")
    with pytest.raises(DataError, match=r"13\.jpg is not an image"):
        backbone_features(model(), photos, CPU, 10)


def test_when_onnx_runtime_computes(photos, monkeypatch):
    net = model()
    assert (runtime_for(net, photos, CPU) or "").startswith("onnxruntime ")
    assert runtime_for(net, photos, torch.device("cuda")) is None
    monkeypatch.setattr(features, "LEAST", 27 * 3 * 24 * 20)
    assert runtime_for(net, photos, CPU) is not None
    monkeypatch.setattr(features, "LEAST", 27 * 3 * 24 * 20 + 1)
    assert runtime_for(net, photos, CPU) is None
    monkeypatch.setattr(features, "LEAST", 1)
    monkeypatch.setattr(
        features, "installed_packages", lambda names: [n for n in names if n != "onnx"]
    )
    assert runtime_for(net, photos, CPU) is None
