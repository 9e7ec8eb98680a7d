"""Losses that differ from pytorch-metric-learning's, against plain Python loops in float64, and
their gradients by finite differences.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from pytorch_metric_learning import losses as upstream
from retrieval.host.plugins import load_plugins
from torch import Tensor

PLUGINS = load_plugins()
LABELS = [0, 1, 0, 2, 1, 0, 2, 3]  # unsorted, unequal, one class of one item
REFERENCE_LABELS = [1, 0, 2, 0, 3, 1]
Vectors = list[list[float]]


def make(name: str, /, kind: str = "losses", **values: Any) -> Any:
    built = PLUGINS.build(
        kind, {"name": f"pml.{name}", **values}, {"embedding_size": 5, "classes": 4}
    )
    return built.double()


def points(items: int, seed: int) -> Tensor:
    return torch.randn(items, 5, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def unit(vectors: Vectors) -> Vectors:
    return [[x / math.sqrt(sum(y * y for y in v)) for x in v] for v in vectors]


def dot(a: list[float], b: list[float]) -> float:
    return sum(x * y for x, y in zip(a, b, strict=True))


def far(a: list[float], b: list[float]) -> float:
    return math.sqrt(sum((x - y) ** 2 for x, y in zip(a, b, strict=True)))


class Batch:
    """Unit vectors of a batch and of its references, as plain lists."""

    def __init__(self, embeddings: Tensor, reference: Tensor | None) -> None:
        self.own = reference is None
        self.x = unit(embeddings.tolist())
        self.r = self.x if reference is None else unit(reference.tolist())
        self.y = LABELS
        self.z = LABELS if reference is None else REFERENCE_LABELS

    def others(self, i: int, same: bool) -> list[int]:
        rows = [j for j in range(len(self.r)) if not (self.own and i == j)]
        return [j for j in rows if (self.z[j] == self.y[i]) == same]

    def pairs(self, same: bool) -> list[tuple[int, int]]:
        return [(i, j) for i in range(len(self.x)) for j in self.others(i, same)]

    def cosine(self, i: int, j: int) -> float:
        return dot(self.x[i], self.r[j])

    def distance(self, i: int, j: int) -> float:
        return far(self.x[i], self.r[j])


def mean(numbers: list[float]) -> float:
    return sum(numbers) / len(numbers)


def angular(b: Batch) -> float:
    t, losses = math.tan(math.radians(40)) ** 2, []
    for a, p in b.pairs(True):
        both = [u + v for u, v in zip(b.x[a], b.r[p], strict=True)]
        own = 2 * (1 + t) * b.cosine(a, p)
        rivals = [math.exp(4 * t * dot(both, b.r[n]) - own) for n in b.others(a, False)]
        losses.append(math.log(1 + sum(rivals)))
    return mean(losses)


def lifted(b: Batch) -> float:
    losses = []
    for a, p in b.pairs(True):
        total = sum(math.exp(1 - b.distance(a, n)) for n in b.others(a, False))
        if b.own:
            total += sum(math.exp(1 - b.distance(p, n)) for n in b.others(p, False))
        losses.append(max(0.0, math.log(total) + b.distance(a, p)) ** 2 / 2)
    return mean(losses)


def generalized_lifted(b: Batch) -> float:
    losses = []
    for a in range(len(b.x)):
        positives, negatives = b.others(a, True), b.others(a, False)
        if not positives or not negatives:
            losses.append(0.0)
            continue
        pull = math.log(sum(math.exp(b.distance(a, p)) for p in positives))
        push = math.log(sum(math.exp(1 - b.distance(a, n)) for n in negatives))
        losses.append(max(0.0, pull + push))
    return mean(losses)


def nt_xent(b: Batch) -> float:
    losses = []
    for a, p in b.pairs(True):
        own = math.exp(b.cosine(a, p) / 0.07)
        rivals = sum(math.exp(b.cosine(a, n) / 0.07) for n in b.others(a, False))
        losses.append(-math.log(own / (own + rivals)))
    return mean(losses)


def tuplet(b: Batch) -> float:
    losses = []
    for a, p in b.pairs(True):
        own = math.cos(math.acos(b.cosine(a, p)) - math.radians(5.73))
        rivals = [math.exp(64 * (b.cosine(a, n) - own)) for n in b.others(a, False)]
        losses.append(math.log(1 + sum(rivals)))
    return mean(losses)


def nca(b: Batch) -> float:
    losses = []
    for a in range(len(b.x)):
        near, rest = (
            sum(math.exp(-(b.distance(a, j) ** 2)) for j in b.others(a, same))
            for same in (True, False)
        )
        if near:
            losses.append(-math.log(near / (near + rest)))
    return mean(losses)


def threshold_consistent(b: Batch) -> float:
    pull = [0.9 - b.cosine(a, p) for a, p in b.pairs(True)]
    push = [b.cosine(a, n) - 0.5 for a, n in b.pairs(False)]
    return sum(mean(kept) for part in (pull, push) if (kept := [x for x in part if x >= 0]))


def swapped_triplets(b: Batch) -> float:
    losses = []
    for a, p in b.pairs(True):
        for n in b.others(a, False):
            nearest = min(b.distance(a, n), far(b.r[p], b.r[n]))
            losses.append(b.distance(a, p) - nearest + 0.5)
    return mean([loss for loss in losses if loss > 0])


def instance(b: Batch) -> float:
    losses = []
    for i, x in enumerate(b.x):
        votes = [math.exp(64 * dot(x, o) - 64) for o in b.x]
        own = sum(v for v, y in zip(votes, b.y, strict=True) if y == b.y[i])
        losses.append(-math.log(own / sum(votes)))
    return mean(losses)


def smooth_ap(b: Batch) -> float:
    def ahead(q: int, i: int, j: int) -> float:
        return 1 / (1 + math.exp(-(dot(b.x[q], b.x[j]) - dot(b.x[q], b.x[i])) / 0.1))

    actual = []
    for q in range(len(b.x)):
        positives = [q, *b.others(q, True)]
        if len(positives) == 1:
            continue
        ap = 0.0
        for i in positives:
            rank = 1 + sum(ahead(q, i, j) for j in range(len(b.x)) if j != i)
            among = 1 + sum(ahead(q, i, j) for j in positives if j != i)
            ap += among / rank / len(positives)
        actual.append(1 - ap)
    return mean(actual)


def histogram(b: Batch) -> float:
    width = 2 / 10

    def density(pairs: list[tuple[int, int]]) -> list[float]:
        bins = [0.0] * 11
        for i, j in pairs:
            s = dot(b.x[i], b.x[j])
            for r in range(11):
                bins[r] += max(0.0, 1 - abs(s - (-1 + r * width)) / width) / len(pairs)
        return bins

    positive = density([(i, j) for i, j in b.pairs(True) if i < j])
    negative = density([(i, j) for i, j in b.pairs(False) if i < j])
    return sum(n * sum(positive[: r + 1]) for r, n in enumerate(negative))


BOTH: dict[str, tuple[dict[str, Any], Callable[[Batch], float]]] = {
    "angular": ({}, angular),
    "lifted_structure": ({}, lifted),
    "generalized_lifted_structure": ({}, generalized_lifted),
    "nt_xent": ({}, nt_xent),
    "tuplet_margin": ({}, tuplet),
    "nca": ({}, nca),
    "threshold_consistent_margin": ({}, threshold_consistent),
    "triplet_margin": ({"swap": True, "margin": 0.5}, swapped_triplets),
}
ALONE: dict[str, tuple[dict[str, Any], Callable[[Batch], float]]] = {
    "instance": ({}, instance),
    "smooth_ap": ({"temperature": 0.1}, smooth_ap),
    "histogram": ({"n_bins": 10}, histogram),
}


@pytest.mark.parametrize("name", [*BOTH, *ALONE])
def test_batch(name):
    values, oracle = {**BOTH, **ALONE}[name]
    loss, x = make(name, **values), points(8, 1)
    assert loss(x, torch.tensor(LABELS)).item() == pytest.approx(oracle(Batch(x, None)), rel=1e-9)
    assert torch.autograd.gradcheck(lambda e: loss(e, torch.tensor(LABELS)), x.requires_grad_())


@pytest.mark.parametrize("name", BOTH)
def test_reference_set(name):
    values, oracle = BOTH[name]
    loss, x, r = make(name, **values), points(8, 1), points(6, 2)

    def call(e: Tensor, reference: Tensor) -> Tensor:
        return loss(  # type: ignore[no-any-return]
            e, torch.tensor(LABELS), ref_emb=reference, ref_labels=torch.tensor(REFERENCE_LABELS)
        )

    assert call(x, r).item() == pytest.approx(oracle(Batch(x, r)), rel=1e-9)
    assert torch.autograd.gradcheck(call, (x.requires_grad_(), r.requires_grad_()))


def test_dynamic_soft_margin_over_two_batches():
    loss, histogram = make("dynamic_soft_margin", momentum=0.3), [0.0] * 10
    for seed in (1, 2):
        x = points(8, seed).requires_grad_()
        b = Batch(x.detach(), None)
        triplets = [(a, p, n) for a, p in b.pairs(True) for n in b.others(a, False)]
        differences = [far(b.x[a], b.x[p]) - far(b.x[a], b.x[n]) for a, p, n in triplets]
        batch = [0.0] * 10
        for d in differences:
            place = min(max((d + 2) / 0.4, 0), 9)
            low = int(place)
            batch[low] += 1 - (place - low)
            batch[min(low + 1, 9)] += place - low
        share = 0.3 if any(histogram) else 1.0
        mixed = [(1 - share) * h + share * n for h, n in zip(histogram, batch, strict=True)]
        histogram = [m / sum(mixed) for m in mixed]
        places = [int(min(max((d + 2) / 0.4, 0), 9)) for d in differences]
        weights = [sum(histogram[: place + 1]) for place in places]
        expected = mean([d * w for d, w in zip(differences, weights, strict=True)])
        value = loss(x, torch.tensor(LABELS))
        value.backward()
        assert value.item() == pytest.approx(expected, rel=1e-9)
        # the weights, and so the histogram, are constants in the gradient
        u = torch.nn.functional.normalize(x)
        gaps = [(u[a] - u[p]).norm() - (u[a] - u[n]).norm() for a, p, n in triplets]
        weighed = [gap * w for gap, w in zip(gaps, weights, strict=True)]
        (gradient,) = torch.autograd.grad(torch.stack(weighed).mean(), x)
        torch.testing.assert_close(x.grad, gradient)
        assert loss.state_dict()["hist_"].tolist() == pytest.approx(histogram)


def test_dynamic_soft_margin_counts_the_largest_difference():
    # a difference of 2, for which upstream has no bin
    x = torch.tensor([[1.0, 0], [-1, 0], [1, 0]], dtype=torch.float64)
    assert make("dynamic_soft_margin")(x, torch.tensor([0, 0, 1])).isfinite()


def test_a_single_triplet_has_a_loss():
    x, left = points(8, 1), torch.tensor([0])
    triplet = (left, torch.tensor([2]), torch.tensor([3]))
    b = Batch(x, None)
    expected = far(b.x[0], b.x[2]) + max(0.0, 1 - far(b.x[0], b.x[3]))
    assert upstream.ContrastiveLoss()(x, torch.tensor(LABELS), triplet).item() == 0
    assert make("contrastive")(x, torch.tensor(LABELS), triplet).item() == pytest.approx(expected)


def test_nca_keeps_items_whose_probability_rounds_to_zero():
    x = torch.tensor([[1.0, 0], [-1, 0], [1, 0.01], [-1, 0.01]])
    value = make("nca", softmax_scale=100.0).float()(x, torch.tensor([0, 0, 1, 1]))
    assert value.item() == pytest.approx(400, rel=1e-2)  # 100 × (4 − 0)


@pytest.mark.parametrize(
    "values", [{"K": 3}, {"K": 3, "lambdaC": 0.2, "alpha": 0.5, "margin": 0.1}]
)
def test_manifold_gives_all_items_of_a_class_one_proxy(monkeypatch, values):
    torch.manual_seed(0)
    loss = make("manifold", **values)
    assert loss.meta_classes.shape == (4,) and set(loss.meta_classes.tolist()) == {0, 1, 2}
    x, labels = points(8, 1).requires_grad_(), torch.tensor(LABELS)
    plain = upstream.ManifoldLoss(l=5, **values).double()
    plain.load_state_dict({"proxies": loss.proxies})
    monkeypatch.setattr(torch.Tensor, "float", lambda tensor: tensor)  # upstream inverts in float32
    expected = plain(x, indices_tuple=loss.meta_classes[labels])
    actual = loss(x, labels)
    assert actual.item() == pytest.approx(expected.item(), rel=1e-12)
    slopes = [
        torch.autograd.grad(of, [x, proxies])
        for of, proxies in ((actual, loss.proxies), (expected, plain.proxies))
    ]
    for ours, theirs in zip(*slopes, strict=True):
        assert theirs.any()
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)


def test_gradients_at_the_class_centre_are_finite():
    for name in ("arc_face", "large_margin_softmax", "sphere_face", "sub_center_arc_face"):
        loss = make(name).float()
        weights = loss.W.detach().t().reshape(4, -1, 5)[:, 0]
        for scale in (1.0, 1 / 3, 0.7):  # some of these cosines round to 1 or more
            x = (weights * scale).clone().requires_grad_()
            loss(x, torch.arange(4)).backward()
            assert x.grad is not None and x.grad.isfinite().all() and loss.W.grad.isfinite().all()
