"""Networks with pretrained weights as backbones: their downloads, and what they have in common."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar, cast, get_args
from urllib.parse import urlsplit
from urllib.request import getproxies

import torch
from torch import Tensor, nn
from torch.nn import functional

from retrieval.errors import DataError, first_line
from retrieval.images.preprocessing import Interpolation, Preprocessing
from retrieval.model.contracts import Backbone

T = TypeVar("T")


class Network(Backbone):
    """A classification network without its classifier.

    Args:
        network: maps images (B, channels, H, W) to features (B, F).
        preprocessing: preprocessing of the images.
        name: name of the model in error messages.
        normalise: whether to scale the features of each image to length 1.

    Raises:
        ValueError: the model does not accept images of that size, or does not return one vector per
            image.
    """

    preprocessing: Preprocessing

    def __init__(
        self, network: nn.Module, preprocessing: Preprocessing, name: str, normalise: bool = False
    ) -> None:
        super().__init__()
        self.network = network
        self.normalise = normalise
        self.preprocessing = preprocessing
        try:
            shape = tuple(tried(network, network, preprocessing).shape)
        except (RuntimeError, AssertionError, ValueError) as error:
            height, width = preprocessing.size
            raise ValueError(
                f"{name} does not accept images of {height} × {width} pixels ({first_line(error)})"
            ) from error
        if len(shape) != 2:
            raise ValueError(f"{name} returns shape {shape} for one image, not a vector")
        self.features = shape[1]

    def forward(self, x: Tensor) -> Tensor:
        """Return features (B, F) of images (B, channels, H, W)."""
        features: Tensor = self.network(x)
        if self.normalise:
            return functional.normalize(features)
        return features


def interpolation(name: str) -> Interpolation:
    """Return the `Preprocessing` interpolation of this name, or "bilinear" if there is none."""
    short: Any = name.rpartition(".")[2].lower()
    if short not in get_args(Interpolation):
        short = "bilinear"
    return cast(Interpolation, short)


@contextmanager
def hub_from_cache_when_away() -> Iterator[None]:
    """Context manager in which Hugging Face's client uses its cache if the hub is unreachable.

    Without it, the client would retry for about a minute.
    """
    from huggingface_hub import constants

    # The client has read the environment on import; only its constant still counts.
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
    """Check that the host of a URL can be reached; do nothing if a proxy is configured.

    Raises:
        OSError: the host cannot be reached.
    """
    if getproxies().get("https"):
        return
    url = urlsplit(address)
    try:
        socket.create_connection((url.hostname or "", url.port or 443), timeout=5).close()
    except OSError as error:
        raise OSError(f"{url.hostname} cannot be reached: {error.strerror or error}") from error


def fetch(what: str, advice: str, load: Callable[[], T]) -> T:
    """Call `load`, which downloads a model, and return its result.

    Args:
        what: subject of the error message, in the plural.
        advice: end of the error message: what users without a network can do instead.
        load: downloads and returns the model.

    Raises:
        DataError: `load` failed.
    """
    try:
        return load()
    except Exception as error:  # each hub raises its own errors, or those of its HTTP library
        raise DataError(
            f"{what} could not be loaded ({first_line(error)}). They are downloaded once and then"
            f" read from the user's cache. Connect to the network, or {advice}."
        ) from error


def tried(module: nn.Module, call: Callable[[Tensor], T], preprocessing: Preprocessing) -> T:
    """Return the result of `call` for one black image, with the module in evaluation mode."""
    training = module.training
    # Evaluation mode changes no batch statistic and draws no random number.
    module.eval()
    try:
        with torch.no_grad():
            return call(torch.zeros(1, *preprocessing.shape))
    finally:
        module.train(training)
