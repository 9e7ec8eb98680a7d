"""The kernel of the losses of pairs against plain loops, with its first and second derivatives."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from pytorch_metric_learning.distances import (
    CosineSimilarity,
    DotProductSimilarity,
    LpDistance,
)
from torch import Tensor
from torch.nn import functional as F

from retrieval_pml import pair_sums
from retrieval_pml.pair_losses import CircleLoss
from retrieval_pml.pair_sums import (
    Pairs,
    against_others,
    excesses_over_others,
    labelled_pairs,
    listed_pairs,
    matrix_of,
    scaled,
)

LABELS = torch.tensor([0, 1, 0, 2, 1, 0, 2, 3])  # unsorted, unequal, one class of one item
REFERENCE_LABELS = torch.tensor([1, 0, 2, 0, 3, 1])
MINED = tuple(torch.tensor(x) for x in ([0, 0, 4], [2, 2, 1], [0, 0, 0, 4], [1, 1, 3, 0]))
LOWEST = torch.finfo(torch.float64).min


def matrix(rows: int, columns: int) -> Tensor:
    generator = torch.Generator().manual_seed(rows * columns)
    return torch.rand(rows, columns, generator=generator, dtype=torch.float64) * 2 - 1


@pytest.mark.parametrize("start", [None, 0, 3])
def test_pairs_of_labels_are_those_of_a_loop(start):
    anchors = LABELS if start is None else LABELS[start : start + 4]
    references = REFERENCE_LABELS if start is None else LABELS
    pairs = labelled_pairs(anchors, references, start)
    expected = [
        (i, j)
        for i in range(len(anchors))
        for j in range(len(references))
        if anchors[i] == references[j] and (start is None or j != start + i)
    ]
    assert pairs.anchors.tolist() == [i for i, _ in expected]
    assert pairs.positives.tolist() == [j for _, j in expected]
    equal = sum(int(i == j) for i in anchors for j in references)
    assert pairs.negatives == len(anchors) * len(references) - equal
    assert not labelled_pairs(anchors * 0, references * 0, start).negatives


def negatives(kind: str) -> list[list[int]]:
    """Return the negatives of each anchor, as often as they count."""
    if kind == "labels":
        return [[j for j in range(8) if LABELS[i] != LABELS[j]] for i in range(8)]
    listed: list[list[int]] = [[] for _ in range(8)]
    for i, j in zip(MINED[2].tolist(), MINED[3].tolist(), strict=True):
        if kind == "repeated" or j not in listed[i]:
            listed[i].append(j)
    return listed


def pairs_of(kind: str, mat: Tensor) -> Pairs:
    if kind == "labels":
        return labelled_pairs(LABELS, LABELS, 0)
    return listed_pairs(mat, MINED, repeated=kind == "repeated")


CIRCLE: Any = CircleLoss()._exponents


@pytest.mark.parametrize("exponents", ["scaled", "circle"])
@pytest.mark.parametrize("kind", ["labels", "listed", "repeated"])
def test_sums_values_and_derivatives(kind, exponents):
    mat = matrix(8, 8).requires_grad_()
    pairs = pairs_of(kind, mat.detach())
    function = scaled(-7.0) if exponents == "scaled" else CIRCLE

    def call(entries: Tensor) -> tuple[Tensor, Tensor]:
        return against_others(entries, function, pairs)

    sums, values = call(mat)
    for i, others in enumerate(negatives(kind)):
        powers = function(mat.detach().clone(), slice(None))[0][i, others].tolist()
        expected = math.log(sum(map(math.exp, powers))) if others else LOWEST
        assert sums[i].item() == pytest.approx(expected, rel=1e-12)
    assert len(pairs.anchors) == {"labels": 10, "listed": 2, "repeated": 3}[kind]
    assert torch.equal(values, mat[pairs.anchors, pairs.positives])
    kept = torch.tensor([bool(others) for others in negatives(kind)])
    if exponents == "scaled":
        # The circle loss defines its weights as constants, which finite differences do not.
        assert torch.autograd.gradcheck(lambda x: (call(x)[0][kept], call(x)[1]), mat)
        assert torch.autograd.gradgradcheck(lambda x: (call(x)[0][kept], call(x)[1]), mat)
        return
    powers, slopes = CIRCLE(mat.clone(), slice(None))
    plain = torch.zeros_like(powers)
    for i, others in enumerate(negatives(kind)):
        plain[i, others] = torch.softmax(powers[i, others], 0) * slopes[i, others]
    if kind != "repeated":
        (actual,) = torch.autograd.grad(sums[kept].sum(), mat)
        torch.testing.assert_close(actual, plain)


def test_the_largest_of_several_columns_counts():
    mat = matrix(8, 24).requires_grad_()
    items = torch.arange(8)
    places = items, LABELS * 2
    pairs = Pairs(*places, places, centers=3)

    def call(entries: Tensor) -> tuple[Tensor, Tensor]:
        return against_others(entries, scaled(5.0), pairs)

    best = mat.view(8, 3, 8).amax(1)
    others = torch.ones_like(best).index_put(places, torch.tensor(0.0).double())
    expected = (5 * best).exp().mul(others).sum(1).log(), best[places]
    for actual, other in zip(call(mat), expected, strict=True):
        torch.testing.assert_close(actual, other)
    assert torch.autograd.gradcheck(call, mat)
    assert torch.autograd.gradgradcheck(call, mat)
    x = matrix(8, 3).requires_grad_()
    centers = matrix(30, 3)[6:].requires_grad_()
    distance = CosineSimilarity()
    vectors = pair_sums.Vectors(x, centers, distance)
    direct = [*against_others(vectors, scaled(5.0), pairs)]
    by_matrix = [*call(distance(x, centers))]
    for left, other in zip(direct, by_matrix, strict=True):
        slopes = [
            torch.autograd.grad(value.square().sum(), (x, centers), retain_graph=True)
            for value in (left, other)
        ]
        torch.testing.assert_close(left, other)
        for actual, plain in zip(*slopes, strict=True):
            torch.testing.assert_close(actual, plain)


def test_large_exponents_and_anchors_without_negatives_are_finite():
    mat = matrix(8, 8).float().requires_grad_()
    sums, _ = against_others(mat, scaled(1e4), labelled_pairs(LABELS * 0, LABELS, None))
    # No reference has another label than the anchors of label 0 only if all have label 0.
    none, _ = against_others(mat, scaled(1e4), labelled_pairs(LABELS * 0, LABELS * 0, 0))
    assert sums.isfinite().all() and (none == torch.finfo(torch.float32).min).all()
    (gradient,) = torch.autograd.grad(sums.sum() + none.sum(), mat)
    assert gradient.isfinite().all() and gradient.sum(1).tolist() == pytest.approx([1e4] * 8)


@pytest.mark.parametrize("kind", ["labels", "listed"])
def test_excesses_over_others(kind):
    mat = matrix(8, 8).requires_grad_()
    pairs = pairs_of(kind, mat.detach())
    sums, values, counts = excesses_over_others(mat, lambda x, _: (0.1 - x, -1.0), pairs)
    for i, others in enumerate(negatives(kind)):
        excesses = [max(0.0, 0.1 - mat[i, j].item()) for j in others]
        assert sums[i].item() == pytest.approx(sum(excesses), rel=1e-12)
        assert counts[i].item() == sum(x > 0 for x in excesses)
    assert counts.dtype == torch.int64  # processes that divide a loss add up whole numbers
    assert torch.equal(values, mat[pairs.anchors, pairs.positives])
    assert torch.autograd.gradcheck(
        lambda x: excesses_over_others(x, lambda y, _: (0.1 - y, -1.0), pairs)[:2], mat
    )


@pytest.mark.parametrize("entries", [1, 2**17])
def test_blocks_of_rows_change_nothing(monkeypatch, entries):
    labels = LABELS.repeat(5)
    mat = matrix(40, 40).requires_grad_()
    pairs = labelled_pairs(labels, labels, 0)
    weights = matrix(40, 1)[:, 0]

    def gradient(hinge: bool) -> list[Tensor]:
        sums = excesses_over_others if hinge else against_others
        push, values, *_ = sums(mat, scaled(-7.0), pairs)
        value = (push * weights).sum() + values.square().sum()
        return [push, *torch.autograd.grad(value, mat)]

    expected = gradient(False) + gradient(True)
    monkeypatch.setattr(pair_sums, "ENTRIES", entries)
    for actual, other in zip(gradient(False) + gradient(True), expected, strict=True):
        torch.testing.assert_close(actual, other)


@pytest.mark.parametrize(
    "distance", [LpDistance(), LpDistance(power=2), CosineSimilarity(), DotProductSimilarity()]
)
@pytest.mark.parametrize("same_items", [True, False])
def test_a_matrix_of_unit_vectors_is_upstreams(distance, same_items):
    x = matrix(30, 3).requires_grad_()
    y = x if same_items else matrix(28, 3).requires_grad_()
    # The distance of an item from itself has no derivative.
    weights = matrix(30, len(y)).fill_diagonal_(0)

    def first_and_second(call: Any) -> list[Tensor]:
        mat = call()
        value = (mat.square() * weights).sum()
        plain = torch.autograd.grad(value, (x, y), retain_graph=True)
        slopes = torch.autograd.grad(value, (x, y), create_graph=True)
        penalty = sum(slope.square().sum() for slope in slopes)
        return [mat, *plain, *slopes, *torch.autograd.grad(penalty, (x, y))]

    ours = first_and_second(lambda: matrix_of(distance, x, y))
    if distance.power == 2:
        # Upstream takes a root and squares it, so its second derivative is NaN for equal vectors.
        a, b = F.normalize(x), F.normalize(y)
        theirs = first_and_second(lambda: (a[:, None] - b).square().sum(2))
    else:
        theirs = first_and_second(lambda: distance(x, None if same_items else y))
    for left, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(left, other, atol=1e-7 * same_items, rtol=1e-7)
