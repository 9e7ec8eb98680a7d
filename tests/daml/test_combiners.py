"""The combiners against plain loops in float64: every term, its gradient, and symmetry."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from discriminator_by_loops import affine, gamma, local_distances
from pytorch_metric_learning import losses
from retrieval.errors import RecipeError, RetrievalError
from retrieval.host.plugins import load_plugins
from torch import Tensor, nn

from retrieval_daml import local_metrics
from retrieval_daml.local_metrics import Discriminator, UniformMetrics

F, D, H = 5, 12, 7


def made(metrics: int = 3, seed: int = 0, **options: Any) -> tuple[Discriminator, nn.Module]:
    """A discriminator in float64 with random weights, and its head."""
    torch.manual_seed(seed)
    combiner = Discriminator(F, D, metrics, H, **options)
    head = combiner.build_head(F)
    if metrics > 1:
        nn.init.normal_(combiner.out.weight)
        nn.init.normal_(combiner.out.bias)
    return combiner.double(), head.double()


def items(number: int, seed: int = 1) -> Tensor:
    return torch.randn(
        number, F, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)
    )


def test_one_metric_is_the_distance_of_pmls_losses_bit_for_bit():
    torch.manual_seed(0)
    for combiner in (Discriminator(F, D, 1), UniformMetrics(D, 1)):
        codes = combiner.build_head(F)(torch.randn(40, F)).detach()
        values = []
        for options in ({"distance": combiner}, {}):
            x = codes.clone().requires_grad_()
            loss = losses.TripletMarginLoss(**options)(x, torch.arange(40) % 5)
            loss.backward()
            values.append((loss, x.grad))
        assert all(map(torch.equal, *values))


# --- plain loops


def loop_gamma(combiner: Discriminator, x: list[float], y: list[float]) -> list[float]:
    """Γ from the two items' features."""
    return gamma({f"combiner.{k}": v.tolist() for k, v in combiner.state_dict().items()}, x, y)


def loop_local(head: Any, metrics: int, x: list[float], y: list[float]) -> list[float]:
    linear = head.embedding[0]
    weights = linear.weight.tolist(), linear.bias.tolist()
    return local_distances(affine(*weights, x), affine(*weights, y), metrics)


def test_distances_weights_and_similarities_are_the_papers():
    combiner, head = made()
    x, y = items(6), items(9, 2)
    codes = head(x), head(y)
    distances, gamma = combiner.compute_mat(*codes), combiner.weights(*codes)
    alike = combiner.similarities(*codes)
    assert distances.shape == (6, 9) and gamma.shape == (6, 9, 3)
    assert distances.dtype == torch.float64
    for i, j in itertools.product(range(6), range(9)):
        weights = loop_gamma(combiner, x[i].tolist(), y[j].tolist())
        local = loop_local(head, 3, x[i].tolist(), y[j].tolist())
        assert gamma[i, j].tolist() == pytest.approx(weights, abs=1e-12)
        expected = sum(g * d for g, d in zip(weights, local, strict=True))
        assert distances[i, j].item() == pytest.approx(expected, abs=1e-12)
        # of unit vectors the cosine is 1 − d²/2
        similarity = sum(g * (1 - d * d / 2) for g, d in zip(weights, local, strict=True))
        assert alike[i, j].item() == pytest.approx(similarity, abs=1e-12)
    paired = combiner.pairwise_distance(codes[0], codes[1][:6])
    assert torch.allclose(paired, distances[:, :6].diagonal(), atol=1e-10)


@pytest.mark.parametrize("power", [1, 2])
def test_uniform_is_the_mean_of_the_local_distances(power):
    torch.manual_seed(0)
    combiner = UniformMetrics(D, 3, power)  # type: ignore[arg-type]
    head = combiner.build_head(F).double()
    x, y = items(5), items(8, 2)
    codes = head(x), head(y)
    distances, alike = combiner.compute_mat(*codes), combiner.similarities(*codes)
    wrapped = nn.Module()
    wrapped.embedding = head
    for i, j in itertools.product(range(5), range(8)):
        local = loop_local(wrapped, 3, x[i].tolist(), y[j].tolist())
        expected = (sum(d**power for d in local) / 3) ** (1 / power)
        assert distances[i, j].item() == pytest.approx(expected, abs=1e-12)
        assert alike[i, j].item() == pytest.approx(sum(1 - d * d / 2 for d in local) / 3, abs=1e-12)
    paired = combiner.pairwise_distance(codes[0], codes[1][:5])
    assert torch.allclose(paired, distances[:, :5].diagonal(), atol=1e-10)


def test_uniforms_candidates_are_exact_with_squares_and_not_without():
    torch.manual_seed(0)
    mean, squares = UniformMetrics(D, 3), UniformMetrics(D, 3, 2)
    assert not mean.exact and squares.exact
    for single in (UniformMetrics(D, 1), Discriminator(F, D, 1)):
        assert single.exact and not list(single.parameters())
    codes = mean.build_head(F)(items(200).float())
    euclidean = torch.cdist(codes, codes).argsort(1)
    ranks = [c.compute_mat(codes, codes).argsort(1) for c in (mean, squares)]
    assert (ranks[0] != euclidean).float().mean() > 0.1
    assert (ranks[1] != euclidean).float().mean() < 0.001  # ties in float32


# --- J_dis


@pytest.mark.parametrize("metrics", [2, 3, 6])
def test_objective_is_the_mean_of_the_papers_term_and_the_balance(metrics):
    combiner, head = made(metrics, mu=0.3, rho=2.0)
    x = items(6)
    codes = head(x)
    value, logged = combiner.objective(codes, torch.arange(6), None)
    pairs = [(i, j) for i in range(6) for j in range(6) if i != j]
    gammas = [loop_gamma(combiner, x[i].tolist(), x[j].tolist()) for i, j in pairs]
    spread = -sum(sum((g - 1 / metrics) ** 2 for g in gamma) for gamma in gammas) / len(pairs)
    means = [sum(column) / len(pairs) for column in zip(*gammas, strict=True)]
    balance = sum((m - 1 / metrics) ** 2 for m in means)
    assert value.item() == pytest.approx(0.3 * spread + 2.0 * balance, abs=1e-12)
    assert logged["j_dis"].item() == pytest.approx(spread)
    assert logged["balance"].item() == pytest.approx(balance)
    assert [logged[f"load_{k + 1}"].item() for k in range(metrics)] == pytest.approx(means)
    assert logged["gamma_max"].item() == pytest.approx(sum(map(max, gammas)) / len(pairs))
    for k in range(metrics):
        median = sorted(gamma[k] for gamma in gammas)[round(0.5 * (len(pairs) - 1))]
        assert logged[f"gamma_{k + 1}_p50"].item() == pytest.approx(median)
    assert not any(value.requires_grad for value in logged.values())
    # even weights reach the upper bound of J_dis; all the weight on one metric reaches the lower
    # bound of J_dis, and the upper bound of the balance
    with torch.no_grad():
        combiner.out.weight.zero_()
        combiner.out.bias.zero_()
    logged = combiner.objective(codes, torch.arange(6), None)[1]
    assert logged["j_dis"].item() == pytest.approx(0, abs=1e-12)
    with torch.no_grad():
        combiner.out.bias.copy_(torch.eye(metrics)[0] * 100)
    logged = combiner.objective(codes, torch.arange(6), None)[1]
    assert logged["j_dis"].item() == pytest.approx(-(1 - 1 / metrics))
    assert logged["balance"].item() == pytest.approx(1 - 1 / metrics)


def test_weights_start_even_and_are_learned_from_there():
    torch.manual_seed(0)
    combiner = Discriminator(F, D, 4, H)
    codes = combiner.build_head(F)(items(6).float())
    assert torch.equal(combiner.weights(codes, codes), torch.full((6, 6, 4), 0.25))
    combiner.compute_mat(codes, codes).mean().backward()
    assert combiner.out.weight.grad.abs().max() > 0
    # J_dis alone cannot change even weights, because its gradient is zero there
    combiner.zero_grad()
    value = combiner.objective(codes.detach(), torch.arange(6), None)[0]
    value.backward()
    assert all(p.grad is None or p.grad.abs().max() < 1e-7 for p in combiner.parameters())
    uneven = Discriminator(F, D, 4, H, start=1.0)
    codes = uneven.build_head(F)(items(6).float())
    assert (uneven.weights(codes, codes) - 0.25).abs().max() > 0.05


# --- order and gradients


def test_weights_do_not_depend_on_the_order_of_a_pair():
    combiner, head = made(4)
    x, y = head(items(20)), head(items(30, 2))
    present, back = combiner.weights(x, y), combiner.weights(y, x)
    assert (present - back.transpose(0, 1)).abs().max() < 1e-14
    assert (combiner.compute_mat(x, y) - combiner.compute_mat(y, x).T).abs().max() < 1e-14
    # with the paper's shared flows alone, the two orders would give different weights
    a, b = combiner.flows(items(1)).chunk(2, 1), combiner.flows(items(1, 2)).chunk(2, 1)
    both = ((a[0], b[1]), (b[0], a[1]))
    left, other = (combiner.out(torch.relu(p + q)).softmax(1) for p, q in both)
    assert (left - other).abs().max() > 1e-3
    sums = present.sum(-1)
    assert (present >= 0).all() and torch.allclose(sums, torch.ones_like(sums))


@pytest.mark.parametrize(
    "method", ["compute_mat", "pairwise_distance", "weights", "similarities", "objective"]
)
@pytest.mark.parametrize("small_blocks", [False, True])
def test_gradients_agree_with_finite_differences(method, small_blocks, monkeypatch):
    if small_blocks:
        monkeypatch.setattr(local_metrics, "DIRECT", 0)
        monkeypatch.setattr(local_metrics, "BLOCK", 3 * H)
    combiner, head = made(mu=0.7, rho=1.3)
    x = head(items(4)).detach()
    y = head(items(4 if method == "pairwise_distance" else 5, 2)).detach()
    tensors = [x, combiner.out.weight, combiner.out.bias] + ([] if method == "objective" else [y])

    def value(*_: Tensor) -> Tensor:  # gradcheck changes the tensors in place
        if method == "objective":
            return combiner.objective(x, torch.arange(4), None)[0]
        return getattr(combiner, method)(x, y)

    for tensor in tensors:
        tensor.requires_grad_()
    assert torch.autograd.gradcheck(value, tensors, atol=1e-6, rtol=1e-5)


def test_equal_items_are_at_distance_zero_with_finite_gradients():
    combiner, head = made(4)
    x = head(items(3)).detach().requires_grad_()
    distances = combiner.compute_mat(x, x)
    assert distances.diagonal().abs().max() == 0
    (distances.sum() + combiner.pairwise_distance(x, x).sum()).backward()
    assert x.grad.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("metrics", [1, 3])
def test_half_precision_codes_are_measured_in_float32(dtype, metrics):
    torch.manual_seed(0)
    for combiner in (Discriminator(F, D, metrics, H), UniformMetrics(D, metrics)):
        codes = combiner.build_head(F)(items(6).float()).to(dtype)
        distances = combiner.compute_mat(codes, codes)
        assert distances.dtype == torch.float32 and distances.isfinite().all()


# --- bad input


@pytest.mark.parametrize("name", ["daml.discriminator", "daml.uniform"])
@pytest.mark.parametrize(
    ("metrics", "says"),
    [
        (0, "metrics"),
        (5, "5 local metrics cannot share an embedding of 12 columns.*1, 2, 3, 4, 6, 12"),
    ],
)
def test_metrics_that_do_not_divide_the_embedding_are_refused(name, metrics, says):
    values = {"name": name, "metrics": metrics}
    with pytest.raises(RetrievalError, match=says):
        load_plugins().build("combiners", values, {"features": F, "embedding_size": D})


@pytest.mark.parametrize("name", ["mu", "rho", "start"])
def test_negative_weights_are_refused(name):
    for value in (-0.1, math.nan):
        with pytest.raises(RecipeError, match=name):
            Discriminator(F, D, **{name: value})
    table, sizes = {"name": "daml.discriminator", name: -1.0}, {"features": F, "embedding_size": D}
    with pytest.raises(RetrievalError, match=name):
        load_plugins().build("combiners", table, sizes)


def test_a_head_of_other_features_is_refused():
    with pytest.raises(ValueError, match="built for 5 features, not 6"):
        Discriminator(F, D).build_head(F + 1)


def test_low_mean_weights_are_warned_of():
    combiner = Discriminator(F, D, 3)
    assert combiner.warnings({"load_1": 0.5, "load_2": 0.45, "load_3": 0.05}) == []
    (warning,) = combiner.warnings({"load_1": 0.5, "load_2": 0.46, "load_3": 0.04})
    assert "local metric 3 of 3 has a mean weight of 0.040" in warning
    assert combiner.warnings({}) == []
    assert Discriminator(F, D, 1).objective(torch.randn(4, D), torch.arange(4), None) == (None, {})
    assert combiner.objective(torch.randn(1, D + 256), torch.arange(1), None) == (None, {})
