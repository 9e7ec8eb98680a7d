"""Any of torchvision's classification models."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

import torch
from pydantic import Field
from retrieval.errors import RecipeError, did_you_mean
from retrieval.plugin import Backbone, Preprocessing
from torch import nn

from retrieval_core.pretrained import Network, fetch, interpolation, reach


def torchvision_model(
    model: str, weights: str | None = None, size: Annotated[int, Field(ge=1)] | None = None
) -> Backbone:
    """Build any classification model of torchvision, without its classifier.

    Features are what the last linear (or, in SqueezeNet, convolutional) layer was given.

    Args:
        model: its name in torchvision, such as "resnet18".
        weights: pretrained weights by their name in torchvision, such as "DEFAULT" or
            "IMAGENET1K_V1", downloaded once; none: random.
        size: height and width of its input, in pixels; by default those of its weights, mostly 224.

    Raises:
        RecipeError: torchvision has no such model, or the model has no such weights.
        ValueError: it does not take images of that size.
        DataError: the weights could not be downloaded.
    """
    from torchvision import models

    names = models.list_models(module=models)
    if model not in names:
        raise RecipeError(
            [
                "[backbone] model: there is no torchvision model"
                f" '{model}'.{did_you_mean(model, names)}"
            ]
        )
    known = models.get_model_weights(model)
    if weights is not None and weights not in known.__members__:
        raise RecipeError(
            [
                f"[backbone] weights: {model} has {', '.join(known.__members__)}, and no"
                f" '{weights}'.{did_you_mean(weights, known.__members__)}"
            ]
        )
    chosen = known[weights] if weights is not None else None
    # without weights too: what they were trained on is what the model was made for
    preprocessing = _preprocessing((chosen or known["DEFAULT"]).transforms(), size)

    def load() -> nn.Module:
        if chosen is not None and not _downloaded(chosen.url):
            reach(chosen.url)  # before a line says that it is being downloaded
        return models.get_model(model, weights=chosen, **_options(model, preprocessing.size[0]))  # type: ignore[no-any-return]

    if chosen is None:
        network = load()
    else:
        network = fetch(f"The weights '{weights}' of {model}", "leave weights out", load)
    _remove_classifier(network)
    return Network(network, preprocessing, model)


def _downloaded(url: str) -> bool:
    return Path(torch.hub.get_dir(), "checkpoints", Path(urlsplit(url).path).name).is_file()


def _preprocessing(transforms: Any, size: int | None) -> Preprocessing:
    crop, resize = transforms.crop_size[0], transforms.resize_size[0]
    size = size or crop
    return Preprocessing(
        (size, size),
        3,
        tuple(transforms.mean),
        tuple(transforms.std),
        interpolation(transforms.interpolation.value),
        round(resize * size / crop),
    )


def _options(model: str, size: int) -> dict[str, Any]:
    """Return the arguments that a few models need."""
    if model in (
        "googlenet",
        "inception_v3",
    ):  # auxiliary classifiers would change what training mode returns
        return {"aux_logits": False, "init_weights": False}
    if model.startswith("vit_"):
        return {"image_size": size}
    return {"input_size": (size, size)} if model.startswith("maxvit") else {}


def _remove_classifier(network: nn.Module) -> None:
    """Put an identity in place of the last linear layer of the network's last part."""
    name, last = list(network.named_children())[-1]
    for kind in (nn.Linear, nn.Conv2d):
        found = [
            path for path, module in last.named_modules(prefix=name) if isinstance(module, kind)
        ]
        if found:
            parent, _, child = found[-1].rpartition(".")
            setattr(network.get_submodule(parent), child, nn.Identity())
            return
    raise ValueError(f"{type(network).__name__} ends in no linear layer that could be removed")
