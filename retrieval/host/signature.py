"""What a factory takes: its own signature, what its `**kwargs` passes on to its base classes, and
what its docstrings say.

Nothing is called. Which arguments a class gives its base itself, and whether it passes `**kwargs`
on at all, is read in the source of its `__init__`.
"""

from __future__ import annotations

import ast
import inspect
import itertools
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, get_type_hints

_MODULES_THAT_TAKE_NOTHING = ("torch.nn.modules.module", "typing")
"""Whose `__init__` is inherited by classes that have none of their own."""


@dataclass
class Reading:
    """A factory's parameters.

    Attributes:
        parameters: by name, in order: the factory's own, then those that its `**kwargs` passes on.
        hints: their types, as far as they have any.
        homes: the functions that spell them out, the factory's own first.
        loose: the name of a `**kwargs` that no base class spells out, or None.
    """

    parameters: dict[str, inspect.Parameter] = field(default_factory=dict)
    hints: dict[str, Any] = field(default_factory=dict)
    homes: list[Callable[..., Any]] = field(default_factory=list)
    loose: str | None = None


def read_signature(make: Callable[..., Any]) -> Reading:
    """Return what a class or function takes.

    Raises:
        Exception: whatever resolving a type raises, for that runs the plugin's own text.
    """
    reading = Reading()
    for function, signature, given in _chain(make):
        hints = get_type_hints(function, include_extras=True)
        reading.homes.append(function)
        reading.loose = None
        for p in signature.parameters.values():
            if p.kind is p.VAR_KEYWORD:
                reading.loose = p.name
            elif (
                p.kind is not p.VAR_POSITIONAL
                and p.name not in given
                and p.name not in reading.parameters
            ):
                reading.parameters[p.name] = p
                if p.name in hints:
                    reading.hints[p.name] = hints[p.name]
    return reading


def documentation(
    make: Callable[..., Any], homes: list[Callable[..., Any]]
) -> tuple[str, str, dict[str, str]]:
    """Return summary, whole description, and each parameter's meaning.

    A class's parameters may be documented in its docstring, in its `__init__`'s, or in those of the
    classes that it has its `__init__` or some of its parameters from.

    Args:
        make: the class or function.
        homes: the functions that spell its parameters out.
    """
    import docstring_parser

    own = docstring_parser.parse(inspect.cleandoc(make.__doc__ or ""))
    texts = [own]
    if inspect.isclass(make):
        sources = [
            each for c in make.__mro__ for each in (vars(c).get("__init__"), c) if _spells(c, homes)
        ]
        texts += [
            docstring_parser.parse(inspect.cleandoc(x.__doc__ or ""))
            for x in (make.__init__, *sources)
        ]
    docs: dict[str, str] = {}
    for text in texts:
        for p in text.params:
            if p.description:
                docs.setdefault(p.arg_name.lstrip("*"), " ".join(p.description.split()))
    description = "\n".join(line for line in (own.short_description, own.long_description) if line)
    if own.blank_after_short_description:
        description = description.replace("\n", "\n\n", 1)
    return " ".join(description.partition("\n\n")[0].split()), description, docs


def _spells(owner: type, homes: list[Callable[..., Any]]) -> bool:
    return "__init__" in vars(owner) and vars(owner)["__init__"] in homes


def _chain(
    make: Callable[..., Any],
) -> Iterator[tuple[Callable[..., Any], inspect.Signature, set[str]]]:
    """Yield each function whose parameters reach the factory, its signature without `self`, and
    what is given already.
    """
    if not inspect.isclass(make):
        yield make, inspect.signature(make), set()
        return
    home = getattr(make.__init__, "__module__", "")
    if home in _MODULES_THAT_TAKE_NOTHING and "__new__" not in vars(make):
        # a class without an __init__ of its own takes nothing, whatever these say
        yield make.__init__, inspect.Signature(), set()
        return
    yield make.__init__, inspect.signature(make), set()
    inits = [
        (c, vars(c)["__init__"])
        for c in make.__mro__
        if inspect.isfunction(vars(c).get("__init__"))
    ]
    given: set[str] = set()
    for (_, function), (base, inherited) in itertools.pairwise(inits):
        if not _takes_more(function) or base.__module__ in _MODULES_THAT_TAKE_NOTHING:
            return
        signature = inspect.signature(inherited)
        names = list(signature.parameters)[1:]
        passed = _passed_on(function)
        if passed is None:
            # without source: what has no default there is given here, or the class could not be
            # made without a recipe's help
            given |= {
                n for n in names if signature.parameters[n].default is inspect.Parameter.empty
            }
        else:
            keywords, positional, whole = passed
            if not whole:
                return
            given |= keywords | set(names[:positional])
        yield (
            inherited,
            signature.replace(parameters=list(signature.parameters.values())[1:]),
            set(given),
        )


def _takes_more(function: Callable[..., Any]) -> bool:
    return any(p.kind is p.VAR_KEYWORD for p in inspect.signature(function).parameters.values())


def _passed_on(function: Callable[..., Any]) -> tuple[set[str], int, bool] | None:
    """Return what an `__init__` gives the next one: keywords, number of positional ones, whether
    `**kwargs` too.

    None where its source cannot be had.
    """
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError):
        return None
    keywords: set[str] = set()
    positional, whole = 0, False
    for call in ast.walk(tree):
        if not (
            isinstance(call, ast.Call)
            and isinstance(call.func, ast.Attribute)
            and call.func.attr == "__init__"
        ):
            continue
        arguments = [each for each in call.args if not isinstance(each, ast.Starred)]
        if not isinstance(
            call.func.value, ast.Call
        ):  # Base.__init__(self, …) instead of super().__init__(…)
            arguments = arguments[1:]
        keywords |= {each.arg for each in call.keywords if each.arg}
        positional = max(positional, len(arguments))
        whole |= any(each.arg is None for each in call.keywords)
    return keywords, positional, whole
