"""Matrices of distances and similarities: those of a batch with itself by half the products, one
for a loss and its miner.
"""

from __future__ import annotations

import weakref
from threading import local
from typing import Any

import torch
from pytorch_metric_learning import distances
from torch import Tensor
from torch.nn import functional

_kept = local()
_LONG = 256
"""From this many numbers on, products cost more than copies of them."""
_EPS = 1e-12
_DIRECT = 25
"""Up to so many items torch subtracts one vector from the other, which is exact where they are
almost the same.
"""


def similarities(distance: Any, embeddings: Tensor, ref_emb: Tensor) -> Tensor:
    """Return a distance's matrix (N, M).

    Where both sides are one, its gradient takes one product instead of two. A matrix that was made
    without a gradient, as a miner's is, is kept as long as its embeddings are there and unchanged,
    until it is asked for with a gradient: a loss on the pairs of a miner takes the miner's.

    Args:
        distance: one of pytorch-metric-learning's.
        embeddings: (N, C).
        ref_emb: (M, C); `embeddings` itself where these are compared with themselves.
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
        _kept.made = weakref.ref(embeddings, _forget), embeddings._version, kind, mat
        return mat
    return function.apply(*_vectors(distance, embeddings), _taken(embeddings, kind), distance.power)  # type: ignore[no-any-return]


def _vectors(distance: Any, embeddings: Tensor) -> tuple[Tensor, bool]:
    """Return vectors, and whether they are multiplied at length 1."""
    if distance.p == 2:
        return embeddings, distance.normalize_embeddings
    return distance.maybe_normalize(embeddings), False


def unit(vectors: Tensor, dim: int, scale: float = 1.0) -> Tensor:
    """Return vectors at one length, as `torch.nn.functional.normalize` does; its gradient takes
    half the passes.

    Args:
        vectors: of two dimensions.
        dim: along which they lie.
        scale: the length.
    """
    found: Tensor = _Unit.apply(vectors, dim, scale)
    return found


def lengths_of(vectors: Tensor, dim: int) -> Tensor:
    """Return vectors' lengths; torch's own norm is slow along the first of two dimensions."""
    return (
        torch.linalg.vector_norm(vectors, dim=1) if dim == 1 else vectors.square().sum(dim).sqrt_()
    )


class _Unit(torch.autograd.Function):
    """See `unit`."""

    @staticmethod
    def forward(ctx: Any, vectors: Tensor, dim: int, scale: float) -> Tensor:
        found, lengths = _at_length_1(vectors, dim)
        ctx.save_for_backward(vectors, found, lengths)
        ctx.made = dim, scale
        return found if scale == 1 else found * scale

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        vectors, found, lengths = ctx.saved_tensors
        dim, scale = ctx.made
        gradient = gradient if scale == 1 else gradient * scale
        if torch.is_grad_enabled():  # the gradient will be differentiated
            found = functional.normalize(vectors, dim=dim, eps=_EPS)
        return _through(gradient, vectors, found, lengths, dim), None, None


def _at_length_1(vectors: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Return vectors at length 1, and their lengths; both of two dimensions."""
    lengths = lengths_of(vectors, dim).unsqueeze(dim)
    return vectors / lengths.clamp(min=_EPS), lengths  # as torch's, to the last bit


def _through(gradient: Tensor, vectors: Tensor, found: Tensor, lengths: Tensor, dim: int) -> Tensor:
    """Return the gradient to vectors of one to `found`, these at length 1; where it will be
    differentiated, `found` is made of them.
    """
    if torch.is_grad_enabled():
        return torch.autograd.grad(found, vectors, gradient, create_graph=True)[0]
    # a vector that is too short to have a direction is only divided
    inner = (gradient * found).sum(dim, keepdim=True).masked_fill_(lengths < _EPS, 0)
    return torch.addcmul(gradient, found, inner, value=-1).div_(lengths.clamp(min=_EPS))


def products(x: Tensor) -> Tensor:
    """Return x xᵀ (N, N) of vectors x (N, C); its gradient takes one product."""
    found: Tensor = _Gram.apply(x, False, [], 1)
    return found


def _kind(distance: Any) -> tuple[Any, ...] | None:
    """Return what two distances have in common that make one matrix; None of those whose gradient
    is not known here.
    """
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


def _taken(embeddings: Tensor, kind: tuple[Any, ...]) -> list[Tensor]:
    """Return the matrix that is kept of these embeddings, if there is one, and keep it no longer."""
    made = getattr(_kept, "made", None)
    _kept.made = None
    if made is None or made[0]() is not embeddings or made[1:3] != (embeddings._version, kind):
        return []
    return [made[3]]


def _forget(gone: Any) -> None:
    made = getattr(_kept, "made", None)
    if made is not None and made[0] is gone:
        _kept.made = None


class _Gram(torch.autograd.Function):
    """x xᵀ, of vectors at length 1 (`scaled`) or as they are."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scaled: bool, known: list[Tensor], power: float) -> Tensor:
        found, lengths = _at_length_1(x, 1) if scaled else (x, None)
        ctx.save_for_backward(x, found, lengths)
        return known.pop() if known else _with_itself(found)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        x, found, lengths = ctx.saved_tensors
        if lengths is None:
            return _with_transposed(gradient) @ found, None, None, None
        if torch.is_grad_enabled():  # the gradient will be differentiated
            found = functional.normalize(x, dim=1, eps=_EPS)
        return _through(_with_transposed(gradient) @ found, x, found, lengths, 1), None, None, None


class _Euclidean(torch.autograd.Function):
    """‖xᵢ − xⱼ‖ or its square, of vectors at length 1 (`scaled`) or as they are."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scaled: bool, known: list[Tensor], power: float) -> Tensor:
        found, lengths = _at_length_1(x, 1) if scaled else (x, None)
        if known:
            mat = known.pop()
        else:
            mat = torch.cdist(found, found)
            mat = mat if power == 1 else mat.square_()
        ctx.save_for_backward(x, found, lengths, mat)
        ctx.power = power
        return mat

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        x, found, lengths, mat = ctx.saved_tensors
        if lengths is not None and torch.is_grad_enabled():  # the gradient will be differentiated
            found = functional.normalize(x, dim=1, eps=_EPS)
        slopes = gradient / mat.masked_fill(mat == 0, torch.inf) if ctx.power == 1 else 2 * gradient
        slopes = _with_transposed(slopes)
        back = slopes.sum(1, keepdim=True) * found - slopes @ found
        return (back if lengths is None else _through(back, x, found, lengths, 1)), None, None, None


def _with_itself(x: Tensor) -> Tensor:
    """Return x xᵀ (N, N) of vectors (N, C); long ones in stripes, of which what lies below the
    diagonal is copied.
    """
    if x.device.type != "cpu" or x.shape[1] < _LONG or len(x) < _LONG:
        return x @ x.T
    found = torch.empty(len(x), len(x), dtype=x.dtype)
    step = -(-len(x) // 8)
    for start in range(0, len(x), step):
        stop = start + step
        torch.mm(x[start:stop], x[start:].T, out=found[start:stop, start:])
        found[stop:, start:stop] = found[start:stop, stop:].T
    return found


def _with_transposed(mat: Tensor) -> Tensor:
    """Return a matrix (N, N) and its transposed one, added; torch copies a transposed matrix by
    tiles, and adds one by single numbers.
    """
    return mat.T.clone(memory_format=torch.contiguous_format).add_(mat)
