"""The Recall@k surrogate loss, with optional similarity mixup."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import torch
from pydantic import Field, PositiveFloat, PositiveInt
from pytorch_metric_learning.distances import CosineSimilarity
from retrieval.helpers import losses_of
from retrieval.plugin import CheckedLoss, Distance, Reducer, traits
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

ENTRIES = 2**22
"""Largest number of comparisons in memory at a time: 16 MB."""


@traits(ref_emb=False, miner=False)
class RecallAtK(CheckedLoss):
    """A smooth form of 1 − Recall@k, averaged over several k.

    Patel, Tolias & Matas, "Recall@k Surrogate Loss with Large Batches and Similarity Mixup" (CVPR
    2022), implemented like the authors' code. Sigmoids σ replace the comparisons of similarities
    and of ranks. Let q be a query of the batch, P its positives, Ω all other items of the batch,
    and s the similarity. The rank of a positive x and the loss of q are

        r(x) = 1 + Σ_{z ∈ Ω, z ≠ x} σ((s(q, z) − s(q, x)) / τ₂)
        1 − 1/|K| Σ_{k ∈ K} min(k, Σ_{x ∈ P} σ((k − r(x)) / τ₁)) / min(k, |P|)

    The authors' code includes q in Ω; here Ω excludes q. The loss needs large batches: see
    `[train] chunk`.

    `mix` (SiMix) adds a virtual item for every two items x, y of a class. A virtual item is also a
    query, a positive and a negative. Its similarity to any item w is α s(x, w) + (1 − α) s(y, w),
    with α drawn uniformly from 0 to 1 for each pair.

    Args:
        k: the ranks K.
        rank_temperature: τ₂, temperature of the comparison of similarities.
        recall_temperature: τ₁, temperature of the comparison of ranks with k.
        mix: whether to add virtual items (SiMix).
        distance: distance or similarity of two embeddings; the default is the cosine.
        reducer: reduces the queries' losses to one number; the default is the mean.
    """

    def __init__(
        self,
        k: Annotated[list[PositiveInt], Field(min_length=1)] = [1, 2, 4, 8, 16],  # noqa: B006
        rank_temperature: PositiveFloat = 0.01,
        recall_temperature: PositiveFloat = 1.0,
        mix: bool = False,
        distance: Distance = None,
        reducer: Reducer = None,
    ) -> None:
        super().__init__(distance=distance, reducer=reducer)
        self.k: Sequence[int] = tuple(k)
        self.rank_temperature = rank_temperature
        self.recall_temperature = recall_temperature
        self.mix = mix

    def get_default_distance(self) -> nn.Module:
        """Return the cosine."""
        cosine: nn.Module = CosineSimilarity()
        return cosine

    def compute_loss(
        self, embeddings: Tensor, labels: Any, indices_tuple: Any, ref_emb: Tensor, ref_labels: Any
    ) -> dict[str, Any]:
        """Return one loss per query that has a positive."""
        matrix: Tensor = self.distance(embeddings)
        if self.distance.is_inverted:
            similarity = matrix
        else:
            similarity = -matrix
        if self.mix:
            similarity, labels = _mixed(similarity, labels)
        positive = labels[:, None] == labels
        positive.fill_diagonal_(False)
        query, item = positive.nonzero(as_tuple=True)
        if not len(query):
            return self.zero_losses()
        size = max(1, ENTRIES // len(labels))
        # A block is computed again in the backward pass: stored for it, the comparisons would take
        # pairs × items numbers.
        ranks = torch.cat(
            [
                checkpoint(
                    self._ranks,
                    similarity,
                    query[start : start + size],
                    item[start : start + size],
                    use_reentrant=False,
                    # The block draws no random numbers.
                    preserve_rng_state=False,
                )
                for start in range(0, len(query), size)
            ]
        )
        count = positive.sum(1)
        recalls = []
        for k in self.k:
            within = torch.sigmoid((k - ranks) / self.recall_temperature)
            total = within.new_zeros(len(labels)).index_add(0, query, within)
            recalls.append(total.clamp(max=k) / count.clamp(min=1, max=k))
        rows = count.nonzero().squeeze(1)
        losses = 1 - torch.stack(recalls).mean(0)[rows]
        return losses_of(losses, rows, "element")

    def _ranks(self, similarity: Tensor, query: Tensor, item: Tensor) -> Tensor:
        """Return the smooth rank of each positive `item` among all items except its query."""
        rows = similarity[query]
        ahead = torch.sigmoid((rows - similarity[query, item].unsqueeze(1)) / self.rank_temperature)
        excluded = torch.zeros_like(ahead, dtype=torch.bool)
        excluded.scatter_(1, torch.stack([query, item], 1), True)
        return 1 + ahead.masked_fill(excluded, 0).sum(1)


def _mixed(similarity: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return similarities and labels of the batch, followed by the virtual items."""
    first, second = torch.triu(labels[:, None] == labels, diagonal=1).nonzero(as_tuple=True)
    alpha = torch.rand(len(first), dtype=similarity.dtype, device=similarity.device)
    weights = similarity.new_zeros(len(first), len(labels))
    rows = torch.arange(len(first), device=labels.device)
    weights[rows, first], weights[rows, second] = alpha, 1 - alpha
    every = torch.cat([torch.eye(len(labels)).to(similarity), weights])
    return every @ similarity @ every.T, torch.cat([labels, labels[first]])
