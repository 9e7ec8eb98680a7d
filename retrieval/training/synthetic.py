"""Add synthetic samples to a batch: choose triplets for the generator, and mine among all samples.

A batch has B items and T triplets. The head's outputs, the codes, have C columns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from pytorch_metric_learning.utils import loss_and_miner_utils as indices_utils
from torch import Tensor

from retrieval.model.contracts import TripletIndices

Triplets = tuple[Tensor, Tensor, Tensor]
Replaces = Literal["positive", "negative"]
Metrics = Mapping[str, Tensor | int]
"""A batch's metrics for the log, by name."""


@dataclass(frozen=True)
class Extended:
    """A batch followed by its synthetic samples.

    Attributes:
        codes: (B + T, C), first the codes of the batch, then the synthetic codes.
        labels: (B + T,); a synthetic sample has the label of the sample that it replaces.
        triplets: row numbers in `codes` of anchors, positives and negatives, each (T,). The
            positives or the negatives are synthetic.
        replaces: the member of a triplet that a synthetic sample replaces.
    """

    codes: Tensor
    labels: Tensor
    triplets: Triplets
    replaces: Replaces


@dataclass(frozen=True)
class Synthetic:
    """The generator's synthetic samples for a batch.

    Attributes:
        rows: (T, F), the synthetic features or codes, one row per triplet.
        triplets: the features or codes of anchors, positives and negatives, each (T, F).
        extended: the batch followed by the synthetic codes; `None` if the loss does not use them.
        indices: the triplets or pairs of the extended batch that the loss compares.
        metrics: metrics for the log.
    """

    rows: Tensor
    triplets: Triplets
    extended: Extended | None
    indices: TripletIndices | None
    metrics: Metrics


def extend(
    codes: Tensor, labels: Tensor, synthetic: Tensor, triplets: Triplets, replaces: Replaces
) -> Extended:
    """Return a batch (B, C), followed by one synthetic sample (T, C) per triplet.

    `triplets` has row numbers in the batch of anchors, positives and negatives, each (T,).
    """
    a, p, n = triplets
    rows = torch.arange(len(codes), len(codes) + len(synthetic), device=codes.device)
    if replaces == "positive":
        replaced = a  # of the same class as the positives
        triplets = a, rows, n
    else:
        replaced = n
        triplets = a, p, rows
    return Extended(
        torch.cat([codes, synthetic]), torch.cat([labels, labels[replaced]]), triplets, replaces
    )


def mine(
    miner: Callable[..., TripletIndices], codes: Tensor, labels: Tensor, extended: Extended
) -> TripletIndices:
    """Return a miner's picks among real and synthetic samples; the miner takes a reference set.

    A synthetic sample has the label of the sample that it replaces, but is not a true member of
    that class: a synthetic negative must not serve as a positive, nor a synthetic positive as a
    negative. The miner is therefore called once per class, with the samples with which the anchors
    of that class may be compared. No item is its own positive.
    """
    codes = codes.detach()
    reference = extended.codes.detach()
    real = torch.arange(len(reference), device=codes.device) < len(codes)
    picks: list[list[Tensor]] = []
    for label in torch.unique(labels):
        rows = (labels == label).nonzero().squeeze(1)
        usable = extended.labels == label
        if extended.replaces == "negative":
            usable = ~usable
        columns = (real | usable).nonzero().squeeze(1)
        picked = miner(
            codes[rows],
            labels[rows],
            ref_emb=reference[columns],
            ref_labels=extended.labels[columns],
        )
        # the second and the last of the lists name references, the others anchors
        references = (1, len(picked) - 1)
        mapped = [columns[x] if i in references else rows[x] for i, x in enumerate(picked)]
        is_other_item = mapped[0] != mapped[1]
        # drop a whole triplet (3 lists), or only the positive pair (the first 2 of 4 lists)
        if len(mapped) == 3:
            whole = 3
        else:
            whole = 2
        picks.append([x[is_other_item] for x in mapped[:whole]] + mapped[whole:])
    merged = tuple(torch.cat(part) for part in zip(*picks, strict=True))
    return merged  # type: ignore[return-value]


def choose_triplets(indices: TripletIndices | None, labels: Tensor) -> Triplets:
    """Return the miner's triplets; without a miner, positive pairs with random negatives."""
    if indices is None:
        return _one_negative(labels)
    a, p, n = indices_utils.convert_to_triplets(indices, labels, t_per_anchor="all")
    return a, p, n


def classmates_of(rows: Tensor, labels: Tensor) -> Tensor:
    """Return, for each row, a random other item of its class, or the row if there is none."""
    weights = (labels[rows, None] == labels).float()
    # so small a weight that an item is drawn for itself only if its class has no other item
    weights[torch.arange(len(rows), device=rows.device), rows] = 1e-12
    return torch.multinomial(weights, 1).squeeze(1)


def _one_negative(labels: Tensor) -> Triplets:
    same = labels[:, None] == labels[None]
    itself = torch.eye(len(labels), dtype=torch.bool, device=labels.device)
    a, p = (same & ~itself).nonzero(as_tuple=True)
    negatives = (~same).float()
    usable = negatives.sum(1)[a] > 0
    a = a[usable]
    p = p[usable]
    if a.numel() == 0:
        return a, p, a
    return a, p, torch.multinomial(negatives[a], 1).squeeze(1)
