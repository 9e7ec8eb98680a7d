"""Find the store of a folder or an address; it is built in or comes from a plugin.

This module is also the plugin that registers the built-in store.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from retrieval.base.folder_kinds import StrPath
from retrieval.errors import PluginError, RecipeError, StoreError, did_you_mean
from retrieval.host.factory import BUILT_IN, Factory, own_factories
from retrieval.host.hookspecs import Factories, hookimpl
from retrieval.store.address import LOCAL, Address, place_of
from retrieval.store.contract import StorePlace


@hookimpl
def retrieval_stores() -> Factories:
    """A folder on this machine: SQLite stores the items, and FAISS speeds up large indexes."""
    from retrieval.store.local_place import LocalPlace

    return {"local": LocalPlace}


@cache
def _built_in_stores() -> dict[str, Factory]:
    """Return the built-in stores by scheme."""
    return own_factories("stores", sys.modules[__name__])


def find_store(scheme: str, plugins: Iterable[str] = ()) -> Factory:
    """Return the factory of a store by the scheme of its addresses.

    Plugins are loaded only when the store is not built in.

    Args:
        scheme: a store's short name, or `PLUGIN.name` if two plugins share a short name.
        plugins: files or modules to load as plugins besides the installed ones.

    Raises:
        PluginError: no store has this scheme, its plugin cannot be used, or two plugins share the
            name.
    """
    short = scheme.removeprefix(f"{BUILT_IN}.")
    if short in _built_in_stores():
        return _built_in_stores()[short]
    from retrieval.host.plugins import load_plugins

    loaded = load_plugins(plugins)
    factories = loaded.factories("stores")
    if scheme in factories:
        return factories[scheme]
    matching = [factory for factory in factories.values() if factory.name.endswith(f".{scheme}")]
    if len(matching) == 1:
        return matching[0]
    if matching:
        full = " or ".join(f"{factory.name}://" for factory in matching)
        raise PluginError(f"Several plugins have a store '{scheme}'. Write {full}.")
    for name, why in loaded.disabled("stores").items():
        if scheme in (name, name.partition(".")[0], name.rpartition(".")[2]):
            raise PluginError(f"The store '{scheme}' cannot be used: {why}")
    names = sorted(
        {full_name.rpartition(".")[2] for full_name in factories} | _built_in_stores().keys()
    )
    raise PluginError(
        f"There is no store '{scheme}' (there are: {', '.join(f'{name}://' for name in names)};"
        f" a folder needs only its path).{did_you_mean(scheme, names)} Install the plugin that has"
        f" {scheme}://, or name the plugin's file with --plugin (in Python plugins=[…])."
    )


def store_place(location: StrPath | Address, plugins: Iterable[str] = ()) -> StorePlace:
    """Return the place of an index, without connecting to it.

    The methods of the place open or create the index.

    Args:
        location: a folder or an address.
        plugins: files or modules to load as plugins besides the installed ones.

    Raises:
        PluginError: the store cannot be found; see `find_store`.
        StoreError: the address is invalid, or has an option that its store does not know.
    """
    path_or_address = place_of(location)
    plugins = list(plugins)
    if isinstance(path_or_address, Path):
        address = Address(str(path_or_address), LOCAL, path=str(path_or_address))
    else:
        address = path_or_address
    factory = find_store(address.scheme, plugins)
    values, problems = factory.check(address.options, f"{address}:")
    if problems:
        raise StoreError("\n".join(problems))
    if factory.takes("plugins"):
        values = values | {"plugins": plugins}
    try:
        built = factory.build(values | {"address": address})
    except RecipeError as fault:
        raise StoreError(f"{address}: {' '.join(fault.problems)}") from None
    if not isinstance(built, StorePlace):
        raise PluginError(
            f"The factory of the store '{factory.name}' returned a {type(built).__name__}, not a"
            " retrieval.plugin.stores.StorePlace. Report this to the plugin's author."
        )
    return built
