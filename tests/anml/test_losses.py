"""The deep losses against plain loops in float64, and their gradients by finite differences."""

from __future__ import annotations

import math
from typing import Any

import losses_by_loops as loops
import pytest
import torch
from pytorch_metric_learning import distances
from pytorch_metric_learning.miners import MultiSimilarityMiner
from retrieval.model.contracts import Combiner
from torch import Tensor

from retrieval_anml.pair_gap import Rule, gaps, pairs_of_labels
from retrieval_anml.similarity_losses import (
    DANMLoss,
    ImprovedLiftedLoss,
    ImprovedNPairLoss,
    ImprovedProxyNCALoss,
    LiftedLoss,
    MinedDANMLoss,
    similarities,
)

LABELS = [0, 1, 0, 2, 1, 0, 2, 3, 1, 0]  # label 3 has one member: an anchor without positives
REFERENCES = [1, 0, 2, 2, 5, 0, 1]  # no item has label 3
GAMMAS = [
    (2.0, 30.0),
    (0.5, 4.0),
    (0.0, 7.0),
    (1e-4, 1e-4),
    (0.05, 0.02),
    (math.inf, math.inf),
    (3.0, 400.0),
]


def made(items: int, seed: int = 0) -> Tensor:
    return torch.randn(items, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


X, R = made(len(LABELS)), made(len(REFERENCES), 1)
Y, YR = torch.tensor(LABELS), torch.tensor(REFERENCES)


def check_gradient(call: Any, *inputs: Tensor) -> None:
    """Compare with finite differences along a random direction."""
    torch.manual_seed(0)
    leaves = [value.clone().requires_grad_() for value in inputs]
    directions = [torch.randn_like(value) for value in inputs]
    gradients = torch.autograd.grad(call(*leaves), leaves)
    along = sum(float((g * d).sum()) for g, d in zip(gradients, directions, strict=True))
    step = 1e-5
    up, down = (
        float(call(*(x + k * step * d for x, d in zip(inputs, directions, strict=True))))
        for k in (1, -1)
    )
    assert along == pytest.approx((up - down) / (2 * step), rel=1e-5, abs=1e-8)


def mean_of(gaps: Any, outer: str = "logistic", margin: float = 0.0) -> Any:
    return pytest.approx(loops.mean_loss(gaps, outer, margin), rel=1e-10)


THRESHOLDS = [(0.5, 0.5), (0.6, 0.2), (0.5, 0.52), (None, None), (0.3, None), (None, 0.3)]


@pytest.mark.parametrize("gamma", GAMMAS, ids=str)
@pytest.mark.parametrize("thresholds", THRESHOLDS, ids=str)
class TestDANML:
    def test_value_and_gradient(self, gamma, thresholds):
        loss = DANMLoss(*gamma, *thresholds)
        x = loops.gaps(loops.cosines(X, X), loops.by_label(LABELS), *gamma, *thresholds)
        assert loss(X, Y).item() == mean_of(x)
        check_gradient(lambda e: loss(e, Y), X)
        if thresholds in ((0.5, 0.5), (None, None)):  # also every entry of the gradient
            precision = {"eps": 1e-6, "atol": 1e-7, "rtol": 1e-5}
            leaf = X.clone().requires_grad_()
            assert torch.autograd.gradcheck(lambda e: loss(e, Y), leaf, **precision)

    def test_reference_set(self, gamma, thresholds):
        loss = DANMLoss(*gamma, *thresholds)
        x = loops.gaps(loops.cosines(X, R), loops.by_label(LABELS, REFERENCES), *gamma, *thresholds)
        assert loss(X, Y, None, R, YR).item() == mean_of(x)
        check_gradient(lambda e, r: loss(e, Y, None, r, YR), X, R)

    def test_the_built_in_miner_is_the_miner_before_the_loss(self, gamma, thresholds):
        s = loops.cosines(X, X)
        x = loops.gaps(s, loops.mined(s, loops.by_label(LABELS), 0.1), *gamma, *thresholds)
        fused, apart = MinedDANMLoss(*gamma, *thresholds), DANMLoss(*gamma, *thresholds)
        assert fused(X, Y).item() == mean_of(x)
        mined = apart(X, Y, MultiSimilarityMiner()(X, Y)).item()
        assert mined == pytest.approx(fused(X, Y).item(), rel=1e-10)
        check_gradient(lambda e: fused(e, Y), X)
        check_gradient(lambda e: apart(e, Y, MultiSimilarityMiner()(X, Y)), X)


def test_outer_functions_and_margin():
    x = loops.gaps(loops.cosines(X, X), loops.by_label(LABELS), 2, 30, 0.5, 0.5)
    for outer, margin in (("identity", 0.0), ("hinge", 0.4), ("logistic", -0.3)):
        assert DANMLoss(outer=outer, margin=margin)(X, Y).item() == mean_of(x, outer, margin)
    assert DANMLoss(outer="hinge")(X, Y).item() == mean_of(x, "hinge", 1.0)


def test_only_the_size_of_gamma1_matters():
    assert DANMLoss(-2.0)(X, Y).item() == DANMLoss(2.0)(X, Y).item() != DANMLoss(3.0)(X, Y).item()


def test_triplets_and_pairs_count_each_pair_once():
    anchor, positive, negative = [0, 0, 1, 4, 0], [2, 2, 4, 8, 5], [1, 3, 2, 7, 3]
    sets: Any = [([], []) for _ in LABELS]
    for i, j, k in zip(anchor, positive, negative, strict=True):
        sets[i] = (sorted({*sets[i][0], j}), sorted({*sets[i][1], k}))
    expected = mean_of(loops.gaps(loops.cosines(X, X), sets, 2, 30, 0.5, 0.5))
    a, p, n = (torch.tensor(value) for value in (anchor, positive, negative))
    assert DANMLoss()(X, Y, (a, p, n)).item() == expected
    assert DANMLoss()(X, Y, (a, p, a.flip(0), n.flip(0))).item() == expected
    assert DANMLoss()(X, None, (a, p, n)).item() == expected


class TestLifted:
    @pytest.mark.parametrize("gammas", [(2.0, 30.0), (1.0, 1.0), (0.01, 100.0)], ids=str)
    @pytest.mark.parametrize("thresholds", [(0.5, 0.5), (None, None), (0.7, None)], ids=str)
    def test_equation_25(self, gammas, thresholds):
        loss = ImprovedLiftedLoss(*gammas, *thresholds, margin=0.3)
        pairs = loops.by_label(LABELS)
        x = loops.gaps(loops.cosines(X, X), pairs, *gammas, *thresholds, loops.log_exp_sum)
        assert loss(X, Y).item() == mean_of(x, "hinge", 0.3)
        check_gradient(lambda e: loss(e, Y), X)

    def test_equation_23(self):
        s, total = loops.cosines(X, X), 0.0
        for i, (same, different) in enumerate(loops.by_label(LABELS)):
            if same:
                pull = math.log(sum(math.exp(-s[i][j]) for j in same))
                total += max(0.0, pull + math.log(sum(math.exp(s[i][j]) for j in different)) + 0.7)
        assert LiftedLoss(0.7)(X, Y).item() == pytest.approx(total / len(LABELS), rel=1e-10)
        check_gradient(lambda e: LiftedLoss(0.7)(e, Y), X)
        check_gradient(lambda e, r: LiftedLoss(0.7)(e, Y, None, r, YR), X, R)


class TestNPair:
    LABELS = torch.tensor([0, 1, 1, 2, 0, 2])
    ANCHORS, POSITIVES = [0, 1, 3], [4, 2, 5]

    def similarity(self, x: Tensor) -> list[list[float]]:
        return [
            [sum(a * b for a, b in zip(x[i], x[j], strict=True)) for j in self.POSITIVES]
            for i in self.ANCHORS
        ]

    @pytest.mark.parametrize(("gamma", "offset"), [(1.0, 0.0), (8.0, 0.1), (0.5, -0.4)])
    def test_equation_31(self, gamma, offset):
        x = made(6, 3)
        loss = ImprovedNPairLoss(gamma, offset)
        expected = loops.npair(self.similarity(x.tolist()), gamma, offset)  # type: ignore[arg-type]
        assert loss(x, self.LABELS).item() == pytest.approx(expected, rel=1e-10)
        check_gradient(lambda e: loss(e, self.LABELS), x)

    def test_further_items_are_further_rounds(self):
        first, second = made(6, 3), made(4, 4)
        labels = torch.cat([self.LABELS, torch.tensor([0, 2, 2, 0])])
        # the fifth item of a class has no partner, nor has the only item of a class
        labels = torch.cat([labels, torch.tensor([0, 7])])
        x = torch.cat([first, second, made(2, 5)])
        loss = ImprovedNPairLoss(3.0, 0.1)
        parts = 3 * loss(first, self.LABELS) + 2 * loss(second, torch.tensor([0, 2, 2, 0]))
        assert loss(x, labels).item() == pytest.approx(parts.item() / 5, rel=1e-10)

    def test_reference_set_holds_the_positives(self):
        x = made(6, 3)
        order = torch.tensor([2, 0, 1])
        loss = ImprovedNPairLoss(3.0, 0.1)
        anchors, positives = x[self.ANCHORS], x[self.POSITIVES]
        value = loss(anchors, torch.arange(3), None, positives[order], torch.arange(3)[order])
        assert value.item() == pytest.approx(loss(x, self.LABELS).item(), rel=1e-10)

    def test_miner_gives_the_negatives(self):
        anchor, positive, negative = [0, 0, 1, 0, 3], [4, 4, 2, 4, 5], [1, 2, 3, 1, 0]
        x, gamma, offset = made(6, 3), 3.0, 0.1
        s = (x @ x.T).tolist()
        pairs = sorted({*zip(anchor, positive, strict=True)})
        expected = 0.0
        for i, j in pairs:
            far = {k for a, k in zip(anchor, negative, strict=True) if a == i}
            rivals = sum(math.exp(gamma * (s[i][k] - offset - s[i][j])) for k in far)
            expected += math.log(1 + rivals) / gamma
        loss = ImprovedNPairLoss(gamma, offset)
        triplets = tuple(torch.tensor(value) for value in (anchor, positive, negative))
        value = loss(x, self.LABELS, triplets).item()
        assert value == pytest.approx(expected / len(pairs), rel=1e-10)
        check_gradient(lambda e: loss(e, self.LABELS, triplets), x)


@pytest.mark.parametrize("thresholds", [(None, None), (0.6, 0.4)], ids=str)
def test_improved_proxy_nca(thresholds):
    loss = ImprovedProxyNCALoss(4, 5, 1.5, 3.0, *thresholds).double()
    distances = [[2 - 2 * s for s in row] for row in loops.cosines(X, loss.proxies.detach())]
    levels = [None if t is None else 2 - 2 * t for t in thresholds]
    total = 0.0
    for row, label in zip(distances, LABELS, strict=True):
        near = [row[label]] + ([] if levels[0] is None else [levels[0]])
        far = [-d for k, d in enumerate(row) if k != label]
        far += [] if levels[1] is None else [-levels[1]]
        total += math.log1p(math.exp(loops.log_exp_mean(near, 1.5) + loops.log_exp_mean(far, 3.0)))
    assert loss(X, Y).item() == pytest.approx(total / len(LABELS), rel=1e-10)

    def call(e: Tensor, proxies: Tensor) -> Tensor:
        return torch.func.functional_call(loss, {"proxies": proxies}, (e, Y))

    check_gradient(call, X, loss.proxies.detach())


class TestDistances:
    class Euclidean(Combiner):
        """The distance of unit vectors, by differences."""

        def compute_mat(self, query_emb: Tensor, ref_emb: Tensor) -> Tensor:
            q, r = (torch.nn.functional.normalize(value) for value in (query_emb, ref_emb))
            return (q[:, None] - r).square().sum(2).add(1e-30).sqrt()

    @pytest.mark.parametrize("cls", [DANMLoss, MinedDANMLoss, LiftedLoss, ImprovedLiftedLoss])
    def test_combiner_of_unit_vectors_is_the_cosine(self, cls):
        loss = cls(distance=self.Euclidean())
        assert loss(X, Y).item() == pytest.approx(cls()(X, Y).item(), rel=1e-9)
        check_gradient(lambda e, r: loss(e, Y, None, r, YR), X, R)

    def test_similarity_of_each_distance(self):
        cosine = torch.tensor(loops.cosines(X, R), dtype=torch.float64)
        lp = distances.LpDistance
        for distance in (distances.CosineSimilarity(), lp(), lp(power=2)):
            assert torch.allclose(similarities(distance, X, R), cosine, atol=1e-12)
        plain = distances.DotProductSimilarity(normalize_embeddings=False)
        assert torch.allclose(similarities(plain, X, R), X @ R.T)
        assert DANMLoss(distance=plain)(X, Y).item() != pytest.approx(DANMLoss()(X, Y).item())
        snr = distances.SNRDistance()
        assert torch.allclose(similarities(snr, X, R), 1 - snr(X, R) ** 2 / 2)


def test_float32_at_extreme_gammas():
    x = X.float()
    s = loops.cosines(x, x)
    for gamma in (1e-8, 1e-4, 0.0999, 0.4999, 0.5001, 50.0, 1e4, 1e8):
        rule = Rule(gamma, gamma, 0.5, 0.4)
        got, exact = (
            gaps(torch.tensor(s, dtype=dtype), pairs_of_labels(Y, None), rule)[0]
            for dtype in (torch.float32, torch.float64)
        )
        assert (got - exact).abs().max() < 2e-6, gamma
