"""Miners for generators: a negative per anchor and other class, or a semi-hard one per pair."""

from __future__ import annotations

from typing import Any, Literal

import torch
from pydantic import NonNegativeInt
from retrieval.helpers import full_precision
from retrieval.plugin import Distance, TripletIndices
from torch import Tensor, nn

from retrieval_daml.paper_losses import Measure, default_distance


class OnePerClass(nn.Module):
    """One triplet per anchor and other class, with a random positive and a random negative.

    Duan, Lu, Zheng & Zhou, "Deep Adversarial Metric Learning", equations 10 to 12: with a
    generator, the lifted structure and N-pair losses need one synthetic negative per anchor and
    other class. The miner uses only labels.

    Args:
        anchors: "all" items of the batch, or "one" random item per class, as for N-pair.
        negatives: number of other classes per anchor, chosen at random. 0 means all.
    """

    def __init__(
        self, anchors: Literal["all", "one"] = "all", negatives: NonNegativeInt = 0
    ) -> None:
        super().__init__()
        if anchors not in ("all", "one"):
            raise ValueError(f'anchors is {anchors!r} and must be "all" or "one"')
        if negatives < 0:
            raise ValueError(f"negatives is {negatives} and must be at least 0")
        self.anchors = anchors
        self.negatives = negatives

    @torch.no_grad()
    def forward(
        self,
        embeddings: Tensor,
        labels: Tensor,
        ref_emb: Any = None,
        ref_labels: Tensor | None = None,
    ) -> TripletIndices:
        """Return triplets; see `retrieval.plugin.Miner`."""
        same_items = ref_emb is None or ref_labels is None
        if ref_labels is None:
            known_labels = labels
        else:
            known_labels = ref_labels
        classes, group = torch.unique(known_labels, return_inverse=True)
        order = torch.argsort(group, stable=True)
        # class c is order[start[c] : start[c] + count[c]]
        count = torch.bincount(group, minlength=len(classes))
        start = count.cumsum(0) - count
        anchors = torch.arange(len(labels), device=labels.device)
        if self.anchors == "one":
            anchors = _one_of_each(labels)
        matches = labels[anchors][:, None] == classes
        # At most one class per anchor.
        row, cls = matches.nonzero(as_tuple=True)
        if same_items:
            positives = count[cls] - 1
        else:
            positives = count[cls]
        has_positive = positives > 0
        row = row[has_positive]
        cls = cls[has_positive]
        positives = positives[has_positive]
        differs = ~matches[row]
        if 0 < self.negatives < differs.shape[1] - 1:
            chosen = torch.multinomial(differs.double(), self.negatives)
            differs = torch.zeros_like(differs).scatter_(1, chosen, True)
        match, negative_class = differs.nonzero(as_tuple=True)
        a = anchors[row[match]]
        step = _below(positives[match])
        # An item is not its own positive.
        if same_items:
            rank = torch.empty_like(order)
            rank[order] = torch.arange(len(order), device=order.device) - start[group[order]]
            step = step + (step >= rank[a]).long()
        p = order[start[cls[match]] + step]
        n = order[start[negative_class] + _below(count[negative_class])]
        return a, p, n


class SemiHard(nn.Module):
    """One negative per positive pair, farther than the positive by less than a margin.

    Schroff, Kalenichenko & Philbin, "FaceNet", CVPR 2015; Duan, Lu, Zheng & Zhou, "Deep Adversarial
    Metric Learning", Table IX: D(p, a)² < D(n, a)² < D(p, a)² + margin. A pair without such a
    negative has no triplet. One triplet per pair limits the cost of a generator. For all semi-hard
    triplets, use `pml.triplet_margin` with `type_of_triplets = "semihard"`.

    Args:
        margin: a difference of squared distances. Use the margin of the loss.
        pick: which semi-hard negative of a pair to take: a "random" one, or the "hardest", which
            is the nearest.
        distance: distance or similarity of two embeddings; by default the Euclidean distance of
            unscaled embeddings.
    """

    def __init__(
        self,
        margin: float = 1.0,
        pick: Literal["random", "hardest"] = "random",
        distance: Distance = None,
    ) -> None:
        super().__init__()
        if pick not in ("random", "hardest"):
            raise ValueError(f'pick is {pick!r} and must be "random" or "hardest"')
        self.pick = pick
        if not 0 < margin < float("inf"):
            raise ValueError(
                f"margin is {margin:g} and must be a number above 0: otherwise no negative is"
                " semi-hard"
            )
        self.margin = margin
        self.distance = default_distance() if distance is None else distance

    @torch.no_grad()
    def forward(
        self,
        embeddings: Tensor,
        labels: Tensor,
        ref_emb: Tensor | None = None,
        ref_labels: Tensor | None = None,
    ) -> TripletIndices:
        """Return triplets; see `retrieval.plugin.Miner`."""
        query = reference = full_precision(embeddings)
        known_labels = labels
        if ref_emb is not None and ref_labels is not None:
            reference = full_precision(ref_emb)
            known_labels = ref_labels
        same = labels[:, None] == known_labels
        with torch.autocast(device_type=query.device.type, enabled=False):
            matrix = Measure(self.distance, query, reference).all_squared()
        positive = same.clone()
        if reference is query:
            positive.fill_diagonal_(False)
        a, p = positive.nonzero(as_tuple=True)
        gap = matrix[a] - matrix[a, p][:, None]
        fits = (gap > 0) & (gap < self.margin) & ~same[a]
        has_fit = fits.any(1)
        a = a[has_fit]
        p = p[has_fit]
        fits = fits[has_fit]
        if len(a) == 0:
            return a, p, a
        if self.pick == "hardest":
            return a, p, matrix[a].masked_fill(~fits, float("inf")).argmin(1)
        return a, p, torch.multinomial(fits.float(), 1).squeeze(1)


def _below(count: Tensor) -> Tensor:
    """Return a random integer from 0 to count − 1 for each count."""
    # The product can round up to `count`, hence the minimum.
    drawn = (torch.rand(len(count), device=count.device, dtype=torch.float64) * count).long()
    return torch.minimum(drawn, count - 1)


def _one_of_each(labels: Tensor) -> Tensor:
    """Return a random item of each class."""
    # The first item of a class in a random order is a random item of it.
    shuffled = torch.randperm(len(labels), device=labels.device)
    classes, group = torch.unique(labels[shuffled], return_inverse=True)
    first = torch.full((len(classes),), len(labels), device=labels.device)
    places = torch.arange(len(labels), device=labels.device)
    return shuffled[first.scatter_reduce(0, group, places, "amin")]
