"""The four losses that the DAML paper trains with its generator, for any distance or combiner."""

from __future__ import annotations

from typing import Any, Literal

import torch
from pydantic import PositiveFloat
from pytorch_metric_learning.distances import DotProductSimilarity, LpDistance
from pytorch_metric_learning.utils import loss_and_miner_utils as indices_utils
from retrieval.helpers import Pairs, listed_pairs, losses_of, pairs_by_round
from retrieval.plugin import CheckedLoss, Distance, Reducer
from torch import Tensor, nn


class Measure:
    """Distances and similarities of pairs between two sets of embeddings.

    A similarity s gives D² = 2 − 2s, and a distance D gives s = 1 − D²/2. These formulas are exact
    for the cosine and the Euclidean distance of unit vectors. `LpDistance` with power 2 already
    returns D².

    Args:
        distance: a `BaseDistance`, or a combiner.
        query: (B, C) embeddings.
        reference: (R, C) embeddings.
    """

    def __init__(self, distance: Any, query: Tensor, reference: Tensor) -> None:
        self.inverted = distance.is_inverted
        self.euclidean = (
            type(distance) is LpDistance and distance.p == 2 and distance.power in (1, 2)
        )
        x = distance.maybe_normalize(query)
        if reference is query:
            y = x
        else:
            y = distance.maybe_normalize(reference)
        # Squared: the root has no gradient at zero.
        if self.euclidean:
            squares = x.square().sum(1)[:, None] + y.square().sum(1) - 2 * (x @ y.T)
            self.matrix: Tensor = squares.relu()
        else:
            self.matrix = distance.compute_mat(x, y) ** distance.power

    def all_squared(self) -> Tensor:
        """Return D² (B, R) of every pair."""
        if self.inverted:
            return 2 - 2 * self.matrix
        if self.euclidean:
            return self.matrix
        return self.matrix.square()

    def squared(self, rows: Tensor, columns: Tensor) -> Tensor:
        """Return D² (N,) of pairs."""
        return self.all_squared()[rows, columns]

    def plain(self, rows: Tensor, columns: Tensor) -> Tensor:
        """Return D (N,) of pairs."""
        if self.euclidean or self.inverted:
            # The clamp keeps the gradient of the root finite for equal embeddings.
            return self.squared(rows, columns).clamp_min(1e-12).sqrt()
        return self.matrix[rows, columns]

    def similarity(self, rows: Tensor, columns: Tensor) -> Tensor:
        """Return s (N,) of pairs."""
        if self.inverted:
            return self.matrix[rows, columns]
        return 1 - self.squared(rows, columns) / 2


class PaperLoss(CheckedLoss):
    """Base class of the losses of the DAML paper.

    Args:
        distance: distance or similarity of two embeddings.
        reducer: reduces the losses to one number; the mean by default.
    """

    def get_default_distance(self) -> nn.Module:
        """Return the Euclidean distance of unscaled embeddings."""
        return default_distance()

    def pairs(
        self, labels: Tensor | None, indices: Any, query: Tensor, reference: Tensor, ref_labels: Any
    ) -> Pairs:
        """Return the miner's pairs without duplicates, or all pairs without a miner."""
        if indices is None:
            same = reference is query
            a, p, b, n = indices_utils.get_all_pairs_indices(labels, None if same else ref_labels)
            return a, p, b, n
        a, p, b, n = listed_pairs(indices, (len(query), len(reference)), query.device)
        return *_once(a, p, len(reference)), *_once(b, n, len(reference))


def triplets(
    indices: Any, labels: Tensor | None, query: Tensor, reference: Tensor, ref_labels: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Return a miner's triplets, all triplets of its pairs, or all triplets without a miner."""
    if indices is None:
        same = reference is query
        a, p, n = indices_utils.get_all_triplets_indices(labels, labels if same else ref_labels)
        return a, p, n
    a, p, b, n = listed_pairs(indices, (len(query), len(reference)), query.device)
    if len(indices) == 3:
        return a, p, n
    with_positive, with_negative = (a[:, None] == b).nonzero(as_tuple=True)
    return a[with_positive], p[with_positive], n[with_negative]


def _once(anchors: Tensor, partners: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Return each pair once; `size` is the number of references."""
    # One integer per pair: torch sorts numbers faster than rows.
    keys = torch.unique(anchors * size + partners)
    return keys // max(size, 1), keys % max(size, 1)


def default_distance() -> nn.Module:
    """Return the Euclidean distance of unscaled embeddings."""
    return LpDistance(normalize_embeddings=False, p=2, power=1)  # type: ignore[no-any-return]


class MarginLoss(PaperLoss):
    """Base class of the losses of squared distances whose only parameter is a margin."""

    def __init__(
        self, margin: float = 1.0, distance: Distance = None, reducer: Reducer = None
    ) -> None:
        super().__init__(distance, reducer)
        self.margin = margin


class ContrastiveLoss(MarginLoss):
    """Contrastive loss: pulls positives near and pushes negatives beyond a margin.

    Hadsell, Chopra & LeCun, CVPR 2006; Duan, Lu, Zheng & Zhou, "Deep Adversarial Metric Learning",
    equation 8:

        mean over positive pairs of D² + mean over negative pairs of [ α − D² ]₊

    The paper has sums instead of means. With a generator, set its `form = "contrastive"`.

    Args:
        margin: α, a squared distance.
        distance: distance or similarity of two embeddings; by default the Euclidean distance of
            unscaled embeddings.
        reducer: reduces the losses of each kind of pairs to one number; the mean by default.
    """

    def compute_loss(
        self, embeddings: Tensor, labels: Any, indices_tuple: Any, ref_emb: Tensor, ref_labels: Any
    ) -> dict[str, dict[str, Any]]:
        """Return the losses of pairs in the format of pytorch-metric-learning's reducers."""
        a, p, b, n = self.pairs(labels, indices_tuple, embeddings, ref_emb, ref_labels)
        measure = Measure(self.distance, embeddings, ref_emb)
        parts = self.zero_losses()
        if len(a):
            parts |= losses_of(measure.squared(a, p), (a, p), "pos_pair", "pos_loss")
        if len(b):
            losses = (self.margin - measure.squared(b, n)).relu()
            parts |= losses_of(losses, (b, n), "neg_pair", "neg_loss")
        return parts

    def _sub_loss_names(self) -> list[str]:
        return ["pos_loss", "neg_loss"]


class TripletLoss(MarginLoss):
    """Triplet loss of squared distances: negatives should be farther than positives by a margin.

    Schroff, Kalenichenko & Philbin, "FaceNet", CVPR 2015; Duan, Lu, Zheng & Zhou, "Deep Adversarial
    Metric Learning", equation 9: the mean over triplets of [ D(p, a)² − D(n, a)² + α ]₊. Without a
    miner, all triplets of the batch are listed (1 GB for 1,024 items with 8 per class).

    Args:
        margin: α, a difference of squared distances.
        distance: distance or similarity of two embeddings; by default the Euclidean distance of
            unscaled embeddings.
        reducer: reduces the triplets' losses to one number; the mean by default.
    """

    def compute_loss(
        self, embeddings: Tensor, labels: Any, indices_tuple: Any, ref_emb: Tensor, ref_labels: Any
    ) -> dict[str, dict[str, Any]]:
        """Return the losses of triplets in the format of pytorch-metric-learning's reducers."""
        a, p, n = triplets(indices_tuple, labels, embeddings, ref_emb, ref_labels)
        if len(a) == 0:
            return self.zero_losses()
        measure = Measure(self.distance, embeddings, ref_emb)
        losses = (measure.squared(a, p) - measure.squared(a, n) + self.margin).relu()
        return losses_of(losses, (a, p, n), "triplet")


class LiftedLoss(PaperLoss):
    """Lifted structure loss: each positive pair against the negatives of both its items.

    Oh Song, Xiang, Jegelka & Savarese, CVPR 2016; Duan, Lu, Zheng & Zhou, "Deep Adversarial Metric
    Learning", equations 10 and 11: the mean over positive pairs (i, j) of ½ [ J ]₊ with

        J = max( max_{n of i} α − D(i, n), max_{n of j} α − D(j, n) ) + D(i, j)

    This is the form that the DAML paper prints. With `form = "original"`, the loss of a pair is
    ½ [ J ]₊², with the log-exp sum over the negatives of both items instead of the maximum. The
    negatives of j count only if j is an anchor too: without a reference set, or if the reference
    set begins with the batch, as a generator's does. A pair without negatives has loss 0.

    Args:
        margin: α, a distance.
        form: "printed", or "original" for the square and the log-exp sum.
        distance: distance or similarity of two embeddings; by default the Euclidean distance of
            unscaled embeddings.
        reducer: reduces the pairs' losses to one number; the mean by default.
    """

    def __init__(
        self,
        margin: float = 1.0,
        form: Literal["printed", "original"] = "printed",
        distance: Distance = None,
        reducer: Reducer = None,
    ) -> None:
        super().__init__(distance, reducer)
        if form not in ("printed", "original"):
            raise ValueError(f'form is {form!r} and must be "printed" or "original"')
        self.margin = margin
        self.form = form

    def compute_loss(
        self, embeddings: Tensor, labels: Any, indices_tuple: Any, ref_emb: Tensor, ref_labels: Any
    ) -> dict[str, dict[str, Any]]:
        """Return the losses of pairs in the format of pytorch-metric-learning's reducers."""
        a, p, b, n = self.pairs(labels, indices_tuple, embeddings, ref_emb, ref_labels)
        if len(a) == 0 or len(b) == 0:
            return self.zero_losses()
        measure = Measure(self.distance, embeddings, ref_emb)
        printed = self.form == "printed"
        push = _by_anchor(self.margin - measure.plain(b, n), b, len(embeddings), maximum=printed)
        # A quarter of the lowest number: the sum of two is still finite.
        lowest = torch.finfo(push.dtype).min / 4
        push_of_positive = torch.where(
            _is_anchor(embeddings, ref_emb, p), push[p.clamp_max(len(push) - 1)], lowest
        )
        of_items = torch.stack([push[a], push_of_positive])
        if printed:
            total = of_items.amax(0)
        else:
            total = of_items.logsumexp(0)
        losses = (total + measure.plain(a, p)).relu()
        if not printed:
            losses = losses.square()
        return losses_of(losses / 2, (a, p), "pos_pair")


def _by_anchor(values: Tensor, anchors: Tensor, size: int, maximum: bool = False) -> Tensor:
    """Return the log-exp sum or the maximum (B,) of each anchor's values; very low for no value."""
    lowest = values.new_full((size,), torch.finfo(values.dtype).min / 4)
    if maximum:
        return lowest.scatter_reduce(0, anchors, values, "amax")
    # The largest value cancels out of the result, so it needs no gradient.
    largest = lowest.scatter_reduce(0, anchors, values.detach(), "amax")
    total = torch.zeros_like(lowest).index_add(0, anchors, (values - largest[anchors]).exp())
    return torch.where(total > 0, largest + total.clamp_min(1e-30).log(), lowest)


def _is_anchor(query: Tensor, reference: Tensor, columns: Tensor) -> Tensor:
    """Return whether references at these columns are the batch's items with these indices."""
    begins_with_batch = reference is query or (
        len(reference) >= len(query) and torch.equal(reference[: len(query)], query)
    )
    return (columns < len(query)) & begins_with_batch


class NPairLoss(PaperLoss):
    """N-pair loss: softmax over similarities to the positive and to one item of each other class.

    Sohn, NIPS 2016; Duan, Lu, Zheng & Zhou, "Deep Adversarial Metric Learning", equation 12: the
    mean over pairs (a, p) of

        log( 1 + Σ_n exp( scale · ( s(a, n) − s(a, p) ) ) )

    The paper prints the similarity to the item from which the negative was generated in place of
    s(a, p). Without a miner, the first two items of each class in the batch are the pairs of a
    first round, the next two those of a second round, and so on; the negatives of a pair are the
    positives of the other pairs of its round. With a reference set, positives come from that set.
    With a miner, the negatives of a pair are the miner's negatives of the anchor.

    Args:
        scale: factor of the similarities: 8 to 16 for unit vectors, 1 for unscaled embeddings.
        distance: distance or similarity of two embeddings; by default the inner product of
            unscaled embeddings. A distance D becomes s = 1 − D²/2.
        reducer: reduces the pairs' losses to one number; the mean by default.
    """

    def __init__(
        self, scale: PositiveFloat = 16.0, distance: Distance = None, reducer: Reducer = None
    ) -> None:
        super().__init__(distance, reducer)
        if not 0 < scale < float("inf"):
            raise ValueError(f"scale is {scale:g} and must be a number above 0")
        self.scale = scale

    def get_default_distance(self) -> nn.Module:
        """Return the inner product."""
        return DotProductSimilarity(normalize_embeddings=False)  # type: ignore[no-any-return]

    def compute_loss(
        self, embeddings: Tensor, labels: Any, indices_tuple: Any, ref_emb: Tensor, ref_labels: Any
    ) -> dict[str, dict[str, Any]]:
        """Return the losses of pairs in the format of pytorch-metric-learning's reducers."""
        if indices_tuple is None:
            assert labels is not None
            if ref_emb is embeddings:
                reference = None
            else:
                reference = ref_labels
            a, p, turn = pairs_by_round(labels, reference)
            # A round has one pair per class.
            other = (turn[:, None] == turn).fill_diagonal_(False)
            first, second = other.nonzero(as_tuple=True)
            b = a[first]
            n = p[second]
        else:
            a, p, b, n = self.pairs(labels, indices_tuple, embeddings, ref_emb, ref_labels)
        if len(a) == 0 or len(b) == 0:
            return self.zero_losses()
        measure = Measure(self.distance, embeddings, ref_emb)
        positives = self.scale * measure.similarity(a, p)
        negatives = self.scale * measure.similarity(b, n)
        push = _by_anchor(negatives, b, len(embeddings))
        # log(1 + Σ exp(…)), without an overflow.
        losses = nn.functional.softplus(push[a] - positives)
        return losses_of(losses, (a, p), "pos_pair")
