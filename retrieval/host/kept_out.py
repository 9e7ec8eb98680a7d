"""Modules that other libraries load and then do not use: kept out, a command that trains starts in less than half the time."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any


@contextmanager
def kept_out(module: str, **names: Callable[..., Any]) -> Iterator[None]:
    """Inside, whoever imports a module that is not loaded gets an empty one, with these names only; after, the real one.

    It holds for all threads: nothing may run inside that needs the real one.

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
