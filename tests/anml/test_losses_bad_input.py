"""What the deep losses do with parameters, batches and labels that do not fit: a sentence, or a
stated number.
"""

from __future__ import annotations

import math
from pkgutil import resolve_name
from typing import Any

import pytest
import torch
from pytorch_metric_learning import reducers

from retrieval_anml import retrieval_losses
from retrieval_anml.similarity_losses import (
    DANMLoss,
    ImprovedLiftedLoss,
    ImprovedNPairLoss,
    ImprovedProxyNCALoss,
    LiftedLoss,
    MinedDANMLoss,
    NPairLoss,
)

LOSSES = {name: resolve_name(place) for name, place in retrieval_losses().items()}
Y = torch.tensor([0, 0, 1, 1, 2, 2])
X = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))


def build(name: str) -> Any:
    return LOSSES[name](4, 6) if name == "improved_proxy_nca" else LOSSES[name]()


@pytest.mark.parametrize("cls", [DANMLoss, MinedDANMLoss, ImprovedLiftedLoss])
class TestParameters:
    @pytest.mark.parametrize("gamma2", [0.0, -1.0, math.nan])
    def test_gamma2_must_be_above_0(self, cls, gamma2):
        with pytest.raises(ValueError, match="must be above 0: the larger it is"):
            cls(2.0, gamma2)

    def test_gamma1_is_a_number(self, cls):
        with pytest.raises(ValueError, match="gamma1 is NaN"):
            cls(math.nan, 2.0)

    def test_thresholds_in_the_wrong_order(self, cls):
        with pytest.raises(ValueError, match="write 1 − λ for a distance λ = 1 − cosine"):
            cls(positive_threshold=0.3, negative_threshold=0.7)

    @pytest.mark.parametrize("value", [math.nan, math.inf])
    def test_thresholds_are_finite(self, cls, value):
        with pytest.raises(ValueError, match='finite similarity, or "none" for no threshold'):
            cls(negative_threshold=value)


def test_a_recipe_can_leave_thresholds_out():
    with_none, with_text = DANMLoss(2, 30, None, None), DANMLoss(2, 30, "none", "none")
    assert with_none(X, Y).item() == with_text(X, Y).item() != DANMLoss(2, 30)(X, Y).item()


def test_further_parameters():
    with pytest.raises(ValueError, match='outer is "softplus" and must be'):
        DANMLoss(outer="softplus")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="gamma1 is -2 and must be above 0"):
        ImprovedLiftedLoss(-2.0)
    with pytest.raises(ValueError, match="gamma is 0 and must be"):
        ImprovedNPairLoss(0.0)
    with pytest.raises(ValueError, match="epsilon is -1"):
        MinedDANMLoss(epsilon=-1.0)


@pytest.mark.parametrize("name", LOSSES)
class TestBatches:
    def test_embeddings_of_length_0(self, name):
        x = X.clone()
        x[3] = 0
        x.requires_grad_()
        loss = build(name)(x, Y)
        loss.backward()
        assert loss.isfinite() and x.grad is not None and x.grad.isfinite().all()

    def test_no_items(self, name):
        x = torch.zeros(0, 4, requires_grad=True)
        loss = build(name)(x, torch.zeros(0, dtype=torch.long))
        loss.backward()
        assert loss.item() == 0

    @pytest.mark.parametrize("size", [1e-20, 1e15])
    def test_tiny_and_huge_embeddings(self, name, size):
        if "npair" in name and size > 1:
            size = 1e6  # inner products, which float32 holds up to 1e38, times γ
        x = (X * size).requires_grad_()
        loss = build(name)(x, Y)
        loss.backward()
        assert loss.isfinite() and x.grad is not None and x.grad.isfinite().all()


ALONE, ALIKE = torch.arange(6), torch.zeros(6, dtype=torch.long)


class TestOneSidedBatches:
    def test_a_threshold_stands_in_for_what_is_not_there(self):
        cosine = torch.nn.functional.normalize(X) @ torch.nn.functional.normalize(X).T
        exponents = torch.cat(
            [30 * cosine[~torch.eye(6, dtype=torch.bool)].view(6, 5), torch.full((6, 1), 15.0)], 1
        )
        expected = (torch.logsumexp(exponents, 1) - math.log(6)) / 30 - 0.5
        assert DANMLoss(outer="identity")(X, ALONE).item() == pytest.approx(
            expected.mean().item(), abs=1e-6
        )
        assert DANMLoss(outer="identity")(X, ALIKE).item() != 0

    @pytest.mark.parametrize("labels", [ALONE, ALIKE], ids=["no positive", "no negative"])
    @pytest.mark.parametrize(
        "loss",
        [
            DANMLoss(2, 30, None, None),
            MinedDANMLoss(),
            LiftedLoss(),
            ImprovedLiftedLoss(2, 30, None, None),
            NPairLoss(),
        ],
    )
    def test_without_one_it_costs_0(self, loss, labels):
        x = X.clone().requires_grad_()
        value = loss(x, labels)
        value.backward()
        assert value.item() == 0 and x.grad is not None and (x.grad == 0).all()

    @pytest.mark.parametrize(
        "name", ["danml", "improved_lifted", "lifted", "npair", "improved_npair"]
    )
    def test_a_miner_that_finds_nothing(self, name):
        none = torch.zeros(0, dtype=torch.long)
        x = X.clone().requires_grad_()
        for indices in ((none,) * 3, (none,) * 4):
            value = build(name)(x, Y, indices)
            value.backward()
            assert value.item() == 0

    def test_one_class_of_proxies(self):
        assert ImprovedProxyNCALoss(4, 1)(X, ALIKE).item() == 0


def test_proxies_of_labels_that_are_not_there():
    with pytest.raises(ValueError, match="labels must be from 0 to 1, not from 0 to 2"):
        ImprovedProxyNCALoss(4, 2)(X, Y)


def test_the_fused_loss_refuses_a_miner():
    with pytest.raises(ValueError, match="takes no miner's indices"):
        MinedDANMLoss()(X, Y, (Y, Y, Y))


def test_indices_of_another_batch():
    two = torch.tensor([0, 1])
    for wrong in ((two, two, two + 5), (two, two, two, two - 1), (two, two[:1], two), (two, two)):
        with pytest.raises(ValueError, match="miner"):
            DANMLoss()(X, Y, wrong)


@pytest.mark.parametrize("name", LOSSES)
def test_reducers(name):
    arguments = {"embedding_size": 4, "classes": 6} if name == "improved_proxy_nca" else {}
    weighted = reducers.ClassWeightedReducer(torch.ones(6))
    for reducer in (reducers.AvgNonZeroReducer(), reducers.ThresholdReducer(low=0.1), weighted):
        x = X.clone().requires_grad_()
        value = LOSSES[name](**arguments, reducer=reducer)(x, Y)
        value.backward()
        assert value.isfinite() and value > 0 and x.grad is not None and x.grad.abs().sum() > 0
