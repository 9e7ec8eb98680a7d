"""`Model`: the backbone, head and optional combiner that every training method returns.

`checked_rows` checks what these parts return on every call; an error names the part and its fault.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from retrieval.base.arrays import Floats
from retrieval.errors import PluginError
from retrieval.host.factory import calling
from retrieval.images.preprocessing import Preprocessing
from retrieval.model.contracts import Backbone, Combiner, TextEncoder, breach


def full_precision(x: Tensor) -> Tensor:
    """Return half-precision tensors as float32, and others unchanged."""
    if x.dtype in (torch.float16, torch.bfloat16):
        return x.float()
    return x


@contextlib.contextmanager
def evaluation_mode(*modules: nn.Module) -> Iterator[None]:
    """Context manager: evaluation mode; restores each submodule's previous mode."""
    modes = {part: part.training for module in modules for part in module.modules()}
    for module in modules:
        module.eval()
    try:
        yield
    finally:
        for part, training in modes.items():
            part.training = training


class Normalise(nn.Module):
    """Scale each row to unit Euclidean length; a zero row stays zero."""

    def forward(self, x: Tensor) -> Tensor:
        """Return unit vectors (B, D) of (B, D), at least in float32 even under autocast."""
        return functional.normalize(full_precision(x), dim=-1)


class Prefix(nn.Module):
    """Keep the first columns of each row."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width

    def forward(self, x: Tensor) -> Tensor:
        """Return the first `width` columns (B, width) of (B, D)."""
        return x[:, : self.width]


def build_head(
    features: int,
    embedding_size: int,
    hidden: Sequence[int] = (),
    normalise: bool = True,
) -> nn.Sequential:
    """Return the default head: linear layers with ReLU between them, then unit length."""
    widths = [features, *hidden]
    layers: list[nn.Module] = []
    for width_in, width_out in itertools.pairwise(widths):
        layers += [nn.Linear(width_in, width_out), nn.ReLU()]
    layers.append(nn.Linear(widths[-1], embedding_size))
    if normalise:
        layers.append(Normalise())
    return nn.Sequential(*layers)


class TextPart(nn.Module):
    """Maps texts to codes: a tokenizer, a text encoder and a head.

    Args:
        encoder: maps tokens to features.
        head: maps features to codes, as wide as those of images.
        frozen: whether the encoder's weights are fixed.
    """

    def __init__(self, encoder: TextEncoder, head: nn.Module, frozen: bool = False) -> None:
        # most models have no part for texts, and need nothing of a bundle
        from retrieval.bundle.text import Tokenizer

        super().__init__()
        self.encoder = encoder
        self.head = head
        self.frozen = frozen
        self.tokenizer = Tokenizer(Path("tokenizer.json"), encoder.tokenizer, encoder.length)
        if frozen:
            encoder.requires_grad_(False)

    def tokens(self, texts: Sequence[str]) -> Tensor:
        """Return the ids and the mask (N, 2, L), int64, of N texts."""
        return torch.from_numpy(np.stack([*self.tokenizer(texts).values()], 1))

    def features(self, tokens: Tensor) -> Tensor:
        """Return features (N, F) of tokens (N, 2, L)."""
        features: Tensor = self.encoder(*tokens.unbind(1))
        return full_precision(features)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        """Return codes (N, C) of ids and mask (N, L)."""
        codes: Tensor = self.head(full_precision(self.encoder(ids, mask)))
        return codes

    def train(self, mode: bool = True) -> Self:
        """Set the mode of all parts, except that a frozen encoder stays in evaluation mode."""
        super().train(mode)
        if self.frozen:
            self.encoder.eval()
        return self


class Model(nn.Module):
    """Maps images or vectors to features (the backbone's output) and codes (the head's output).

    Inputs are raw uint8 pixels (B, channels, H, W) or float vectors (B, F'). The model itself
    scales pixels to 0–1 and normalises them with the backbone's mean and standard deviation, so
    that the exported ONNX graph takes the same input as the torch model.

    Args:
        backbone: maps inputs to features.
        head: maps features to codes.
        combiner: computes the distance between codes; `None` for the Euclidean distance.
        text: maps texts to codes in the same space; `None` for a model of images alone.
    """

    def __init__(
        self,
        backbone: Backbone,
        head: nn.Module,
        combiner: Combiner | None = None,
        text: TextPart | None = None,
    ) -> None:
        super().__init__()
        self.backbone = backbone
        self.head = head
        self.combiner = combiner
        self.text = text
        self.channels_last = False
        if self.preprocessing is not None:
            mean = torch.tensor(self.preprocessing.mean).view(1, -1, 1, 1)
            std = torch.tensor(self.preprocessing.std).view(1, -1, 1, 1)
            # Not persistent: they follow from the backbone's preprocessing.
            self.register_buffer("scale", 1 / (255 * std), persistent=False)
            self.register_buffer("shift", -mean / std, persistent=False)

    @property
    def preprocessing(self) -> Preprocessing | None:
        """The backbone's preprocessing, or None for vectors."""
        return self.backbone.preprocessing

    @property
    def device(self) -> torch.device:
        """The device of the first parameter or buffer; the CPU if there is none."""
        for tensor in itertools.chain(self.parameters(), self.buffers()):
            return tensor.device
        return torch.device("cpu")

    def features(self, inputs: Tensor) -> Tensor:
        """Return features (B, F) of raw pixels or vectors."""
        x = inputs.float()
        if self.preprocessing is not None:
            x = x * self.get_buffer("scale") + self.get_buffer("shift")
            if self.channels_last:
                x = _channels_last(x)
        features: Tensor = self.backbone(x)
        return features

    def forward(self, inputs: Tensor, from_features: bool = False) -> tuple[Tensor, Tensor]:
        """Return features (B, F) and codes (B, C).

        Args:
            inputs: raw pixels or vectors, or features (B, F) of a frozen backbone.
            from_features: whether `inputs` are features.
        """
        if from_features:
            features = inputs.float()
        else:
            features = self.features(inputs)
        return features, self.head(features)

    def distances(self, query: Tensor, reference: Tensor) -> Tensor:
        """Return distances (Q, R) between codes (Q, C) and (R, C); smaller is closer."""
        if self.combiner is not None:
            return self.combiner.compute_mat(query, reference)
        # The product of matrices would be faster, but cancels digits of small distances.
        return torch.cdist(
            query.float(), reference.float(), compute_mode="donot_use_mm_for_euclid_dist"
        )

    def feature_distance(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the learned distances (T,) between features (T, F) and (T, F), row by row."""
        return self.code_distance(self.head(x), self.head(y))

    def code_distance(self, x: Tensor, y: Tensor) -> Tensor:
        """Return distances (T,) between codes (T, C) and (T, C), row by row."""
        if self.combiner is not None:
            return self.combiner.pairwise_distance(x, y)
        # 1e-12 keeps the gradient of the root finite at zero.
        squares = (x - y).square().sum(-1)
        return (squares + 1e-12).sqrt()


def _channels_last(images: Tensor) -> Tensor:
    if images.shape[1] > 1:
        return images.contiguous(memory_format=torch.channels_last)
    # With one channel, both formats have the same order in memory, so torch would keep the strides.
    images = images.contiguous()
    strides = (images.stride(0), 1, images.stride(2), 1)
    return images.as_strided(images.shape, strides)


class Shift(nn.Module):
    """Subtract a vector from each row.

    A linear layer's bias could do the same, but a large offset would cost precision there.
    """

    def __init__(self, offset: Tensor) -> None:
        super().__init__()
        self.register_buffer("offset", offset)

    def forward(self, x: Tensor) -> Tensor:
        """Return `x` (B, F) minus the offset."""
        return x - self.get_buffer("offset")


def linear_head(components: Floats, mean: Floats) -> nn.Sequential:
    """Return the float32 module x ↦ components · (x − mean), from features (B, F) to (B, C)."""
    width, features = components.shape
    linear = nn.Linear(features, width, bias=False)
    with torch.no_grad():
        linear.weight.copy_(torch.from_numpy(np.array(components, dtype=np.float32)))
    # A copy, so that changing the learner's attributes does not change the head.
    offset = torch.from_numpy(np.array(mean, dtype=np.float32))
    return nn.Sequential(Shift(offset), linear)


def checked_rows(
    value: Any,
    what: str,
    like: tuple[int, int],
    device: torch.device,
    of: str,
) -> Tensor:
    """Return a value if it is a floating-point matrix of the expected shape and device.

    Args:
        value: features, codes or distances.
        what: the part that returned the value, for error messages.
        like: the expected shape; a width of −1 allows any.
        device: the expected device.
        of: what the value should be, for error messages, such as "codes".

    Raises:
        PluginError: the value has another type, shape or device.
    """
    rows, width = like
    is_matrix = isinstance(value, Tensor) and value.ndim == 2 and value.is_floating_point()
    if not is_matrix or len(value) != rows or width not in (-1, value.shape[1]):
        expected = f"({rows}, {'any width' if width < 0 else width})"
        raise breach(what, value, f"{of}: floating-point numbers of shape {expected}.")
    if value.device != device:
        raise PluginError(f"{what} gave {of} on {value.device}; its input is on {device}.")
    matrix: Tensor = value
    return matrix


def check_width(features: Any, what: str, width: int) -> None:
    """Raise a `PluginError` if features do not have the width that their backbone states."""
    if features.ndim != 2 or features.shape[1] != width:
        must = f"features of its stated width, of shape ({len(features)}, {width})."
        raise breach(what, features, must)


def combiner_warnings(
    combiner: Combiner | None,
    metrics: Mapping[str, float],
    what: str,
) -> list[str]:
    """Return a combiner's warnings for the user."""
    if combiner is None:
        return []
    with calling(what):
        sentences: Any = combiner.warnings(metrics)
        # Each character of a single sentence would become a warning.
        if isinstance(sentences, str):
            sentences = [sentences]
        return [str(sentence) for sentence in sentences]
