"""A bilinear similarity of unit vectors as a combiner: the query is multiplied by a matrix, items
stay as they are.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from retrieval.model.precision import full_precision
from retrieval.plugin import Combiner
from torch import Tensor, nn
from torch.nn import functional

from retrieval_oahu.network import TINY


class UnitLength(nn.Module):
    """Scale rows to unit length; a zero row stays zero."""

    def forward(self, x: Tensor) -> Tensor:
        """Return unit vectors (B, F)."""
        return functional.normalize(full_precision(x), dim=1, eps=TINY)


class Bilinear(Combiner):
    """The distance |Wᵀx − y|, which for unit vectors y has the order of the similarity xᵀ W y.

    Args:
        similarity: (F, F) W.
    """

    def __init__(self, similarity: NDArray[np.floating[Any]]) -> None:
        super().__init__()
        self.register_buffer("similarity", torch.from_numpy(np.array(similarity, dtype=np.float32)))

    def compute_mat(self, query_emb: Tensor, ref_emb: Tensor) -> Tensor:
        """Return distances (Q, R)."""
        return torch.cdist(
            self.query_vectors(query_emb), ref_emb, compute_mode="donot_use_mm_for_euclid_dist"
        )

    def pairwise_distance(self, query_emb: Tensor, ref_emb: Tensor) -> Tensor:
        """Return distances (N,)."""
        squares: Tensor = (self.query_vectors(query_emb) - ref_emb).square().sum(1)
        return (squares + 1e-12).sqrt()

    def query_vectors(self, codes: Tensor) -> Tensor:
        """Return Wᵀ x (N, F)."""
        asked: Tensor = codes @ self.get_buffer("similarity").to(codes.dtype)
        return asked
