"""Check each part that a plugin's factory returns, once, before its first use."""

from __future__ import annotations

import contextlib
import hashlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any, Literal, TypeVar, cast

import numpy as np
import torch
from torch import Tensor, nn

from retrieval.base.arrays import Array, Bools, Floats64, Ints
from retrieval.errors import BundleError, DataError, PluginError
from retrieval.host.factory import calling
from retrieval.images.preprocessing import Preprocessing
from retrieval.model.contracts import (
    Backbone,
    Combiner,
    Generator,
    PooledHits,
    TextEncoder,
    breach,
    in_words,
    refuse_class,
)
from retrieval.model.model import TextPart, checked_rows, evaluation_mode


@contextlib.contextmanager
def untouched(*modules: nn.Module) -> Iterator[None]:
    """Context manager: evaluation mode without gradients; restores modes and random state."""
    with evaluation_mode(*modules), torch.no_grad(), torch.random.fork_rng(devices=[]):
        yield


P = TypeVar("P", Backbone, Combiner, Generator)


def check_kind(product: Any, kind: type[P], name: str) -> P:
    """Return a factory's product if it is of the right kind, else raise a `PluginError`."""
    if not isinstance(product, kind):
        raise PluginError(
            f"{name} gave {in_words(product)}; a {kind.__name__.lower()} factory must give a"
            f" retrieval.plugin.{kind.__name__}."
        )
    return product


def check_backbone(product: Any, name: str) -> Backbone:
    """Return a backbone if its type and attributes are valid, else raise a `PluginError`."""
    backbone = check_kind(product, Backbone, name)
    features = getattr(backbone, "features", None)
    preprocessing = backbone.preprocessing
    if not isinstance(features, int) or features < 1:
        raise PluginError(
            f"The backbone {name} has features = {in_words(features)}; it must be the width of the"
            " output of forward, a whole number."
        )
    if preprocessing is not None and not isinstance(preprocessing, Preprocessing):
        raise PluginError(
            f"The backbone {name} has preprocessing = {in_words(preprocessing)}; it must be a"
            " retrieval.plugin.Preprocessing, or None for vectors."
        )
    return backbone


def check_generator(product: Any, name: str) -> Generator:
    """Return a generator if its type and attributes are valid, else raise a `PluginError`."""
    generator = check_kind(product, Generator, name)
    allowed = {"replaces": ("positive", "negative"), "space": ("features", "embeddings")}
    for part, (first, second) in allowed.items():
        value = getattr(generator, part)
        if value not in (first, second):
            raise PluginError(
                f'The generator {name} has {part} = {value!r}; it must be "{first}" or "{second}".'
            )
    return generator


def check_head(head: Any, what: str, features: int) -> nn.Module:
    """Return a head if it maps features (B, F) to codes (B, C), else raise a `PluginError`."""
    if not isinstance(head, nn.Module):
        must = f"a module from features (B, {features}) to codes (B, C)."
        raise breach(what, head, must, " as the head")
    weight = next(head.parameters(), torch.empty(0))
    with calling(f"{what}'s head"), untouched(head):
        codes = head(torch.zeros(2, features, device=weight.device))
    checked_rows(codes, f"{what}'s head", (2, -1), weight.device, "codes")
    return head


def check_text_encoder(encoder: Any, name: str) -> int:
    """Return the number of features of a text encoder that keeps its contract.

    Raises:
        PluginError: it is no module, its tokenizer does not fit, or it gives no features.
    """
    what = f"The text encoder {name}"
    if not isinstance(encoder, nn.Module):
        raise breach(what, encoder, "a retrieval.plugin.TextEncoder.")
    length = getattr(encoder, "length", None)
    content = getattr(encoder, "tokenizer", None)
    if not isinstance(length, int) or not 1 <= length <= 4096 or not isinstance(content, bytes):
        raise PluginError(
            f"{what} has length = {in_words(length)} and tokenizer = {in_words(content)}; they must"
            " be the largest number of tokens, 1 to 4,096, and the content of a tokenizer.json."
        )
    try:
        part = TextPart(cast(TextEncoder, encoder), nn.Identity())
        tokens = part.tokens(["a photo", "a photo of two red mugs"])
    except (BundleError, DataError) as fault:
        raise PluginError(f"{what}: {fault}") from fault
    with calling(what), untouched(encoder):
        features = part.features(tokens)
        alone = part.features(part.tokens(["a photo"]))
    checked_rows(features, what, (2, -1), tokens.device, "features")
    if not torch.allclose(features[:1], alone, rtol=1e-3, atol=1e-3 * float(alone.abs().max())):
        raise PluginError(f"{what} gives other features for padded texts: it must use the mask.")
    return int(features.shape[1])


def check_distances(
    combiner: Combiner,
    name: str,
    head: nn.Module,
    features: int,
) -> Combiner:
    """Return a combiner if its distances have the right shapes, else raise a `PluginError`."""
    what = f"The combiner {name}"
    if combiner.is_inverted:
        raise PluginError(
            f"{what} has is_inverted = True, as a similarity has; a combiner is a distance, smaller"
            " for closer items."
        )
    with calling(what), untouched(head, combiner):
        codes = head(torch.randn(3, features))
        # Fewer references than queries, so that swapped axes show.
        mat = combiner.compute_mat(codes, codes[:2])
        rows = combiner.pairwise_distance(codes, codes)
    of = "a distance for each query and reference"
    checked_rows(mat, f"{what}'s compute_mat", (3, 2), codes.device, of)
    if not (isinstance(rows, Tensor) and rows.shape == (3,)):
        must = "one distance per row, of shape (3,)."
        raise breach(f"{what}'s pairwise_distance", rows, must)
    return combiner


def check_learner(learner: Any, name: str) -> None:
    """Raise a `PluginError` if a learner lacks a method or is a class."""
    methods = ("fit", "transform", "to_model_parts")
    missing = [method for method in methods if not callable(getattr(learner, method, None))]
    fault = ""
    if missing:
        fault = f"without {', '.join(missing)}"
    elif inspect.isclass(learner):
        fault = "(a class, not an instance)"
    if fault:
        raise PluginError(
            f"{name} gave {in_words(learner)} {fault}; a learner must have fit, transform and"
            " to_model_parts."
        )


def model_parts(learner: Any, name: str, features: int) -> tuple[nn.Module, Combiner | None]:
    """Return a fitted learner's head and combiner."""
    what = f"The learner {name}"
    with calling(f"{what}, asked for to_model_parts(),"):
        parts = learner.to_model_parts()
    if not isinstance(parts, tuple) or len(parts) != 2:
        must = "the head, and a combiner or None."
        raise breach(what, parts, must, " from to_model_parts")
    head, combiner = parts
    check_head(head, what, features)
    if combiner is not None and not isinstance(combiner, Combiner):
        raise PluginError(
            f"{what} gave {in_words(combiner)} as its combiner; it must be a"
            " retrieval.plugin.Combiner or None."
        )
    return head, combiner


class CheckedMetric:
    """A plugin's metric, checked to return one number per query.

    Attributes:
        finite: whether NaN and infinite values are refused. Otherwise both become NaN.
    """

    def __init__(self, metric: Any, name: str) -> None:
        self.finite = True
        self.metric = metric
        self.what = f"The metric {name}"
        refuse_class(metric, self.what)
        depth = getattr(metric, "depth", None)
        # True is an int for Python, but no number of neighbours.
        is_count = isinstance(depth, int) and not isinstance(depth, bool) and depth >= 1
        is_pooled = hasattr(metric, "pooled")
        is_depth = is_count or (depth in ("relevant", "all") and not is_pooled)
        if not (callable(metric) or is_pooled) or not is_depth:
            raise PluginError(
                f"{self.what} is {in_words(metric)} with depth = {depth!r}; it must be callable,"
                ' and depth a number of neighbours, "relevant" or "all".'
            )
        self.depth = cast("int | Literal['relevant', 'all']", depth)
        self.larger_is_better = bool(getattr(metric, "larger_is_better", True))

    def __call__(self, matches: Bools, relevant: Ints) -> Floats64:
        """Return one value per query (Q,); see `retrieval.plugin.Metric`."""
        return self._checked(len(matches), self.metric, matches, relevant)

    @property
    def graded(self) -> Callable[[Any, Any], Floats64] | None:
        """The metric's checked `graded` method, or None; see `retrieval.plugin.Metric`."""
        graded = getattr(self.metric, "graded", None)
        if graded is None:
            return None
        return lambda gains, ideal: self._checked(len(gains), graded, gains, ideal)

    @property
    def pooled(self) -> Callable[[PooledHits], float] | None:
        """The metric's checked `pooled` method, or None; see `retrieval.plugin.Metric`."""
        pooled = getattr(self.metric, "pooled", None)
        if pooled is None:
            return None
        return lambda hits: float(self._checked(1, lambda: [pooled(hits)])[0])

    def _checked(
        self,
        queries: int,
        call: Callable[..., Any],
        *arrays: Any,
    ) -> Floats64:
        with calling(self.what):
            result = call(*arrays)
        values: Array = np.empty(())
        # A list of lists of unequal length, or a tensor on a GPU, becomes no array.
        with contextlib.suppress(ValueError, TypeError):
            values = np.asarray(result)
        if values.shape != (queries,) or values.dtype.kind not in "fiub":
            raise breach(self.what, result, f"one number per query, of shape ({queries},).")
        values = values.astype(np.float64)
        wrong = ~np.isfinite(values)
        if self.finite and wrong.any():
            raise PluginError(
                f"{self.what} gave NaN or infinite values for {wrong.sum()} of {queries} queries."
            )
        values[wrong] = np.nan
        return values


IMAGENET = Preprocessing(
    (224, 224),
    channels=3,
    mean=(0.485, 0.456, 0.406),
    std=(0.229, 0.224, 0.225),
    resize=256,
)
"""The default: the preprocessing that most networks trained on ImageNet expect."""


class ModuleBackbone(Backbone):
    """Adapter that turns any torch module into a backbone.

    Args:
        module: maps images or vectors (B, F') to features (B, F). Its attribute `preprocessing`,
            if any, replaces `IMAGENET`.
        name: the module's name, for error messages.
        width: width F' of the dataset's vectors; `None` for images.
    """

    def __init__(
        self,
        module: nn.Module,
        name: str,
        width: int | None,
    ) -> None:
        super().__init__()
        self.module = module
        shape: tuple[int, ...] = () if width is None else (width,)
        if width is None:
            self.preprocessing = getattr(module, "preprocessing", None) or IMAGENET
            if isinstance(self.preprocessing, Preprocessing):  # else `check_backbone` raises
                shape = (self.preprocessing.channels, *self.preprocessing.size)
        weight = next(module.parameters(), torch.empty(0))
        # The same in every process, because the hash of the output is part of the cache's key.
        generator = torch.Generator().manual_seed(0)
        probe = torch.rand(2, *shape, generator=generator).to(weight.device)
        what = f"The backbone {name}"
        output = torch.zeros(2, 1)
        if shape:
            with calling(what), untouched(module):
                output = module(probe)
        features = checked_rows(output, what, (2, -1), weight.device, "features")
        self.features = int(features.shape[1])
        content = features.float().cpu().numpy().tobytes()
        self._output_hash = hashlib.blake2b(content, digest_size=16).hexdigest()

    def forward(self, inputs: Tensor) -> Tensor:
        """Return features (B, F) of normalised images or vectors."""
        features: Tensor = self.module(inputs)
        return features

    def extra_repr(self) -> str:
        """Return a hash of the module's outputs, by which the feature cache tells modules apart."""
        return f"behaves={self._output_hash}"


def as_backbone(product: Any, name: str, width: int | None) -> Any:
    """Wrap a torch module as a backbone; return backbones and other objects unchanged."""
    if isinstance(product, Backbone) or not isinstance(product, nn.Module):
        return product
    return ModuleBackbone(product, name, width)
