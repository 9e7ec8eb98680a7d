"""Losses of similarities: DANML, and improved lifted structure, N-pair and proxy-NCA losses."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import torch
import torch.nn.functional as F
from pydantic import NonNegativeFloat, PositiveFloat
from pytorch_metric_learning.distances import CosineSimilarity, DotProductSimilarity, LpDistance
from retrieval.helpers import item_losses, losses_of, pairs_by_round
from retrieval.plugin import CheckedLoss, Distance, Reducer, traits
from torch import Tensor, nn

from retrieval_anml.pair_gap import Pairs, Rule, gaps, pairs_of_labels, pairs_of_miner

Outer = Literal["logistic", "identity", "hinge"]
Threshold = float | Literal["none"] | None
"""A similarity, or `None` for no threshold. Recipes write "none", because TOML has no null."""
# Largest amount by which the threshold of negatives may exceed that of positives. The paper's
# thresholds differ by .01 to .03.
OVERLAP = 0.1


def similarities(distance: nn.Module, query: Tensor, reference: Tensor) -> Tensor:
    """Return similarities (B, R) computed by a distance of pytorch-metric-learning or a combiner.

    A similarity is used unchanged. A distance D becomes s = 1 − D²/2, which is the cosine if D is
    the Euclidean distance of unit vectors. `LpDistance` with power 2 already returns D².
    """
    matrix: Tensor = distance(query, reference)
    if getattr(distance, "is_inverted", False):
        return matrix
    if type(distance) is LpDistance and distance.power == 2:
        squared = matrix
    else:
        squared = matrix.square()
    return 1 - squared / 2


def check_gammas(gamma1: float, gamma2: float) -> None:
    """Raise a `ValueError` if γ₁ is NaN or γ₂ is not above 0."""
    if gamma1 != gamma1:
        raise ValueError(
            "gamma1 is NaN and must be a number: 0 averages the positives, infinity takes the least"
            " similar one"
        )
    if not gamma2 > 0:
        raise ValueError(
            f"gamma2 is {gamma2:g} and must be above 0: the larger it is, the more the most similar"
            " negatives count. Only gamma1 may be negative, as in the paper"
        )


def check_thresholds(positive: Threshold, negative: Threshold) -> tuple[float | None, float | None]:
    """Return p and q as numbers or `None`.

    Raises:
        ValueError: a threshold is not finite, or q exceeds p by more than `OVERLAP`.
    """
    p = _threshold("positive_threshold", positive)
    q = _threshold("negative_threshold", negative)
    if p is not None and q is not None and q - p > OVERLAP:
        raise ValueError(
            f"positive_threshold {p:g} is below negative_threshold {q:g} by more than {OVERLAP}:"
            " a pair with a similarity between the two would hardly count, positive or negative."
            " Thresholds are similarities: write 1 − λ for a distance λ = 1 − cosine"
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
    if outer == "hinge":
        return x.relu()
    return x


class SimilarityLoss(CheckedLoss):
    """Base class of losses of similarities.

    Args:
        distance: distance or similarity of two embeddings; the cosine by default.
        reducer: reduces the losses to one number; the mean by default.
    """

    rule: Rule
    margin: float
    outer: Outer = "hinge"
    # Gaps are multiplied by it.
    slope = 1.0

    def get_default_distance(self) -> nn.Module:
        """Return the cosine similarity."""
        return CosineSimilarity()  # type: ignore[no-any-return]

    def compute_loss(
        self, embeddings: Tensor, labels: Any, indices_tuple: Any, ref_emb: Tensor, ref_labels: Any
    ) -> dict[str, dict[str, Any]]:
        """Return the anchors' losses in the format of pytorch-metric-learning's reducers."""
        if indices_tuple is None:
            pairs = pairs_of_labels(labels, None if ref_emb is embeddings else ref_labels)
        else:
            shape = len(embeddings), len(ref_emb)
            pairs = pairs_of_miner(indices_tuple, shape, embeddings.device)
        return self.of_pairs(similarities(self.distance, embeddings, ref_emb), pairs)

    def of_pairs(self, similarity: Tensor, pairs: Pairs) -> dict[str, dict[str, Any]]:
        """Return the anchors' losses, for similarities (B, R) of embeddings and references."""
        gap, defined = gaps(similarity, pairs, self.rule)
        if len(gap) == 0:
            return self.zero_losses()
        return item_losses(outer_loss(self.slope * gap + self.margin, self.outer) * defined)


class DANMLoss(SimilarityLoss):
    """Deep adaptive neighbourhoods (DANML): least similar positives against most similar negatives.

    Song, Nie, Han & Li, "Adaptive Neighborhood Metric Learning", equation 22. For an anchor with
    positives S and negatives D, cosines s and g = |γ₁|, the gap is

        x = 1/g · log( [e^{−g p} + Σ_S e^{−g s}] / (|S| + 1) )
          + 1/γ₂ · log( [e^{γ₂ q} + Σ_D e^{γ₂ s}] / (|D| + 1) )

    and the loss is the mean of ℓ(x + margin). The members of a neighbourhood change from batch to
    batch; the thresholds p and q stabilise the gap. A positive that is more similar than p and a
    negative that is less similar than q hardly count.

    The paper's λ₁ and λ₂ can be read in two ways. In equation 22 they are distances 1 − cosine: p =
    1 − λ₁, q = 1 − λ₂. Their values in the experiments (λ₁ from .5 to .65, λ₂ larger by .01 to .03)
    suggest similarities: p = λ₁, q = λ₂.

    With ℓ(x) = x and p = q, the loss is Multi-Similarity minus a constant that depends on the
    number of pairs. An anchor has loss 0 if it has no pair, if p is "none" and it has no positives,
    or if q is "none" and it has no negatives. A distance D of a combiner becomes s = 1 − D²/2.

    Args:
        gamma1: γ₁. The larger |γ₁|, the more the least similar positives count; 0 averages all. The
            sign, which is negative in the paper, has no effect.
        gamma2: γ₂. The larger it is, the more the most similar negatives count.
        positive_threshold: p, the similarity of one extra positive; "none" leaves it out.
        negative_threshold: q, the similarity of one extra negative; "none" leaves it out.
        outer: ℓ, the function of the gap: log(1 + eˣ), x, or max(0, x).
        margin: added to the gap before ℓ; by default 1 for the hinge and 0 otherwise.
        distance: how two embeddings are compared; the cosine by default.
        reducer: reduces the anchors' losses to one number; the mean by default.
    """

    def __init__(
        self,
        gamma1: float = 2.0,
        gamma2: PositiveFloat = 30.0,
        positive_threshold: Threshold = 0.5,
        negative_threshold: Threshold = 0.5,
        outer: Outer = "logistic",
        margin: float | None = None,
        distance: Distance = None,
        reducer: Reducer = None,
    ) -> None:
        super().__init__(distance, reducer)
        check_gammas(gamma1, gamma2)
        p, q = check_thresholds(positive_threshold, negative_threshold)
        if outer not in ("logistic", "identity", "hinge"):
            raise ValueError(f'outer is "{outer}" and must be "logistic", "identity" or "hinge"')
        self.rule = Rule(abs(gamma1), gamma2, p, q)
        self.outer = outer
        self.margin = (1.0 if outer == "hinge" else 0.0) if margin is None else margin


@traits(miner=False)
class MinedDANMLoss(DANMLoss):
    """`anml.danml` with the miner `pml.multi_similarity` built in.

    The paper always uses this loss with this miner. The value is that of the separate miner and
    loss, but no lists of pairs are stored. All parameters but ε are those of `anml.danml`.

    Args:
        epsilon: the miner's margin ε, a difference of similarities even if `distance` is a
            distance. A positive counts if its similarity is below that of the most similar
            negative plus ε, a negative if its similarity is above that of the least similar
            positive minus ε.
    """

    def __init__(self, *arguments: Any, epsilon: NonNegativeFloat = 0.1, **parameters: Any) -> None:
        super().__init__(*arguments, **parameters)
        if not epsilon >= 0:
            raise ValueError(f"epsilon is {epsilon} and must be at least 0")
        self.rule = replace(self.rule, epsilon=epsilon)


class ImprovedLiftedLoss(SimilarityLoss):
    """Lifted structure loss with a γ and a threshold for each neighbourhood.

    Song, Nie, Han & Li, "Adaptive Neighborhood Metric Learning", equation 25: the mean over anchors
    of

        [ 1/γ₁ · log( e^{−γ₁ p} + Σ_S e^{−γ₁ s} )
          + 1/γ₂ · log( e^{γ₂ q} + Σ_D e^{γ₂ s} ) + margin ]₊

    where s is the cosine. An anchor has loss 0 if it has no pair, if p is "none" and it has no
    positives, or if q is "none" and it has no negatives. A distance D of a combiner becomes s = 1 −
    D²/2.

    Args:
        gamma1: γ₁. The larger it is, the more the least similar positives count.
        gamma2: γ₂. The larger it is, the more the most similar negatives count.
        positive_threshold: p, the paper's λ₁, the similarity of one extra positive; "none" leaves
            it out.
        negative_threshold: q, the paper's λ₂, the similarity of one extra negative; "none" leaves
            it out.
        margin: margin of the hinge.
        distance: how two embeddings are compared; the cosine by default.
        reducer: reduces the anchors' losses to one number; the mean by default.
    """

    def __init__(
        self,
        gamma1: PositiveFloat = 2.0,
        gamma2: PositiveFloat = 30.0,
        positive_threshold: Threshold = 0.5,
        negative_threshold: Threshold = 0.5,
        margin: float = 0.5,
        distance: Distance = None,
        reducer: Reducer = None,
    ) -> None:
        super().__init__(distance, reducer)
        check_gammas(gamma1, gamma2)
        if not gamma1 > 0:
            raise ValueError(f"gamma1 is {gamma1:g} and must be above 0, as in equation 25")
        p, q = check_thresholds(positive_threshold, negative_threshold)
        self.rule = Rule(gamma1, gamma2, p, q, average=False)
        self.margin = margin


class LiftedLoss(ImprovedLiftedLoss):
    """Lifted structure loss over anchors, the form that `anml.improved_lifted` improves.

    Song, Nie, Han & Li, "Adaptive Neighborhood Metric Learning", equation 23. The loss comes from
    Hermans, Beyer & Leibe, "In Defense of the Triplet Loss for Person Re-Identification", 2017,
    after Oh Song, Xiang, Jegelka & Savarese, CVPR 2016. It is the mean over anchors of

        [ log Σ_S e^{−s} + log Σ_D e^{s} + margin ]₊

    where s is the cosine. An anchor without positives or negatives has loss 0.

    Args:
        margin: margin of the hinge. The sums grow with the numbers of pairs, so with cosines the
            loss can be 0 only for a margin of at most 2 − log(|S| |D|).
        distance: how two embeddings are compared; the cosine by default.
        reducer: reduces the anchors' losses to one number; the mean by default.
    """

    def __init__(
        self, margin: float = 1.0, distance: Distance = None, reducer: Reducer = None
    ) -> None:
        super().__init__(1.0, 1.0, None, None, margin, distance, reducer)


class ImprovedNPairLoss(CheckedLoss):
    """N-pair loss with a γ and an offset for the negatives.

    Song, Nie, Han & Li, "Adaptive Neighborhood Metric Learning", equation 31: the mean over pairs
    (i, i⁺) of

        1/γ · log( 1 + Σ_{j ≠ i} e^{γ (s(i, j⁺) − λ − s(i, i⁺))} )

    with one pair per class, where s is the inner product of the unscaled embeddings. The first two
    items of each class in the batch are the pairs of a first round, the next two those of a second
    round, and so on. An item without a partner is left out. With a reference set, i⁺ comes from
    that set. With a miner, each positive pair (i, i⁺) is compared with the miner's negatives of
    anchor i. A distance D becomes s = 1 − D²/2.

    Args:
        gamma: γ. The larger it is, the more the most similar negatives count.
        offset: λ, which is subtracted from the similarities of negatives. A negative λ is a margin.
        distance: distance or similarity of two embeddings; by default the inner product of
            unscaled embeddings.
        reducer: reduces the pairs' losses to one number; the mean by default.
    """

    def __init__(
        self,
        gamma: PositiveFloat = 16.0,
        offset: float = 0.0,
        distance: Distance = None,
        reducer: Reducer = None,
    ) -> None:
        super().__init__(distance, reducer)
        if not 0 < gamma < float("inf"):
            raise ValueError(f"gamma is {gamma:g} and must be a number above 0")
        self.gamma = gamma
        self.offset = offset

    def get_default_distance(self) -> nn.Module:
        """Return the inner product."""
        return DotProductSimilarity(normalize_embeddings=False)  # type: ignore[no-any-return]

    def compute_loss(
        self, embeddings: Tensor, labels: Any, indices_tuple: Any, ref_emb: Tensor, ref_labels: Any
    ) -> dict[str, dict[str, Any]]:
        """Return the losses of pairs in the format of pytorch-metric-learning's reducers."""
        if indices_tuple is not None:
            anchor, positive, losses = self._listed(embeddings, ref_emb, indices_tuple)
        else:
            assert labels is not None
            anchor, positive, losses = self._rounds(
                embeddings, labels, ref_emb, None if ref_emb is embeddings else ref_labels
            )
        if len(anchor) == 0:
            return self.zero_losses()
        return losses_of(losses, (anchor, positive), "pos_pair")

    def _rounds(
        self, embeddings: Tensor, labels: Tensor, ref_emb: Tensor, ref_labels: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return anchors, positives and losses of the pairs of all rounds."""
        anchor, positive, turn = pairs_by_round(labels, ref_labels)
        if len(anchor) == 0:
            return anchor, positive, embeddings.new_zeros(0)
        similarity = similarities(self.distance, embeddings[anchor], ref_emb[positive])
        of_pair = similarity.diagonal()[:, None]
        logits = self.gamma * (similarity - self.offset - of_pair)
        # A class has one pair per round, so all other pairs of the round are of other classes.
        left_out = (turn[:, None] != turn).fill_diagonal_(True)
        logits = logits.masked_fill(left_out, torch.finfo(logits.dtype).min)
        return anchor, positive, F.softplus(torch.logsumexp(logits, 1)) / self.gamma

    def _listed(
        self, embeddings: Tensor, ref_emb: Tensor, indices: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return anchors, positives and losses of a miner's pairs."""
        shape = len(embeddings), len(ref_emb)
        positives, negatives = pairs_of_miner(indices, shape, embeddings.device)
        anchor, positive = positives.nonzero(as_tuple=True)
        if not bool(negatives.any()):
            return anchor[:0], positive[:0], embeddings.new_zeros(0)
        similarity = similarities(self.distance, embeddings, ref_emb)
        lowest = torch.finfo(similarity.dtype).min
        push = torch.logsumexp((self.gamma * similarity).masked_fill(~negatives, lowest), 1)[anchor]
        pull = self.gamma * (similarity[anchor, positive] + self.offset)
        return anchor, positive, F.softplus(push - pull) / self.gamma


class NPairLoss(ImprovedNPairLoss):
    """N-pair loss: softmax over similarities to the positive and to one item of each other class.

    Sohn, "Improved Deep Metric Learning with Multi-class N-pair Loss Objective", NIPS 2016;
    equation 28 of Song, Nie, Han & Li. This is `anml.improved_npair` with γ = 1 and λ = 0, whose
    description explains which pairs count.

    Args:
        distance: distance or similarity of two embeddings; by default the inner product of
            unscaled embeddings.
        reducer: reduces the pairs' losses to one number; the mean by default.
    """

    def __init__(self, distance: Distance = None, reducer: Reducer = None) -> None:
        super().__init__(1.0, 0.0, distance, reducer)


@traits(ref_emb=False, miner=False)
class ImprovedProxyNCALoss(DANMLoss):
    """Proxy-NCA with γ₁, γ₂ and thresholds: DANML whose positives and negatives are proxies.

    Song, Nie, Han & Li, "Adaptive Neighborhood Metric Learning", table 3; the paper has no equation
    for it. With the squared Euclidean distance on the sphere, d = 2 − 2 cosine, the gap is

        x = 1/g · log( [e^{g λ₁} + e^{g d(y)}] / 2 )
          + 1/γ₂ · log( [e^{−γ₂ λ₂} + Σ_{z ≠ y} e^{−γ₂ d(z)}] / C )

    where y is the proxy of the item's class, z are the proxies of the C classes, g = |γ₁|, and λ =
    2 − 2 × threshold. Without thresholds, the first term is d(y), and the second is a mean over C −
    1 proxies. The loss is the mean of ℓ(x + margin). With ℓ(x) = x, no thresholds and γ₂ = 1, it is
    Proxy-NCA (Movshovitz-Attias et al., ICCV 2017) minus log(C − 1). A distance D of a combiner
    gives d = D².

    Args:
        gamma1: γ₁. The larger |γ₁|, the faster the proxy of the class stops counting once it is
            nearer than the threshold. Its sign has no effect. With `positive_threshold` "none", its
            size has no effect either.
        gamma2: γ₂. The larger it is, the more the nearest proxies of other classes count.
        positive_threshold: cosine of one extra proxy of the item's class; "none" leaves it out.
        negative_threshold: cosine of one extra proxy of another class; "none" leaves it out.
        outer: ℓ, the function of the gap: log(1 + eˣ), x, or max(0, x).
        margin: added to the gap before ℓ; by default 1 for the hinge and 0 otherwise.
        distance: distance or similarity of embeddings and proxies; the cosine by default.
        reducer: reduces the items' losses to one number; the mean by default.
    """

    def __init__(
        self,
        embedding_size: int,
        classes: int,
        gamma1: float = 1.0,
        gamma2: PositiveFloat = 8.0,
        positive_threshold: Threshold = None,
        negative_threshold: Threshold = None,
        outer: Outer = "logistic",
        margin: float | None = None,
        distance: Distance = None,
        reducer: Reducer = None,
    ) -> None:
        super().__init__(
            gamma1, gamma2, positive_threshold, negative_threshold, outer, margin, distance, reducer
        )
        # Because d = 2 − 2s, the gap of distances with γ is twice the gap of similarities with 2γ.
        self.rule = replace(self.rule, gamma1=2 * abs(gamma1), gamma2=2 * gamma2)
        self.slope = 2.0
        self.proxies = nn.Parameter(F.normalize(torch.randn(classes, embedding_size)))

    def compute_loss(
        self, embeddings: Tensor, labels: Any, indices_tuple: Any, ref_emb: Tensor, ref_labels: Any
    ) -> dict[str, dict[str, Any]]:
        """Return the losses of items in the format of pytorch-metric-learning's reducers."""
        assert labels is not None
        if len(labels) and not 0 <= int(labels.min()) <= int(labels.max()) < len(self.proxies):
            raise ValueError(
                f"labels must be from 0 to {len(self.proxies) - 1}, not from {int(labels.min())} to"
                f" {int(labels.max())}"
            )
        proxies = self.proxies.to(embeddings.dtype)
        numbers = torch.arange(len(proxies), device=labels.device, dtype=labels.dtype)
        pairs = pairs_of_labels(labels, numbers)
        return self.of_pairs(similarities(self.distance, embeddings, proxies), pairs)
