"""`aml.geometric_mean`: Eq 11 by plain loops over explicit pairs, its gradient, and the learners' optimum on a linear head."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pytorch_metric_learning.reducers import SumReducer
from retrieval.errors import DataError
from retrieval.host.plugins import load_plugins
from retrieval.recipe.read import check_recipe
from retrieval.training.trainer import train
from scipy.linalg import sqrtm
from scipy.optimize import minimize_scalar
from torch import Tensor

from retrieval_aml.aml import AML
from retrieval_aml.geometric_mean import GeometricMeanLoss
from retrieval_aml.gmml import GMML
from retrieval_aml.scale import best_scale

Matrix = Any
LABELS = torch.tensor([0, 0, 1, 1, 2, 2, 2, 0, 1, 3, 3, 0])


def batch(items: int = 12, size: int = 3, seed: int = 0) -> Tensor:
    random = torch.Generator().manual_seed(seed)
    scale = torch.linspace(0.5, 2.0, size, dtype=torch.float64)
    return torch.randn(items, size, dtype=torch.float64, generator=random) * scale + 3


def dist(m: Matrix, x: Matrix, y: Matrix) -> float:
    total = 0.0
    for i in range(len(x)):
        for j in range(len(x)):
            total += (x[i] - y[i]) * m[i, j] * (x[j] - y[j])
    return total


def eq_9(m: Matrix, x: Matrix, y: Matrix, similar: bool, beta: float) -> tuple[Matrix, Matrix]:
    back = np.linalg.inv(m) if similar else m
    solve = np.linalg.inv(2 * back + beta * m)
    return solve @ (back @ (x + y) + beta * m @ x), solve @ (back @ (x + y) + beta * m @ y)


def eq_11(
    embeddings: Matrix, pairs: Any, alpha: float, beta: float, ridge: float, t: float = 1.0, both: Any = None
) -> float:
    """Eq 7 of the pairs and α times Eq 7 of Eq 9's, M = tΣ over whitened embeddings; nothing simplified."""
    everything = embeddings if both is None else np.concatenate([embeddings, both])
    reference = embeddings if both is None else both
    mean = sum(everything) / len(everything)
    covariance = sum(np.outer(e - mean, e - mean) for e in everything) / len(everything)
    covariance = covariance + ridge * np.trace(covariance) / len(mean) * np.eye(len(mean))
    whiten = np.linalg.inv(sqrtm(covariance).real)
    m = t * covariance
    sums: dict[bool, list[float]] = {True: [], False: []}
    for similar, listed in ((True, pairs[:2]), (False, pairs[2:])):
        for i, j in zip(*listed, strict=True):
            x, y = whiten @ embeddings[i], whiten @ reference[j]
            metric = m if similar else np.linalg.inv(m)
            value = dist(metric, x, y)
            value += alpha * dist(metric, *eq_9(m, x, y, similar, beta))
            sums[similar].append(value)
    return sum(float(np.mean(each)) for each in sums.values() if each)


def every_pair(labels: Any, others: Any = None) -> tuple[list[int], list[int], list[int], list[int]]:
    found: tuple[list[int], ...] = ([], [], [], [])
    for i, a in enumerate(labels):
        for j, b in enumerate(labels if others is None else others):
            if a == b and not (others is None and i == j):
                found[0].append(i), found[1].append(j)
            elif a != b:
                found[2].append(i), found[3].append(j)
    return found  # type: ignore[return-value]


CASES = [(0.0, 1.0, 0.0), (1.0, 1.0, 0.0), (0.3, 5.0, 0.1), (20.0, 0.2, 1.0)]


class TestByLoops:
    @pytest.mark.parametrize(("alpha", "beta", "ridge"), CASES)
    def test_fixed_scale_is_eq_11(self, alpha: float, beta: float, ridge: float) -> None:
        embeddings = batch()
        loss = GeometricMeanLoss(alpha, beta, ridge, "fixed")(embeddings, LABELS)
        expected = eq_11(embeddings.numpy(), every_pair(LABELS.tolist()), alpha, beta, ridge)
        assert float(loss) == pytest.approx(expected, rel=1e-10)

    @pytest.mark.parametrize(("alpha", "beta", "ridge"), CASES)
    def test_free_scale_is_its_minimum_over_multiples_of_the_metric(
        self, alpha: float, beta: float, ridge: float
    ) -> None:
        embeddings = batch()
        loss = GeometricMeanLoss(alpha, beta, ridge)(embeddings, LABELS)
        pairs = every_pair(LABELS.tolist())

        def at(log_t: float) -> float:
            return eq_11(embeddings.numpy(), pairs, alpha, beta, ridge, float(np.exp(log_t)))

        coarse = min(range(-8, 9), key=at)
        found = minimize_scalar(
            at, bounds=(coarse - 1, coarse + 1), method="bounded", options={"xatol": 1e-9}
        )
        assert float(loss) == pytest.approx(float(found.fun), rel=1e-9)

    def test_a_miners_pairs_and_a_reference_set(self) -> None:
        embeddings, reference = batch(), batch(9, seed=5)
        ref_labels = torch.arange(9) % 4
        loss = GeometricMeanLoss(1.0, 2.0, 0.1, "fixed")
        pairs = every_pair(LABELS.tolist(), ref_labels.tolist())
        every = loss(embeddings, LABELS, None, reference, ref_labels)
        assert float(every) == pytest.approx(
            eq_11(embeddings.numpy(), pairs, 1.0, 2.0, 0.1, both=reference.numpy()), rel=1e-10
        )
        listed = ([0, 2, 2, 0], [4, 1, 5, 4], [3, 9], [2, 0])
        some = loss(embeddings, LABELS, tuple(map(torch.tensor, listed)), reference, ref_labels)
        assert float(some) == pytest.approx(
            eq_11(embeddings.numpy(), listed, 1.0, 2.0, 0.1, both=reference.numpy()), rel=1e-10
        )
        triplets = ([0, 2, 2], [1, 3, 8], [4, 5, 0])
        own = loss(embeddings, LABELS, tuple(map(torch.tensor, triplets)))
        pairs = (triplets[0], triplets[1], triplets[0], triplets[2])
        assert float(own) == pytest.approx(eq_11(embeddings.numpy(), pairs, 1.0, 2.0, 0.1), rel=1e-10)

    def test_the_adversarial_similar_pair_is_nearer_not_farther(self) -> None:
        """What the paper's Fig. 2 shows the other way round: both kinds of Eq 9's pairs are shorter than the real ones."""
        rng = np.random.default_rng(0)
        for _ in range(50):
            root = rng.normal(size=(4, 4))
            m, (x, y) = root @ root.T + 0.1 * np.eye(4), rng.normal(size=(2, 4))
            assert dist(m, *eq_9(m, x, y, True, 3.0)) < dist(m, x, y)


class TestGradient:
    @pytest.mark.parametrize("scale", ["free", "fixed"])
    @pytest.mark.parametrize(("alpha", "beta", "ridge"), CASES)
    def test_against_finite_differences(self, alpha: float, beta: float, ridge: float, scale: Any) -> None:
        loss = GeometricMeanLoss(alpha, beta, ridge, scale)
        self.check(lambda e: loss(e, LABELS), batch())

    @pytest.mark.parametrize("scale", ["free", "fixed"])
    def test_where_all_eigenvalues_are_equal(self, scale: Any) -> None:
        corners = torch.eye(3, dtype=torch.float64)
        embeddings = torch.cat([corners, -corners, corners, -corners]) * 1.5
        loss = GeometricMeanLoss(1.0, 1.0, 0.1, scale)
        eigenvalues = torch.linalg.eigvalsh(embeddings.T @ embeddings)
        assert float(eigenvalues.max() - eigenvalues.min()) < 1e-12
        labels = torch.tensor([0, 1, 0, 2, 1, 1, 2, 0, 2, 1, 0, 2])
        self.check(lambda e: loss(e, labels), embeddings)

    def test_of_the_reference_set_and_a_miners_pairs(self) -> None:
        embeddings, listed = batch(), tuple(map(torch.tensor, ([0, 2, 2, 0], [4, 1, 5, 4], [3, 9], [2, 0])))
        loss = GeometricMeanLoss(1.0, 2.0, 0.1)
        self.check(lambda r: loss(embeddings, LABELS, listed, r, torch.arange(9) % 4), batch(9, seed=5))

    def check(self, value: Any, at: Tensor) -> None:
        variable = at.clone().requires_grad_()
        value(variable).backward()
        assert variable.grad is not None and float(variable.grad.abs().max()) > 1e-3
        step = 1e-6
        for i in range(at.shape[0]):
            for j in range(at.shape[1]):
                change = torch.zeros_like(at)
                change[i, j] = step
                slope = (float(value(at + change)) - float(value(at - change))) / (2 * step)
                assert slope == pytest.approx(float(variable.grad[i, j]), rel=1e-5, abs=1e-6)


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
    """Return the weights (C, F) of a linear head that L-BFGS finds from a random start, without a bias."""
    data, labels = torch.from_numpy(x), torch.from_numpy(y)
    random = torch.Generator().manual_seed(0)
    start = torch.randn(codes or x.shape[1], x.shape[1], dtype=torch.float64, generator=random)
    weight = start.requires_grad_()
    search = torch.optim.LBFGS(
        [weight], max_iter=2000, tolerance_grad=1e-11, tolerance_change=1e-15, line_search_fn="strong_wolfe", history_size=30,
    )  # fmt: skip

    def closure() -> float:
        search.zero_grad()
        value = loss(data @ weight.T, labels)
        value.backward()
        return float(value.detach())

    search.step(closure)
    return weight.detach()


class TestReachesTheLearnersOptimum:
    """Training a linear head reaches the metric of the estimators, which get there by other ways."""

    def test_gmml(self) -> None:
        x, y = features()
        weight = trained(x, y, GeometricMeanLoss(0.0, 1.0, 0.0, "fixed"))
        expected = GMML(t=0.5).fit(x, y).get_mahalanobis_matrix()
        np.testing.assert_allclose(weight.T @ weight, expected, rtol=1e-5, atol=1e-6)
        reached = float(GeometricMeanLoss(0.0, 1.0, 0.0)(torch.from_numpy(x) @ weight.T, torch.from_numpy(y)))
        a, b = (
            sum(np.outer(x[i] - x[j], x[i] - x[j]) for i, j in zip(*kind, strict=True)) / len(kind[0])
            for kind in (every_pair(y.tolist())[:2], every_pair(y.tolist())[2:])
        )
        root = sqrtm(a).real
        assert reached == pytest.approx(2 * float(np.trace(sqrtm(root @ b @ root).real)), rel=1e-8)

    @pytest.mark.parametrize(("alpha", "beta"), [(1.0, 1.0), (5.0, 0.5), (0.2, 20.0)])
    def test_aml(self, alpha: float, beta: float) -> None:
        x, y = features()
        weight = trained(x, y, GeometricMeanLoss(alpha, beta, 0.0, "fixed"))
        expected = AML(alpha=alpha, beta=beta, tol=1e-8).fit(x, y).get_mahalanobis_matrix()
        np.testing.assert_allclose(weight.T @ weight, expected, rtol=1e-4, atol=1e-5)

    def test_a_free_scale_finds_it_up_to_its_scale(self) -> None:
        x, y = features()
        weight = trained(x, y, GeometricMeanLoss(1.0, 1.0, 0.0, "free"))
        expected = AML(alpha=1.0, beta=1.0, tol=1e-8).fit(x, y).get_mahalanobis_matrix()
        found = (weight.T @ weight).numpy()
        np.testing.assert_allclose(
            found / np.trace(found), expected / np.trace(expected), rtol=1e-4, atol=1e-6
        )

    def test_features_that_are_not_white_are_whitened_by_it(self) -> None:
        x, y = features()
        mix = np.array([[2.0, 1, 0, 0], [0, 0.5, 0, 1], [1, 0, 3, 0], [0, 0, 1, 1]])
        weight = trained(x @ mix.T, y, GeometricMeanLoss(1.0, 1.0, 0.0, "fixed")).numpy()
        expected = AML(alpha=1.0, beta=1.0, tol=1e-8).fit(x, y).get_mahalanobis_matrix()
        np.testing.assert_allclose(mix.T @ weight.T @ weight @ mix, expected, rtol=1e-4, atol=1e-5)


class TestTrainableFeatures:
    def test_eq_7_with_a_metric_of_its_own_would_be_best_at_the_collapse(self) -> None:
        """Why the metric is the embeddings' covariance: with M fixed or learned aside, all embeddings in one point cost 0."""
        embeddings, m = batch(), np.diag([1.0, 2.0, 3.0])
        for shrink, least in ((1.0, 1.0), (1e-3, 0.0)):
            e = (embeddings * shrink).numpy()
            pairs = every_pair(LABELS.tolist())
            naive = sum(dist(m, e[i], e[j]) for i, j in zip(*pairs[:2], strict=True))
            naive += sum(dist(np.linalg.inv(m), e[i], e[j]) for i, j in zip(*pairs[2:], strict=True))
            assert naive > least and (shrink == 1 or naive < 1e-2)
        fixed, free = GeometricMeanLoss(scale="fixed"), GeometricMeanLoss()
        whole = float(fixed(embeddings, LABELS))
        assert float(fixed(embeddings * 1e-3, LABELS)) > 1e5 * whole  # shrinking costs
        for shrink in (1e-3, 1e3):
            assert float(free(embeddings * shrink, LABELS)) == pytest.approx(
                float(free(embeddings, LABELS)), rel=1e-9
            )

    def test_free_embeddings_part_their_classes(self) -> None:
        """What a network that can do anything would do: the scatter within classes vanishes beside that between them."""
        embeddings = batch(60).requires_grad_()
        labels = torch.arange(60) % 4
        search = torch.optim.Adam([embeddings], lr=0.05)
        loss = GeometricMeanLoss(ridge=0.0)

        def share() -> float:
            e = embeddings.detach()
            within = sum(((e[labels == c] - e[labels == c].mean(0)) ** 2).sum() for c in range(4))
            return float(within / ((e - e.mean(0)) ** 2).sum())

        before = share()
        for _ in range(300):
            search.zero_grad()
            loss(embeddings, labels).backward()
            search.step()
        assert before > 0.8
        assert share() < 0.02

    def test_with_a_ridge_directions_that_part_no_classes_fade(self) -> None:
        """Three classes lie in a plane: of five directions two are left; without a ridge all are."""
        x, y = features()
        noise = np.random.default_rng(0).normal(size=(len(x), 1))
        x = np.concatenate([x, noise], axis=1)
        left = []
        for ridge in (0.0, 0.1):
            codes = torch.from_numpy(x) @ trained(x, y, GeometricMeanLoss(ridge=ridge)).T
            left.append(int((torch.linalg.svdvals(codes - codes.mean(0)) > 1e-3).sum()))
        assert left == [5, 2]

    def test_a_recipe_trains_end_to_end(self, tmp_path: Path) -> None:
        made = check_recipe({
            "name": "deep", "data": {"name": "core.digits"}, "split": {"by": "class", "validation": 0.2},
            "sampler": {"classes": 4, "items": 8, "batches": 20}, "head": {"embedding_size": 8},
            "backbone": {"name": "core.convnet", "size": 8, "width": 4, "channels": 1},
            "loss": {"name": "aml.geometric_mean", "ridge": 0.1}, "train": {"epochs": 3, "device": "cpu"}, "optimizer": {"lr": 3e-3},
        })  # fmt: skip
        lines: list[str] = []
        train(tmp_path / "run", made, report=lines.append)
        losses = [
            json.loads(x)["loss"] for x in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
        ]
        assert losses[-1] < 0.8 * losses[0]


class TestOddBatches:
    @pytest.mark.parametrize("labels", [[0] * 12, list(range(12))], ids=["alike", "distinct"])
    def test_one_kind_of_pair_only(self, labels: list[int]) -> None:
        embeddings, numbers = batch().requires_grad_(), torch.tensor(labels)
        free = GeometricMeanLoss()(embeddings, numbers)
        free.backward()
        assert float(free.detach()) == 0 and embeddings.grad is not None and not embeddings.grad.any()
        fixed = float(GeometricMeanLoss(ridge=0.1, scale="fixed")(embeddings.detach(), numbers))
        expected = eq_11(embeddings.detach().numpy(), every_pair(labels), 1.0, 1.0, 0.1)
        assert fixed == pytest.approx(expected, rel=1e-10)

    @pytest.mark.parametrize("scale", ["free", "fixed"])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_all_embeddings_alike(self, scale: Any, dtype: torch.dtype) -> None:
        embeddings = batch(1).to(dtype).repeat(12, 1).requires_grad_()
        value = GeometricMeanLoss(scale=scale)(embeddings, LABELS)
        value.backward()
        assert float(value.detach()) == 0 and embeddings.grad is not None and not embeddings.grad.any()

    def test_a_class_in_one_point(self) -> None:
        embeddings = batch().index_fill(0, (LABELS == 2).nonzero().squeeze(1), 1.0).requires_grad_()
        value = GeometricMeanLoss()(embeddings, LABELS)
        value.backward()
        assert value.isfinite() and embeddings.grad is not None and embeddings.grad.isfinite().all()

    def test_fewer_items_than_dimensions(self) -> None:
        embeddings = batch(size=40).requires_grad_()
        value = GeometricMeanLoss()(embeddings, LABELS)
        value.backward()
        assert value.isfinite() and embeddings.grad is not None and embeddings.grad.isfinite().all()
        with pytest.raises(DataError, match=r"12 embeddings of 40 dimensions .* set ridge above 0"):
            GeometricMeanLoss(ridge=0.0)(embeddings, LABELS)

    def test_a_memory_of_earlier_batches(self) -> None:
        """The covariance is then of batch and memory; gradients reach the batch."""
        memory = {"name": "pml.cross_batch_memory", "loss": {"name": "aml.geometric_mean"}, "memory_size": 24}
        loss = load_plugins().build("losses", memory, {"embedding_size": 3, "classes": 4})
        for seed in range(4):
            embeddings = batch(seed=seed).float().requires_grad_()
            loss(embeddings, LABELS).backward()
            assert embeddings.grad is not None and embeddings.grad.isfinite().all() and embeddings.grad.any()

    def test_a_sum_of_pairs(self) -> None:
        pairs = every_pair(LABELS.tolist())
        value = GeometricMeanLoss(0.0, ridge=0.1, scale="fixed", reducer=SumReducer())(batch(), LABELS)
        e = batch().numpy()
        parts = [eq_11(e, (*pairs[:2], [], []), 0.0, 1.0, 0.1), eq_11(e, ([], [], *pairs[2:]), 0.0, 1.0, 0.1)]
        assert float(value) == pytest.approx(len(pairs[0]) * parts[0] + len(pairs[2]) * parts[1], rel=1e-10)

    def test_float32_agrees(self) -> None:
        embeddings, labels = batch(200, 32), torch.arange(200) % 5
        exact = float(GeometricMeanLoss()(embeddings, labels))
        assert float(GeometricMeanLoss()(embeddings.float(), labels)) == pytest.approx(exact, rel=1e-5)


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
    def test_parameters(self, values: dict[str, Any], sentence: str) -> None:
        with pytest.raises(ValueError, match=sentence):
            GeometricMeanLoss(**values)

    def test_what_it_is_given(self) -> None:
        loss, embeddings = GeometricMeanLoss(), batch()
        wrong = embeddings.clone()
        wrong[3, 1] = float("nan")
        with pytest.raises(DataError, match=r"embeddings hold NaN or infinite numbers: 1 of 12 items"):
            loss(wrong, LABELS)
        with pytest.raises(DataError, match=r"ref_emb hold NaN"):
            loss(embeddings, LABELS, None, wrong, LABELS)
        with pytest.raises(ValueError, match="labels are missing"):
            loss(embeddings)
        with pytest.raises(ValueError, match="ref_labels are missing"):
            loss(embeddings, LABELS, None, batch(5))
        with pytest.raises(ValueError, match="must be a matrix"):
            loss(LABELS, LABELS)
        with pytest.raises(ValueError, match="labels"):
            loss(embeddings, LABELS[:5])
        for indices, sentence in (
            ((torch.tensor([0]), torch.tensor([12]), torch.tensor([1])), "from 12 to 12, and there are 12"),
            ((torch.tensor([0]),) * 2, "not 2 tensors"),
        ):
            with pytest.raises(ValueError, match=sentence):
                loss(embeddings, LABELS, indices)


def test_the_best_scale_is_where_the_objective_is_flat() -> None:
    a, eigenvalues = torch.tensor([0.3, 2.0, 1.0]), torch.tensor([0.1, 1.0, 30.0])
    for alpha, beta, d in ((0.0, 1.0, 4.0), (1.0, 1.0, 0.01), (1000.0, 1e-3, 50.0), (1e-3, 1e3, 7.0)):
        found = best_scale(a, eigenvalues, torch.tensor(d), alpha, beta)

        def value(t: float, alpha: float = alpha, beta: float = beta, d: float = d) -> float:
            total = d / t
            for m, e in zip(a.double().tolist(), eigenvalues.double().tolist(), strict=True):
                s = beta * t * t * e * e / (2 + beta * t * t * e * e)
                total += t * m * (1 + alpha * s * s)
            return total

        near = min(value(found * 10.0 ** (k / 400)) for k in range(-800, 801))
        assert value(found) <= near * (1 + 1e-12)
