"""`Warm`: exactly Euclid until the stream has shown that a learned geometry has better neighbours,
and that one from then on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from pydantic import Field
from retrieval import LinearMap
from retrieval.model.metric_learner import MetricLearner

from retrieval_oahu.history import recorded
from retrieval_oahu.limits import refuse_range
from retrieval_oahu.memory import NEAR, NEAR_TURNED_OVER, VOTERS, Memory, digest
from retrieval_oahu.network import unit
from retrieval_oahu.online import OnlineLearner

if TYPE_CHECKING:
    from torch import nn

Floats = NDArray[np.floating[Any]]


class Expert(NamedTuple):
    """A metric (I + A / (ridge · `reach`))⁻¹: of differences, or of unit vectors (the angle)."""

    reach: float
    angle: bool


EXPERTS = (Expert(1.0, False), Expert(1e-3, False), Expert(1.0, True), Expert(1e-2, True))
"""Short and long reach, with lengths and without them.

A long one evens out features of very different scales.
"""
BLOCK = 64
"""Triplets that are judged and then learned at a time; at the very start 1, 1, 2, 4, … of them."""
FOLDS = 4
"""Parts of the items, by their digests. What is judged of an item, is judged by experts that have
learned no pair with any item of its part.
"""
REFRESH = 512
"""Triplets between two decompositions of the moment, after the first thousand; before that, each
block has its own.
"""
SETTLE = 500
"""Without `prepare` or `fit`, mean and principal components are taken from this many triplets;
until then the map is the identity.
"""
MIXTURE = 5.0
"""Around which n the bound of `_bound` is tightest; it holds at any number."""


class Warm(LinearMap, OnlineLearner):
    """A warm start: Euclid before the first triplet, and until the neighbours of the stream's own
    items have refuted it.

    Let A be the second moment of the differences between similar items, divided by its mean
    eigenvalue. Each expert of `EXPERTS` measures with (I + A / r)⁻¹, the regularised Mahalanobis
    distance of differences within classes; directions in which similar items do not differ stay as
    they are. An expert is served in Euclid's place when two judges agree, each asked before the
    triplets are learned:

    - *neighbours*: a memory holds the latest items, and what the triplets say of them: who is
      alike, who is not. An item's nearest of which that is known, among the nearest hundredth of
      the memory (the nearest twentieth once items have been let go), vote whether it is what it is,
      once 1 of them, once 3, 5, 7 and 9. Each item counts once, with the mean of its latest votes.
      Let d be the expert's verdict less Euclid's, S their sum and n the sum of their squares;
      needed is S > √((n + r) (ln((n + r) / r) + 2 ln(1 / p))), which luck alone exceeds with
      probability at most p at whatever time it is looked at (Robbins, "Statistical methods related
      to the law of the iterated logarithm", 1970; r = 10; p is `doubt` over the number of experts),
      where items are independent;
    - *triplets*: the expert has put the negative nearer than the positive less often than Euclid
      has.

    Random triplets alone say little of neighbours: they order classes. Of several such experts the
    one with the largest S is served; when its lead with either judge is gone, Euclid returns. So
    the model is one linear map, and after some experts a scaling to unit length.

    Args:
        components: along how many principal components A is known; features stay as they are along
            the others. None, or as many as there are features or more: all.
        prior: for how many similar pairs the start counts: after t pairs A is multiplied with t /
            (t + prior).
        ridge: r is the expert's `reach` times this; the smaller, the further the experts reach.
        doubt: see above.
        memory: how many items are held.
        seeds: how many random triplets `fit` draws.
        closure: how many triplets that follow from those it adds.
        seed: seed of `fit`'s triplets; 0 by default.
        random_state: scikit-learn's name of `seed`; give one of them, or both the same number.

    Attributes:
        components_: (F, F) the learned map.
        mean_: (F,) what is subtracted from features first.
        left_: whether Euclid has been left.
        alpha_: (N + 1,) what is served, as a 1 among zeros: Euclid, or one of `EXPERTS`.
        weights_: (M, N + 1) the same along the stream; M is bounded.
        weights_at_: (M,) after how many triplets each row was taken.
        lead_: (N,) S.
        differing_: (N,) n: how many items only one of the two has right, where all their votes
            agree.
        triplets_lead_: (N,) by how many triplets each expert leads; ties count half.
    """

    alpha_: NDArray[np.float64]
    weights_: Floats
    weights_at_: NDArray[np.int64]
    basis_: Floats
    left_: bool

    def __init__(
        self,
        components: Annotated[int, Field(ge=1)] | None = 256,
        prior: Annotated[float, Field(gt=0)] = 20.0,
        ridge: Annotated[float, Field(gt=0)] = 1.0,
        doubt: Annotated[float, Field(gt=0, lt=1)] = 0.05,
        memory: Annotated[int, Field(ge=256)] = 2000,
        seeds: Annotated[int, Field(ge=0)] = 5000,
        closure: Annotated[int, Field(ge=0)] = 5000,
        seed: int | None = None,
        random_state: int | None = None,
    ) -> None:
        self.components = components
        self.prior = prior
        self.ridge = ridge
        self.doubt = doubt
        self.memory = memory
        self.seeds = seeds
        self.closure = closure
        self.seed = seed
        self.random_state = random_state

    def _begin(self, features: int, sample: Floats | None) -> None:
        for name, least in (("components", 1), ("memory", 256)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"{name} is {value} and must be at least {least}.")
        for name in ("prior", "ridge"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)} and must be above 0.")
        refuse_range("doubt", self.doubt, 0, 1)
        number, places = len(EXPERTS), self.memory
        self.learned_ = self.gathered_ = self.turnover_ = 0
        self.left_ = False
        self.alpha_ = np.eye(number + 1)[0]
        self.weights_, self.weights_at_, self.stride_ = (
            self.alpha_[None].copy(),
            np.zeros(1, np.int64),
            1,
        )
        self.lead_, self.differing_, self.triplets_lead_ = np.zeros((3, number))
        self.waiting_ = np.zeros((0, 3, features))
        self.held_ = np.zeros((places, features))
        self.keys_ = np.zeros((places, 2), np.uint64)
        self.group_ = np.arange(places)
        self.parted_ = np.zeros((places, places), bool)
        self.used_ = np.zeros(places, np.int64)
        # what each held item's latest votes were, less Euclid's, when they were, and the sums over
        # those let go
        self.verdicts_, self.judged_ = np.zeros((places, number)), np.zeros(places, np.int64)
        self.let_go_ = np.zeros((2, number))
        self._known: Memory | None = None
        self.components_ = np.eye(features)
        # what mean and principal components are made of when no sample gave them: sums over the
        # first vectors
        self.sum_, self.products_ = np.zeros(features), np.zeros((features, features))
        self.basis_ = np.zeros((0, features))
        self.mean_ = np.zeros(features)
        if sample is not None:
            centred = sample - sample.mean(axis=0)
            self._settle(sample.mean(axis=0), centred.T @ centred)

    def _settle(self, mean: Floats, covariance: Floats) -> None:
        """Set what angles are measured about and the directions along which A is known."""
        features = len(mean)
        self.mean_ = mean
        width = features if self.components is None else min(self.components, features)
        self.basis_ = (
            np.eye(features)
            if width == features
            else _signed(np.ascontiguousarray(np.linalg.eigh(covariance)[1][:, ::-1][:, :width].T))
        )
        self.sum_, self.products_ = np.zeros(0), np.zeros((0, 0))
        self.moment_, self.pairs_ = np.zeros((FOLDS + 1, width, width)), np.zeros(FOLDS + 1)
        self._decompose()

    def _decompose(self) -> None:
        """Find the directions of each moment, and each expert's scale along them."""
        values, self.directions_ = np.linalg.eigh(self.moment_)
        # the mean is over all features, of which the moment knows the larger part
        means = np.trace(self.moment_, axis1=1, axis2=2) / self.basis_.shape[1]
        known = self.pairs_ / (self.pairs_ + self.prior) / self.ridge
        values = np.maximum(values, 0.0) * (known / np.where(means > 0, means, 1.0))[:, None]
        self.scales_ = 1 / (1 + values[..., None] / [expert.reach for expert in EXPERTS])

    def _learn(self, triplets: Floats) -> int:
        for triplet in triplets:
            if not len(self.basis_):
                self._gather(triplet)
                continue
            self.waiting_ = np.concatenate([self.waiting_, triplet[None]])
            if len(self.waiting_) == min(max(self.learned_, 1), BLOCK):
                self._block(self.waiting_ - self.mean_)
                self.waiting_ = self.waiting_[:0]
        return len(triplets)  # each enters the memory

    def _block(self, triplets: Floats) -> None:
        """Judge some centred triplets, learn them, and decide what is served."""
        places, due = self._remember(triplets)
        folds, codes = self.keys_[places, 0] % FOLDS, triplets @ self.basis_.T
        self._judge_triplets(triplets, codes, folds[:, 0])
        self._judge_neighbours(due)
        differences = codes[:, 0] - codes[:, 1]
        for fold in range(FOLDS + 1):  # the last has all pairs
            pairs = differences[(folds[:, :2] != fold).all(axis=1)]
            self.moment_[fold] += pairs.T @ pairs
            self.pairs_[fold] += len(pairs)
        self.learned_ += len(triplets)
        if self.learned_ <= 1024 or self.learned_ % REFRESH == 0:
            self._decompose()
        self._decide()

    def _remember(self, triplets: Floats) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Take triplets into the memory; return their places (T, 3), and those of anchors and
        positives that have not been judged for a while.
        """
        memory, places = self._memory(), np.zeros(triplets.shape[:2], np.int64)
        for row, triplet in zip(places, triplets, strict=True):
            for column, vector in enumerate(triplet):
                size = memory.size
                row[column], new = memory.take(vector, digest(vector))
                if new:
                    place = row[column]
                    self.turnover_ += memory.size == size
                    self.let_go_ += self.verdicts_[place], self.verdicts_[place] ** 2
                    self.verdicts_[place], self.judged_[place] = 0.0, -1
            memory.learn(*row.tolist())
        seen = np.array(list(dict.fromkeys(places[:, :2].ravel().tolist())))
        # an item is judged again when the stream is twice as long as it was then
        return places, seen[2 * self.judged_[seen] <= self.learned_]

    def _distances(
        self, items: Floats, codes: Floats, anchors: NDArray[np.int64], fold: int
    ) -> Iterator[Floats]:
        """Yield the distances (A, M) from some items to all (up to a monotone function): Euclid's,
        then each expert's as the pairs outside a fold have taught it.

        Args:
            items: (M, F) centred vectors.
            codes: (M, w) their components along `basis_`.
            anchors: (A,) numbers of items, all of the fold.
            fold: below `FOLDS`.
        """
        squares, products = (items**2).sum(axis=1), items[anchors] @ items.T
        yield squares - 2 * products
        codes = codes @ self.directions_[fold]
        outside = np.maximum(squares - (codes**2).sum(axis=1), 0.0)
        products -= codes[anchors] @ codes.T
        for expert, scale in zip(EXPERTS, self.scales_[fold].T, strict=True):
            lengths = codes**2 @ scale + outside
            near = (codes[anchors] * scale) @ codes.T + products
            if expert.angle:
                norms = np.sqrt(lengths)
                yield -_cosine(near, norms[anchors][:, None], norms)
            else:
                yield lengths - 2 * near

    def _judge_neighbours(self, places: NDArray[np.int64]) -> None:
        """Let the neighbours of items (A,) in the memory vote, by Euclid and by each expert."""
        memory = self._memory()
        if memory.size <= VOTERS[-1]:
            return
        held = self.held_[: memory.size]
        codes = held @ self.basis_.T
        share = NEAR_TURNED_OVER if self.turnover_ else NEAR
        for fold in range(FOLDS):
            own = places[self.keys_[places, 0] % FOLDS == fold]
            votes = [
                memory.votes(own, distances, share)
                for distances in self._distances(held, codes, own, fold)
            ]
            self.verdicts_[own] = (np.array(votes[1:]) - votes[0]).T
        self.judged_[places] = self.learned_

    def _judge_triplets(
        self, triplets: Floats, codes: Floats, folds: NDArray[np.unsignedinteger[Any]]
    ) -> None:
        """Count which triplets (T, 3, F) each expert has right and Euclid wrong, less the other
        way round; `folds` are their anchors'.
        """
        for fold in range(FOLDS):
            own = folds == fold
            rows = np.arange(own.sum())
            items, along = (part[own].reshape(-1, part.shape[2]) for part in (triplets, codes))
            euclid, *experts = (
                _wrong(distances[rows, 3 * rows + 1], distances[rows, 3 * rows + 2]).sum()
                for distances in self._distances(items, along, 3 * rows, fold)
            )
            self.triplets_lead_ += euclid - np.array(experts)

    def _decide(self) -> None:
        """Say which expert is served, if any, and set the map."""
        self.lead_ = self.let_go_[0] + self.verdicts_.sum(axis=0)
        self.differing_ = self.let_go_[1] + (self.verdicts_**2).sum(axis=0)
        proven = (self.lead_ > self._bound()) & (self.triplets_lead_ > 0)
        self.left_ = bool(proven.any())
        served = int(np.where(proven, self.lead_, -np.inf).argmax()) if self.left_ else -1
        self.alpha_ = np.eye(len(EXPERTS) + 1)[served + 1]
        features = self.basis_.shape[1]
        self.components_ = np.eye(features)
        if self.left_:
            turned = self.directions_[-1].T @ self.basis_
            scale = np.sqrt(self.scales_[-1, :, served])
            self.components_ += turned.T @ ((scale - 1)[:, None] * turned)
        self.weights_, self.weights_at_, self.stride_ = recorded(
            self.weights_, self.weights_at_, self.stride_, self.alpha_, self.learned_
        )

    def _bound(self) -> Floats:
        """Return what each lead must exceed: the one-sided boundary of a normal mixture."""
        n = self.differing_ + MIXTURE
        odds = len(EXPERTS) / (2 * self.doubt)
        bound: Floats = np.sqrt(2 * n * np.log1p(odds * np.sqrt(n / MIXTURE)))
        return bound

    def _memory(self) -> Memory:
        """Return the working view, whose arrays *are* the fitted ones."""
        known = getattr(self, "_known", None)
        if known is None or known.vectors is not self.held_:
            known = self._known = Memory(
                self.held_, self.keys_, self.group_, self.parted_, self.used_
            )
        return known

    def __getstate__(self) -> dict[str, Any]:
        # a copy makes a view of its own arrays
        state: dict[str, Any] = {**super().__getstate__()}
        state.pop("_known", None)
        return state

    @property
    def _unit(self) -> bool:
        """Whether what is served is an angle."""
        return self.left_ and EXPERTS[int(self.alpha_.argmax()) - 1].angle

    def transform(self, X: ArrayLike) -> Floats:
        """Return codes (N, F) of features (N, F), whose Euclidean distances are the learned ones."""
        codes = super().transform(X)
        return unit(codes) if self._unit else codes

    def get_mahalanobis_matrix(self) -> Floats:
        """Return M (F, F): the distance of two items x and y is √((x − y)ᵀ M (x − y)).

        Raises:
            NotFittedError: nothing has been learned.
            ValueError: what is served now is an angle, which no matrix of differences gives.
        """
        found = super().get_mahalanobis_matrix()
        if self._unit:
            raise ValueError(
                "Warm compares items by an angle now, and no Mahalanobis matrix gives that. Use"
                " pair_distance or get_metric."
            )
        return found

    def get_metric(self) -> Callable[..., float]:
        """Return a function of two feature vectors (F,) that gives their learned distance; see
        `MetricLearner.get_metric`.
        """
        return (
            MetricLearner.get_metric(self)
            if getattr(self, "left_", False)
            else super().get_metric()
        )

    def to_model_parts(self) -> tuple[nn.Module, None]:
        """Return the head, float32, with the numbers of `transform`; distances are Euclidean."""
        head, _ = super().to_model_parts()
        if self._unit:
            from torch import nn

            from retrieval_oahu.bilinear import UnitLength

            head = nn.Sequential(head, UnitLength())
        return head, None

    def _gather(self, triplet: Floats) -> None:
        """Take three vectors into mean and covariance, and settle once there are enough."""
        self.sum_ = self.sum_ + triplet.sum(axis=0)
        self.products_ += triplet.T @ triplet
        self.gathered_ += 1
        if self.gathered_ == SETTLE:
            mean = self.sum_ / (3 * SETTLE)
            self._settle(mean, self.products_ / (3 * SETTLE) - np.outer(mean, mean))


def _wrong(near: Any, far: Any) -> Any:
    """Return 1 where what should be nearer is farther, ½ where both are equal."""
    return (near > far) + 0.5 * (near == far)


def _cosine(products: Floats, one: Floats, other: Floats) -> Floats:
    """Return products over lengths; 0 where a length is 0."""
    lengths = one * other
    return np.divide(
        products, lengths, out=np.zeros(np.broadcast(products, lengths).shape), where=lengths > 0
    )


def _signed(directions: Floats) -> Floats:
    largest = np.abs(directions).argmax(axis=1)
    signs = np.where(directions[np.arange(len(directions)), largest] < 0, -1.0, 1.0)
    return directions * signs[:, None]
