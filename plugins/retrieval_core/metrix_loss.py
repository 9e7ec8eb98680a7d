"""Metrix: pair losses with mixup."""

from __future__ import annotations

from typing import Any

import torch
from pydantic import NonNegativeFloat, PositiveFloat
from pytorch_metric_learning.reducers import AvgNonZeroReducer
from pytorch_metric_learning.utils import loss_and_miner_utils as indices_utils
from retrieval.helpers import item_losses, listed_pairs, losses_of, reduced_loss
from retrieval.plugin import CheckedLoss, Reducer, traits
from torch import Tensor, nn
from torch.distributions import Beta
from torch.nn import functional


@traits(ref_emb=False)
class Metrix(CheckedLoss):
    """A contrastive loss that also mixes a positive and a negative of each anchor.

    Venkataramanan, Psomas, Kijak, Amsaleg, Karantzalos & Avrithis, "It Takes Two to Tango: Mixup
    for Deep Metric Learning" (ICLR 2022), Metrix/embed with the contrastive loss, implemented like
    the authors' code. A triplet (a, p, n) of unit vectors gives the mixture v = λ p + (1 − λ) n,
    scaled to unit length. The mixture counts as a positive with weight λ and as a negative with
    weight 1 − λ. With the Euclidean distance d, the four terms are

        [d(a, p) − m₊]₊,  [m₋ − d(a, n)]₊,  w λ [d(a, v) − m₊]₊,  w (1 − λ) [m₋ − d(a, v)]₊

    Each term is averaged over its numbers above 0, and the loss is the sum of the four averages.
    One λ per batch is drawn from Beta(α, α). Without a miner, all triplets are listed, so large
    batches need a miner (1,024 items with 8 per class need more than 6 GB without one).

    Args:
        positive_margin: m₊, the distance up to which a positive costs nothing.
        negative_margin: m₋, the distance above which a negative costs nothing.
        alpha: α of the distribution of λ.
        weight: w, weight of the mixtures.
        reducer: reduces each term to one number; the default is the mean of the numbers above 0.
    """

    def __init__(
        self,
        positive_margin: NonNegativeFloat = 0.0,
        negative_margin: NonNegativeFloat = 0.5,
        alpha: PositiveFloat = 2.0,
        weight: NonNegativeFloat = 0.4,
        reducer: Reducer = None,
    ) -> None:
        super().__init__(reducer=reducer)
        self.positive_margin = positive_margin
        self.negative_margin = negative_margin
        self.alpha = alpha
        self.weight = weight

    def get_default_reducer(self) -> nn.Module:
        """Return the mean over numbers above 0."""
        reducer: nn.Module = AvgNonZeroReducer()
        return reducer

    def _sub_loss_names(self) -> list[str]:
        return ["positive", "negative", "mixed_positive", "mixed_negative"]

    def compute_loss(
        self, embeddings: Tensor, labels: Any, indices_tuple: Any, ref_emb: Tensor, ref_labels: Any
    ) -> dict[str, Any]:
        """Return the losses of pairs and of mixtures, by name."""
        lam = _draw(embeddings, self.alpha)
        unit = functional.normalize(embeddings)
        rest = 1 - lam
        cosine = unit @ unit.T
        a, p, b, n, anchor, positive, negative = _pairs(indices_tuple, labels, embeddings)
        between = cosine[positive, negative]
        mixed = _mixed(cosine[anchor, positive], cosine[anchor, negative], between, lam)
        distance = _distance(mixed)
        losses = self.zero_losses()
        if len(a):
            values = (_distance(cosine[a, p]) - self.positive_margin).relu()
            losses |= losses_of(values, (a, p), "pos_pair", "positive")
        if len(b):
            values = (self.negative_margin - _distance(cosine[b, n])).relu()
            losses |= losses_of(values, (b, n), "neg_pair", "negative")
        if len(anchor):
            values = self.weight * lam * (distance - self.positive_margin).relu()
            losses |= losses_of(values, (anchor, positive), "pos_pair", "mixed_positive")
            values = self.weight * rest * (self.negative_margin - distance).relu()
            losses |= losses_of(values, (anchor, negative), "neg_pair", "mixed_negative")
        return losses


@traits(ref_emb=False)
class MetrixMultiSimilarity(CheckedLoss):
    """The multi-similarity loss, which also mixes a positive and a negative of each anchor.

    Metrix/embed of the paper of `core.metrix`, with the multi-similarity loss (Wang et al., CVPR
    2019) without its miner. An anchor a has the loss

        1/β log(1 + Σ_p exp(−β (s_ap − m))) + 1/γ log(1 + Σ_n exp(γ (s_an − m)))

    over its positives p and negatives n, where s is the cosine. The mixtures v of `core.metrix` add
    w times the same loss, with exp(−β (s_av − m)) multiplied by λ, and exp(γ (s_av − m)) by 1 − λ
    (equations 4 and 9). Without a miner, all triplets are listed, as in `core.metrix`.

    Args:
        positive_scale: β, sharpness of positives.
        negative_scale: γ, sharpness of negatives.
        base: m, the cosine that separates positives from negatives.
        alpha: α of the distribution of λ, Beta(α, α).
        weight: w, weight of the mixtures.
        reducer: reduces the anchors' losses to one number; the default is the mean.
    """

    def __init__(
        self,
        positive_scale: PositiveFloat = 2.0,
        negative_scale: PositiveFloat = 50.0,
        base: float = 0.5,
        alpha: PositiveFloat = 2.0,
        weight: NonNegativeFloat = 0.4,
        reducer: Reducer = None,
    ) -> None:
        super().__init__(reducer=reducer)
        self.scales = (-positive_scale, negative_scale)
        self.base = base
        self.alpha = alpha
        self.weight = weight

    def compute_loss(
        self, embeddings: Tensor, labels: Any, indices_tuple: Any, ref_emb: Tensor, ref_labels: Any
    ) -> dict[str, Any]:
        """Return the losses of the anchors (B,)."""
        lam = _draw(embeddings, self.alpha)
        unit = functional.normalize(embeddings)
        cosine = unit @ unit.T
        a, p, b, n, anchor, positive, negative = _pairs(indices_tuple, labels, embeddings)
        between = cosine[positive, negative]
        mixed = _mixed(cosine[anchor, positive], cosine[anchor, negative], between, lam)
        total = cosine.new_zeros(len(cosine))
        for weight, rows, values, share, scale in (
            (1.0, a, cosine[a, p], 1.0, self.scales[0]),
            (1.0, b, cosine[b, n], 1.0, self.scales[1]),
            (self.weight, anchor, mixed, lam, self.scales[0]),
            (self.weight, anchor, mixed, 1 - lam, self.scales[1]),
        ):
            powers = share * (scale * (values - self.base)).exp()
            sums = torch.zeros_like(total).index_add(0, rows, powers)
            total = total + weight / abs(scale) * sums.log1p()
        return item_losses(total)


@traits(ref_emb=False, miner=False)
class MetrixProxyAnchor(CheckedLoss):
    """The proxy-anchor loss, which also mixes a positive and a negative of each proxy.

    Metrix/embed of the paper of `core.metrix`, with the proxy-anchor loss (Kim et al., "Proxy
    Anchor Loss for Deep Metric Learning", CVPR 2020, equation 4). The anchors are learned proxies
    z, one per class. The loss

        mean_z⁺ log(1 + Σ_p exp(−γ (s_zp − δ))) + mean_z log(1 + Σ_n exp(γ (s_zn + δ)))

    has a mean over the proxies z⁺ of the batch's classes, and a mean over all proxies. The mixtures
    of each p with each n of a proxy z⁺ add w times the same loss. There, the first exponential is
    multiplied by λ, the second by 1 − λ, and both means are over z⁺.

    Args:
        classes: number of training classes; the framework sets it.
        embedding_size: dimension of the embeddings; the framework sets it.
        scale: γ, sharpness.
        margin: δ, margin of the cosine.
        alpha: α of the distribution of λ, Beta(α, α).
        weight: w, weight of the mixtures.
    """

    def __init__(
        self,
        classes: int,
        embedding_size: int,
        scale: PositiveFloat = 32.0,
        margin: NonNegativeFloat = 0.1,
        alpha: PositiveFloat = 2.0,
        weight: NonNegativeFloat = 0.4,
    ) -> None:
        super().__init__()
        self.proxies = nn.Parameter(torch.empty(classes, embedding_size))
        nn.init.kaiming_normal_(self.proxies, mode="fan_out")
        self.scale = scale
        self.margin = margin
        self.alpha = alpha
        self.weight = weight

    def compute_loss(
        self,
        embeddings: Tensor,
        labels: Tensor,
        indices_tuple: Any,
        ref_emb: Tensor,
        ref_labels: Tensor,
    ) -> dict[str, Any]:
        """Return the loss as one number."""
        lam = _draw(embeddings, self.alpha)
        unit = functional.normalize(embeddings)
        cosine = functional.normalize(self.proxies).to(unit) @ unit.T
        proxy = torch.arange(len(cosine), device=labels.device)[:, None].expand_as(cosine)
        same = proxy == labels
        present = same.any(1)
        positive, negative = (labels[:, None] != labels).nonzero(as_tuple=True)
        anchor = labels[positive]
        mixed = _mixed(
            cosine[anchor, positive],
            cosine[anchor, negative],
            (unit @ unit.T)[positive, negative],
            lam,
        )
        total = (
            self._sums(cosine[same], proxy[same], 1.0, -1)[present].mean()
            + self._sums(cosine[~same], proxy[~same], 1.0, 1).mean()
            + self.weight * self._sums(mixed, anchor, lam, -1)[present].mean()
            + self.weight * self._sums(mixed, anchor, 1 - lam, 1)[present].mean()
        )
        return reduced_loss(total)

    def _sums(self, cosine: Tensor, rows: Tensor, share: float | Tensor, sign: int) -> Tensor:
        """Return log(1 + share Σ exp(γ (δ + sign s))) of each proxy."""
        powers = share * (self.scale * (self.margin + sign * cosine)).exp()
        zeros = powers.new_zeros(len(self.proxies))
        sums: Tensor = zeros.index_add(0, rows, powers).log1p()
        return sums


def _draw(embeddings: Tensor, alpha: float) -> Tensor:
    """Draw λ from Beta(α, α)."""
    # Checking the arguments would wait for the GPU.
    lam: Tensor = Beta(*embeddings.new_full((2,), alpha), validate_args=False).sample()
    return lam


def _pairs(indices: Any, labels: Tensor | None, embeddings: Tensor) -> tuple[Tensor, ...]:
    """Return anchors and positives, anchors and negatives, and triplets.

    A miner's triplets are kept. Otherwise, each positive pair forms a triplet with each negative
    pair of the same anchor.
    """
    if indices is None:
        a, p, b, n = indices_utils.get_all_pairs_indices(labels)
    else:
        size = (len(embeddings), len(embeddings))
        a, p, b, n = listed_pairs(indices, size, embeddings.device)
        if len(indices) == 3:
            return a, p, b, n, a, p, n
    with_positive, with_negative = (a[:, None] == b).nonzero(as_tuple=True)
    return a, p, b, n, a[with_positive], p[with_positive], n[with_negative]


def _mixed(positive: Tensor, negative: Tensor, between: Tensor, lam: Tensor) -> Tensor:
    """Return the cosines of anchors and their mixtures λ p + (1 − λ) n, where λ is `lam`.

    They are (λ s_ap + (1 − λ) s_an) / ‖λ p + (1 − λ) n‖; `between` are the cosines of p and n.
    """
    rest = 1 - lam
    length = lam**2 + rest**2 + 2 * lam * rest * between
    # Opposite vectors cancel at λ = ½, and leave no length to divide by.
    return (lam * positive + rest * negative) / length.clamp(min=1e-6).sqrt()


def _distance(cosine: Tensor) -> Tensor:
    """Return Euclidean distances of unit vectors; the clamp keeps the gradient finite at 0."""
    return (2 - 2 * cosine).clamp(min=1e-12).sqrt()
