"""Proxy-NCA as DANML with one learned point per class."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from retrieval.model.loss import Distance, Reducer
from retrieval.plugin import traits
from torch import Tensor, nn

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
from retrieval_anml.pairs import LabelPairs


@traits(ref_emb=False, miner=False)
class ImprovedProxyNCALoss(SimilarityLoss):
    """Proxy-NCA with a γ and a threshold: DANML where the only positive is the class's proxy, the
    negatives the others.

    Song, Nie, Han & Li, "Adaptive Neighborhood Metric Learning", table 3, which gives no equation.
    With d the squared Euclidean distance on the sphere, 2 − 2 cosine,

        x = 1/g · log( [e^{g λ₁} + e^{g d(y)}] / 2 ) + 1/γ₂ · log( [e^{−γ₂ λ₂} + Σ_{z ≠ y} e^{−γ₂ d(z)}] / C )

    with g = |γ₁| and λ = 2 − 2 × the threshold; without thresholds d(y) alone, and the mean over C
    − 1. The loss is the mean of ℓ(x + margin). With the identity, no thresholds and γ₂ = 1 it is
    Proxy-NCA (Movshovitz-Attias et al., ICCV
    2017) less log(C − 1). A distance D of a combiner gives d = D².

    Args:
        gamma1: how fast the class's proxy stops counting once it is nearer than the threshold; only
            its size matters, and only with a threshold.
        gamma2: how much more the nearest proxies of other classes count.
        positive_threshold: a similarity (cosine) that joins the class's proxy; "none": no
            threshold.
        negative_threshold: a similarity (cosine) that joins the other proxies; "none": no
            threshold.
        outer: ℓ, the function of the gap: log(1 + eˣ), x, or max(0, x).
        margin: added to the gap before; by default 1 for the hinge and 0 otherwise.
        distance: how embeddings are compared with proxies; the cosine by default.
        reducer: how the items' losses become one number; the mean by default.
    """

    def __init__(
        self,
        embedding_size: int,
        classes: int,
        gamma1: float = 1.0,
        gamma2: Positive = 8.0,
        positive_threshold: Threshold = None,
        negative_threshold: Threshold = None,
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
        # d = 2 − 2s: the gap of distances with γ is twice the gap of similarities with 2γ
        self.rule = Rule(2 * abs(gamma1), 2 * gamma2, p, q)
        self.outer = outer
        self.margin = (1.0 if outer == "hinge" else 0.0) if margin is None else margin
        self.proxies = nn.Parameter(F.normalize(torch.randn(classes, embedding_size)))

    def compute_loss(
        self,
        embeddings: Tensor,
        labels: Tensor | None,
        indices_tuple: Any,
        ref_emb: Tensor,
        ref_labels: Tensor | None,
    ) -> dict[str, dict[str, Any]]:
        """Return the items' losses, as pytorch-metric-learning's reducers read them."""
        if indices_tuple is not None:
            raise ValueError(
                "anml.improved_proxy_nca compares items with proxies and takes no indices: remove"
                " the miner"
            )
        if ref_emb is not embeddings:
            raise ValueError(
                "anml.improved_proxy_nca compares items with proxies and takes no ref_emb"
            )
        assert labels is not None
        if len(labels) and not 0 <= int(labels.min()) <= int(labels.max()) < len(self.proxies):
            raise ValueError(
                f"labels go from {int(labels.min())} to {int(labels.max())}, and there are proxies"
                f" for 0 to {len(self.proxies) - 1}"
            )
        proxies = self.proxies.to(embeddings.dtype)
        numbers = torch.arange(len(proxies), device=labels.device, dtype=labels.dtype)
        gap, defined = self.gap(embeddings, proxies, LabelPairs(labels, numbers), self.rule)
        return by_element(outer_loss(2 * gap + self.margin, self.outer) * defined)
