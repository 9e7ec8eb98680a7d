"""`Warm`: Euclidean distance, unless the stream proves that a learned metric is better."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from pydantic import Field, PositiveInt
from retrieval.base.arrays import Floats, Ints
from retrieval.plugin import LinearMap, MetricLearner

from retrieval_oahu.network import unit
from retrieval_oahu.online import RandomTriplets
from retrieval_oahu.recent_items import NEAR, NEAR_TURNED_OVER, VOTERS, Memory, digest

if TYPE_CHECKING:
    from torch import nn


class Expert(NamedTuple):
    """A metric (I + A / (ridge · `reach`))⁻¹ of distances, or of angles if `angle`; see `Warm`."""

    reach: float
    angle: bool


EXPERTS = (Expert(1.0, False), Expert(1e-3, False), Expert(1.0, True), Expert(1e-2, True))
"""Two values of `reach` for distances and two for angles.

A smaller `reach` changes the metric more, and evens out features of very different scales.
"""
BLOCK = 64
"""Largest number of triplets in a block. The blocks of a stream have 1, 1, 2, 4, …, 64 triplets.

A block is judged before it is learned.
"""
FOLDS = 4
"""Number of folds into which items are divided, by their digests.

The items of a fold are judged with experts that have learned no pair with an item of that fold.
Otherwise the votes would favour the experts, above all when implied triplets reuse few items.
"""
REFRESH = 512
"""Number of triplets between two eigendecompositions of the moments.

Up to 1,024 triplets, every block is followed by an eigendecomposition.
"""
SETTLE = 500
"""Number of first triplets that only yield mean and principal components.

Until then, the learned map is the identity. `prepare` and `fit` use their sample instead.
"""
MIXTURE = 5.0
"""r of the bound in `Warm`, which holds for every n and is tightest for n near r."""


@dataclass(eq=False, repr=False)
class Warm(LinearMap, RandomTriplets):
    """Euclidean distance, except while the stream proves that a learned metric is better.

    Let A be the second moment of the differences between similar items, divided by its mean
    eigenvalue. The experts in `EXPERTS` are metrics (I + A / ρ)⁻¹ with several ρ, which shrink
    directions in which similar items differ and keep the scale of all others. An expert replaces
    Euclidean distance while it passes two tests. No expert is judged on pairs that it has learned:
    a block of triplets is judged before it is learned, and an item is judged with experts trained
    without the pairs of the item's fold.

    - *neighbours*: a memory holds the latest items and which of them are similar or dissimilar
      according to the triplets. For each item, the nearest 1, 3, 5, 7 and 9 items with a known
      relation vote on whether it is classified correctly. These voters are among the nearest
      hundredth of the memory, or the nearest twentieth once the memory has evicted items. An item
      counts once, with the mean of its latest votes as its score. Let d be the expert's score of an
      item minus the Euclidean score, S the sum of d over the items, and n the sum of d². The expert
      passes if S > √(2 (n + r) ln(1 + √((n + r) / r) / 2p)), with r = 5 and p = `doubt` divided by
      the number of experts. If the d are independent and symmetric about 0, the probability that S
      ever exceeds this bound is at most p. The bound is the one-sided normal mixture of Robbins,
      "Statistical methods related to the law of the iterated logarithm", 1970, in the closed form
      of Howard, Ramdas, McAuliffe & Sekhon, "Time-uniform, nonparametric, nonasymptotic confidence
      sequences", 2021.
    - *triplets*: the expert has ranked the negative before the positive less often than Euclidean
      distance has. This test alone is not enough, because random triplets say little about
      neighbours.

    If several experts pass, the expert with the largest S is served. The tests are repeated after
    every block, so an expert whose S falls to the bound is withdrawn, and may return. The model is
    always one linear map, followed by scaling to unit length if the served expert is an angle.

    Args:
        components: number of principal components along which A is learned. Other directions keep
            their scale. `None`, or at least the number of features, means all components.
        prior: number of similar pairs whose weight the initial metric has: after t pairs, A is
            multiplied by t / (t + prior).
        ridge: factor of every expert's `reach`; ρ is their product. The smaller it is, the more the
            experts differ from Euclidean distance.
        doubt: upper bound on the probability of ever leaving Euclidean distance by chance, under
            the assumptions above.
        memory: number of items in the memory.
        seeds: number of random triplets that `fit` draws.
        closure: number of implied triplets that `fit` adds to them.
        seed: seed of `fit`'s triplets; 0 by default.
        random_state: scikit-learn's name for `seed`. Set only one of them, or both to one number.

    Attributes:
        components_: (F, F) the learned map.
        mean_: (F,) vector that `transform` subtracts from the features.
        left_: whether an expert is served now instead of Euclidean distance.
        alpha_: (N + 1,) 1 for the served metric and 0 for the others: Euclidean distance first,
            then the N `EXPERTS`.
        weights_: (M, N + 1) `alpha_` along the stream; M is bounded.
        weights_at_: (M,) number of triplets after which a row was recorded.
        lead_: (N,) S of each expert.
        differing_: (N,) n of each expert.
        triplets_lead_: (N,) for each expert, the number of triplets that it ranks right and
            Euclidean distance wrong, minus the number of the reverse; ties count half.
    """

    components: PositiveInt | None = 256
    prior: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 20.0
    ridge: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0
    doubt: Annotated[float, Field(gt=0, lt=1, allow_inf_nan=False)] = 0.05
    memory: Annotated[int, Field(ge=256)] = 2000

    def _begin(self, features: int, sample: Floats | None) -> None:
        number = len(EXPERTS)
        slots = self.memory
        self.learned_ = self.gathered_ = self.turnover_ = 0
        self.left_ = False
        self.alpha_ = np.eye(number + 1)[0]
        self._record(self.alpha_, 0)
        self.lead_, self.differing_, self.triplets_lead_ = np.zeros((3, number))
        self.waiting_ = np.zeros((0, 3, features))
        self.held_ = np.zeros((slots, features))
        self.keys_ = np.zeros((slots, 2), np.uint64)
        self.group_ = np.arange(slots)
        self.parted_ = np.zeros((slots, slots), bool)
        self.used_ = np.zeros(slots, np.int64)
        # For each item of the memory, the latest d per expert, and the number of triplets learned
        # when the item was judged.
        self.verdicts_ = np.zeros((slots, number))
        self.judged_ = np.zeros(slots, np.int64)
        # The sums of d and d² per expert over the items that the memory has evicted.
        self.let_go_ = np.zeros((2, number))
        self._view: Memory | None = None
        self.components_ = np.eye(features)
        # Without a sample, sums over the first vectors yield mean and principal components.
        self.sum_ = np.zeros(features)
        self.products_ = np.zeros((features, features))
        self.basis_: Floats = np.zeros((0, features))
        self.mean_ = np.zeros(features)
        if sample is not None:
            centred = sample - sample.mean(axis=0)
            self._settle(sample.mean(axis=0), centred.T @ centred)

    def _settle(self, mean: Floats, covariance: Floats) -> None:
        """Set the mean (the centre of all angles) and the directions along which A is learned."""
        features = len(mean)
        self.mean_ = mean
        width = min(self.components or features, features)
        self.basis_ = np.eye(features)
        if width < features:
            # Ordered by increasing variance.
            _, directions = np.linalg.eigh(covariance)
            self.basis_ = _signed(np.ascontiguousarray(directions[:, ::-1][:, :width].T))
        self.sum_ = np.zeros(0)
        self.products_ = np.zeros((0, 0))
        self.moment_ = np.zeros((FOLDS + 1, width, width))
        self.pairs_ = np.zeros(FOLDS + 1)
        self._decompose()

    def _decompose(self) -> None:
        """Compute the eigenvectors of each moment, and each expert's scale along them."""
        values, self.directions_ = np.linalg.eigh(self.moment_)
        # The mean eigenvalue is over all F directions, with 0 for those outside `basis_`.
        means = np.trace(self.moment_, axis1=1, axis2=2) / self.basis_.shape[1]
        weight = self.pairs_ / (self.pairs_ + self.prior) / self.ridge
        # Rounding can make an eigenvalue of a second moment negative.
        factors = weight / np.where(means > 0, means, 1.0)
        values = np.maximum(values, 0.0) * factors[:, None]
        reaches = [expert.reach for expert in EXPERTS]
        self.scales_ = 1 / (1 + values[..., None] / reaches)

    def _learn(self, triplets: Floats) -> int:
        for triplet in triplets:
            if not len(self.basis_):
                self._gather(triplet)
                continue
            self.waiting_ = np.concatenate([self.waiting_, triplet[None]])
            if len(self.waiting_) == min(max(self.learned_, 1), BLOCK):
                self._block(self.waiting_ - self.mean_)
                self.waiting_ = self.waiting_[:0]
        # Every triplet changes the memory.
        return len(triplets)

    def _block(self, triplets: Floats) -> None:
        """Judge experts on a block of centred triplets, learn it, and choose the metric."""
        slots, to_judge = self._remember(triplets)
        folds = self.keys_[slots, 0] % FOLDS
        codes = triplets @ self.basis_.T
        self._judge_triplets(triplets, codes, folds[:, 0])
        self._judge_neighbours(to_judge)
        differences = codes[:, 0] - codes[:, 1]
        # The last moment, of all pairs, is served.
        for fold in range(FOLDS + 1):
            pairs = differences[(folds[:, :2] != fold).all(axis=1)]
            self.moment_[fold] += pairs.T @ pairs
            self.pairs_[fold] += len(pairs)
        self.learned_ += len(triplets)
        if self.learned_ <= 1024 or self.learned_ % REFRESH == 0:
            self._decompose()
        self._decide()

    def _remember(self, triplets: Floats) -> tuple[Ints, Ints]:
        """Store triplets; return their slots (T, 3), and those of the items to judge now."""
        memory = self._memory()
        slots = np.zeros(triplets.shape[:2], np.int64)
        for row, triplet in zip(slots, triplets, strict=True):
            for column, vector in enumerate(triplet):
                size = memory.size
                slot, is_new = memory.take(vector, digest(vector))
                row[column] = slot
                if is_new:
                    self.turnover_ += memory.size == size
                    # The evicted item's verdict still counts.
                    self.let_go_ += self.verdicts_[slot], self.verdicts_[slot] ** 2
                    self.verdicts_[slot] = 0.0
                    self.judged_[slot] = -1
            memory.learn(*row.tolist())
        anchors_and_positives = slots[:, :2].ravel().tolist()
        items = np.array(list(dict.fromkeys(anchors_and_positives)))
        # An item is judged again once the stream is twice as long as at its last judgement.
        return slots, items[2 * self.judged_[items] <= self.learned_]

    def _distances(
        self, items: Floats, codes: Floats, anchors: Ints, fold: int
    ) -> Iterator[Floats]:
        """Yield scores (A, M) that order items by distance to anchors, Euclidean distance first.

        `items` (M, F) are centred, and `codes` (M, w) are their coordinates along `basis_`. The
        experts are those trained without the pairs of `fold`, the anchors' fold.
        """
        squares = (items**2).sum(axis=1)
        products = items[anchors] @ items.T
        yield squares - 2 * products
        codes = codes @ self.directions_[fold]
        outside = np.maximum(squares - (codes**2).sum(axis=1), 0.0)
        products -= codes[anchors] @ codes.T
        for expert, scale in zip(EXPERTS, self.scales_[fold].T, strict=True):
            lengths = codes**2 @ scale + outside
            inner = (codes[anchors] * scale) @ codes.T + products
            if expert.angle:
                norms = np.sqrt(lengths)
                yield -_cosine(inner, norms[anchors][:, None], norms)
            else:
                yield lengths - 2 * inner

    def _judge_neighbours(self, slots: Ints) -> None:
        """Set `verdicts_` of the items at `slots`: the experts' votes minus Euclidean votes."""
        memory = self._memory()
        if memory.size <= VOTERS[-1]:
            return
        held = self.held_[: memory.size]
        codes = held @ self.basis_.T
        if self.turnover_:
            share = NEAR_TURNED_OVER
        else:
            share = NEAR
        for fold in range(FOLDS):
            in_fold = slots[self.keys_[slots, 0] % FOLDS == fold]
            euclidean, *experts = [
                memory.votes(in_fold, distances, share)
                for distances in self._distances(held, codes, in_fold, fold)
            ]
            self.verdicts_[in_fold] = (np.array(experts) - euclidean).T
        self.judged_[slots] = self.learned_

    def _judge_triplets(
        self, triplets: Floats, codes: Floats, folds: NDArray[np.unsignedinteger[Any]]
    ) -> None:
        """Update `triplets_lead_` with triplets (T, 3, F), whose anchors are in `folds` (T,)."""
        for fold in range(FOLDS):
            in_fold = folds == fold
            rows = np.arange(in_fold.sum())
            # rows 3t, 3t + 1 and 3t + 2 are the anchor, positive and negative of triplet t
            items = triplets[in_fold].reshape(-1, triplets.shape[2])
            along = codes[in_fold].reshape(-1, codes.shape[2])
            euclidean, *experts = [
                _wrong(distances[rows, 3 * rows + 1], distances[rows, 3 * rows + 2]).sum()
                for distances in self._distances(items, along, 3 * rows, fold)
            ]
            self.triplets_lead_ += euclidean - np.array(experts)

    def _decide(self) -> None:
        """Serve the best expert that passes both tests, or Euclidean distance, and set the map."""
        self.lead_ = self.let_go_[0] + self.verdicts_.sum(axis=0)
        self.differing_ = self.let_go_[1] + (self.verdicts_**2).sum(axis=0)
        proven = (self.lead_ > self._bound()) & (self.triplets_lead_ > 0)
        self.left_ = bool(proven.any())
        self.alpha_ = np.eye(len(EXPERTS) + 1)[0]
        self.components_ = np.eye(self.basis_.shape[1])
        if self.left_:
            served = int(np.where(proven, self.lead_, -np.inf).argmax())
            self.alpha_ = np.eye(len(EXPERTS) + 1)[served + 1]
            rotated = self.directions_[-1].T @ self.basis_
            scale = np.sqrt(self.scales_[-1, :, served])
            self.components_ += rotated.T @ ((scale - 1)[:, None] * rotated)
        self._record(self.alpha_, self.learned_)

    def _bound(self) -> Floats:
        """Return the one-sided normal-mixture bound (N,) that each expert's lead must exceed."""
        n = self.differing_ + MIXTURE
        odds = len(EXPERTS) / (2 * self.doubt)
        bound: Floats = np.sqrt(2 * n * np.log1p(odds * np.sqrt(n / MIXTURE)))
        return bound

    def _memory(self) -> Memory:
        """Return the memory as a view that shares its arrays with the fitted attributes."""
        view = getattr(self, "_view", None)
        if view is None or view.vectors is not self.held_:
            view = Memory(self.held_, self.keys_, self.group_, self.parted_, self.used_)
            self._view = view
        return view

    @property
    def _unit(self) -> bool:
        """Return whether the served metric is an angle."""
        return self.left_ and EXPERTS[int(self.alpha_.argmax()) - 1].angle

    def transform(self, X: ArrayLike) -> Floats:
        """Return embeddings (N, F), whose Euclidean distances are the learned distances."""
        embeddings = super().transform(X)
        if self._unit:
            return unit(embeddings)
        return embeddings

    def get_mahalanobis_matrix(self) -> Floats:
        """Return M (F, F) of the distance √((x − y)ᵀ M (x − y)) between items x and y.

        Raises:
            NotFittedError: nothing has been learned.
            ValueError: the served metric is an angle, which has no Mahalanobis matrix.
        """
        matrix = super().get_mahalanobis_matrix()
        if self._unit:
            raise ValueError(
                "Warm now compares items by an angle, which has no Mahalanobis matrix. Use"
                " pair_distance or get_metric."
            )
        return matrix

    def get_metric(self) -> Callable[..., float]:
        """Return a function that computes the learned distance of two feature vectors (F,)."""
        if getattr(self, "left_", False):
            return MetricLearner.get_metric(self)
        return super().get_metric()

    def to_model_parts(self) -> tuple[nn.Module, None]:
        """Return the float32 head that computes `transform`; its distances are Euclidean."""
        head, _ = super().to_model_parts()
        if self._unit:
            from torch import nn

            from retrieval_oahu.combiners import UnitLength

            head = nn.Sequential(head, UnitLength())
        return head, None

    def _gather(self, triplet: Floats) -> None:
        """Add a triplet to the sums; after `SETTLE` triplets, set mean and directions."""
        self.sum_ = self.sum_ + triplet.sum(axis=0)
        self.products_ += triplet.T @ triplet
        self.gathered_ += 1
        if self.gathered_ == SETTLE:
            vectors = 3 * SETTLE
            mean = self.sum_ / vectors
            covariance = self.products_ / vectors - np.outer(mean, mean)
            self._settle(mean, covariance)


def _wrong(positive: Any, negative: Any) -> Any:
    """Return 1 where a positive's distance exceeds the negative's, ½ if equal, and 0 elsewhere."""
    return (positive > negative) + 0.5 * (positive == negative)


def _cosine(products: Floats, lengths: Floats, other_lengths: Floats) -> Floats:
    """Return products divided by both lengths, and 0 where a length is 0."""
    scale = lengths * other_lengths
    zeros = np.zeros(np.broadcast(products, scale).shape)
    return np.divide(products, scale, out=zeros, where=scale > 0)


def _signed(directions: Floats) -> Floats:
    """Flip directions (w, F) so that the largest component of each, by magnitude, is positive."""
    largest = np.abs(directions).argmax(axis=1)
    is_negative = directions[np.arange(len(directions)), largest] < 0
    signs = np.where(is_negative, -1.0, 1.0)
    return directions * signs[:, None]
