"""AML's whole objective as a loss on embeddings: the geometric-mean loss of Eq 7 with the adversarial pairs of Eq 9."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from pytorch_metric_learning.losses.base_metric_loss_function import BaseMetricLossFunction
from pytorch_metric_learning.reducers import MeanReducer
from pytorch_metric_learning.utils import loss_and_miner_utils as indices_utils
from retrieval.errors import DataError
from retrieval.factory import Part
from torch import Tensor, nn

from retrieval_aml.scale import best_scale

Reducer = Annotated[nn.Module | None, Part("reducers")]
Squares = dict[str, dict[str, Any]]


class GeometricMeanLoss(BaseMetricLossFunction):
    """Similar pairs near by the metric, dissimilar ones near by its inverse, and the same of their adversarial pairs.

    Chen et al., "Adversarial Metric Learning" (IJCAI 2018), Eq 11 (Eq 7 and Eq 9; Eq 12 corrected), with the network in the
    place of the linear map. The metric is the embeddings' own covariance Σ: it is M = Σ of the whitened embeddings, and with
    δ the difference of two embeddings,

        similar:     ‖δ‖² + α ‖s(Σ) δ‖²,    s(λ) = βλ² / (2 + βλ²)
        dissimilar:  c ‖Σ⁻¹ δ‖²,            c = 1 + α (β / (2 + β))²

    each averaged over its pairs, and the two added. On a linear head without bias over whitened features, M = WᵀW, that *is* Eq
    11, and its minimum is the metric of `aml.aml` (of `aml.gmml` for α = 0).

    In a batch lacking similar or dissimilar pairs nothing is learned where `scale` is free. Every batch should have well more items
    than embedding dimensions, as Σ is taken from it (with the reference set, if there is one).

    Args:
        alpha: α ≥ 0, weight of the adversarial pairs; 0 leaves Eq 7.
        beta: β > 0, how near the adversarial pairs stay to the pairs that they come from.
        ridge: ρ ≥ 0: Σ + ρ · (mean variance) · I takes Σ's place. Directions of much less variance than that are left to fade;
            0 needs more items than dimensions.
        scale: "free": the loss of M = tΣ at the best t, so that the embeddings' scale has no say, as heads that give unit vectors
            need. "fixed": t = 1, Eq 11 to the letter.
        reducer: how the pairs' losses become one number, similar and dissimilar ones each; the mean by default.
    """

    def __init__(
        self,
        alpha: Annotated[float, Field(ge=0)] = 1.0,
        beta: Annotated[float, Field(gt=0)] = 1.0,
        ridge: Annotated[float, Field(ge=0)] = 0.1,
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
                    f"{name} is {value:g} and must be {'above' if name == 'beta' else 'at least'} 0, and finite"
                )
        if scale not in ("free", "fixed"):
            raise ValueError(f'scale is "{scale}" and must be "free" or "fixed"')
        self.alpha, self.beta, self.ridge, self.scale = alpha, beta, ridge, scale

    def get_default_reducer(self) -> nn.Module:
        """Return the mean."""
        return MeanReducer()  # type: ignore[no-any-return]

    def _sub_loss_names(self) -> list[str]:
        return ["pos_loss", "neg_loss"]

    def forward(
        self,
        embeddings: Tensor,
        labels: Tensor | None = None,
        indices_tuple: Any = None,
        ref_emb: Tensor | None = None,
        ref_labels: Tensor | None = None,
    ) -> Tensor:
        """Return the loss, a scalar; see `retrieval.Loss`.

        Raises:
            ValueError: shapes, labels or indices do not fit.
            DataError: an embedding is NaN or infinite, or the covariance is singular and `ridge` is 0.
        """
        query = _checked(embeddings, "embeddings")
        own = ref_emb is None or ref_emb is embeddings
        reference = None if own else _checked(ref_emb, "ref_emb")
        if own and indices_tuple is None:
            ref_labels = None
        if labels is None and indices_tuple is None:
            raise ValueError("labels are missing: without a miner's indices they say which pairs are similar")
        if not own and ref_labels is None and indices_tuple is None:
            raise ValueError(
                "ref_labels are missing: without a miner's indices they say which pairs are similar"
            )
        with torch.autocast(device_type=query.device.type, enabled=False):
            total: Tensor = super().forward(
                query, labels, indices_tuple, reference, None if own else ref_labels
            )
        return total

    def compute_loss(
        self,
        embeddings: Tensor,
        labels: Tensor | None,
        indices_tuple: Any,
        ref_emb: Tensor,
        ref_labels: Tensor | None,
    ) -> Squares:
        """Return the pairs' losses, as pytorch-metric-learning's reducers read them."""
        found = _pairs(indices_tuple, labels, ref_labels, (len(embeddings), len(ref_emb)))
        queries = len(embeddings)
        items = embeddings if ref_emb is embeddings else torch.cat([embeddings, ref_emb])
        mean = items.mean(0)
        items = items - mean  # squares of differences lose fewer digits so
        size = items.shape[1]
        covariance = items.T @ items / max(len(items), 1)
        spread = covariance.diagonal().sum() / size
        rounding = (16 * torch.finfo(items.dtype).eps) ** 2 * mean.detach().square().mean()
        kinds = (found[0].numel() > 0, found[2].numel() > 0)
        one_sided = self.scale == "free" and not all(kinds)
        if one_sided or not any(kinds) or not bool(spread > rounding):
            return _nothing(embeddings, ref_emb)
        identity = torch.eye(size, dtype=items.dtype, device=items.device)
        metric = covariance + self.ridge * spread * identity
        eigenvalues, eigenvectors = torch.linalg.eigh(metric.detach())
        _check_regular(eigenvalues, len(items), self.ridge)

        far = torch.linalg.solve(metric, items.T).T
        pull = 1 + self.alpha * (self.beta / (2 + self.beta)) ** 2
        dissimilar = pull * _squares(far, queries, found[2:])
        t = 1.0
        if self.scale == "free":
            moments = _mean_square_by_column(items.detach() @ eigenvectors, queries, found[:2])
            weight = dissimilar.detach().mean()
            if not (float(moments.sum()) > 0 and float(weight) > 0):
                return _nothing(embeddings, ref_emb)
            t = best_scale(moments, eigenvalues, weight, self.alpha, self.beta)
        similar = _squares(items, queries, found[:2])
        if self.alpha:
            # s(tΣ) = I − 2K⁻¹ with K = 2I + βt²Σ²: no eigenvectors to differentiate, so that ties do no harm
            k = self.beta * t**2 * metric @ metric + 2 * identity
            near = items - 2 * torch.linalg.solve(k, items.T).T
            similar = similar + self.alpha * _squares(near, queries, found[:2])
        return {
            "pos_loss": _part(t * similar, found[:2], "pos_pair"),
            "neg_loss": _part(dissimilar / t, found[2:], "neg_pair"),
        }


def _part(losses: Tensor, pairs: tuple[Tensor, Tensor], kind: str) -> dict[str, Any]:
    if losses.numel() == 0:  # a reducer's mean of nothing would be NaN
        return {"losses": losses.sum(), "indices": None, "reduction_type": "already_reduced"}
    return {"losses": losses, "indices": pairs, "reduction_type": kind}


def _pairs(
    indices: Any, labels: Tensor | None, ref_labels: Tensor | None, shape: tuple[int, int]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return anchors and positives, anchors and negatives: a miner's, or all pairs."""
    if indices is not None and len(indices) not in (3, 4):
        raise ValueError(
            f"a miner gives (anchor, positive, negative) or (anchor, positive, anchor, negative), not {len(indices)} tensors"
        )
    a1, p, a2, n = indices_utils.convert_to_pairs(indices, labels, ref_labels)
    for anchors, others in ((a1, p), (a2, n)):
        for each, size in ((anchors, shape[0]), (others, shape[1])):
            if each.numel() and not 0 <= int(each.min()) <= int(each.max()) < size:
                raise ValueError(
                    f"a miner's indices go from {int(each.min())} to {int(each.max())}, and there are {size} items: was it "
                    f"given the same batch and reference set?"
                )
    return a1, p, a2, n


def _squares(x: Tensor, queries: int, pairs: tuple[Tensor, ...]) -> Tensor:
    """Return ‖x_a − x_b‖² (P,) of pairs; a counts from the first row, b from the first reference (see `_reference`)."""
    q, r = x[:queries], _reference(x, queries)
    matrix = q.square().sum(1)[:, None] + r.square().sum(1) - 2 * (q @ r.T)
    return matrix[pairs].clamp_min(0)


def _mean_square_by_column(x: Tensor, queries: int, pairs: tuple[Tensor, ...]) -> Tensor:
    """Return the mean of (x_a − x_b)² over pairs, column by column (C,)."""
    q, r = x[:queries], _reference(x, queries)
    often = x.new_zeros(len(q), len(r)).index_put_(pairs, x.new_ones(()), accumulate=True)
    total = often.sum(1) @ q.square() + often.sum(0) @ r.square() - 2 * (q * (often @ r)).sum(0)
    return total.clamp_min(0) / pairs[0].numel()


def _reference(x: Tensor, queries: int) -> Tensor:
    """Return the rows after the queries; the queries themselves where there are none."""
    return x[queries:] if len(x) > queries else x


def _check_regular(eigenvalues: Tensor, items: int, ridge: float) -> None:
    size = len(eigenvalues)
    if float(eigenvalues[0]) <= size * torch.finfo(eigenvalues.dtype).eps * float(eigenvalues[-1]):
        raise DataError(
            f"The covariance of {items} embeddings of {size} dimensions cannot be inverted with ridge = {ridge:g}: set ridge above "
            f"0 (its default is 0.1), or give it more items than dimensions."
        )


def _nothing(embeddings: Tensor, ref_emb: Tensor) -> Squares:
    zero = embeddings.sum() * 0 + ref_emb.sum() * 0
    return {
        name: {"losses": zero, "indices": None, "reduction_type": "already_reduced"}
        for name in ("pos_loss", "neg_loss")
    }


def _checked(x: Any, name: str) -> Tensor:
    if not isinstance(x, Tensor) or x.ndim != 2 or not x.is_floating_point():
        raise ValueError(f"{name} must be a matrix of floating-point numbers, a row an item")
    if not bool(torch.isfinite(x).all()):
        wrong = int((~torch.isfinite(x)).any(1).sum())
        raise DataError(f"{name} hold NaN or infinite numbers: {wrong} of {len(x)} items")
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
