"""The deep losses on wrong parameters (an error message) and on odd batches (a finite loss)."""

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


ABOVE_0, FINITE = "must be above 0: the larger it is", 'finite similarity, or "none" for no thresh'
ORDER = "write 1 − λ for a distance λ = 1 − cosine"
WITH_THRESHOLDS = (DANMLoss, MinedDANMLoss, ImprovedLiftedLoss)


@pytest.mark.parametrize(
    ("classes", "values", "sentence"),
    [
        (WITH_THRESHOLDS, {"gamma2": 0.0}, ABOVE_0),
        (WITH_THRESHOLDS, {"gamma2": -1.0}, ABOVE_0),
        (WITH_THRESHOLDS, {"gamma2": math.nan}, ABOVE_0),
        (WITH_THRESHOLDS, {"gamma1": math.nan}, "gamma1 is NaN"),
        (WITH_THRESHOLDS, {"positive_threshold": 0.3, "negative_threshold": 0.7}, ORDER),
        (WITH_THRESHOLDS, {"negative_threshold": math.nan}, FINITE),
        (WITH_THRESHOLDS, {"positive_threshold": math.inf}, FINITE),
        ([DANMLoss], {"outer": "softplus"}, 'outer is "softplus" and must be'),
        ([ImprovedLiftedLoss], {"gamma1": -2.0}, "gamma1 is -2 and must be above 0"),
        ([ImprovedNPairLoss], {"gamma": 0.0}, "gamma is 0 and must be"),
        ([MinedDANMLoss], {"epsilon": -1.0}, "epsilon is -1"),
    ],
)
def test_wrong_parameters_are_refused(classes, values, sentence):
    for cls in classes:
        with pytest.raises(ValueError, match=sentence):
            cls(**values)


def test_none_in_a_recipe_leaves_thresholds_out():
    with_none, with_text = DANMLoss(2, 30, None, None), DANMLoss(2, 30, "none", "none")
    assert with_none(X, Y).item() == with_text(X, Y).item() != DANMLoss(2, 30)(X, Y).item()


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
            size = 1e6  # inner products times γ, which float32 holds up to 1e38
        x = (X * size).requires_grad_()
        loss = build(name)(x, Y)
        loss.backward()
        assert loss.isfinite() and x.grad is not None and x.grad.isfinite().all()


ALONE, ALIKE = torch.arange(6), torch.zeros(6, dtype=torch.long)


class TestOneSidedBatches:
    def test_a_threshold_stands_in_for_missing_positives(self):
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
    def test_without_a_kind_of_pair_the_loss_is_0(self, loss, labels):
        x = X.clone().requires_grad_()
        value = loss(x, labels)
        value.backward()
        assert value.item() == 0 and x.grad is not None and (x.grad == 0).all()

    @pytest.mark.parametrize(
        "name", ["danml", "improved_lifted", "lifted", "npair", "improved_npair"]
    )
    def test_without_mined_pairs_the_loss_is_0(self, name):
        none = torch.zeros(0, dtype=torch.long)
        x = X.clone().requires_grad_()
        for indices in ((none,) * 3, (none,) * 4):
            value = build(name)(x, Y, indices)
            value.backward()
            assert value.item() == 0

    def test_one_class_of_proxies(self):
        assert ImprovedProxyNCALoss(4, 1)(X, ALIKE).item() == 0


def test_labels_without_a_proxy_are_refused():
    with pytest.raises(ValueError, match="labels must be from 0 to 1, not from 0 to 2"):
        ImprovedProxyNCALoss(4, 2)(X, Y)


def test_a_loss_with_a_built_in_miner_refuses_another():
    with pytest.raises(ValueError, match="takes no miner's indices"):
        MinedDANMLoss()(X, Y, (Y, Y, Y))


def test_indices_of_another_batch_are_refused():
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
