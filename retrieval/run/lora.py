"""The recipe's `[lora]`: low-rank additions to a backbone's layers, with the library PEFT.

Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models" (ICLR 2022), equation 3: h = W x +
(α / r) B A x. Only A and B are trained. B is zero at first, so that the net is at first unchanged.
"""

from __future__ import annotations

import copy
import re
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from retrieval.errors import RecipeError, did_you_mean, needing, some
from retrieval.model.model import Model
from retrieval.recipe.tables import Lora
from retrieval.run.checkpoint_format import python_random_kept


def adapt(model: Model, lora: Lora) -> None:
    """Add low-rank additions to the chosen layers of a model's backbone, in place.

    Raises:
        MissingDependency: PEFT is not installed.
        RecipeError: a pattern matches no layer, or PEFT rejects the configuration.
    """
    with needing("[lora] needs PEFT", "lora"), python_random_kept():
        import peft
    layers = [
        name
        for name, module in model.backbone.named_modules()
        # Grouped convolutions have few inputs per output, so that a low rank saves nothing.
        if isinstance(module, nn.Linear) or (isinstance(module, nn.Conv2d) and module.groups == 1)
    ]
    unmatched = [p for p in lora.modules if not any(fnmatchcase(name, p) for name in layers)]
    if unmatched or not layers:
        if layers:
            names = f"The names are {some(layers, 5)}."
        else:
            names = "The backbone has no such layer."
        raise RecipeError(
            [
                "[lora] modules: no name of a linear layer or convolution of the backbone matches"
                f" '{pattern}'. {names}{did_you_mean(pattern, layers)}"
                for pattern in unmatched or ["*"]
            ]
        )
    chosen = [name for name in layers if any(fnmatchcase(name, p) for p in lora.modules)]
    alpha: Any = lora.alpha or lora.rank  # PEFT scales the additions by alpha / rank
    configuration = peft.LoraConfig(
        r=lora.rank,
        lora_alpha=alpha,
        lora_dropout=lora.dropout,
        target_modules="|".join(map(re.escape, chosen)),
    )
    try:
        peft.inject_adapter_in_model(configuration, model.backbone)
    except (ValueError, RuntimeError) as error:
        raise RecipeError(f"[lora] modules: PEFT rejects the backbone: {error}.") from error


def merge(model: Model) -> None:
    """Merge the additions into the layers' weights, in place, if the model has any."""
    for name, module in list(model.backbone.named_modules()):
        # Only PEFT's wrapper of a layer has both attributes.
        if hasattr(module, "base_layer") and hasattr(module, "merge"):
            module.merge(safe_merge=True)
            parent, _, child = name.rpartition(".")
            setattr(model.backbone.get_submodule(parent), child, module.base_layer)


def without_additions(model: Model) -> Model:
    """Return a copy of a model with merged additions, or the model itself if it has none."""
    if not any(hasattr(module, "base_layer") for module in model.backbone.modules()):
        return model
    copied = copy.deepcopy(model)
    merge(copied)
    return copied
