"""The paper's losses against plain loops in float64 and finite differences, with any distance, and
on odd batches.
"""

from __future__ import annotations

import math
from pkgutil import resolve_name
from typing import Any

import pytest
import torch
from pytorch_metric_learning import distances
from retrieval.errors import RecipeError
from retrieval.host.plugins import load_plugins
from retrieval.model.contracts import Combiner
from torch import Tensor, nn

from retrieval_daml import retrieval_losses

LOSSES = {name: resolve_name(place) for name, place in retrieval_losses().items()}
Y = torch.tensor([0, 0, 1, 1, 2, 2, 0, 1, 3])
REF_Y = torch.tensor([1, 0, 2, 2, 0, 1, 4])
G = torch.Generator().manual_seed(0)
X = torch.randn(len(Y), 5, generator=G, dtype=torch.float64)
X /= X.norm(dim=1, keepdim=True)
REF = torch.randn(len(REF_Y), 5, generator=G, dtype=torch.float64)
REF /= REF.norm(dim=1, keepdim=True)

Lists = tuple[list[tuple[int, int]], list[tuple[int, int]], list[tuple[int, int, int]]]


class Weighted(Combiner):
    """A distance of weighted differences, with a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, 5, dtype=torch.float64))

    def compute_mat(self, query_emb: Tensor, ref_emb: Tensor) -> Tensor:
        return ((self.weight * (query_emb[:, None] - ref_emb)).square().sum(2) + 1e-12).sqrt()

    def pairwise_distance(self, query_emb: Tensor, ref_emb: Tensor) -> Tensor:
        return ((self.weight * (query_emb - ref_emb)).square().sum(1) + 1e-12).sqrt()


def euclid(x: list[float], y: list[float]) -> float:
    return math.sqrt(sum((a - b) ** 2 for a, b in zip(x, y, strict=True)))


def weighted(x: list[float], y: list[float]) -> float:
    w = [0.5, 0.75, 1.0, 1.25, 1.5]
    return math.sqrt(sum((c * (a - b)) ** 2 for a, b, c in zip(x, y, w, strict=True)))


def all_lists(query: Tensor, reference: Tensor | None) -> Lists:
    """Every pair and triplet by label."""
    y = query.tolist()
    z = y if reference is None else reference.tolist()
    positive = [
        (i, j)
        for i in range(len(y))
        for j in range(len(z))
        if y[i] == z[j] and (reference is not None or i != j)
    ]
    negative = [(i, j) for i in range(len(y)) for j in range(len(z)) if y[i] != z[j]]
    return positive, negative, [(a, p, n) for a, p in positive for b, n in negative if a == b]


def by_loops(
    name: str, lists: Lists, x: Any, z: Any, own: bool, d: Any = euclid, **args: Any
) -> float:
    """The loss from its formula."""
    positive, negative, triplets = lists
    margin = args.get("margin", 1.0)

    def similar(i: int, j: int) -> float:
        if d is euclid:
            return sum(a * b for a, b in zip(x[i], z[j], strict=True))
        return 1 - float(d(x[i], z[j])) ** 2 / 2

    if name == "contrastive":
        near = [d(x[i], z[j]) ** 2 for i, j in positive]
        far = [max(0.0, margin - d(x[i], z[j]) ** 2) for i, j in negative]
        return float(sum(near) / len(near) + sum(far) / len(far))
    if name == "triplet":
        value = [max(0.0, d(x[a], z[p]) ** 2 - d(x[a], z[n]) ** 2 + margin) for a, p, n in triplets]
        return sum(value) / len(value)
    if name == "npair":
        scale = args.get("scale", 16.0)
        value = []
        for a, p in positive:
            gaps = [similar(a, n) - similar(a, p) for b, n in negative if b == a]
            value.append(math.log(1 + sum(math.exp(scale * gap) for gap in gaps)))
        return sum(value) / len(value)
    value = []
    for i, j in positive:
        push = [margin - d(x[i], z[n]) for b, n in negative if b == i]
        if own and j < len(x):
            push += [margin - d(x[j], z[n]) for b, n in negative if b == j]
        if not push:
            value.append(0.0)
        elif args.get("form") == "original":
            soft = math.log(sum(math.exp(v) for v in push))
            value.append(max(0.0, soft + d(x[i], z[j])) ** 2 / 2)
        else:
            value.append(max(0.0, max(push) + d(x[i], z[j])) / 2)
    return sum(value) / len(value)


CASES = [
    ("contrastive", {}),
    ("contrastive", {"margin": 1.7}),
    ("triplet", {}),
    ("triplet", {"margin": 0.3}),
    ("lifted", {}),
    ("lifted", {"form": "original"}),
    ("lifted", {"form": "original", "margin": 0.2}),
    ("npair", {"scale": 1.0}),
    ("npair", {}),
]


def expected_pairs(name: str, query: Tensor, reference: Tensor | None) -> Lists:
    if name != "npair":
        return all_lists(query, reference)
    # a class's items 2r and 2r + 1 are a pair; or the k-th item of a class in the batch and in the
    # reference set
    y, z = query.tolist(), (query if reference is None else reference).tolist()
    rounds: dict[int, list[tuple[int, int]]] = {}
    for c in sorted(set(y)):
        local, present = ([i for i, v in enumerate(of) if v == c] for of in (y, z))
        both = (local[::2], local[1::2]) if reference is None else (local, present)
        for r, pair in enumerate(zip(*both, strict=False)):
            rounds.setdefault(r, []).append(pair)
    positive = [pair for r in rounds.values() for pair in r]
    negative = [(a, n) for r in rounds.values() for a, _ in r for b, n in r if a != b]
    return positive, negative, []


@pytest.mark.parametrize(("name", "args"), CASES)
@pytest.mark.parametrize("reference", [False, True], ids=["batch", "reference"])
def test_value_and_gradient_without_a_miner(name, args, reference):
    loss = LOSSES[name](**args)
    lists = expected_pairs(name, Y, REF_Y if reference else None)
    x, z = X.clone().requires_grad_(), (REF if reference else X).clone().requires_grad_()
    value = loss(x, Y, None, z, REF_Y) if reference else loss(x, Y)
    expected = by_loops(name, lists, X.tolist(), z.tolist(), not reference, **args)
    assert value.item() == pytest.approx(expected, rel=1e-9, abs=1e-9)
    value.backward()
    for i, k in ((0, 0), (3, 2), (8, 4)):
        ends = []
        for step in (1e-6, -1e-6):
            moved = X.clone()
            moved[i, k] += step
            other = REF if reference else moved
            ends.append(
                by_loops(name, lists, moved.tolist(), other.tolist(), not reference, **args)
            )
        assert x.grad[i, k].item() == pytest.approx((ends[0] - ends[1]) / 2e-6, abs=1e-6)


TRIPLETS = (
    torch.tensor([0, 0, 2, 3, 0]),
    torch.tensor([1, 6, 3, 2, 1]),
    torch.tensor([9, 10, 11, 12, 13]),
)
"""Triplets of a batch with a generator: the reference set is the batch plus synthetic negatives."""


@pytest.mark.parametrize(("name", "args"), CASES)
def test_value_with_synthetic_negatives_after_the_batch(name, args):
    z = torch.cat([X, REF])
    value = LOSSES[name](**args)(X, Y, TRIPLETS, z, torch.cat([Y, REF_Y]))
    rows = list(zip(*(t.tolist() for t in TRIPLETS), strict=True))
    positive = sorted({(a, p) for a, p, _ in rows})
    lists: Lists = (positive, [(a, n) for a, _, n in rows], rows)
    expected = by_loops(name, lists, X.tolist(), z.tolist(), True, **args)
    assert value.item() == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(("name", "args"), CASES)
def test_a_combiner_measures_and_is_trained(name, args):
    combiner = Weighted()
    loss = LOSSES[name](distance=combiner, **args)
    value = loss(X, Y)
    lists = expected_pairs(name, Y, None)
    expected = by_loops(name, lists, X.tolist(), X.tolist(), True, weighted, **args)
    assert value.item() == pytest.approx(expected, rel=1e-6)
    value.backward()
    assert combiner.weight.grad.abs().sum() > 0


@pytest.mark.parametrize("name", LOSSES)
def test_equivalent_distances_of_unit_vectors_give_the_same_loss(name):
    same: list[Any] = [
        distances.LpDistance(normalize_embeddings=False),
        distances.LpDistance(),
        distances.LpDistance(power=2),
        distances.CosineSimilarity(),
        distances.DotProductSimilarity(normalize_embeddings=False),
    ]
    values = [LOSSES[name](distance=distance)(X, Y).item() for distance in same]
    assert values == pytest.approx([values[0]] * len(same), rel=1e-9)
    other = LOSSES[name](distance=distances.LpDistance(p=1))(X, Y).item()
    assert other != pytest.approx(values[0], rel=1e-3)
    assert math.isfinite(LOSSES[name](distance=distances.SNRDistance())(X, Y).item())


# a triplet listed twice is two triplets
@pytest.mark.parametrize("name", sorted(set(LOSSES) - {"triplet"}))
def test_pairs_listed_twice_count_once_and_order_does_not_matter(name):
    pairs = tuple(map(torch.tensor, ([0, 2, 0], [1, 3, 6], [0, 2], [2, 8])))
    twice = tuple(torch.cat([x.flip(0), x]) for x in pairs)
    once = LOSSES[name]()(X, Y, pairs).item()
    assert LOSSES[name]()(X, Y, twice).item() == pytest.approx(once, rel=1e-12)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("labels", [range(9), [0] * 9], ids=["distinct", "one class"])
def test_a_batch_without_negatives_or_positives(name, labels):
    x = X.clone().requires_grad_()
    value = LOSSES[name]()(x, torch.tensor(list(labels)))
    value.backward()
    assert x.grad is not None and torch.isfinite(x.grad).all()
    if name != "contrastive":  # which needs only one kind of pair
        assert value.item() == 0 and not x.grad.any()
    none = torch.zeros(0, dtype=torch.long)
    assert LOSSES[name]()(x, Y, (none, none, none), REF, REF_Y).item() == 0


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"name": "daml.npair", "scale": 0.0}, "greater than 0|above 0"),
        ({"name": "daml.lifted", "form": "squared"}, "printed|original"),
    ],
)
def test_wrong_parameters_are_refused(values, words):
    assert len(load_plugins().check("losses", values, "[loss]")) == 1
    with pytest.raises((RecipeError, ValueError), match=words):
        LOSSES[values["name"].split(".")[1]](**{k: v for k, v in values.items() if k != "name"})
