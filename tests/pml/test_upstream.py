"""Losses and miners give pytorch-metric-learning's values, gradients and indices with any reducer,
in the memory of the batch's pairs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from pytorch_metric_learning import distances, losses, miners, reducers
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from retrieval_pml import miners as pml_miners, retrieval_losses, retrieval_miners, triplet_losses
from retrieval_pml.parts import PerAnchorReducer

OURS, OUR_MINERS = retrieval_losses(), retrieval_miners()
Y = torch.tensor([0, 1, 0, 2, 1, 1, 3, 2, 0, 4, 1, 2] * 2 + [5, 5, 0, 1])
REF_Y = torch.tensor([1, 0, 5, 2, 2, 0, 1, 3, 7])
REDUCERS: dict[str, Callable[[], Any]] = {
    "default": lambda: None,
    "mean": reducers.MeanReducer,
    "sum": reducers.SumReducer,
    "below zero": lambda: reducers.ThresholdReducer(low=-1),
    "between": lambda: reducers.ThresholdReducer(low=0.01, high=0.9),
    "per anchor": PerAnchorReducer,
    "by name": lambda: reducers.MultipleReducers(
        {"neg_loss": reducers.MeanReducer()}, reducers.AvgNonZeroReducer()
    ),
}


def codes(rows: int, seed: int, spread: str = "spread") -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    if spread == "whole numbers":  # some items are equal
        return torch.randint(-1, 2, (rows, 3), generator=generator).double() + 0.5
    return 1 + 0.7 * torch.randn(rows, 6, generator=generator, dtype=torch.float64)


def results(loss: Any, x: Tensor, ref: Tensor | None, mined: Any = None) -> list[Tensor]:
    """Return a loss's value and its gradients to embeddings and reference set."""
    leaves = [x.clone().requires_grad_()] + ([] if ref is None else [ref.clone().requires_grad_()])
    value = loss(leaves[0], Y, mined, *([] if ref is None else [leaves[1], REF_Y]))
    return [value, *torch.autograd.grad(value, leaves, materialize_grads=True)]


def assert_same(ours: Any, theirs: Any, *arguments: Any) -> None:
    for left, other in zip(results(ours, *arguments), results(theirs, *arguments), strict=True):
        torch.testing.assert_close(left, other, rtol=1e-7, atol=1e-9, check_dtype=False)


OF_PAIRS: dict[str, Any] = {
    "contrastive": losses.ContrastiveLoss,
    "signal_to_noise_ratio_contrastive": losses.SignalToNoiseRatioContrastiveLoss,
    "intra_pair_variance": losses.IntraPairVarianceLoss,
    "multi_similarity": losses.MultiSimilarityLoss,
    "circle": losses.CircleLoss,
    "sup_con": losses.SupConLoss,
    "nt_xent": losses.NTXentLoss,
    "tuplet_margin": losses.TupletMarginLoss,
    "nca": losses.NCALoss,
    "triplet_margin": losses.TripletMarginLoss,
}


@pytest.mark.parametrize("mined", [False, True])
@pytest.mark.parametrize("reference", [False, True])
@pytest.mark.parametrize("name", OF_PAIRS)
def test_a_batch_and_a_reference_set(name, reference, mined):
    x, ref = codes(28, 0), codes(9, 1) if reference else None
    arguments = (x, Y) if ref is None else (x, Y, ref, REF_Y)
    # the miner lists some triplets twice, which count twice
    triplets = miners.TripletMarginMiner(margin=0.3)(*arguments) if mined else None
    assert_same(OURS[name](), OF_PAIRS[name](), x, ref, triplets)


@pytest.mark.parametrize("reduced_by", REDUCERS)
@pytest.mark.parametrize("name", ["contrastive", "triplet_margin", "multi_similarity", "nt_xent"])
@pytest.mark.parametrize("distance", [distances.LpDistance, distances.CosineSimilarity])
def test_every_reducer_and_distance(distance, name, reduced_by):
    theirs = losses.__dict__[OF_PAIRS[name].__name__]
    if reduced_by == "per anchor" and name == "multi_similarity":
        pytest.skip("upstream's losses come as a column")
    options = {"distance": distance(), "reducer": REDUCERS[reduced_by]()}
    for spread in ("spread", "whole numbers"):
        assert_same(OURS[name](**options), theirs(**options), codes(28, 0, spread), None)


@pytest.mark.parametrize("labels", [[0] * 12, list(range(12))], ids=["one class", "no positives"])
@pytest.mark.parametrize("name", ["triplet_margin", "multi_similarity", "circle", "nt_xent"])
def test_a_batch_without_one_kind_of_pair(name, labels):
    x, y = codes(12, 0), torch.tensor(labels)
    torch.testing.assert_close(OURS[name]()(x, y), OF_PAIRS[name]()(x, y), check_dtype=False)


@pytest.mark.parametrize("reduced_by", ["default", "sum", "by name"])
@pytest.mark.parametrize("reference", [False, True])
@pytest.mark.parametrize("classes", [None, 6])
@pytest.mark.parametrize("learn_beta", [False, True])
def test_the_margin_loss_of_all_triplets(learn_beta, classes, reference, reduced_by):
    options = {"learn_beta": learn_beta, "nu": 0.3, "beta": 0.9}
    ours = OURS["margin"](**options, per_class=bool(classes), classes=classes)
    theirs = losses.MarginLoss(**options, num_classes=classes)
    for loss in (ours, theirs):
        if reduced_by != "default":
            loss.set_reducer(MARGIN_REDUCERS[reduced_by]())
    for spread in ("spread", "whole numbers"):
        x, ref = codes(28, 0, spread), codes(9, 1, spread) if reference else None
        assert_same(ours, theirs, x, ref)
        if learn_beta:
            arguments = (x, Y) if ref is None else (x, Y, None, ref, REF_Y)
            slopes = [
                torch.autograd.grad(loss(*arguments), loss.beta)[0] for loss in (ours, theirs)
            ]
            torch.testing.assert_close(*slopes)


MARGIN_REDUCERS: dict[str, Callable[[], Any]] = {
    "sum": reducers.SumReducer,
    "by name": lambda: reducers.MultipleReducers(
        {"beta_reg_loss": reducers.DivisorReducer()}, reducers.MeanReducer()
    ),
}


@pytest.mark.parametrize("variant", losses.PNPLoss.VARIANTS)
def test_the_variants_of_pnp(variant):
    options = {"variant": variant, "anneal": 0.1}
    assert_same(OURS["pnp"](**options), losses.PNPLoss(**options), codes(28, 0), None)


def test_products_of_long_embeddings_do_not_overflow():
    distance = distances.DotProductSimilarity(normalize_embeddings=False)
    ours, theirs = OURS["nt_xent"](distance=distance), losses.NTXentLoss(distance=distance)
    x = 30 * codes(28, 0)
    assert theirs(x, Y) < ours(x, Y) < torch.inf  # upstream bounds an item's loss


@pytest.mark.parametrize("name", [*OF_PAIRS, "angular", "smooth_ap", "histogram"])
def test_a_gradient_of_a_gradient_is_finite(name):
    x = codes(28, 0).requires_grad_()
    (first,) = torch.autograd.grad(OURS[name]()(x, Y), x, create_graph=True)
    if first.requires_grad:
        (second,) = torch.autograd.grad(first.square().sum(), x)
        assert second.isfinite().all()


@pytest.mark.parametrize(
    "name",
    [
        "lifted_structure",
        "nt_xent",
        "triplet_margin",
        "margin",
        "tuplet_margin",
        "threshold_consistent_margin",
        "histogram",
    ],
)
def test_memory_is_that_of_pairs(name):
    x, y = codes(384, 0).float().requires_grad_(), torch.arange(384) % 48
    assert triplet_losses.TRIPLETS < 384 * 7 * 376
    with Largest() as seen:
        OURS[name]()(x, y).backward()
    assert seen.entries <= 2 * 384 * 384


class Largest(TorchDispatchMode):
    """Records the number of entries of the largest tensor."""

    entries = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        built = function(*args, **(kwargs or {}))
        for left in built if isinstance(built, (tuple, list)) else [built]:
            if isinstance(left, Tensor):
                self.entries = max(self.entries, left.numel())
        return built


MINERS: dict[str, tuple[str, dict[str, Any]]] = {
    **{
        f"triplets {kind}": ("triplet_margin", {"type_of_triplets": kind})
        for kind in ("all", "hard", "semihard", "easy")
    },
    **{f"pairs {e}": ("multi_similarity", {"epsilon": e}) for e in (0.0, 0.1, -0.2)},
}


@pytest.mark.parametrize("reference", [False, True])
@pytest.mark.parametrize("distance", [distances.LpDistance, distances.CosineSimilarity])
@pytest.mark.parametrize("name", MINERS)
def test_a_miner_gives_upstreams_indices(name, distance, reference, monkeypatch):
    monkeypatch.setattr(pml_miners, "ENTRIES", 64)
    factory, options = MINERS[name]
    ours = OUR_MINERS[factory](distance=distance(), **options)
    theirs = getattr(miners, type(ours).__name__)(distance=distance(), **options)
    for spread in ("spread", "whole numbers"):
        x, ref = codes(28, 0, spread), codes(9, 1, spread)
        for labels in (Y, torch.zeros_like(Y), torch.arange(28)):
            arguments = (x, labels, ref, REF_Y) if reference else (x, labels)
            for left, other in zip(ours(*arguments), theirs(*arguments), strict=True):
                assert left.dtype == torch.int64
                assert sorted(left.tolist()) == sorted(other.tolist())


@pytest.mark.parametrize("reference", [False, True])
def test_the_angular_miner_on_unit_vectors_gives_upstreams_triplets(reference):
    x, ref = (torch.nn.functional.normalize(codes(n, n)) for n in (28, 9))
    arguments = (x, Y, ref, REF_Y) if reference else (x, Y)
    expected = miners.AngularMiner()(*arguments)
    assert len(expected[0])
    for left, other in zip(OUR_MINERS["angular"]()(*arguments), expected, strict=True):
        assert left.tolist() == other.tolist()


@pytest.mark.parametrize("reduced_by", ["default", "sum"])
def test_vic_reg_pairs_the_items_of_a_label(reduced_by):
    labels = torch.tensor([4, 1, 0, 4, 2, 1, 2, 0, 9, 1, 3, 9, 1])  # 3 has one view
    first, second = [0, 1, 2, 4, 8, 9], [3, 5, 7, 6, 11, 12]
    x = codes(13, 0).requires_grad_()
    options = {"eps": 1e-2, "covariance_v": 7.0}
    ours = OURS["vic_reg"](**options, reducer=REDUCERS[reduced_by]())(x, labels)
    theirs = losses.VICRegLoss(**options, reducer=REDUCERS[reduced_by]())
    expected = theirs(x[first], ref_emb=x[second])
    torch.testing.assert_close(ours, expected)
    torch.testing.assert_close(*(torch.autograd.grad(v, x)[0] for v in (ours, expected)))
    alone = OURS["vic_reg"]()(x[:3], torch.tensor([1, 1, 2]))  # a single pair has no variance
    assert alone.item() == 0 and not torch.autograd.grad(alone, x)[0].any()
