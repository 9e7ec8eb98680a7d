"""Losses against class weights, whose gradient is written down: upstream's numbers, plain loops,
finite differences, memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from pytorch_metric_learning import distances, losses, miners, reducers, regularizers
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from retrieval_pml import classifier_losses, pair_matrix, proxy_losses
from retrieval_pml.parts import ClassWeightedReducer, PerAnchorReducer

OURS = {**vars(classifier_losses), **vars(proxy_losses)}
K, C = 5, 4
Y = torch.tensor([0, 1, 0, 2, 1, 1, 4, 2, 0, 4, 1, 2])  # class 3 has no items
OPTIONS: dict[str, dict[str, Any]] = {
    "LargeMarginSoftmaxLoss": {"margin": 3},
    "SphereFaceLoss": {"margin": 4, "scale": 2.5},
    "ArcFaceLoss": {"margin": 40.0, "scale": 7.0},
    "CosFaceLoss": {"scale": 9.0},
    "SubCenterArcFaceLoss": {"scale": 8.0, "sub_centers": 3},
    "NormalizedSoftmaxLoss": {},
    "SoftTripleLoss": {"centers_per_class": 3, "margin": 0.2, "gamma": 0.3},
    "ProxyNCALoss": {"softmax_scale": 1.7},
    "ProxyAnchorLoss": {"alpha": 5.0},
    "P2SGradLoss": {},
}
WEIGHED = [name for name in OPTIONS if name != "P2SGradLoss"]
WITH_DISTANCE = ["NormalizedSoftmaxLoss", "SoftTripleLoss", "ProxyNCALoss", "ProxyAnchorLoss"]


pytestmark = pytest.mark.filterwarnings("ignore:__array_wrap__")  # upstream's coefficients


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pair_matrix, "ENTRIES", 20)


def pair(name: str, **options: Any) -> tuple[Any, Any]:
    """Return ours and upstream's, with the same weights in double precision."""
    size = "descriptors_dim" if name == "P2SGradLoss" else "embedding_size"
    arguments = {"num_classes": K, size: C, **OPTIONS[name], **options}
    torch.manual_seed(1)
    built = OURS[name](**arguments), getattr(losses, name)(**arguments)
    built[1].load_state_dict(built[0].state_dict())
    return built[0].double(), built[1].double()


def codes(rows: int = 12, seed: int = 0) -> Tensor:
    return torch.randn(rows, C, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def found(loss: Any, x: Tensor, y: Tensor = Y, mined: Any = None) -> list[Tensor]:
    """Return the value and its gradients to codes and weights, of a value that others are added to
    and that is multiplied.
    """
    x = x.clone().requires_grad_()
    value = loss(x, y, mined)
    leaves = [x, *loss.parameters()]
    return [value, *torch.autograd.grad(3 * value, leaves, materialize_grads=True)]


def assert_same(ours: Any, theirs: Any, *given: Any) -> None:
    for left, other in zip(found(ours, *given), found(theirs, *given), strict=True):
        torch.testing.assert_close(left, other, rtol=1e-9, atol=1e-11)


REDUCERS: dict[str, Callable[[], Any]] = {
    "sum": reducers.SumReducer,
    "above zero": reducers.AvgNonZeroReducer,
    "between": lambda: reducers.ThresholdReducer(low=0.5, high=4.0),
    "by class": lambda: ClassWeightedReducer(torch.arange(1.0, K + 1).double()),
    "per anchor": PerAnchorReducer,
    "by name": lambda: reducers.MultipleReducers({"neg_loss": reducers.SumReducer()}),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_upstreams_numbers(name: str) -> None:
    assert_same(*pair(name), codes())
    assert_same(*pair(name), codes(1), Y[:1])
    assert_same(*pair(name), codes(), torch.full((12,), 3))


@pytest.mark.parametrize("reduced_by", REDUCERS)
@pytest.mark.parametrize("name", WEIGHED)
def test_every_reducer(name: str, reduced_by: str) -> None:
    if name == "ProxyAnchorLoss" and reduced_by == "by class":
        pytest.skip("upstream looks up proxies among the batch's labels")
    assert_same(
        *(type(x)(**_given(name), reducer=REDUCERS[reduced_by]()) for x in pair(name)), codes()
    )


def _given(name: str) -> dict[str, Any]:
    # both are made anew: the seed gives them the same weights
    torch.manual_seed(2)
    return {"num_classes": K, "embedding_size": C, "weight_init_func": _drawn, **OPTIONS[name]}


def _drawn(weights: Tensor) -> None:
    torch.manual_seed(3)
    torch.nn.init.normal_(weights)


@pytest.mark.parametrize("name", WEIGHED)
def test_regularizers(name: str) -> None:
    options = {
        "weight_regularizer": regularizers.RegularFaceRegularizer(),
        "weight_reg_weight": 0.3,
        "embedding_regularizer": regularizers.LpRegularizer(),
        "embedding_reg_weight": 0.2,
    }
    assert_same(*pair(name, **options), codes())


@pytest.mark.parametrize("name", WEIGHED)
def test_a_miners_indices_weigh_the_items(name: str) -> None:
    for mined in (miners.TripletMarginMiner(margin=0.2)(codes(), Y), miners.HDCMiner()(codes(), Y)):
        weighed = found(pair(name)[0], codes(), Y, mined)[0]
        assert weighed.item() != found(pair(name)[0], codes())[0].item()
        assert_same(*pair(name), codes(), Y, mined)
    none = torch.zeros(0, dtype=torch.int64)
    assert_same(*pair(name), codes(), Y, (none, none, none))


@pytest.mark.parametrize(
    "distance",
    [
        distances.CosineSimilarity(),
        distances.DotProductSimilarity(normalize_embeddings=False),
        distances.DotProductSimilarity(power=2),
        distances.CosineSimilarity(p=1),
        distances.LpDistance(),
        distances.LpDistance(power=2),
        distances.LpDistance(power=2, normalize_embeddings=False),
    ],
    ids=["cosine", "dot", "squared dot", "norm 1", "Euclidean", "squared", "squared, as it is"],
)
@pytest.mark.parametrize("name", WITH_DISTANCE)
def test_every_distance(name: str, distance: Any) -> None:
    if name == "SoftTripleLoss" and not distance.is_inverted:
        pytest.skip("needs a similarity")
    assert_same(*pair(name, distance=distance), codes())


@pytest.mark.parametrize("name", OPTIONS)
def test_a_gradient_of_a_gradient(name: str) -> None:
    second = []
    for loss in pair(name):
        x = codes().requires_grad_()
        value = loss(x, Y)
        leaves = [x, *loss.parameters()]
        first = torch.autograd.grad(value, leaves, create_graph=True)
        second.append(torch.autograd.grad(sum(g.square().sum() for g in first), leaves))
    for ours, theirs in zip(*second, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("name", OPTIONS)
def test_finite_differences(name: str) -> None:
    ours = pair(name)[0]
    weights = next(iter(ours.parameters()))

    def call(x: Tensor, w: Tensor) -> Tensor:
        return torch.func.functional_call(ours, {next(iter(ours.state_dict())): w}, (x, Y))

    if (
        name == "P2SGradLoss"
    ):  # it puts the weights back to length 1, and so differences come from the codes alone
        assert torch.autograd.gradcheck(lambda x: ours(x, Y), codes().requires_grad_())
        return
    assert torch.autograd.gradcheck(
        call, (codes().requires_grad_(), weights.detach().requires_grad_())
    )


@pytest.mark.parametrize("name", OPTIONS)
def test_only_what_is_asked_for(name: str) -> None:
    """Frozen codes, or frozen weights: the other gradient is the same."""
    ours, _ = pair(name)
    both = found(ours, codes())
    (weights,) = ours.parameters()
    ours(codes(), Y).backward()
    torch.testing.assert_close(3 * weights.grad, both[2])
    weights.requires_grad_(False)
    x = codes().requires_grad_()
    ours(x, Y).backward()
    torch.testing.assert_close(3 * x.grad, both[1])
    with torch.no_grad():
        torch.testing.assert_close(ours(codes(), Y), both[0])


@pytest.mark.parametrize(
    "name", ["ArcFaceLoss", "CosFaceLoss", "NormalizedSoftmaxLoss", "ProxyAnchorLoss"]
)
def test_exponentials_beyond_any_float(name: str) -> None:
    sharp = {"temperature": 1e-3} if name == "NormalizedSoftmaxLoss" else {"scale": 1000.0}
    sharp = {"alpha": 1000.0} if name == "ProxyAnchorLoss" else sharp
    ours, theirs = pair(name, **sharp)
    assert_same(ours, theirs, codes())
    single = [value.float() for value in found(ours.float(), codes().float())]
    for left, exact in zip(single, found(theirs.double(), codes()), strict=True):
        torch.testing.assert_close(left, exact.float(), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", OPTIONS)
def test_half_precision_is_that_of_the_codes_alone(name: str, dtype: torch.dtype) -> None:
    ours = pair(name)[0].float()
    x = codes().to(dtype)
    single, half = (found(ours, value) for value in (x.float(), x))
    for left, other in zip(half, single, strict=True):
        torch.testing.assert_close(left.float(), other, rtol=1e-2, atol=1e-2)
    assert all(weights.dtype == torch.float32 for weights in ours.parameters())


@pytest.mark.parametrize("name", OPTIONS)
def test_short_codes_have_a_finite_gradient(name: str) -> None:
    x = codes()
    x[2], x[3] = 0, x[3] * 1e-20
    assert all(value.isfinite().all() for value in found(pair(name)[0], x))


def test_a_label_without_a_proxy_costs_nothing() -> None:
    """As upstream's, which looks labels up among the proxies'; the others refuse such a label."""
    y = Y.clone()
    y[3] = K + 2
    kept = torch.arange(12) != 3
    value = found(pair("ProxyNCALoss")[0], codes(), y)[0]
    torch.testing.assert_close(value, found(pair("ProxyNCALoss")[0], codes()[kept], Y[kept])[0])
    for name in ("ArcFaceLoss", "NormalizedSoftmaxLoss", "ProxyAnchorLoss", "P2SGradLoss"):
        with pytest.raises((IndexError, RuntimeError)):
            pair(name)[0](codes(), y)


def test_logits_and_outliers_are_upstreams() -> None:
    for name in [value for value in WEIGHED if value not in ("ProxyNCALoss", "ProxyAnchorLoss")]:
        ours, theirs = pair(name)
        torch.testing.assert_close(ours.get_logits(codes()), theirs.get_logits(codes()))
    ours, theirs = pair("SubCenterArcFaceLoss")
    for left, other in zip(
        *(loss.get_outliers(codes(), Y, 60) for loss in (ours, theirs)), strict=True
    ):
        assert left.shape == other.shape


class Large(TorchDispatchMode):
    """Counts the tensors of some size that are made anew, and notes the largest."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size, self.count, self.entries = size, 0, 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        arguments = {x.untyped_storage().data_ptr() for x in args if isinstance(x, Tensor)}
        built = function(*args, **(kwargs or {}))
        for left in built if isinstance(built, (tuple, list)) else [built]:
            if isinstance(left, Tensor) and left.untyped_storage().data_ptr() not in arguments:
                self.entries = max(self.entries, left.numel())
                self.count += left.numel() >= self.size
        return built


@pytest.mark.parametrize("name", OPTIONS)
def test_one_matrix_of_items_and_classes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pair_matrix, "ENTRIES", 2**12)
    plural = {"SubCenterArcFaceLoss": 3, "SoftTripleLoss": 3}.get(name, 1)
    ours = pair(name, num_classes=100)[0].float()
    x = codes(300).float().requires_grad_()
    with Large(300 * 100 * plural) as seen:
        ours(x, torch.arange(300) % 100).backward()
    assert seen.entries == 300 * 100 * plural
    assert seen.count == 1


# --- each formula by plain loops
# -------------------------------------------------------------------------------


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
    """Return an item's loss by the definition; `w` has each class's centres together."""
    near = [cosine(x, value) for value in w]
    if name == "LargeMarginSoftmaxLoss":
        return entropy(
            [
                size(x) * size(v) * (many_times(s, 3) if k == y else s)
                for k, (v, s) in enumerate(zip(w, near, strict=True))
            ],
            y,
        )
    if name == "SphereFaceLoss":
        return entropy(
            [2.5 * size(x) * (many_times(s, 4) if k == y else s) for k, s in enumerate(near)], y
        )
    if name == "CosFaceLoss":
        return entropy([9 * (s - 0.35 * (k == y)) for k, s in enumerate(near)], y)
    if name == "NormalizedSoftmaxLoss":
        return entropy([s / 0.05 for s in near], y)
    if name == "ProxyNCALoss":
        return entropy([-1.7 * (2 - 2 * s) for s in near], y)
    grouped = [near[k : k + 3] for k in range(0, len(near), 3)]
    if name == "SoftTripleLoss":
        soft = [
            sum(s * math.exp(s / 0.3) for s in value) / sum(math.exp(s / 0.3) for s in value)
            for value in grouped
        ]
        return entropy([20 * (s - 0.2 * (k == y)) for k, s in enumerate(soft)], y)
    scale, margin = (8, 28.6) if name == "SubCenterArcFaceLoss" else (7, 40)
    best = [max(value) for value in grouped] if name == "SubCenterArcFaceLoss" else near
    with_margin = math.acos(best[y]) + math.radians(margin)
    # beyond π a line goes on
    line = best[y] - math.radians(margin) * math.sin(math.radians(margin))
    best[y] = math.cos(with_margin) if with_margin <= math.pi else line
    return entropy([scale * s for s in best], y)


def of_batch(name: str, x: list[list[float]], w: list[list[float]]) -> float:
    y = Y.tolist()
    if name == "P2SGradLoss":
        errors = [
            (cosine(a, b) - (k == t)) ** 2
            for a, t in zip(x, y, strict=True)
            for k, b in enumerate(w)
        ]
        return sum(errors) / len(errors)
    if name == "ProxyAnchorLoss":
        total = 0.0
        for k, proxy in enumerate(w):
            near = [cosine(a, proxy) for a in x]
            pull = sum(math.exp(-5 * (s - 0.1)) for s, t in zip(near, y, strict=True) if t == k)
            push = sum(math.exp(5 * (s + 0.1)) for s, t in zip(near, y, strict=True) if t != k)
            total += math.log1p(pull) / len(set(y)) + math.log1p(push) / K
        return total
    return sum(of_item(name, a, w, t) for a, t in zip(x, y, strict=True)) / len(y)


@pytest.mark.parametrize("name", OPTIONS)
def test_plain_loops(name: str) -> None:
    ours = pair(name)[0]
    (weights,) = ours.parameters()
    rows = weights if weights.shape[0] != C else weights.t()
    x = codes()
    rel = 1e-6 if name == "P2SGradLoss" else 1e-9  # torch's renorm adds 1e-7 to a length
    value = ours(x, Y)
    assert value.item() == pytest.approx(of_batch(name, x.tolist(), rows.tolist()), rel=rel)


@pytest.mark.parametrize("dim", [0, 1])
def test_unit_vectors_are_torchs(dim: int) -> None:
    x = codes().clone()
    x[3], x[:, 2] = x[3] * 1e-15, 0
    x[4] = 0
    for arguments in (x, x.T):
        both = []
        for built in (pair_matrix.unit(v := arguments.clone().requires_grad_(), dim, 2.5), None):
            value = torch.nn.functional.normalize(v, dim=dim) * 2.5 if built is None else built
            (first,) = torch.autograd.grad((value * codes().reshape(value.shape)).sum(), v)
            both.append((value.detach(), first))
        torch.testing.assert_close(both[0], both[1])
