"""The N-pair loss of equation 12, corrected."""

from __future__ import annotations

from typing import Any

import torch
from pytorch_metric_learning.distances import DotProductSimilarity
from retrieval.model.loss import Distance, Pairs, Reducer, nothing
from torch import Tensor, nn

from retrieval_daml.base import Measure, PaperLoss, Positive


class NPairLoss(PaperLoss):
    """A pair's similarity against its anchor's similarity to a negative of each other class.

    Sohn, NIPS 2016; Duan, Lu, Zheng & Zhou, "Deep Adversarial Metric Learning", equation 12: the
    mean over pairs (a, p) of

        log( 1 + Σ_n exp( scale · ( s(a, n) − s(a, p) ) ) )

    The paper subtracts the similarity to the negative's source in place of the anchor's own
    positive. Without a miner a class's first two items of the batch are its pair, the next two that
    of a second round; with a reference set its items are the positives. With a miner a pair's
    negatives are those that the miner gives its anchor.

    Args:
        scale: of the similarities: unit vectors need 8 to 16, embeddings of free length 1.
        distance: how two embeddings are compared; the inner product, without normalising, by
            default. A distance D becomes s = 1 − D²/2.
        reducer: how the pairs' losses become one number; the mean by default.
    """

    def __init__(
        self, scale: Positive = 16.0, distance: Distance = None, reducer: Reducer = None
    ) -> None:
        super().__init__(distance, reducer)
        if not 0 < scale < float("inf"):
            raise ValueError(f"scale is {scale:g} and must be a number above 0")
        self.scale = scale

    def get_default_distance(self) -> nn.Module:
        """Return the inner product."""
        return DotProductSimilarity(normalize_embeddings=False)  # type: ignore[no-any-return]

    def compute_loss(
        self,
        embeddings: Tensor,
        labels: Tensor | None,
        indices_tuple: Any,
        ref_emb: Tensor,
        ref_labels: Any,
    ) -> dict[str, dict[str, Any]]:
        """Return the pairs' losses, as pytorch-metric-learning's reducers read them."""
        if indices_tuple is None:
            assert labels is not None
            a, p, b, n = pairs_by_round(labels, None if ref_emb is embeddings else ref_labels)
        else:
            a, p, b, n = self.pairs(labels, indices_tuple, embeddings, ref_emb, ref_labels)
        if len(a) == 0 or len(b) == 0:
            return {"loss": nothing(embeddings, ref_emb)}
        measure = Measure(self.distance, embeddings, ref_emb)
        near, far = self.scale * measure.similarity(a, p), self.scale * measure.similarity(b, n)
        lowest = far.new_full((len(embeddings),), torch.finfo(far.dtype).min / 4)
        largest = lowest.scatter_reduce(0, b, far.detach(), "amax")
        total = torch.zeros_like(lowest).index_add(0, b, (far - largest[b]).exp())
        push = torch.where(total > 0, largest + total.clamp_min(1e-30).log(), lowest)
        losses = nn.functional.softplus(push[a] - near)
        return {"loss": {"losses": losses, "indices": (a, p), "reduction_type": "pos_pair"}}


def pairs_by_round(labels: Tensor, ref_labels: Tensor | None) -> Pairs:
    """Return pairs of one class, at most one of each class in a round, and the other pairs'
    positives as negatives.

    Args:
        labels: (B,).
        ref_labels: (R,) of the positives; None: the batch itself, where a class's items 2r and 2r +
            1 are a pair.
    """
    ordered, order = torch.sort(labels, stable=True)
    rank = torch.arange(len(labels), device=labels.device) - torch.searchsorted(ordered, ordered)
    if ref_labels is None:
        paired = (rank[:-1] % 2 == 0) & (ordered[:-1] == ordered[1:])
        a, p, turn = order[:-1][paired], order[1:][paired], rank[:-1][paired] // 2
    else:
        references, reference_order = torch.sort(ref_labels, stable=True)
        place = torch.searchsorted(references, ordered) + rank
        found = place < torch.searchsorted(references, ordered, right=True)
        a, p, turn = order[found], reference_order[place[found]], rank[found]
    first, second = ((turn[:, None] == turn) & (a[:, None] != a)).nonzero(as_tuple=True)
    return a, p, a[first], p[second]
