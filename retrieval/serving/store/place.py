"""The place of an index: what an address names, and which store (built in or a plugin's) it means."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, metadata
from pathlib import Path

from retrieval.errors import PluginError, RecipeError, StoreError, did_you_mean
from retrieval.host.built_in import BUILT_IN, own_factories
from retrieval.host.factory import Factory
from retrieval.serving.bundle import Bundle
from retrieval.serving.files.places import StrPath
from retrieval.serving.store import built_in
from retrieval.serving.store.address import LOCAL, Address, place_of
from retrieval.serving.store.contract import Store


class StorePlace(ABC):
    """Where one index is, or may be: what an address names. A plugin offers a class as a scheme.

    Its parameters, but `address` and `plugins`, are what an address may say behind `?`; each has a
    type, a default and a line under `Args:`. Making one connects to nothing and writes nothing.
    Tokens come from the environment: an address holds none.

    All that an index needs is where its address says, its bundles too (`Store.bundle`): any number
    of processes on any number of machines search one index and know nothing but the address.

    Args:
        address: what the user named.

    Attributes:
        address: see above. Sentences and logs call the index so.
    """

    def __init__(self, address: Address) -> None:
        self.address = address

    @abstractmethod
    def exists(self) -> bool:
        """Return whether there is an index.

        Raises:
            StoreUnavailable: nobody answers there.
        """

    @abstractmethod
    def create(self, bundle: Bundle, widths: Mapping[str, int], *, identity: str | None = None) -> Store:
        """Make an empty index whose served generation has this bundle, and open it.

        It is there as a whole, and survives a power cut, when this returns; a call that fails
        leaves nothing.

        Args:
            bundle: opened, with the variant that embeds; the index takes a copy.
            widths: width of each array that is kept of an item, by name; see `widths_of`.
            identity: what tells the index from every other; a new one by default.

        Raises:
            StoreUnavailable: nobody answers there.
            StoreError: there is one already, or it cannot be written.
        """

    @abstractmethod
    def open(self) -> Store:
        """Open the index.

        Raises:
            StoreUnavailable: nobody answers there.
            StoreError: there is none, or it is damaged or of another format.
        """

    @abstractmethod
    def drop(self) -> None:
        """Delete the index with all that is in it; nothing where there is none.

        Raises:
            StoreUnavailable: nobody answers there.
            StoreError: it cannot be deleted.
        """


@cache
def _own() -> dict[str, Factory]:
    """Return the built-in stores by scheme."""
    return own_factories("stores", built_in)


def find_store(scheme: str, plugins: Iterable[str] = ()) -> Factory:
    """Return the factory of a store by the scheme of its addresses.

    Plugins are loaded only when the store is not built in.

    Args:
        scheme: a store's short name, or `PLUGIN.name`, where two plugins use one.
        plugins: files or modules to load as plugins besides the installed ones.

    Raises:
        PluginError: there is no such store (the sentence says which there are, and what to install), its plugin cannot be used, or two
            plugins have one of that name.
    """
    short = scheme.removeprefix(f"{BUILT_IN}.")
    if short in _own():
        return _own()[short]
    from retrieval.host.plugins import load_plugins

    loaded = load_plugins(plugins)
    known = loaded.factories("stores")
    found = [known[scheme]] if scheme in known else [one for one in known.values() if one.name.endswith(f".{scheme}")]  # fmt: skip
    if len(found) == 1:
        return found[0]
    if found:
        full = " or ".join(f"{one.name}://" for one in found)
        raise PluginError(f"Several plugins have a store '{scheme}': write {full}.")
    for name, why in loaded.disabled("stores").items():
        if scheme in (name, name.partition(".")[0], name.rpartition(".")[2]):
            raise PluginError(f"The store '{scheme}' cannot be used: {why}")
    names = sorted({one.rpartition(".")[2] for one in known} | _own().keys())
    raise PluginError(
        f"There is no store '{scheme}' (there are: {', '.join(f'{name}://' for name in names)}, and folders by their path)."
        f"{did_you_mean(scheme, names)} Stores come with plugins: {_advice(scheme)}, or name a plugin's file with --plugin "
        "(in Python plugins=[…])."
    )


def store_place(place: StrPath | Address, plugins: Iterable[str] = ()) -> StorePlace:
    """Return where an index is, or may be, ready to be opened or created; connects to nothing.

    Args:
        place: a folder, or an address.
        plugins: files or modules to load as plugins besides the installed ones.

    Raises:
        PluginError: there is no such store; see `find_store`.
        StoreError: the address is none, or says what its store does not know.
    """
    named = place_of(place)
    plugins = list(plugins)
    address = Address(str(named), LOCAL, path=str(named)) if isinstance(named, Path) else named
    factory = find_store(address.scheme, plugins)
    if not factory.takes("address"):
        raise PluginError(f"The store '{factory.name}' takes no 'address': its plugin's author must mend it.")
    values, problems = factory.check(address.options, f"{address}:")
    if problems:
        raise StoreError("\n".join(problems))
    given = {"address": address, "plugins": plugins}
    try:
        made = factory.build(values | {name: value for name, value in given.items() if factory.takes(name)})
    except RecipeError as fault:
        raise StoreError(f"{address}: {' '.join(fault.problems)}") from None
    if not isinstance(made, StorePlace):
        raise PluginError(
            f"The store '{factory.name}' made a {type(made).__name__}, not a retrieval.stores.StorePlace."
        )
    return made


def _advice(scheme: str) -> str:
    """Return what to install."""
    try:
        extras = metadata("embedding-retrieval").get_all("Provides-Extra") or []
    except PackageNotFoundError:
        extras = []
    return (
        f"pip install 'embedding-retrieval[{scheme}]'"
        if scheme in extras
        else f"install the one that brings {scheme}://"
    )
