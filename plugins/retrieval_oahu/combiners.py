"""Torch modules: OAHU's network, combiners that weight its metric spaces, OASIS's similarity."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Self

import numpy as np
import torch
from pydantic import Field, NonNegativeInt, PositiveInt
from retrieval.base.arrays import Array, Floats
from retrieval.helpers import full_precision
from retrieval.plugin import Combiner, Subspace
from torch import Tensor, nn
from torch.nn import functional

from retrieval_oahu.network import TINY, Rule, hedge_update
from retrieval_oahu.online import refuse_range

# The faster way, a product of matrices, loses the digits of small distances.
_EXACT = "donot_use_mm_for_euclid_dist"


class OverComplete(nn.Module):
    """OAHU's network: features (B, F) → weighted unit embeddings of the spaces (B, (L + 1) E).

    Args:
        features: F, the number of features.
        depth: L, the number of hidden layers.
        hidden: number of units per hidden layer.
        embedding: E, the dimension of the embedding in a space.
    """

    def __init__(self, features: int, depth: int, hidden: int, embedding: int) -> None:
        super().__init__()
        self.hidden = nn.ModuleList(
            nn.Linear(features if level == 0 else hidden, hidden, bias=False)
            for level in range(depth)
        )
        self.embedding = nn.ModuleList(
            nn.Linear(features if level == 0 else hidden, embedding, bias=False)
            for level in range(depth + 1)
        )
        for layers, variance in ((self.hidden, 2.0), (self.embedding, 1.0)):
            for weight in layers.parameters():
                nn.init.normal_(weight, std=(variance / weight.shape[1]) ** 0.5)
        self.register_buffer("offset", torch.zeros(features))
        self.register_buffer("scale", torch.ones(features))
        self.register_buffer("factor", torch.ones(depth + 1))

    @classmethod
    def of_weights(
        cls,
        levels: Sequence[Array],
        hidden: int,
        mean: Array,
        scale: Array,
        alpha: Array,
    ) -> OverComplete:
        """Return a float32 network with a learner's weights.

        The first of `levels` is (F, hidden + E), the others are (hidden, hidden + E). The hidden
        columns of the last level are unused.
        """
        head = cls(len(mean), len(levels) - 1, hidden, levels[0].shape[1] - hidden)

        def put(target: Tensor, values: object) -> None:
            target.copy_(torch.from_numpy(np.array(values, dtype=np.float32)))

        with torch.no_grad():
            # The last level has no hidden layer.
            for level, layer in zip(levels, head.hidden.parameters(), strict=False):
                put(layer, level[:, :hidden].T)
            for level, layer in zip(levels, head.embedding.parameters(), strict=True):
                put(layer, level[:, hidden:].T)
            put(head.get_buffer("offset"), mean)
            put(head.get_buffer("scale"), scale)
            put(head.get_buffer("factor"), np.sqrt(alpha))
        return head

    def forward(self, x: Tensor) -> Tensor:
        """Return codes (B, (L + 1) E) of features (B, F)."""
        h = (x - self.get_buffer("offset")) / self.get_buffer("scale")
        factor = self.get_buffer("factor")
        codes = []
        for level, layer in enumerate(self.embedding):
            embedding = functional.normalize(full_precision(layer(h)), dim=1, eps=TINY)
            codes.append(embedding * factor[level])
            if level < len(self.hidden):
                h = self.hidden[level](h).relu()
        return torch.cat(codes, dim=1)


class UnitLength(nn.Module):
    """Scales rows to unit length; a zero row stays zero."""

    def forward(self, x: Tensor) -> Tensor:
        """Return unit vectors (B, F)."""
        return functional.normalize(full_precision(x), dim=1, eps=TINY)


def root(squares: Tensor) -> Tensor:
    """Return square roots whose gradient is finite at zero."""
    return (squares + 1e-12).sqrt()


class Bilinear(Combiner):
    """The distance |Wᵀx − y|, which orders unit vectors y as the similarity xᵀ W y does.

    Args:
        similarity: (F, F) W.
    """

    def __init__(self, similarity: Floats) -> None:
        super().__init__()
        self.register_buffer("similarity", torch.from_numpy(np.array(similarity, dtype=np.float32)))

    def compute_mat(self, query_emb: Tensor, ref_emb: Tensor) -> Tensor:
        """Return distances (Q, R)."""
        return torch.cdist(self.query_vectors(query_emb), ref_emb, compute_mode=_EXACT)

    def pairwise_distance(self, query_emb: Tensor, ref_emb: Tensor) -> Tensor:
        """Return distances (N,)."""
        return root((self.query_vectors(query_emb) - ref_emb).square().sum(1))

    def query_vectors(self, codes: Tensor) -> Tensor:
        """Return Wᵀ x (N, F)."""
        vectors: Tensor = codes @ self.get_buffer("similarity").to(codes.dtype)
        return vectors


class Hedge(Combiner):
    """Base class of combiners with the distance √(Σ α_l D_l²), whose weights α `observe` updates.

    D_l is the distance of two unit embeddings in space l.

    Args:
        embedding: dimension E of the embedding in a space.
        depth: L, the number of hidden layers.
        hidden: number of units per hidden layer.
        beta: β, by which a weight is multiplied after a loss of 1.
        smoothing: s. No weight falls below about s / (depth + 1).
        rule: factor of a weight after a loss; see `oahu.oahu`.

    Attributes:
        spaces: L + 1, the number of metric spaces.
    """

    def __init__(
        self,
        embedding: PositiveInt = 50,
        depth: NonNegativeInt = 5,
        hidden: PositiveInt = 100,
        beta: Annotated[float, Field(gt=0, lt=1)] = 0.99,
        smoothing: Annotated[float, Field(gt=0, le=1)] = 0.1,
        rule: Rule = "exp",
    ) -> None:
        super().__init__()
        refuse_range("beta", beta, 0, 1)
        refuse_range("smoothing", smoothing, 0, 1, closed=True)
        self.embedding = embedding
        self.depth = depth
        self.hidden = hidden
        self.beta = beta
        self.smoothing = smoothing
        self.rule = rule
        self.spaces = depth + 1
        self.register_buffer(
            "alpha", torch.full((self.spaces,), 1 / self.spaces, dtype=torch.float64)
        )
        # Factor of each space's embedding in the codes: 1 in deep training, √α for codes of an
        # exported learner.
        self.register_buffer("factor", torch.ones(self.spaces, dtype=torch.float64))
        self._weights_changed()

    @classmethod
    def of_weights(cls, alpha: Floats, embedding: int) -> Self:
        """Return the combiner for codes of `OAHU.transform`, which are embeddings times √α."""
        combiner = cls(embedding, len(alpha) - 1)
        weights = torch.from_numpy(np.array(alpha, dtype=np.float64))
        combiner.get_buffer("alpha").copy_(weights)
        combiner.get_buffer("factor").copy_(weights.sqrt())
        combiner._weights_changed()
        return combiner

    def build_head(self, features: int) -> nn.Module:
        """Return OAHU's network: features (B, F) → codes (B, (L + 1) E)."""
        return OverComplete(features, self.depth, self.hidden, self.embedding)

    def embeddings(self, codes: Tensor) -> Tensor:
        """Return the unit embeddings (N, L + 1, E) in codes (N, (L + 1) E)."""
        by_space = codes.reshape(-1, self.spaces, self.embedding)
        return by_space / self._per_space("factor", codes)[:, None]

    def observe(self, losses: Tensor) -> None:
        """Update the weights with the losses (L + 1,) of the spaces, by Eq 20."""
        # The function of the learner `OAHU`, so that both weigh spaces alike.
        updated = hedge_update(
            self.get_buffer("alpha").cpu().numpy(),
            losses.detach().double().cpu().numpy(),
            self.beta,
            self.smoothing,
            self.rule,
        )
        self.get_buffer("alpha").copy_(torch.from_numpy(updated))
        self._weights_changed()

    def compute_mat(self, query_emb: Tensor, ref_emb: Tensor) -> Tensor:
        """Return √(Σ α_l D_l²) (Q, R)."""
        query = self._weighted(query_emb)
        reference = self._weighted(ref_emb)
        if torch.is_grad_enabled():
            return root((query[:, None] - reference).square().sum(2))
        return torch.cdist(query, reference, compute_mode=_EXACT)

    def pairwise_distance(self, query_emb: Tensor, ref_emb: Tensor) -> Tensor:
        """Return √(Σ α_l D_l²) (N,)."""
        return root((self._weighted(query_emb) - self._weighted(ref_emb)).square().sum(1))

    def index_vectors(self, codes: Tensor) -> Tensor:
        """Return the unit embeddings side by side; they do not depend on the weights."""
        return self.embeddings(codes).flatten(1)

    def _weighted(self, codes: Tensor) -> Tensor:
        """Return embeddings times √α (N, (L + 1) E), whose distances are √(Σ α_l D_l²)."""
        roots = self._per_space("alpha", codes).sqrt()
        weighted: Tensor = (self.embeddings(codes) * roots[:, None]).flatten(1)
        return weighted

    def _per_space(self, name: str, like: Tensor) -> Tensor:
        """Return the buffer `name` (L + 1,), one number per space, in the type of `like`."""
        values: Tensor = self.get_buffer(name).to(like.dtype)
        return values

    def _weights_changed(self) -> None:
        """Hook that runs after the weights have changed."""

    def _load_from_state_dict(self, *arguments: Any) -> None:
        # Torch copies the loaded weights into the buffer; what is derived from them must follow.
        super()._load_from_state_dict(*arguments)
        self._weights_changed()


class HedgeScore(Hedge):
    """Hedge-weighted metric spaces, each searched in its own index; Eq 27 merges the hits.

    Gao et al., "Towards Self-Adaptive Metric Learning On the Fly", WWW 2019, §3.6.3. Each of the
    depth + 1 spaces proposes its k nearest items. A space with weight α gives an item the score
    α e^{−r}, where r rises with distance from 0 for the nearest of the k items to 1 for the
    farthest. An item that several spaces propose keeps its best score. Training and `retrieval
    evaluate` use the distance √(Σ α_l D_l²). With `oahu.abtl` the weights adapt during training.
    """

    merge = "score"

    def _weights_changed(self) -> None:
        width = self.embedding
        self.subspaces = tuple(
            Subspace(f"space{level}", level * width, (level + 1) * width, float(weight))
            for level, weight in enumerate(self.get_buffer("alpha").tolist())
        )


class HedgeSum(Hedge):
    """Hedge-weighted metric spaces, searched by Σ α_l D_l² in one index.

    The index stores the unit embeddings of an item side by side. Only the embeddings of a query are
    multiplied by the weights, so the index stays valid when the weights change. The inner product
    is Σ α_l f_l(q)·f_l(x) = 1 − ½ Σ α_l D_l². The reported distance is √(Σ α_l D_l²), 0 for the
    item itself. With `oahu.abtl` the weights adapt during training. This search is neither Eq 27 of
    the paper (`oahu.hedge`) nor an approximation of it.
    """

    measure = "inner"

    def query_vectors(self, codes: Tensor) -> Tensor:
        """Return the unit embeddings times the weights, side by side."""
        return (self.embeddings(codes) * self._per_space("alpha", codes)[:, None]).flatten(1)
