"""`aml.geometric_mean` trained: the learners' optimum on a linear head, and what embeddings that
can do anything become.
"""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from geometric_mean_by_loops import Matrix, every_pair
from retrieval.recipe.read import check_recipe
from retrieval.training.trainer import train
from scipy.linalg import sqrtm
from torch import Tensor

from retrieval_aml.aml import AML
from retrieval_aml.geometric_mean import GeometricMeanLoss
from retrieval_aml.gmml import GMML


def features(items: int = 90, size: int = 4) -> tuple[Matrix, Matrix]:
    """Three classes with scatter of different shape, whitened."""
    rng = np.random.default_rng(3)
    y = np.arange(items) % 3
    x = rng.normal(size=(items, size)) * np.linspace(0.3, 2, size) + rng.normal(size=(3, size))[y]
    x = x @ rng.normal(size=(size, size))
    return whitened(x), y


def whitened(x: Matrix) -> Matrix:
    x = x - x.mean(0)
    return x @ np.linalg.inv(sqrtm(x.T @ x / len(x)).real)


def trained(x: Matrix, y: Matrix, loss: GeometricMeanLoss, codes: int | None = None) -> Tensor:
    """Return the weights (C, F) of a linear head that L-BFGS finds from a random start, without a
    bias.
    """
    data, labels = torch.from_numpy(x), torch.from_numpy(y)
    random = torch.Generator().manual_seed(0)
    start = torch.randn(codes or x.shape[1], x.shape[1], dtype=torch.float64, generator=random)
    weight = start.requires_grad_()
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
    """Training a linear head reaches the estimators' metric, which they find by other ways."""

    def test_gmml(self):
        x, y = features()
        weight = trained(x, y, GeometricMeanLoss(0.0, 1.0, 0.0, "fixed"))
        expected = GMML(t=0.5).fit(x, y).get_mahalanobis_matrix()
        np.testing.assert_allclose(weight.T @ weight, expected, rtol=1e-5, atol=1e-6)
        reached = float(
            GeometricMeanLoss(0.0, 1.0, 0.0)(torch.from_numpy(x) @ weight.T, torch.from_numpy(y))
        )
        a, b = (
            sum(np.outer(x[i] - x[j], x[i] - x[j]) for i, j in zip(*kind, strict=True))
            / len(kind[0])
            for kind in (every_pair(y.tolist())[:2], every_pair(y.tolist())[2:])
        )
        root = sqrtm(a).real
        assert reached == pytest.approx(2 * float(np.trace(sqrtm(root @ b @ root).real)), rel=1e-8)

    @pytest.mark.parametrize(("alpha", "beta"), [(1.0, 1.0), (5.0, 0.5), (0.2, 20.0)])
    def test_aml(self, alpha, beta):
        x, y = features()
        weight = trained(x, y, GeometricMeanLoss(alpha, beta, 0.0, "fixed"))
        expected = AML(alpha=alpha, beta=beta, tol=1e-8).fit(x, y).get_mahalanobis_matrix()
        np.testing.assert_allclose(weight.T @ weight, expected, rtol=1e-4, atol=1e-5)

    def test_a_free_scale_finds_it_up_to_its_scale(self):
        x, y = features()
        weight = trained(x, y, GeometricMeanLoss(1.0, 1.0, 0.0, "free"))
        expected = AML(alpha=1.0, beta=1.0, tol=1e-8).fit(x, y).get_mahalanobis_matrix()
        actual = (weight.T @ weight).numpy()
        np.testing.assert_allclose(
            actual / np.trace(actual), expected / np.trace(expected), rtol=1e-4, atol=1e-6
        )


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
    train(tmp_path / "run", built)
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert json.loads(lines[-1])["loss"] < 0.8 * json.loads(lines[0])["loss"]
