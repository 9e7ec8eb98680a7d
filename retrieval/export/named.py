"""A backbone by its name, as it comes: what says whether its weights are pretrained."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from retrieval.errors import BundleError, RecipeError
from retrieval.host.plugins import Plugins
from retrieval.model.contracts import Backbone
from retrieval.model.products import check_backbone
from retrieval.recipe.read import naming

_ASKING = ("pretrained", "weights")
"""What backbones call the parameter that asks for their pretrained weights."""


def named_backbone(
    plugins: Plugins, name: str, parameters: Mapping[str, Any], random_weights: bool
) -> Backbone:
    """Return a backbone of images, built by its name.

    It is built from two seeds: a weight that differs was drawn at random, and is not pretrained. A factory that seeds torch itself
    cannot be seen through.

    Args:
        plugins: where the name is looked for.
        name: `PLUGIN.name`.
        parameters: the backbone's own.
        random_weights: whether weights may be random; the seed is 0 then.

    Raises:
        PluginError: there is no such backbone, or it breaks its contract.
        RecipeError: the parameters do not fit.
        BundleError: it takes vectors, or its weights are random.
    """
    factory = plugins.find("backbones", name)
    if factory.takes("features"):
        raise BundleError(f"{name} takes vectors, not images: it has no features of photos to export.")
    if "name" in parameters:
        raise RecipeError(["[backbone] name: the backbone is named already; leave this out."], name)
    table = {**parameters, "name": name}
    if problems := plugins.check("backbones", table, "[backbone]"):
        raise RecipeError(problems, name)

    def build(seed: int) -> Backbone:
        with naming(name), torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return check_backbone(plugins.build("backbones", table), name)

    backbone = build(0)
    if backbone.preprocessing is None:
        raise BundleError(f"{name} takes vectors, not images: it has no features of photos to export.")
    if not random_weights and (drawn := _differing(backbone, build(1))):
        asking = next((p.name for p in factory.parameters if p.name in _ASKING), None)
        advice = (
            f"Ask for its pretrained weights by its parameter '{asking}', which `retrieval plugins show {name}` explains"
            if asking
            else "Train it (retrieval train), or name another backbone"
        )
        raise BundleError(
            f"The weights of {name} are random: {len(drawn)} of its {len(backbone.state_dict())} tensors differ from one build to "
            f"the next, as '{drawn[0]}' does. {advice}. To export it as it is, say --random-weights (in Python "
            "random_weights=True)."
        )
    return backbone


def _differing(one: Backbone, other: Backbone) -> list[str]:
    """Return the names of the tensors in which two builds differ."""
    theirs = other.state_dict()
    return [
        name
        for name, value in one.state_dict().items()
        if name not in theirs or not torch.equal(value, theirs[name])
    ]
