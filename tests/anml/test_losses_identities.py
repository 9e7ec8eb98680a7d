"""The losses that the deep losses equal for special parameters."""

from __future__ import annotations

import math
from typing import Any

import losses_by_loops as loops
import pytest
import torch
from pytorch_metric_learning.distances import DotProductSimilarity
from pytorch_metric_learning.losses import MultiSimilarityLoss, NPairsLoss
from pytorch_metric_learning.miners import MultiSimilarityMiner
from torch import Tensor

from retrieval_anml.similarity_losses import (
    DANMLoss,
    ImprovedLiftedLoss,
    ImprovedProxyNCALoss,
    MinedDANMLoss,
    NPairLoss,
)

Y = torch.arange(24) % 7
X = torch.randn(24, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def gradient(loss: Any, x: Tensor = X, y: Tensor = Y, *more: Any) -> Tensor:
    leaf = x.clone().requires_grad_()
    (actual,) = torch.autograd.grad(loss(leaf, y, *more), leaf)
    return actual


@pytest.mark.parametrize("mining", [False, True])
def test_multi_similarity_is_the_identity_and_equal_thresholds(mining):
    alpha, beta, m = 2.0, 50.0, 0.45
    upstream = MultiSimilarityLoss(alpha=alpha, beta=beta, base=m)
    indices = MultiSimilarityMiner(epsilon=0.1)(X, Y) if mining else None
    ours = (MinedDANMLoss if mining else DANMLoss)(-alpha, beta, m, m, outer="identity")
    sets = loops.by_label(Y.tolist())
    if mining:
        sets = loops.mined(loops.cosines(X, X), sets, 0.1)
        assert 0 < sum(len(different) for _, different in sets) < 24 * 20
    constant = sum(math.log(len(p) + 1) / alpha + math.log(len(n) + 1) / beta for p, n in sets) / 24
    assert ours(X, Y).item() + constant == pytest.approx(upstream(X, Y, indices).item(), rel=1e-10)
    assert torch.allclose(gradient(ours), gradient(upstream, X, Y, indices), atol=1e-12)
    # A wrong sign of γ₁ in the sums still trains well: only exact values reveal it.
    wrong = DANMLoss(1 / alpha, beta, m, m, outer="identity")
    assert wrong(X, Y).item() + constant != pytest.approx(upstream(X, Y, indices).item(), rel=1e-3)


def test_improved_lifted_at_infinity_is_the_hardest_triplet():
    s, hardest = loops.cosines(X, X), 0.0
    for row, (same, different) in zip(s, loops.by_label(Y.tolist()), strict=True):
        hardest += max(0.0, max(row[j] for j in different) - min(row[j] for j in same) + 0.2)
    for loss in (
        ImprovedLiftedLoss(math.inf, math.inf, None, None, 0.2),
        DANMLoss(-math.inf, math.inf, None, None, "hinge", 0.2),
    ):
        assert loss(X, Y).item() == pytest.approx(hardest / 24, rel=1e-12)
        outer = {"outer": "hinge"} if type(loss) is DANMLoss else {}
        near = type(loss)(1e5, 1e5, None, None, margin=0.2, **outer)
        assert near(X, Y).item() == pytest.approx(loss(X, Y).item(), abs=1e-4)
        assert torch.allclose(gradient(near), gradient(loss), atol=1e-6)


@pytest.mark.parametrize("thresholds", [(0.5, 0.45), (None, None)], ids=str)
def test_gamma_to_0_is_the_mean(thresholds):
    s, expected = loops.cosines(X, X), 0.0
    for row, (same, different) in zip(s, loops.by_label(Y.tolist()), strict=True):
        near, far = ([row[j] for j in side] for side in (same, different))
        for side, threshold in zip((near, far), thresholds, strict=True):
            side += [] if threshold is None else [threshold]
        expected += sum(far) / len(far) - sum(near) / len(near)
    mean = DANMLoss(0.0, 1e-9, *thresholds, outer="identity")
    assert mean(X, Y).item() == pytest.approx(expected / 24, rel=1e-7)
    tiny = DANMLoss(1e-7, 1e-7, *thresholds, outer="identity")
    assert tiny(X, Y).item() == pytest.approx(expected / 24, abs=1e-7)
    assert torch.allclose(gradient(tiny), gradient(mean), atol=1e-7)
    # In float32, rounding would drown log(mean) / γ.
    assert tiny(X.float(), Y).item() == pytest.approx(expected / 24, abs=1e-6)


def test_npair_is_pytorch_metric_learnings():
    x, y = X[:16], torch.arange(8).repeat(2)
    upstream = NPairsLoss(distance=DotProductSimilarity(normalize_embeddings=False))
    assert NPairLoss()(x, y).item() == pytest.approx(upstream(x, y).item(), rel=1e-10)
    assert torch.allclose(gradient(NPairLoss(), x, y), gradient(upstream, x, y), atol=1e-12)


def test_proxy_nca_up_to_the_number_of_classes():
    loss = ImprovedProxyNCALoss(5, 7, 3.0, 1.0, outer="identity").double()
    s, proxy_nca = loops.cosines(X, loss.proxies.detach()), 0.0
    for row, label in zip(s, Y.tolist(), strict=True):
        distances = [2 - 2 * value for value in row]
        rivals = sum(math.exp(-d) for k, d in enumerate(distances) if k != label)
        proxy_nca -= math.log(math.exp(-distances[label]) / rivals)
    assert loss(X, Y).item() + math.log(6) == pytest.approx(proxy_nca / 24, rel=1e-10)
