"""What the package itself offers through the hooks, found without loading any plugin."""

from __future__ import annotations

from types import ModuleType

import pluggy

from retrieval.host import hookspecs
from retrieval.host.factory import Factory

BUILT_IN = "core"
"""The plugin that passes on what the package itself offers."""
SHORT = ("augmentations", "indexes", "metrics", "stores")
"""The kinds whose parts in that plugin need no more than their short names: `flat` is `core.flat`.
"""


def new_manager() -> pluggy.PluginManager:
    """Return a plugin manager that knows every hook and no plugin."""
    manager = pluggy.PluginManager("retrieval")
    manager.add_hookspecs(hookspecs)
    return manager


def own_factories(kind: str, module: ModuleType) -> dict[str, Factory]:
    """Return what a module of the package itself offers through its hook, by short name.

    Args:
        kind: one of `SHORT`.
        module: it carries the hook.
    """
    manager = new_manager()
    manager.register(module, BUILT_IN)
    return {
        short: Factory.read(kind, f"{BUILT_IN}.{short}", make)
        for offered in getattr(manager.hook, f"retrieval_{kind}")()
        for short, make in offered.items()
    }
