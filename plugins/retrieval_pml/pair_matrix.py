"""The engine of losses and miners: the batch's matrix, its pairs, and formulas on blocks of rows.

A formula works on as many numbers as a processor's cache holds. Nothing of a block is kept but its
rows' losses and the gradient, so that a loss needs the matrix, one more, and no lists of indices.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import cached_property
from threading import local
from typing import Any

import torch
from pytorch_metric_learning import distances
from pytorch_metric_learning.utils import loss_and_miner_utils
from retrieval.plugin import first_row
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional

_kept = local()
_LONG = 256
"""From this many numbers on, products cost more than copies of them."""
_EPS = 1e-12
_DIRECT = 25
"""Up to so many items torch subtracts one vector from the other, which is exact where they are
almost the same.
"""
_FEW = 32
"""A list of pairs is quicker than a mask where one pair of so many is in it."""
ENTRIES = 2**17
"""Numbers that are worked on at a time."""
Plain = Callable[..., Any]
Fused = Callable[..., Any]
LEAST = 2e-38
"""Smaller numbers become 0: processors take 60 times as long for those below 1e-38."""


def similarities(distance: Any, embeddings: Tensor, ref_emb: Tensor) -> Tensor:
    """Return a distance's matrix (N, M).

    Where both sides are one, its gradient takes one product instead of two. A matrix that was made
    without a gradient, as a miner's is, is kept as long as its embeddings are there and unchanged,
    until it is asked for with a gradient: a loss on the pairs of a miner takes the miner's.
    """
    if ref_emb is not embeddings:
        mat: Tensor = distance(embeddings, ref_emb)
        return mat
    kind = _kind(distance)
    if kind is None or (kind[0] == "euclidean" and len(embeddings) <= _DIRECT):
        mat = distance(embeddings)
        return mat
    function = _Gram if kind[0] == "gram" else _Euclidean
    if not torch.is_grad_enabled():
        mat = function.apply(*_vectors(distance, embeddings), [], distance.power)
        _kept.matrix = weakref.ref(embeddings, _forget), embeddings._version, kind, mat
        return mat
    kept = _take(embeddings, kind)
    result: Tensor = function.apply(*_vectors(distance, embeddings), kept, distance.power)
    return result


def _vectors(distance: Any, embeddings: Tensor) -> tuple[Tensor, bool]:
    """Return vectors, and whether they are multiplied at length 1."""
    if distance.p == 2:
        return embeddings, distance.normalize_embeddings
    return distance.maybe_normalize(embeddings), False


def unit(vectors: Tensor, dim: int, scale: float = 1.0) -> Tensor:
    """Return vectors at one length; the gradient takes half the passes of torch's."""
    vectors_of_length: Tensor = _Unit.apply(vectors, dim, scale)
    return vectors_of_length


def lengths_of(vectors: Tensor, dim: int) -> Tensor:
    """Return vectors' lengths; torch's own norm is slow along the first of two dimensions."""
    return (
        torch.linalg.vector_norm(vectors, dim=1) if dim == 1 else vectors.square().sum(dim).sqrt_()
    )


class _Unit(torch.autograd.Function):
    """See `unit`."""

    @staticmethod
    def forward(ctx: Any, vectors: Tensor, dim: int, scale: float) -> Tensor:
        scaled, lengths = _at_length_1(vectors, dim)
        ctx.save_for_backward(vectors, scaled, lengths)
        ctx.constants = dim, scale
        return scaled if scale == 1 else scaled * scale

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        vectors, scaled, lengths = ctx.saved_tensors
        dim, scale = ctx.constants
        gradient = gradient if scale == 1 else gradient * scale
        if torch.is_grad_enabled():  # the gradient will be differentiated
            scaled = functional.normalize(vectors, dim=dim, eps=_EPS)
        return _through(gradient, vectors, scaled, lengths, dim), None, None


def _at_length_1(vectors: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Return vectors at length 1, and their lengths; both of two dimensions."""
    lengths = lengths_of(vectors, dim).unsqueeze(dim)
    return vectors / lengths.clamp(min=_EPS), lengths  # as torch's, to the last bit


def _through(
    gradient: Tensor, vectors: Tensor, scaled: Tensor, lengths: Tensor, dim: int
) -> Tensor:
    """Return the gradient to vectors of one to `scaled`, these vectors at length 1."""
    if torch.is_grad_enabled():
        return torch.autograd.grad(scaled, vectors, gradient, create_graph=True)[0]
    # a vector that is too short to have a direction is only divided
    inner = (gradient * scaled).sum(dim, keepdim=True).masked_fill_(lengths < _EPS, 0)
    return torch.addcmul(gradient, scaled, inner, value=-1).div_(lengths.clamp(min=_EPS))


def products(x: Tensor) -> Tensor:
    """Return x xᵀ (N, N) of vectors x (N, C); its gradient takes one product."""
    gram: Tensor = _Gram.apply(x, False, [], 1)
    return gram


def _kind(distance: Any) -> tuple[Any, ...] | None:
    """Return what two distances of one matrix have in common; None for those unknown here."""
    if distance.collect_stats:
        return None
    norm = (distance.normalize_embeddings, distance.p if distance.normalize_embeddings else None)
    if (
        type(distance) in (distances.CosineSimilarity, distances.DotProductSimilarity)
        and distance.power == 1
    ):
        return ("gram", *norm)
    if type(distance) is distances.LpDistance and distance.p == 2 and distance.power in (1, 2):
        return ("euclidean", *norm, distance.power)
    return None


def _take(embeddings: Tensor, kind: tuple[Any, ...]) -> list[Tensor]:
    """Return the matrix that is kept of these embeddings, if any, and keep it no longer."""
    entry = getattr(_kept, "matrix", None)
    _kept.matrix = None
    if entry is None or entry[0]() is not embeddings or entry[1:3] != (embeddings._version, kind):
        return []
    return [entry[3]]


def _forget(gone: Any) -> None:
    entry = getattr(_kept, "matrix", None)
    if entry is not None and entry[0] is gone:
        _kept.matrix = None


class _Gram(torch.autograd.Function):
    """x xᵀ, of vectors at length 1 (`scaled`) or as they are."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scaled: bool, known: list[Tensor], power: float) -> Tensor:
        vectors, lengths = _at_length_1(x, 1) if scaled else (x, None)
        ctx.save_for_backward(x, vectors, lengths)
        return known.pop() if known else _with_itself(vectors)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        x, vectors, lengths = ctx.saved_tensors
        if lengths is None:
            return _with_transposed(gradient) @ vectors, None, None, None
        if torch.is_grad_enabled():  # the gradient will be differentiated
            vectors = functional.normalize(x, dim=1, eps=_EPS)
        return (
            _through(_with_transposed(gradient) @ vectors, x, vectors, lengths, 1),
            None,
            None,
            None,
        )


class _Euclidean(torch.autograd.Function):
    """‖xᵢ − xⱼ‖ or its square, of vectors at length 1 (`scaled`) or as they are."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scaled: bool, known: list[Tensor], power: float) -> Tensor:
        vectors, lengths = _at_length_1(x, 1) if scaled else (x, None)
        if known:
            mat = known.pop()
        else:
            mat = torch.cdist(vectors, vectors)
            mat = mat if power == 1 else mat.square_()
        ctx.save_for_backward(x, vectors, lengths, mat)
        ctx.power = power
        return mat

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        x, vectors, lengths, mat = ctx.saved_tensors
        if lengths is not None and torch.is_grad_enabled():  # the gradient will be differentiated
            vectors = functional.normalize(x, dim=1, eps=_EPS)
        slopes = gradient / mat.masked_fill(mat == 0, torch.inf) if ctx.power == 1 else 2 * gradient
        slopes = _with_transposed(slopes)
        back = slopes.sum(1, keepdim=True) * vectors - slopes @ vectors
        return (
            (back if lengths is None else _through(back, x, vectors, lengths, 1)),
            None,
            None,
            None,
        )


def _with_itself(x: Tensor) -> Tensor:
    """Return x xᵀ (N, N) of vectors (N, C), by half the products where they are long."""
    if x.device.type != "cpu" or x.shape[1] < _LONG or len(x) < _LONG:
        return x @ x.T
    gram = torch.empty(len(x), len(x), dtype=x.dtype)
    step = -(-len(x) // 8)
    for start in range(0, len(x), step):
        stop = start + step
        torch.mm(x[start:stop], x[start:].T, out=gram[start:stop, start:])
        gram[stop:, start:stop] = gram[start:stop, stop:].T
    return gram


def _with_transposed(mat: Tensor) -> Tensor:
    """Return a matrix plus its transposed one; torch copies that by tiles."""
    return mat.T.clone(memory_format=torch.contiguous_format).add_(mat)


class Pairs:
    """Which pairs (N, M) are positive and which negative: by labels, or as a miner says.

    Args:
        labels: (N,).
        ref_labels: (M,); `labels` itself where the batch is compared with itself.
    """

    def __init__(self, labels: Tensor, ref_labels: Tensor) -> None:
        self.labels, self.ref_labels = labels, ref_labels
        # the place of each row's item among the others; the rows may be a part of the reference set
        self.own = 0 if ref_labels is labels else first_row()
        self.listed: tuple[Tensor, Tensor] | None = None
        # the rows that were asked for last, and their pairs of one label
        self._last: tuple[tuple[int, int], tuple[Tensor, Tensor]] | None = None

    @classmethod
    def mined(cls, indices: Any, shape: tuple[int, int], labels: Any, ref_labels: Any) -> Pairs:
        """Return the pairs of a miner's indices."""
        a1, p, a2, n = loss_and_miner_utils.convert_to_pairs(indices, labels, ref_labels)
        positive = torch.zeros(shape, dtype=torch.bool, device=a1.device)
        negative = torch.zeros_like(positive)
        positive[a1, p] = True
        negative[a2, n] = True
        assert not negative[a1, p].any(), "Each pair should be either be positive or negative"
        pairs = cls(positive[:, 0], positive[0])
        pairs.listed = positive, negative
        return pairs

    def of(self, rows: slice) -> tuple[Tensor, Tensor]:
        """Return some rows' masks, both bool."""
        if self.listed is not None:
            return self.listed[0][rows], self.listed[1][rows]
        same = self.labels[rows].unsqueeze(1) == self.ref_labels.unsqueeze(0)
        other = ~same
        if self.own is not None:
            same.diagonal(self.own + (rows.start or 0)).fill_(False)
        return same, other

    def positives(self, rows: slice | None = None) -> tuple[Tensor, Tensor]:
        """Return the positive pairs (P,), row by row: of all rows, or of some."""
        if self.listed is not None:
            row, column = torch.where(self.listed[0][slice(None) if rows is None else rows])
            return row, column
        row, column = self._alike(rows)
        if self.own is None:
            return row, column
        differ = column - row != self.own + (rows.start or 0 if rows else 0)
        return row[differ], column[differ]

    def counts(self) -> tuple[Tensor, Tensor]:
        """Return how many positives and how many negatives each row has, each (N,)."""
        if self.listed is not None:
            return self.listed[0].sum(1), self.listed[1].sum(1)
        counts = self._runs[2]
        positives = counts
        if self.own is not None:
            positives = (
                counts - (self.labels == self.ref_labels[self.own : self.own + len(counts)]).long()
            )
        return positives, len(self.ref_labels) - counts

    def leave_negatives(self, values: Tensor, rows: slice, value: float) -> None:
        """Overwrite those of some rows' values (R, M) that belong to no negative pair."""
        if self.listed is not None or self._ends[-1] * _FEW > len(self.labels) * len(
            self.ref_labels
        ):
            values.masked_fill_(~self.of(rows)[1], value)
        else:
            values[self._alike(rows)] = value

    def _alike(self, rows: slice | None = None) -> tuple[Tensor, Tensor]:
        """Return the pairs (P,) of one label, an item and itself among them, row by row."""
        start, stop, _ = (rows or slice(None)).indices(len(self.labels))
        if self._last is not None and self._last[0] == (start, stop):
            return self._last[1]
        order, first, counts = self._runs
        first, counts = first[start:stop], counts[start:stop]
        total = self._ends[stop] - self._ends[start]
        row = torch.repeat_interleave(counts, output_size=total)
        begins = (first - counts.cumsum(0)).add_(counts).index_select(0, row)
        pairs = row, order.index_select(0, begins.add_(torch.arange(total, device=row.device)))
        self._last = (start, stop), pairs
        return pairs

    @cached_property
    def _runs(self) -> tuple[Tensor, Tensor, Tensor]:
        """The reference items by label (M,), and each row's run there: begin and length (N,)."""
        known, order = self.ref_labels.sort(stable=True)
        first = torch.searchsorted(known, self.labels)
        return order, first, torch.searchsorted(known, self.labels, right=True) - first

    @cached_property
    def _ends(self) -> list[int]:
        """How many pairs of one label the rows before each row have, and all together."""
        return [0, *self._runs[2].cumsum(0).tolist()]


def blocks(rows: int, columns: int, repeats: Tensor | None = None) -> list[slice]:
    """Return slices of rows that make at most `ENTRIES` numbers, or one row.

    `repeats` (rows,) says how often a row is repeated; 1 by default.
    """
    if repeats is None:
        step = max(1, ENTRIES // max(columns, 1))
        return [slice(start, min(start + step, rows)) for start in range(0, rows, step)]
    parts, start, filled = [], 0, 0
    for row, count in enumerate(repeats.tolist()):
        if row > start and (filled + count) * columns > ENTRIES:
            parts.append(slice(start, row))
            start, filled = row, 0
        filled += count
    return [*parts, slice(start, rows)] if rows else []


def by_rows(
    mat: Tensor,
    pairs: Pairs,
    plain: Plain,
    *inputs: Tensor,
    fused: Fused | None = None,
    parts: list[slice] | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the losses (N,) of a matrix's rows, and what else is counted in each (N,).

    Args:
        mat: (N, M) similarities or distances.
        pairs: which of its pairs are positive and which negative.
        plain: of some rows (R, M), their two masks, and their rows of `inputs`: their losses (R,),
            differentiable, and where there is something to count a second (R,), which is not. Each
            is of its row alone.
        inputs: more of each row, each (N, …).
        fused: of some rows (R, M), the pairs, which rows they are, a tensor (R, M) that it fills
            with the losses' derivatives, and their rows of `inputs`: what `plain` returns and the
            losses' derivatives by each of `inputs`, instead of `plain` where the gradient is not
            differentiated again.
        parts: the rows of each block; by default as many as `ENTRIES` allow.
    """
    losses, counts, _ = rows_and_pairs(mat, pairs, None, plain, *inputs, fused=fused, parts=parts)
    return losses, counts


def rows_and_pairs(
    mat: Tensor,
    pairs: Pairs,
    listed: tuple[Tensor, Tensor] | None,
    plain: Plain,
    *inputs: Tensor,
    fused: Fused | None = None,
    parts: list[slice] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return what `by_rows` does, and the numbers (P,) of listed pairs, by one gradient."""
    parts = blocks(*mat.shape) if parts is None else parts
    results: tuple[Tensor, Tensor, Tensor] = _ByRows.apply(
        mat, pairs, listed, plain, fused, parts, *inputs
    )
    return results


def _both(result: Any) -> tuple[Tensor, Tensor]:
    if isinstance(result, tuple):
        return result[0], result[1]
    return result, result.new_zeros(len(result), dtype=torch.int64)


def _as_is(tensor: Tensor) -> Tensor:
    return tensor


class _ByRows(torch.autograd.Function):
    """See `by_rows`."""

    @staticmethod
    def forward(
        ctx: Any,
        mat: Tensor,
        pairs: Pairs,
        listed: tuple[Tensor, Tensor] | None,
        plain: Plain,
        fused: Fused | None,
        parts: list[slice],
        *inputs: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        needed = [ctx.needs_input_grad[0], *ctx.needs_input_grad[6:]]
        empty = torch.zeros if fused is None else torch.empty
        slopes = [
            empty(x.shape, dtype=x.dtype, device=x.device) if want else None
            for x, want in zip((mat, *inputs), needed, strict=True)
        ]
        losses, counts = (
            mat.new_zeros(len(mat)),
            torch.zeros(len(mat), dtype=torch.int64, device=mat.device),
        )
        for part in parts:
            if fused is not None:
                rows = mat[part]
                out = (
                    torch.empty(rows.shape, dtype=rows.dtype, device=rows.device)
                    if slopes[0] is None
                    else slopes[0][part]
                )
                result = fused(rows, pairs, part, out, *(x[part] for x in inputs))
                losses[part], counts[part] = _both(result)
                for whole, slope in zip(slopes[1:], result[2:] if inputs else (), strict=True):
                    if whole is not None:
                        whole[part] = slope
                continue
            masks = pairs.of(part)
            # a checkpoint around all of this would have every tensor that is saved here computed
            # anew, amid this very forward
            with torch.enable_grad(), saved_tensors_hooks(_as_is, _as_is):
                leaves_in = [
                    x[part].detach().requires_grad_(want)
                    for x, want in zip((mat, *inputs), needed, strict=True)
                ]
                value, count = _both(plain(leaves_in[0], *masks, *leaves_in[1:]))
                losses[part], counts[part] = value.detach(), count
                leaves = [x for x in leaves_in if x.requires_grad]
                if not value.requires_grad:
                    continue
                gradients = iter(torch.autograd.grad(value.sum(), leaves, allow_unused=True))
            for whole in slopes:
                if whole is not None and (gradient := next(gradients)) is not None:
                    whole[part] = gradient
        ctx.save_for_backward(mat, *inputs, *(slope for slope in slopes if slope is not None))
        ctx.constants = pairs, listed, plain, needed
        ctx.mark_non_differentiable(counts)
        return losses, counts, mat.new_zeros(0) if listed is None else mat[listed]

    @staticmethod
    def backward(
        ctx: Any, gradient: Tensor, _: Any, of_listed: Tensor
    ) -> tuple[Tensor | None, ...]:
        pairs, listed, plain, needed = ctx.constants
        saved = ctx.saved_tensors
        inputs, slopes = saved[: len(needed)], iter(saved[len(needed) :])
        if torch.is_grad_enabled():  # the gradient will be differentiated

            def formula(mat: Tensor, *more: Tensor) -> tuple[Tensor, Tensor]:
                losses, _ = _both(plain(mat, *pairs.of(slice(None)), *more))
                return losses, mat.flatten()[:0] if listed is None else mat[listed]

            slopes_found = derivatives(formula, inputs, (gradient, of_listed))
        else:
            slopes_found = [
                next(slopes) * gradient.view(-1, *[1] * (x.ndim - 1)) if want else None
                for x, want in zip(inputs, needed, strict=True)
            ]
            if listed is not None and slopes_found[0] is not None:
                slopes_found[0][listed] += of_listed
        return slopes_found[0], None, None, None, None, None, *slopes_found[1:]


def derivatives(
    formula: Plain, inputs: Sequence[Tensor | None], gradient: Any
) -> list[Tensor | None]:
    """Return a formula's derivatives in a form that can be differentiated again.

    An input made of another counts for itself alone; None is handed on.
    """
    # aliases: the way from one input to another ends at them
    aliases = [None if x is None else x.view_as(x) for x in inputs]
    leaves = [x for x in aliases if x is not None and x.requires_grad]
    slopes = iter(
        torch.autograd.grad(
            formula(*aliases), leaves, gradient, create_graph=True, materialize_grads=True
        )
    )
    return [next(slopes) if x is not None and x.requires_grad else None for x in aliases]


class _Lse(torch.autograd.Function):
    """See `lse`."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, mask: Tensor) -> Tensor:
        kept = values.masked_fill(~mask, torch.finfo(values.dtype).min)
        top = kept.amax(1, keepdim=True)
        # what is smaller adds nothing to a sum of 1 or more, and processors are slow at the
        # smallest numbers
        weights = kept.sub_(top).clamp_(min=-87).exp_()
        total = weights.sum(1, keepdim=True)
        sums = (top + total.log()).squeeze(1)
        ctx.save_for_backward(values, mask, weights.div_(total))
        return sums

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        values, mask, weights = ctx.saved_tensors
        if torch.is_grad_enabled():  # the gradient will be differentiated
            weights = torch.softmax(values.masked_fill(~mask, torch.finfo(values.dtype).min), 1)
        return weights * gradient.unsqueeze(1), None


def lse(values: Tensor, mask: Tensor) -> Tensor:
    """Return log Σ exp of each row's values in the mask (N,); the lowest number for none.

    The gradient of a row that has none is to be 0.
    """
    sums: Tensor = _Lse.apply(values, mask)
    return sums


def lse_of_few(values: Tensor, mask: Tensor) -> Tensor:
    """Return what `lse` returns, from a list: for masks that leave out most."""
    row, column = torch.where(mask)
    return segment_logsumexp(values[row, column], row, len(values))


def segment_logsumexp(values: Tensor, segment: Tensor, segments: int) -> Tensor:
    """Return log Σ exp of each segment's values; the lowest number for an empty one."""
    lowest = torch.finfo(values.dtype).min
    top = values.new_full((segments,), lowest).scatter_reduce(0, segment, values.detach(), "amax")
    total = values.new_zeros(segments).index_add(0, segment, torch.exp(values - top[segment]))
    empty = total == 0
    return torch.where(empty, lowest, top + torch.log(total.masked_fill(empty, 1)))


def softmax_rows(exponents: Tensor) -> tuple[Tensor, Tensor]:
    """Return each row's softmax and log Σ exp."""
    shares = torch.softmax(exponents, 1)
    return shares, exponents.amax(1) - shares.amax(1).log_()


def exp_(exponents: Tensor) -> Tensor:
    """Exponentiate in place, and return it; what is below e⁻⁸⁷ becomes 0; see `LEAST`."""
    return torch.threshold_(exponents.clamp_(min=-87).exp_(), LEAST, 0.0)
