"""The contrastive loss of equation 8."""

from __future__ import annotations

from typing import Any

from retrieval.model.loss import Distance, Reducer, nothing
from torch import Tensor

from retrieval_daml.base import Measure, PaperLoss


class ContrastiveLoss(PaperLoss):
    """Positives near, negatives farther than a margin.

    Hadsell, Chopra & LeCun, CVPR 2006; Duan, Lu, Zheng & Zhou, "Deep Adversarial Metric Learning",
    equation 8:

        mean over positive pairs of D² + mean over negative pairs of [ α − D² ]₊

    With means in place of the paper's sums. With a generator use its `form = "contrastive"`.

    Args:
        margin: α, a squared distance.
        distance: how two embeddings are compared; the Euclidean distance, without normalising, by
            default.
        reducer: how the losses of either kind of pair become one number; the mean by default.
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
        """Return the pairs' losses, as pytorch-metric-learning's reducers read them."""
        a, p, b, n = self.pairs(labels, indices_tuple, embeddings, ref_emb, ref_labels)
        measure = Measure(self.distance, embeddings, ref_emb)
        made = {"pos_loss": nothing(embeddings, ref_emb), "neg_loss": nothing(embeddings, ref_emb)}
        if len(a):
            near = measure.squared(a, p)
            made["pos_loss"] = {"losses": near, "indices": (a, p), "reduction_type": "pos_pair"}
        if len(b):
            far = (self.margin - measure.squared(b, n)).relu()
            made["neg_loss"] = {"losses": far, "indices": (b, n), "reduction_type": "neg_pair"}
        return made

    def _sub_loss_names(self) -> list[str]:
        return ["pos_loss", "neg_loss"]
