"""The objective of LANML and PNCA and its gradient, computed in blocks of queries.

With d_ij = |Lᵀ(x_i − x_j)|², the similar items S_i and dissimilar items D_i of a query i, the
log-exp mean b, and the mean Ω of d_ij over all S_i:

    f(L) = mean over i of ℓ(b_{γ₁}(d_ij : j ∈ S_i) − b_{γ₂}(d_ij : j ∈ D_i) + offset_i)  +  λ Ω(LLᵀ)
    ∇f   = 2 Xᵀ (diag(W1 + Wᵀ1) − W − Wᵀ) X L  +  λ ∇Ω,        W_ij = ∂f / ∂d_ij

(Song et al., "Adaptive Neighborhood Metric Learning", Eqs 19–21, with sign and margin corrected.)
Either b can instead be the mean of the K smallest or largest distances (Eq 6; f is then Eq 11).
Then W_ij is ℓ′/K for these distances, and ∇f is a subgradient where two distances tie.

W is computed for a block of queries against all items and then discarded, so memory holds a few
blocks and N × F numbers, never N × N. The queries of a block belong to classes of one size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
from retrieval.base.arrays import Floats, Ints
from scipy.sparse import csr_array, vstack
from scipy.special import expit

Name = Literal["hinge", "smooth_hinge", "logistic", "identity", "sigmoid"]
NEGLIGIBLE = -37.0
"""Exponent t below which 1 + e^t rounds to 1 in float64."""
BLOCK = 1 << 21
"""Largest number of distances in memory at a time (16 MB)."""


@dataclass(frozen=True)
class Outer:
    """The outer loss ℓ(x); x > 0 if similar items are farther from a query than dissimilar ones.

    Args:
        name: "hinge" [m + x]₊, "smooth_hinge" (the kink replaced by a parabola of `width`),
            "logistic" log(1 + e^{m + x}), "identity" x, or "sigmoid" 1 / (1 + e^{−x}).
        margin: m.
        width: range of m + x over which the smooth hinge's slope grows from 0 to 1.
    """

    name: Name = "smooth_hinge"
    margin: float = 1.0
    width: float = 0.1

    @property
    def floor(self) -> float:
        """The largest x at which ℓ and its slope are exactly 0."""
        if self.name in ("hinge", "smooth_hinge"):
            return -self.margin
        return -np.inf

    def __call__(self, x: Floats) -> tuple[Floats, Floats]:
        """Return ℓ and its slope at each x; at the hinge's kink, the slope is a subgradient."""
        if self.name == "identity":
            return x, np.ones_like(x)
        if self.name == "sigmoid":
            p = expit(x)
            return p, p * expit(-x)
        t = x + self.margin
        if self.name == "logistic":
            return np.logaddexp(0, t), expit(t)
        if self.name == "hinge":
            return np.maximum(t, 0), (t > 0).astype(x.dtype)
        slope = np.clip(t / self.width, 0, 1)
        return np.where(t < self.width, t * slope / 2, t - self.width / 2), slope


def soft_radius(d: Floats, gamma: float, skip: Ints | None = None) -> tuple[Floats, Floats]:
    """Return the log-exp mean of each row (B,), and its derivatives by the elements (B, K).

    `skip` (B,) is a column per row to leave out: a query is not its own neighbour.
    """
    count = d.shape[1] - (skip is not None)
    # Here the log-exp mean equals the mean up to rounding.
    flat = abs(gamma) < 1e-8
    if flat:
        e = np.zeros_like(d)
    else:
        e = d * -gamma
    if skip is not None:
        e[np.arange(len(d)), skip] = -np.inf
    top = e.max(axis=1, keepdims=True)
    e -= top
    np.exp(e, out=e)
    mass = e.sum(axis=1, keepdims=True)
    e /= mass
    if flat:
        radius = np.einsum("ij,ij->i", e, d)
    else:
        radius = -(top + np.log(mass / count))[:, 0] / gamma
    return radius, e


def hard_radius(d: Floats, k: int, skip: Ints | None = None) -> tuple[Floats, Floats]:
    """Return the mean of the k smallest elements of each row (B,), and its derivatives (B, K).

    Song et al., Eq 6, r(S, θ, x, Kα). A negative k takes the −k largest elements. A row with fewer
    elements uses all of them. For `skip` see `soft_radius`. The derivatives are 1/|k| at the
    selected elements and 0 elsewhere.
    """
    if k > 0:
        ranked = d
    else:
        ranked = -d
    if skip is not None:
        ranked = ranked.copy()
        ranked[np.arange(len(d)), skip] = np.inf
    count = min(abs(k), d.shape[1] - (skip is not None))
    selected = np.argpartition(ranked, count - 1, axis=1)[:, :count]
    weights = np.zeros_like(d)
    np.put_along_axis(weights, selected, 1 / count, axis=1)
    return np.take_along_axis(d, selected, axis=1).mean(axis=1), weights


def largest(t: Floats, k: int) -> tuple[Floats, Any, Floats]:
    """Return minus the mean of each row's k largest elements (B,), their mask (B, K), and k (B,).

    A row with fewer elements uses all of them.
    """
    count = min(k, t.shape[1])
    places = np.argpartition(t, t.shape[1] - count, axis=1)[:, t.shape[1] - count :]
    ends = np.arange(0, places.size + 1, count)
    ones = csr_array((np.ones(places.size), places.ravel(), ends), shape=t.shape)
    return -np.take_along_axis(t, places, axis=1).mean(axis=1), ones, np.full(len(t), float(count))


def exponentials(t: Floats) -> tuple[Any, Floats]:
    """Return e^t (B, K) and the sums of its rows (B,), for t ≤ 0 with a 0 in each row.

    If most terms are too small to change a sum in float64, the first result is a sparse array of
    the other terms. This is common for many items and a large γ₂.
    """
    relevant = t > NEGLIGIBLE
    if np.count_nonzero(relevant) > t.size // 8:
        e = np.exp(t, out=t)
        return e, e.sum(axis=1)
    places = np.flatnonzero(relevant)
    ends = np.concatenate([[0], np.count_nonzero(relevant, axis=1).cumsum()])
    values = np.exp(t.ravel()[places])
    return csr_array((values, places % t.shape[1], ends), shape=t.shape), np.add.reduceat(
        values, ends[:-1]
    )


@dataclass(frozen=True)
class _Class:
    """One class: the items `start` to `stop`, sorted by class.

    Attributes:
        queries: (Q,) queries, counted from `start`.
        neighbors: (Q, k) S_i of each query, counted from `start`; `None` for the whole class.
    """

    start: int
    stop: int
    queries: Ints
    neighbors: Ints | None

    @property
    def count(self) -> int:
        return self.stop - self.start

    @property
    def similar(self) -> int:
        if self.neighbors is None:
            return self.count - 1
        return int(self.neighbors.shape[1])


@dataclass(frozen=True)
class _Group:
    """The queries of all classes that have `count` items each, as rows of all items.

    Attributes:
        count: number of items per class.
        queries: (Q,) rows of the queries.
        starts: (Q,) first row of the class of each query.
        neighbors: (Q, k) rows of S_i for each query; `None` for the whole class.
    """

    count: int
    queries: Ints
    starts: Ints
    neighbors: Ints | None

    @classmethod
    def of_classes(cls, classes: list[_Class]) -> _Group:
        """Combine the queries of classes of one size."""
        lists = [c.start + c.neighbors for c in classes if c.neighbors is not None]
        return cls(
            classes[0].count,
            np.concatenate([c.start + c.queries for c in classes]),
            np.repeat([c.start for c in classes], [len(c.queries) for c in classes]),
            np.concatenate(lists) if lists else None,
        )


class _Push(NamedTuple):
    """Effect of the dissimilar items on a block of queries.

    Attributes:
        rows: index into the block of the B queries with ℓ above 0.
        loss: sum of ℓ.
        slope: (B,) ℓ′.
        weights: (B, K) weights of the dissimilar items, dense or sparse, not scaled to sum 1.
        mass: (B,) sums of the weights.
    """

    rows: Any
    loss: float
    slope: Floats
    weights: Any
    mass: Floats


@dataclass(frozen=True, kw_only=True)
class Objective:
    """f of the module's docstring.

    Attributes:
        gamma1: γ₁ of the similar items; 0 for their mean.
        gamma2: γ₂ > 0 of the dissimilar items.
        outer: ℓ.
        neighbors: size of S_i, the nearest items of a query's class by the Euclidean distance of
            the features. `None` means the whole class.
        regularization: λ of Ω, the mean squared distance of a query to its S_i.
        offset: maps |S_i| and |D_i| to offset_i.
        k1: K₁α₁ ≠ 0: replaces the log-exp mean over S_i with the mean of the k1 smallest distances,
            or of the −k1 largest if k1 is negative.
        k2: K₂ > 0: replaces the log-exp mean over D_i with the mean of the k2 smallest distances.
    """

    gamma1: float
    gamma2: float
    outer: Outer
    neighbors: int | None = None
    regularization: float = 0.0
    offset: Callable[[int, int], float] = lambda similar, dissimilar: 0.0
    k1: int | None = None
    k2: int | None = None


class Neighborhoods:
    """f and ∇f of the module's docstring, for one data set.

    Args:
        x: (N, F) float64 features.
        codes: (N,) class numbers 0 to C − 1. There are two classes or more, one with two items.
        objective: f.
        queries: approximate number of items to draw as queries, the same share of each class.
            `None` uses all items. Items that are not queries remain neighbours, and the only member
            of a class is never a query.
        seed: seed of the choice of queries.
    """

    def __init__(
        self,
        x: Floats,
        codes: Ints,
        objective: Objective,
        *,
        queries: int | None = None,
        seed: int = 0,
    ) -> None:
        self.objective = objective
        self.sharpness = objective.gamma2 if objective.k2 is None else 1.0
        # Distances do not depend on the mean, and |a|² + |b|² − 2ab is most precise near 0.
        self.x = x[np.argsort(codes, kind="stable")] - x.mean(axis=0)
        self.classes = list(self._classes(np.bincount(codes), queries, seed))
        self.queries = sum(len(c.queries) for c in self.classes)
        self.spread: Floats = np.zeros((x.shape[1],) * 2)
        if objective.regularization:
            self.spread = self._spread()
        self.groups = [
            _Group.of_classes([c for c in self.classes if c.count == count])
            for count in sorted({c.count for c in self.classes})
        ]

    def _classes(self, counts: Ints, queries: int | None, seed: int) -> Iterator[_Class]:
        neighbors = self.objective.neighbors
        random = np.random.RandomState(seed)
        possible = int(counts[counts > 1].sum())
        start = 0
        for count in counts.tolist():
            chosen = np.arange(count)
            if queries is not None and queries < possible:
                chosen = np.sort(
                    random.permutation(count)[: max(1, round(count * queries / possible))]
                )
            if count > 1:
                x = self.x[start : start + count]
                if neighbors is None or neighbors >= count - 1:
                    near = None
                else:
                    near = _nearest(x, chosen, neighbors)
                yield _Class(start, start + count, chosen, near)
            start += count

    def _spread(self) -> Floats:
        """Return A of Ω(M) = tr(A M), the mean (x_i − x_j)(x_i − x_j)ᵀ over queries and S_i."""
        total = np.zeros((self.x.shape[1],) * 2)
        for c in self.classes:
            x = self.x[c.start : c.stop]
            if c.neighbors is None:
                x = x - x.mean(axis=0)
                queries = x[c.queries]
                total += (c.count * queries.T @ queries + len(queries) * x.T @ x) / c.similar
                continue
            rows = max(1, BLOCK // (c.similar * x.shape[1]))
            for i in range(0, len(c.queries), rows):
                part = x[c.queries[i : i + rows], None] - x[c.neighbors[i : i + rows]]
                flat = part.reshape(-1, x.shape[1])
                total += flat.T @ flat / c.similar
        return total / self.queries

    def __call__(self, L: Floats) -> tuple[float, Floats]:
        """Return f and ∇f (F, C) at L (F, C)."""
        z = self.x @ L
        square = np.einsum("ij,ij->i", z, z)[:, None]
        ones = np.ones_like(square)
        # left @ right.T has the elements −2ab + |a|² + |b|², the squared distances.
        left = np.hstack([-2 * z, square, ones])
        right = np.hstack([z, ones, square])
        gradient = np.zeros_like(z)
        pushed = np.zeros((len(z), z.shape[1] + 1))
        total = sum(self._group(g, z, left, right, gradient, pushed) for g in self.groups)
        # A row of W sums to 0 (−ℓ′ over D_i, ℓ′ over S_i), so diag(W1) vanishes.
        gradient += 2 * (pushed[:, -1:] * z - pushed[:, :-1])
        out = self.x.T @ gradient / self.queries
        value = total / self.queries
        if self.objective.regularization:
            pull = self.spread @ L
            value += self.objective.regularization * float(np.vdot(L, pull))
            out += 2 * self.objective.regularization * pull
        return float(value), out

    def _group(
        self,
        group: _Group,
        z: Floats,
        left: Floats,
        right: Floats,
        gradient: Floats,
        pushed: Floats,
    ) -> float:
        """Add the share of a group to `gradient`, ∂f/∂z (N, C), and `pushed`; return its sum of ℓ.

        `left` and `right` (N, C + 2) give squared distances as in `__call__`. `pushed` (N, C + 1)
        collects Σ_i W_ij z_i and Σ_i W_ij of each item j.
        """
        listed = group.neighbors
        if listed is None:
            similar = group.count - 1
        else:
            similar = listed.shape[1]
        dissimilar = len(z) - group.count
        total = 0.0
        offset = self.objective.offset(similar, dissimilar)
        rows = max(1, BLOCK // max(len(z), 0 if listed is None else similar * z.shape[1]))
        space = np.empty(min(rows, len(group.queries)) * len(z))
        waiting = _Waiting(pushed)
        for i in range(0, len(group.queries), rows):
            query = group.queries[i : i + rows]
            starts = group.starts[i : i + rows]
            t = self._exponents(left[query], right, space)
            near = starts[:, None] + np.arange(group.count)
            same_class: Any = np.arange(len(query))[:, None], near
            # One class, for which a slice is faster.
            if starts[0] == starts[-1]:
                same_class = np.s_[:, starts[0] : starts[0] + group.count]
            if listed is None:
                radius, weights = self._radius(t[same_class] / -self.sharpness, skip=query - starts)
            else:
                near = listed[i : i + rows]
                difference = z[query, None] - z[near]
                radius, weights = self._radius(np.einsum("ijk,ijk->ij", difference, difference))
            t[same_class] = -np.inf
            push = self._push(t, radius + offset, dissimilar)
            if push is None:
                continue
            query = query[push.rows]
            near = near[push.rows]
            weights = weights[push.rows]
            total += push.loss
            slope = push.slope[:, None]
            scale = (push.slope / push.mass)[:, None]
            # S_i and D_i have no item in common.
            w = push.weights * -scale
            if isinstance(w, np.ndarray):
                np.put_along_axis(w, near, slope * weights, axis=1)
            else:
                ends = np.arange(0, near.size + 1, near.shape[1])
                of_similar = (slope * weights).ravel(), near.ravel(), ends
                w = (w + csr_array(of_similar, shape=w.shape)).tocsr()
            gradient[query] -= 2 * (w @ z)
            waiting.add(w, np.hstack([z[query], np.ones((len(query), 1))]))
        waiting.empty()
        return total

    def _exponents(self, a: Floats, b: Floats, space: Floats) -> Floats:
        """Return −γ₂ d (B, K), or −d for the mean of K₂ distances, at the start of `space`.

        The squared distances are d = a @ b.T, raised to at least 0.
        """
        t = np.matmul(-self.sharpness * a, b.T, out=space[: len(a) * len(b)].reshape(len(a), -1))
        return np.minimum(t, 0, out=t)

    def _push(self, t: Floats, radius: Floats, dissimilar: int) -> _Push | None:
        """Return the effect of D_i on queries with ℓ above 0, or `None` if there is none.

        Args:
            t: (B, K) from `_exponents`, −∞ for items that are not in D_i. It is overwritten.
            radius: (B,) the mean over S_i plus offset_i.
            dissimilar: size of D_i.
        """
        top = t.max(axis=1)
        least = -top / self.sharpness
        # The mean over D_i is at least the smallest distance. If that is large enough, ℓ = 0 and
        # the query needs no exponentials.
        rows: Any = radius - least > self.objective.outer.floor
        if not rows.any():
            return None
        if rows.all():
            # A slice makes no copies.
            rows = slice(None)
        t = t[rows]
        top = top[rows]
        least = least[rows]
        radius = radius[rows]
        if self.objective.k2 is None:
            t -= top[:, None]
            weights, mass = exponentials(t)
            reach = least - np.log(mass / dissimilar) / self.objective.gamma2
        else:
            reach, weights, mass = largest(t, min(self.objective.k2, dissimilar))
        loss, slope = self.objective.outer(radius - reach)
        return _Push(rows, float(loss.sum()), slope, weights, mass)

    def _radius(self, d: Floats, skip: Ints | None = None) -> tuple[Floats, Floats]:
        if self.objective.k1 is None:
            return soft_radius(d, self.objective.gamma1, skip)
        return hard_radius(d, self.objective.k1, skip)


class _Waiting:
    """Collects sparse blocks of W and adds Wᵀ [z 1] to `pushed` for many blocks at a time."""

    def __init__(self, pushed: Floats) -> None:
        self.pushed = pushed
        self.blocks: list[tuple[Any, Floats]] = []

    def add(self, weights: Any, part: Floats) -> None:
        """Add a block of W (B, N), dense or sparse, with [z 1] of its queries (B, C + 1)."""
        if isinstance(weights, np.ndarray):
            self.pushed += weights.T @ part
            return
        self.blocks.append((weights, part))
        if sum(block.nnz for block, _ in self.blocks) > BLOCK // 2:
            self.empty()

    def empty(self) -> None:
        """Add the collected blocks to `pushed`."""
        if self.blocks:
            weights, parts = zip(*self.blocks, strict=True)
            self.pushed += vstack(weights, format="csr").T @ np.concatenate(parts)
            self.blocks = []


def _nearest(x: Floats, chosen: Ints, count: int) -> Ints:
    """Return the rows of the `count` items of x (N, F) nearest to each chosen item."""
    square = np.einsum("ij,ij->i", x, x)
    nearest = np.empty((len(chosen), count), dtype=np.intp)
    rows = max(1, BLOCK // len(x))
    for i in range(0, len(chosen), rows):
        part = chosen[i : i + rows]
        d = square - 2 * x[part] @ x.T
        d[np.arange(len(part)), part] = np.inf
        nearest[i : i + rows] = np.argpartition(d, count - 1, axis=1)[:, :count]
    return nearest
