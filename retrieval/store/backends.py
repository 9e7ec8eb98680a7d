"""Choose and build a back end by name or by size.

This module is also the plugin that offers the built-in back ends.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

from retrieval.errors import PluginError, did_you_mean
from retrieval.host.factory import BUILT_IN, Factory, own_factories
from retrieval.host.hookspecs import Factories, hookimpl

if TYPE_CHECKING:
    from retrieval.store.index_backend import IndexBackend

FLAT_NUMBERS = 32_000_000
"""`auto` searches exactly up to this many numbers, such as 250,000 vectors of 128 numbers.

One core then needs about 10 ms per query.
"""
HNSW_VECTORS = 2_000_000
"""`auto` uses a graph up to this many vectors (about 0.5 GB of links), then inverted lists."""


@hookimpl
def retrieval_indexes() -> Factories:
    """Back ends of FAISS: exact search, graphs, inverted lists and compressed vectors."""
    from retrieval.store.faiss_backends import Cagra, Flat, Hnsw, Ivf, IvfPq

    return {"flat": Flat, "hnsw": Hnsw, "ivf": Ivf, "ivfpq": IvfPq, "cagra": Cagra}


@cache
def _built_in() -> dict[str, Factory]:
    """Return the built-in back ends by short name, without loading any plugin."""
    return own_factories("indexes", sys.modules[__name__])


def short_name(name: str) -> str:
    """Return the name that an index stores: `core.flat` becomes `flat`, `PLUGIN.name` stays."""
    short = name.removeprefix(f"{BUILT_IN}.")
    if short in _built_in():
        return short
    return name


def choose(count: int, width: int) -> str:
    """Return the back end that `auto` chooses for `count` vectors of `width` numbers."""
    if count * width <= FLAT_NUMBERS:
        return "flat"
    if count <= HNSW_VECTORS:
        return "hnsw"
    return "ivf"


def make_backend(
    name: str, options: Mapping[str, Any], plugins: Iterable[str] = ()
) -> IndexBackend:
    """Build a back end; plugins are loaded only if its name is not built in.

    Args:
        name: a built-in back end, such as "flat" or in full "core.flat", or `PLUGIN.name`.
        options: parameters of the back end.
        plugins: files or modules to load as plugins besides the installed ones.

    Raises:
        PluginError: the back end is unknown, rejects a parameter or is not an `IndexBackend`, or a
            plugin cannot be loaded.
    """
    from retrieval.store.index_backend import IndexBackend

    factory = _built_in().get(short_name(name))
    if factory is None and "." not in name:
        names = [*_built_in(), "auto"]
        raise PluginError(
            f"There is no index back end '{name}' (built in: {', '.join(names)}; name a plugin's"
            " back end PLUGIN.name)." + did_you_mean(name, names)
        )
    if factory is None:
        from retrieval.host.plugins import load_plugins

        factory = load_plugins(plugins).find("indexes", name)
    values, problems = factory.check(options, f"index back end '{name}'")
    if problems:
        raise PluginError("\n".join(problems))
    backend = factory.build(values)
    if not isinstance(backend, IndexBackend):
        raise PluginError(
            f"The factory of the index back end '{name}' returned a {type(backend).__name__}, not a"
            " retrieval.plugin.IndexBackend."
        )
    return backend
