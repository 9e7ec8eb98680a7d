"""`OAHU`: an ensemble of metrics of increasing depth that learns from a stream of triplets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

import numpy as np
from numpy.typing import ArrayLike
from pydantic import Field, NonNegativeInt, PositiveInt
from retrieval.base.arrays import Array, Floats, Floats64, Ints
from sklearn.utils import Tags
from sklearn.utils.validation import check_is_fitted, validate_data

from retrieval_oahu.network import Network, Rule, hedge_update
from retrieval_oahu.online import RandomTriplets, warn_tau
from retrieval_oahu.spaces import Spaces

if TYPE_CHECKING:
    from torch import nn

    from retrieval_oahu.combiners import Hedge

FLOOR = 0.05
"""Lower bound of a feature's deviation, as a share of the features' quadratic mean deviation.

The bound prevents scaling up a nearly constant feature, such as a pixel at the border.
"""
SETTLE = 1000
"""Without `prepare` or `fit`, mean and deviation are fixed after this many triplets."""


@dataclass(eq=False, repr=False)
class OAHU(RandomTriplets):
    """Online metric learning with adaptive hedge update (OAHU).

    The input and each hidden layer of a network have an embedding layer on the unit sphere. The
    network therefore has one metric per depth, from linear to deep. Every triplet trains all
    metrics with the adaptive-bound triplet loss. A hedge holds one weight per depth, which scales
    the loss of that depth and adapts to it. Each feature is standardised.

    Gao, Li, Chandra, Khan & Thuraisingham, "Towards Self-Adaptive Metric Learning On the Fly", WWW
    2019. docs/oahu.md lists the errors of the paper.

    Args:
        depth: L, the number of hidden layers.
        hidden: number of units per hidden layer.
        embedding: dimension E of an embedding; `transform` returns (depth + 1) × E columns.
        tau: τ, above 0 and below 2. Similar pairs are pulled below a threshold of at most τ.
            Dissimilar pairs are pushed above a threshold of at least 2 − τ. The paper's theorem
            requires at most 2/3.
        beta: β, by which a weight is multiplied after a loss of 1.
        smoothing: s. No weight falls below about s / (depth + 1).
        learning_rate: η of the gradient step.
        rule: factor of a weight after a loss: "exp" is β^loss, "linear" is 1 − (1 − β) loss, and
            "paper" is Eq 20 with its condition corrected.
        search: how the exported model is searched. "sum" orders by the weighted sum of squared
            distances in one index. "score" is Eq 27, with one index per space.
        dtype: precision of the network.
        seeds: number of random triplets that `fit` draws.
        closure: number of implied triplets that `fit` adds to them.
        seed: seed of the initial weights and of `fit`'s triplets; 0 by default.
        random_state: scikit-learn's name for `seed`. Set only one of them, or both to one number.

    Attributes:
        alpha_: (L + 1,) the weights of the spaces, which sum to 1.
        weights_: (M, L + 1) the weights along the stream; M is bounded.
        weights_at_: (M,) number of triplets after which a row was recorded.
        input_layer_: (F, H + E) the weights W₁ and Θ₀, side by side.
        layers_: (L, H, H + E) the weights W_{l+1} and Θ_l of the hidden layers; the last W is not
            used.
        mean_: (F,) mean that is subtracted from the features.
        scale_: (F,) deviation by which the differences are divided.
    """

    depth: NonNegativeInt = 5
    hidden: PositiveInt = 100
    embedding: PositiveInt = 50
    tau: Annotated[float, Field(gt=0, lt=2, allow_inf_nan=False)] = 0.1
    beta: Annotated[float, Field(gt=0, lt=1, allow_inf_nan=False)] = 0.99
    smoothing: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] = 0.1
    learning_rate: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 0.3
    rule: Rule = "exp"
    search: Literal["sum", "score"] = "sum"
    dtype: Literal["float32", "float64"] = "float32"

    def transform(self, X: ArrayLike) -> Floats:
        """Return embeddings (N, (L + 1) E): the spaces' unit embeddings times √α, side by side.

        Their squared Euclidean distance is Σ α_l D_l².
        """
        return self.spaces(X).codes()

    def spaces(self, X: ArrayLike) -> Spaces:
        """Return the unit embeddings of features (N, F) in each space, with the current weights."""
        check_is_fitted(self, "n_triplets_")
        x = validate_data(self, X, reset=False, dtype=np.float64)
        embeddings = self._network().embed(self._standardized(x))
        return Spaces(embeddings, self.alpha_.copy())

    def classify(self, X: ArrayLike, references: Spaces, labels: ArrayLike, k: int = 5) -> Array:
        """Return labels (N,) by the k nearest references in each space (Eq 23–25).

        Args:
            X: (N, F) features.
            references: the labelled items, from `spaces`.
            labels: one label per reference.
            k: number of neighbours.
        """
        return self.spaces(X).classify(references, labels, k)

    def similar(self, X: ArrayLike, Y: ArrayLike, threshold: float = 0.55) -> Floats64:
        """Return P (N,), the total weight of the spaces in which x and y are similar (Eq 26).

        Args:
            X: (N, F) features of the pairs' first items.
            Y: (N, F) features of the pairs' second items.
            threshold: T, between 0 and 1. A pair is similar if half its distance is below T.
        """
        return self.spaces(X).similar(self.spaces(Y), threshold)

    def retrieve(self, X: ArrayLike, references: Spaces, k: int = 10) -> tuple[Ints, Floats64]:
        """Return rows and scores (N, k) of the references most similar to each item (Eq 27).

        Args:
            X: (N, F) features.
            references: the items to search, from `spaces`.
            k: number of results, and of candidates in each space.
        """
        return self.spaces(X).retrieve(references, k)

    def to_model_parts(self) -> tuple[nn.Module, Hedge]:
        """Return the head that computes `transform`, and the combiner that `search` selects."""
        from retrieval_oahu.combiners import HedgeScore, HedgeSum, OverComplete

        check_is_fitted(self, "n_triplets_")
        levels = [self.input_layer_, *self.layers_]
        head = OverComplete.of_weights(levels, self.hidden, self.mean_, self.scale_, self.alpha_)
        if self.search == "score":
            kind = HedgeScore
        else:
            kind = HedgeSum
        return head, kind.of_weights(self.alpha_, self.embedding)

    def __sklearn_tags__(self) -> Tags:
        tags: Tags = super().__sklearn_tags__()
        assert tags.transformer_tags is not None
        # Embeddings have the network's precision, whatever precision the input has.
        tags.transformer_tags.preserves_dtype = [self.dtype]
        return tags

    def _begin(self, features: int, sample: Floats | None) -> None:
        warn_tau(self.tau)
        network = Network.random(
            features, self.depth, self.hidden, self.embedding, self._chosen_seed(), self.dtype
        )
        self.input_layer_ = network.levels[0]
        self.layers_ = np.empty((0, self.hidden, 0), self.dtype)
        if self.depth:
            self.layers_ = np.stack(network.levels[1:])
        self._view: Network | None = None
        self.alpha_ = np.full(self.depth + 1, 1.0 / (self.depth + 1))
        self._record(self.alpha_, 0)
        # Without a sample, mean and deviation follow the first triplets of the stream: `seen_`
        # counts these triplets, `squares_` sums squared deviations.
        self.seen_ = 0
        self.squares_ = np.zeros(features)
        self.mean_: Floats = np.zeros(features)
        self.scale_: Floats = np.ones(features)
        if sample is not None:
            # Mean and deviation are fixed.
            self.seen_ = -1
            self.mean_ = sample.mean(axis=0)
            self.scale_ = _floored(sample.std(axis=0))

    def _learn(self, triplets: Floats) -> int:
        network = self._network()
        used = 0
        step = self.n_triplets_ - self.n_skipped_
        for triplet in triplets:
            if 0 <= self.seen_ < SETTLE:
                self._follow(triplet)
            rows = self._standardized(triplet)
            # Float64 would widen all products.
            alpha = self.alpha_.astype(rows.dtype)
            losses = network.step(rows, alpha, self.tau, self.learning_rate)
            self.alpha_ = hedge_update(self.alpha_, losses, self.beta, self.smoothing, self.rule)
            used += bool((losses > 0).any())
            step += 1
            self._record(self.alpha_, step)
        return used

    def _network(self) -> Network:
        """Return the network, whose weights share memory with the fitted attributes."""
        view = getattr(self, "_view", None)
        if view is None or view.levels[0] is not self.input_layer_:
            view = Network(self.input_layer_, self.layers_, self.hidden)
            self._view = view
        return view

    def _standardized(self, x: Floats) -> Floats:
        return ((x - self.mean_) / self.scale_).astype(self.dtype)

    def _follow(self, triplet: Floats) -> None:
        """Update the running mean and deviation with a triplet's vectors."""
        self.seen_ += 1
        for number, row in enumerate(triplet, start=3 * self.seen_ - 2):
            difference = row - self.mean_
            self.mean_ = self.mean_ + difference / number
            self.squares_ = self.squares_ + difference * (row - self.mean_)
        self.scale_ = _floored(np.sqrt(self.squares_ / (3 * self.seen_)))

    @property
    def _n_features_out(self) -> int:
        return (self.depth + 1) * self.embedding


def _floored(deviation: Floats) -> Floats:
    """Raise deviations to at least `FLOOR` times their quadratic mean; all zeros become 1."""
    floor = FLOOR * float(np.sqrt((deviation**2).mean()))
    if floor > 0:
        return np.maximum(deviation, floor)
    return np.ones_like(deviation)
