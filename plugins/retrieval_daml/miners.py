"""Which triplets a generator is given where the loss compares an anchor with every other class."""

from __future__ import annotations

from typing import Any, Literal

import torch
from retrieval.contracts import TripletIndices
from torch import Tensor, nn


class OnePerClass(nn.Module):
    """A triplet for each anchor and each other class: a random item of that class and a random positive.

    With a generator it gives one synthetic negative per anchor and other class, as the lifted structure and N-pair losses of
    Duan, Lu, Zheng & Zhou, "Deep Adversarial Metric Learning", want them (equations 10 to 12). It looks at labels only.

    Args:
        anchors: "all" items of the batch, or "one" random item of each class, as N-pair has it.
    """

    def __init__(self, anchors: Literal["all", "one"] = "all") -> None:
        super().__init__()
        if anchors not in ("all", "one"):
            raise ValueError(f'anchors is {anchors!r} and must be "all" or "one"')
        self.anchors = anchors

    @torch.no_grad()
    def forward(
        self, embeddings: Tensor, labels: Tensor, ref_emb: Any = None, ref_labels: Tensor | None = None
    ) -> TripletIndices:
        """Return triplets; see `retrieval.Miner`."""
        own = ref_emb is None or ref_labels is None
        others = labels if ref_labels is None else ref_labels
        classes, group = torch.unique(others, return_inverse=True)
        order = torch.argsort(group, stable=True)
        count = torch.bincount(group, minlength=len(classes))
        start = count.cumsum(0) - count
        anchors = torch.arange(len(labels), device=labels.device)
        if self.anchors == "one":
            anchors = _one_of_each(labels)
        matches = labels[anchors][:, None] == classes
        at, cls = matches.nonzero(as_tuple=True)  # at most one class an anchor
        rest = count[cls] - 1 if own else count[cls]
        at, cls, rest = at[rest > 0], cls[rest > 0], rest[rest > 0]
        which, other = (~matches[at]).nonzero(as_tuple=True)
        a = anchors[at[which]]
        step = _below(rest[which])
        if own:  # no item is its own positive
            rank = torch.empty_like(order)
            rank[order] = torch.arange(len(order), device=order.device) - start[group[order]]
            step = step + (step >= rank[a]).long()
        p = order[start[cls[which]] + step]
        n = order[start[other] + _below(count[other])]
        return a, p, n


def _below(count: Tensor) -> Tensor:
    """Return a random whole number from 0 to each count − 1."""
    drawn = (torch.rand(len(count), device=count.device, dtype=torch.float64) * count).long()
    return torch.minimum(drawn, count - 1)


def _one_of_each(labels: Tensor) -> Tensor:
    shuffled = torch.randperm(len(labels), device=labels.device)
    classes, group = torch.unique(labels[shuffled], return_inverse=True)
    first = torch.full((len(classes),), len(labels), device=labels.device)
    places = torch.arange(len(labels), device=labels.device)
    return shuffled[first.scatter_reduce(0, group, places, "amin")]


MINERS = {"one_per_class": OnePerClass}
"""The miners by their names in a recipe."""
