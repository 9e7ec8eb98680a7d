"""Losses and miners in blocks of rows: upstream's values, gradients, pairs and draws, with several
blocks in every batch.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from pytorch_metric_learning import distances, losses, miners, reducers
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from retrieval_pml import miners as pml_miners
from retrieval_pml import (
    pair_losses,
    pair_matrix,
    parts,
    ranking_losses,
    softmax_losses,
    triplet_losses,
)
from retrieval_pml.parts import PerAnchorReducer

Y = torch.tensor([0, 1, 0, 2, 1, 1, 3, 2, 0, 4, 1, 2] * 2 + [5, 5, 0, 1])
REF_Y = torch.tensor([1, 0, 5, 2, 2, 0, 1, 3, 7])


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pair_matrix, "ENTRIES", 64)


def codes(rows: int, seed: int, spread: str) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    if spread == "whole numbers":  # some items are the same
        return torch.randint(-1, 2, (rows, 3), generator=generator).double() + 0.5
    return 1 + 0.7 * torch.randn(rows, 6, generator=generator, dtype=torch.float64)


def found(loss: Any, x: Tensor, ref: Tensor | None, mined: Any = None) -> list[Tensor]:
    leaves = [x.clone().requires_grad_()] + ([] if ref is None else [ref.clone().requires_grad_()])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # upstream's, of large temperatures
        value = loss(leaves[0], Y, mined, *([] if ref is None else [leaves[1], REF_Y]))
    gradients = torch.autograd.grad(value, leaves, allow_unused=True)
    return [
        value,
        *(torch.zeros_like(x) if g is None else g for x, g in zip(leaves, gradients, strict=True)),
    ]


def assert_same(ours: Any, theirs: Any, *given: Any, abs_tol: float = 1e-9) -> None:
    for left, other in zip(found(ours, *given), found(theirs, *given), strict=True):
        torch.testing.assert_close(left, other, rtol=1e-7, atol=abs_tol, check_dtype=False)


REDUCERS: dict[str, Callable[[], Any]] = {
    "default": lambda: None,
    "mean": reducers.MeanReducer,
    "both": lambda: reducers.ThresholdReducer(low=0.01, high=0.9),
    "per anchor": PerAnchorReducer,
    "by name": lambda: reducers.MultipleReducers(
        {"neg_loss": reducers.MeanReducer()}, reducers.AvgNonZeroReducer()
    ),
}
OF_PAIRS: dict[str, tuple[Any, Any]] = {
    "contrastive": (pair_losses.ContrastiveLoss, losses.ContrastiveLoss),
    "intra_pair_variance": (pair_losses.IntraPairVarianceLoss, losses.IntraPairVarianceLoss),
}
WITH_REFERENCE: dict[str, tuple[Any, Any]] = {
    **OF_PAIRS,
    "snr": (
        lambda: pair_losses.SignalToNoiseRatioContrastiveLoss(distance=parts.SNRDistance()),
        losses.SignalToNoiseRatioContrastiveLoss,
    ),
    "sup_con": (softmax_losses.SupConLoss, losses.SupConLoss),
    "nt_xent": (softmax_losses.NTXentLoss, losses.NTXentLoss),
    "tuplet_margin": (softmax_losses.TupletMarginLoss, losses.TupletMarginLoss),
    "nca": (softmax_losses.NCALoss, losses.NCALoss),
    "dynamic_soft_margin": (triplet_losses.DynamicSoftMarginLoss, None),
}
ALONE: dict[str, tuple[Any, Any]] = {
    "fast_ap": (ranking_losses.FastAPLoss, losses.FastAPLoss),
    "lifted": (pair_losses.LiftedStructureLoss, losses.LiftedStructureLoss),
    "threshold": (
        pair_losses.ThresholdConsistentMarginLoss,
        losses.ThresholdConsistentMarginLoss,
    ),
    "ranked_list": (
        lambda: ranking_losses.RankedListLoss(margin=0.4, Tn=4, Tp=1, alpha=1.2),
        lambda: losses.RankedListLoss(margin=0.4, Tn=4, Tp=1, alpha=1.2),
    ),
    **{
        f"pnp {variant}": (
            lambda variant=variant: ranking_losses.PNPLoss(variant=variant, anneal=0.1),
            lambda variant=variant: losses.PNPLoss(variant=variant, anneal=0.1),
        )
        for variant in losses.PNPLoss.VARIANTS
    },
}


@pytest.mark.parametrize("reference", [False, True])
@pytest.mark.parametrize("name", [name for name in WITH_REFERENCE if name != "dynamic_soft_margin"])
def test_a_loss_of_pairs(name: str, reference: bool) -> None:
    ours, theirs = WITH_REFERENCE[name]
    assert_same(
        ours(), theirs(), codes(28, 0, "spread"), codes(9, 1, "spread") if reference else None
    )


@pytest.mark.parametrize("name", ALONE)
def test_a_loss_of_the_batch_alone(name: str) -> None:
    ours, theirs = ALONE[name]
    assert_same(ours(), theirs(), codes(28, 0, "spread"), None)


@pytest.mark.parametrize("reduced_by", REDUCERS)
@pytest.mark.parametrize(
    "distance", [distances.LpDistance, distances.CosineSimilarity, distances.SNRDistance]
)
@pytest.mark.parametrize("name", OF_PAIRS)
def test_every_reducer_and_distance(name: str, distance: Any, reduced_by: str) -> None:
    built = [cls(distance=distance(), reducer=REDUCERS[reduced_by]()) for cls in OF_PAIRS[name]]
    assert_same(*built, codes(28, 0, "spread"), None)


@pytest.mark.parametrize("name", [*WITH_REFERENCE, "lifted"])
def test_a_miners_pairs(name: str) -> None:
    ours, theirs = {**WITH_REFERENCE, **ALONE}[name]
    theirs = theirs or losses.DynamicSoftMarginLoss
    x = codes(28, 0, "spread")
    pairs = miners.TripletMarginMiner(margin=0.3)(x, Y)
    if name == "dynamic_soft_margin":
        torch.testing.assert_close(ours()(x, Y, pairs), theirs()(x, Y, pairs), rtol=1e-5, atol=1e-6)
    else:
        assert_same(ours(), theirs(), x, None, pairs)


@pytest.mark.parametrize("reference", [False, True])
def test_the_angular_loss_on_unit_vectors(reference: bool) -> None:
    x, ref = (torch.nn.functional.normalize(codes(n, n, "spread")) for n in (28, 9))
    arguments = (x, Y, None, ref, REF_Y) if reference else (x, Y)
    ours, theirs = triplet_losses.AngularLoss(), losses.AngularLoss()
    torch.testing.assert_close(ours(*arguments), theirs(*arguments))
    inputs = [x.clone().requires_grad_(), *([ref.clone().requires_grad_()] if reference else [])]

    def call(x: Tensor, *ref: Tensor) -> Any:
        return ours(x, Y, None, *ref, *[REF_Y for _ in ref])

    assert torch.autograd.gradcheck(call, inputs)


OF_GRADIENTS = [
    "sup_con",
    "nt_xent",
    "nca",
    "contrastive",
    "intra_pair_variance",
    "fast_ap",
    "angular",
]


@pytest.mark.parametrize("name", OF_GRADIENTS)
def test_a_gradient_of_a_gradient(name: str) -> None:
    built = {
        **WITH_REFERENCE,
        **ALONE,
        "angular": (triplet_losses.AngularLoss, losses.AngularLoss),
    }[name]
    x = torch.nn.functional.normalize(codes(28, 0, "spread")).requires_grad_()
    second = []
    for loss in built:
        (gradient,) = torch.autograd.grad(
            loss()(torch.nn.functional.normalize(x), Y), x, create_graph=True
        )
        second.append(torch.autograd.grad(gradient.square().sum(), x)[0])
    if name in ("angular", "fast_ap"):  # ours normalises the negatives too; upstream's is NaN
        assert second[0].isfinite().all() and second[0].abs().max() > 0
    else:
        torch.testing.assert_close(*second, rtol=1e-6, atol=1e-7)


MINERS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    **{
        f"{pos} {neg}": (
            pml_miners.BatchEasyHardMiner,
            miners.BatchEasyHardMiner,
            {"pos_strategy": pos, "neg_strategy": neg},
        )
        for pos in ("easy", "hard", "semihard", "all")
        for neg in ("easy", "hard", "semihard", "all")
        if (pos, neg) not in (("semihard", "semihard"), ("all", "semihard"), ("semihard", "all"))
    },
    "allowed": (
        pml_miners.BatchEasyHardMiner,
        miners.BatchEasyHardMiner,
        {"allowed_pos_range": (0.2, 0.6), "allowed_neg_range": (0.3, 0.7)},
    ),
    "batch_hard": (pml_miners.BatchHardMiner, miners.BatchHardMiner, {}),
    "hdc": (pml_miners.HDCMiner, miners.HDCMiner, {"filter_percentage": 0.3}),
    "pair_margin": (pml_miners.PairMarginMiner, miners.PairMarginMiner, {"pos_margin": 0.4}),
    "uniform_histogram": (
        pml_miners.UniformHistogramMiner,
        miners.UniformHistogramMiner,
        {"num_bins": 7},
    ),
    "many bins": (
        pml_miners.UniformHistogramMiner,
        miners.UniformHistogramMiner,
        {"num_bins": 300},
    ),
    **{
        f"triplets {kind}": (
            pml_miners.TripletMarginMiner,
            miners.TripletMarginMiner,
            {"type_of_triplets": kind},
        )
        for kind in ("all", "hard", "semihard", "easy")
    },
}


def picked(miner: Any, *given: Any) -> Any:
    torch.manual_seed(3)
    return miner(*given)


@pytest.mark.parametrize("reference", [False, True])
@pytest.mark.parametrize("spread", ["spread", "whole numbers"])
@pytest.mark.parametrize("distance", [distances.LpDistance, distances.CosineSimilarity])
@pytest.mark.parametrize("name", MINERS)
def test_a_miner_gives_upstreams_indices(
    name: str, distance: Any, spread: str, reference: bool
) -> None:
    x, ref = codes(28, 0, spread), codes(9, 1, spread)
    arguments = (x, Y, ref, REF_Y) if reference else (x, Y)
    ours, theirs, options = MINERS[name]
    expected = picked(theirs(distance=distance(), **options), *arguments)
    for left, other in zip(
        picked(ours(distance=distance(), **options), *arguments), expected, strict=True
    ):
        assert left.dtype == torch.int64
        assert left.tolist() == other.tolist()


@pytest.mark.parametrize("reference", [False, True])
@pytest.mark.parametrize("name", ["DistanceWeightedMiner", "AngularMiner"])
def test_a_miner_on_unit_vectors_gives_upstreams_triplets(name: str, reference: bool) -> None:
    x, ref = (torch.nn.functional.normalize(codes(n, n, "spread")) for n in (28, 9))
    arguments = (x, Y, ref, REF_Y) if reference else (x, Y)
    expected = picked(getattr(miners, name)(), *arguments)
    assert len(expected[0])
    for left, other in zip(picked(getattr(pml_miners, name)(), *arguments), expected, strict=True):
        assert left.tolist() == other.tolist()


@pytest.mark.parametrize(
    "labels", [torch.zeros(28, dtype=torch.int64), torch.arange(28)], ids=["one", "each"]
)
@pytest.mark.parametrize("name", [*MINERS, "DistanceWeightedMiner", "AngularMiner"])
def test_a_batch_without_pairs_of_either_kind(name: str, labels: Tensor) -> None:
    ours, theirs, options = MINERS.get(name) or (
        getattr(pml_miners, name),
        getattr(miners, name),
        {},
    )
    x = codes(28, 0, "spread")
    expected = picked(theirs(**options), x, labels)
    assert [len(value) for value in picked(ours(**options), x, labels)] == [
        len(value) for value in expected
    ]


# --- one matrix for a loss and its miner
# ---------------------------------------------------------------------


class Products(TorchDispatchMode):
    """Counts products of matrices, and notes how many entries the largest tensor has."""

    count, entries = 0, 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        built = function(*args, **(kwargs or {}))
        self.count += function in (
            torch.ops.aten.mm.default,
            torch.ops.aten._euclidean_dist.default,
        )
        for left in built if isinstance(built, (tuple, list)) else [built]:
            if isinstance(left, Tensor):
                self.entries = max(self.entries, left.numel())
        return built


@pytest.mark.parametrize(
    ("loss", "miner"),
    [
        (softmax_losses.MultiSimilarityLoss(), pml_miners.MultiSimilarityMiner()),
        (triplet_losses.TripletMarginLoss(), pml_miners.BatchHardMiner()),
    ],
)
def test_a_loss_takes_its_miners_matrix(loss: Any, miner: Any) -> None:
    x = codes(28, 0, "spread")
    pairs = miner(x.clone(), Y)
    with Products() as alone:
        expected = loss(x, Y, pairs)
    with Products() as both:
        mined = miner(x, Y)
        value = loss(x, Y, mined)
    assert both.count == alone.count == 1
    torch.testing.assert_close(value, expected)
    with Products() as again:  # it is taken once
        loss(x, Y, mined)
    assert again.count == 1


def test_a_matrix_of_other_codes_is_not_taken() -> None:
    loss, miner = softmax_losses.MultiSimilarityLoss(), pml_miners.MultiSimilarityMiner()
    x = codes(28, 0, "spread")
    pairs = miner(x, Y)
    x.mul_(torch.linspace(-1, 1, 6, dtype=torch.float64))
    torch.testing.assert_close(loss(x, Y, pairs), loss(x.clone(), Y, pairs))
    miner(x, Y)
    other = softmax_losses.MultiSimilarityLoss(distance=distances.LpDistance())
    torch.testing.assert_close(other(x, Y, pairs), other(x.clone(), Y, pairs))
    miner(x, Y)
    del x
    assert pair_matrix._kept.matrix is None


@pytest.mark.parametrize("name", [*WITH_REFERENCE, *ALONE, "angular"])
def test_memory_is_that_of_pairs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """384 items of 48 classes have a million triplets."""
    monkeypatch.setattr(pair_matrix, "ENTRIES", 2**16)
    built = {**WITH_REFERENCE, **ALONE, "angular": (triplet_losses.AngularLoss, None)}[name][0]()
    x, y = codes(384, 0, "spread").float().requires_grad_(), torch.arange(384) % 48
    with Products() as seen:
        built(x, y).backward()
    assert seen.entries <= 384 * 384


@pytest.mark.parametrize(
    "loss",
    [
        softmax_losses.MultiSimilarityLoss(),
        softmax_losses.MultiSimilarityLoss(beta=500.0),  # many exponentials underflow
        softmax_losses.CircleLoss(),
        softmax_losses.CircleLoss(gamma=2000),
        softmax_losses.InstanceLoss(),
        softmax_losses.InstanceLoss(gamma=900.0),
        softmax_losses.NCALoss(softmax_scale=1.7),
        softmax_losses.NCALoss(softmax_scale=900.0),
        softmax_losses.NCALoss(softmax_scale=3.0, distance=distances.CosineSimilarity()),
    ],
)
@pytest.mark.parametrize(
    "labels",
    [Y, torch.arange(28), torch.zeros(28, dtype=torch.int64)],
    ids=["mixed", "apart", "one"],
)
def test_a_gradient_written_down_is_that_of_the_formula(loss: Any, labels: Tensor) -> None:
    x = codes(28, 5, "normal").requires_grad_()
    written, derived = (
        torch.autograd.grad(loss(x, labels), x, create_graph=again)[0].detach()
        for again in (False, True)
    )
    torch.testing.assert_close(written, derived, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    "labels",
    [Y, Y.flip(0) - 3, torch.arange(28), torch.zeros(28, dtype=torch.int64)],
    ids=["mixed", "below 0", "apart", "one"],
)
def test_n_pairs_takes_each_labels_first_two(labels: Tensor) -> None:
    x, actual = codes(28, 0, "spread"), []
    for loss in (softmax_losses.NPairsLoss(), losses.NPairsLoss()):
        parts = loss.compute_loss(x, labels, None, x, labels)["loss"]
        leaf = x.clone().requires_grad_()
        value = loss(leaf, labels)
        (slope,) = torch.autograd.grad(value, leaf)
        indices = x.new_zeros(0) if parts["indices"] is None else parts["indices"]
        actual.append([indices, value.detach(), slope])
    for left, other in zip(*actual, strict=True):
        torch.testing.assert_close(left, other)
    triplets = miners.TripletMarginMiner(margin=0.3)(x, Y)
    torch.testing.assert_close(
        softmax_losses.NPairsLoss()(x, Y, triplets), losses.NPairsLoss()(x, Y, triplets)
    )


@pytest.mark.parametrize("items", [256, 300, 1001])
def test_products_of_long_vectors_with_themselves(items: int) -> None:
    x = torch.randn(items, 256, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    actual = pair_matrix.products(x.requires_grad_())
    torch.testing.assert_close(actual, x @ x.T)
    slopes = torch.randn(
        items, items, generator=torch.Generator().manual_seed(1), dtype=torch.float64
    )
    torch.testing.assert_close(
        *(torch.autograd.grad((mat * slopes).sum(), x)[0] for mat in (actual, x @ x.T))
    )
