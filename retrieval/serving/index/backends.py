"""Which back end a name or a size means. This module is also the package's own plugin of back ends, found without loading any other."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

from retrieval.errors import PluginError, did_you_mean
from retrieval.host.built_in import BUILT_IN, own_factories
from retrieval.host.factory import Factory
from retrieval.host.hookspecs import Factories, hookimpl

if TYPE_CHECKING:
    from retrieval.serving.index.contract import IndexBackend

FLAT_NUMBERS = 32_000_000
"""`auto` searches exactly up to this many numbers (250,000 × 128): a query then takes some 10 ms on one core."""
HNSW_VECTORS = 2_000_000
"""`auto` takes a graph up to this many vectors, whose links then need some 0.5 GB, and inverted lists beyond."""


@hookimpl
def retrieval_indexes() -> Factories:
    """FAISS: exact, graphs (of a CPU and of a GPU), inverted lists, and lists or tables of vectors in fewer bytes."""
    from retrieval.serving.index.faiss_backends import Cagra, Flat, Hnsw, Ivf, IvfPq, Rabitq, Sq8

    return {
        "flat": Flat,
        "hnsw": Hnsw,
        "ivf": Ivf,
        "ivfpq": IvfPq,
        "rabitq": Rabitq,
        "sq8": Sq8,
        "cagra": Cagra,
    }


@cache
def _own() -> dict[str, Factory]:
    """Return the built-in back ends by short name."""
    return own_factories("indexes", sys.modules[__name__])


def short_name(name: str) -> str:
    """Return the name that an index records: a built-in back end's without its plugin, any other as it is."""
    short = name.removeprefix(f"{BUILT_IN}.")
    return short if short in _own() else name


def is_built_in(name: str) -> bool:
    """Return whether a name is a built-in back end's, short or in full."""
    return short_name(name) in _own()


def choose(count: int, width: int) -> str:
    """Return the name of the back end that `auto` means for `count` vectors of `width` numbers."""
    if count * width <= FLAT_NUMBERS:
        return "flat"
    return "hnsw" if count <= HNSW_VECTORS else "ivf"


def find_backend(name: str, plugins: Iterable[str] = ()) -> Factory:
    """Return the factory of a back end: a built-in one, or a plugin's as `PLUGIN.name`.

    Plugins are loaded only when the name is not built in.

    Args:
        name: "flat", "hnsw", "ivf" (in full "core.flat" and so on) or `PLUGIN.name`.
        plugins: files or modules to load as plugins besides the installed ones.

    Raises:
        PluginError: there is no such back end, or a plugin cannot be loaded.
    """
    if is_built_in(name):
        return _own()[short_name(name)]
    if "." not in name:
        names = [*_own(), "auto"]
        raise PluginError(
            f"There is no index back end '{name}' (built in: {', '.join(names)}; a plugin's is called PLUGIN.name)."
            + did_you_mean(name, names)
        )
    from retrieval.host.plugins import load_plugins

    return load_plugins(plugins).find("indexes", name)


def make_backend(name: str, options: Mapping[str, Any], plugins: Iterable[str] = ()) -> IndexBackend:
    """Build a back end with parameters.

    Raises:
        PluginError: no such back end, a parameter that it does not have or refuses, or no `IndexBackend`.
    """
    from retrieval.serving.index.contract import IndexBackend

    factory = find_backend(name, plugins)
    values, problems = factory.check(options, f"index back end '{name}'")
    if problems:
        raise PluginError("\n".join(problems))
    backend = factory.build(values)
    if not isinstance(backend, IndexBackend):
        raise PluginError(
            f"The index back end '{name}' made a {type(backend).__name__}, not a retrieval.IndexBackend."
        )
    return backend
