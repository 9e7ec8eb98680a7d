"""The losses and generators of `core` against plain loops in double precision."""

from __future__ import annotations

import math
from typing import Any

import losses_by_loops as loops
import pytest
import torch
from retrieval.errors import RecipeError
from retrieval.host.plugins import create
from torch import Tensor

LABELS = [0, 1, 0, 2, 1, 0, 2, 1, 3, 0]


def batch(seed: int = 0) -> tuple[Tensor, Tensor]:
    embeddings = torch.randn(
        10, 6, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )
    return embeddings.requires_grad_(), torch.tensor(LABELS)


def cosines(vectors: Tensor) -> list[list[float]]:
    return loops.cosines(vectors, vectors)


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x > -700 else 0.0


def recall_by_loops(
    s: list[list[float]], labels: list[int], ks: list[int], tau2: float, tau1: float
) -> float:
    losses = []
    for q in range(len(labels)):
        positives = [x for x in range(len(labels)) if x != q and labels[x] == labels[q]]
        if not positives:
            continue
        total = 0.0
        for k in ks:
            within = 0.0
            for x in positives:
                rank = 1.0
                for z in range(len(labels)):
                    if z not in (q, x):
                        rank += sigmoid((s[q][z] - s[q][x]) / tau2)
                within += sigmoid((k - rank) / tau1)
            total += min(k, within) / min(k, len(positives))
        losses.append(1 - total / len(ks))
    return sum(losses) / len(losses)


@pytest.mark.parametrize(("ks", "tau2", "tau1"), [([1, 2, 4], 0.05, 1.0), ([2], 0.3, 0.2)])
def test_recall_at_k(ks, tau2, tau1):
    embeddings, labels = batch()
    loss = create("loss", "core.recall_at_k", k=ks, rank_temperature=tau2, recall_temperature=tau1)
    wanted = recall_by_loops(cosines(embeddings), LABELS, ks, tau2, tau1)
    assert loss(embeddings, labels).item() == pytest.approx(wanted, abs=1e-12)
    assert torch.autograd.gradcheck(lambda x: loss(x, labels), embeddings)


def test_recall_at_k_in_blocks(monkeypatch):
    embeddings, labels = batch()
    loss = create("loss", "core.recall_at_k")
    whole = loss(embeddings, labels)
    gradient = torch.autograd.grad(whole, embeddings)[0]
    monkeypatch.setattr("retrieval_core.recall_loss.ENTRIES", 30)
    parts = loss(embeddings, labels)
    assert torch.allclose(parts, whole)
    assert torch.allclose(torch.autograd.grad(parts, embeddings)[0], gradient)


def test_recall_at_k_with_virtual_items():
    """SiMix mixes similarities, for two virtual items on both sides."""
    embeddings, labels = batch()
    loss = create("loss", "core.recall_at_k", k=[1, 2], rank_temperature=0.1, mix=True)
    torch.manual_seed(4)
    value = loss(embeddings, labels).item()
    torch.manual_seed(4)
    pairs = [(i, j) for i in range(10) for j in range(i + 1, 10) if LABELS[i] == LABELS[j]]
    alphas = torch.rand(len(pairs), dtype=torch.float64).tolist()
    parts = [[(i, 1.0)] for i in range(10)]
    parts += [[(i, a), (j, 1 - a)] for (i, j), a in zip(pairs, alphas, strict=True)]
    plain = cosines(embeddings)
    s = [
        [sum(u * v * plain[i][j] for i, u in one for j, v in other) for other in parts]
        for one in parts
    ]
    every = LABELS + [LABELS[i] for i, _ in pairs]
    assert value == pytest.approx(recall_by_loops(s, every, [1, 2], 0.1, 1.0), abs=1e-12)
    assert value != pytest.approx(recall_by_loops(plain, LABELS, [1, 2], 0.1, 1.0), abs=1e-6)


def contextual_by_loops(s: list[list[float]], k: int, epsilon: float) -> list[list[float]]:
    count = len(s)
    d = [[2 - 2 * x for x in row] for row in s]

    def near(size: int) -> list[set[int]]:
        borders = [sorted(row)[size - 1] for row in d]
        return [{j for j in range(count) if d[i][j] <= borders[i] + epsilon} for i in range(count)]

    inside, half, every = near(k), near(k // 2), set(range(count))
    tilde = [[0.0] * count for _ in s]
    for i in range(count):
        for j in inside[i]:
            within = len(inside[i] & inside[j]) / len(inside[i])
            beyond = len(every - inside[i] - inside[j]) / max(1, len(every - inside[i]))
            tilde[i][j] = (within + beyond) / 2
    hat = []
    for i in range(count):
        mutual = [j for j in half[i] if i in half[j]]
        hat.append([sum(tilde[m][j] for m in mutual) / len(mutual) for j in range(count)])
    return [[(hat[i][j] + hat[j][i]) / 2 for j in range(count)] for i in range(count)]


@pytest.mark.parametrize("k", [2, 4, 9])
def test_contextual(k):
    embeddings, labels = batch()
    loss = create("loss", "core.contextual", neighbors=k, epsilon=0.05, negative_margin=0.1)
    s = cosines(embeddings)
    w = contextual_by_loops(s, k, 0.05)
    context = sum(
        (w[i][j] - (LABELS[i] == LABELS[j])) ** 2 for i in range(10) for j in range(10) if i != j
    )
    pairs = [(i, j, s[i][j]) for i in range(10) for j in range(10)]
    positive = [0.75 - x for i, j, x in pairs if LABELS[i] == LABELS[j] and x < 0.75]
    negative = [x - 0.1 for i, j, x in pairs if LABELS[i] != LABELS[j] and x > 0.1]
    wanted = (
        0.4 * context / 100
        + 0.1 * (sum(x for _, _, x in pairs) / 100 - 0.25) ** 2
        + 0.5 * (sum(positive) / len(positive) + sum(negative) / len(negative))
    )
    assert loss(embeddings, labels).item() == pytest.approx(wanted, abs=1e-12)


def test_the_slope_of_a_step_is_ten():
    from retrieval_core.contextual_loss import contextual

    embeddings, _ = batch()
    unit = torch.nn.functional.normalize(embeddings).detach()
    similarity = (unit @ unit.T).requires_grad_()
    contextual(similarity, 4, 0.05)[0, 2].backward()
    assert similarity.grad is not None
    # the chain rule with a slope of 10 for each step of D; the loops change one step at a time
    small, slopes = 1e-6, torch.zeros(10, 10, dtype=torch.float64)

    def smooth(shift: Tensor) -> float:
        """The similarity with each step replaced by its value plus 10 times a shift."""
        d = -(2 - 2 * similarity.detach())
        ranked = d.sort(1, descending=True).values
        inside = ((d + 0.05 - ranked[:, 3:4]) >= 0).double()
        half = ((d + 0.05 - ranked[:, 1:2]) >= 0).double()
        size, rest = inside.sum(1, keepdim=True), (1 - inside).sum(1, keepdim=True)
        inside, half = inside + 10 * shift, half + 10 * shift
        outside = 1 - inside
        tilde = 0.5 * (inside @ inside.T / size + outside @ outside.T / rest) * inside
        mutual = half * half.T
        hat = mutual @ tilde / mutual.sum(1, keepdim=True)
        return float(0.5 * (hat[0, 2] + hat[2, 0]))

    for i in range(10):
        for j in range(10):
            shift = torch.zeros(10, 10, dtype=torch.float64)
            shift[i, j] = small
            slopes[i, j] = (smooth(shift) - smooth(-shift)) / (2 * small)
    slopes[torch.arange(10), torch.arange(10)] *= (similarity.detach().diagonal() < 1).double()
    off = ~torch.eye(10, dtype=torch.bool)  # D of an item with itself is clamped at 0
    assert torch.allclose(similarity.grad[off], 2 * slopes[off], atol=1e-6)


def metrix_by_loops(x: Tensor, triplets: list[Any], pairs: tuple[Any, Any], part: float) -> float:
    unit = [[float(v) for v in row / row.norm()] for row in x.detach()]

    def apart(a: list[float], b: list[float]) -> float:
        return math.sqrt(sum((u - v) ** 2 for u, v in zip(a, b, strict=True)))

    def mean(losses: list[float]) -> float:
        above = [value for value in losses if value > 0]
        return sum(above) / len(above) if above else 0.0

    mixed_positive, mixed_negative = [], []
    for a, p, n in triplets:
        v = [part * u + (1 - part) * w for u, w in zip(unit[p], unit[n], strict=True)]
        length = math.sqrt(sum(u * u for u in v))
        distance = apart(unit[a], [u / length for u in v])
        mixed_positive.append(0.4 * part * max(0.0, distance - 0.1))
        mixed_negative.append(0.4 * (1 - part) * max(0.0, 1.5 - distance))
    return (
        mean([apart(unit[a], unit[p]) - 0.1 for a, p in pairs[0]])
        + mean([1.5 - apart(unit[a], unit[n]) for a, n in pairs[1]])
        + mean(mixed_positive)
        + mean(mixed_negative)
    )


def metrix_similarity_by_loops(
    x: Tensor, triplets: list[Any], pairs: tuple[Any, Any], part: float
) -> float:
    unit = [row / row.norm() for row in x.detach()]
    total = 0.0
    for anchor in range(10):
        clean, mixed = [0.0, 0.0], [0.0, 0.0]
        for side, scale in ((0, -3.0), (1, 20.0)):
            for a, other in pairs[side]:
                if a == anchor:
                    clean[side] += math.exp(scale * (float(unit[a] @ unit[other]) - 0.6))
            for a, p, n in triplets:
                if a == anchor:
                    v = part * unit[p] + (1 - part) * unit[n]
                    power = math.exp(scale * (float(unit[a] @ v / v.norm()) - 0.6))
                    mixed[side] += (part, 1 - part)[side] * power
        for sums, weight in ((clean, 1.0), (mixed, 0.4)):
            total += weight * (math.log(1 + sums[0]) / 3 + math.log(1 + sums[1]) / 20)
    return total / 10


METRIX: dict[str, tuple[Any, dict[str, float]]] = {
    "core.metrix": (metrix_by_loops, {"positive_margin": 0.1, "negative_margin": 1.5}),
    "core.metrix_multi_similarity": (
        metrix_similarity_by_loops,
        {"positive_scale": 3.0, "negative_scale": 20.0, "base": 0.6},
    ),
}


@pytest.mark.parametrize("mined", [False, True])
@pytest.mark.parametrize("name", METRIX)
def test_metrix(name, mined):
    embeddings, labels = batch()
    by_loops, options = METRIX[name]
    loss = create("loss", name, **options)
    torch.manual_seed(3)
    part = float(torch._sample_dirichlet(torch.full((2,), 2.0, dtype=torch.float64))[0])
    if mined:
        triplets = [(0, 2, 1), (0, 5, 3), (4, 1, 9)]
        pairs = [(a, p) for a, p, _ in triplets], [(a, n) for a, _, n in triplets]
        indices = tuple(torch.tensor(column) for column in zip(*triplets, strict=True))
    else:
        same = [(i, j) for i in range(10) for j in range(10) if i != j and LABELS[i] == LABELS[j]]
        other = [(i, j) for i in range(10) for j in range(10) if LABELS[i] != LABELS[j]]
        pairs, indices = (same, other), None  # type: ignore[assignment]
        triplets = [(a, p, n) for a, p in same for b, n in other if a == b]
    torch.manual_seed(3)
    value = loss(embeddings, labels, indices).item()
    assert value == pytest.approx(by_loops(embeddings, triplets, pairs, part), abs=1e-9)


def test_metrix_of_proxies():
    embeddings, labels = batch()
    loss = create("loss", "core.metrix_proxy_anchor", classes=5, embedding_size=6, scale=8.0)
    torch.manual_seed(3)
    part = float(torch._sample_dirichlet(torch.full((2,), 2.0, dtype=torch.float64))[0])
    unit = [row / row.norm() for row in embeddings.detach()]
    proxies = [row / row.norm() for row in loss.proxies.detach().double()]
    terms: list[list[float]] = [[], [], [], []]
    for label, proxy in enumerate(proxies):
        sums = [0.0] * 4
        for i, own in enumerate(LABELS):
            power = math.exp(8 * (0.1 + (-1 if own == label else 1) * float(proxy @ unit[i])))
            sums[own != label] += power
            for j, other in enumerate(LABELS):
                if own == label != other:
                    v = part * unit[i] + (1 - part) * unit[j]
                    cosine = float(proxy @ v / v.norm())
                    sums[2] += part * math.exp(8 * (0.1 - cosine))
                    sums[3] += (1 - part) * math.exp(8 * (0.1 + cosine))
        for term, value, everywhere in zip(terms, sums, (0, 1, 0, 0), strict=True):
            if everywhere or label in LABELS:
                term.append(math.log(1 + value))
    wanted = sum(w * sum(t) / len(t) for w, t in zip((1, 1, 0.4, 0.4), terms, strict=True))
    torch.manual_seed(3)
    assert loss(embeddings, labels).item() == pytest.approx(wanted, abs=1e-6)


def test_barlow_twins():
    embeddings, labels = batch()
    value = create("loss", "core.barlow_twins", weight=0.1)(embeddings, labels).item()
    # class 0 has 0, 2, 5, 9; class 1 has 1, 4, 7; class 2 has 3, 6; class 3 has one item
    first, second = [0, 5, 1, 3], [2, 9, 4, 6]
    x = embeddings.tolist()
    wanted = 0.0
    for i in range(6):
        for j in range(6):
            one, other = [x[row][i] for row in first], [x[row][j] for row in second]
            one = [value - sum(one) / 4 for value in one]
            other = [value - sum(other) / 4 for value in other]
            c = sum(u * v for u, v in zip(one, other, strict=True)) / math.sqrt(
                sum(u * u for u in one) * sum(v * v for v in other)
            )
            wanted += (1 - c) ** 2 if i == j else 0.1 * c**2
    assert value == pytest.approx(wanted, abs=1e-9)


def test_weights_above_1_are_refused():
    with pytest.raises(RecipeError, match=r"weight \+ mean_weight is 1.2"):
        create("loss", "core.contextual", weight=0.9, mean_weight=0.3)


class TestGenerators:
    def rows(self) -> tuple[Tensor, ...]:
        x = torch.randn(4, 5, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        return tuple(x.unbind())

    def test_symmetrical_synthesis(self):
        anchor, positive, negative, mate = self.rows()
        synthetic = create("generator", "core.symmetrical_synthesis")(
            anchor, positive, negative, mate
        )
        for a, n, m, row in zip(anchor, negative, mate, synthetic, strict=True):
            points = [n, m]
            for x, y in ((n, m), (m, n)):
                dot, square = float((x * y).sum()), float((y * y).sum())
                mirrored = torch.stack(
                    [2 * dot / square * v - u for u, v in zip(x, y, strict=True)]
                )
                assert mirrored.norm() == pytest.approx(float(x.norm()))
                assert float((mirrored * y).sum()) == pytest.approx(dot)
                points.append(mirrored)
            nearest = min(points, key=lambda point: float((point - a).square().sum()))
            assert torch.allclose(row, nearest)

    def test_embedding_expansion(self):
        anchor, positive, negative, mate = self.rows()
        expansion = create("generator", "core.embedding_expansion", inner=3)
        synthetic = expansion(anchor, positive, negative, mate)
        for a, n, m, row in zip(anchor, negative, mate, synthetic, strict=True):
            points = [n, m]
            for k in (1, 2, 3):
                point = (k * n + (4 - k) * m) / 4
                points.append(point / point.norm() * n.norm())
            nearest = min(points, key=lambda point: float((point - a).square().sum()))
            assert torch.allclose(row, nearest)
