"""Modules that are loaded late or not at all: names of a package, and what other libraries import
and then do not use, such as torch's compiler.

torch's optimisers load the compiler only to say that they are not compiled, which takes as long as
torch itself.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any


def lazy(
    package: str, homes: Mapping[str, Iterable[str]]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return a package's `__getattr__` and `__dir__`."""
    home = {name: module for module, names in homes.items() for name in names}

    def getter(name: str) -> Any:
        if name not in home:
            raise AttributeError(
                f"module '{package}' has no attribute '{name}'", name=name, obj=sys.modules[package]
            )
        value = getattr(importlib.import_module(home[name]), name)
        setattr(sys.modules[package], name, value)  # the next time it is found at once
        return value

    return getter, lambda: sorted({*home, *vars(sys.modules[package])})


@contextmanager
def kept_out(module: str, **names: Callable[..., Any]) -> Iterator[None]:
    """Give importers of a module an empty one with these names, for as long as it lasts.

    A command that trains starts in less than half the time. It holds for all threads: nothing may
    run inside that needs the real one.
    """
    if module in sys.modules:
        yield
        return
    empty = ModuleType(module)
    vars(empty).update(names)
    sys.modules[module] = empty
    try:
        yield
    finally:
        if sys.modules.get(module) is empty:
            del sys.modules[module]


_kept_out = False


def keep_compiler_out() -> None:
    """From now on keep it out wherever `optimizing`, until somebody loads it.

    For a process of our own: a user's may compile in another thread.
    """
    global _kept_out
    _kept_out = True


def load_compiler() -> None:
    """Load torch's compiler before the first optimiser: a loaded module is not kept out."""
    import torch._dynamo  # noqa: F401


@contextmanager
def optimizing() -> Iterator[None]:
    """Make optimisers and have them step inside, and nothing else.

    Where nothing is compiled there is no graph to break, and a function that is not to be compiled
    is that function.
    """
    if not _kept_out:
        yield
        return
    with kept_out("torch._dynamo", graph_break=lambda *_, **__: None, disable=_as_is):
        yield


def _as_is(function: Any, *_: object, **__: object) -> Any:
    return function
