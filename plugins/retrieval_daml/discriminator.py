"""`daml.discriminator`: several metrics whose weights a small network decides for each pair."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated

import torch
from pydantic import Field
from retrieval.errors import RecipeError
from retrieval.model.precision import full_precision
from retrieval.plugin import TripletIndices
from torch import Tensor, nn

from retrieval_daml.local_metrics import LocalMetrics, Metrics, Weight, all_pairs, widened

LOW = 0.05
"""A metric whose mean weight is below this does next to nothing, and a warning says so."""

SHARP = 0.6
"""Mean largest weight above which the order of candidates differs so much that more of them are
needed.
"""

SAMPLE = 256
"""Codes whose pairs say how sharp the weights are."""

QUANTILES = (0.1, 0.5, 0.9)


class _Flows(nn.Module):
    """K unit embeddings, and what the discriminator adds up of an item: features (B, F) to codes
    (B, D + 2H).
    """

    def __init__(self, embedding: nn.Module, flows: nn.Linear) -> None:
        super().__init__()
        self.embedding, self.flows = embedding, flows

    def forward(self, features: Tensor) -> Tensor:
        """Return the codes."""
        return torch.cat([self.embedding(features), full_precision(self.flows(features))], dim=-1)


class Discriminator(LocalMetrics):
    """K local metrics, weighed for each pair of items by a network that sees both (DAMML).

    D(x, y) = Σ_k γ_k(x, y) ‖e_k(x) − e_k(y)‖ of unit embeddings e_k (Eq 14); Γ = softmax(½ (h[x; y]
    + h[y; x])) with h[x; y] = V relu(A x + B y + c) + v on features x, y: two layers, 2F → H → K
    (Eq 13), which cannot tell the order of the two. An item's code holds A x + c₁ and B x + c₂, so
    that a server needs no features, and pairs cost H, not F. V and v start at zero: until a phase
    trains the combiner, Γ = 1/K (Algorithm 2, line 1), unless `start` says otherwise. `objective`
    is μ J_dis + ρ ‖mean Γ − 1/K‖² with J_dis = −mean ‖Γ − 1/K‖² over the batch's pairs (Eq 16, with
    its 1/K), between −(1 − 1/K) and 0. With K = 1 there is nothing to weigh, and all is bit for bit
    as without a combiner.

    The paper's μ = 1e5 without balance leaves one metric in use. ρ keeps the *mean* weights even,
    while each pair's may be as uneven as μ wants.

    Duan, Lu, Zheng & Zhou, "Deep Adversarial Metric Learning", IEEE Transactions on Image
    Processing 29, 2020, Eq 13–16.
    """

    def __init__(
        self,
        features: int,
        embedding_size: int,
        metrics: Metrics = 4,
        hidden: Annotated[int, Field(ge=1)] = 128,
        mu: Weight = 0.02,
        rho: Weight = 5.0,
        start: Weight = 0.0,
        views: bool = False,
        candidates: Annotated[int, Field(ge=1)] | None = None,
    ) -> None:
        """Build.

        Args:
            metrics: K, how many local metrics share the embedding evenly; 1 is the plain Euclidean
                distance.
            hidden: H, width of the network's hidden layer; the paper takes that of the features. An
                indexed item keeps 2 H numbers.
            mu: μ, weight of J_dis: larger makes each pair's weights more uneven.
            rho: ρ, weight of the balance: larger keeps each metric's mean weight nearer to 1/K.
            start: standard deviation of V at the start. 0 makes Γ = 1/K, where J_dis has no
                gradient: only the loss moves Γ from there. Take 1 to see what uneven weights do.
            views: the features are those of K views of an item side by side, of one width, and
                metric k sees the k-th view alone, the discriminator all of them. Weights can then
                leave out a view that is spoilt in either item. With metrics that all see
                everything, learned weights were no better than even ones in every measurement.
            candidates: how many candidates a server rescores by default; none: 200, or 500 where
                the weights are sharp (mean largest weight above 0.6, measured at export).
        """
        super().__init__(embedding_size, metrics, "daml.discriminator", views)
        for name, value in (("mu", mu), ("rho", rho), ("start", start)):
            if not value >= 0:
                raise RecipeError(
                    [f"[combiner] daml.discriminator {name}: must be at least 0, not {value}."]
                )
        self.mu, self.rho, self.hidden = mu, rho, hidden
        self.fixed_candidates = candidates
        if metrics > 1:
            self.flows = nn.Linear(features, 2 * hidden)
            self.out = nn.Linear(hidden, metrics)
            nn.init.normal_(self.out.weight, std=start)
            nn.init.zeros_(self.out.bias)

    def build_head(self, features: int) -> nn.Module:
        """Return features (B, F) → codes (B, D + 2H); the layer that makes the last 2H columns is
        the combiner's own.
        """
        embedding = super().build_head(features)
        if self.metrics == 1:
            return embedding
        if features != self.flows.in_features:
            raise ValueError(
                f"built for {self.flows.in_features} features, and asked for a head of {features}"
            )
        return _Flows(embedding, self.flows)

    # --- the distance
    # ------------------------------------------------------------------------------------

    def compute_mat(self, query_emb: Tensor, ref_emb: Tensor) -> Tensor:
        """Return distances (Q, R) between codes (Q, C) and (R, C)."""
        query, reference = widened(query_emb, ref_emb)
        if self.metrics == 1:
            return self.plain_mat(query, reference)
        return all_pairs(
            self._distances, query, reference, self.out.weight, self.out.bias, width=self.hidden
        )

    def pairwise_distance(self, query_emb: Tensor, ref_emb: Tensor) -> Tensor:
        """Return distances (N,) between codes row by row."""
        query, reference = widened(query_emb, ref_emb)
        local = self.paired_distances(query, reference)
        if self.metrics == 1:
            return local.squeeze(-1)
        weight = self._weights(query, reference, self.out.weight, self.out.bias)
        return (weight * local).sum(-1)

    def weights(self, query: Tensor, reference: Tensor) -> Tensor:
        """Return Γ (Q, R, K) of codes (Q, C) and (R, C); rows sum to 1."""
        query, reference = widened(query, reference)
        if self.metrics == 1:
            return query.new_ones(len(query), len(reference), 1)
        width, tail = self.hidden, self.metrics
        return all_pairs(
            self._weight_mat,
            query,
            reference,
            self.out.weight,
            self.out.bias,
            width=width,
            tail=tail,
        )

    def similarities(self, query: Tensor, reference: Tensor) -> Tensor:
        """Return Σ_k γ_k cos_k (Q, R): for losses that want a similarity, larger being closer."""
        query, reference = widened(query, reference)
        if self.metrics == 1:
            return self.local_similarities(query, reference).squeeze(-1)
        return all_pairs(
            self._similarities, query, reference, self.out.weight, self.out.bias, width=self.hidden
        )

    def _weights(self, x: Tensor, y: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        """Γ (…, K) of codes (…, C) that broadcast; h is linear after its ReLU, so both orders share
        one product.
        """
        ax, bx = x[..., self.embedding_size :].chunk(2, dim=-1)
        ay, by = y[..., self.embedding_size :].chunk(2, dim=-1)
        both = torch.relu(ax + by) + torch.relu(ay + bx)
        return nn.functional.linear(both / 2, weight, bias).softmax(-1)

    def _weight_mat(self, query: Tensor, reference: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return self._weights(query[:, None], reference[None], weight, bias)

    def _distances(self, query: Tensor, reference: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        local = self.local_distances(query, reference)
        return (self._weight_mat(query, reference, weight, bias) * local).sum(-1)

    def _similarities(
        self, query: Tensor, reference: Tensor, weight: Tensor, bias: Tensor
    ) -> Tensor:
        local = self.local_similarities(query, reference)
        return (self._weight_mat(query, reference, weight, bias) * local).sum(-1)

    # --- training
    # ----------------------------------------------------------------------------------------

    def objective(
        self, codes: Tensor, labels: Tensor, indices: TripletIndices | None
    ) -> tuple[Tensor | None, Mapping[str, Tensor]]:
        """Return μ J_dis + ρ ‖mean Γ − 1/K‖² over all pairs of different items of the batch, and
        how Γ is distributed.

        The figures of metric k = 1 … K: "load_k" its mean weight, "gamma_k_p10", "gamma_k_p50",
        "gamma_k_p90" quantiles of it; of all together "gamma_max", the mean largest weight, "j_dis"
        and "balance".
        """
        if self.metrics == 1 or len(codes) < 2:
            return None, {}
        different = ~torch.eye(len(codes), dtype=torch.bool, device=codes.device)
        gamma = self.weights(codes, codes)[different]  # (B (B − 1), K)
        mean = gamma.mean(0)
        spread = -(gamma - 1 / self.metrics).square().sum(-1).mean()
        balance = (mean - 1 / self.metrics).square().sum()
        return self.mu * spread + self.rho * balance, self._figures(gamma.detach(), spread, balance)

    def _figures(self, gamma: Tensor, spread: Tensor, balance: Tensor) -> dict[str, Tensor]:
        figures = {
            "j_dis": spread.detach(),
            "balance": balance.detach(),
            "gamma_max": gamma.amax(-1).mean(),
        }
        ordered = gamma[:: max(1, len(gamma) // 4096)].sort(0).values
        for k in range(self.metrics):
            figures[f"load_{k + 1}"] = gamma[:, k].mean()
            for quantile in QUANTILES:
                place = round(quantile * (len(ordered) - 1))
                figures[f"gamma_{k + 1}_p{round(100 * quantile)}"] = ordered[place, k]
        return figures

    def warnings(self, figures: Mapping[str, float]) -> Sequence[str]:
        """Return a sentence for each metric whose mean weight is below .05."""
        loads = {k + 1: figures.get(f"load_{k + 1}") for k in range(self.metrics)}
        return [
            f"local metric {k} of {self.metrics} has a mean weight of {load:.3f}: the discriminator"
            " hardly uses it. Use a smaller [combiner] mu, a larger rho, or fewer metrics."
            for k, load in loads.items()
            if load is not None and load < LOW
        ]

    # --- serving
    # -----------------------------------------------------------------------------------------

    def choose_candidates(self, codes: Tensor) -> int:
        """Return how many candidates a server rescores: 500 where the weights are sharp, else 200."""
        if self.fixed_candidates is not None:
            return self.fixed_candidates
        return 500 if self.sharpness(codes) > SHARP else 200

    @torch.no_grad()
    def sharpness(self, codes: Tensor) -> float:
        """Return the mean largest weight over pairs of different items, from 1/K to 1."""
        few = codes[:: max(1, len(codes) // SAMPLE)]
        if self.metrics == 1 or len(few) < 2:
            return 1.0
        largest = self.weights(few, few).amax(-1)
        different = ~torch.eye(len(few), dtype=torch.bool, device=codes.device)
        return float(largest[different].mean())
