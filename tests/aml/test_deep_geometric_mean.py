"""`aml.geometric_mean`: Eq 11 and its gradient by plain loops, odd batches, and training to the
learners' optimum.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch
from geometric_mean_by_loops import LABELS, Matrix, batch, eq_11, every_pair
from pytorch_metric_learning.reducers import SumReducer
from retrieval.errors import DataError
from retrieval.host.plugins import load_plugins
from retrieval.recipe.read import check_recipe
from retrieval.training.trainer import train_run
from scipy.linalg import sqrtm
from scipy.optimize import minimize_scalar
from torch import Tensor

from retrieval_aml.aml import AML
from retrieval_aml.geometric_mean import GeometricMeanLoss
from retrieval_aml.gmml import GMML

LISTED = ([0, 2, 2, 0], [4, 1, 5, 4], [3, 9], [2, 0])  # a miner's pairs
CASES = [(0.0, 1.0, 0.0), (1.0, 1.0, 0.0), (0.3, 5.0, 0.1), (20.0, 0.2, 1.0)]


class TestByLoops:
    @pytest.mark.parametrize(("alpha", "beta", "ridge"), CASES)
    def test_fixed_scale_is_eq_11(self, alpha, beta, ridge):
        embeddings = batch()
        loss = GeometricMeanLoss(alpha, beta, ridge, "fixed")(embeddings, LABELS)
        expected = eq_11(embeddings.numpy(), every_pair(LABELS.tolist()), alpha, beta, ridge)
        assert float(loss) == pytest.approx(expected, rel=1e-10)

    @pytest.mark.parametrize(("alpha", "beta", "ridge"), CASES)
    def test_free_scale_is_its_minimum_over_multiples_of_the_metric(self, alpha, beta, ridge):
        embeddings = batch()
        loss = GeometricMeanLoss(alpha, beta, ridge)(embeddings, LABELS)
        pairs = every_pair(LABELS.tolist())

        def at(log_t: float) -> float:
            return eq_11(embeddings.numpy(), pairs, alpha, beta, ridge, float(np.exp(log_t)))

        coarse = min(range(-8, 9), key=at)
        actual = minimize_scalar(
            at, bounds=(coarse - 1, coarse + 1), method="bounded", options={"xatol": 1e-9}
        )
        assert float(loss) == pytest.approx(float(actual.fun), rel=1e-9)

    def test_a_miners_pairs_and_a_reference_set(self):
        embeddings, reference = batch(), batch(9, seed=5)
        ref_labels = torch.arange(9) % 4
        loss = GeometricMeanLoss(1.0, 2.0, 0.1, "fixed")

        def by_loops(pairs: Any, both: Any = None) -> Any:
            value = eq_11(embeddings.numpy(), pairs, 1.0, 2.0, 0.1, both=both)
            return pytest.approx(value, rel=1e-10)

        pairs = every_pair(LABELS.tolist(), ref_labels.tolist())
        every = loss(embeddings, LABELS, None, reference, ref_labels)
        assert float(every) == by_loops(pairs, reference.numpy())
        some = loss(embeddings, LABELS, tuple(map(torch.tensor, LISTED)), reference, ref_labels)
        assert float(some) == by_loops(LISTED, reference.numpy())
        triplets = ([0, 2, 2], [1, 3, 8], [4, 5, 0])
        own = loss(embeddings, LABELS, tuple(map(torch.tensor, triplets)))
        assert float(own) == by_loops((triplets[0], triplets[1], triplets[0], triplets[2]))


class TestGradient:
    @pytest.mark.parametrize("scale", ["free", "fixed"])
    @pytest.mark.parametrize(("alpha", "beta", "ridge"), CASES)
    def test_against_finite_differences(self, alpha, beta, ridge, scale):
        loss = GeometricMeanLoss(alpha, beta, ridge, scale)
        self.assert_gradient(lambda e: loss(e, LABELS), batch())

    @pytest.mark.parametrize("scale", ["free", "fixed"])
    def test_where_all_eigenvalues_are_equal(self, scale):
        corners = torch.eye(3, dtype=torch.float64)
        embeddings = torch.cat([corners, -corners, corners, -corners]) * 1.5
        loss = GeometricMeanLoss(1.0, 1.0, 0.1, scale)
        eigenvalues = torch.linalg.eigvalsh(embeddings.T @ embeddings)
        assert float(eigenvalues.max() - eigenvalues.min()) < 1e-12
        labels = torch.tensor([0, 1, 0, 2, 1, 1, 2, 0, 2, 1, 0, 2])
        self.assert_gradient(lambda e: loss(e, labels), embeddings)

    def test_of_the_reference_set_and_a_miners_pairs(self):
        listed, labels = tuple(map(torch.tensor, LISTED)), torch.arange(9) % 4
        loss = GeometricMeanLoss(1.0, 2.0, 0.1)
        self.assert_gradient(lambda r: loss(batch(), LABELS, listed, r, labels), batch(9, seed=5))

    def assert_gradient(self, value: Any, at: Tensor) -> None:
        variable = at.clone().requires_grad_()
        assert torch.autograd.gradcheck(value, variable, rtol=1e-5, atol=1e-6)
        assert float(torch.autograd.grad(value(variable), variable)[0].abs().max()) > 1e-3


class TestOddBatches:
    @pytest.mark.parametrize("labels", [[0] * 12, list(range(12))], ids=["alike", "distinct"])
    def test_one_kind_of_pair_only(self, labels):
        embeddings, numbers = batch().requires_grad_(), torch.tensor(labels)
        free = GeometricMeanLoss()(embeddings, numbers)
        (gradient,) = torch.autograd.grad(free, embeddings)
        assert float(free.detach()) == 0 and not gradient.any()
        fixed = float(GeometricMeanLoss(ridge=0.1, scale="fixed")(embeddings.detach(), numbers))
        expected = eq_11(embeddings.detach().numpy(), every_pair(labels), 1.0, 1.0, 0.1)
        assert fixed == pytest.approx(expected, rel=1e-10)

    def test_fewer_items_than_dimensions(self):
        embeddings = batch(size=40).requires_grad_()
        value = GeometricMeanLoss()(embeddings, LABELS)
        (gradient,) = torch.autograd.grad(value, embeddings)
        assert value.isfinite() and gradient.isfinite().all()
        with pytest.raises(DataError, match=r"12 embeddings of 40 dimensions .* Set ridge above 0"):
            GeometricMeanLoss(ridge=0.0)(embeddings, LABELS)

    def test_a_memory_of_earlier_batches(self):
        """The covariance is that of batch and memory. Gradients reach the batch."""
        memory = {"name": "pml.cross_batch_memory", "memory_size": 24}
        memory["loss"] = {"name": "aml.geometric_mean"}
        loss = load_plugins().build("losses", memory, {"embedding_size": 3, "classes": 4})
        for seed in range(4):
            embeddings = batch(seed=seed).float().requires_grad_()
            (gradient,) = torch.autograd.grad(loss(embeddings, LABELS), embeddings)
            assert gradient.isfinite().all() and gradient.any()

    def test_a_sum_of_pairs(self):
        loss = GeometricMeanLoss(0.0, ridge=0.1, scale="fixed", reducer=SumReducer())
        e, pairs = batch().numpy(), every_pair(LABELS.tolist())
        similar = len(pairs[0]) * eq_11(e, (*pairs[:2], [], []), 0.0, 1.0, 0.1)
        dissimilar = len(pairs[2]) * eq_11(e, ([], [], *pairs[2:]), 0.0, 1.0, 0.1)
        value = float(loss(batch(), LABELS))
        assert value == pytest.approx(similar + dissimilar, rel=1e-10)


class TestRefusals:
    @pytest.mark.parametrize(
        ("values", "sentence"),
        [
            ({"alpha": -1.0}, "alpha is -1 and must be at least 0"),
            ({"beta": 0.0}, "beta is 0 and must be above 0"),
            ({"ridge": float("nan")}, "ridge is nan and must be at least 0, and finite"),
            ({"alpha": float("inf")}, "alpha is inf"),
            ({"scale": "best"}, 'scale is "best" and must be "free" or "fixed"'),
        ],
    )
    def test_parameters(self, values, sentence):
        with pytest.raises(ValueError, match=sentence):
            GeometricMeanLoss(**values)


def features(items: int = 90, size: int = 4) -> tuple[Matrix, Matrix]:
    """Whitened features (N, F) of three classes of unequal scatter, and labels (N,)."""
    rng = np.random.default_rng(3)
    y = np.arange(items) % 3
    x = rng.normal(size=(items, size)) * np.linspace(0.3, 2, size) + rng.normal(size=(3, size))[y]
    x = x @ rng.normal(size=(size, size))
    return whitened(x), y


def whitened(x: Matrix) -> Matrix:
    x = x - x.mean(0)
    return x @ np.linalg.inv(sqrtm(x.T @ x / len(x)).real)


def trained(x: Matrix, y: Matrix, loss: GeometricMeanLoss) -> Tensor:
    """Return the weights (F, F), without bias, that L-BFGS finds from a random start."""
    data, labels = torch.from_numpy(x), torch.from_numpy(y)
    random = torch.Generator().manual_seed(0)
    size = (x.shape[1], x.shape[1])
    weight = torch.randn(size, dtype=torch.float64, generator=random).requires_grad_()
    search = torch.optim.LBFGS(
        [weight],
        max_iter=2000,
        tolerance_grad=1e-11,
        tolerance_change=1e-15,
        line_search_fn="strong_wolfe",
        history_size=30,
    )

    def closure() -> float:
        search.zero_grad()
        value = loss(data @ weight.T, labels)
        value.backward()
        return float(value.detach())

    search.step(closure)
    return weight.detach()


class TestReachesTheLearnersOptimum:
    """Training a linear head reaches the metric of the estimators, which do not use this loss."""

    def test_gmml(self):
        x, y = features()
        weight = trained(x, y, GeometricMeanLoss(0.0, 1.0, 0.0, "fixed"))
        expected = GMML(t=0.5).fit(x, y).get_mahalanobis_matrix()
        np.testing.assert_allclose(weight.T @ weight, expected, rtol=1e-5, atol=1e-6)
        loss, data = GeometricMeanLoss(0.0, 1.0, 0.0), torch.from_numpy(x)
        reached = float(loss(data @ weight.T, torch.from_numpy(y)))
        pairs = every_pair(y.tolist())
        a, b = (
            np.mean([np.outer(x[i] - x[j], x[i] - x[j]) for i, j in zip(*kind, strict=True)], 0)
            for kind in (pairs[:2], pairs[2:])
        )
        root = sqrtm(a).real
        assert reached == pytest.approx(2 * float(np.trace(sqrtm(root @ b @ root).real)), rel=1e-8)

    @pytest.mark.parametrize(("alpha", "beta"), [(1.0, 1.0), (5.0, 0.5), (0.2, 20.0)])
    def test_aml(self, alpha, beta):
        x, y = features()
        weight = trained(x, y, GeometricMeanLoss(alpha, beta, 0.0, "fixed"))
        expected = AML(alpha=alpha, beta=beta, tol=1e-8).fit(x, y).get_mahalanobis_matrix()
        np.testing.assert_allclose(weight.T @ weight, expected, rtol=1e-4, atol=1e-5)

    def test_a_free_scale_of_features_that_are_not_white(self):
        x, y = features()
        mix = np.array([[2.0, 1, 0, 0], [0, 0.5, 0, 1], [1, 0, 3, 0], [0, 0, 1, 1]])
        weight = trained(x @ mix.T, y, GeometricMeanLoss(1.0, 1.0, 0.0)).numpy() @ mix
        actual = weight.T @ weight
        expected = AML(alpha=1.0, beta=1.0, tol=1e-8).fit(x, y).get_mahalanobis_matrix()
        np.testing.assert_allclose(
            actual / np.trace(actual), expected / np.trace(expected), rtol=1e-4, atol=1e-6
        )


def test_with_a_ridge_directions_that_separate_no_classes_fade():
    """Three classes span a plane, so two of five directions are left."""
    x, y = features()
    x = np.concatenate([x, np.random.default_rng(0).normal(size=(len(x), 1))], axis=1)
    left = []
    for ridge in (0.0, 0.1):
        codes = torch.from_numpy(x) @ trained(x, y, GeometricMeanLoss(ridge=ridge)).T
        left.append(int((torch.linalg.svdvals(codes - codes.mean(0)) > 1e-3).sum()))
    assert left == [5, 2]


def test_a_recipe_trains_end_to_end(tmp_path):
    built = check_recipe(
        {
            "data": {"name": "core.digits"},
            "split": {"by": "class", "validation": 0.2},
            "sampler": {"classes": 4, "items": 8, "batches": 20},
            "head": {"embedding_size": 8},
            "backbone": {"name": "core.convnet", "size": 8, "width": 4, "channels": 1},
            "loss": {"name": "aml.geometric_mean", "ridge": 0.1},
            "train": {"epochs": 3, "device": "cpu"},
            "optimizer": {"lr": 3e-3},
        }
    )
    train_run(tmp_path / "run", built)
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert json.loads(lines[-1])["loss"] < 0.8 * json.loads(lines[0])["loss"]
