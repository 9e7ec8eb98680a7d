"""Lifted structure: the hinge of log-exp *sums*, as it was and as the paper improves it."""

from __future__ import annotations

from typing import Any

from retrieval.model.loss import Distance, Reducer
from torch import Tensor

from retrieval_anml.base import (
    Positive,
    SimilarityLoss,
    Threshold,
    by_element,
    check_gammas,
    check_thresholds,
)
from retrieval_anml.gap import Rule


class ImprovedLiftedLoss(SimilarityLoss):
    """Lifted structure with a γ and a threshold for either neighbourhood.

    Song, Nie, Han & Li, "Adaptive Neighborhood Metric Learning", equation 25: the mean over anchors
    of

        [ 1/γ₁ · log( e^{−γ₁ p} + Σ_S e^{−γ₁ s} ) + 1/γ₂ · log( e^{γ₂ q} + Σ_D e^{γ₂ s} ) + margin ]₊

    with s the cosine. It takes memory of B × R. An anchor without positives (negatives) costs 0
    where there is no threshold to stand in for them, and so does one without any pair. A distance D
    of a combiner becomes s = 1 − D²/2.

    Args:
        gamma1: how much more the least similar positives count.
        gamma2: how much more the most similar negatives count.
        positive_threshold: p, λ₁ of the paper, a similarity that joins the positives; "none": no
            threshold.
        negative_threshold: q, λ₂ of the paper, a similarity that joins the negatives; "none": no
            threshold.
        margin: m.
        distance: how two embeddings are compared; the cosine by default.
        reducer: how the anchors' losses become one number; the mean by default.
    """

    def __init__(
        self,
        gamma1: Positive = 2.0,
        gamma2: Positive = 30.0,
        positive_threshold: Threshold = 0.5,
        negative_threshold: Threshold = 0.5,
        margin: float = 0.5,
        distance: Distance = None,
        reducer: Reducer = None,
    ) -> None:
        super().__init__(distance, reducer)
        check_gammas(gamma1, gamma2)
        if not gamma1 > 0:
            raise ValueError(
                f"gamma1 is {gamma1:g} and must be above 0: equation 25 has no other reading"
            )
        p, q = check_thresholds(positive_threshold, negative_threshold)
        self.rule = Rule(gamma1, gamma2, p, q, average=False)
        self.margin = margin

    def compute_loss(
        self,
        embeddings: Tensor,
        labels: Tensor | None,
        indices_tuple: Any,
        ref_emb: Tensor,
        ref_labels: Tensor | None,
    ) -> dict[str, dict[str, Any]]:
        """Return the anchors' losses, as pytorch-metric-learning's reducers read them."""
        pairs = self.pairs(labels, indices_tuple, embeddings, ref_emb, ref_labels)
        gap, defined = self.gap(embeddings, ref_emb, pairs, self.rule)
        return by_element((gap + self.margin).relu() * defined)


class LiftedLoss(ImprovedLiftedLoss):
    """Lifted structure over anchors, the form that the paper improves.

    Hermans, Beyer & Leibe, "In Defense of the Triplet Loss for Person Re-Identification", 2017,
    after Oh Song, Xiang, Jegelka & Savarese, CVPR 2016; equation 23 of Song, Nie, Han & Li: the
    mean over anchors of

        [ log Σ_S e^{−s} + log Σ_D e^{s} + margin ]₊

    with s the cosine; 0 for an anchor without positives or negatives.

    Args:
        margin: m; the two sums count pairs, so with cosines the loss is 0 only for m below −log(|S|
            |D|).
        distance: how two embeddings are compared; the cosine by default.
        reducer: how the anchors' losses become one number; the mean by default.
    """

    def __init__(
        self, margin: float = 1.0, distance: Distance = None, reducer: Reducer = None
    ) -> None:
        super().__init__(1.0, 1.0, None, None, margin, distance, reducer)
