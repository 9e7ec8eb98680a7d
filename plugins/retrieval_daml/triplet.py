"""The triplet loss of equation 9."""

from __future__ import annotations

from typing import Any

from retrieval.model.loss import Distance, Reducer, nothing
from torch import Tensor

from retrieval_daml.base import Measure, PaperLoss, triplets


class TripletLoss(PaperLoss):
    """Negatives farther than positives by a margin of squared distances.

    Schroff, Kalenichenko & Philbin, "FaceNet", CVPR 2015; Duan, Lu, Zheng & Zhou, "Deep Adversarial
    Metric Learning", equation 9: the mean over triplets of [ D(p, a)² − D(n, a)² + α ]₊. Without a
    miner every triplet of the batch counts.

    Args:
        margin: α, a difference of squared distances.
        distance: how two embeddings are compared; the Euclidean distance, without normalising, by
            default.
        reducer: how the triplets' losses become one number; the mean by default.
    """

    def __init__(
        self, margin: float = 1.0, distance: Distance = None, reducer: Reducer = None
    ) -> None:
        super().__init__(distance, reducer)
        self.margin = margin

    def compute_loss(
        self,
        embeddings: Tensor,
        labels: Tensor | None,
        indices_tuple: Any,
        ref_emb: Tensor,
        ref_labels: Any,
    ) -> dict[str, dict[str, Any]]:
        """Return the triplets' losses, as pytorch-metric-learning's reducers read them."""
        a, p, n = triplets(indices_tuple, labels, embeddings, ref_emb, ref_labels)
        if len(a) == 0:
            return {"loss": nothing(embeddings, ref_emb)}
        measure = Measure(self.distance, embeddings, ref_emb)
        losses = (measure.squared(a, p) - measure.squared(a, n) + self.margin).relu()
        return {"loss": {"losses": losses, "indices": (a, p, n), "reduction_type": "triplet"}}
