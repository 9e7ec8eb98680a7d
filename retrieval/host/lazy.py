"""Names of a package that load their modules on first use."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterable, Mapping
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
