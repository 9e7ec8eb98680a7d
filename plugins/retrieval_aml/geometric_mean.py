"""AML's objective as a loss on embeddings (Eq 7 with the adversarial pairs of Eq 9)."""

from __future__ import annotations

from typing import Any, Literal

import torch
from pydantic import NonNegativeFloat, PositiveFloat
from pytorch_metric_learning.utils import loss_and_miner_utils as indices_utils
from retrieval.errors import DataError
from retrieval.helpers import listed_pairs, losses_of
from retrieval.plugin import CheckedLoss, Reducer
from torch import Tensor

# Number of bisections, after which float64 has no more digits.
STEPS = 60
Squares = dict[str, dict[str, Any]]


@torch.no_grad()
def best_scale(
    moments: Tensor, eigenvalues: Tensor, dissimilar: Tensor, alpha: float, beta: float
) -> float:
    """Return t > 0 that minimises t Σ aᵢ (1 + α sᵢ(t)²) + d/t, with sᵢ(t) = βt²λᵢ² / (2 + βt²λᵢ²).

    This is AML's objective at tM (Eq 11). Each summand is convex in τ = log t: the logarithm of e^τ
    s² has the first derivative g = 5 − 4s and the second derivative −8s(1 − s), and g² − 8s(1 − s)
    = 25 − 48s + 24s² is at least 1 on [0, 1]. The derivative therefore has one root. Because 1 ≤ 1
    + αs²(5 − 4s) ≤ 1 + 1.158α, the solution for α = 0 brackets this root.

    `moments` are aᵢ (C,), whose sum is above 0; `eigenvalues` are the λᵢ (C,) of M; `dissimilar` is
    d > 0.
    """
    a = moments.double()
    squared = eigenvalues.double().square()
    d = dissimilar.double()
    high = (d / a.sum()).log() / 2
    low = (
        high - torch.log1p(torch.as_tensor(1.158 * alpha, dtype=torch.float64, device=a.device)) / 2
    )
    for _ in range(STEPS if alpha else 0):
        middle = (low + high) / 2
        x = beta * (2 * middle).exp() * squared
        s = x / (2 + x)
        slope = middle.exp() * (a * (1 + alpha * s * s * (5 - 4 * s))).sum() - d * (-middle).exp()
        low = torch.where(slope > 0, low, middle)
        high = torch.where(slope > 0, middle, high)
    return float(((low + high) / 2).exp())


class GeometricMeanLoss(CheckedLoss):
    """Makes similar pairs near under a metric, and dissimilar pairs near under its inverse.

    Chen et al., "Adversarial Metric Learning" (IJCAI 2018), Eq 11 (Eq 7 and Eq 9; Eq 12 corrected),
    with a network instead of the linear map. The metric of the whitened embeddings is M = Σ, the
    covariance of the embeddings. For the difference δ of two embeddings, the terms are

        similar:     ‖δ‖² + α ‖s(Σ) δ‖²,    s(λ) = βλ² / (2 + βλ²)
        dissimilar:  c ‖Σ⁻¹ δ‖²,            c = 1 + α (β / (2 + β))²

    The loss is the sum of their means over similar and dissimilar pairs. For a linear head without
    bias over whitened features, M = WᵀW and the loss equals Eq 11. Its minimum is then the metric
    of `aml.aml`, or that of `aml.gmml` if α = 0.

    With `scale = "free"`, a batch without similar or without dissimilar pairs has no gradient. Σ is
    computed from the batch, and from the reference set if there is one. A batch should therefore
    have clearly more items than embedding dimensions.

    Args:
        alpha: α ≥ 0, weight of the adversarial pairs. 0 gives Eq 7.
        beta: β > 0. The larger it is, the nearer adversarial pairs stay to the original pairs.
        ridge: ρ ≥ 0: Σ + ρ · (mean variance) · I replaces Σ. Directions with much less variance
            than the ridge may vanish. 0 needs more items than dimensions.
        scale: "free" uses M = tΣ with the best t, so that the scale of the embeddings has no
            effect. Heads with unit output need this. "fixed" uses t = 1, exactly Eq 11.
        reducer: reduces the losses of similar and of dissimilar pairs to one number each; the mean
            by default.
    """

    def __init__(
        self,
        alpha: NonNegativeFloat = 1.0,
        beta: PositiveFloat = 1.0,
        ridge: NonNegativeFloat = 0.01,
        scale: Literal["free", "fixed"] = "free",
        reducer: Reducer = None,
    ) -> None:
        super().__init__(reducer=reducer)
        for name, value, least in (
            ("alpha", alpha, alpha >= 0),
            ("beta", beta, beta > 0),
            ("ridge", ridge, ridge >= 0),
        ):
            if not (least and value < float("inf")):
                raise ValueError(
                    f"{name} is {value:g} and must be {'above' if name == 'beta' else 'at least'}"
                    " 0, and finite"
                )
        if scale not in ("free", "fixed"):
            raise ValueError(f'scale is "{scale}" and must be "free" or "fixed"')
        self.alpha = alpha
        self.beta = beta
        self.ridge = ridge
        self.scale = scale

    def _sub_loss_names(self) -> list[str]:
        return ["pos_loss", "neg_loss"]

    def compute_loss(
        self, embeddings: Tensor, labels: Any, indices_tuple: Any, ref_emb: Tensor, ref_labels: Any
    ) -> Squares:
        """Return the losses of the pairs in the format of pytorch-metric-learning's reducers."""
        if indices_tuple is None:
            pairs = indices_utils.get_all_pairs_indices(
                labels, None if ref_emb is embeddings else ref_labels
            )
        else:
            pairs = listed_pairs(indices_tuple, (len(embeddings), len(ref_emb)), embeddings.device)
        queries = len(embeddings)
        if ref_emb is embeddings:
            items = embeddings
        else:
            items = torch.cat([embeddings, ref_emb])
        mean = items.mean(0)
        # Differences lose fewer digits after centring.
        items = items - mean
        size = items.shape[1]
        covariance = items.T @ items / max(len(items), 1)
        spread = covariance.diagonal().sum() / size
        rounding = (16 * torch.finfo(items.dtype).eps) ** 2 * mean.detach().square().mean()
        has_kinds = (pairs[0].numel() > 0, pairs[2].numel() > 0)
        one_sided = self.scale == "free" and not all(has_kinds)
        if one_sided or not any(has_kinds) or not bool(spread > rounding):
            return self.zero_losses()
        identity = torch.eye(size, dtype=items.dtype, device=items.device)
        metric = covariance + self.ridge * spread * identity
        eigenvalues, eigenvectors = torch.linalg.eigh(metric.detach())
        _check_regular(eigenvalues, len(items), self.ridge)

        inverse_items = torch.linalg.solve(metric, items.T).T
        pull = 1 + self.alpha * (self.beta / (2 + self.beta)) ** 2
        dissimilar = pull * _squares(inverse_items, queries, pairs[2:])
        t = 1.0
        if self.scale == "free":
            moments = _mean_square_by_column(items.detach() @ eigenvectors, queries, pairs[:2])
            weight = dissimilar.detach().mean()
            if not (float(moments.sum()) > 0 and float(weight) > 0):
                return self.zero_losses()
            t = best_scale(moments, eigenvalues, weight, self.alpha, self.beta)
        similar = _squares(items, queries, pairs[:2])
        if self.alpha:
            # s(tΣ) = I − 2K⁻¹ with K = 2I + βt²Σ² needs no eigenvectors, which have no gradient for
            # repeated eigenvalues.
            k = self.beta * t**2 * metric @ metric + 2 * identity
            adversarial = items - 2 * torch.linalg.solve(k, items.T).T
            similar = similar + self.alpha * _squares(adversarial, queries, pairs[:2])
        parts = self.zero_losses()
        # A reducer's mean of no losses would be NaN.
        if has_kinds[0]:
            parts |= losses_of(t * similar, pairs[:2], "pos_pair", "pos_loss")
        if has_kinds[1]:
            parts |= losses_of(dissimilar / t, pairs[2:], "neg_pair", "neg_loss")
        return parts


def _squares(x: Tensor, queries: int, pairs: tuple[Tensor, ...]) -> Tensor:
    """Return ‖x_a − x_b‖² (P,) of pairs, where b indexes the rows of `_reference`."""
    q = x[:queries]
    r = _reference(x, queries)
    matrix = q.square().sum(1)[:, None] + r.square().sum(1) - 2 * (q @ r.T)
    return matrix[pairs].clamp_min(0)


def _mean_square_by_column(x: Tensor, queries: int, pairs: tuple[Tensor, ...]) -> Tensor:
    """Return the mean of (x_a − x_b)² over pairs, column by column (C,)."""
    q = x[:queries]
    r = _reference(x, queries)
    counts = x.new_zeros(len(q), len(r)).index_put_(pairs, x.new_ones(()), accumulate=True)
    total = counts.sum(1) @ q.square() + counts.sum(0) @ r.square() - 2 * (q * (counts @ r)).sum(0)
    return total.clamp_min(0) / pairs[0].numel()


def _reference(x: Tensor, queries: int) -> Tensor:
    """Return the rows after the queries, or the queries if there are no others."""
    if len(x) > queries:
        return x[queries:]
    return x


def _check_regular(eigenvalues: Tensor, items: int, ridge: float) -> None:
    """Raise a `DataError` if the metric with these ascending eigenvalues cannot be inverted."""
    size = len(eigenvalues)
    if float(eigenvalues[0]) <= size * torch.finfo(eigenvalues.dtype).eps * float(eigenvalues[-1]):
        raise DataError(
            f"The covariance of {items} embeddings of {size} dimensions cannot be inverted with"
            f" ridge = {ridge:g}. Set ridge above 0 (the default is 0.01), or use batches with more"
            " items than dimensions."
        )
