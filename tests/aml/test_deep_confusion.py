"""`aml.confusion` against Eq 9 and against a search on the sphere; its gradients and refusals."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from retrieval.errors import RecipeError
from retrieval.host.plugins import load_plugins
from retrieval.model.model import Normalise, build_head
from retrieval.recipe.read import check_recipe
from retrieval.run import checkpoint_format
from retrieval.training.trainer import train_run
from torch import Tensor, nn

from retrieval_aml.confusion import Confusion

BETAS = (0.01, 0.5, 1.0, 2.0, 30.0)


def points(seed: int = 0, rows: int = 6, features: int = 5) -> tuple[Tensor, Tensor, Tensor]:
    random = torch.Generator().manual_seed(seed)
    built = torch.randn(3, rows, features, dtype=torch.float64, generator=random)
    return built[0], built[1], built[2]


def bound(head: nn.Module, beta: float = 1.0) -> Confusion:
    generator = Confusion(beta)
    generator.bind(head)
    return generator


def linear(codes: int, bias: bool = True, unit: bool = False, seed: int = 1) -> nn.Sequential:
    torch.manual_seed(seed)
    layers: list[nn.Module] = [nn.Linear(5, codes, bias=bias, dtype=torch.float64)]
    return nn.Sequential(*layers, *([Unit()] if unit else []))


class Unit(Normalise):
    """`Normalise` in float64."""

    def forward(self, x: Tensor) -> Tensor:
        return x / x.norm(dim=-1, keepdim=True)


class TestLinearHead:
    @pytest.mark.parametrize("beta", BETAS)
    @pytest.mark.parametrize("codes", [2, 5, 8])  # M = WᵀW is singular in the first case
    def test_its_pair_solves_eq_9_and_is_stationary(self, beta, codes):
        head = linear(codes)
        a, p, n = points()
        built = bound(head, beta)(a, p, n).numpy()
        w = head[0].weight.detach().numpy()
        for epsilon in (1e-3, 1.0, 50.0):
            m = w.T @ w + epsilon * np.eye(5)
            inverse = np.linalg.inv(2 * m + beta * m)
            for x, x2, z in zip(a.numpy(), n.numpy(), built, strict=True):
                pi = inverse @ (m @ (x + x2) + beta * m @ x)  # Eq 9, y = −1: M^(−y) = M
                pi2 = inverse @ (m @ (x + x2) + beta * m @ x2)
                # Eq 8: where Eq 3 is stationary
                scale = np.abs(m).max()
                assert np.abs(m @ (pi - pi2) + beta * m @ (pi - x)).max() < 1e-9 * scale
                assert np.abs(m @ (pi2 - pi) + beta * m @ (pi2 - x2)).max() < 1e-9 * scale
                # the same pair, shifted so that π is the anchor
                np.testing.assert_allclose(z - x, pi2 - pi, atol=1e-9)
                # z minimises D(a, z)² + β/2 · D(n, z)²
                assert np.abs(m @ (z - x) + beta / 2 * m @ (z - x2)).max() < 1e-9 * scale

    def test_the_limits_of_beta(self):
        a, p, n = points()
        head = linear(3)
        torch.testing.assert_close(bound(head, 1e-9)(a, p, n), a)
        torch.testing.assert_close(bound(head, 1e9)(a, p, n), n)
        torch.testing.assert_close(bound(head, 2.0)(a, p, n), (a + n) / 2)


class TestSphere:
    @pytest.mark.parametrize("beta", BETAS)
    @pytest.mark.parametrize("bias", [True, False])
    def test_the_embedding_is_the_best_on_the_sphere(self, beta, bias):
        head = linear(4, bias, unit=True)
        a, p, n = points()
        codes = head(bound(head, beta)(a, p, n)).detach().numpy()
        for u, v, c in zip(head(a).detach().numpy(), head(n).detach().numpy(), codes, strict=True):
            best = np.array([2 * x + beta * y for x, y in zip(u, v, strict=True)])
            np.testing.assert_allclose(c, best / np.sqrt(sum(x * x for x in best)), atol=1e-12)

            def cost(w: Any, u: Any = u, v: Any = v) -> float:
                return float(sum((u - w) ** 2) + beta / 2 * sum((v - w) ** 2))

            for seed in range(50):  # no other point of the sphere costs less
                other = c + np.random.default_rng(seed).normal(size=4) * 10.0 ** -(seed % 4)
                assert cost(c) <= cost(other / np.linalg.norm(other)) + 1e-12

    def test_it_follows_changes_of_the_head(self):
        head = linear(4, unit=True)
        generator, built = bound(head), points()
        before = generator(*built)
        with torch.no_grad():
            head[0].weight[:, 0] *= 3
        assert (generator(*built) - before).abs().max() > 1e-3

    def test_under_a_hidden_layer_it_is_nearly_the_best(self):
        torch.manual_seed(0)
        head = build_head(5, 4, hidden=[32])
        a, p, n = (x.float() for x in points(rows=200))

        def cost(code: Tensor) -> float:
            squares = (head(a) - code).square() + 0.5 * (head(n) - code).square()
            return float(squares.detach().sum(1).mean())

        best = nn.functional.normalize(2 * head(a) + head(n))  # of all points of the sphere
        reached = cost(head(bound(head)(a, p, n)))
        assert reached < cost(head((2 * a + n) / 3)) < 0.6 * cost(head(n))
        assert reached < cost(head(a)) and reached < 1.3 * cost(best)

    def test_opposite_and_zero_embeddings_stay_finite(self):
        head = nn.Sequential(Normalise())
        a = torch.tensor([[1.0, 2.0], [0.0, 0.0], [0.0, 0.0], [1.0, 0.0]])
        n = torch.tensor([[-2.0, -4.0], [1.0, 0.0], [0.0, 0.0], [0.0, 0.0]])
        z = bound(head, 2.0)(a, a, n)
        assert z.isfinite().all()
        torch.testing.assert_close(z[0], n[0])  # all points are equally good
        weight = torch.eye(2, requires_grad=True)
        head(z @ weight).sum().backward()
        assert weight.grad is not None and weight.grad.isfinite().all()


class TestSideEffects:
    def test_gradients_reach_anchor_and_negative_with_their_shares_as_constants(self):
        torch.manual_seed(0)
        head = build_head(5, 4)
        a, p, n = (x.float().requires_grad_() for x in points())
        z = bound(head)(a, p, n)
        assert not any(
            g is not None
            for g in torch.autograd.grad(
                z.sum(), [p, *head.parameters()], retain_graph=True, allow_unused=True
            )
        )
        z.sum().backward()
        assert a.grad is not None and n.grad is not None
        share = a.grad[:, :1]  # of the anchor; the rest is the negative's
        torch.testing.assert_close(a.grad, share.expand_as(a))
        torch.testing.assert_close(n.grad, (1 - share).expand_as(n))
        torch.testing.assert_close(z, share * a + (1 - share) * n)
        assert ((share > 0) & (share < 1)).all()

    def test_batch_statistics_dropout_and_random_state_stay(self):
        torch.manual_seed(0)
        head = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), Normalise())
        head[1].eval()
        state, random = (
            {k: v.clone() for k, v in head.state_dict().items()},
            torch.random.get_rng_state(),
        )
        a, p, n = (x.float() for x in points())
        generator = bound(head)
        assert torch.equal(generator(a, p, n), generator(a, p, n))
        assert all(torch.equal(v, state[k]) for k, v in head.state_dict().items())
        assert torch.equal(torch.random.get_rng_state(), random)
        assert [m.training for m in head] == [True, False, True, True]

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
    def test_half_precision(self, dtype):
        head, built = build_head(5, 4), [x.to(dtype) for x in points()]
        z = bound(head.to(dtype))(*built)
        exact = bound(head.float())(*(x.float() for x in built))
        assert z.dtype == dtype
        torch.testing.assert_close(z.float(), exact, atol=0.05, rtol=0.05)

    def test_no_triplets(self):
        none = torch.zeros(0, 5)
        assert bound(build_head(5, 4))(none, none, none).shape == (0, 5)


class TestRefusals:
    @pytest.mark.parametrize("beta", [0.0, -1.0, float("nan"), float("inf")])
    def test_beta(self, beta):
        with pytest.raises(ValueError, match=r"beta is .* must be a number above 0"):
            Confusion(beta)
        plugins = load_plugins()
        if not beta > 0:
            with pytest.raises(RecipeError, match="beta"):
                plugins.build("generators", {"name": "aml.confusion", "beta": beta})

    def test_without_a_head(self):
        with pytest.raises(ValueError, match=r"call bind\(head\) first"):
            Confusion()(*points())

    def test_shapes(self):
        a, p, n = points()
        with pytest.raises(ValueError, match=r"\(6, 5\) and \(5, 5\)"):
            bound(linear(3))(a, p, n[:5])


MINED = {"miner": {"name": "pml.triplet_margin"}}


@pytest.mark.parametrize(
    ("loss", "miner"),
    [("pml.triplet_margin", {}), ("anml.danml", MINED), ("aml.geometric_mean", MINED)],
)
def test_a_recipe_trains(tmp_path, loss, miner):
    recipe = {
        "name": "confusion",
        "data": {"name": "core.digits"},
        "split": {"by": "class"},
        "sampler": {"classes": 4, "items": 4, "batches": 3},
        "backbone": {"name": "core.convnet", "size": 8, "width": 4, "channels": 1},
        "head": {"embedding_size": 8},
        "train": {"epochs": 1, "real_weight": 1.0, "device": "cpu"},
        "generator": {"name": "aml.confusion"},
        "loss": {"name": loss},
    }
    train_run(tmp_path / "run", check_recipe({**recipe, **miner}))
    state = checkpoint_format.load_checkpoint(tmp_path / "run" / "checkpoints" / "last.safetensors")
    assert state["modules"].get("generator", {}) == {}
    assert list(state["optimizers"]) == ["metric"]
