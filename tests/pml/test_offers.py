"""Factories from an upstream signature and a docstring, and labels outside the classes."""

from __future__ import annotations

from typing import Any

import pytest
import retrieval
import torch
from pydantic import PositiveInt
from pytorch_metric_learning import losses
from retrieval.errors import RecipeError
from retrieval.host.factory import Factory

from retrieval_pml.upstream_factories import MEANINGS, offer


class Example(losses.ProxyAnchorLoss):  # type: ignore[misc]
    """A loss.

    Args:
        margin: how far.
        alpha: how steep.
        reducer: something else.
    """


def test_a_factory_offers_what_the_docstring_describes():
    make = offer(Example, ref_emb=False, without=("embedding_regularizer",), alpha=PositiveInt)
    read = Factory.read("losses", "pml.x", make)
    known = {p.name: p for p in read.parameters}
    assert list(known) == [
        "classes",
        "embedding_size",
        "margin",
        "alpha",
        "distance",
        "reducer",
        "weight_regularizer",
        "weight_reg_weight",
        "weight_init_func",
        "embedding_reg_weight",
    ]
    assert (read.summary, read.supports_ref_emb, read.supports_miner) == ("A loss.", False, True)
    assert known["reducer"].doc == "something else."
    assert known["weight_init_func"].doc == MEANINGS["weight_init_func"] and not read.hints
    assert known["margin"].default == 0.1 and known["alpha"].annotation == PositiveInt
    assert known["classes"].by_host and known["reducer"].part == "reducers"


def test_arguments_reach_the_constructor_and_wrong_arguments_are_refused():
    make = offer(Example, weight_init_func=str)
    loss = make(3, 4, margin=0.5, weight_init_func="orthogonal")
    assert type(loss).__name__ == "Example" and loss.margin == 0.5 and loss.num_classes == 3
    torch.testing.assert_close(loss.proxies @ loss.proxies.T, torch.eye(3))
    for wrong in ({}, {"classes": 4, "embedding_size": 3, "margins": 1.0}):
        with pytest.raises(TypeError):
            make(**wrong)


@pytest.mark.parametrize("labels", [[0, 0, 1, 1, 2, -1], [0, 0, 1, 1, 2, 4]])
@pytest.mark.parametrize(
    "name", sorted(name for name in retrieval.names("loss") if name.startswith("pml."))
)
def test_a_label_outside_the_classes_is_refused(name, labels):
    options: dict[str, Any] = {"per_class": True} if name == "pml.margin" else {}
    try:
        loss = retrieval.create("loss", name, classes=4, embedding_size=8, **options)
    except RecipeError:  # the loss has no class weights
        return
    with pytest.raises(
        ValueError, match=r"labels go from (0 to 4|-1 to 2), but the loss has classes 0 to 3"
    ):
        loss(torch.randn(6, 8), torch.tensor(labels))
