"""Losses with class weights or proxies against plain loops, and their finite gradients."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from retrieval_pml import retrieval_losses

OURS = retrieval_losses()
K, C = 5, 4
Y = torch.tensor([0, 1, 0, 2, 1, 1, 4, 2, 0, 4, 1, 2])  # class 3 has no items
OPTIONS: dict[str, dict[str, Any]] = {
    "large_margin_softmax": {"margin": 3},
    "sphere_face": {"margin": 4, "scale": 2.5},
    "arc_face": {"margin": 40.0, "scale": 7.0},
    "cos_face": {"scale": 9.0},
    "sub_center_arc_face": {"scale": 8.0, "sub_centers": 3},
    "normalized_softmax": {},
    "soft_triple": {"centers_per_class": 3, "margin": 0.2, "gamma": 0.3},
    "proxy_nca": {"softmax_scale": 1.7},
    "proxy_anchor": {"alpha": 5.0},
    "p2s_grad": {},
}


def make(name: str) -> Any:
    torch.manual_seed(1)
    return OURS[name](classes=K, embedding_size=C, **OPTIONS[name]).double()


def codes() -> Tensor:
    return torch.randn(12, C, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", OPTIONS)
def test_half_precision_affects_only_the_embeddings(name, dtype):
    loss, x = make(name).float(), codes().to(dtype)
    torch.testing.assert_close(loss(x, Y).float(), loss(x.float(), Y), rtol=1e-2, atol=1e-2)
    assert all(weights.dtype == torch.float32 for weights in loss.parameters())


@pytest.mark.parametrize("name", OPTIONS)
def test_short_embeddings_have_a_finite_gradient(name):
    x = codes()
    x[2], x[3] = 0, x[3] * 1e-20
    x.requires_grad_()
    loss = make(name)
    value = loss(x, Y.int())  # int32 labels are class numbers too
    gradients = torch.autograd.grad(value, [x, *loss.parameters()])
    assert all(result.isfinite().all() for result in (value, *gradients))


def cosine(a: list[float], b: list[float]) -> float:
    return dot(a, b) / math.sqrt(dot(a, a) * dot(b, b))


def dot(a: list[float], b: list[float]) -> float:
    return sum(u * v for u, v in zip(a, b, strict=True))


def size(a: list[float]) -> float:
    return math.sqrt(dot(a, a))


def entropy(logits: list[float], label: int) -> float:
    return math.log(sum(math.exp(z) for z in logits)) - logits[label]


def many_times(near: float, m: int) -> float:
    angle = math.acos(near)
    k = math.floor(angle * m / math.pi)
    return (-1) ** k * math.cos(m * angle) - 2 * k


def of_item(name: str, x: list[float], w: list[list[float]], y: int) -> float:
    """Return an item's loss by its definition; `w` has the centres of the classes in turn."""
    near = [cosine(x, value) for value in w]
    if name == "large_margin_softmax":
        return entropy(
            [
                size(x) * size(v) * (many_times(s, 3) if k == y else s)
                for k, (v, s) in enumerate(zip(w, near, strict=True))
            ],
            y,
        )
    if name == "sphere_face":
        return entropy(
            [2.5 * size(x) * (many_times(s, 4) if k == y else s) for k, s in enumerate(near)], y
        )
    if name == "cos_face":
        return entropy([9 * (s - 0.35 * (k == y)) for k, s in enumerate(near)], y)
    if name == "normalized_softmax":
        return entropy([s / 0.05 for s in near], y)
    if name == "proxy_nca":
        return entropy([-1.7 * (2 - 2 * s) for s in near], y)
    grouped = [near[k : k + 3] for k in range(0, len(near), 3)]
    if name == "soft_triple":
        soft = [
            sum(s * math.exp(s / 0.3) for s in value) / sum(math.exp(s / 0.3) for s in value)
            for value in grouped
        ]
        return entropy([20 * (s - 0.2 * (k == y)) for k, s in enumerate(soft)], y)
    scale, margin = (8, 28.6) if name == "sub_center_arc_face" else (7, 40)
    best = [max(value) for value in grouped] if name == "sub_center_arc_face" else near
    with_margin = math.acos(best[y]) + math.radians(margin)
    # beyond an angle of π, the loss is linear in the cosine
    line = best[y] - math.radians(margin) * math.sin(math.radians(margin))
    best[y] = math.cos(with_margin) if with_margin <= math.pi else line
    return entropy([scale * s for s in best], y)


def of_batch(name: str, x: list[list[float]], w: list[list[float]]) -> float:
    y = Y.tolist()
    if name == "p2s_grad":
        errors = [
            (cosine(a, b) - (k == t)) ** 2
            for a, t in zip(x, y, strict=True)
            for k, b in enumerate(w)
        ]
        return sum(errors) / len(errors)
    if name == "proxy_anchor":
        total = 0.0
        for k, proxy in enumerate(w):
            near = [cosine(a, proxy) for a in x]
            pull = sum(math.exp(-5 * (s - 0.1)) for s, t in zip(near, y, strict=True) if t == k)
            push = sum(math.exp(5 * (s + 0.1)) for s, t in zip(near, y, strict=True) if t != k)
            total += math.log1p(pull) / len(set(y)) + math.log1p(push) / K
        return total
    return sum(of_item(name, a, w, t) for a, t in zip(x, y, strict=True)) / len(y)


@pytest.mark.parametrize("name", OPTIONS)
def test_by_loops(name):
    ours = make(name)
    (weights,) = ours.parameters()
    rows = weights if weights.shape[0] != C else weights.t()
    x = codes()
    rel = 1e-6 if name == "p2s_grad" else 1e-9  # torch's renorm adds 1e-7 to a length
    value = ours(x, Y)
    assert value.item() == pytest.approx(of_batch(name, x.tolist(), rows.tolist()), rel=rel)
