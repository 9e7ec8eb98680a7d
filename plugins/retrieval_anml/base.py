"""What the deep losses share: pytorch-metric-learning's call, checks of what it is given, and
similarities of any distance.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from pytorch_metric_learning.distances import CosineSimilarity, DotProductSimilarity, LpDistance
from retrieval.model.loss import nothing
from retrieval.plugin import CheckedLoss
from torch import Tensor, nn

from retrieval_anml.gap import Rule, gap_of_cosines, gap_of_similarities
from retrieval_anml.pairs import LabelPairs, ListedPairs, Pairs

Outer = Literal["logistic", "identity", "hinge"]
Threshold = float | Literal["none"] | None
"""A similarity, or none: "none" is for recipes, as TOML cannot write it."""
Positive = Annotated[float, Field(gt=0)]

# how far the positives' threshold may lie below the negatives': the paper's experiments have them
# .01 to .03 apart
OVERLAP = 0.1


def similarities(distance: nn.Module, query: Tensor, reference: Tensor) -> Tensor:
    """Return similarities (B, R) by any of pytorch-metric-learning's distances or a combiner.

    A similarity is taken as it is. A distance D becomes s = 1 − D²/2: for the Euclidean distance of
    unit vectors that is their cosine, and a combiner's distance is read in the same unit.
    `LpDistance` with power 2 is D² already.

    Args:
        distance: a `BaseDistance`.
        query: (B, C).
        reference: (R, C).
    """
    matrix: Tensor = distance(query, reference)
    if getattr(distance, "is_inverted", False):
        return matrix
    squared = matrix if type(distance) is LpDistance and distance.power == 2 else matrix.square()
    return 1 - squared / 2


def is_cosine(distance: Any) -> bool:
    """Return whether `similarities` of this distance are cosines."""
    if getattr(distance, "p", None) != 2 or not distance.normalize_embeddings:
        return False
    if type(distance) is LpDistance:
        return distance.power in (1, 2)
    return type(distance) in (CosineSimilarity, DotProductSimilarity) and distance.power == 1


def check_gammas(gamma1: float, gamma2: float) -> None:
    """Refuse values of γ for which the gap is not defined.

    Raises:
        ValueError: γ₂ ≤ 0, or one of them is NaN.
    """
    if gamma1 != gamma1:
        raise ValueError(
            "gamma1 is NaN; it must be a number: 0 averages the positives, infinity takes the least"
            " similar"
        )
    if not gamma2 > 0:
        raise ValueError(
            f"gamma2 is {gamma2:g} and must be above 0: the larger it is, the more the most similar"
            " negatives count. Only gamma1 may be written with a minus, as in the paper"
        )


def check_thresholds(positive: Threshold, negative: Threshold) -> tuple[float | None, float | None]:
    """Return the thresholds, refusing those that are not similarities, and those that ask positives
    to be *less* similar than negatives.

    Raises:
        ValueError: one is not a finite similarity, or the positive threshold is below the negative
            one.
    """
    p, q = _threshold("positive_threshold", positive), _threshold("negative_threshold", negative)
    if p is not None and q is not None and q - p > OVERLAP:
        raise ValueError(
            f"positive_threshold {p:g} is below negative_threshold {q:g} by more than {OVERLAP}:"
            " between the two, positives would count as near enough and negatives as far enough."
            " Both are similarities; if yours are distances 1 − cosine, write 1 − λ for each"
        )
    return p, q


def _threshold(name: str, value: Threshold) -> float | None:
    if value is None or value == "none":
        return None
    if isinstance(value, str) or not abs(value) < float("inf"):
        raise ValueError(
            f'{name} is {value} and must be a finite similarity, or "none" for no threshold'
        )
    return float(value)


def outer_loss(x: Tensor, outer: str) -> Tensor:
    """Return ℓ(x): log(1 + eˣ) for "logistic", max(0, x) for "hinge", x for "identity"."""
    if outer == "logistic":
        return F.softplus(x)
    return x.relu() if outer == "hinge" else x


class SimilarityLoss(CheckedLoss):
    """A loss of similarities.

    Args:
        distance: how two embeddings are compared; the cosine by default.
        reducer: how the losses become one number; the mean by default.
    """

    def get_default_distance(self) -> nn.Module:
        """Return the cosine similarity."""
        return CosineSimilarity()  # type: ignore[no-any-return]

    def pairs(
        self,
        labels: Tensor | None,
        indices_tuple: Any,
        embeddings: Tensor,
        ref_emb: Tensor,
        ref_labels: Any,
    ) -> Pairs:
        """Return the miner's pairs, or every pair where there is no miner."""
        if indices_tuple is not None:
            return ListedPairs(indices_tuple, (len(embeddings), len(ref_emb)), embeddings.device)
        assert labels is not None
        return LabelPairs(labels, None if ref_emb is embeddings else ref_labels)

    def gap(
        self, embeddings: Tensor, ref_emb: Tensor, pairs: Pairs, rule: Rule
    ) -> tuple[Tensor, Tensor]:
        """Return each anchor's gap (B,), and where it is defined; see `retrieval_anml.gap`."""
        if is_cosine(self.distance):
            return gap_of_cosines(
                embeddings, None if ref_emb is embeddings else ref_emb, pairs, rule
            )
        return gap_of_similarities(similarities(self.distance, embeddings, ref_emb), pairs, rule)


def by_element(losses: Tensor) -> dict[str, dict[str, Any]]:
    """Return one loss per anchor (B,) as pytorch-metric-learning's reducers read it."""
    if len(losses) == 0:
        return {"loss": nothing(losses)}
    indices = torch.arange(len(losses), device=losses.device)
    return {"loss": {"losses": losses, "indices": indices, "reduction_type": "element"}}
