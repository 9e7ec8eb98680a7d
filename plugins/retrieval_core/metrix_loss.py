"""Metrix: a contrastive loss with mixup."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field
from pytorch_metric_learning.reducers import AvgNonZeroReducer
from pytorch_metric_learning.utils import loss_and_miner_utils as indices_utils
from retrieval.plugin import CheckedLoss, Reducer, listed_pairs, nothing, traits
from torch import Tensor, nn
from torch.distributions import Beta
from torch.nn import functional

NonNegative = Annotated[float, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]


@traits(ref_emb=False)
class Metrix(CheckedLoss):
    """A contrastive loss that also mixes a positive and a negative of each anchor.

    Venkataramanan, Psomas, Kijak, Amsaleg, Karantzalos & Avrithis, "It Takes Two to Tango: Mixup
    for Deep Metric Learning" (ICLR 2022), Metrix/embed with the contrastive loss, as in the
    authors' code. A triplet (a, p, n) of unit vectors gives the mixture v = λ p + (1 − λ) n, scaled
    to unit length. It counts as a positive with weight λ and as a negative with weight 1 − λ. With
    the Euclidean distance d, the four terms are

        [d(a, p) − m₊]₊,  [m₋ − d(a, n)]₊,  w λ [d(a, v) − m₊]₊,  w (1 − λ) [m₋ − d(a, v)]₊

    Each term is averaged over its numbers above 0, and the loss is the sum of the four averages.
    Each batch draws one λ from Beta(α, α).

    Args:
        positive_margin: m₊, the distance up to which a positive costs nothing.
        negative_margin: m₋, the distance from which on a negative costs nothing.
        alpha: α of the distribution of λ.
        weight: w, weight of the mixtures.
        reducer: reduces each term to one number; the default is the mean of the numbers above 0.
    """

    def __init__(
        self,
        positive_margin: NonNegative = 0.0,
        negative_margin: NonNegative = 0.5,
        alpha: Positive = 2.0,
        weight: NonNegative = 0.4,
        reducer: Reducer = None,
    ) -> None:
        super().__init__(reducer=reducer)
        self.positive_margin, self.negative_margin = positive_margin, negative_margin
        self.alpha, self.weight = alpha, weight

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
        if indices_tuple is None:
            a, p, b, n = indices_utils.get_all_pairs_indices(labels)
        else:
            size = (len(embeddings), len(embeddings))
            a, p, b, n = listed_pairs(indices_tuple, size, embeddings.device)
        anchor, positive, negative = _triplets(indices_tuple, a, p, b, n)
        unit = functional.normalize(embeddings)
        cosine = unit @ unit.T
        part = Beta(*cosine.new_full((2,), self.alpha), validate_args=False).sample()
        rest = 1 - part
        # the cosine of a and v is (λ s_ap + (1 − λ) s_an) / ‖λ p + (1 − λ) n‖
        length = part**2 + rest**2 + 2 * part * rest * cosine[positive, negative]
        mixed = part * cosine[anchor, positive] + rest * cosine[anchor, negative]
        distance = _distance(mixed / length.clamp(min=1e-6).sqrt())
        losses: dict[str, tuple[Tensor, tuple[Tensor, Tensor], float | Tensor]] = {
            "positive": (_distance(cosine[a, p]) - self.positive_margin, (a, p), 1.0),
            "negative": (self.negative_margin - _distance(cosine[b, n]), (b, n), 1.0),
            "mixed_positive": (
                distance - self.positive_margin,
                (anchor, positive),
                self.weight * part,
            ),
            "mixed_negative": (
                self.negative_margin - distance,
                (anchor, negative),
                self.weight * rest,
            ),
        }
        return {
            name: {
                "losses": weight * value.relu(),
                "indices": pairs,
                "reduction_type": "pos_pair" if "positive" in name else "neg_pair",
            }
            if len(value)
            else nothing(embeddings)
            for name, (value, pairs, weight) in losses.items()
        }


def _triplets(
    indices: Any, a: Tensor, p: Tensor, b: Tensor, n: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return a miner's triplets, or all triplets that pairs with the same anchor form."""
    if indices is not None and len(indices) == 3:
        return a, p, n
    which, other = (a[:, None] == b).nonzero(as_tuple=True)
    return a[which], p[which], n[other]


def _distance(cosine: Tensor) -> Tensor:
    """Return Euclidean distances of unit vectors, clamped since the root has no gradient at 0."""
    return (2 - 2 * cosine).clamp(min=1e-12).sqrt()
