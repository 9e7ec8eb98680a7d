"""A factory made of a signature and a docstring: what reaches the constructor, and what its
documentation says.
"""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import retrieval
import torch
from retrieval.errors import RecipeError
from retrieval.host.factory import Factory
from torch import nn

from retrieval_pml.adapters import MEANINGS, forwards


def upstream(**values: Any) -> dict[str, Any]:
    return values


@forwards(upstream, size="width")
def factory(
    size: int,
    classes: int = 3,
    margin: float = 0.5,
    weight_init_func: str | None = None,
    reducer: Any = None,
) -> Any:
    """A loss.

    Args:
        size: how wide.
        margin: how far.
        reducer: something else.
    """
    if margin < 0:
        raise ValueError("margin is below 0")


def test_all_arguments_reach_the_constructor_by_name() -> None:
    defaults = {"margin": 0.5, "weight_init_func": None, "reducer": None}
    assert factory(4) == {"width": 4, "num_classes": 3, **defaults}
    assert factory(4, 7, margin=1.0) == {"width": 4, "num_classes": 7, **defaults, "margin": 1.0}
    built = factory(size=4, weight_init_func="orthogonal")["weight_init_func"]
    assert built is nn.init.orthogonal_
    torch.testing.assert_close(built(torch.empty(3, 3)).square().sum(), torch.tensor(3.0))


def test_its_checks_and_its_signature_refuse() -> None:
    with pytest.raises(ValueError, match="margin is below 0"):
        factory(4, margin=-1)
    for wrong in ({}, {"size": 4, "margins": 1.0}):
        with pytest.raises(TypeError):
            factory(**wrong)
    assert list(inspect.signature(factory).parameters) == [
        "size",
        "classes",
        "margin",
        "weight_init_func",
        "reducer",
    ]


def test_common_parameters_are_documented_once_and_its_own_lines_win() -> None:
    read = {p.name: p.doc for p in Factory.read("losses", "pml.x", factory).parameters}
    assert read["size"] == "how wide." and read["reducer"] == "something else."
    assert read["weight_init_func"] == MEANINGS["weight_init_func"]

    @forwards(upstream)
    def bare(reducer: Any = None) -> Any:
        """Another."""

    actual = Factory.read("losses", "pml.y", bare)
    assert (actual.summary, actual.description) == ("Another.", "Another.")
    assert actual.parameters[0].doc == MEANINGS["reducer"] and not actual.hints


@pytest.mark.parametrize("labels", [[0, 0, 1, 1, 2, -1], [0, 0, 1, 1, 2, 4]])
@pytest.mark.parametrize(
    "name", sorted(name for name in retrieval.names("loss") if name.startswith("pml."))
)
def test_a_label_of_no_class_is_refused(name: str, labels: list[int]) -> None:
    try:
        loss = retrieval.create("loss", name, classes=4, embedding_size=8)
    except RecipeError:  # of pairs: it has no weights of classes
        return
    with pytest.raises(
        ValueError, match=r"labels go from (0 to 4|-1 to 2), and there are 4 classes, from 0"
    ):
        loss(torch.randn(6, 8), torch.tensor(labels))


@pytest.mark.parametrize("labels", [[0, 0, 1, 1, 2, -1], [0, 0, 1, 1, 2, 4]])
def test_a_margin_of_each_class_knows_the_classes(labels: list[int]) -> None:
    loss = retrieval.create("loss", "pml.margin", per_class=True, classes=4)
    with pytest.raises(ValueError, match="there are 4 classes, from 0"):
        loss(torch.randn(6, 8), torch.tensor(labels))
