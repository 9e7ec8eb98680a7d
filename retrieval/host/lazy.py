"""Modules that are loaded late or not at all: names of a package, and what other libraries import
and then do not use.
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
    """Return a package's `__getattr__` and `__dir__`.

    Args:
        package: its name: `__name__`.
        homes: by module, the names that it defines.
    """
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
    """Inside, whoever imports a module that is not loaded gets an empty one, with these names only;
    after, the real one.

    A command that trains starts in less than half the time. It holds for all threads: nothing may
    run inside that needs the real one.

    Args:
        module: its full name.
        names: what it has.
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
