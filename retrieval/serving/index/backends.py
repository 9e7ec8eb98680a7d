"""What the store asks of an index back end, and which back end a name or a size means."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from retrieval.errors import PluginError, did_you_mean
from retrieval.serving.index.contract import IndexBackend

if TYPE_CHECKING:
    from retrieval.host.factory import Factory


FLAT_NUMBERS = 32_000_000
"""`auto` searches exactly up to this many numbers (250,000 × 128): a query then takes some 10 ms on one core."""
HNSW_VECTORS = 2_000_000
"""`auto` takes a graph up to this many vectors, whose links then need some 0.5 GB, and inverted lists beyond."""


def built_in() -> dict[str, Callable[..., IndexBackend]]:
    """Return the FAISS back ends by name."""
    from retrieval.serving.index.faiss_backends import Flat, Hnsw, Ivf

    return {"flat": Flat, "hnsw": Hnsw, "ivf": Ivf}


def choose(count: int, width: int) -> str:
    """Return the name of the back end that `auto` means for `count` vectors of `width` numbers."""
    if count * width <= FLAT_NUMBERS:
        return "flat"
    return "hnsw" if count <= HNSW_VECTORS else "ivf"


def find_backend(name: str, plugins: Iterable[str] = ()) -> Factory:
    """Return the factory of a back end: a built-in one by its short name, or a plugin's as `PLUGIN.name`.

    Plugins are loaded only when the name is not built in.

    Args:
        name: "flat", "hnsw", "ivf" or `PLUGIN.name`.
        plugins: files or modules to load as plugins besides the installed ones.

    Raises:
        PluginError: there is no such back end, or a plugin cannot be loaded.
    """
    from retrieval.host.factory import Factory

    known = built_in()
    if name in known:
        return Factory.read("indexes", name, known[name])
    if "." not in name:
        names = [*known, "auto"]
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
