"""The adaptive-bound triplet loss for deep training."""

from __future__ import annotations

import math
from typing import Annotated, Any

import torch
from pydantic import Field
from pytorch_metric_learning.reducers import AvgNonZeroReducer
from pytorch_metric_learning.utils import loss_and_miner_utils as indices_utils
from retrieval.helpers import losses_of
from retrieval.plugin import CheckedLoss, Distance, Reducer
from torch import Tensor, nn

from retrieval_oahu.combiners import Hedge, root
from retrieval_oahu.online import refuse_range, warn_tau

# If a batch has more triplets, this many of them are drawn at random for the loss.
_MAX_TRIPLETS = 200_000
# From a batch of more items, 100 triplets per anchor are drawn instead of all.
_MAX_ITEMS = 64


class ABTL(CheckedLoss):
    """Adaptive-bound triplet loss, whose bounds for positives and negatives follow the distances.

    Gao et al., "Towards Self-Adaptive Metric Learning On the Fly", WWW 2019, Eq 11–13. A triplet
    whose anchor has distance D⁺ to the positive and D⁻ to the negative has the loss

        ½ ((D⁺ − d_sim) / (2 − d_sim) + (d_dis − D⁻) / d_dis)
        d_sim = τ (e^{D⁺} − 1) / (e² − 1),  d_dis = 2 − τ + τ (1 − e^{−D⁻}) / (1 − e^{−2})

    The bounds d_sim and d_dis have no gradient. The loss is 0 only for D⁺ = 0 and D⁻ = 2, so every
    triplet contributes. With the combiners `oahu.hedge` and `oahu.hedge_sum`, which have several
    embedding spaces, the loss is the weighted sum of the losses of the spaces (Eq 19). The weights
    adapt with each training batch.

    Args:
        tau: τ, above 0 and below 2. Similar pairs are pulled below a bound of at most τ. Dissimilar
            pairs are pushed above a bound of at least 2 − τ. The paper's theorem requires at most
            2/3.
        distance: the distance of two embeddings, between 0 and 2. By default it is the Euclidean
            distance of unit vectors.
        reducer: reduces the losses of the triplets to one number. By default it takes the mean of
            the losses above 0.
    """

    def __init__(
        self,
        tau: Annotated[float, Field(gt=0, lt=2)] = 0.1,
        distance: Distance = None,
        reducer: Reducer = None,
    ) -> None:
        refuse_range("tau", tau, 0, 2)
        warn_tau(tau)
        super().__init__(distance=distance, reducer=reducer)
        if self.distance.is_inverted:
            raise ValueError("distance is a similarity. ABTL needs a distance between 0 and 2.")
        self.tau = tau

    def get_default_reducer(self) -> nn.Module:
        """Return the reducer that takes the mean of the losses above 0."""
        return AvgNonZeroReducer()  # type: ignore[no-any-return]

    def compute_loss(
        self, embeddings: Tensor, labels: Any, indices_tuple: Any, ref_emb: Tensor, ref_labels: Any
    ) -> Any:
        """Return one loss per triplet in the format of pytorch-metric-learning's reducers."""
        indices = indices_utils.convert_to_triplets(
            indices_tuple,
            labels,
            ref_labels,
            t_per_anchor="all" if len(labels) <= _MAX_ITEMS else 100,
        )
        count = len(indices[0])
        if count > _MAX_TRIPLETS:
            drawn = torch.randperm(count, device=indices[0].device)[:_MAX_TRIPLETS]
            indices = tuple(index[drawn] for index in indices)
        a, p, n = indices
        if not count:
            return self.zero_losses()
        if isinstance(self.distance, Hedge):
            losses = self._hedged(embeddings, ref_emb, a, p, n)
        else:
            matrix = self.distance(embeddings, ref_emb)
            losses = abtl(matrix[a, p], matrix[a, n], self.tau)
        return losses_of(losses, (a, p, n), "triplet")

    def _hedged(self, x: Tensor, r: Tensor, a: Tensor, p: Tensor, n: Tensor) -> Tensor:
        """Return Σ α_l loss_l of each triplet over spaces l; update the weights α in training."""
        queries = self.distance.embeddings(x)
        references = self.distance.embeddings(r)
        alpha = self.distance.alpha.to(x.dtype).clone()
        losses_by_space = []
        for space in range(self.distance.spaces):
            difference = queries[:, None, space] - references[None, :, space]
            matrix = root(difference.square().sum(2))
            losses_by_space.append(abtl(matrix[a, p], matrix[a, n], self.tau))
        losses = torch.stack(losses_by_space)
        if self.training and torch.is_grad_enabled():
            self.distance.observe(losses.mean(dim=1))
        weighted: Tensor = alpha @ losses
        return weighted


def abtl(positive: Tensor, negative: Tensor, tau: float) -> Tensor:
    """Return losses (T,) for distances `positive`, D⁺, and `negative`, D⁻, both (T,)."""
    with torch.no_grad():
        similar_bound = tau / math.expm1(2.0) * torch.expm1(positive.clamp(max=2))
        dissimilar_bound = (2 - tau) + tau / math.expm1(-2.0) * torch.expm1(-negative.clamp(max=2))
    attractive = ((positive - similar_bound) / (2 - similar_bound)).relu()
    repulsive = (1 - negative / dissimilar_bound).relu()
    return (attractive + repulsive) / 2
