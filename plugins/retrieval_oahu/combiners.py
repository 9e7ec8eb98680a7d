"""Hedge weights over L + 1 metric spaces as a distance: two ways to search, under two names.

Neither approximates the other: their first ten answers agree by a fifth or so.
"""

from __future__ import annotations

from typing import Annotated, Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from retrieval.plugin import Combiner, Subspace
from torch import Tensor, nn

from retrieval_oahu.ahu import Rule, hedge_update
from retrieval_oahu.limits import refuse_range
from retrieval_oahu.modules import OverComplete

Count = Annotated[int, Field(ge=1)]


class Hedge(Combiner):
    """What both ways share: the weights, and √(Σ α_l D_l²) as the distance that is trained and
    evaluated.

    Attributes:
        spaces: L + 1.
    """

    def __init__(
        self,
        embedding: Count = 50,
        depth: Annotated[int, Field(ge=0)] = 5,
        hidden: Count = 100,
        beta: Annotated[float, Field(gt=0, lt=1)] = 0.99,
        smoothing: Annotated[float, Field(gt=0, le=1)] = 0.1,
        rule: Rule = "exp",
    ) -> None:
        super().__init__()
        refuse_range("beta", beta, 0, 1)
        refuse_range("smoothing", smoothing, 0, 1, closed=True)
        self.embedding, self.depth, self.hidden = embedding, depth, hidden
        self.beta, self.smoothing, self.rule = beta, smoothing, rule
        self.spaces = depth + 1
        self.register_buffer(
            "alpha", torch.full((self.spaces,), 1 / self.spaces, dtype=torch.float64)
        )
        # what the codes were multiplied with: 1 where they are trained, √α where a learner's are
        # served
        self.register_buffer("factor", torch.ones(self.spaces, dtype=torch.float64))

    @classmethod
    def of_weights(cls, alpha: NDArray[np.floating[Any]], embedding: int) -> Self:
        """Return the combiner of codes that are embeddings times √α, as `OAHU.transform` gives
        them.
        """
        made = cls(embedding, len(alpha) - 1)
        weights = torch.from_numpy(np.array(alpha, dtype=np.float64))
        made.get_buffer("alpha").copy_(weights)
        made.get_buffer("factor").copy_(weights.sqrt())
        made._weights_changed()
        return made

    def build_head(self, features: int) -> nn.Module:
        """Return the over-complete network, features (B, F) to codes (B, (L + 1) E)."""
        return OverComplete(features, self.depth, self.hidden, self.embedding)

    def embeddings(self, codes: Tensor) -> Tensor:
        """Return the unit embeddings (N, L + 1, E) of codes (N, (L + 1) E)."""
        parted = codes.reshape(-1, self.spaces, self.embedding)
        return parted / self._row("factor", codes)[:, None]

    def observe(self, losses: Tensor) -> None:
        """Move the weights by each space's loss (L + 1,), Eq 20."""
        moved = hedge_update(
            self.get_buffer("alpha").cpu().numpy(),
            losses.detach().double().cpu().numpy(),
            self.beta,
            self.smoothing,
            self.rule,
        )
        self.get_buffer("alpha").copy_(torch.from_numpy(moved))
        self._weights_changed()

    def compute_mat(self, query_emb: Tensor, ref_emb: Tensor) -> Tensor:
        """Return √(Σ α_l D_l²) (Q, R)."""
        query, reference = self._weighed(query_emb), self._weighed(ref_emb)
        if torch.is_grad_enabled():  # the root of zero has no gradient
            squares: Tensor = (query[:, None] - reference).square().sum(2)
            return (squares + 1e-12).sqrt()
        return torch.cdist(query, reference, compute_mode="donot_use_mm_for_euclid_dist")

    def pairwise_distance(self, query_emb: Tensor, ref_emb: Tensor) -> Tensor:
        """Return √(Σ α_l D_l²) (N,)."""
        squares: Tensor = (self._weighed(query_emb) - self._weighed(ref_emb)).square().sum(1)
        return (squares + 1e-12).sqrt()

    def index_vectors(self, codes: Tensor) -> Tensor:
        """Return the unit embeddings side by side: they do not change when the weights do."""
        return self.embeddings(codes).flatten(1)

    def _weighed(self, codes: Tensor) -> Tensor:
        weighed: Tensor = (
            self.embeddings(codes) * self._row("alpha", codes).sqrt()[:, None]
        ).flatten(1)
        return weighed

    def _row(self, name: str, like: Tensor) -> Tensor:
        row: Tensor = self.get_buffer(name).to(like.dtype)
        return row

    def _weights_changed(self) -> None:
        """Called after the weights changed."""

    def _load_from_state_dict(self, *arguments: Any) -> None:
        super()._load_from_state_dict(*arguments)
        self._weights_changed()


class HedgeScore(Hedge):
    """Hedge-weighted spaces, searched as the paper does: an index for each, candidates scored and
    merged (Eq 27).

    Each of the depth + 1 spaces proposes its k nearest items, scored by how near they are among
    those k and by the space's weight; an item keeps its best score. Gao et al., "Towards
    Self-Adaptive Metric Learning On the Fly", WWW 2019, §3.6.3. Training and `retrieval evaluate`
    measure √(Σ α_l D_l²). With `oahu.abtl` the weights adapt during training.

    Args:
        embedding: width E of each space's embedding.
        depth: L, the number of hidden layers.
        hidden: units in each.
        beta: β, what a weight is multiplied with at a loss of 1.
        smoothing: s; no weight falls below about s / (depth + 1).
        rule: how losses discount weights, as for `oahu.oahu`.
    """

    merge = "score"

    def __init__(
        self,
        embedding: Count = 50,
        depth: Annotated[int, Field(ge=0)] = 5,
        hidden: Count = 100,
        beta: Annotated[float, Field(gt=0, lt=1)] = 0.99,
        smoothing: Annotated[float, Field(gt=0, le=1)] = 0.1,
        rule: Rule = "exp",
    ) -> None:
        super().__init__(embedding, depth, hidden, beta, smoothing, rule)
        self._weights_changed()

    def _weights_changed(self) -> None:
        width = self.embedding
        self.subspaces = tuple(
            Subspace(f"space{level}", level * width, (level + 1) * width, float(weight))
            for level, weight in enumerate(self.get_buffer("alpha").tolist())
        )


class HedgeSum(Hedge):
    """Hedge-weighted spaces, searched in one index by Σ α_l D_l²; the weights may change without a
    rebuild.

    Items are stored as their unit embeddings side by side, and a query's are multiplied with the
    weights: the inner product is then Σ α_l f_l(q)·f_l(x) = 1 − ½ Σ α_l D_l²; the distance of an
    answer is √(Σ α_l D_l²), 0 for the item itself. With `oahu.abtl` the weights adapt during
    training. This is not Eq 27 of the paper (`oahu.hedge`), and no approximation of it.

    Args:
        embedding: width E of each space's embedding.
        depth: L, the number of hidden layers.
        hidden: units in each.
        beta: β, what a weight is multiplied with at a loss of 1.
        smoothing: s; no weight falls below about s / (depth + 1).
        rule: how losses discount weights, as for `oahu.oahu`.
    """

    measure = "inner"

    def query_vectors(self, codes: Tensor) -> Tensor:
        """Return the unit embeddings times the weights, side by side."""
        return (self.embeddings(codes) * self._row("alpha", codes)[:, None]).flatten(1)
