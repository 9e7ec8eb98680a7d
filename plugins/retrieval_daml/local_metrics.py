"""Several local metrics: the embedding in K parts of unit length, and a distance that weighs their
distances.
"""

from __future__ import annotations

from typing import Annotated

import torch
from pydantic import Field
from retrieval.errors import RecipeError
from retrieval.model.model import Normalize
from retrieval.model.precision import full_precision
from retrieval.plugin import Combiner
from torch import Tensor, nn
from torch.nn import functional

from retrieval_daml.blocks import all_pairs, exporting

Metrics = Annotated[int, Field(ge=1)]
Weight = Annotated[float, Field(ge=0)]


class UnitParts(nn.Module):
    """Scale each of K equal parts of a row to unit Euclidean length; a zero part stays zero."""

    def __init__(self, parts: int) -> None:
        super().__init__()
        self.parts = parts

    def forward(self, x: Tensor) -> Tensor:
        """Return (B, D) of (B, D), at least in float32 even under autocast."""
        return functional.normalize(split(full_precision(x), self.parts), dim=-1).flatten(-2)


class ViewMaps(nn.Module):
    """A linear map of its own for each of K views: features (B, F), the views side by side, to (B,
    D).

    Args:
        features: F, of all views together.
        embedding_size: D, of all maps together.
        views: K; it divides both.
    """

    def __init__(self, features: int, embedding_size: int, views: int) -> None:
        super().__init__()
        self.maps = nn.ModuleList(
            nn.Linear(features // views, embedding_size // views) for _ in range(views)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return (B, D) of (B, F)."""
        parts = x.chunk(len(self.maps), dim=-1)
        return torch.cat([one(part) for one, part in zip(self.maps, parts, strict=True)], dim=-1)


class LocalMetrics(Combiner):
    """Base of a distance D = Σ_k γ_k ‖e_k(x) − e_k(y)‖ of unit embeddings e_k; one local metric is
    the plain distance.

    Args:
        embedding_size: width of all K embeddings together.
        metrics: K.
        name: of the factory, for errors.
        views: whether metric k sees only the k-th of K equal parts of the features.

    Raises:
        RecipeError: K does not divide the width.
    """

    def __init__(self, embedding_size: int, metrics: int, name: str, views: bool = False) -> None:
        super().__init__()
        if metrics < 1 or embedding_size % metrics:
            divisors = [k for k in range(1, 33) if embedding_size % k == 0]
            raise RecipeError(
                [
                    f"[combiner] {name} metrics: {metrics} local metrics cannot share an embedding"
                    f" of {embedding_size} columns evenly. Set [head] embedding_size to a multiple"
                    f" of {metrics}, or metrics to one of {', '.join(map(str, divisors))}."
                ]
            )
        self.embedding_size, self.metrics = embedding_size, metrics
        self.name, self.views = name, views and metrics > 1
        self.exact = self.plain = metrics == 1

    def build_head(self, features: int) -> nn.Module:
        """Return features (B, F) → K unit embeddings side by side (B, D).

        Raises:
            RecipeError: with `views`, K does not divide F.
        """
        last: nn.Module = Normalize() if self.metrics == 1 else UnitParts(self.metrics)
        if not self.views:
            return nn.Sequential(nn.Linear(features, self.embedding_size), last)
        if features % self.metrics:
            raise RecipeError(
                [
                    f"[combiner] {self.name} views: {features} features are not {self.metrics}"
                    " views of one width side by side. Set metrics to the number of views, or"
                    " leave views out: then every metric sees all."
                ]
            )
        return nn.Sequential(ViewMaps(features, self.embedding_size, self.metrics), last)

    def index_vectors(self, codes: Tensor) -> Tensor:
        """Return the K unit embeddings side by side (N, D)."""
        return codes[:, : self.embedding_size]

    def local_distances(self, query: Tensor, reference: Tensor) -> Tensor:
        """Return the local distances (Q, R, K) of codes, all at once: for small numbers of pairs."""
        x, y = (split(self.index_vectors(codes), self.metrics) for codes in (query, reference))
        if exporting():  # the same numbers, by operators that every exporter knows
            apart = x[:, None] - y[None]
            return apart.square().sum(-1).sqrt()
        apart = torch.cdist(
            x.transpose(0, 1), y.transpose(0, 1), compute_mode="donot_use_mm_for_euclid_dist"
        )
        return apart.movedim(0, -1)

    def local_similarities(self, query: Tensor, reference: Tensor) -> Tensor:
        """Return the local cosine similarities (Q, R, K) of codes, all at once: for small numbers
        of pairs.
        """
        x, y = (split(self.index_vectors(codes), self.metrics) for codes in (query, reference))
        return torch.matmul(x.transpose(0, 1), y.permute(1, 2, 0)).movedim(0, -1)

    def paired_distances(self, query: Tensor, reference: Tensor) -> Tensor:
        """Return the local distances (N, K) of codes row by row."""
        apart = self.index_vectors(query) - self.index_vectors(reference)
        # the root of zero has no gradient
        return (split(apart, self.metrics).square().sum(-1) + 1e-12).sqrt()

    def plain_mat(self, query: Tensor, reference: Tensor) -> Tensor:
        """Return the Euclidean distances (Q, R) of one embedding, bit for bit as
        pytorch-metric-learning's `LpDistance`.
        """
        return torch.cdist(functional.normalize(query), functional.normalize(reference))


def split(x: Tensor, parts: int) -> Tensor:
    """Return (…, K, D / K) of (…, D)."""
    made: Tensor = x.unflatten(-1, (parts, -1))  # type: ignore[no-untyped-call]
    return made


def widened(*codes: Tensor) -> tuple[Tensor, ...]:
    """Return codes in at least float32, as matrices of distances need."""
    return tuple(full_precision(x) for x in codes)


__all__ = [
    "LocalMetrics",
    "Metrics",
    "UnitParts",
    "ViewMaps",
    "Weight",
    "all_pairs",
    "split",
    "widened",
]
