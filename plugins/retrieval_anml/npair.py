"""N-pair: one positive against a positive of each other class, as it was and as the paper improves
it.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from pytorch_metric_learning.distances import DotProductSimilarity
from retrieval.model.loss import Distance, Reducer, nothing
from torch import Tensor, nn

from retrieval_anml.base import Positive, SimilarityLoss, similarities
from retrieval_anml.pairs import ListedPairs


class ImprovedNPairLoss(SimilarityLoss):
    """N-pair loss with a γ and an offset for the negatives.

    Song, Nie, Han & Li, "Adaptive Neighborhood Metric Learning", equation 31: the mean over pairs
    (i, i⁺) of

        1/γ · log( 1 + Σ_{j ≠ i} e^{γ (s(i, j⁺) − λ − s(i, i⁺))} )

    with one pair of each class, s the inner product of the embeddings as they come. A class's first
    two items of the batch are its pair of the first round, the next two that of a second round, and
    so on; an odd item is left out. With a reference set, i⁺ comes from it. With a miner, each
    positive pair (i, i⁺) is compared with the negatives that the miner gives anchor i. A distance D
    becomes s = 1 − D²/2.

    Args:
        gamma: how much more the most similar negatives count.
        offset: λ, taken from each negative's similarity; to ask for a margin make it *negative*.
        distance: how two embeddings are compared; the inner product, without normalising, by
            default.
        reducer: how the pairs' losses become one number; the mean by default.
    """

    def __init__(
        self,
        gamma: Positive = 16.0,
        offset: float = 0.0,
        distance: Distance = None,
        reducer: Reducer = None,
    ) -> None:
        super().__init__(distance, reducer)
        if not 0 < gamma < float("inf"):
            raise ValueError(f"gamma is {gamma:g} and must be a number above 0")
        self.gamma = gamma
        self.offset = offset

    def get_default_distance(self) -> nn.Module:
        """Return the inner product."""
        return DotProductSimilarity(normalize_embeddings=False)  # type: ignore[no-any-return]

    def compute_loss(
        self,
        embeddings: Tensor,
        labels: Tensor | None,
        indices_tuple: Any,
        ref_emb: Tensor,
        ref_labels: Tensor | None,
    ) -> dict[str, dict[str, Any]]:
        """Return the pairs' losses, as pytorch-metric-learning's reducers read them."""
        if indices_tuple is not None:
            anchor, positive, losses = self._listed(embeddings, ref_emb, indices_tuple)
        else:
            assert labels is not None
            anchor, positive, losses = self._rounds(
                embeddings, labels, ref_emb, None if ref_emb is embeddings else ref_labels
            )
        if len(anchor) == 0:
            return {"loss": nothing(embeddings, ref_emb)}
        return {
            "loss": {"losses": losses, "indices": (anchor, positive), "reduction_type": "pos_pair"}
        }

    def _rounds(
        self, embeddings: Tensor, labels: Tensor, ref_emb: Tensor, ref_labels: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        anchor, positive, turn = pairs_by_round(labels, ref_labels)
        if len(anchor) == 0:
            return anchor, positive, embeddings.new_zeros(0)
        similarity = similarities(self.distance, embeddings[anchor], ref_emb[positive])
        own = similarity.diagonal()[:, None]
        logits = self.gamma * (similarity - self.offset - own)
        # in a round each class has one pair: what is of the round and not the pair itself is of
        # another class
        left_out = (turn[:, None] != turn).fill_diagonal_(True)
        logits = logits.masked_fill(left_out, torch.finfo(logits.dtype).min)
        return anchor, positive, F.softplus(torch.logsumexp(logits, 1)) / self.gamma

    def _listed(
        self, embeddings: Tensor, ref_emb: Tensor, indices: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        pairs = ListedPairs(indices, (len(embeddings), len(ref_emb)), embeddings.device)
        similarity = similarities(self.distance, embeddings, ref_emb)
        columns, member = pairs.positive.rows(0, len(embeddings))
        anchor, step = member.nonzero(as_tuple=True)
        positive = columns[anchor, step]
        far, real = pairs.negative.rows(0, len(embeddings))
        if far.shape[1] == 0:
            return anchor[:0], positive[:0], similarity.new_zeros(0)
        lowest = torch.finfo(similarity.dtype).min
        negatives = (self.gamma * similarity.gather(1, far)).masked_fill(~real, lowest)
        push = torch.logsumexp(negatives, 1)[anchor]
        pull = self.gamma * (similarity[anchor, positive] + self.offset)
        return anchor, positive, F.softplus(push - pull) / self.gamma


class NPairLoss(ImprovedNPairLoss):
    """N-pair loss: softmax of a pair's similarity over those with a positive of each other class.

    Sohn, "Improved Deep Metric Learning with Multi-class N-pair Loss Objective", NIPS 2016;
    equation 28 of Song, Nie, Han & Li. Where a batch has more than two items of a class, and with a
    miner or a reference set, see `anml.improved_npair`, of which this is the case γ = 1, λ = 0.

    Args:
        distance: how two embeddings are compared; the inner product, without normalising, by
            default.
        reducer: how the pairs' losses become one number; the mean by default.
    """

    def __init__(self, distance: Distance = None, reducer: Reducer = None) -> None:
        super().__init__(1.0, 0.0, distance, reducer)


def pairs_by_round(labels: Tensor, ref_labels: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return pairs of one class, at most one of each class in a round.

    Args:
        labels: (B,).
        ref_labels: (R,) of the positives; None: the batch itself, where a class's items 2r and 2r +
            1 are a pair.

    Returns:
        Anchors, positives and rounds, each (N,) int64.
    """
    ordered, order = torch.sort(labels, stable=True)
    rank = torch.arange(len(labels), device=labels.device) - torch.searchsorted(ordered, ordered)
    if ref_labels is None:
        paired = (rank[:-1] % 2 == 0) & (ordered[:-1] == ordered[1:])
        return order[:-1][paired], order[1:][paired], rank[:-1][paired] // 2
    references, reference_order = torch.sort(ref_labels, stable=True)
    place = torch.searchsorted(references, ordered) + rank
    found = place < torch.searchsorted(references, ordered, right=True)
    return order[found], reference_order[place[found]], rank[found]
