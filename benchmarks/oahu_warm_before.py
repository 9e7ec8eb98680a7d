"""`oahu.warm` as it was before its experts had to show that they have better neighbours: only to be measured beside the present one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from pydantic import Field
from retrieval.model.linear import LinearMap

from retrieval_oahu.history import recorded
from retrieval_oahu.limits import refuse_range
from retrieval_oahu.network import unit
from retrieval_oahu.online import OnlineLearner

if TYPE_CHECKING:
    from torch import nn

Floats = NDArray[np.floating[Any]]

POWERS = (0.0, 0.25, 0.5, 0.75, 1.0)
"""The experts at unit length: how far along the geodesic from the identity to (I + A / ridge)⁻¹ each has gone."""
REFRESH = (64, 512)
"""Triplets between two decompositions of the moment: among the first thousand, and later."""
SETTLE = 500
"""Without `prepare` or `fit`, mean and principal components are taken from this many triplets; until then the map is the identity."""
MIXTURE = 10.0
"""Around how many differing verdicts the bound of `_bound` is tightest; it holds at any number."""


class WarmBefore(LinearMap, OnlineLearner):
    """A warm start: Euclid before the first triplet, and until the triplets have refuted it.

    Let A be the second moment of the differences between similar items, divided by its mean eigenvalue. Expert s measures the angle
    between (centred) features in the metric M_s = (I + A / ridge)^−s, on the geodesic from the identity (s = 0, cosine similarity)
    to the regularised Mahalanobis distance of differences within classes (s = 1); directions in which similar items do not differ stay as they are. Two
    decisions are made from the stream, each triplet judged before it is learned:

    - *which s*: Hedge weighs the experts by how often each put the negative nearer than the positive, e^(−√(8 ln N / t) · errors), which
      needs no learning rate (Cesa-Bianchi & Lugosi, "Prediction, Learning, and Games", 2006, §2.3). The challenger is the map of the average metric Σ w_s M_s.
    - *whether to leave Euclid at all*: among the n triplets of which challenger and Euclid have only one right, let S be the
      challenger's lead. It takes Euclid's place once S > √((n + r) (ln((n + r) / r) + 2 ln(1 / doubt))), which luck alone exceeds with
      probability at most `doubt`, at whatever time it is looked at (Robbins, "Statistical methods related to the law of the iterated
      logarithm", 1970; r = 10), where triplets are independent. Should its lead vanish again, Euclid returns.

    So the model is one linear map, and a scaling to unit length after it unless it is Euclid. The geodesic is that of Zadeh, Hosseini & Sra, "Geometric Mean
    Metric Learning" (ICML 2016), between other ends.

    Args:
        components: along how many principal components A is known; features stay as they are along the others. None, or as many as there
            are features or more: all.
        prior: for how many similar pairs the start counts: after t pairs A is multiplied with t / (t + prior).
        ridge: see above; the smaller, the further the experts reach.
        doubt: see above.
        seeds: how many random triplets `fit` draws.
        closure: how many triplets that follow from those it adds.
        seed: seed of `fit`'s triplets.

    Attributes:
        components_: (F, F) the learned map.
        mean_: (F,) what is subtracted from features first.
        left_: whether Euclid has been left.
        alpha_: (N + 1,) the weights of what is served: Euclid, and the experts of `POWERS`.
        weights_: (M, N + 1) these weights along the stream; M is bounded.
        weights_at_: (M,) after how many triplets each row was taken.
        errors_: (N,) triplets that each expert had wrong; ties count half.
        differing_: n, triplets of which either Euclid or the challenger had one right, and not the other.
        lead_: S.
    """

    alpha_: NDArray[np.float64]
    weights_: Floats
    weights_at_: NDArray[np.int64]
    errors_: Floats
    basis_: Floats
    left_: bool

    def __init__(
        self,
        components: Annotated[int, Field(ge=1)] | None = 256,
        prior: Annotated[float, Field(gt=0)] = 20.0,
        ridge: Annotated[float, Field(gt=0)] = 1.0,
        doubt: Annotated[float, Field(gt=0, lt=1)] = 0.05,
        seeds: Annotated[int, Field(ge=0)] = 5000,
        closure: Annotated[int, Field(ge=0)] = 5000,
        seed: int = 0,
    ) -> None:
        self.components = components
        self.prior = prior
        self.ridge = ridge
        self.doubt = doubt
        self.seeds = seeds
        self.closure = closure
        self.seed = seed

    def _begin(self, features: int, sample: Floats | None) -> None:
        if self.components is not None and self.components < 1:
            raise ValueError(f"components is {self.components} and must be at least 1, or None for all.")
        for name in ("prior", "ridge"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)} and must be above 0.")
        refuse_range("doubt", self.doubt, 0, 1)
        self.errors_ = np.zeros(len(POWERS))
        self.differing_ = self.lead_ = self.learned_ = self.gathered_ = 0
        self.left_ = False
        self.alpha_ = np.eye(len(POWERS) + 1)[0]
        self.weights_, self.weights_at_, self.stride_ = self.alpha_[None].copy(), np.zeros(1, np.int64), 1
        self.components_ = np.eye(features)
        # what mean and principal components are made of when no sample gave them: sums over the first vectors
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
        self.scales_ = (1 + values)[:, None] ** -np.array(POWERS)

    def _hedge(self) -> Floats:
        """Return the experts' weights (N,)."""
        rate = (8 * np.log(len(POWERS)) / max(self.learned_, 1)) ** 0.5
        weights = np.exp(-rate * (self.errors_ - self.errors_.min()))
        found: Floats = weights / weights.sum()
        return found

    def _serve(self) -> None:
        """Set the map and the weights of what is served."""
        features = self.basis_.shape[1]
        if not self.left_:
            self.alpha_, self.components_ = np.eye(len(POWERS) + 1)[0], np.eye(features)
            return
        weights = self._hedge()
        self.alpha_ = np.append(0.0, weights)
        turned = self.directions_.T @ self.basis_
        roots = np.sqrt(self.scales_ @ weights)
        self.components_ = np.eye(features) + turned.T @ ((roots - 1)[:, None] * turned)

    def _learn(self, triplets: Floats) -> int:
        used = 0
        for triplet in triplets:
            if not len(self.basis_):
                used += 1
                self._gather(triplet)
                continue
            weights = self._hedge()
            wrong, challenger = self._judge(triplet, weights)
            self.errors_ += wrong
            apart = triplet[0] - triplet[1:]
            squares = (apart**2).sum(axis=1)
            euclid = _wrong(squares[0], squares[1])
            if challenger != euclid:
                self.differing_ += 1
                self.lead_ += int(np.sign(euclid - challenger))
                self.left_ = self.lead_ > 0 if self.left_ else self.lead_ > self._bound()
            inside = self.basis_ @ apart[0]
            self.moment_ += np.outer(inside, inside)
            self.learned_ += 1
            # every triplet adds to the moment, unless anchor and positive are the same
            used += bool(inside.any() or np.ptp(wrong) > 0 or challenger != euclid)
            often, seldom = REFRESH
            young = self.learned_ < often and not self.learned_ & (self.learned_ - 1)
            if young or self.learned_ % (often if self.learned_ <= 1024 else seldom) == 0:
                self._decompose()
            if not self.learned_ % self.stride_:
                row = np.append(not self.left_, self.left_ * self._hedge())
                self.weights_, self.weights_at_, self.stride_ = recorded(
                    self.weights_, self.weights_at_, self.stride_, row, self.learned_
                )
        if len(self.basis_):
            self._serve()
        return used

    def _bound(self) -> float:
        """Return what the lead must exceed: Robbins' boundary of a normal mixture, for signs."""
        n: float = self.differing_ + MIXTURE
        return float(np.sqrt(n * (np.log(n / MIXTURE) + 2 * np.log(1 / self.doubt))))

    def _judge(self, triplet: Floats, weights: Floats) -> tuple[Floats, float]:
        """Return whether each expert (N,) and their average has a triplet wrong, by its angles."""
        centred = triplet - self.mean_
        codes = centred @ self.basis_.T
        outside = centred @ centred.T - codes @ codes.T
        codes = codes @ self.directions_
        scales = np.column_stack([self.scales_, self.scales_ @ weights])
        lengths = np.sqrt(np.maximum(codes**2 @ scales + np.diag(outside)[:, None], 0.0))
        products = (codes[:1] * codes[1:]) @ scales + outside[0, 1:, None]
        lengths = lengths[:1] * lengths[1:]
        cosines = np.divide(products, lengths, out=np.zeros_like(lengths), where=lengths > 0)
        wrong = _wrong(cosines[1], cosines[0])
        return wrong[:-1], float(wrong[-1])

    def transform(self, X: ArrayLike) -> Floats:
        """Return codes (N, F) of features (N, F), whose Euclidean distances are the learned ones."""
        codes = super().transform(X)
        return unit(codes) if self.left_ else codes

    def to_model_parts(self) -> tuple[nn.Module, None]:
        """Return the head, float32, with the numbers of `transform`; distances are Euclidean."""
        head, _ = super().to_model_parts()
        if self.left_:
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


def _signed(directions: Floats) -> Floats:
    largest = np.abs(directions).argmax(axis=1)
    signs = np.where(directions[np.arange(len(directions)), largest] < 0, -1.0, 1.0)
    return directions * signs[:, None]
