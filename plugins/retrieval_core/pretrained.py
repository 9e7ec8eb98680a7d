"""What torchvision's and timm's models have in common here: a width that is measured, and weights
whose download may fail.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar
from urllib.parse import urlsplit
from urllib.request import getproxies

import torch
from retrieval.errors import DataError
from retrieval.plugin import Backbone, Preprocessing
from retrieval.serving.images import Interpolation
from torch import Tensor, nn

T = TypeVar("T")


class Network(Backbone):
    """A classification network without its classifier.

    Args:
        network: images (B, channels, H, W) → features (B, F).
        preprocessing: what an image goes through before.
        name: what to call it in an error.

    Raises:
        ValueError: the model does not take images of that size, or does not give one vector per
            image.
    """

    preprocessing: Preprocessing

    def __init__(self, network: nn.Module, preprocessing: Preprocessing, name: str) -> None:
        super().__init__()
        self.network = network
        self.preprocessing = preprocessing
        training = network.training
        try:
            with (
                torch.no_grad()
            ):  # in evaluation mode, so that no batch statistic moves and nothing random is drawn
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
    """Return an interpolation by its name there; anything that Pillow does not have is taken as
    bilinear.
    """
    known: dict[str, Interpolation] = {
        "nearest": "nearest",
        "bicubic": "bicubic",
        "lanczos": "lanczos",
    }
    return known.get(name.rpartition(".")[2].lower(), "bilinear")


@contextmanager
def hub_from_cache_when_away() -> Iterator[None]:
    """Inside, Hugging Face's hub is not asked when it cannot be reached: it would be asked again
    and again for a minute.

    What the cache holds is found all the same.
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
    """Connect to the host of an address, and leave it; behind a proxy, which alone knows the way,
    do nothing.

    Raises:
        OSError: the host cannot be reached.
    """
    if getproxies().get("https"):
        return
    place = urlsplit(address)
    try:
        socket.create_connection((place.hostname or "", place.port or 443), timeout=5).close()
    except OSError as error:
        raise OSError(f"{place.hostname} cannot be reached: {error.strerror or error}") from error


def fetch(what: str, instead: str, load: Callable[[], T]) -> T:
    """Return what `load` downloads, or says in one sentence why that cannot be.

    Args:
        what: "the weights … of …".
        instead: what to do without, as the end of a sentence.
        load: downloads, or reads what was downloaded before.

    Raises:
        DataError: the download failed.
    """
    try:
        return load()
    except Exception as error:  # each hub has errors of its own, down to those of its HTTP library
        reason = (str(error).strip() or type(error).__name__).split("\n")[0].rstrip(".")
        raise DataError(
            f"{what} could not be loaded ({reason}). They are downloaded once, then read from the"
            f" user's cache: connect to the network, or {instead}."
        ) from error
