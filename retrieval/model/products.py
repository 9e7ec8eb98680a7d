"""What a plugin's factory made is checked once, before anything relies on it; see
`retrieval.model.guard` for what its calls give.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any, Literal, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from retrieval.errors import PluginError
from retrieval.host.plugin_calls import calling
from retrieval.model.contracts import Backbone, Combiner, Generator
from retrieval.model.guard import checked_rows, shown
from retrieval.serving.images import Preprocessing


@contextlib.contextmanager
def untouched(*modules: nn.Module) -> Iterator[None]:
    """Evaluation mode and no gradients inside; modes and the random generator, which a seed counts
    on, are as before after.
    """
    modes = {each: each.training for module in modules for each in module.modules()}
    for module in modules:
        module.eval()
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            yield
    finally:
        for each, training in modes.items():
            each.training = training


def check_backbone(backbone: Any, name: str) -> Backbone:
    """Return a backbone that has what the host reads of it.

    Raises:
        PluginError: the backbone lacks an attribute that the host reads.
    """
    if not isinstance(backbone, Backbone):
        raise PluginError(
            f"{name} gave {shown(backbone)}; a backbone factory must give a retrieval.plugin.Backbone."
        )
    features = getattr(backbone, "features", None)
    if not isinstance(features, int) or isinstance(features, bool) or features < 1:
        raise PluginError(
            f"The backbone {name} has features = {shown(features)}; it must be the width of what"
            " forward gives, a whole number."
        )
    preprocessing = getattr(backbone, "preprocessing", None)
    if preprocessing is not None and not isinstance(preprocessing, Preprocessing):
        raise PluginError(
            f"The backbone {name} has preprocessing = {shown(preprocessing)}; it must be a"
            " retrieval.plugin.Preprocessing, or None for vectors."
        )
    return backbone


def check_generator(generator: Any, name: str) -> Generator:
    """Return a generator that says whose place it takes.

    Raises:
        PluginError: the factory did not make a generator, or the generator does not say it.
    """
    if not isinstance(generator, Generator):
        raise PluginError(
            f"{name} gave {shown(generator)}; a generator factory must give a retrieval.plugin.Generator."
        )
    if generator.replaces not in ("positive", "negative"):
        raise PluginError(
            f'The generator {name} has replaces = {generator.replaces!r}; it must be "positive" or'
            ' "negative".'
        )
    return generator


def check_head(head: Any, what: str, features: int) -> nn.Module:
    """Return a head that turns features (B, F) into codes.

    Raises:
        PluginError: the head is not a module, or gives something else.
    """
    if not isinstance(head, nn.Module):
        raise PluginError(
            f"{what} gave {shown(head)} as the head; it must give a module from features (B,"
            f" {features}) to codes (B, C)."
        )
    first = next(head.parameters(), torch.empty(0))
    with calling(f"{what}'s head"), untouched(head):
        codes = head(torch.zeros(2, features, device=first.device))
    checked_rows(codes, f"{what}'s head", (2, -1), first.device, "codes")
    return head


def check_combiner(combiner: Any, name: str) -> Combiner:
    """Return a combiner.

    Raises:
        PluginError: the factory did not make a combiner.
    """
    if not isinstance(combiner, Combiner):
        raise PluginError(
            f"{name} gave {shown(combiner)}; a combiner factory must give a retrieval.plugin.Combiner."
        )
    return combiner


def check_distances(combiner: Combiner, name: str, head: nn.Module, features: int) -> Combiner:
    """Return a combiner whose distances have the right shapes.

    Args:
        combiner: the combiner.
        name: its name.
        head: its head, features → codes.
        features: F.

    Raises:
        PluginError: a distance is missing, fails, or has another shape.
    """
    what = f"The combiner {name}"
    with calling(what), untouched(head, combiner):
        codes = head(torch.randn(3, features))
        mat = combiner.compute_mat(codes, codes[:2])
        rows = combiner.pairwise_distance(codes, codes)
    checked_rows(
        mat,
        f"{what}'s compute_mat",
        (3, 2),
        codes.device,
        "a distance for each query and reference",
    )
    if not (isinstance(rows, Tensor) and rows.shape == (3,)):
        raise PluginError(
            f"{what}'s pairwise_distance gave {shown(rows)}; it must give one distance per row, of"
            " shape (3,)."
        )
    return combiner


def check_learner(learner: Any, name: str) -> None:
    """Refuse a learner that lacks a method.

    Raises:
        PluginError: with all that are missing.
    """
    missing = [
        m for m in ("fit", "transform", "to_model_parts") if not callable(getattr(learner, m, None))
    ]
    if missing or inspect.isclass(learner):
        raise PluginError(
            f"{name} gave {shown(learner)} without {', '.join(missing) or 'being made'}; a learner"
            " must have fit, transform and to_model_parts."
        )


def model_parts(learner: Any, name: str, features: int) -> tuple[nn.Module, Combiner | None]:
    """Return a fitted learner's head and combiner.

    Raises:
        PluginError: the learner fails, or gives anything else.
    """
    what = f"The learner {name}"
    with calling(f"{what}, asked for to_model_parts(),"):
        parts = learner.to_model_parts()
    if not isinstance(parts, tuple) or len(parts) != 2:
        raise PluginError(
            f"{what} gave {shown(parts)} from to_model_parts; it must give the head, and a combiner"
            " or None."
        )
    head, combiner = parts
    check_head(head, what, features)
    if combiner is not None and not isinstance(combiner, Combiner):
        raise PluginError(
            f"{what} gave {shown(combiner)} as its combiner; it must be a retrieval.plugin.Combiner or"
            " None."
        )
    return head, combiner


class CheckedMetric:
    """A plugin's metric, whose values are one number per query.

    Args:
        metric: what the factory gave.
        name: its name.

    Raises:
        PluginError: the metric cannot be called, or does not say how many neighbours it looks at.
    """

    def __init__(self, metric: Any, name: str) -> None:
        self.metric, self.what = metric, f"The metric {name}"
        depth = getattr(metric, "depth", None)
        number = isinstance(depth, int) and not isinstance(depth, bool) and depth >= 1
        if not callable(metric) or not (number or depth in ("relevant", "all")):
            raise PluginError(
                f"{self.what} is {shown(metric)} with depth = {depth!r}; it must be callable, and"
                ' depth a number of neighbours, "relevant" or "all".'
            )
        self.depth = cast("int | Literal['relevant', 'all']", depth)

    def __call__(
        self, matches: NDArray[np.bool_], relevant: NDArray[np.int64]
    ) -> NDArray[np.float64]:
        """Return one value per query (Q,); see `retrieval.plugin.Metric`.

        Raises:
            PluginError: the metric gave something else.
        """
        return self._checked(len(matches), self.metric, matches, relevant)

    @property
    def graded(
        self,
    ) -> Callable[[NDArray[np.float64], NDArray[np.float64]], NDArray[np.float64]] | None:
        """What the metric makes of grades, where it does; see `retrieval.plugin.Metric`."""
        graded = getattr(self.metric, "graded", None)
        return (
            None
            if graded is None
            else lambda gains, ideal: self._checked(len(gains), graded, gains, ideal)
        )

    def _checked(
        self, queries: int, call: Callable[..., Any], *given_it: Any
    ) -> NDArray[np.float64]:
        with calling(self.what):
            given = call(*given_it)
        with contextlib.suppress(ValueError, TypeError):
            values = np.asarray(given)
            if values.shape == (queries,) and values.dtype.kind in "fiub":
                wrong = int((~np.isfinite(values)).sum())
                if not wrong:
                    return values.astype(np.float64)
                raise PluginError(
                    f"{self.what} gave NaN or infinite values for {wrong} of {queries} queries."
                )
        raise PluginError(
            f"{self.what} gave {shown(given)}; it must give one number per query, of shape"
            f" ({queries},)."
        )
