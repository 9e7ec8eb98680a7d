"""`Warm`: exactly Euclid while the stream has not proved that a learned geometry has better
neighbours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from pydantic import Field
from retrieval.plugin import LinearMap, MetricLearner

from retrieval_oahu.memory import NEAR, NEAR_TURNED_OVER, VOTERS, Memory, digest
from retrieval_oahu.network import unit
from retrieval_oahu.online import OnlineLearner, recorded, refuse_range

if TYPE_CHECKING:
    from torch import nn

Floats = NDArray[np.floating[Any]]


class Expert(NamedTuple):
    """A metric (I + A / (ridge · `reach`))⁻¹: of differences, or of unit vectors (the angle)."""

    reach: float
    angle: bool


EXPERTS = (Expert(1.0, False), Expert(1e-3, False), Expert(1.0, True), Expert(1e-2, True))
"""Short and long reach, with lengths and without them.

A long reach evens out features of very different scales.
"""
BLOCK = 64
"""Triplets that are judged together and then learned; the first blocks have 1, 1, 2, 4, …."""
FOLDS = 4
"""Parts of the items, by their digests. The experts that judge an item have learned no pair with an
item of its fold: votes of items that taught the experts would favour them, above all in the first
triplets of a closure, which reuse few items.
"""
REFRESH = 512
"""Triplets between two decompositions of the moments, after the first thousand; before that, each
block has its own.
"""
SETTLE = 500
"""Triplets that give mean and principal components without `prepare` or `fit`; until then the map
is the identity.
"""
MIXTURE = 5.0
"""The n around which the bound of `_bound` is tightest; it holds at any n."""


class Warm(LinearMap, OnlineLearner):
    """A warm start: Euclid before the first triplet, and whenever no expert is proven better.

    Let A be the second moment of the differences between similar items, divided by its mean
    eigenvalue. Each expert of `EXPERTS` measures with (I + A / r)⁻¹, the regularised Mahalanobis
    distance of differences within classes; directions in which similar items do not differ stay as
    they are. An expert is served in Euclid's place while two judges agree. Both ask it before it
    learns a block, and about an item only as the pairs outside the item's fold have taught it
    (cross-fitting), so no expert is credited with pairs that it knows by heart:

    - *neighbours*: a memory holds the latest items and what the triplets say of them: who is alike,
      who is not. Among the nearest hundredth of the memory (the nearest twentieth once items have
      been let go), those of which that is known vote whether the item is what it is: 1, 3, 5, 7 and
      9 of them in turn. Each item counts once, with the mean of its latest votes. Let d be the
      expert's verdict less Euclid's, S the sum of d over the items, n the sum of d². Needed is
      S > √(2 (n + r) ln(1 + √((n + r) / r) / 2p)), with r = 5 and p = `doubt` over the number of
      experts. Luck alone ever exceeds this with probability at most p (the one-sided normal mixture
      of Robbins, "Statistical methods related to the law of the iterated logarithm", 1970, in the
      closed form of Howard, Ramdas, McAuliffe & Sekhon, "Time-uniform, nonparametric, nonasymptotic
      confidence sequences", 2021) if the d are independent and symmetric about 0;
    - *triplets*: the expert has put the negative nearer than the positive less often than Euclid
      has.

    Random triplets alone say little of neighbours: they order classes. Of several proven experts
    the one with the largest S is served. The proof is looked at after every block: an expert whose
    lead sinks to the bound is not served any more, and may come back. So the model is one linear
    map, and after some experts a scaling to unit length.

    Args:
        components: along how many principal components A is known; features stay as they are along
            the others. None, or as many as there are features or more: all.
        prior: number of similar pairs that the start counts for: after t pairs A is multiplied by
            t / (t + prior).
        ridge: r of the metric is the expert's `reach` times this; the smaller, the further the
            experts reach.
        doubt: probability of ever leaving Euclid by luck; see above.
        memory: number of items in the memory.
        seeds: number of random triplets that `fit` draws.
        closure: number of triplets that follow from those, which `fit` adds.
        seed: seed of `fit`'s triplets; 0 by default.
        random_state: scikit-learn's name of `seed`; give one of them, or both the same number.

    Attributes:
        components_: (F, F) the learned map.
        mean_: (F,) vector that is subtracted from features first.
        left_: whether an expert is served now.
        alpha_: (N + 1,) 1 for the metric that is served, Euclid or one of `EXPERTS`; 0 for others.
        weights_: (M, N + 1) `alpha_` along the stream; M is bounded.
        weights_at_: (M,) number of triplets after which each row was taken.
        lead_: (N,) S of each expert.
        differing_: (N,) n of each expert.
        triplets_lead_: (N,) number of triplets by which each expert leads; ties count half.
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
        # each item's latest verdicts less Euclid's, when they were given, and the sums (of d and
        # d²) over the items that the memory has let go
        self.verdicts_, self.judged_ = np.zeros((places, number)), np.zeros(places, np.int64)
        self.let_go_ = np.zeros((2, number))
        self._view: Memory | None = None
        self.components_ = np.eye(features)
        # sums over the first vectors, for mean and principal components when no sample gave them
        self.sum_, self.products_ = np.zeros(features), np.zeros((features, features))
        self.basis_ = np.zeros((0, features))
        self.mean_ = np.zeros(features)
        if sample is not None:
            centred = sample - sample.mean(axis=0)
            self._settle(sample.mean(axis=0), centred.T @ centred)

    def _settle(self, mean: Floats, covariance: Floats) -> None:
        """Set the centre of all angles and the directions along which A is known."""
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
        return len(triplets)  # every triplet enters the memory

    def _block(self, triplets: Floats) -> None:
        """Judge some centred triplets, learn them, and decide what is served."""
        places, due = self._remember(triplets)
        folds, codes = self.keys_[places, 0] % FOLDS, triplets @ self.basis_.T
        self._judge_triplets(triplets, codes, folds[:, 0])
        self._judge_neighbours(due)
        differences = codes[:, 0] - codes[:, 1]
        for fold in range(FOLDS + 1):  # the last moment has all pairs and is the served one
            pairs = differences[(folds[:, :2] != fold).all(axis=1)]
            self.moment_[fold] += pairs.T @ pairs
            self.pairs_[fold] += len(pairs)
        self.learned_ += len(triplets)
        if self.learned_ <= 1024 or self.learned_ % REFRESH == 0:
            self._decompose()
        self._decide()

    def _remember(self, triplets: Floats) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Take triplets into the memory; return their places (T, 3), and the places of anchors and
        positives that are due to be judged.
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
        """Yield what orders all items (M, F) around each anchor (A, M): Euclid's distances, then
        those of each expert as the pairs outside the anchors' fold have taught it.

        `codes` (M, w) are the items along `basis_`, `anchors` (A,) are rows of `items`.
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
        """Let the neighbours of the items at some places vote, by Euclid and by each expert."""
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
        """Add the number of triplets (T, 3, F) that each expert has right and Euclid wrong, less
        the reverse; `folds` (T,) are the anchors'.
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
        """Choose the expert that is served, if any is proven now, and set the map."""
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
        view = getattr(self, "_view", None)
        if view is None or view.vectors is not self.held_:
            view = self._view = Memory(
                self.held_, self.keys_, self.group_, self.parted_, self.used_
            )
        return view

    def __getstate__(self) -> dict[str, Any]:
        # a copy builds its own view, of its own arrays
        state: dict[str, Any] = {**super().__getstate__()}
        state.pop("_view", None)
        return state

    @property
    def _unit(self) -> bool:
        """Whether the served metric is an angle."""
        return self.left_ and EXPERTS[int(self.alpha_.argmax()) - 1].angle

    def transform(self, X: ArrayLike) -> Floats:
        """Return embeddings (N, F) of features (N, F): Euclidean distances are the learned ones."""
        embeddings = super().transform(X)
        return unit(embeddings) if self._unit else embeddings

    def get_mahalanobis_matrix(self) -> Floats:
        """Return M (F, F): the distance of two items x and y is √((x − y)ᵀ M (x − y)).

        Raises:
            NotFittedError: nothing has been learned.
            ValueError: an angle is served now, which no matrix of differences gives.
        """
        matrix = super().get_mahalanobis_matrix()
        if self._unit:
            raise ValueError(
                "Warm compares items by an angle now, and no Mahalanobis matrix gives that. Use"
                " pair_distance or get_metric."
            )
        return matrix

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

            from retrieval_oahu.combiners import UnitLength

            head = nn.Sequential(head, UnitLength())
        return head, None

    def _gather(self, triplet: Floats) -> None:
        """Add three vectors to mean and covariance, and settle once there are enough."""
        self.sum_ = self.sum_ + triplet.sum(axis=0)
        self.products_ += triplet.T @ triplet
        self.gathered_ += 1
        if self.gathered_ == SETTLE:
            mean = self.sum_ / (3 * SETTLE)
            self._settle(mean, self.products_ / (3 * SETTLE) - np.outer(mean, mean))


def _wrong(near: Any, far: Any) -> Any:
    """Return 1 where the nearer distance should be the farther, ½ where both are equal, else 0."""
    return (near > far) + 0.5 * (near == far)


def _cosine(products: Floats, lengths: Floats, other_lengths: Floats) -> Floats:
    """Return products over both lengths; 0 where a length is 0."""
    scale = lengths * other_lengths
    zeros = np.zeros(np.broadcast(products, scale).shape)
    return np.divide(products, scale, out=zeros, where=scale > 0)


def _signed(directions: Floats) -> Floats:
    """Return each direction (w, F) or its opposite: the largest component is positive."""
    largest = np.abs(directions).argmax(axis=1)
    signs = np.where(directions[np.arange(len(directions)), largest] < 0, -1.0, 1.0)
    return directions * signs[:, None]
