"""`Warm`: exactly Euclid until the stream has shown that a learned geometry has better neighbours,
and that one from then on.
"""

from __future__ import annotations

from collections.abc import Callable
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

A long one evens out features of very different scales.
"""
BLOCK = 64
"""Triplets that are judged and then learned at a time; at the very start 1, 1, 2, 4, … of them."""
REFRESH = 512
"""Triplets between two decompositions of the moment, after the first thousand; before that, each
block has its own.
"""
SETTLE = 500
"""Without `prepare` or `fit`, mean and principal components are taken from this many triplets;
until then the map is the identity.
"""
MIXTURE = 10.0
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
        self.proven_ = np.zeros(number, bool)
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
        self.moment_ = np.zeros((width, width))
        self._decompose()

    def _decompose(self) -> None:
        """Find the moment's directions, and each expert's scale along them."""
        values, self.directions_ = np.linalg.eigh(self.moment_)
        # the mean is over all features, of which the moment knows the larger part
        mean = float(np.trace(self.moment_)) / self.basis_.shape[1] or 1.0
        known = self.learned_ / (self.learned_ + self.prior)
        values = np.maximum(values, 0.0) / mean * known / self.ridge
        self.scales_ = 1 / (1 + values[:, None] / [expert.reach for expert in EXPERTS])

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
        codes = triplets @ self.basis_.T
        self._judge_triplets(triplets, codes @ self.directions_)
        self._judge_neighbours(self._remember(triplets))
        apart = codes[:, 0] - codes[:, 1]
        self.moment_ += apart.T @ apart
        self.learned_ += len(triplets)
        if self.learned_ <= 1024 or self.learned_ % REFRESH == 0:
            self._decompose()
        self._decide()

    def _remember(self, triplets: Floats) -> NDArray[np.int64]:
        """Take triplets into the memory; return the places of anchors and positives that have not
        been judged for a while.
        """
        memory, due = self._memory(), dict[int, None]()
        for triplet in triplets:
            places = []
            for vector in triplet:
                size = memory.size
                place, new = memory.take(vector, digest(vector))
                if new:
                    self.turnover_ += memory.size == size
                    self.let_go_ += self.verdicts_[place], self.verdicts_[place] ** 2
                    self.verdicts_[place], self.judged_[place] = 0.0, -1
                places.append(place)
            memory.learn(*places)
            due.update(dict.fromkeys(places[:2]))
        # an item is judged again when the stream is twice as long as it was then
        return np.array(
            [place for place in due if 2 * self.judged_[place] <= self.learned_], dtype=np.int64
        )

    def _judge_neighbours(self, places: NDArray[np.int64]) -> None:
        """Let the neighbours of items (A,) in the memory vote, by Euclid and by each expert."""
        memory = self._memory()
        if memory.size <= VOTERS[-1] or not len(places):
            return
        held = self.held_[: memory.size]
        codes = held @ self.basis_.T @ self.directions_
        squares, products = (held**2).sum(axis=1), held[places] @ held.T
        outside = np.maximum(squares - (codes**2).sum(axis=1), 0.0)
        products_outside = products - codes[places] @ codes.T
        share = NEAR_TURNED_OVER if self.turnover_ else NEAR
        euclid = memory.votes(places, squares - 2 * products, share)
        for number, expert in enumerate(EXPERTS):
            scale = self.scales_[:, number]
            lengths = codes**2 @ scale + outside
            near = (codes[places] * scale) @ codes.T + products_outside
            if expert.angle:
                norms = np.sqrt(lengths)
                distances = -_cosine(near, norms[places][:, None], norms)
            else:
                distances = lengths - 2 * near
            self.verdicts_[places, number] = memory.votes(places, distances, share) - euclid
        self.judged_[places] = self.learned_

    def _judge_triplets(self, triplets: Floats, codes: Floats) -> None:
        """Count which triplets (T, 3, F) each expert has right and Euclid wrong, and the other way
        round.
        """
        squares = ((triplets[:, :1] - triplets[:, 1:]) ** 2).sum(axis=2)
        euclid = _wrong(squares[:, 0], squares[:, 1])
        outside = triplets @ triplets.transpose(0, 2, 1) - codes @ codes.transpose(0, 2, 1)
        for number, expert in enumerate(EXPERTS):
            products = (codes * self.scales_[:, number]) @ codes.transpose(0, 2, 1) + outside
            lengths = np.maximum(products.diagonal(axis1=1, axis2=2), 0.0)
            near = products[:, 0, 1:]
            if expert.angle:
                norms = np.sqrt(lengths)
                distances = -_cosine(near, norms[:, :1], norms[:, 1:])
            else:
                distances = lengths[:, 1:] - 2 * near
            self.triplets_lead_[number] += (euclid - _wrong(distances[:, 0], distances[:, 1])).sum()

    def _decide(self) -> None:
        """Say which expert is served, if any, and set the map."""
        self.lead_ = self.let_go_[0] + self.verdicts_.sum(axis=0)
        self.differing_ = self.let_go_[1] + (self.verdicts_**2).sum(axis=0)
        self.proven_ |= self.lead_ > self._bound()
        self.proven_ &= (self.lead_ > 0) & (self.triplets_lead_ > 0)
        self.left_ = bool(self.proven_.any())
        served = int(np.where(self.proven_, self.lead_, -np.inf).argmax()) if self.left_ else -1
        self.alpha_ = np.eye(len(EXPERTS) + 1)[served + 1]
        features = self.basis_.shape[1]
        self.components_ = np.eye(features)
        if self.left_:
            turned = self.directions_.T @ self.basis_
            self.components_ += turned.T @ (
                (np.sqrt(self.scales_[:, served]) - 1)[:, None] * turned
            )
        self.weights_, self.weights_at_, self.stride_ = recorded(
            self.weights_, self.weights_at_, self.stride_, self.alpha_, self.learned_
        )

    def _bound(self) -> Floats:
        """Return what each lead must exceed: Robbins' boundary of a normal mixture, for signs."""
        n = self.differing_ + MIXTURE
        found: Floats = np.sqrt(n * (np.log(n / MIXTURE) + 2 * np.log(len(EXPERTS) / self.doubt)))
        return found

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

            from retrieval_oahu.combiners import UnitLength

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
