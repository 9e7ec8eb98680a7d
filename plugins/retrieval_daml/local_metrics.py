"""Several local metrics in one embedding, weighted evenly, or per pair by a small network."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import torch
from pydantic import NonNegativeFloat, PositiveInt
from retrieval.errors import RecipeError
from retrieval.helpers import full_precision
from retrieval.plugin import Combiner, Normalise, TripletIndices
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

PairFunction = Callable[..., Tensor]
"""Maps codes (b, C) and (c, C), followed by parameters, to (b, c) or (b, c, K)."""
BLOCK = 2**20
"""Maximum number of elements in the largest tensor of a block; a block has at least one row."""
DIRECT = 2**22
"""Up to this many elements, `all_pairs` computes all pairs at once, and autograd stores them."""
LOW = 0.05
"""Training warns of a metric whose mean weight is below this: it has almost no effect."""
SHARP = 0.6
"""If the mean largest weight is above this, a server rescores 500 candidates instead of 200."""
SAMPLE = 256
"""Number of codes whose pairs `Discriminator.sharpness` uses."""
QUANTILES = (0.1, 0.5, 0.9)  # of the weights, in the log


def all_pairs(
    function: PairFunction, query: Tensor, reference: Tensor, *parameters: Tensor, width: int
) -> Tensor:
    """Return `function` of all pairs.

    Many pairs are computed in blocks of rows, and the backward pass computes the blocks again, to
    save memory.

    Args:
        function: called with a block of queries, the references, and the parameters.
        query: (Q, C) codes.
        reference: (R, C) codes.
        parameters: further tensors that receive gradients.
        width: number of elements per pair in the largest tensor of the function.

    Returns:
        (Q, R) or (Q, R, K).
    """
    # A traced graph has no fixed sizes, so that it cannot be cut into blocks.
    if exporting() or len(query) * len(reference) * width <= DIRECT:
        return function(query, reference, *parameters)
    rows = torch.split(query, max(1, BLOCK // (len(reference) * width)))
    blocks = (
        checkpoint(function, part, reference, *parameters, use_reentrant=False) for part in rows
    )
    return torch.cat(list(blocks))


def exporting() -> bool:
    """Return whether torch is tracing a graph (export or compile), where sizes are unknown."""
    return torch.onnx.is_in_onnx_export() or torch.compiler.is_compiling()


class UnitParts(nn.Module):
    """Scales each of K equal parts of a row to unit Euclidean length; a zero part stays zero."""

    def __init__(self, parts: int) -> None:
        super().__init__()
        self.parts = parts

    def forward(self, x: Tensor) -> Tensor:
        """Return rows (B, D) with unit parts, in at least float32 even under autocast."""
        return functional.normalize(split(full_precision(x), self.parts), dim=-1).flatten(-2)


class ViewMaps(nn.Module):
    """One linear map per view: features (B, F) of K views → embeddings (B, D).

    Args:
        features: F, the number of features of all views together.
        embedding_size: D, the output dimension of all maps together.
        views: K; it divides F and D.
    """

    def __init__(self, features: int, embedding_size: int, views: int) -> None:
        super().__init__()
        self.maps = nn.ModuleList(
            nn.Linear(features // views, embedding_size // views) for _ in range(views)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return embeddings (B, D) of features (B, F)."""
        parts = x.chunk(len(self.maps), dim=-1)
        return torch.cat(
            [linear(part) for linear, part in zip(self.maps, parts, strict=True)], dim=-1
        )


class LocalMetrics(Combiner):
    """Base class of distances D = Σ_k γ_k ‖e_k(x) − e_k(y)‖ of unit embeddings e_k.

    Args:
        embedding_size: D, the dimension of all K embeddings together.
        metrics: K, the number of local metrics.
        name: name of the factory, for error messages.
        views: whether metric k sees only the k-th of K equal parts of the features.

    Raises:
        RecipeError: K does not divide D.
    """

    def __init__(self, embedding_size: int, metrics: int, name: str, views: bool = False) -> None:
        super().__init__()
        if metrics < 1 or embedding_size % metrics:
            divisors = [k for k in range(1, 33) if embedding_size % k == 0]
            raise RecipeError(
                f"[combiner] {name} metrics: {metrics} local metrics cannot share an embedding"
                f" of {embedding_size} columns evenly. Set [head] embedding_size to a multiple"
                f" of {metrics}, or metrics to one of {', '.join(map(str, divisors))}."
            )
        self.embedding_size = embedding_size
        self.metrics = metrics
        self.name = name
        self.views = views and metrics > 1
        self.exact = self.plain = metrics == 1

    def build_head(self, features: int) -> nn.Module:
        """Return the head: features (B, F) → K unit embeddings side by side (B, D)."""
        last: nn.Module = Normalise() if self.metrics == 1 else UnitParts(self.metrics)
        if not self.views:
            return nn.Sequential(nn.Linear(features, self.embedding_size), last)
        if features % self.metrics:
            raise RecipeError(
                f"[combiner] {self.name} views: {features} features are not {self.metrics}"
                " views of equal width side by side. Set metrics to the number of views, or"
                " remove views, so that every metric sees all features."
            )
        return nn.Sequential(ViewMaps(features, self.embedding_size, self.metrics), last)

    def index_vectors(self, codes: Tensor) -> Tensor:
        """Return the K unit embeddings side by side (N, D)."""
        return codes[:, : self.embedding_size]

    def local_distances(self, query: Tensor, reference: Tensor) -> Tensor:
        """Return the local distances (Q, R, K) between codes, all pairs at once."""
        x, y = (split(self.index_vectors(codes), self.metrics) for codes in (query, reference))
        # The same result from operators that every exporter supports.
        if exporting():
            difference = x[:, None] - y[None]
            return difference.square().sum(-1).sqrt()
        # The matrix product, torch's default for many rows, loses the digits of small distances.
        distances = torch.cdist(
            x.transpose(0, 1), y.transpose(0, 1), compute_mode="donot_use_mm_for_euclid_dist"
        )
        return distances.movedim(0, -1)

    def local_similarities(self, query: Tensor, reference: Tensor) -> Tensor:
        """Return the local cosine similarities (Q, R, K), all pairs at once."""
        x, y = (split(self.index_vectors(codes), self.metrics) for codes in (query, reference))
        return torch.matmul(x.transpose(0, 1), y.permute(1, 2, 0)).movedim(0, -1)

    def paired_distances(self, query: Tensor, reference: Tensor) -> Tensor:
        """Return the local distances (N, K) between codes row by row."""
        difference = self.index_vectors(query) - self.index_vectors(reference)
        # 1e-12 keeps the gradient of the root finite at zero.
        return (split(difference, self.metrics).square().sum(-1) + 1e-12).sqrt()

    def plain_mat(self, query: Tensor, reference: Tensor) -> Tensor:
        """Return Euclidean distances (Q, R) for K = 1, bit for bit as in `LpDistance`."""
        return torch.cdist(functional.normalize(query), functional.normalize(reference))


def split(x: Tensor, parts: int) -> Tensor:
    """Reshape (…, D) to (…, K, D / K)."""
    reshaped: Tensor = x.unflatten(-1, (parts, -1))  # type: ignore[no-untyped-call]
    return reshaped


def widened(*codes: Tensor) -> tuple[Tensor, ...]:
    """Return the codes in at least float32, which distance matrices need."""
    return tuple(full_precision(x) for x in codes)


class UniformMetrics(LocalMetrics):
    """K local metrics of equal weight 1/K, the baseline of `daml.discriminator`.

    D = (1/K · Σ_k d_k^p)^(1/p) with d_k = ‖e_k(x) − e_k(y)‖ of unit embeddings (Eq 14 with Γ =
    1/K). The index proposes candidates in the order of √(Σ d_k²), the Euclidean distance of the
    embeddings side by side. With `power = 2` or K = 1, D has the same order. With the paper's
    `power = 1` and K > 1, a server computes D of the candidates and orders them by it.

    Duan, Lu, Zheng & Zhou, "Deep Adversarial Metric Learning", IEEE Transactions on Image
    Processing 29, 2020, Table X.
    """

    def __init__(
        self,
        embedding_size: int,
        metrics: PositiveInt = 4,
        power: Literal[1, 2] = 1,
        views: bool = False,
        candidates: PositiveInt = 200,
    ) -> None:
        """Build the combiner.

        Args:
            metrics: K, the number of local metrics, which share the embedding evenly. 1 is the
                plain Euclidean distance.
            power: p. 1 is the paper's mean of distances, 2 the root of the mean of their squares.
            views: whether the features are K views of an item side by side, all of the same size.
                Metric k then sees only the k-th view.
            candidates: number of candidates that a server rescores by default.
        """
        super().__init__(embedding_size, metrics, "daml.uniform", views)
        self.exponent = power
        # A root of a mean of squares has the order of the index's sum of squares.
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
        if self.exponent == 1:
            return local.mean(-1)
        return local.square().mean(-1).sqrt()

    def similarities(self, query: Tensor, reference: Tensor) -> Tensor:
        """Return mean cosine similarities (Q, R), for losses that work on similarities."""
        return torch.matmul(query, reference.T) / self.metrics

    def _mean(self, query: Tensor, reference: Tensor) -> Tensor:
        if self.exponent == 1:
            return self.local_distances(query, reference).mean(-1)
        scale = 1 / math.sqrt(self.metrics)
        distances: Tensor = torch.cdist(
            query, reference, compute_mode="donot_use_mm_for_euclid_dist"
        )
        return distances * scale


class _Flows(nn.Module):
    """Features (B, F) → K unit embeddings and the hidden sums A x + c₁, B x + c₂ (B, D + 2H)."""

    def __init__(self, embedding: nn.Module, flows: nn.Linear) -> None:
        super().__init__()
        self.embedding = embedding
        self.flows = flows

    def forward(self, features: Tensor) -> Tensor:
        """Return codes (B, D + 2H) of features (B, F)."""
        return torch.cat([self.embedding(features), full_precision(self.flows(features))], dim=-1)


class Discriminator(LocalMetrics):
    """K local metrics, weighted for each pair of items by a network that sees both (DAMML).

    D(x, y) = Σ_k γ_k(x, y) ‖e_k(x) − e_k(y)‖ of unit embeddings e_k (Eq 14). The weights are Γ =
    softmax(½ (h[x; y] + h[y; x])) with the two-layer network h[x; y] = V relu(A x + B y + c) + v on
    features x, y (2F → H → K, Eq 13). Γ is symmetric in x and y. The code of an item includes A x +
    c₁ and B x + c₂, so a server needs no features, and the cost per pair grows with H instead of F.

    By default V and v start at zero, so Γ = 1/K until a training phase trains the combiner
    (Algorithm 2, line 1). `objective` is μ J_dis + ρ ‖mean Γ − 1/K‖² with J_dis = −mean ‖Γ − 1/K‖²
    over the pairs of the batch (Eq 16, which prints the norm without 1/K). J_dis is between −(1 −
    1/K) and 0. With K = 1, results are bit for bit those without a combiner.

    With the paper's μ = 1e5 and no balance term, one metric gets all the weight. ρ keeps the mean
    weights even, while μ controls how uneven the weights of each pair are.

    Duan, Lu, Zheng & Zhou, "Deep Adversarial Metric Learning", IEEE Transactions on Image
    Processing 29, 2020, Eq 13–16.
    """

    def __init__(
        self,
        features: int,
        embedding_size: int,
        metrics: PositiveInt = 4,
        hidden: PositiveInt = 128,
        mu: NonNegativeFloat = 0.02,
        rho: NonNegativeFloat = 5.0,
        start: NonNegativeFloat = 0.0,
        views: bool = False,
        candidates: PositiveInt | None = None,
    ) -> None:
        """Build the combiner.

        Args:
            metrics: K, the number of local metrics, which share the embedding evenly. 1 is the
                plain Euclidean distance.
            hidden: H, the size of the network's hidden layer; the number of features in the paper.
                The index stores 2 H numbers per item for the network.
            mu: μ, weight of J_dis. A larger μ makes the weights of each pair more uneven.
            rho: ρ, weight of the balance. A larger ρ keeps mean weights nearer to 1/K.
            start: standard deviation of V at the start. At 0, Γ = 1/K and J_dis has no gradient, so
                only the loss can change Γ. Use 1 to start from uneven weights.
            views: whether the features are K views of an item side by side, all of the same size.
                Metric k then sees only the k-th view. The discriminator sees all views, and can
                give a low weight to a view that is damaged in either item. Without views, learned
                weights were not better than even weights in any measurement.
            candidates: number of candidates that a server rescores by default. `None` means 200, or
                500 if the weights are sharp (mean largest weight above 0.6, measured at export).
        """
        super().__init__(embedding_size, metrics, "daml.discriminator", views)
        for name, value in (("mu", mu), ("rho", rho), ("start", start)):
            if not value >= 0:
                raise RecipeError(
                    f"[combiner] daml.discriminator {name}: must be at least 0, not {value}."
                )
        self.mu = mu
        self.rho = rho
        self.hidden = hidden
        self.fixed_candidates = candidates
        if metrics > 1:
            self.flows = nn.Linear(features, 2 * hidden)
            self.out = nn.Linear(hidden, metrics)
            nn.init.normal_(self.out.weight, std=start)
            nn.init.zeros_(self.out.bias)

    def build_head(self, features: int) -> nn.Module:
        """Return the head: features (B, F) → codes (B, D + 2H).

        The layer that computes the last 2H columns belongs to the combiner.
        """
        embedding = super().build_head(features)
        if self.metrics == 1:
            return embedding
        if features != self.flows.in_features:
            raise ValueError(
                f"the combiner was built for {self.flows.in_features} features, not {features}"
            )
        return _Flows(embedding, self.flows)

    # Distance

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
        """Return Γ (Q, R, K) for codes (Q, C) and (R, C); it sums to 1 over K."""
        query, reference = widened(query, reference)
        if self.metrics == 1:
            return query.new_ones(len(query), len(reference), 1)
        return all_pairs(
            self._weight_mat, query, reference, self.out.weight, self.out.bias, width=self.hidden
        )

    def similarities(self, query: Tensor, reference: Tensor) -> Tensor:
        """Return similarities Σ_k γ_k cos_k (Q, R), for losses that work on similarities."""
        query, reference = widened(query, reference)
        if self.metrics == 1:
            return self.local_similarities(query, reference).squeeze(-1)
        return all_pairs(
            self._similarities, query, reference, self.out.weight, self.out.bias, width=self.hidden
        )

    def _weights(self, x: Tensor, y: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        """Return Γ (…, K) for codes (…, C).

        V is linear, so one product with V serves both orders of a pair.
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

    # Training

    def objective(
        self, codes: Tensor, labels: Tensor, indices: TripletIndices | None
    ) -> tuple[Tensor | None, Mapping[str, Tensor]]:
        """Return μ J_dis + ρ ‖mean Γ − 1/K‖² over the pairs of the batch, and statistics of Γ.

        For metric k = 1 … K, "load_k" is the mean weight and "gamma_k_p10", "gamma_k_p50" and
        "gamma_k_p90" are quantiles of the weights. "gamma_max" is the mean largest weight. "j_dis"
        and "balance" are the two terms.
        """
        if self.metrics == 1 or len(codes) < 2:
            return None, {}
        different = ~torch.eye(len(codes), dtype=torch.bool, device=codes.device)
        # (B (B − 1), K).
        gamma = self.weights(codes, codes)[different]
        mean = gamma.mean(0)
        spread = -(gamma - 1 / self.metrics).square().sum(-1).mean()
        balance = (mean - 1 / self.metrics).square().sum()
        return self.mu * spread + self.rho * balance, self._logged(gamma.detach(), spread, balance)

    def _logged(self, gamma: Tensor, spread: Tensor, balance: Tensor) -> dict[str, Tensor]:
        logged = {
            "j_dis": spread.detach(),
            "balance": balance.detach(),
            "gamma_max": gamma.amax(-1).mean(),
        }
        # A sample of the pairs is enough for a log, and is sorted faster.
        ordered = gamma[:: max(1, len(gamma) // 4096)].sort(0).values
        for k in range(self.metrics):
            logged[f"load_{k + 1}"] = gamma[:, k].mean()
            for quantile in QUANTILES:
                row = round(quantile * (len(ordered) - 1))
                logged[f"gamma_{k + 1}_p{round(100 * quantile)}"] = ordered[row, k]
        return logged

    def warnings(self, logged: Mapping[str, float]) -> Sequence[str]:
        """Return a warning for each metric whose mean weight is below `LOW`."""
        loads = {k + 1: logged.get(f"load_{k + 1}") for k in range(self.metrics)}
        return [
            f"local metric {k} of {self.metrics} has a mean weight of {load:.3f}: the discriminator"
            " hardly uses it. Use a smaller [combiner] mu, a larger rho, or fewer metrics."
            for k, load in loads.items()
            if load is not None and load < LOW
        ]

    # Serving

    def choose_candidates(self, codes: Tensor) -> int:
        """Return the number of candidates that a server rescores by default for these codes."""
        if self.fixed_candidates is not None:
            return self.fixed_candidates
        if self.sharpness(codes) > SHARP:
            return 500
        return 200

    @torch.no_grad()
    def sharpness(self, codes: Tensor) -> float:
        """Return the mean largest weight over pairs of different items, from 1/K to 1."""
        sample = codes[:: max(1, len(codes) // SAMPLE)]
        if self.metrics == 1 or len(sample) < 2:
            return 1.0
        largest = self.weights(sample, sample).amax(-1)
        different = ~torch.eye(len(sample), dtype=torch.bool, device=codes.device)
        return float(largest[different].mean())
