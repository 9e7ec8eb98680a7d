"""Factories are read by signature and docstring, check values, and build parts."""

from __future__ import annotations

import enum
import functools
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, Literal, Protocol

import pytest
import torch
from pydantic import Field
from refusals import refusal
from retrieval.errors import PluginError, RecipeError
from retrieval.host.factory import Factory
from retrieval.plugin import Part, traits
from torch import Tensor, nn


def read(make: Callable[..., Any], kind: str = "losses") -> Factory:
    return Factory.read(kind, "acme.thing", make)


def refused(make: Callable[..., Any]) -> str:
    return refusal(PluginError, read, make)


def only(make: Callable[..., Any], **values: Any) -> str:
    """Return the only problem of some values."""
    _, problems = read(make).check(values, "[loss]")
    assert len(problems) == 1, problems
    return problems[0]


class Mode(enum.Enum):
    SOFT = "soft"
    HARD = "hard"


def everything(
    count: int,
    scale: float = 1.5,
    name: str = "x",
    on: bool = True,
    kind: Literal["mean", "sum"] = "mean",
    limit: Annotated[int, Field(ge=1, le=9)] | None = None,
    sizes: list[int] | None = None,
    span: tuple[float, float] = (0.0, 1.0),
    many: tuple[int, ...] = (),
    folder: Path = Path(),
    weights: dict[str, float] | None = None,
    share: Annotated[int, Field(ge=1)] | Literal["all"] = "all",
    mode: Mode = Mode.SOFT,
    free: Any = None,
) -> Any:
    """Return all arguments."""
    return locals()


def test_values_arrive_in_the_annotated_types():
    values = {"count": 3, "scale": 2, "name": "ü", "on": False, "kind": "sum", "limit": 9}
    values |= {"sizes": [1, 2], "span": [0, 0.5], "many": [1, 2, 3], "folder": "a/b"}
    values |= {"weights": {"a": 1}, "share": 2, "mode": "hard", "free": {"a": [1, "b"]}}
    checked, problems = read(everything).check(values, "[loss]")
    assert problems == []
    typed = {"span": (0.0, 0.5), "many": (1, 2, 3), "folder": Path("a/b"), "mode": Mode.HARD}
    assert checked == {**values, **typed}
    assert type(checked["scale"]) is float and type(checked["weights"]["a"]) is float
    assert read(everything).build(checked)["folder"] == Path("a/b")


def test_only_values_that_are_set_are_passed():
    checked, problems = read(everything).check({"count": 3}, "[loss]")
    assert (checked, problems) == ({"count": 3}, [])
    built = read(everything).build(checked)
    assert built["scale"] == 1.5 and built["mode"] is Mode.SOFT


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({}, "count: is required (an integer)."),
        ({"count": "5"}, 'count: should be an integer, not "5". Write it without quotes.'),
        ({"count": True}, "count: should be an integer, not true."),
        ({"count": 5.0}, "count: should be an integer, not 5.0."),
        ({"scale": "1e-3"}, 'scale: should be a number, not "1e-3". Write it without quotes.'),
        ({"scale": float("nan")}, "scale: is nan, which is not a number."),
        ({"scale": 2**63}, "scale: has more digits than a number of 64 bits can hold."),
        ({"scale": -(2**63) - 1}, "scale: has more digits than a number of 64 bits can hold."),
        ({"name": 3}, "name: should be text, not 3."),
        ({"on": 1}, "on: should be true or false, not 1."),
        ({"kind": "man"}, 'kind: should be "mean" or "sum", not "man". Did you mean \'mean\'?'),
        ({"limit": 0}, "limit: should be an integer (≥ 1, ≤ 9), not 0."),
        ({"sizes": 3}, "sizes: should be a list of integer, not 3."),
        ({"sizes": [1, "a"]}, 'sizes.1: should be an integer, not "a".'),
        ({"span": [1.0]}, "span: should be a list [number, number], not [1.0]."),
        ({"span": [1, 2, 3]}, "span: should be a list [number, number], not [1, 2, 3]."),
        ({"many": [1, 2, 2.5]}, "many.2: should be an integer, not 2.5."),
        ({"folder": 3}, "folder: should be a path, not 3."),
        ({"weights": {"a": "b"}}, 'weights.a: should be a number, not "b".'),
        ({"weights": 3}, "weights: should be a table of number, not 3."),
        ({"share": 0}, 'share: should be an integer (≥ 1) or "all", not 0.'),
        ({"mode": "sft"}, 'mode: should be "soft" or "hard", not "sft". Did you mean \'soft\'?'),
        ({"free": object()}, "free: is of type object, which nothing here takes."),
        ({"name": "\udcff"}, "name: holds characters that are not valid Unicode."),
        ({"name": ["x" * 200]}, 'name: should be text, not ["' + "x" * 75 + "…."),
    ],
)
def test_a_wrong_value_gives_one_readable_sentence(values, sentence):
    wrong = {"count": 1, **values} if values else {}
    assert only(everything, **wrong).startswith(f"[loss] {sentence}")


def test_sentences_use_no_words_of_pydantic():
    odd: list[Any] = ["text", 0, -1, 2.5, True, [], {}, ["a"], {"a": "b"}, [[1]], [None]]
    for p in read(everything).parameters:
        for value in odd:
            _, problems = read(everything).check({"count": 1, p.name: value}, "[loss]")
            assert len(problems) <= 1, problems
            for problem in problems:
                assert problem.startswith(f"[loss] {p.name}") and problem.endswith((".", "?"))
                assert not re.search("input|valid |array|object|pydantic|literal", problem, re.I)


def test_unknown_parameters_and_those_of_the_host_are_refused():
    def loss(margin: float = 0.1, embedding_size: int = 3) -> Any:
        """A loss."""
        return margin, embedding_size

    unknown = "[loss] margn: acme.thing has no such parameter (it has: margin)."
    assert only(loss, margn=1).startswith(f"{unknown} Did you mean 'margin'?")
    message = "[loss] embedding_size: is given by the host (width of the codes); remove it."
    assert only(loss, embedding_size=1) == message
    assert read(loss).parameters[1].default_text == "given by the host"


def test_one_sentence_lists_every_fault_of_a_signature():
    def bad(a: int, b: int, /, c: Annotated[Any, Part("reducer")]) -> Any:
        pass

    sentence = refused(bad)
    assert "\n" not in sentence and "'acme.thing'" in sentence and "test_factories" in sentence
    for fault in (
        *(f"takes its parameter '{name}' by position only" for name in "ab"),
        "marks 'c' as Part('reducer'), and there is no such kind",
    ):
        assert sentence.count(fault) == 1, sentence


def test_missing_types_and_documentation_are_hints():
    def bare(b, c: int, *rest: int, **more: Any) -> Any:
        return b, c, rest, more

    factory = read(bare)
    assert [p.name for p in factory.parameters] == ["b", "c"]
    assert factory.hints == (
        "it has no docstring",
        "it does not document 'b' under 'Args:'",
        "'b' has no type, so a recipe's value is passed on unchecked",
        "it does not document 'c' under 'Args:'",
    )
    checked, problems = factory.check({"b": [1, "x", {"y": 2.5}], "c": 3}, "[loss]")
    assert (checked, problems) == ({"b": [1, "x", {"y": 2.5}], "c": 3}, [])
    assert factory.build(checked) == ([1, "x", {"y": 2.5}], 3, (), {})


def test_a_default_that_toml_cannot_express_stays():
    def loss(
        activation: Callable[[Tensor], Tensor] = torch.relu,
        start: Tensor | None = None,
        span: list = [],  # noqa: B006
    ):
        return activation, start, span

    factory = read(loss)
    assert [p.default_text for p in factory.parameters] == ["", "", "[]"]
    assert factory.check({"span": [1]}, "[loss]") == ({"span": [1]}, [])
    unwritable = "[loss] start: is of type Tensor, which a recipe cannot write; remove it."
    assert only(loss, start=3) == unwritable


def test_unreadable_factories_are_refused():
    assert "object of type partial" in refused(functools.partial(everything, 3))

    def unresolved(x: Nowhere) -> None: ...  # noqa: F821

    assert "NameError: name 'Nowhere' is not defined" in refused(unresolved)

    def module(x: nn.Module) -> None: ...

    with pytest.raises(PluginError, match="'x' of type Module, which a recipe cannot write"):
        read(module).check({}, "[loss]")


def test_parameters_may_have_names_that_pydantic_reserves(recwarn):
    def loss(copy: int, json=1, schema: int = 1, model_config: int = 1, _hidden=1, p0=1) -> Any:
        return copy, json, schema, model_config, _hidden, p0

    values = {"copy": 1, "json": 2, "schema": 3, "model_config": 4, "_hidden": 5, "p0": 6}
    checked, problems = read(loss).check(values, "[loss]")
    assert (checked, problems) == (values, [])
    assert only(loss, copy="a") == '[loss] copy: should be an integer, not "a".'
    assert not recwarn


def test_a_factory_refuses_its_values_in_one_sentence():
    def loss(near: float = 0.1, far: float = 1.0) -> None:
        if near < -1:
            raise AssertionError
        if near >= far:
            raise ValueError("near must be below far.\nIt is not.")

    text = refusal(RecipeError, read(loss).build, {"near": 2.0})
    message = "acme.thing refuses its parameters: near must be below far. It is not."
    assert text.endswith(f" 1 problem:\n  - {message}")
    with pytest.raises(RecipeError, match="refuses its parameters: AssertionError"):
        read(loss).build({"near": -2.0})


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


def test_kwargs_pass_on_the_base_class_parameters():
    assert [p.name for p in read(ByName).parameters] == ["first", "second"]
    assert [p.name for p in read(ByPosition).parameters] == ["second"]
    assert read(ByPosition).build({"second": 5}).numbers == (7.0, 5)
    assert read(Swallows).parameters == ()


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


class CallProtocol(Protocol):
    def __call__(self, embeddings: Tensor) -> Tensor: ...


class FromProtocol(CallProtocol):
    """Takes nothing."""

    def __call__(self, embeddings: Tensor) -> Tensor: ...


@dataclass
class Data:
    """A dataclass."""

    size: int = 3


def test_signatures_of_classes():
    assert read(Plain).parameters == () and read(FromProtocol).parameters == ()
    assert read(Undocumented).hints == ("it has no docstring",)  # nn.Module's own does not count
    for make in (Scaled, Child, InInit):
        (p,) = read(make).parameters
        shown = p.name, p.doc, p.default_text, p.type_text
        assert shown == ("scale", "how much.", "1.0", "number")
    assert [p.name for p in read(Data).parameters] == ["size"]


class Full(nn.Module):
    """Has the whole call."""

    def forward(self, embeddings, labels, indices_tuple=None, ref_emb=None): ...


class Short(nn.Module):
    """Has only a part of the call."""

    def forward(self, embeddings: Tensor, labels: Tensor) -> None: ...


class Silent:
    """Has no `__call__`; `type.__call__` must not count as one."""


@traits(ref_emb=False)
class Stated(Full):
    """States that it takes no reference set."""


def gives_anything():
    """Return a loss, without an annotation."""
    return Full()


def test_a_dataclass_inherits_fields_with_types_that_only_its_base_class_names():
    base = ModuleType("base_of_dataclasses")
    base.dataclass, base.Count = dataclass, Annotated[int, Field(ge=1)]
    source = "@dataclass\nclass Base:\n    count: 'Count' = 2\n"
    exec(source, vars(base))
    sys.modules["base_of_dataclasses"] = base
    try:
        derived = dataclass(type("Derived", (base.Base,), {"__module__": __name__}))
        assert only(derived, count=0) == "[loss] count: should be an integer (≥ 1), not 0."
    finally:
        del sys.modules["base_of_dataclasses"]


def test_reference_set_and_miner_are_read_from_the_call():
    for make, reference, miner in (
        (Full, True, True),
        (Short, False, False),
        (Stated, False, True),
        (gives_anything, True, True),
        (Silent, True, True),
    ):
        factory = read(make)
        assert (factory.supports_ref_emb, factory.supports_miner) == (reference, miner), make
