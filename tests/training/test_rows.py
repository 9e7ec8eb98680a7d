"""Losses that are divided by rows: the sums add up to the whole batch's loss and gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pytorch_metric_learning import losses as upstream
from retrieval import create
from retrieval.errors import PluginError
from retrieval.model.loss_division import Rows, is_mean, row_sums, rows_of_loss
from torch import Tensor, nn

SIZE, CLASSES, ITEMS = 6, 5, 4
ANCHORS = ["signal_to_noise_ratio_contrastive", "generalized_lifted_structure"]
ANCHORS += ["multi_similarity", "circle", "nt_xent", "sup_con", "tuplet_margin"]
MEAN = {"name": "pml.mean"}
OPTIONS: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in ANCHORS),
    ("contrastive", {"neg_margin": 0.9}),
    ("triplet_margin", {"margin": 0.3}),
    ("triplet_margin", {"smooth_loss": True}),
    ("triplet_margin", {"swap": True, "margin": 0.3}),
    ("triplet_margin", {"margin": 0.3, "reducer": {"name": "pml.sum"}}),
    ("contrastive", {"reducer": MEAN, "distance": {"name": "pml.cosine_similarity"}}),
    ("multi_similarity", {"reducer": {"name": "pml.threshold", "low": 0.2, "high": 2.0}}),
]
NUMBERED = [f"{name}{i}" for i, (name, _) in enumerate(OPTIONS)]
ITEMWISE = ["normalized_softmax", "soft_triple", "proxy_nca", "arc_face", "cos_face"]
ITEMWISE += ["sub_center_arc_face", "sphere_face", "large_margin_softmax"]
MINERS: list[tuple[str, dict[str, Any]] | None] = [
    None,
    ("multi_similarity", {}),
    ("triplet_margin", {"margin": 0.1, "type_of_triplets": "hard"}),
]
PROXIES = [*ITEMWISE, "proxy_anchor"]


def loss_of(name: str, options: dict[str, Any] | None = None) -> Any:
    torch.manual_seed(5)
    sizes = {"embedding_size": SIZE, "classes": CLASSES} if name in PROXIES else {}
    return create("losses", f"pml.{name}", **sizes, **(options or {})).double()


def batch(seed: int) -> tuple[Tensor, Tensor]:
    """Shuffled codes and labels of overlapping classes; one class has a single item."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(CLASSES).repeat_interleave(ITEMS)[: -ITEMS + 1]
    labels = labels[torch.randperm(len(labels), generator=generator)]
    middle = torch.randn(CLASSES, SIZE, generator=generator, dtype=torch.float64)
    noise = torch.randn(len(labels), SIZE, generator=generator, dtype=torch.float64)
    return nn.functional.normalize(middle[labels] + 1.2 * noise), labels


def by_rows(loss: Any, kind: Rows, batch: Any, indices: Any, size: int) -> Tensor:
    """Compute the loss from blocks of `size` rows."""
    codes, labels = batch
    parts = []
    for start in range(0, len(codes), size):
        rows = slice(start, start + size)
        parts.append(row_sums(loss, kind, codes[rows], labels[rows], batch, start, indices))
    total, count = (torch.stack(column).sum(0) for column in zip(*parts, strict=True))
    means = [is_mean(loss, name) for name in loss.sub_loss_names()]
    divisors = [max(1, int(n)) if mean else 1 for mean, n in zip(means, count, strict=True)]
    return (total / torch.tensor(divisors)).sum()


def compare(loss: Any, kind: Rows, indices: Any, seed: int) -> float:
    """Compare the loss by rows to the whole loss; return the largest entry of its gradients."""
    codes, labels = batch(seed)
    parameters = [codes.requires_grad_(), *loss.parameters()]
    whole = loss(codes, labels, indices) if indices is not None else loss(codes, labels)
    expected = torch.autograd.grad(whole, parameters)
    for size in (1, 3, 7, len(codes)):
        value = by_rows(loss, kind, (codes, labels), indices, size)
        torch.testing.assert_close(value, whole, rtol=1e-9, atol=1e-12)
        for actual, gradient in zip(torch.autograd.grad(value, parameters), expected, strict=True):
            torch.testing.assert_close(actual, gradient, rtol=1e-7, atol=1e-11)
    return float(max(gradient.abs().max() for gradient in expected))


@pytest.mark.parametrize("miner", MINERS, ids=lambda miner: miner[0] if miner else "all")
@pytest.mark.parametrize(("name", "options"), OPTIONS, ids=NUMBERED)
def test_sums_over_anchors_give_the_whole_loss(name, options, miner):
    loss = loss_of(name, options)
    kind = rows_of_loss(loss, miner is not None)
    if miner is not None and name == "sup_con":
        # the loss is 0 if the batch has no negative pair, which a block of rows cannot tell
        assert kind is None
        return
    assert kind == "anchors"
    slopes = []
    for seed in range(3):
        indices = None
        if miner is not None:
            indices = create("miners", f"pml.{miner[0]}", **miner[1])(*batch(seed))
        slopes.append(compare(loss, kind, indices, seed))
    assert max(slopes) > 1e-4


@pytest.mark.parametrize("name", ITEMWISE)
def test_sums_over_items_give_the_whole_loss(name):
    loss = loss_of(name)
    # A miner's weights are relative to the whole batch.
    assert rows_of_loss(loss, mined=True) is None
    kind = rows_of_loss(loss, mined=False)
    assert kind == "items" and compare(loss, kind, None, 0) > 1e-4


def test_what_cannot_be_divided_is_computed_whole():
    regularised = {"embedding_regularizer": {"name": "pml.lp"}}
    drawn = {"triplets_per_anchor": 2}
    weighted = {"reducer": {"name": "pml.class_weighted", "weights": [1.0] * CLASSES}}
    for loss in (
        loss_of("lifted_structure"),
        loss_of("proxy_anchor"),
        loss_of("contrastive", regularised),
        loss_of("multi_similarity", weighted),
        loss_of("triplet_margin", drawn),
        upstream.ContrastiveLoss(),
        nn.Linear(2, 2),
    ):
        assert rows_of_loss(loss, mined=False) is None


def test_a_wrong_attribute_rows_is_refused():
    class Odd(upstream.ContrastiveLoss):
        rows = "columns"

    with pytest.raises(PluginError, match="'columns'; it must be one of items, anchors, classes"):
        rows_of_loss(Odd(), mined=False)

    class Reduced(upstream.ContrastiveLoss):
        rows = "anchors"

        def compute_loss(self, *arguments: Any) -> Any:
            value = arguments[0].square().sum()
            whole = {"losses": value, "indices": None, "reduction_type": "already_reduced"}
            return {"pos_loss": whole, "neg_loss": self.zero_loss()}

    codes, labels = batch(0)
    loss = Reduced()
    with pytest.raises(PluginError, match=r"'pos_loss' as one number.*Remove the attribute"):
        row_sums(loss, "anchors", codes[:3], labels[:3], (codes, labels), 0, None)
    assert isinstance(loss.reducer, nn.Module) and type(loss.reducer).__name__ == "MultipleReducers"
