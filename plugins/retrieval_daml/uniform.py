"""`daml.uniform`: several metrics that weigh the same for every pair (the paper's Table X)."""

from __future__ import annotations

import math
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from retrieval_daml.local_metrics import LocalMetrics, Metrics, all_pairs, widened


class UniformMetrics(LocalMetrics):
    """K local metrics of equal weight 1/K: what the discriminator has to beat.

    D = (1/K · Σ_k d_k^p)^(1/p) with d_k = ‖e_k(x) − e_k(y)‖ of unit embeddings (Eq 14 with Γ =
    1/K). Candidates are proposed by the Euclidean distance of the embeddings side by side, which is
    √(Σ d_k²): with `power = 2` that *is* the order of D and a bundle needs no rescorer; with the
    paper's `power = 1` it is not, unless K = 1.

    Duan, Lu, Zheng & Zhou, "Deep Adversarial Metric Learning", IEEE Transactions on Image
    Processing 29, 2020, Table X.
    """

    def __init__(
        self,
        embedding_size: int,
        metrics: Metrics = 4,
        power: Literal[1, 2] = 1,
        views: bool = False,
        candidates: Annotated[int, Field(ge=1)] = 200,
    ) -> None:
        """Build.

        Args:
            metrics: K, how many local metrics share the embedding evenly; 1 is the plain Euclidean
                distance.
            power: p; 1 is the paper's mean of distances, 2 the root of the mean of their squares.
            views: the features are those of K views of an item side by side, of one width, and
                metric k sees the k-th view alone.
            candidates: how many candidates a server rescores by default.
        """
        super().__init__(embedding_size, metrics, "daml.uniform", views)
        self.exponent = power
        self.exact = metrics == 1 or power == 2
        self.candidates = candidates

    def compute_mat(self, query_emb: Tensor, ref_emb: Tensor) -> Tensor:
        """Return distances (Q, R) between codes (Q, D) and (R, D)."""
        query, reference = widened(query_emb, ref_emb)
        if self.metrics == 1:
            return self.plain_mat(query, reference)
        return all_pairs(self._mean, query, reference, width=self.metrics)

    def pairwise_distance(self, query_emb: Tensor, ref_emb: Tensor) -> Tensor:
        """Return distances (N,) between codes row by row."""
        local = self.paired_distances(query_emb, ref_emb)
        if self.metrics == 1:
            return local.squeeze(-1)
        return local.mean(-1) if self.exponent == 1 else local.square().mean(-1).sqrt()

    def similarities(self, query: Tensor, reference: Tensor) -> Tensor:
        """Return (Q, R) mean cosine similarities: for losses that want a similarity, larger being
        closer.
        """
        return torch.matmul(query, reference.T) / self.metrics

    def _mean(self, query: Tensor, reference: Tensor) -> Tensor:
        if self.exponent == 1:
            return self.local_distances(query, reference).mean(-1)
        scale = 1 / math.sqrt(self.metrics)
        apart: Tensor = torch.cdist(query, reference, compute_mode="donot_use_mm_for_euclid_dist")
        return apart * scale
