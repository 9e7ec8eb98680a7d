"""DANML, the deep loss of adaptive neighbourhoods; with the Multi-Similarity miner on the same
similarities if asked.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field
from retrieval.model.loss import Distance, Reducer
from retrieval.plugin import traits
from torch import Tensor

from retrieval_anml.base import (
    Outer,
    Positive,
    SimilarityLoss,
    Threshold,
    by_element,
    check_gammas,
    check_thresholds,
    outer_loss,
)
from retrieval_anml.gap import Rule


class DANMLoss(SimilarityLoss):
    """Deep adaptive neighbourhoods: the least similar positives, softly, against the most similar
    negatives, softly.

    Song, Nie, Han & Li, "Adaptive Neighborhood Metric Learning", equation 22. For each anchor with
    positives S and negatives D, s the cosine and g = |γ₁|,

        x = 1/g · log( [e^{−g p} + Σ_S e^{−g s}] / (|S| + 1) ) + 1/γ₂ · log( [e^{γ₂ q} + Σ_D e^{γ₂ s}] / (|D| + 1) )

    and the loss is the mean of ℓ(x + margin). The thresholds p and q steady a neighbourhood whose
    members change from batch to batch: a positive more similar than p, and a negative less similar
    than q, hardly count.

    The paper's λ can be read in two ways. As distances 1 − cosine, as equation 22 is written: p = 1
    − λ₁, q = 1 − λ₂. As similarities, which the values of its experiments suggest (λ₁ of .5 to .65,
    λ₂ .01 to .03 more): p = λ₁, q = λ₂.

    With the identity and p = q it is Multi-Similarity less a constant that depends on the number of
    pairs. An anchor without any pair costs 0; so does one without positives (negatives) where there
    is no threshold to stand in for them. A distance D of a combiner becomes s = 1 − D²/2.

    Args:
        gamma1: how much more the least similar positives count; the paper's is negative, and only
            its size matters: 0 averages all.
        gamma2: how much more the most similar negatives count.
        positive_threshold: p, a similarity that joins the positives; "none": no threshold.
        negative_threshold: q, a similarity that joins the negatives; "none": no threshold.
        outer: ℓ, the function of the gap: log(1 + eˣ), x, or max(0, x).
        margin: added to the gap before; by default 1 for the hinge and 0 otherwise.
        distance: how two embeddings are compared; the cosine by default.
        reducer: how the anchors' losses become one number; the mean by default.
    """

    def __init__(
        self,
        gamma1: float = 2.0,
        gamma2: Positive = 30.0,
        positive_threshold: Threshold = 0.5,
        negative_threshold: Threshold = 0.5,
        outer: Outer = "logistic",
        margin: float | None = None,
        distance: Distance = None,
        reducer: Reducer = None,
    ) -> None:
        super().__init__(distance, reducer)
        check_gammas(gamma1, gamma2)
        p, q = check_thresholds(positive_threshold, negative_threshold)
        if outer not in ("logistic", "identity", "hinge"):
            raise ValueError(f'outer is "{outer}" and must be "logistic", "identity" or "hinge"')
        self.rule = Rule(abs(gamma1), gamma2, p, q)
        self.outer = outer
        self.margin = (1.0 if outer == "hinge" else 0.0) if margin is None else margin

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
        return by_element(outer_loss(gap + self.margin, self.outer) * defined)


@traits(miner=False)
class MinedDANMLoss(DANMLoss):
    """`anml.danml` on the pairs of `anml.pair_miner`, both from one matrix of similarities.

    The paper always uses the two together. This gives the same numbers as the two in turn, without
    lists of pairs in between. ε is in similarities also where a distance is given.

    Args:
        gamma1: how much more the least similar positives count; only its size matters: 0 averages
            all.
        gamma2: how much more the most similar negatives count.
        positive_threshold: p, a similarity that joins the positives; "none": no threshold.
        negative_threshold: q, a similarity that joins the negatives; "none": no threshold.
        outer: ℓ, the function of the gap: log(1 + eˣ), x, or max(0, x).
        margin: added to the gap before; by default 1 for the hinge and 0 otherwise.
        epsilon: the miner's margin: a positive counts where the anchor's most similar negative
            comes within it, a negative where the least similar positive does.
        distance: how two embeddings are compared; the cosine by default.
        reducer: how the anchors' losses become one number; the mean by default.
    """

    def __init__(
        self,
        gamma1: float = 2.0,
        gamma2: Positive = 30.0,
        positive_threshold: Threshold = 0.5,
        negative_threshold: Threshold = 0.5,
        outer: Outer = "logistic",
        margin: float | None = None,
        epsilon: Annotated[float, Field(ge=0)] = 0.1,
        distance: Distance = None,
        reducer: Reducer = None,
    ) -> None:
        super().__init__(
            gamma1, gamma2, positive_threshold, negative_threshold, outer, margin, distance, reducer
        )
        if not epsilon >= 0:
            raise ValueError(f"epsilon is {epsilon} and must be at least 0")
        rule = self.rule
        self.rule = Rule(
            rule.gamma1,
            rule.gamma2,
            rule.positive_threshold,
            rule.negative_threshold,
            epsilon=epsilon,
        )

    def compute_loss(
        self,
        embeddings: Tensor,
        labels: Tensor | None,
        indices_tuple: Any,
        ref_emb: Tensor,
        ref_labels: Tensor | None,
    ) -> dict[str, dict[str, Any]]:
        """Return the anchors' losses, as pytorch-metric-learning's reducers read them."""
        if indices_tuple is not None:
            raise ValueError(
                "anml.danml_mined mines its own pairs and takes no indices: remove the miner, or"
                " use anml.danml"
            )
        return super().compute_loss(embeddings, labels, None, ref_emb, ref_labels)
