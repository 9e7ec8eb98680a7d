"""The losses of images and texts against plain loops, in chunks of any size."""

from __future__ import annotations

import math
from typing import Any

import losses_by_loops as loops
import pytest
import torch
from retrieval.host.plugins import create
from torch import Tensor

IMAGES = torch.tensor([0, 1, 2, 1, 3, 4])
"""Image 4 has no text; images 1 and 3 share theirs; image 0 has two."""
TEXTS = torch.tensor([2, 0, 1, 0, 7])
"""The last text has no image."""


def vectors(count: int, seed: int) -> Tensor:
    drawn = torch.Generator().manual_seed(seed)
    return torch.randn(count, 5, generator=drawn, dtype=torch.float64).requires_grad_()


def log_sigmoid(x: float) -> float:
    return -math.log1p(math.exp(-x))


def sigmoid_by_loops(s: list[list[float]], right: list[list[bool]], t: float, b: float) -> float:
    total = 0.0
    for row, answers in zip(s, right, strict=True):
        for cosine, is_right in zip(row, answers, strict=True):
            total -= log_sigmoid((1 if is_right else -1) * (t * cosine + b))
    return total / len(s)


def picks_by_loops(s: list[list[float]], right: list[list[bool]], t: float) -> float:
    losses = []
    for row, answers in zip(s, right, strict=True):
        whole = math.log(sum(math.exp(t * cosine) for cosine in row))
        own = [
            whole - t * cosine for cosine, is_right in zip(row, answers, strict=True) if is_right
        ]
        if own:
            losses.append(sum(own) / len(own))
    return sum(losses) / len(losses)


def turned(matrix: Any) -> Any:
    return [list(column) for column in zip(*matrix, strict=True)]


def info_nce_by_loops(s: list[list[float]], right: list[list[bool]], t: float) -> float:
    return (picks_by_loops(s, right, t) + picks_by_loops(turned(s), turned(right), t)) / 2


RIGHT = (IMAGES[:, None] == TEXTS).tolist()


@pytest.mark.parametrize("chunk", [1, 4, 100])
def test_the_sigmoid_loss_is_the_papers(chunk):
    images, texts = vectors(6, 0), vectors(5, 1)
    loss = create("loss", "core.sigmoid_loss", scale=4.0, bias=-2.0, chunk=chunk)
    value = loss(images, IMAGES, None, texts, TEXTS)
    wanted = sigmoid_by_loops(loops.cosines(images, texts), RIGHT, 4.0, -2.0)
    assert value.item() == pytest.approx(wanted, abs=1e-6)
    value.backward()
    assert all(float(p.grad.abs()) > 0 for p in loss.parameters())
    assert images.grad.abs().sum() > 0 and texts.grad.abs().sum() > 0


@pytest.mark.parametrize("chunk", [1, 4, 100])
def test_info_nce_is_the_mean_over_several_right_answers_both_ways(chunk):
    images, texts = vectors(6, 0), vectors(5, 1)
    loss = create("loss", "core.info_nce", temperature=0.2, chunk=chunk)
    value = loss(images, IMAGES, None, texts, TEXTS)
    wanted = info_nce_by_loops(loops.cosines(images, texts), RIGHT, 5.0)
    assert value.item() == pytest.approx(wanted, abs=1e-6)
    assert torch.autograd.grad(value, loss.log_scale)[0].abs() > 0


@pytest.mark.parametrize("name", ["core.sigmoid_loss", "core.info_nce"])
def test_indices_of_pairs_say_what_labels_cannot(name):
    images, texts = vectors(4, 2), vectors(3, 3)
    # texts 0 and 1 share image 1, but not images 0 and 2: no labels could say so
    right = torch.tensor([[1, 0, 0], [1, 1, 0], [0, 1, 0], [0, 0, 1]], dtype=torch.bool)
    pairs = (*torch.where(right), *torch.where(~right))
    loss = create("loss", name, chunk=2)
    value = loss(images, torch.arange(4), pairs, texts, torch.arange(3)).item()
    cosines = loops.cosines(images, texts)
    if name == "core.info_nce":
        wanted = info_nce_by_loops(cosines, right.tolist(), 1 / 0.07)
    else:
        wanted = sigmoid_by_loops(cosines, right.tolist(), 10.0, -10.0)
    assert value == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize("name", ["core.sigmoid_loss", "core.info_nce"])
def test_the_gradient_does_not_depend_on_the_chunk_and_keeps_no_matrix_of_all_pairs(name):
    gradients, largest = [], []
    for chunk in (16, 512):
        images = vectors(512, 4)
        texts = vectors(512, 5)
        kept: list[int] = []

        def keep(tensor: Tensor, kept: list[int] = kept) -> Tensor:
            kept.append(tensor.numel())
            return tensor

        loss = create("loss", name, chunk=chunk)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            value = loss(images, torch.arange(512), None, texts, torch.arange(512))
        value.backward()
        gradients.append(torch.stack([images.grad, texts.grad]))
        largest.append(max(kept))
    assert torch.allclose(*gradients, atol=1e-9)
    # what is kept are the vectors, and InfoNCE's sum over a column for each of 32 chunks
    assert max(largest) <= 512 * 32


@pytest.mark.parametrize("name", ["core.sigmoid_loss", "core.info_nce"])
def test_without_texts_images_are_compared_with_one_another(name):
    images = vectors(6, 6)
    same = (IMAGES[:, None] == IMAGES).tolist()
    s = loops.cosines(images, images)
    rows = range(6)
    value = create("loss", name, chunk=4)(images, IMAGES).item()
    others = [[s[i][j] for j in rows if j != i] for i in rows]
    right = [[same[i][j] for j in rows if j != i] for i in rows]
    if name == "core.info_nce":
        wanted = picks_by_loops(others, right, 1 / 0.07)
    else:
        wanted = sigmoid_by_loops(others, right, 10.0, -10.0)
    assert value == pytest.approx(wanted, rel=1e-5)
