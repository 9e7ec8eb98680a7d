"""A factory that is a class: its parents' parameters, and what a loss's call takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import pytest
from retrieval.errors import PluginError
from retrieval.host.factory import Factory
from retrieval.plugin import traits
from torch import Tensor, nn


def read(make: Any) -> Factory:
    return Factory.read("losses", "acme.thing", make)


class Passes(nn.Module):
    def __init__(self, first: float, second: int = 2) -> None:
        super().__init__()
        self.numbers = first, second


class ByName(Passes):
    def __init__(self, **more: Any) -> None:
        super().__init__(**more)


class ByPosition(Passes):
    def __init__(self, **more: Any) -> None:
        Passes.__init__(self, 7.0, **more)


class Swallows(Passes):
    def __init__(self, **more: Any) -> None:
        super().__init__(1.0)


def test_kwargs_are_what_the_next_class_takes_and_was_not_given():
    assert [p.name for p in read(ByName).parameters] == ["first", "second"]
    assert [p.name for p in read(ByPosition).parameters] == ["second"]
    assert read(ByPosition).build({"second": 5}).numbers == (7.0, 5)
    assert read(Swallows).parameters == ()
    assert "nothing says what '**more' takes" in read(Swallows).hints[-1]
    # without source what has no default is taken to be given by the class
    scope: dict[str, Any] = {"Passes": Passes}
    exec("class Made(Passes):\n def __init__(self, **more): super().__init__(3.0, **more)", scope)
    assert [p.name for p in read(scope["Made"]).parameters] == ["second"]


class Plain(nn.Module):
    """A loss that needs no parameters."""

    def forward(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        return embeddings.sum()


class Undocumented(Plain):
    def __init__(self) -> None:
        super().__init__()


class Scaled(nn.Module):
    """Scales.

    Args:
        scale: how much.
    """

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()


class Child(Scaled):
    """A child has its parent's parameters, with their documentation."""


class InInit(nn.Module):
    """Documented in `__init__`."""

    def __init__(self, scale: float = 1.0) -> None:
        """Make it.

        Args:
            scale: how much.
        """
        super().__init__()


class Called(Protocol):
    def __call__(self, embeddings: Tensor) -> Tensor: ...


class FromProtocol(Called):
    """Takes nothing."""

    def __call__(self, embeddings: Tensor) -> Tensor:
        return embeddings


@dataclass
class Data:
    """A dataclass.

    Args:
        size: how large.
    """

    size: int = 3


def test_classes_of_all_sorts_are_read():
    assert read(Plain).parameters == () and read(FromProtocol).parameters == ()
    assert read(Undocumented).hints == ("it has no docstring",)  # nn.Module's own does not count
    for make in (Scaled, Child, InInit):
        (p,) = read(make).parameters
        shown = p.name, p.doc, p.default_text, p.type_text
        assert shown == ("scale", "how much.", "1.0", "number")
    assert [p.name for p in read(Data).parameters] == ["size"]


class Full(nn.Module):
    """Has the whole call."""

    def forward(
        self, embeddings: Tensor, labels: Tensor, indices_tuple: Any = None, ref_emb: Any = None
    ) -> None: ...


class Short(nn.Module):
    """Has only a part of the call."""

    def forward(self, embeddings: Tensor, labels: Tensor) -> None: ...


class Silent:
    """Is never called: `type.__call__` must not be taken for a call of its own."""


@traits(ref_emb=False)
class Stated(Full):
    """Says that it takes none."""


def gives_anything():
    """Give one."""
    return Full()


def test_what_a_loss_takes_is_read_from_its_call():
    for make, reference, miner in (
        (Full, True, True),
        (Short, False, False),
        (Stated, False, True),
        (gives_anything, True, True),
        (Silent, True, True),
    ):
        factory = read(make)
        assert (factory.supports_ref_emb, factory.supports_miner) == (reference, miner), make


def test_a_misspelt_trait_is_refused():
    with pytest.raises(PluginError, match=r"no trait 'ref_embb'.*Did you mean 'ref_emb'"):
        traits(ref_embb=False)
