"""GMML (geometric mean metric learning), and the moments and matrix functions that AML shares."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

import numpy as np
from numpy.typing import ArrayLike
from pydantic import Field, PositiveInt
from retrieval.base.arrays import Bools, Floats, Ints
from retrieval.helpers import Seeded, check_parameters, deviations
from retrieval.plugin import LinearMap
from scipy.linalg import solve_triangular
from sklearn.utils.validation import check_array
from threadpoolctl import threadpool_limits

BLOCK = 2**20
"""Largest number of elements in a block of differences of pairs."""
FLOOR = 1e-10
"""Lower bound of a moment's eigenvalues, relative to their mean."""
ONE_THREAD = 200
"""Up to this many features, BLAS is limited to one thread.

For small matrices, several threads are no faster, and much slower on busy cores.
"""
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, le=1)]
Prior = Literal["identity", "covariance"] | list[list[float]] | None


@dataclass(frozen=True)
class Moments:
    """Means of (x − x′)(x − x′)ᵀ over pairs of points x and x′, and the numbers of pairs.

    Attributes:
        similar: A (F, F), the mean over similar pairs.
        dissimilar: B (F, F), the mean over dissimilar pairs.
        n_similar: number of similar pairs.
        n_dissimilar: number of dissimilar pairs.
    """

    similar: Floats
    dissimilar: Floats
    n_similar: int
    n_dissimilar: int


def moments_of_classes(x: Floats, codes: Ints) -> Moments:
    """Return the moments over all unordered pairs of items, from sums over classes.

    Let class c have n_c of the n items, mean m_c and scatter S_c about it, and let m be the mean of
    all items. Then

        Σ over pairs in classes       = Σ_c n_c S_c
        Σ over pairs between classes  = Σ_c (n − n_c) S_c + n Σ_c n_c (m_c − m)(m_c − m)ᵀ

    These are sums of positive semi-definite terms, so no digits cancel.

    Args:
        x: (N, F) features.
        codes: (N,) class numbers, 0 to C − 1. Every class has an item.
    """
    n, features = x.shape
    counts = np.bincount(codes)
    mean = x.mean(axis=0)
    similar = np.zeros((features, features))
    dissimilar = np.zeros((features, features))
    order = np.argsort(codes, kind="stable")
    centres = np.empty((len(counts), features))
    for c, rows in enumerate(np.split(order, counts.cumsum()[:-1])):
        items = x[rows] - mean
        centres[c] = items.mean(axis=0)
        items -= centres[c]
        scatter = items.T @ items
        similar += counts[c] * scatter
        dissimilar += (n - counts[c]) * scatter
    weighted = centres * np.sqrt(counts)[:, None]
    dissimilar += n * (weighted.T @ weighted)
    total = n * (n - 1) // 2
    n_similar = int((counts * (counts - 1) // 2).sum())
    return Moments(
        similar / max(n_similar, 1),
        dissimilar / max(total - n_similar, 1),
        n_similar,
        total - n_similar,
    )


def moments_of_pairs(pairs: Floats, similar: Bools) -> Moments:
    """Return the moments over pairs (N, 2, F); `similar` (N,) is the mask of similar pairs."""
    sums = []
    for chosen in (similar, ~similar):
        rows = np.flatnonzero(chosen)
        sums.append(_sum_of_squares(pairs[:, 0], pairs[:, 1], rows, rows) / max(len(rows), 1))
    return Moments(sums[0], sums[1], int(similar.sum()), int((~similar).sum()))


def moments_of_drawn_pairs(x: Floats, codes: Ints, n_pairs: int, seed: int) -> Moments:
    """Return the moments over random pairs of items, as in the experiments of the papers."""
    random = np.random.default_rng(seed)
    first = random.integers(0, len(x), n_pairs)
    second = random.integers(0, len(x) - 1, n_pairs)
    second += second >= first
    alike = codes[first] == codes[second]
    sums = [_sum_of_squares(x, x, first[chosen], second[chosen]) for chosen in (alike, ~alike)]
    n_similar = int(alike.sum())
    return Moments(
        sums[0] / max(n_similar, 1),
        sums[1] / max(n_pairs - n_similar, 1),
        n_similar,
        n_pairs - n_similar,
    )


def _sum_of_squares(left: Floats, right: Floats, i: Ints, j: Ints) -> Floats:
    """Return the sum of (x − x′)(x − x′)ᵀ over rows x = left[i] and x′ = right[j]."""
    features = left.shape[1]
    total = np.zeros((features, features))
    step = max(1, BLOCK // features)
    for start in range(0, len(i), step):
        difference = left[i[start : start + step]] - right[j[start : start + step]]
        total += difference.T @ difference
    return total


def symmetric(m: Floats) -> Floats:
    """Return (M + Mᵀ) / 2."""
    half: Floats = (m + m.T) / 2
    return half


def geodesic_factor(a: Floats, b: Floats, t: float) -> Floats:
    """Return H (F, F) with HHᵀ = A⁻¹ #_t B = L⁻ᵀ (Lᵀ B L)ᵗ L⁻¹ for A = LLᵀ.

    HHᵀ is the point at t on the geodesic from A⁻¹ (t = 0) to B (t = 1). At t = .5 it is the
    geometric mean, which solves M A M = B (Zadeh et al., Eq 8 and 13).
    """
    lower = np.linalg.cholesky(a)
    # Singular values of a factor keep digits that eigenvalues of the product would lose.
    _, values, right = np.linalg.svd(np.linalg.cholesky(b).T @ lower)
    half: Floats = solve_triangular(lower, (right.T * values**t), trans="T", lower=True)
    return half


def eigen_of_factor(half: Floats) -> tuple[Floats, Floats]:
    """Return the eigenvalues (F,), all positive, and eigenvectors (F, F) of HHᵀ, largest first."""
    vectors, values, _ = np.linalg.svd(half)
    return values**2, vectors


def lifted(m: Floats, unit: float) -> Floats:
    """Return M with eigenvalues raised to at least `FLOOR` × unit."""
    values, vectors = np.linalg.eigh(m)
    least = FLOOR * unit
    if values[0] >= least:
        return m
    return symmetric((vectors * np.maximum(values, least)) @ vectors.T)


def spread_of(m: Floats) -> tuple[Floats, Floats]:
    """Return orthonormal bases of the directions with spread (F, R) and without spread (F, F − R).

    A direction has spread if the eigenvalue of M is above `FLOOR` × the mean of all eigenvalues.
    """
    values, vectors = np.linalg.eigh(m)
    wide = values > FLOOR * np.trace(m) / len(m)
    if wide.all():
        return np.eye(len(m)), np.empty((len(m), 0))
    return vectors[:, wide], vectors[:, ~wide]


def completed(half: Floats, constant: Floats) -> Floats:
    """Return H extended to (F, F).

    The directions in `constant` get the geometric mean of H's singular values.
    """
    if not constant.shape[1]:
        return half
    values = np.linalg.svd(half, compute_uv=False)
    return np.hstack([half, constant * np.exp(np.log(values).mean())])


def components(half: Floats) -> Floats:
    """Return C (F, F) with CᵀC = HHᵀ; its rows are scaled eigenvectors, the largest first."""
    values, vectors = eigen_of_factor(half)
    largest = np.abs(vectors).argmax(axis=0)
    signs = np.where(vectors[largest, np.arange(len(half))] < 0, -1.0, 1.0)
    return np.ascontiguousarray((vectors * signs * np.sqrt(values)).T)


class PairLearner(Seeded, LinearMap):
    """Base class of learners of a metric from the second moments of similar and dissimilar pairs.

    Subclasses define `_learn`. Every subclass has the parameters `t`, `regularization`, `prior`,
    `n_pairs`, `standardize`, `seed` and `random_state`.

    Attributes:
        components_: (F, F) the learned map: the eigenvectors of M times the roots of their
            eigenvalues, the largest first.
        scale_: (F,) standard deviations by which features are divided before learning; 1 without
            `standardize`.
        n_similar_: number of similar pairs.
        n_dissimilar_: number of dissimilar pairs.
        converged_: whether the search met its tolerance; true for a closed form.
        n_iter_: number of iterations; 0 for a closed form.
    """

    t: float
    regularization: float
    prior: Any
    n_pairs: int | Literal["paper"] | None
    standardize: bool

    converged_: bool
    n_iter_: int

    def _learn(self, similar: Floats, dissimilar: Floats) -> Floats:
        """Return H (F, F) with M = HHᵀ, and set `converged_` and `n_iter_`."""
        raise NotImplementedError

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.required = True
        return tags

    def fit(self, X: ArrayLike, y: ArrayLike) -> Self:
        """Learn from features (N, F) and labels (N,). Pairs of one class are similar.

        All pairs are used, through sums over classes, unless `n_pairs` sets a number to draw.

        Raises:
            ValueError: features are not finite, there is only one class, no class has two members,
                no similar or no dissimilar pair was drawn, or a parameter is out of range.
        """
        seed = self._chosen_seed()
        check_parameters(self)
        raw, codes = self._training_items(X, y)
        scale = self._scale(raw)
        x = raw / scale
        if self.n_pairs is None:
            moments = moments_of_classes(x, codes)
        else:
            classes = int(codes.max()) + 1
            if self.n_pairs == "paper":
                drawn = 1000 * classes * (classes - 1)
            else:
                drawn = self.n_pairs
            moments = moments_of_drawn_pairs(x, codes, drawn, seed)
        return self._fit(moments, x, raw.mean(axis=0), scale)

    def fit_pairs(self, pairs: ArrayLike, similar: ArrayLike) -> Self:
        """Learn from pairs that are only known to be similar or dissimilar.

        Every pair counts once; `n_pairs` is not used. The points of the pairs are the features for
        `standardize`, the prior "covariance" and `mean_`.

        Args:
            pairs: (N, 2, F) the two points of each pair.
            similar: (N,) whether each pair is similar: True or False, 1 or 0, or 1 or −1.

        Raises:
            ValueError: shapes do not fit, numbers are not finite, all pairs are similar or all
                dissimilar, the points of every pair are equal, or a parameter is out of range.
        """
        check_parameters(self)
        x, alike = checked_pairs(pairs, similar)
        points = self._training_features(x.reshape(-1, x.shape[2]))
        scale = self._scale(points)
        return self._fit(
            moments_of_pairs(x / scale, alike), points / scale, points.mean(axis=0), scale
        )

    def _fit(self, moments: Moments, x: Floats, mean: Floats, scale: Floats) -> Self:
        self.n_similar_ = moments.n_similar
        self.n_dissimilar_ = moments.n_dissimilar
        if not (self.n_similar_ and self.n_dissimilar_):
            kinds = ("similar", "dissimilar")
            missing, other = kinds[::-1] if self.n_similar_ else kinds
            raise ValueError(
                f"No pair is {missing}: all are {other}. A metric needs pairs of both kinds. Draw"
                f" more pairs, or add some that are {missing}."
            )
        features = x.shape[1]
        with threadpool_limits(1 if features <= ONE_THREAD else None, user_api="blas"):
            a, b = self._regularized(moments, x)
            spread, constant = spread_of(a + b)
            half = spread @ self._learn(*_definite(spread.T @ a @ spread, spread.T @ b @ spread))
            self.components_ = components(completed(half, constant)) / scale
        self.mean_ = mean
        self.scale_ = scale
        return self

    def _scale(self, x: Floats) -> Floats:
        if self.standardize:
            return deviations(x)
        return np.ones(x.shape[1])

    def _regularized(self, moments: Moments, x: Floats) -> tuple[Floats, Floats]:
        """Return A + λM₀⁻¹ and B + λM₀."""
        a = moments.similar
        b = moments.dissimilar
        if self.regularization > 0:
            prior = self._prior(x)
            a = symmetric(a + self.regularization * np.linalg.inv(prior))
            b = symmetric(b + self.regularization * prior)
        if not (np.trace(a) > 0 or np.trace(b) > 0):
            raise ValueError(
                "The two points of every pair are equal, so there is nothing to learn from. Are all"
                " features constant?"
            )
        return a, b

    def _prior(self, x: Floats) -> Floats:
        features = x.shape[1]
        if self.prior is None or (isinstance(self.prior, str) and self.prior == "identity"):
            return np.eye(features)
        if isinstance(self.prior, str) and self.prior == "covariance":
            covariance = np.atleast_2d(np.cov(x, rowvar=False))
            unit = np.trace(covariance) / features
            inverse: Floats = np.linalg.inv(
                lifted(covariance, unit) if unit > 0 else np.eye(features)
            )
            return symmetric(inverse)
        prior = np.asarray(self.prior, dtype=np.float64)
        if prior.shape != (features, features):
            raise ValueError(
                f"prior must have the shape ({features}, {features}) for {features} features, not"
                f" {prior.shape}."
            )
        if (
            not np.isfinite(prior).all()
            or np.abs(prior - prior.T).max() > 1e-9 * np.abs(prior).max()
        ):
            raise ValueError("prior must be a symmetric matrix of finite numbers.")
        if not np.linalg.eigvalsh(prior)[0] > 0:
            raise ValueError(
                "prior must be positive definite: its smallest eigenvalue is not above 0."
            )
        return symmetric(prior)


def checked_pairs(pairs: ArrayLike, similar: ArrayLike) -> tuple[Floats, Bools]:
    """Return pairs (N, 2, F) and the mask (N,) of similar pairs, after checking both.

    Raises:
        ValueError: shapes do not fit, or numbers are not finite.
    """
    x = check_array(pairs, dtype=np.float64, allow_nd=True, ensure_2d=False, input_name="pairs")
    if x.ndim != 3 or x.shape[1] != 2 or x.shape[2] < 1:
        raise ValueError(f"pairs must have the shape (pairs, 2, features), not {x.shape}.")
    flags = np.asarray(similar)
    if flags.shape != (len(x),):
        raise ValueError(f"There are {len(x)} pairs, but similar has the shape {flags.shape}.")
    if flags.dtype != np.bool_:
        if flags.dtype.kind in "iuf":
            known = set(np.unique(flags).tolist())
        else:
            known = {None}
        if not (known <= {0, 1} or known <= {-1, 1}):
            raise ValueError(
                "similar must consist of True and False, 1 and 0, or 1 and -1, where 1 marks"
                " similar pairs."
            )
    return x, flags > 0


def _definite(a: Floats, b: Floats) -> tuple[Floats, Floats]:
    """Return both moments; raise their eigenvalues above 0 if necessary."""
    units = np.trace(a) / len(a), np.trace(b) / len(b)
    # If points differ only in pairs of one kind, the moment of the other kind is 0.
    return lifted(symmetric(a), units[0] or units[1]), lifted(symmetric(b), units[1] or units[0])


@dataclass(eq=False, repr=False)
class GMML(PairLearner):
    """A linear map under which similar pairs are near and dissimilar pairs far, in closed form.

    Zadeh et al., "Geometric Mean Metric Learning" (ICML 2016). Let A and B be the means of (x −
    x′)(x − x′)ᵀ over similar and dissimilar pairs. The minimum of tr(A M) + tr(B M⁻¹) is the
    geometric mean M = A⁻¹ # B. `t` moves M along the geodesic from A⁻¹ to B, and `regularization` λ
    pulls both ends towards a prior M₀:

        M = (A + λ M₀⁻¹)⁻¹ #_t (B + λ M₀).

    M is always positive definite. Directions in which no pair differs, such as a constant feature,
    are left out of the fit; M gets the geometric mean of its other eigenvalues there. If the pairs
    of one kind never differ in a direction in which the other kind does, as with fewer items than
    features, the eigenvalues of their moment are raised to at least 1e-10 of their mean.

    Args:
        t: position on the geodesic, from 0 (A⁻¹, whitening within classes) over .5 (the geometric
            mean) to 1 (B). Tune it: small values such as .1 to .3 are often better.
        regularization: λ, in the units of A and B, which are squared features.
        prior: M₀, one of "identity" (as `None`), "covariance" (the inverse covariance of the
            features) and a symmetric positive definite matrix. Only used with `regularization`.
        n_pairs: number of pairs to draw with `seed`. "paper" draws 1,000 C (C − 1) for C classes.
            `None` uses all pairs of the training items, without forming them.
        standardize: whether to divide each feature by its standard deviation before learning. The
            learned map includes the scaling, so `transform` takes unscaled features. The result
            depends on the scales of the features, so standardise them if their units differ.
        seed: seed of the random choice of pairs; 0 by default.
        random_state: scikit-learn's name for `seed`. Set only one of them, or both to one number.

    Example:
        >>> from sklearn.datasets import load_wine
        >>> from sklearn.neighbors import KNeighborsClassifier
        >>> from sklearn.pipeline import make_pipeline
        >>> x, y = load_wine(return_X_y=True)
        >>> knn = make_pipeline(GMML(t=0.3, standardize=True), KNeighborsClassifier(5))
        >>> knn = knn.fit(x[::2], y[::2])
        >>> bool(knn.score(x[1::2], y[1::2]) > 0.95)
        True
    """

    t: Share = 0.5
    regularization: NotNegative = 0.0
    prior: Prior = None
    n_pairs: PositiveInt | Literal["paper"] | None = None
    standardize: bool = False

    def _learn(self, similar: Floats, dissimilar: Floats) -> Floats:
        self.converged_ = True
        self.n_iter_ = 0
        return geodesic_factor(similar, dissimilar, self.t)
