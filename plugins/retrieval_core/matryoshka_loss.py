"""A loss that also trains prefixes of an embedding, so that embeddings can be truncated."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import NonNegativeFloat, PositiveInt
from retrieval.helpers import as_given, full_precision
from retrieval.plugin import Normalise, Part
from torch import Tensor, nn


class Matryoshka(nn.Module):
    """The weighted sum of the losses of an embedding's prefixes and of the whole embedding.

    Args:
        losses: one loss per width; the last one is for the whole embedding.
        widths: numbers of dimensions, ascending; the last one is that of the whole embedding.
        weights: one weight per width.
        normalise: whether to scale each prefix to unit length; the whole embedding is not scaled.
    """

    def __init__(
        self,
        losses: Sequence[nn.Module],
        widths: Sequence[int],
        weights: Sequence[float],
        normalise: bool = True,
    ) -> None:
        super().__init__()
        if not len(losses) == len(widths) == len(weights):
            raise ValueError(
                f"there are {len(losses)} losses, {len(widths)} widths and {len(weights)} weights"
            )
        if list(widths) != sorted(set(widths)) or widths[0] < 1:
            raise ValueError(f"widths must be at least 1 and ascending, not {list(widths)}")
        if sum(weights) <= 0 or min(weights) < 0:
            raise ValueError(f"weights must be 0 or more, and not all 0, not {list(weights)}")
        # Each width needs its own proxies or class weights.
        distinct = len({id(loss) for loss in losses}) == len(losses)
        self.losses = nn.ModuleList(
            losses if distinct else [copy.deepcopy(loss) for loss in losses]
        )
        self.widths = tuple(widths)
        self.weights = tuple(weights)
        self.unit = Normalise() if normalise else nn.Identity()

    def forward(
        self,
        embeddings: Tensor,
        labels: Tensor,
        indices_tuple: Any = None,
        ref_emb: Tensor | None = None,
        ref_labels: Tensor | None = None,
    ) -> Tensor:
        """Return the weighted sum, a scalar; see `retrieval.plugin.Loss`.

        A miner's indices are used for all widths.
        """
        if embeddings.shape[1] != self.widths[-1]:
            raise ValueError(
                f"embeddings have {embeddings.shape[1]} dimensions, but the last width is"
                f" {self.widths[-1]}"
            )
        total = embeddings.sum() * 0
        for loss, width, weight in zip(self.losses, self.widths, self.weights, strict=True):
            if weight:
                if ref_emb is None:
                    reference = {}
                else:
                    reference = {"ref_emb": self._prefix(ref_emb, width), "ref_labels": ref_labels}
                if indices_tuple is not None:
                    reference["indices_tuple"] = indices_tuple
                total = total + weight * loss(self._prefix(embeddings, width), labels, **reference)
        return as_given(total, embeddings)

    def _prefix(self, x: Tensor, width: int) -> Tensor:
        """Return the first `width` columns, scaled if required, or the whole embedding unscaled."""
        if width == self.widths[-1]:
            return x
        prefix: Tensor = self.unit(full_precision(x[:, :width]))
        return prefix


def matryoshka(
    loss: Annotated[nn.Module, Part("losses", per_width="widths")],
    widths: list[PositiveInt],
    embedding_size: int,
    weights: list[NonNegativeFloat] | None = None,
    normalise: bool = True,
) -> Matryoshka:
    """Apply a loss to the embedding and to its prefixes, so that vectors can be truncated.

    Kusupati et al., Matryoshka Representation Learning, NeurIPS 2022, equation 1: the weighted sum
    of the losses at all widths. Each width has its own loss object, with its own proxies or class
    weights. `retrieval export --dimensions N` writes a bundle with the first N dimensions only.

    Args:
        loss: the loss to apply at each width.
        widths: numbers of dimensions of the prefixes, ascending and smaller than the embedding's.
            The whole embedding is always trained too.
        weights: one weight per width, then one for the whole embedding; 1 by default.
        normalise: whether to scale each prefix to unit length, as the export does. Set it to false
            if [head] normalise is false.
    """
    # One per width and one for the whole embedding; see `Part`.
    losses: Any = loss
    if widths and not widths[-1] < embedding_size:
        raise ValueError(
            f"the last width is {widths[-1]}, but widths must be smaller than the embedding size,"
            f" {embedding_size}: the whole embedding is always trained"
        )
    if weights is not None and len(weights) != len(widths) + 1:
        raise ValueError(
            f"there are {len(weights)} weights for {len(widths)} widths and the whole embedding."
            f" Set {len(widths) + 1}"
        )
    return Matryoshka(
        losses, [*widths, embedding_size], weights or [1.0] * (len(widths) + 1), normalise
    )
