"""The Multi-Similarity miner, which the paper uses with all of its losses."""

from __future__ import annotations

import math
from typing import Annotated, Any

import torch
from pydantic import Field
from pytorch_metric_learning.distances import CosineSimilarity
from pytorch_metric_learning.miners import BaseMiner
from retrieval.plugin import Distance, full_precision
from torch import Tensor, nn


class PairMiner(BaseMiner):
    """Hard pairs: positives not nearer than the nearest negative by ε, and negatives conversely.

    Wang, Han, Huang, Dong & Scott, "Multi-Similarity Loss with General Pair Weighting for Deep
    Metric Learning", CVPR 2019, equations 11 and 12; section 7.2.1 of Song, Nie, Han & Li uses it.
    The pairs are those of `pml.multi_similarity`, found without sorting. For `anml.danml`, use
    `anml.danml_mined` instead, which needs no lists of pairs.

    Args:
        epsilon: ε, in units of the distance.
        distance: how two embeddings are compared; the cosine by default.
    """

    def __init__(
        self, epsilon: Annotated[float, Field(ge=0)] = 0.1, distance: Distance = None
    ) -> None:
        super().__init__(distance=distance)
        if not epsilon >= 0:
            raise ValueError(f"epsilon is {epsilon} and must be at least 0")
        self.epsilon = epsilon

    def get_default_distance(self) -> nn.Module:
        """Return the cosine similarity."""
        return CosineSimilarity()  # type: ignore[no-any-return]

    def forward(
        self,
        embeddings: Tensor,
        labels: Tensor,
        ref_emb: Tensor | None = None,
        ref_labels: Tensor | None = None,
    ) -> Any:
        """Return pairs, computed in at least float32 even under autocast; see `Miner`."""
        query = full_precision(embeddings)
        reference = None if ref_emb is None or ref_emb is embeddings else full_precision(ref_emb)
        with torch.autocast(device_type=query.device.type, enabled=False):
            return super().forward(
                query, labels, reference, None if reference is None else ref_labels
            )

    def mine(
        self, embeddings: Tensor, labels: Tensor, ref_emb: Tensor, ref_labels: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return indices of positive pairs and of negative pairs, each sorted by anchor."""
        similarity = self.distance(embeddings, ref_emb)
        if not self.distance.is_inverted:
            similarity = -similarity
        positive = labels[:, None] == ref_labels
        negative = ~positive
        if ref_emb is embeddings:
            positive.fill_diagonal_(False)
        none = similarity.new_full((len(embeddings), 1), math.inf)
        if similarity.shape[1] == 0:
            least = most = none
        else:
            least = similarity.masked_fill(~positive, math.inf).amin(1, keepdim=True)
            most = similarity.masked_fill(~negative, -math.inf).amax(1, keepdim=True)
        positive &= similarity < most + self.epsilon
        negative &= similarity > least - self.epsilon
        anchor, near = positive.nonzero(as_tuple=True)
        other, far = negative.nonzero(as_tuple=True)
        return anchor, near, other, far
