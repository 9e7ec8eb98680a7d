"""`[lora]`: low-rank additions to a backbone's layers, through PEFT.

Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models" (ICLR 2022), equation 3: h = W x +
(α / r) B A x, where only A and B train and B starts at zero, so the start is the pretrained net.
"""

from __future__ import annotations

import copy
import re
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from retrieval.data.error_lists import some
from retrieval.errors import MissingDependency, RecipeError, did_you_mean
from retrieval.model.model import Model
from retrieval.recipe.tables import Lora
from retrieval.run.checkpoint import python_random_kept


def adapt(model: Model, lora: Lora) -> None:
    """Add low-rank additions to the chosen layers of a model's backbone, in place.

    Raises:
        MissingDependency: PEFT is not installed.
        RecipeError: a pattern covers no layer, or PEFT refuses a layer.
    """
    try:
        with python_random_kept():
            import peft
    except ImportError as error:
        raise MissingDependency(
            "[lora] needs PEFT. Install it: pip install 'embedding-retrieval[lora]'"
        ) from error
    layers = [
        name
        for name, module in model.backbone.named_modules()
        # a grouped convolution has few inputs per output, so a low rank saves nothing
        if isinstance(module, nn.Linear) or (isinstance(module, nn.Conv2d) and module.groups == 1)
    ]
    idle = [p for p in lora.modules if not any(fnmatchcase(name, p) for name in layers)]
    if idle or not layers:
        have = f"It has {some(layers, 5) or 'none'}."
        raise RecipeError(
            [
                "[lora] modules: no name of a linear layer or convolution of the backbone matches"
                f" '{pattern}'. {have}{did_you_mean(pattern, layers)}"
                for pattern in idle or ["*"]
            ]
        )
    chosen = [name for name in layers if any(fnmatchcase(name, p) for p in lora.modules)]
    alpha: Any = lora.alpha or lora.rank  # peft divides it by the rank
    configuration = peft.LoraConfig(
        r=lora.rank,
        lora_alpha=alpha,
        lora_dropout=lora.dropout,
        target_modules="|".join(map(re.escape, chosen)),
    )
    try:
        peft.inject_adapter_in_model(configuration, model.backbone)
    except (ValueError, RuntimeError) as error:
        raise RecipeError(f"[lora] modules: PEFT refuses the backbone: {error}.") from error


def merge(model: Model) -> None:
    """Merge the additions into the layers' weights, in place; without additions do nothing."""
    for name, module in list(model.backbone.named_modules()):
        if hasattr(module, "base_layer") and hasattr(module, "merge"):
            module.merge(safe_merge=True)
            parent, _, child = name.rpartition(".")
            setattr(model.backbone.get_submodule(parent), child, module.base_layer)


def without_additions(model: Model) -> Model:
    """Return a copy with merged additions, or the model itself if it has none."""
    if not any(hasattr(module, "base_layer") for module in model.backbone.modules()):
        return model
    copied = copy.deepcopy(model)
    merge(copied)
    return copied
