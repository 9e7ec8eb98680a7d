"""Log-sum-exps over the negatives of each anchor, in which most losses of pairs are written.

A batch has few positive pairs, which are listed, and many negative pairs, which are not: a sum over
them goes through the matrix of all pairs, in which the other pairs are set to −∞. Some rows at a
time are compared, summed and replaced by their derivatives, so the memory is one matrix.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from pytorch_metric_learning import distances, reducers
from retrieval.helpers import Sums, first_row, reduced_loss, summed
from torch import Tensor
from torch.nn import functional as F

Exponents = Callable[[Tensor, slice], tuple[Tensor, Tensor | float]]
"""Returns the exponents of some rows of a matrix of pairs, and their derivative.

Its arguments are these rows (B, M), which it may overwrite, and which they are.
"""
ENTRIES = 2**18
"""Number of pairs to compute at once on a CPU, so that they stay in a core's cache."""


@dataclass(frozen=True)
class Pairs:
    """Pairs of N anchors with M other items.

    Args:
        anchors: anchors (P,), ascending, of the positive pairs.
        positives: the other items (P,) of the positive pairs.
        not_negative: anchors (K,), ascending, and other items (K,) of pairs that are not negative.
        weights: logarithms (N, M) of the weights of pairs as negatives, −∞ for others.
        negatives: number of negative pairs; the losses of classes do not need it.
        centers: number of columns of each other item, of which the largest counts. The first
            columns of all items come first, as a maximum over neighbours in memory is slow.
        itself: column of the first anchor, if the anchors are among the columns.
    """

    anchors: Tensor
    positives: Tensor
    not_negative: tuple[Tensor, Tensor]
    weights: Tensor | None = None
    negatives: int = 0
    centers: int = 1
    itself: int | None = None

    def with_positives(self, count: int) -> Pairs:
        """Return the pairs of `count` anchors; the sums over negatives then include positives."""
        if self.weights is not None:
            places = self.anchors, self.positives
            weights = self.weights.index_put(places, self.weights.new_zeros(()))
            return replace(self, weights=weights)
        rows = torch.arange(count if self.itself is not None else 0, device=self.anchors.device)
        return replace(self, not_negative=(rows, rows + (self.itself or 0)))


class Vectors(NamedTuple):
    """Vectors (N, C), and (M, C) or None for the same ones, to be scaled and then compared.

    The distance is the cosine, or the Euclidean distance to the power of 1 or 2, of unit vectors.
    """

    x: Tensor
    y: Tensor | None
    distance: Any


def compared(distance: Any, embeddings: Tensor, ref_emb: Tensor) -> Tensor | Vectors:
    """Return embeddings (N, C) and references (M, C), or their matrix (N, M) if that is better."""
    # Embeddings that are compared with each other are scaled to length 1 only once.
    reference = None if ref_emb is embeddings else ref_emb
    kind = type(distance)
    of_unit_vectors = (
        kind is distances.CosineSimilarity
        or (kind is distances.DotProductSimilarity and distance.normalize_embeddings)
        or (kind is distances.LpDistance and distance.normalize_embeddings)
    )
    powers = (1, 2) if kind is distances.LpDistance else (1,)
    # As torch does, measure few vectors by their differences, which is more precise.
    is_small = max(len(embeddings), len(ref_emb)) <= 25
    # A miner, which needs no gradient, sees upstream's numbers to the last bit.
    plain = is_small or not of_unit_vectors or not torch.is_grad_enabled()
    if plain or distance.p != 2 or distance.power not in powers:
        mat: Tensor = distance(embeddings, reference)
        return mat
    return Vectors(embeddings, reference, distance)


def matrix_of(distance: Any, embeddings: Tensor, ref_emb: Tensor) -> Tensor:
    """Return the distances or similarities (N, M) of embeddings (N, C) and references (M, C)."""
    mat = compared(distance, embeddings, ref_emb)
    if isinstance(mat, Vectors):
        mat = _Matrix.apply(*mat)
    return mat


class _Matrix(torch.autograd.Function):
    """The matrix of `Vectors`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor | None, distance: Any) -> Tensor:
        units = _Units.of(x, y)
        mat = x.new_empty(len(x), len(units.columns))
        units.comparison(distance)(slice(None), mat)
        ctx.save_for_backward(x, y, mat, *units)
        ctx.distance = distance
        return mat

    @staticmethod
    def backward(ctx: Any, of_mat: Tensor) -> tuple[Tensor | None, ...]:
        x, y, mat, *saved = ctx.saved_tensors
        vectors = Vectors(x, y, ctx.distance)
        needed = ctx.needs_input_grad[:2]
        if torch.is_grad_enabled():
            return (*_by_torch(vectors, _plain(vectors), of_mat, needed), None)
        units = _Units(*saved)
        if has_root(ctx.distance):
            # A distance of 0 has no derivative.
            of_mat = (of_mat / mat).masked_fill_(mat == 0, 0)
        return (*units.unscaled(vectors, needed, [(slice(None), of_mat)]), None)


class _Units(NamedTuple):
    """Vectors scaled to length 1, and their lengths."""

    rows: Tensor
    lengths: Tensor
    columns: Tensor
    column_lengths: Tensor

    @staticmethod
    def of(x: Tensor, y: Tensor | None) -> _Units:
        """Return vectors (N, C) and (M, C), or None for the same ones, as torch's `normalize`."""
        # torch's norm is slow for vectors that are columns in memory.
        sides = []
        for v in (x,) if y is None else (x, y):
            lengths = v.square().sum(1, keepdim=True).sqrt_().clamp_(min=1e-12)
            sides.append((v / lengths, lengths))
        return _Units(*sides[0], *sides[-1])

    def comparison(self, distance: Any) -> Callable[[slice, Tensor], Tensor]:
        """Return a function that writes some rows of the matrix to a tensor."""
        if distance.is_inverted:
            return lambda part, out: torch.mm(self.rows[part], self.columns.T, out=out)
        column_squares = self.columns.square().sum(1)
        row_squares = column_squares
        if self.rows is not self.columns:
            row_squares = self.rows.square().sum(1)

        def compare(part: slice, out: Tensor) -> Tensor:
            rows = self.rows[part]
            torch.addmm(column_squares, rows, self.columns.T, alpha=-2, out=out)
            # What is within the rounding errors is 0, as between equal vectors.
            rounding = 4 * torch.finfo(out.dtype).eps
            F.threshold(out.add_(row_squares[part].unsqueeze(1)), rounding, 0, inplace=True)
            if has_root(distance):
                out.sqrt_()
            return out

        return compare

    def unscaled(
        self,
        vectors: Vectors,
        needed: tuple[bool, bool],
        of_products: Iterable[tuple[slice, Tensor]],
    ) -> list[Tensor | None]:
        """Return the gradients of vectors from those of the products of rows, without a factor."""
        _, y, distance = vectors
        of_rows = torch.empty_like(self.rows)
        of_columns = torch.zeros_like(self.columns)
        for part, of_product in of_products:
            torch.mm(of_product, self.columns, out=of_rows[part])
            if needed[1] or y is None:
                of_columns.addmm_(of_product.T, self.rows[part])
        if y is None:
            of_rows += of_columns
        factor = 1.0 if distance.is_inverted else -distance.power
        gradients: list[Tensor | None] = [None, None]
        sides = (of_rows, self.rows, self.lengths), (of_columns, self.columns, self.column_lengths)
        for i, (of_unit, unit, lengths) in enumerate(sides):
            if needed[i]:
                # The lengths of vectors are constant, so their derivatives cancel out.
                along = (of_unit * unit).sum(1, keepdim=True)
                gradients[i] = of_unit.addcmul_(unit, along, value=-1).div_(lengths / factor)
        return gradients


def has_root(distance: Any) -> bool:
    """Return whether a distance of unit vectors is a root, whose derivative is its inverse."""
    return not distance.is_inverted and distance.power == 1


def _plain(vectors: Vectors) -> Tensor:
    """Return a matrix that torch differentiates twice."""
    x, y, distance = vectors
    if distance.power == 1:
        mat: Tensor = distance(x, y)
        return mat
    # Without a root, which has no derivative at 0.
    a = F.normalize(x)
    b = a if y is None else F.normalize(y)
    return a.square().sum(1, keepdim=True) + b.square().sum(1) - 2 * a @ b.T


def _by_torch(
    vectors: Vectors, mat: Tensor, of_mat: Tensor, needed: tuple[bool, bool]
) -> list[Tensor | None]:
    """Return the gradients of vectors from that of their plain matrix, for a second derivative."""
    both = zip((vectors.x, vectors.y), needed, strict=True)
    inputs = [tensor for tensor, need in both if need and tensor is not None]
    gradients = iter(torch.autograd.grad(mat, inputs, of_mat, create_graph=True))
    return [next(gradients) if need else None for need in needed]


def labelled_pairs(labels: Tensor, ref_labels: Tensor, itself: int | None) -> Pairs:
    """Return the positive pairs of equal labels, ordered by anchor; all others are negative.

    `itself` is the column of the first anchor, if the anchors are among the columns: the pair of an
    anchor with itself is then neither positive nor negative.
    """
    ordered, order = torch.sort(ref_labels, stable=True)
    first = torch.searchsorted(ordered, labels)
    end = torch.searchsorted(ordered, labels, right=True)
    count = end - first
    rows = torch.repeat_interleave(count)
    # The k-th pair of an anchor is with the k-th item of its label.
    skipped = end - count.cumsum(0)
    columns = order[torch.arange(len(rows), device=rows.device) + skipped[rows]]
    equal = rows, columns
    if itself is not None:
        (other,) = torch.where(columns - rows != itself)
        rows = rows[other]
        columns = columns[other]
    return Pairs(
        rows,
        columns,
        equal,
        negatives=len(labels) * len(ref_labels) - len(equal[0]),
        itself=itself,
    )


def column_of_anchors(labels: Tensor, ref_labels: Tensor) -> int | None:
    """Return the column of the first anchor itself, or None if the anchors are not compared."""
    if ref_labels is labels:
        return 0
    # A process that has some rows of the batch compares them with the whole batch.
    return first_row()


def listed_pairs(mat: Tensor | Vectors, indices: Any, repeated: bool) -> Pairs:
    """Return the pairs of four index tensors: anchors, positives, anchors, negatives.

    If not `repeated`, a pair that is listed several times counts once.
    """
    a1, p, a2, n = indices
    if isinstance(mat, Vectors):
        counts = mat.x.new_zeros(len(mat.x), len(mat.x if mat.y is None else mat.y))
    else:
        counts = torch.zeros_like(mat)
    single = counts.new_ones(())
    counts.index_put_((a2, n), single, accumulate=repeated)
    # The logarithms of all entries would take long: most are of 0.
    weights = torch.full_like(counts, -torch.inf).index_put_((a2, n), counts[a2, n].log())
    if not repeated:
        a1, p = torch.where(counts.zero_().index_put_((a1, p), single))
    elif (a1[1:] < a1[:-1]).any():
        a1, order = torch.sort(a1, stable=True)
        p = p[order]
    return Pairs(a1, p, (a1[:0], p[:0]), weights=weights, negatives=len(a2))


def nearness(distance: Any, factor: float) -> float:
    """Return a factor of similarities, or its negative for distances."""
    if distance.is_inverted:
        return factor
    return -factor


def scaled(factor: float) -> Exponents:
    """Return exponents that are proportional to the matrix."""
    return lambda mat, rows: (mat.mul_(factor), factor)


def against_others(
    mat: Tensor | Vectors, exponents: Exponents, pairs: Pairs
) -> tuple[Tensor, Tensor]:
    """Return log Σ exp(exponents) of the negatives of each anchor, and the positive pairs' values.

    Args:
        mat: distances or similarities (N, M) of the anchors and the other items, or `compared`.
        exponents: the exponents as a function of the matrix.
        pairs: which pairs are positive and which are negative.

    Returns:
        The logarithms (N,), the lowest number for an anchor without negatives, and the entries (P,)
        of the matrix at the positive pairs.
    """
    sums, values, _ = _sums(mat, exponents, pairs, False)
    return sums, values


def excesses_over_others(
    mat: Tensor | Vectors, exponents: Exponents, pairs: Pairs
) -> tuple[Tensor, Tensor, Tensor]:
    """Return Σ max(0, exponent) of the negatives of each anchor instead of log Σ exp(exponent).

    Returns:
        The sums (N,), the positive pairs' values (P,), and the numbers (N,) of exponents above 0.
    """
    return _sums(mat, exponents, pairs, True)


def _sums(mat: Tensor | Vectors, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    vectors = (None, *mat) if isinstance(mat, Vectors) else (mat, None, None, None)
    sums: tuple[Tensor, Tensor, Tensor] = _Sums.apply(*vectors, *arguments)
    return sums


class _Sums(torch.autograd.Function):
    """Sums of a matrix, or of vectors whose matrix is compared, summed and differentiated by rows.

    Each row of the matrix is replaced by the derivative of its sum, or of its sum of exponentials.
    """

    @staticmethod
    def forward(
        ctx: Any,
        mat: Tensor | None,
        x: Tensor,
        y: Tensor | None,
        distance: Any,
        exponents: Exponents,
        pairs: Pairs,
        hinge: bool,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        units: Sequence[Tensor] = ()
        if mat is None:
            units = _Units.of(x, y)
            compare = units.comparison(distance)
            slopes = x.new_empty(len(x), len(units.columns))
        else:
            slopes = torch.empty_like(mat)
        low = _lowest_exponent(slopes)
        lowest = torch.finfo(slopes.dtype).min
        values = []
        totals = []
        tops = []
        counts = []
        centers = []
        scale = 1.0
        for rows, not_negative, positive, _ in _blocks(slopes, pairs):
            block = slopes[rows]
            if mat is None:
                compare(rows, block)
            else:
                block.copy_(mat[rows])
            shares = None
            if pairs.centers > 1:
                shares = block.view(len(block), pairs.centers, -1)
                block = shares.amax(1)
                torch.eq(shares, block.unsqueeze(1), out=shares)
                anchors, items = positive
                center = shares[anchors, :, items].argmax(1)
                centers.append(items + center * block.shape[1])
            values.append(block[positive])
            roots = None
            if distance is not None and has_root(distance):
                # A distance of 0 has no derivative.
                roots = F.threshold(block, 0, torch.inf)
            powers, derivative = _of_negatives(block, exponents, pairs, rows, not_negative)
            if hinge:
                totals.append(powers.relu_().sum(1))
                counts.append(powers.sign_().sum(1))
            else:
                top = powers.amax(1, keepdim=True).clamp_(min=lowest)
                # Lower exponents change no digit of a sum. A CPU computes exponentials that are
                # subnormal or round to 0 twenty to eighty times as slowly.
                powers.sub_(top).clamp_(min=low).exp_()
                totals.append(powers.sum(1))
                tops.append(top)
                F.threshold(powers, 1.01 * math.exp(low), 0, inplace=True)
            if roots is not None:
                powers = torch.div(powers, roots, out=block)
            if isinstance(derivative, Tensor):
                powers.mul_(derivative)
            else:
                scale = derivative
            if shares is not None:
                # Equal columns share the derivative.
                shares.mul_(powers.div_(shares.sum(1)).unsqueeze(1))
            elif powers is not block:
                block.copy_(powers)
        total = torch.cat(totals)
        columns = torch.cat(centers) if centers else pairs.positives
        ctx.arguments = distance, exponents, pairs, hinge, scale
        of_values = torch.cat(values)
        if hinge:
            counted = torch.cat(counts).to(torch.int64)
            ctx.mark_non_differentiable(counted)
            ctx.save_for_backward(mat, x, y, slopes, columns, of_values, None, total, *units)
            return total, of_values, counted
        sums = total.log().add_(torch.cat(tops).squeeze(1)).clamp_(min=lowest)
        ctx.save_for_backward(mat, x, y, slopes, columns, of_values, total, sums, *units)
        return sums, of_values, None

    @staticmethod
    def backward(ctx: Any, *of_outputs: Tensor) -> tuple[Tensor | None, ...]:
        of_sums, of_values, _ = of_outputs
        mat, x, y, slopes, columns, values, total, sums, *units = ctx.saved_tensors
        distance, exponents, pairs, hinge, scale = ctx.arguments
        vectors = Vectors(x, y, distance)
        needed = ctx.needs_input_grad[1:3]
        unused = (None,) * 4
        if torch.is_grad_enabled():
            # A second derivative needs the exponentials.
            matrix = whole = _plain(vectors) if mat is None else mat
            if pairs.centers > 1:
                matrix = whole.view(len(whole), pairs.centers, -1).amax(1)
            every = slice(None)
            powers, factors = _of_negatives(
                matrix.clone(), exponents, pairs, every, pairs.not_negative
            )
            if hinge:
                counts = powers > 0
                shares = counts.to(powers.dtype)
            else:
                powers = powers - sums.unsqueeze(1)
                counts = powers > _lowest_exponent(powers)
                shares = powers.exp()
            # `where` keeps out the derivative of the distance of an item from itself, which is NaN.
            gradient = torch.where(counts, shares * (of_sums.unsqueeze(1) * factors), 0)
            # A positive pair may be listed twice.
            places = pairs.anchors, pairs.positives
            gradient.index_put_(places, of_values, accumulate=True)
            if mat is None:
                return (None, *_by_torch(vectors, matrix, gradient, needed), *unused)
            if matrix is not whole:
                (gradient,) = torch.autograd.grad(matrix, whole, gradient, create_graph=True)
            return (gradient, None, None, *unused)
        # No product is subnormal, which would take a CPU long.
        limit = math.sqrt(torch.finfo(slopes.dtype).tiny)
        factors = of_sums.unsqueeze(1) * scale
        if not hinge:
            factors /= total.unsqueeze(1)
        factors = F.hardshrink(factors, limit)
        if distance is not None and has_root(distance):
            of_values = of_values / F.threshold(values, 0, torch.inf)
        of_values = F.hardshrink(of_values, limit)

        if mat is not None:
            gradient = slopes * factors
            gradient.index_put_((pairs.anchors, columns), of_values, accumulate=True)
            return (gradient, None, None, *unused)

        def gradients() -> Iterator[tuple[slice, Tensor]]:
            for rows, _, (anchors, _), part in _blocks(slopes, pairs):
                gradient = slopes[rows] * factors[rows]
                places = anchors, columns[part]
                yield rows, gradient.index_put_(places, of_values[part], accumulate=True)

        return (None, *_Units(*units).unscaled(vectors, needed, gradients()), *unused)


Places = tuple[Tensor, Tensor]


def _blocks(mat: Tensor, pairs: Pairs) -> Iterator[tuple[slice, Places, Places, slice]]:
    """Yield rows of a matrix of pairs, the places in them that are not negative and those that are
    positive, and which of all positive pairs these are.
    """
    step = len(mat)
    # A GPU computes faster the more pairs it has at once.
    if mat.device.type == "cpu":
        step = max(1, ENTRIES * pairs.centers // max(1, mat.shape[1]))
    if step >= len(mat):
        every = slice(None)
        yield every, pairs.not_negative, (pairs.anchors, pairs.positives), every
        return
    starts = torch.arange(0, len(mat) + step, step)
    lists = pairs.not_negative, (pairs.anchors, pairs.positives)
    ends = [torch.searchsorted(rows, starts.to(rows.dtype)).tolist() for rows, _ in lists]
    for i, start in enumerate(starts[:-1].tolist()):
        parts = [slice(end[i], end[i + 1]) for end in ends]
        places = [(r[part] - start, c[part]) for (r, c), part in zip(lists, parts, strict=True)]
        yield slice(start, start + step), places[0], places[1], parts[1]


def _lowest_exponent(mat: Tensor) -> float:
    return 2 * math.log(torch.finfo(mat.dtype).eps)


def _of_negatives(
    block: Tensor,
    exponents: Exponents,
    pairs: Pairs,
    rows: slice,
    not_negative: tuple[Tensor, Tensor],
) -> tuple[Tensor, Tensor | float]:
    """Return the exponents of rows, −∞ for pairs that are not negative, and their derivative."""
    powers, slopes = exponents(block, rows)
    if pairs.weights is not None:
        powers += pairs.weights[rows]
    return powers.index_put_(not_negative, powers.new_full((), -torch.inf)), slopes


def log_sums(values: Tensor, segment: Tensor, segments: int) -> Tensor:
    """Return log Σ exp of the values of each segment; the lowest number for an empty segment."""
    sums: Tensor = _LogSums.apply(values, segment, segments)
    return sums


class _LogSums(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, segment: Tensor, segments: int) -> Tensor:
        # With −∞ in place of the lowest number, `logaddexp` of two empty segments would have a NaN
        # gradient.
        lowest = torch.finfo(values.dtype).min
        top = values.new_full((segments,), lowest).scatter_reduce_(0, segment, values, "amax")
        powers = (values - top[segment]).exp_()
        total = values.new_zeros(segments).index_add_(0, segment, powers)
        sums = total.log_().add_(top).clamp_(min=lowest)
        ctx.save_for_backward(values, segment, sums)
        return sums

    @staticmethod
    def backward(ctx: Any, of_sums: Tensor) -> tuple[Tensor | None, ...]:
        values, segment, sums = ctx.saved_tensors
        shares = torch.exp(values - sums[segment])
        return of_sums[segment] * shares, None, None


def reducer_of(loss: Any, name: str) -> Any:
    """Return the reducer of a sub-loss, also while processes divide the loss."""
    reducer = loss.reducer
    # `Sums` stands in for the reducer if processes divide the anchors.
    if isinstance(reducer, Sums):
        reducer = reducer.inner
    if isinstance(reducer, reducers.MultipleReducers):
        reducer = dict(reducer.reducers).get(name, reducer.default_reducer)
    return reducer


def loss_of_sum(loss: Any, name: str, total: Tensor, count: Tensor) -> Any:
    """Return a sub-loss by name, from the sum and the count of the numbers that are reduced."""
    if isinstance(loss.reducer, Sums):
        return {name: summed(total, count)}
    if type(reducer_of(loss, name)) is not reducers.SumReducer:
        total = total / count.clamp(min=1)
    return reduced_loss(total, name)
