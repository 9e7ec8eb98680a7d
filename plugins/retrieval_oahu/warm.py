"""`Warm`: starts as the Euclidean distance of principal components and leaves it only as far as the stream shows that it pays."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from pydantic import Field
from retrieval.linear import LinearMap

from retrieval_oahu.history import recorded
from retrieval_oahu.network import unit
from retrieval_oahu.online import OnlineLearner

if TYPE_CHECKING:
    from torch import nn

Floats = NDArray[np.floating[Any]]

POWERS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5)
"""The experts: how far along the geodesic from the identity to the inverse second moment each has gone."""
REFRESH = 64
"""Triplets between two decompositions of the moment."""
SETTLE = 500
"""Without `prepare` or `fit`, principal components are taken from this many triplets; until then the map is the identity."""


class Warm(LinearMap, OnlineLearner):
    """A warm start: Euclid before the first triplet, better after some hundred, chosen by a hedge that Euclid itself is part of.

    In the space of the first principal components, A is the running second moment of the differences between similar items. Each
    expert s measures with M_s = A^−s, on the geodesic from the identity (s = 0, Euclid) to the Mahalanobis distance of
    differences within classes (s = 1); s ends at 1/2. The metric is their average, weighed by Hedge with the loss that counts:
    whether an expert, as it was before the triplet, put the negative nearer than the positive. Weights are e^(−√(8 ln N / t) · errors), which needs no
    learning rate (Cesa-Bianchi & Lugosi, "Prediction, Learning, and Games", 2006, §2.3). A starts at a multiple of the identity. The
    geodesic is that of Zadeh, Hosseini & Sra, "Geometric Mean Metric Learning" (ICML 2016), between other ends; the average of the experts is one linear map.

    Args:
        components: how many principal components are learned on; none, or as many as there are features or more: all.
        rest: whether the rest of the features stays as it is beside them, so that the start is exactly Euclid and nothing of classes
            that come later is lost; if not, codes are `components` wide.
        unit_length: whether codes are scaled to length 1 after the map, which is often better; it then starts as the cosine of
            centred features instead of as Euclid.
        prior: for how many similar pairs the identity counts in A.
        ridge: what is added to A, as a share of its mean eigenvalue; small variances are noise.
        seeds: how many random triplets `fit` draws.
        closure: how many triplets that follow from those it adds.
        seed: seed of `fit`'s triplets.

    Attributes:
        components_: (C, F) the learned map.
        mean_: (F,) what is subtracted from features first; no distance depends on it.
        alpha_: (N,) the experts' weights, for `POWERS`.
        weights_: (M, N) the weights along the stream; M is bounded.
        weights_at_: (M,) after how many triplets each row was taken.
        errors_: (N,) triplets that each expert had wrong; ties count half.
    """

    alpha_: NDArray[np.float64]
    weights_: Floats
    weights_at_: NDArray[np.int64]
    errors_: Floats

    def __init__(
        self,
        components: Annotated[int, Field(ge=1)] | None = 80,
        rest: bool = True,
        unit_length: bool = False,
        prior: Annotated[float, Field(gt=0)] = 20.0,
        ridge: Annotated[float, Field(gt=0)] = 0.1,
        seeds: Annotated[int, Field(ge=0)] = 5000,
        closure: Annotated[int, Field(ge=0)] = 5000,
        seed: int = 0,
    ) -> None:
        self.components = components
        self.rest = rest
        self.unit_length = unit_length
        self.prior = prior
        self.ridge = ridge
        self.seeds = seeds
        self.closure = closure
        self.seed = seed

    def _begin(self, features: int, sample: Floats | None) -> None:
        if self.components is not None and self.components < 1:
            raise ValueError(f"components is {self.components} and must be at least 1, or None for all.")
        for name in ("prior", "ridge"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)} and must be above 0.")
        width = features if self.components is None else min(self.components, features)
        self.alpha_ = np.full(len(POWERS), 1 / len(POWERS))
        self.errors_ = np.zeros(len(POWERS))
        self.weights_, self.weights_at_, self.stride_ = self.alpha_[None].copy(), np.zeros(1, np.int64), 1
        self.mean_ = np.zeros(features) if sample is None else sample.mean(axis=0)
        self.learned_ = 0
        # what principal components are made of when no sample gave them: sums over the first vectors
        self.sum_, self.products_ = np.zeros(features), np.zeros((0, 0))
        if sample is not None:
            self._set_basis(_principal(sample - self.mean_, width))
        elif width == features:
            self._set_basis(np.eye(features))
        else:
            self.products_ = np.zeros((features, features))
            self.basis_ = np.zeros((0, features))
            self.components_ = np.eye(features)

    def _set_basis(self, basis: Floats) -> None:
        self.basis_ = np.ascontiguousarray(basis)
        width = len(basis)
        self.moment_ = np.zeros((width, width))
        self.products_ = np.zeros((0, 0))
        self._refresh()

    def _refresh(self) -> None:
        """Decompose the moment: its directions, each expert's scale along them, and the map of their average."""
        width = len(self.basis_)
        mean = float(np.trace(self.moment_)) / width or 1.0  # a sum, as the moment is
        share = self.prior / max(self.learned_, 1)
        values, self.directions_ = np.linalg.eigh(self.moment_ / mean + share * np.eye(width))
        values = np.maximum(values, 0.0) / (1 + share) + self.ridge
        scales = values[:, None] ** -np.array(POWERS)
        # similar items stay as far apart on the whole, so that what is learned keeps its measure beside the rest
        energy = values - self.ridge
        self.scales_ = scales / (energy @ scales / energy.sum())
        self._mix()

    def _mix(self) -> None:
        roots = np.sqrt(self.scales_ @ self.alpha_)
        if self._keeps_rest():
            turned = self.directions_.T @ self.basis_
            self.components_ = np.eye(self.basis_.shape[1]) + turned.T @ ((roots - 1)[:, None] * turned)
        else:
            self.components_ = (self.directions_ * roots).T @ self.basis_

    def _keeps_rest(self) -> bool:
        return self.rest and len(self.basis_) < self.basis_.shape[1]

    def _learn(self, triplets: Floats) -> int:
        used = 0
        moved = False
        for triplet in triplets:
            if not len(self.basis_):
                used += 1
                self._gather(triplet)
                continue
            apart = (triplet[:1] - triplet[1:]) @ self.basis_.T
            squares = self._squares(triplet, apart)
            wrong = (squares[0] > squares[1]) + 0.5 * (squares[0] == squares[1])
            self.errors_ += wrong
            self.moment_ += np.outer(apart[0], apart[0])
            self.learned_ += 1
            # every triplet adds to the moment, unless anchor and positive are the same
            used += bool(apart[0].any() or np.ptp(wrong) > 0)
            rate = (8 * np.log(len(POWERS)) / self.learned_) ** 0.5
            weights = np.exp(-rate * (self.errors_ - self.errors_.min()))
            self.alpha_ = weights / weights.sum()
            moved = True
            if self.learned_ % REFRESH == 0 or (
                self.learned_ < REFRESH and not self.learned_ & (self.learned_ - 1)
            ):
                self._refresh()
                moved = False
            if not self.learned_ % self.stride_:
                self.weights_, self.weights_at_, self.stride_ = recorded(
                    self.weights_, self.weights_at_, self.stride_, self.alpha_, self.learned_
                )
        if moved:
            self._mix()
        return used

    def _squares(self, triplet: Floats, apart: Floats) -> Floats:
        """Return each expert's squared distances (2, N) from the anchor to the positive and to the negative."""
        squares: Floats
        if not self.unit_length:
            # what lies outside the components is the same for all experts
            squares = (apart @ self.directions_) ** 2 @ self.scales_
            if self._keeps_rest():
                full = triplet[:1] - triplet[1:]
                squares += ((full**2).sum(axis=1) - (apart**2).sum(axis=1))[:, None]
            return squares
        centred = triplet - self.mean_
        codes = centred @ self.basis_.T
        outside = centred @ centred.T - codes @ codes.T if self._keeps_rest() else np.zeros((3, 3))
        codes = codes @ self.directions_
        lengths = np.sqrt(np.maximum(codes**2 @ self.scales_ + np.diag(outside)[:, None], 0.0))
        products = (codes[:1] * codes[1:]) @ self.scales_ + outside[0, 1:, None]
        scale = lengths[:1] * lengths[1:]
        squares = 2 - 2 * np.divide(products, scale, out=np.zeros_like(scale), where=scale > 0)
        return squares

    def transform(self, X: ArrayLike) -> Floats:
        """Return codes (N, C) of features (N, F), whose Euclidean distances are the learned ones."""
        codes = super().transform(X)
        return unit(codes) if self.unit_length else codes

    def to_model_parts(self) -> tuple[nn.Module, None]:
        """Return the head, float32, with the numbers of `transform`; distances are Euclidean."""
        head, _ = super().to_model_parts()
        if self.unit_length:
            from torch import nn

            from retrieval_oahu.bilinear import UnitLength

            head = nn.Sequential(head, UnitLength())
        return head, None

    def _gather(self, triplet: Floats) -> None:
        """Take three vectors into the covariance, and set the basis once there are enough."""
        self.sum_ = self.sum_ + triplet.sum(axis=0)
        self.products_ += triplet.T @ triplet
        self.gathered_ = getattr(self, "gathered_", 0) + 1
        if self.gathered_ == SETTLE:
            count = 3 * SETTLE
            mean = self.sum_ / count
            self.mean_ = mean
            vectors = np.linalg.eigh(self.products_ / count - np.outer(mean, mean))[1]
            assert self.components is not None
            self._set_basis(_signed(vectors[:, ::-1][:, : self.components].T))


def _principal(centred: Floats, width: int) -> Floats:
    """Return the first principal directions (width, F), the signs fixed; all of space where every one is kept."""
    features = centred.shape[1]
    if width == features:
        return np.eye(features)
    return _signed(np.linalg.eigh(centred.T @ centred)[1][:, ::-1][:, :width].T)


def _signed(directions: Floats) -> Floats:
    largest = np.abs(directions).argmax(axis=1)
    signs = np.where(directions[np.arange(len(directions)), largest] < 0, -1.0, 1.0)
    return directions * signs[:, None]
