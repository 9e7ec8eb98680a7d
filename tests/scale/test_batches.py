"""Losses, miners and learners whose batches or classes are computed in several blocks."""

import numpy as np
import pytest
import torch
from pytorch_metric_learning import miners
from retrieval.evaluation.block_ranking import Ranking
from retrieval.host.plugins import load_plugins

from retrieval_anml import LANML, PNCA, neighborhoods
from retrieval_core import recall_loss
from retrieval_daml import local_metrics
from retrieval_daml.local_metrics import Discriminator
from retrieval_pml import miners as pml_miners

pytestmark = pytest.mark.scale


def codes(rows: int, width: int = 8) -> torch.Tensor:
    return torch.randn(rows, width, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("factory", "options"),
    [
        ("triplet_margin", {"type_of_triplets": "semihard"}),
        ("triplet_margin", {"type_of_triplets": "hard"}),
        ("multi_similarity", {"epsilon": 0.1}),
    ],
)
def test_miners_give_upstreams_indices(factory, options):
    x, y = codes(192), torch.arange(192) % 24
    assert pml_miners.ENTRIES < 192 * 7 * 192
    ours = load_plugins().find("miners", f"pml.{factory}").build(options)
    theirs = getattr(miners, type(ours).__name__)(**options)
    pairs = zip(ours(x, y), theirs(x, y), strict=True)
    for left, other in pairs:
        assert len(left) and sorted(left.tolist()) == sorted(other.tolist())


def gradients(function, *tensors: torch.Tensor) -> list[torch.Tensor]:
    leaves = [tensor.detach().clone().requires_grad_() for tensor in tensors]
    value = function(*leaves)
    return [value.detach(), *torch.autograd.grad(value, leaves)]


def test_recall_at_k(monkeypatch):
    x, y = codes(256), torch.arange(256) % 32
    assert recall_loss.ENTRIES < 256**3
    loss = load_plugins().find("losses", "core.recall_at_k").build({})
    parts = gradients(lambda x: loss(x, y), x)
    monkeypatch.setattr(recall_loss, "ENTRIES", 1 << 40)
    for left, other in zip(parts, gradients(lambda x: loss(x, y), x), strict=True):
        torch.testing.assert_close(left, other)


def test_weights_of_pairs(monkeypatch):
    torch.manual_seed(0)
    combiner = Discriminator(16, 8, 4, 32).double()
    torch.nn.init.normal_(combiner.out.weight)
    head = combiner.build_head(16).double()
    x, y = head(codes(400, 16)), head(codes(400, 16) + 1)
    assert local_metrics.DIRECT < 400 * 400 * 32
    parts = gradients(lambda x, y: combiner.compute_mat(x, y).mean(), x, y)
    monkeypatch.setattr(local_metrics, "DIRECT", 1 << 40)
    whole = gradients(lambda x, y: combiner.compute_mat(x, y).mean(), x, y)
    for left, other in zip(parts, whole, strict=True):
        torch.testing.assert_close(left, other)


@pytest.mark.parametrize("learner", [LANML(-0.7, 2.0, 0.3), PNCA(1.0)], ids=str)
def test_large_classes(learner, monkeypatch):
    random = np.random.default_rng(0)
    y = np.arange(3200) % 2
    x = random.normal(size=(3200, 3)) + y[:, None]
    assert neighborhoods.BLOCK < 1600 * 1600
    value, gradient = learner.objective(np.eye(3), x, y)
    monkeypatch.setattr(neighborhoods, "BLOCK", 1 << 40)
    expected, slope = learner.objective(np.eye(3), x, y)
    assert value == pytest.approx(expected, rel=1e-12)
    np.testing.assert_allclose(gradient, slope, rtol=1e-9, atol=1e-11)


def test_queries_of_very_deep_rankings_are_left_to_full_search():
    random = np.random.default_rng(0)
    codes, classes = random.normal(size=(18_000, 8)).astype(np.float32), np.arange(18_000) % 4
    rows = np.arange(2200)
    for depth, left in ((3000, False), (4400, True)):
        panels = Ranking(codes, classes, rows, np.full(2200, depth))
        # the panels with most queries have 1,024
        assert max((len(mask), mask.all()) for _, _, mask in panels) == (1024, left)
