"""Load plugins, reject name clashes, find factories, and build the parts that recipes name.

Plugins come from the entry-point group `retrieval` (bundled and third-party alike), and from files
or modules that a recipe or `--plugin` names. `RETRIEVAL_BLOCK=acme,other` excludes plugins.
"""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from importlib.metadata import EntryPoint, distributions
from pkgutil import resolve_name
from types import ModuleType
from typing import Any

import pluggy

from retrieval.base.runtime import PROJECT
from retrieval.errors import MissingDependency, PluginError, RecipeError, did_you_mean
from retrieval.host.factory import (
    BUILT_IN,
    GIVEN,
    KINDS,
    SHORT,
    Factory,
    Parameter,
    calling,
    new_manager,
)
from retrieval.host.importing import (
    PluginSource,
    import_extra,
    import_plugin,
    reason,
    refuse_misspelt,
    source_of,
)
from retrieval.host.python_parts import (
    OBJECT,
    is_object,
    is_part,
    missing,
    object_plugin,
    require_objects,
)

GROUP = "retrieval"
TRAINING_MODULES = ("torch", "torchvision", "pytorch_metric_learning", "sklearn")


class Plugins:
    """The loaded plugins. `load_plugins` returns one; there is no global instance."""

    def __init__(self, manager: pluggy.PluginManager, sources: list[PluginSource]) -> None:
        self.manager = manager
        self.sources = sources
        self.objects: dict[str, Any] = {}
        self._offers: dict[tuple[str, str], dict[str, Any]] = {}
        self._read: dict[tuple[str, str], Factory | PluginError] = {}

    def give(self, objects: Mapping[str, Any]) -> None:
        """Offer Python objects as parts, by recipe table: `{"loss": my_loss}`."""
        if not objects:
            return
        require_objects(objects)
        try:
            self.manager.register(object_plugin(objects), OBJECT)
        except ValueError:
            raise PluginError(f"A plugin may not be called '{OBJECT}': rename it.") from None
        self.sources.append(PluginSource(OBJECT, "objects made in Python"))
        self.objects = dict(objects)
        # The new plugin's offers are read with the others at the next look-up.
        self._offers.clear()
        self._read.clear()

    @property
    def hook(self) -> Any:
        """pluggy's hook relay, which calls a hook in all plugins."""
        return self.manager.hook

    def notify(self, hook: str, **arguments: Any) -> None:
        """Call a hook that returns nothing."""
        with calling(f"A plugin's {hook}"):
            getattr(self.hook, hook)(**arguments)

    def factories(self, kind: str) -> dict[str, Factory]:
        """Return all usable factories of a kind by full name, sorted."""
        factories = self._factories(kind).items()
        return {name: factory for name, factory in factories if isinstance(factory, Factory)}

    def disabled(self, kind: str) -> dict[str, str]:
        """Return why factories cannot be used, by full name (by plugin if its hook failed)."""
        factories = self._factories(kind).items()
        return {name: str(fault) for name, fault in factories if isinstance(fault, PluginError)}

    def _factories(self, kind: str) -> dict[str, Factory | PluginError]:
        return {name: self._factory(kind, name) for name in sorted(self._offered(kind))}

    def named(self, kind: str, name: str) -> Factory | None:
        """Return the usable factory with a full name, or None; only its plugin's hook is called."""
        plugin = name.partition(".")[0]
        if name not in self._offered(kind, plugin):
            return None
        factory = self._factory(kind, name)
        if isinstance(factory, Factory):
            return factory
        return None

    def _offered(self, kind: str, plugin: str | None = None) -> dict[str, Any]:
        """Return what all plugins (or one) offer, by full name; a failed hook's error by plugin."""
        offered: dict[str, Any] = {}
        for impl in getattr(self.hook, f"retrieval_{kind}").get_hookimpls():
            owner = impl.plugin_name
            if plugin not in (None, owner):
                continue
            if (kind, owner) not in self._offers:
                # A plugin's fault disables what it offers, and no other plugin.
                try:
                    offers = _guarded(owner, kind, impl.function)
                    if not isinstance(offers, Mapping):
                        raise PluginError(
                            f"The plugin '{owner}' returned {type(offers).__name__} from"
                            f" retrieval_{kind}; it must return {{name: factory}}."
                        )
                    named = {f"{owner}.{short}": make for short, make in offers.items()}
                    self._offers[kind, owner] = named
                except PluginError as error:
                    self._offers[kind, owner] = {owner: error}
            offered |= self._offers[kind, owner]
        return offered

    def _factory(self, kind: str, name: str) -> Factory | PluginError:
        """Return the factory with a full name, or the error that disables it; cached."""
        if (kind, name) not in self._read:
            plugin = name.partition(".")[0]
            make = self._offered(kind, plugin)[name]
            try:
                if isinstance(make, PluginError):
                    raise make
                if not name.partition(".")[2].isidentifier():
                    raise PluginError(
                        f"The plugin '{plugin}' offers '{name}' in retrieval_{kind}; a part's name"
                        " must be a Python identifier."
                    )
                if isinstance(make, str):
                    make = _guarded(plugin, kind, partial(resolve_name, make))
                self._read[kind, name] = Factory.read(kind, name, make)
            except PluginError as error:
                self._read[kind, name] = error
        return self._read[kind, name]

    def full_name(self, kind: str, name: str) -> str:
        """Return a built-in part's full name, such as `core.flat` for `flat`; others unchanged."""
        full_name = f"{BUILT_IN}.{name}"
        if kind in SHORT and self.named(kind, full_name):
            return full_name
        return name

    def find(self, kind: str, name: str) -> Factory:
        """Return a factory by its full name; for kinds in `SHORT` also by a built-in's short name.

        Raises:
            PluginError: no factory has the name, or it is disabled.
        """
        name = self.full_name(kind, name)
        if (factory := self.named(kind, name)) is not None:
            return factory
        if is_object(name):
            raise PluginError(missing(kind, name))
        known = self.factories(kind)
        disabled = self.disabled(kind)
        if fault := disabled.get(name) or disabled.get(name.partition(".")[0]):
            raise PluginError(fault)
        hint = self._hint(kind, name, known)
        hint = hint or f" 'retrieval plugins list --kind {kind}' shows all {len(known)}."
        raise PluginError(f"There is no {KINDS[kind]} '{name}'.{hint}")

    def _hint(
        self,
        kind: str,
        name: str,
        known: Mapping[str, Factory],
    ) -> str:
        """Return a suggestion, as a sentence or "", for a name that no factory has."""
        plugin, dot, _ = name.partition(".")
        loaded = sorted(source.plugin for source in self.sources)
        if dot and plugin not in loaded:
            names = f"(loaded: {', '.join(loaded)})"
            return f" No plugin '{plugin}' is loaded {names}.{did_you_mean(name, known)}"
        if dot:
            if hint := did_you_mean(name, known):
                return hint
            # The name may be right, and the recipe's table wrong.
            kinds = [KINDS[k] for k in KINDS if k != kind and self.named(k, name)]
            return f" '{name}' is a {kinds[0]}." if kinds else ""
        namesakes = sorted(full for full in known if full.endswith(f".{name}"))
        if namesakes:
            return f" Did you mean {' or '.join(map(repr, namesakes))}?"
        short = [full.removeprefix(f"{BUILT_IN}.") for full in known if kind in SHORT]
        hint = did_you_mean(name, [*short, *known])
        # Who writes name = "resnet50" means a model of a factory for many.
        with_model = [
            full
            for full, factory in known.items()
            if any(p.name == "model" and p.required for p in factory.parameters)
        ]
        if with_model:
            example = max(with_model, key=lambda full: (full.startswith(f"{BUILT_IN}."), full))
            hint += (
                f" If '{name}' is a model, name a backbone that loads it"
                f' ({", ".join(with_model)}): name = "{example}", model = "{name}".'
            )
        return hint

    def check(
        self,
        kind: str,
        values: Any,
        where: str,
        host_keys: Collection[str] = (),
    ) -> list[str]:
        """Return every problem of a table `{name = …, parameters}`, nested parts included.

        `where` names the table in messages, such as `[loss]`; `host_keys` are its further keys.
        """
        if is_part(values):
            return []
        table = _table(values)
        if table is None or not isinstance(table.get("name"), str):
            return [f'{where} must name a {KINDS[kind]}: name = "PLUGIN.NAME".']
        try:
            factory = self.find(kind, table["name"])
            parameters = {k: v for k, v in table.items() if k != "name"}
            _, problems = factory.check(parameters, where, host_keys)
        except (PluginError, MissingDependency) as error:
            return [f"{where} name: {error}"]
        for p in factory.parameters:
            if p.part and p.name in table:
                for inner_where, part in _parts(p, table[p.name], f"{where} {p.name}"):
                    problems += self.check(p.part, part, inner_where)
        return problems

    def every(
        self,
        kind: str,
        values: Any,
        test: Callable[[Factory], bool],
    ) -> bool:
        """Return whether a factory and its nested parts of that kind pass; unknown ones do."""
        table = _table(values) or {}
        factory = self.named(kind, str(table.get("name")))
        if factory is None:
            return True
        if not test(factory):
            return False
        for p in factory.parameters:
            if p.part == kind and p.name in table:
                for _, part in _parts(p, table[p.name], ""):
                    if not self.every(kind, part, test):
                        return False
        return True

    def build(
        self,
        kind: str,
        values: Any,
        known: Mapping[str, Any] | None = None,
    ) -> Any:
        """Build the part that a table `{name = …, parameters}` describes, nested parts first.

        Args:
            kind: one of `KINDS`.
            values: the recipe's table. A nested part may be a Python object (`is_part`).
            known: values that the host knows (`factory.GIVEN`). Each factory gets those that it has
                parameters for.

        Raises:
            PluginError: the name is unknown.
            RecipeError: the values do not fit, or the factory refuses them.
        """
        if is_part(values):
            return values
        known = known or {}
        table = _table(values) or {}
        factory = self.find(kind, str(table.get("name")))
        parameters = {k: v for k, v in table.items() if k != "name"}
        checked, problems = factory.check(parameters, f"[{KINDS[kind]}]")
        if problems:
            raise RecipeError(problems)
        for p in factory.parameters:
            if p.from_host and known.get(p.name) is not None:
                checked[p.name] = known[p.name]
            elif p.part and p.required and p.name not in checked:
                raise RecipeError(f"[{KINDS[kind]}] {p.name}: is required ({p.type_text}).")
            elif p.part and p.name in checked:
                # One part for each width, and one for the whole embedding.
                widths = checked.get(p.per_width, []) if p.per_width else []
                contexts = [{**known, "embedding_size": width} for width in widths]
                contexts.append(dict(known))
                parts = [
                    self.build(p.part, part, context)
                    for _, part in _parts(p, checked[p.name], p.name)
                    for context in contexts
                ]
                checked[p.name] = parts if p.many or p.per_width else parts[0]
            elif p.by_host and p.default is inspect.Parameter.empty:
                raise PluginError(
                    f"{factory.name} asks the host for '{p.name}' ({GIVEN[p.name]}), which is not"
                    " known here."
                )
        return factory.build(checked)


def _guarded(
    plugin: str,
    kind: str,
    function: Callable[[], Any],
) -> Any:
    """Call a plugin's function and return its result; any error becomes one sentence."""
    try:
        return function()
    except (PluginError, MissingDependency):
        raise
    except Exception as error:
        module = ""
        if isinstance(error, ModuleNotFoundError):
            module = error.name or ""
        # Where models are only served, training's packages need not be installed.
        if module.partition(".")[0] in TRAINING_MODULES:
            raise MissingDependency(
                f"The plugin '{plugin}' needs {module} for its {kind}. Install it: pip install"
                " 'embedding-retrieval[train]'."
            ) from error
        raise PluginError(
            f"The plugin '{plugin}' failed in retrieval_{kind}: {reason(error)}."
        ) from error


def _table(values: Any) -> dict[str, Any] | None:
    if isinstance(values, str):
        return {"name": values}
    if isinstance(values, Mapping):
        return dict(values)
    return None


def _parts(p: Parameter, value: Any, where: str) -> list[tuple[str, Any]]:
    """Return a parameter's parts, each with its place for messages."""
    if not p.many:
        return [(where, value)]
    values = value if isinstance(value, list | tuple) else [value]
    return [(f"{where}[{i}]", part) for i, part in enumerate(values)]


def load_plugins(
    extra: Iterable[str] = (),
    *,
    block: Iterable[str] | None = None,
    bundled: bool | None = None,
) -> Plugins:
    """Load all installed plugins, then the given files, folders and modules.

    Args:
        extra: paths of `.py` files or folders (`x/`), or names of modules.
        block: names of plugins to leave out. The default is the environment variable
            `RETRIEVAL_BLOCK`, a comma-separated list.
        bundled: load only the installed plugins of this distribution, or only those of others.

    Raises:
        PluginError: two distributions claim one name, a plugin cannot be imported, or it misspells
            a hook.
    """
    if block is None:
        block = [name.strip() for name in os.environ.get("RETRIEVAL_BLOCK", "").split(",")]
    blocked = {name for name in block if name}
    manager = new_manager()
    sources: list[PluginSource] = []

    def register(source: PluginSource, module: ModuleType) -> None:
        if other := manager.get_name(module):
            raise PluginError(f"{source.subject} is loaded already, as '{other}'. Leave it out.")
        refuse_misspelt(source, module)
        try:
            manager.register(module, source.plugin)
        except (ValueError, pluggy.PluginValidationError) as error:
            text = " ".join(str(error).split()).rstrip(".")
            raise PluginError(f"{source.subject} cannot be registered: {text}.") from error
        sources.append(source)

    # Sorted, because the order of distributions differs from machine to machine.
    for name, (entry, origin) in sorted(_entry_points(blocked, bundled).items()):
        source = PluginSource(name, origin)
        register(source, import_plugin(source, entry.load))
    for item in extra:
        source = source_of(item)
        if source.plugin in blocked or source in sources:
            continue
        clash = next((s for s in sources if s.plugin == source.plugin), None)
        if clash:
            raise PluginError(
                f"Two plugins are called '{source.plugin}': {clash.origin} and {source.origin}."
                " Rename the second."
            )
        register(source, import_plugin(source, partial(import_extra, item)))
    return Plugins(manager, sources)


def _entry_points(
    blocked: set[str], bundled: bool | None = None
) -> dict[str, tuple[EntryPoint, str]]:
    """Return each plugin's entry point and distribution; raise `PluginError` on duplicate names."""
    entries: dict[str, tuple[EntryPoint, str]] = {}
    seen: set[str] = set()
    for distribution in distributions():
        # Most distributions have no such entry point; reading their names too would double the
        # start-up time of `--help`.
        if f"[{GROUP}]" not in (distribution.read_text("entry_points.txt") or ""):
            continue
        # Each look-up of a distribution's name or version reads its metadata again.
        title = distribution.name or ""
        project = re.sub(r"[-_.]+", "-", title).lower()
        # An editable install may be listed twice.
        if project in seen:
            continue
        if bundled is not None and (project == PROJECT) != bundled:
            continue
        seen.add(project)
        origin = f"{title} {distribution.version}"
        for entry in distribution.entry_points:
            if entry.group != GROUP or entry.name in blocked:
                continue
            if entry.name in entries:
                raise PluginError(
                    f"Two installed packages claim the plugin name '{entry.name}':"
                    f" {entries[entry.name][1]} and {origin}. Uninstall one, or leave the name out"
                    f" with RETRIEVAL_BLOCK={entry.name}."
                )
            entries[entry.name] = (entry, origin)
    return entries


def installed_plugins() -> dict[str, str]:
    """Return the distribution of each installed plugin by name, without loading plugins."""
    return {name: origin for name, (_, origin) in _entry_points(set()).items()}


def names(kind: str) -> list[str]:
    """Return the sorted names of all parts of a kind that the installed plugins offer.

    Args:
        kind: "loss", "miner", "backbone", "dataset", "generator", "combiner", "learner", "sampler",
            "augmentation", "text encoder", "metric", "index", "store", "distance", "reducer",
            "regularizer" or "tracker", or the plural.

    Raises:
        PluginError: the kind is unknown; the message suggests the closest.
    """
    return list(load_plugins().factories(_plural(kind)))


def create(kind: str, name: str, /, **parameters: Any) -> Any:
    """Build a plugin's part, as in `create("loss", "pml.triplet_margin", margin=0.1)`.

    Parameters are checked as in a recipe; `retrieval plugins show NAME` lists them. A nested part
    is a name, a dictionary `{"name": …, parameters}` or an object. Values that training would
    provide (`features`, `embedding_size`, `classes`) are parameters too.

    Args:
        kind: the kind of part; see `names`.
        name: the part's name, `PLUGIN.NAME`.
        parameters: the part's parameters.

    Raises:
        PluginError: the kind or name is unknown; the message suggests the closest.
        RecipeError: the parameters are invalid; the message lists every problem.
    """
    plural = _plural(kind)
    plugins = load_plugins()
    factory = plugins.find(plural, name)
    # Outside training there is no host that would know these values.
    by_host = [p for p in factory.parameters if p.by_host]
    known = {p.name: parameters.pop(p.name) for p in by_host if p.name in parameters}
    table = {"name": name, **parameters}
    problems = plugins.check(plural, table, f"[{KINDS[plural]}]")
    problems += [
        f"[{KINDS[plural]}] {p.name}: is required ({GIVEN[p.name]})."
        for p in by_host
        if p.default is inspect.Parameter.empty and p.name not in known
    ]
    if problems:
        raise RecipeError(problems, f"create({kind!r}, {name!r}, …)")
    return plugins.build(plural, table, known)


def _plural(kind: str) -> str:
    """Return the plural of a kind that is named in the singular or plural."""
    plurals = {singular: plural for plural, singular in KINDS.items()}
    if kind not in KINDS and kind not in plurals:
        raise PluginError(
            f"There is no kind '{kind}' (known: {', '.join(plurals)}).{did_you_mean(kind, plurals)}"
        )
    return plurals.get(kind, kind)
