"""Losses and a miner on masked matrices: upstream's numbers and gradients, whatever reduces them,
in a few N × N.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from pytorch_metric_learning import distances, losses, miners, reducers
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from retrieval_pml import miners as pml_miners
from retrieval_pml import softmax_losses, triplet_losses
from retrieval_pml.parts import PerAnchorReducer

OURS = {**vars(triplet_losses), **vars(softmax_losses)}
UPSTREAM = vars(losses)

torch.manual_seed(0)
Y = torch.tensor([0, 1, 0, 2, 1, 1, 3, 2, 0, 4, 1, 2])
REF_Y = torch.tensor([1, 0, 5, 2, 2, 0, 1])
REDUCERS: dict[str, Callable[[], Any]] = {
    "default": lambda: None,
    "sum": reducers.SumReducer,
    "low": lambda: reducers.ThresholdReducer(low=0.3),
    "below zero": lambda: reducers.ThresholdReducer(low=-1),
    "high": lambda: reducers.ThresholdReducer(high=0.7),
    "both": lambda: reducers.ThresholdReducer(low=0.2, high=0.6),
    "per anchor": PerAnchorReducer,
}
BATCHES = {"spread": 1.0, "whole numbers": 0.0}


def codes(rows: int, seed: int, spread: float) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    if not spread:  # many distances are equal, and some are zero
        return torch.randint(-1, 2, (rows, 3), generator=generator).double() + 0.5
    return 1 + spread * torch.randn(rows, 4, generator=generator, dtype=torch.float64)


def same(
    ours: Any, theirs: Any, x: Tensor, y: Tensor, ref: Tensor | None = None, *, mined: Any = None
) -> None:
    """Both give one value, and one gradient to the codes, the reference set and their own
    parameters.
    """
    actual = []
    for loss in (ours, theirs):
        leaves = [x.clone().requires_grad_()] + (
            [] if ref is None else [ref.clone().requires_grad_()]
        )
        parameters = list(loss.parameters())
        value = loss(leaves[0], y, mined, *([] if ref is None else [leaves[1], REF_Y]))
        gradients = torch.autograd.grad(value, [*leaves, *parameters], allow_unused=True)
        none = [torch.zeros_like(leaf) for leaf in (*leaves, *parameters)]
        actual.append(
            [value, *(zero if g is None else g for g, zero in zip(gradients, none, strict=True))]
        )
    for left, other in zip(*actual, strict=True):
        torch.testing.assert_close(left, other, rtol=1e-9, atol=1e-12, check_dtype=False)


@pytest.mark.parametrize("reduced_by", REDUCERS)
@pytest.mark.parametrize("spread", BATCHES.values(), ids=BATCHES)
@pytest.mark.parametrize("reference", [False, True])
@pytest.mark.parametrize(
    "distance", [distances.LpDistance, distances.CosineSimilarity, distances.DotProductSimilarity]
)
def test_triplets(distance: Any, reference: bool, spread: float, reduced_by: str) -> None:
    options = {"margin": 0.25, "distance": distance(), "reducer": REDUCERS[reduced_by]()}
    built = triplet_losses.TripletMarginLoss(**options), losses.TripletMarginLoss(**options)
    same(*built, codes(12, 0, spread), Y, codes(7, 1, spread) if reference else None)


@pytest.mark.parametrize("reduced_by", REDUCERS)
@pytest.mark.parametrize("spread", BATCHES.values(), ids=BATCHES)
@pytest.mark.parametrize("reference", [False, True])
@pytest.mark.parametrize("distance", [distances.LpDistance, distances.CosineSimilarity])
def test_a_miners_triplets(
    distance: Any, reference: bool, spread: float, reduced_by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triplet_losses, "TRIPLETS", 7)
    x, ref = codes(12, 0, spread), codes(7, 1, spread) if reference else None
    arguments = (x, Y) if ref is None else (x, Y, ref, REF_Y)
    options = {"margin": 0.25, "distance": distance(), "reducer": REDUCERS[reduced_by]()}
    for miner in (
        miners.TripletMarginMiner(margin=0.5),
        miners.MultiSimilarityMiner(),
        miners.BatchHardMiner(),
    ):
        mined = miner(*arguments)
        assert len(mined[0])
        twice = tuple(
            torch.cat([value, value[:3]]) for value in mined
        )  # one that comes again counts again
        for indices in (mined, twice):
            built = triplet_losses.TripletMarginLoss(**options), losses.TripletMarginLoss(**options)
            same(*built, x, Y, ref, mined=indices)


def test_a_gradient_of_a_miners_triplets_gradient() -> None:
    x = codes(12, 0, 1.0).requires_grad_()
    mined = miners.TripletMarginMiner(margin=0.5)(x.detach(), Y)
    actual = []
    for module in (OURS, UPSTREAM):
        (gradient,) = torch.autograd.grad(
            module["TripletMarginLoss"]()(x, Y, mined), x, create_graph=True
        )
        actual.append(torch.autograd.grad(gradient.square().sum(), x)[0])
    torch.testing.assert_close(*actual)


@pytest.mark.parametrize("labels", [[0] * 12, list(range(12))], ids=["one class", "no positives"])
@pytest.mark.parametrize(
    "name", ["TripletMarginLoss", "MarginLoss", "MultiSimilarityLoss", "CircleLoss"]
)
def test_a_batch_without_pairs_of_either_kind(name: str, labels: list[int]) -> None:
    same(OURS[name](), UPSTREAM[name](), codes(12, 0, 1.0), torch.tensor(labels))


@pytest.mark.parametrize("classes", [None, 6])
@pytest.mark.parametrize("learn_beta", [False, True])
@pytest.mark.parametrize("reduced_by", ["default", "sum"])
@pytest.mark.parametrize("reference", [False, True])
@pytest.mark.parametrize("spread", BATCHES.values(), ids=BATCHES)
def test_margin(
    spread: float, reference: bool, reduced_by: str, learn_beta: bool, classes: int | None
) -> None:
    options = {"learn_beta": learn_beta, "num_classes": classes, "nu": 0.3, "beta": 0.9}
    built = [
        cls(reducer=REDUCERS[reduced_by](), **options)
        for cls in (triplet_losses.MarginLoss, losses.MarginLoss)
    ]
    for left in built:
        left.double()
    same(*built, codes(12, 0, spread), Y, codes(7, 1, spread) if reference else None)


@pytest.mark.parametrize("name", ["MultiSimilarityLoss", "CircleLoss"])
@pytest.mark.parametrize("reduced_by", ["default", "low"])
@pytest.mark.parametrize("mined", [False, True])
@pytest.mark.parametrize("reference", [False, True])
@pytest.mark.parametrize("spread", BATCHES.values(), ids=BATCHES)
def test_pairs(spread: float, reference: bool, mined: bool, reduced_by: str, name: str) -> None:
    x, ref = codes(12, 0, spread), codes(7, 1, spread) if reference else None
    pairs = (
        miners.MultiSimilarityMiner()(x, Y, *([] if ref is None else [ref, REF_Y]))
        if mined
        else None
    )
    built = (cls(reducer=REDUCERS[reduced_by]()) for cls in (OURS[name], UPSTREAM[name]))
    same(*built, x, Y, ref, mined=pairs)


@pytest.mark.parametrize("distance", [distances.CosineSimilarity, distances.LpDistance])
@pytest.mark.parametrize("epsilon", [0.0, 0.1, -0.2])
@pytest.mark.parametrize("spread", BATCHES.values(), ids=BATCHES)
@pytest.mark.parametrize(
    "labels", [Y, torch.zeros(12, dtype=torch.int64), torch.arange(12)], ids=["some", "one", "each"]
)
def test_the_miner_finds_upstreams_pairs(
    labels: Tensor, spread: float, epsilon: float, distance: Any
) -> None:
    x, ref = codes(12, 0, spread), codes(7, 1, spread)
    for arguments in ((x, labels), (x, labels, ref, REF_Y)):
        ours, theirs = (
            cls(epsilon=epsilon, distance=distance())(*arguments)
            for cls in (pml_miners.MultiSimilarityMiner, miners.MultiSimilarityMiner)
        )
        assert all(left.dtype == torch.int64 for left in ours)
        for first in (0, 2):
            pairs = [
                sorted(zip(value[first].tolist(), value[first + 1].tolist(), strict=True))
                for value in (ours, theirs)
            ]
            assert pairs[0] == pairs[1]


@pytest.mark.parametrize("reference", [False, True])
@pytest.mark.parametrize("name", ["TripletMarginLoss", "MultiSimilarityLoss", "CircleLoss"])
def test_a_gradient_of_a_gradient(name: str, reference: bool) -> None:
    x = codes(12, 0, 1.0).requires_grad_()
    rivals = (None, codes(7, 1, 1.0), REF_Y) if reference else ()
    actual = []
    for module in (OURS, UPSTREAM):
        (gradient,) = torch.autograd.grad(module[name]()(x, Y, *rivals), x, create_graph=True)
        actual.append(torch.autograd.grad(gradient.square().sum(), x)[0])
    torch.testing.assert_close(*actual)


@pytest.mark.parametrize("scale", [1.0, 30.0])
@pytest.mark.parametrize(
    ("name", "distance"),
    [
        ("MultiSimilarityLoss", distances.DotProductSimilarity(normalize_embeddings=False)),
        ("MultiSimilarityLoss", distances.LpDistance(power=2)),
        ("CircleLoss", distances.CosineSimilarity(power=2)),
    ],
)
def test_a_loss_of_the_matrix_over_every_distance(name: str, distance: Any, scale: float) -> None:
    """Products of large codes have exponentials beyond any float."""
    built = [module[name](distance=distance) for module in (OURS, UPSTREAM)]
    same(*built, scale * codes(12, 0, 1.0), Y)


class Largest(TorchDispatchMode):
    """Notes how many entries the largest tensor has."""

    entries = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        built = function(*args, **(kwargs or {}))
        for left in built if isinstance(built, (tuple, list)) else [built]:
            if isinstance(left, Tensor):
                self.entries = max(self.entries, left.numel())
        return built


@pytest.mark.parametrize(
    "name", ["TripletMarginLoss", "MarginLoss", "MultiSimilarityLoss", "CircleLoss"]
)
def test_memory_is_that_of_pairs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """384 items of 4 classes have 10 million triplets."""
    monkeypatch.setattr(triplet_losses, "TRIPLETS", 2**16)
    x, y = codes(384, 0, 1.0).requires_grad_(), torch.arange(384) % 4
    with Largest() as seen:
        OURS[name]()(x, y).backward()
    assert seen.entries <= 384 * 384


def test_memory_of_mined_triplets_is_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loss needs nothing as long as the list."""
    monkeypatch.setattr(triplet_losses, "TRIPLETS", 2**12)
    x, y = codes(96, 0, 1.0).requires_grad_(), torch.arange(96) % 4
    mined = pml_miners.TripletMarginMiner(margin=0.5)(x.detach(), y)
    assert len(mined[0]) > 4 * 96 * 96
    with Largest() as seen:
        triplet_losses.TripletMarginLoss()(x, y, mined).backward()
    assert seen.entries <= 96 * 96
