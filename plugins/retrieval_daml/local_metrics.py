"""Several local metrics in one embedding, weighed evenly or by a small network for each pair."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from retrieval.errors import RecipeError
from retrieval.plugin import Combiner, Normalize, TripletIndices, full_precision
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

PairFunction = Callable[..., Tensor]
"""(b, C) and (c, C) codes, then parameters, to (b, c) or (b, c, K)."""
BLOCK = 2**20
"""Numbers that a pair function may hold in one tensor of a block."""
DIRECT = 2**22
"""Up to so many numbers in one tensor, all pairs are computed at once, and kept for the gradient.
"""
Metrics = Annotated[int, Field(ge=1)]
Weight = Annotated[float, Field(ge=0)]
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
LOW = 0.05
"""A metric whose mean weight is below this does next to nothing, and a warning says so."""
SHARP = 0.6
"""Mean largest weight above which the order of candidates differs so much that more of them are
needed.
"""
SAMPLE = 256
"""Codes whose pairs say how sharp the weights are."""
QUANTILES = (0.1, 0.5, 0.9)


def all_pairs(
    function: PairFunction,
    query: Tensor,
    reference: Tensor,
    *parameters: Tensor,
    width: int,
    tail: int = 0,
) -> Tensor:
    """Return `function` of all pairs; many in blocks that the gradient computes again.

    Args:
        function: of a block of queries, one of references, and the parameters.
        query: (Q, C).
        reference: (R, C).
        parameters: further tensors that gradients reach.
        width: numbers that the function holds for a pair.
        tail: K, if the function gives (b, c, K); 0 if it gives (b, c).

    Returns:
        (Q, R) or (Q, R, K).
    """
    if exporting() or len(query) * len(reference) * width <= DIRECT:
        return function(query, reference, *parameters)
    values: Tensor = _Blocks.apply(function, width, tail, query, reference, *parameters)
    return values


def exporting() -> bool:
    """Return whether a graph is being traced, whose sizes are unknown."""
    return torch.onnx.is_in_onnx_export() or torch.compiler.is_compiling()


def _blocks(rows: int, columns: int, width: int) -> Iterator[tuple[slice, slice]]:
    """Give the blocks: whole rows where they fit, as they lie in memory."""
    across = max(1, min(columns, BLOCK // width))
    down = max(1, BLOCK // (across * width))
    for top in range(0, rows, down):
        for left in range(0, columns, across):
            yield slice(top, top + down), slice(left, left + across)


class _Blocks(torch.autograd.Function):
    """Keeps the inputs alone; the gradient computes each block again."""

    @staticmethod
    def forward(
        ctx: Any,
        function: PairFunction,
        width: int,
        tail: int,
        query: Tensor,
        reference: Tensor,
        *parameters: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(query, reference, *parameters)
        ctx.function, ctx.width = function, width
        shape = (len(query), len(reference), *([tail] if tail else []))
        out = query.new_empty(shape)
        for rows, columns in _blocks(len(query), len(reference), width):
            out[rows, columns] = function(query[rows], reference[columns], *parameters)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        saved = ctx.saved_tensors
        needed = ctx.needs_input_grad[3:]
        sums = [
            torch.zeros_like(x) if want else None for x, want in zip(saved, needed, strict=True)
        ]
        for rows, columns in _blocks(len(saved[0]), len(saved[1]), ctx.width):
            with torch.enable_grad():
                parts = [saved[0][rows], saved[1][columns], *saved[2:]]
                parts = [
                    x.detach().requires_grad_(want) for x, want in zip(parts, needed, strict=True)
                ]
                value = ctx.function(*parts)
            inputs = [x for x in parts if x.requires_grad]
            gradients_of_inputs = iter(
                torch.autograd.grad(value, inputs, gradient[rows, columns], allow_unused=True)
            )
            for place, total in enumerate(sums):
                if total is None or (part := next(gradients_of_inputs)) is None:
                    continue
                where = (rows, columns)[place] if place < 2 else slice(None)
                total[where] += part
        return (None, None, None, *sums)


class UnitParts(nn.Module):
    """Scale each of K equal parts of a row to unit Euclidean length; a zero part stays zero."""

    def __init__(self, parts: int) -> None:
        super().__init__()
        self.parts = parts

    def forward(self, x: Tensor) -> Tensor:
        """Return (B, D) of (B, D), at least in float32 even under autocast."""
        return functional.normalize(split(full_precision(x), self.parts), dim=-1).flatten(-2)


class ViewMaps(nn.Module):
    """A linear map of its own for each of K views: features (B, F) to (B, D).

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
        return torch.cat(
            [linear(part) for linear, part in zip(self.maps, parts, strict=True)], dim=-1
        )


class LocalMetrics(Combiner):
    """Base of a distance D = Σ_k γ_k ‖e_k(x) − e_k(y)‖ of unit embeddings e_k.

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
        """Return features (B, F) → K unit embeddings side by side (B, D)."""
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
        """Return the local distances (Q, R, K) of codes, all at once: for few pairs."""
        x, y = (split(self.index_vectors(codes), self.metrics) for codes in (query, reference))
        if exporting():  # the same numbers, by operators that every exporter knows
            apart = x[:, None] - y[None]
            return apart.square().sum(-1).sqrt()
        apart = torch.cdist(
            x.transpose(0, 1), y.transpose(0, 1), compute_mode="donot_use_mm_for_euclid_dist"
        )
        return apart.movedim(0, -1)

    def local_similarities(self, query: Tensor, reference: Tensor) -> Tensor:
        """Return the local cosine similarities (Q, R, K) of codes, all at once: for few pairs."""
        x, y = (split(self.index_vectors(codes), self.metrics) for codes in (query, reference))
        return torch.matmul(x.transpose(0, 1), y.permute(1, 2, 0)).movedim(0, -1)

    def paired_distances(self, query: Tensor, reference: Tensor) -> Tensor:
        """Return the local distances (N, K) of codes row by row."""
        apart = self.index_vectors(query) - self.index_vectors(reference)
        # the root of zero has no gradient
        return (split(apart, self.metrics).square().sum(-1) + 1e-12).sqrt()

    def plain_mat(self, query: Tensor, reference: Tensor) -> Tensor:
        """Return the Euclidean distances (Q, R) of one embedding, bit for bit as `LpDistance`."""
        return torch.cdist(functional.normalize(query), functional.normalize(reference))


def split(x: Tensor, parts: int) -> Tensor:
    """Return (…, K, D / K) of (…, D)."""
    split_up: Tensor = x.unflatten(-1, (parts, -1))  # type: ignore[no-untyped-call]
    return split_up


def widened(*codes: Tensor) -> tuple[Tensor, ...]:
    """Return codes in at least float32, as matrices of distances need."""
    return tuple(full_precision(x) for x in codes)


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


class _Flows(nn.Module):
    """K unit embeddings and the discriminator's sums of an item: (B, F) to (B, D + 2H)."""

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
        """Return Γ (…, K) of codes (…, C); both orders share one product after the ReLU."""
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
        """Return μ J_dis + ρ ‖mean Γ − 1/K‖² over the batch's pairs, and how Γ is distributed.

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
        return self.mu * spread + self.rho * balance, self._logged(gamma.detach(), spread, balance)

    def _logged(self, gamma: Tensor, spread: Tensor, balance: Tensor) -> dict[str, Tensor]:
        logged = {
            "j_dis": spread.detach(),
            "balance": balance.detach(),
            "gamma_max": gamma.amax(-1).mean(),
        }
        ordered = gamma[:: max(1, len(gamma) // 4096)].sort(0).values
        for k in range(self.metrics):
            logged[f"load_{k + 1}"] = gamma[:, k].mean()
            for quantile in QUANTILES:
                place = round(quantile * (len(ordered) - 1))
                logged[f"gamma_{k + 1}_p{round(100 * quantile)}"] = ordered[place, k]
        return logged

    def warnings(self, logged: Mapping[str, float]) -> Sequence[str]:
        """Return a sentence for each metric whose mean weight is below .05."""
        loads = {k + 1: logged.get(f"load_{k + 1}") for k in range(self.metrics)}
        return [
            f"local metric {k} of {self.metrics} has a mean weight of {load:.3f}: the discriminator"
            " hardly uses it. Use a smaller [combiner] mu, a larger rho, or fewer metrics."
            for k, load in loads.items()
            if load is not None and load < LOW
        ]

    # --- serving
    # -----------------------------------------------------------------------------------------

    def choose_candidates(self, codes: Tensor) -> int:
        """Return how many candidates a server rescores: 500 for sharp weights, else 200."""
        if self.fixed_candidates is not None:
            return self.fixed_candidates
        return 500 if self.sharpness(codes) > SHARP else 200

    @torch.no_grad()
    def sharpness(self, codes: Tensor) -> float:
        """Return the mean largest weight over pairs of different items, from 1/K to 1."""
        sample = codes[:: max(1, len(codes) // SAMPLE)]
        if self.metrics == 1 or len(sample) < 2:
            return 1.0
        largest = self.weights(sample, sample).amax(-1)
        different = ~torch.eye(len(sample), dtype=torch.bool, device=codes.device)
        return float(largest[different].mean())
