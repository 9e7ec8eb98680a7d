"""Load plugins, refuse clashes, find factories and build what a recipe names.

Plugins come from the entry-point group `retrieval` (bundled and third-party alike), and from files
or modules that a recipe or `--plugin` names. `RETRIEVAL_BLOCK=acme,other` leaves plugins out.
"""

from __future__ import annotations

import importlib
import inspect
import os
import re
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import date, time
from functools import partial
from importlib.metadata import EntryPoint, distributions
from types import ModuleType
from typing import Any

import pluggy

from retrieval.errors import (
    MissingDependency,
    PluginError,
    RecipeError,
    RetrievalError,
    did_you_mean,
)
from retrieval.host.factory import BUILT_IN, GIVEN, KINDS, SHORT, Factory, Parameter, new_manager
from retrieval.host.importing import (
    PluginSource,
    import_extra,
    import_plugin,
    misfit,
    name_of,
    reason,
    refuse_misspelt,
)
from retrieval.host.python_parts import OBJECT, is_object, missing, object_plugin, refuse_no_objects

GROUP = "retrieval"


class Plugins:
    """The loaded plugins. Make one with `load_plugins`; there is no global one."""

    def __init__(self, manager: pluggy.PluginManager, sources: list[PluginSource]) -> None:
        self.manager = manager
        self.sources = sources
        self.objects: dict[str, Any] = {}
        self._offers: dict[tuple[str, str], dict[str, Any]] = {}
        self._read: dict[tuple[str, str], Factory | PluginError] = {}

    def give(self, objects: Mapping[str, Any]) -> None:
        """Offer objects as parts, by the recipe's table: `{"loss": my_loss}`.

        Their names are `object_name`'s.
        """
        if not objects:
            return
        refuse_no_objects(objects)
        try:
            self.manager.register(object_plugin(objects), OBJECT)
        except ValueError:
            raise PluginError(f"A plugin may not be called '{OBJECT}': rename it.") from None
        self.sources.append(PluginSource(OBJECT, "objects made in Python"))
        self.objects = dict(objects)
        self._offers.clear()
        self._read.clear()

    @property
    def hook(self) -> Any:
        """The hooks to call, as pluggy gives them."""
        return self.manager.hook

    def notify(self, hook: str, **arguments: Any) -> None:
        """Call a hook that gives nothing."""
        try:
            getattr(self.hook, hook)(**arguments)
        except (RetrievalError, OSError, ImportError):
            raise  # sentences already, and what the command line has a sentence for
        except Exception as error:
            files = {
                getattr(m, "__file__", None): name for name, m in self.manager.list_name_plugin()
            }
            frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename in files]
            who = f"The plugin '{files[frames[-1].filename]}'" if frames else "A plugin"
            where = f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
            raise PluginError(f"{who} failed in {hook}: {reason(error)}{where}.") from error

    def factories(self, kind: str) -> dict[str, Factory]:
        """Return every factory of a kind by its full name, sorted.

        One with a fault is not among them: see `disabled`.
        """
        every = [self._factory(kind, name) for name in self._offered(kind)]
        sound = {factory.name: factory for factory in every if isinstance(factory, Factory)}
        return dict(sorted(sound.items()))

    def disabled(self, kind: str) -> dict[str, str]:
        """Return the factories (or plugins whose hook failed) that cannot be used, and why."""
        read = {name: self._factory(kind, name) for name in self._offered(kind)}
        return {
            name: str(fault)
            for name, fault in sorted(read.items())
            if isinstance(fault, PluginError)
        }

    def named(self, kind: str, name: str) -> Factory | None:
        """Return a sound factory by its full name; None if there is none.

        Only its own plugin is asked, and only this factory is loaded: the others may take long.
        """
        plugin = name.partition(".")[0]
        factory = self._factory(kind, name) if name in self._offered(kind, plugin) else None
        return factory if isinstance(factory, Factory) else None

    def _offered(self, kind: str, plugin: str | None = None) -> dict[str, Any]:
        """Return what plugins (or one of them) offer of a kind by full name, unread.

        Each is asked once. A hook that failed is its plugin's name with the error.
        """
        offered: dict[str, Any] = {}
        for impl in getattr(self.hook, f"retrieval_{kind}").get_hookimpls():
            key = kind, impl.plugin_name
            if plugin not in (None, impl.plugin_name):
                continue
            if key not in self._offers:
                try:
                    offers = self._call(impl.plugin_name, kind, impl.function)
                    self._offers[key] = {
                        f"{key[1]}.{short}": (short, make) for short, make in offers.items()
                    }
                except PluginError as error:
                    self._offers[key] = {impl.plugin_name: error}
            offered |= self._offers[key]
        return offered

    def _factory(self, kind: str, name: str) -> Factory | PluginError:
        """Return a factory that is offered under a name, read once; or what is wrong with it."""
        if (kind, name) not in self._read:
            plugin = name.partition(".")[0]
            offer = self._offered(kind, plugin)[name]
            try:
                if isinstance(offer, PluginError):
                    raise offer
                short, make = offer
                if isinstance(make, str):
                    make = self._load(plugin, kind, make)
                _refuse_offer(plugin, kind, short, make)
                self._read[kind, name] = Factory.read(kind, name, make)
            except PluginError as error:
                self._read[kind, name] = error
        return self._read[kind, name]

    def _load(self, plugin: str, kind: str, place: str) -> Any:
        """Return the class or function that a text `MODULE:NAME` of a hook names."""
        module, _, attribute = place.partition(":")
        if not (module and attribute):
            raise PluginError(
                f"The plugin '{plugin}' offers the text '{place}' in retrieval_{kind}; write it as"
                " MODULE:NAME, such as acme.losses:Margin."
            )

        def imported() -> Any:
            return getattr(importlib.import_module(module), attribute)

        return self._guarded(plugin, kind, imported)

    def _call(self, plugin: str, kind: str, function: Any) -> Mapping[Any, Any]:
        offers = self._guarded(plugin, kind, function)
        if not isinstance(offers, Mapping):
            raise PluginError(
                f"The plugin '{plugin}' returned {type(offers).__name__} from retrieval_{kind}; it"
                " must return {name: factory}."
            )
        return offers

    def _guarded(self, plugin: str, kind: str, function: Callable[[], Any]) -> Any:
        """Return what a plugin's function gives; its errors become one sentence."""
        try:
            return function()
        except (PluginError, MissingDependency):
            raise
        except Exception as error:
            missing = (
                (getattr(error, "name", None) or "")
                if isinstance(error, ModuleNotFoundError)
                else ""
            )
            if missing.partition(".")[0] in (
                "torch",
                "torchvision",
                "pytorch_metric_learning",
                "sklearn",
            ):
                raise MissingDependency(
                    f"The plugin '{plugin}' needs {missing} for its {kind}. Install it: pip install"
                    " 'embedding-retrieval[train]'."
                ) from error
            raise PluginError(
                f"The plugin '{plugin}' failed in retrieval_{kind}: {reason(error)}."
            ) from error

    def full_name(self, kind: str, name: str) -> str:
        """Return the full name of a built-in part, as `core.flat` for `flat`; others unchanged."""
        whole = f"{BUILT_IN}.{name}"
        return whole if kind in SHORT and whole in self.factories(kind) else name

    def find(self, kind: str, name: str) -> Factory:
        """Return a factory by its full name, or a built-in index or metric by its short one."""
        if (factory := self.named(kind, name)) is not None:
            return factory
        known, wrong = self.factories(kind), self.disabled(kind)
        name = self.full_name(kind, name)
        if name in known:
            return known[name]
        plugin = name.partition(".")[0]
        if is_object(name):
            raise PluginError(missing(kind, name))
        if name in wrong or plugin in wrong:
            raise PluginError(wrong.get(name) or wrong[plugin])
        if "." in name and plugin not in {s.plugin for s in self.sources}:
            loaded = ", ".join(sorted(s.plugin for s in self.sources))
            hint = f" No plugin '{plugin}' is loaded (loaded: {loaded}).{did_you_mean(name, known)}"
        elif namesakes := sorted(full for full in known if full.endswith(f".{name}")):
            hint = f" Did you mean {' or '.join(repr(full) for full in namesakes)}?"
        else:
            short = [full.removeprefix(f"{BUILT_IN}.") for full in known if kind in SHORT]
            hint = did_you_mean(name, known if "." in name else dict.fromkeys([*short, *known]))
            for kind_of in KINDS if not hint else ():
                if kind_of != kind and name in self.factories(kind_of):
                    hint = f" '{name}' is a {KINDS[kind_of]}."
            by_name = [
                full
                for full, factory in known.items()
                if any(p.name == "model" and p.required for p in factory.parameters)
            ]
            if by_name and "." not in name:
                hint += (
                    f' {" and ".join(by_name)} take a model by its name: name = "{by_name[-1]}",'
                    f' model = "{name}".'
                )
            hint = hint or f" 'retrieval plugins list --kind {kind}' shows all {len(known)}."
        raise PluginError(f"There is no {KINDS[kind]} '{name}'.{hint}")

    def check(self, kind: str, values: Mapping[str, Any] | str, where: str) -> list[str]:
        """Return every problem of a table `{name = …, parameters}`, nested parts included."""
        return list(self._check(kind, values, where))

    def every(self, kind: str, values: Any, test: Callable[[Factory], bool]) -> bool:
        """Return whether a factory passes a test and all those of its kind nested in it do too.

        What is unknown or wrong passes: it is reported by `check`.
        """
        table = _table(values) or {}
        factory = self.named(kind, str(table.get("name")))
        return factory is None or (
            test(factory)
            and all(
                self.every(kind, part, test)
                for p in factory.parameters
                if p.part == kind and p.name in table
                for _, part in _parts(p, table[p.name], "")
            )
        )

    def _check(self, kind: str, values: Any, where: str) -> Iterator[str]:
        if is_made(values):
            return
        values = _table(values)
        if values is None or not isinstance(values.get("name"), str):
            yield f'{where} must name a {KINDS[kind]}: name = "PLUGIN.NAME".'
            return
        try:
            factory = self.find(kind, values["name"])
            _, problems = factory.check({k: v for k, v in values.items() if k != "name"}, where)
        except (PluginError, MissingDependency) as error:
            yield f"{where} name: {error}"
            return
        yield from problems
        for p in factory.parameters:
            if p.part and p.name in values:
                for place, part in _parts(p, values[p.name], f"{where} {p.name}"):
                    yield from self._check(p.part, part, place)

    def build(self, kind: str, values: Any, known: Mapping[str, Any] | None = None) -> Any:
        """Build what a table `{name = …, parameters}` describes, its parts first.

        Args:
            kind: one of `KINDS`.
            values: the recipe's table. A part in it may be an object that is made already
                (`is_made`).
            known: what the host knows (`factory.GIVEN`); passed on to every factory that names it.

        Raises:
            PluginError: the name is unknown.
            RecipeError: the values do not fit, or the factory refuses them.
        """
        if is_made(values):
            return values
        known = known or {}
        table = _table(values) or {}
        factory = self.find(kind, str(table.get("name")))
        checked, problems = factory.check(
            {k: v for k, v in table.items() if k != "name"}, f"[{KINDS[kind]}]"
        )
        if problems:
            raise RecipeError(problems)
        for p in factory.parameters:
            if p.from_host and known.get(p.name) is not None:
                checked[p.name] = known[p.name]
            elif p.part and p.required and p.name not in checked:
                raise RecipeError(
                    [
                        f"[{KINDS[kind]}] {p.name}: is required ({p.type_text}); {factory.name} has"
                        " no default."
                    ]
                )
            elif p.part and p.name in checked:
                parts = [
                    self.build(p.part, part, context)
                    for _, part in _parts(p, checked[p.name], p.name)
                    for context in _widths(p, checked, known)
                ]
                checked[p.name] = parts if p.many or p.per_width else parts[0]
            elif p.by_host and p.default is inspect.Parameter.empty:
                raise PluginError(
                    f"{factory.name} asks the host for '{p.name}' ({GIVEN[p.name]}), which it does"
                    " not know here."
                )
        return factory.build(checked)


def _refuse_offer(plugin: str, kind: str, short: Any, make: Any) -> None:
    """Refuse what a hook offers under a name that is none, or that cannot be called."""
    if not (isinstance(short, str) and short.isidentifier()):
        raise PluginError(
            f"The plugin '{plugin}' offers {short!r} in retrieval_{kind}; a name must be a Python"
            " identifier."
        )
    if not callable(make):
        raise PluginError(
            f"The plugin '{plugin}' offers '{short}' in retrieval_{kind} with a factory of type"
            f" {type(make).__name__}, which cannot be called."
        )


def _table(values: Any) -> dict[str, Any] | None:
    if isinstance(values, str):
        return {"name": values}
    return dict(values) if isinstance(values, Mapping) else None


def is_made(value: Any) -> bool:
    """Return whether a value is the part itself, not its name, its table or plain TOML."""
    return not isinstance(
        value, str | bytes | int | float | Mapping | list | tuple | date | time | None
    )


def _widths(
    p: Parameter, checked: Mapping[str, Any], known: Mapping[str, Any]
) -> list[Mapping[str, Any]]:
    """Return what the host gives to each of the parts that one parameter asks for."""
    widths = checked.get(p.per_width, []) if p.per_width else []
    return [*({**known, "embedding_size": width} for width in widths), known]


def _parts(p: Parameter, value: Any, where: str) -> list[tuple[str, Any]]:
    if p.many:
        return [
            (f"{where}[{i}]", part)
            for i, part in enumerate(value if isinstance(value, list | tuple) else [value])
        ]
    return [(where, value)]


def load_plugins(extra: Iterable[str] = (), *, block: Iterable[str] | None = None) -> Plugins:
    """Load every installed plugin, then the given files and modules.

    Args:
        extra: paths of `.py` files, or names of modules.
        block: plugin names to leave out; by default those in `RETRIEVAL_BLOCK`, separated by
            commas.

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
        other = manager.get_name(module)
        if other:
            raise PluginError(
                f"The {source.origin} is loaded already, as the plugin '{other}'. Name what it"
                f" offers '{other}.…', and leave the {source.origin} out."
            )
        refuse_misspelt(source, module)
        try:
            manager.register(module, source.plugin)
        except (ValueError, pluggy.PluginValidationError) as error:
            raise PluginError(
                f"The plugin '{source.plugin}' ({source.origin}) does not fit its hooks:"
                f" {misfit(error)}."
            ) from error
        sources.append(source)

    for name, (entry, origin) in sorted(_entry_points(blocked).items()):
        source = PluginSource(name, origin)
        register(source, import_plugin(source, entry.load))
    for item in extra:
        source = name_of(item)
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


def _entry_points(blocked: set[str]) -> dict[str, tuple[EntryPoint, str]]:
    """Return each plugin's entry point and distribution; two claims of one name are refused."""
    entries: dict[str, tuple[EntryPoint, str]] = {}
    seen: set[str] = set()
    for distribution in distributions():
        # most have no entry point of ours: reading their names too would double the time that
        # `--help` takes
        if f"[{GROUP}]" not in (distribution.read_text("entry_points.txt") or ""):
            continue
        project = re.sub(r"[-_.]+", "-", distribution.name or "").lower()
        if project in seen:  # an editable install may be listed twice
            continue
        seen.add(project)
        for entry in distribution.entry_points:
            if entry.group != GROUP or entry.name in blocked:
                continue
            origin = f"{distribution.name} {distribution.version}"
            if entry.name in entries:
                raise PluginError(
                    f"Two installed packages claim the plugin name '{entry.name}':"
                    f" {entries[entry.name][1]} and {origin}. Uninstall one, or leave the name out"
                    f" with RETRIEVAL_BLOCK={entry.name}."
                )
            entries[entry.name] = (entry, origin)
    return entries


def installed_plugins() -> dict[str, str]:
    """Return the distribution of each installed plugin, without loading any."""
    return {name: origin for name, (_, origin) in _entry_points(set()).items()}


def names(kind: str) -> list[str]:
    """Return the names of all parts of a kind that the installed plugins make, sorted.

    Args:
        kind: "loss", "miner", "backbone", "dataset", "generator", "combiner", "learner", "metric",
            "index", "store", "distance", "reducer" or "regularizer"; the plural will do.

    Raises:
        PluginError: there is no such kind; the sentence suggests the closest.
    """
    return list(load_plugins().factories(_plural(kind)))


def create(kind: str, name: str, /, **parameters: Any) -> Any:
    """Return a part that a plugin makes, as in `create("loss", "pml.triplet_margin", margin=0.1)`.

    Parameters are checked as in a recipe; one that there is not is refused with the list of those
    there are (on the command line `retrieval plugins show NAME` explains them). A part of the part
    is a name, a table `{"name": …, parameters}` or an object. What training knows and gives
    (`features`, `embedding_size`, `classes`) is a parameter here.

    Args:
        kind: see `names`.
        name: the part's, as `PLUGIN.NAME`.
        parameters: the part's own.

    Raises:
        PluginError: there is no such kind or name; the sentence suggests the closest.
        RecipeError: with every problem of the parameters.
    """
    plural = _plural(kind)
    plugins = load_plugins()
    factory = plugins.find(plural, name)
    requested = {p.name: p for p in factory.parameters if p.by_host}
    from_host = {key: parameters[key] for key in requested if key in parameters}
    table = {"name": name} | {
        key: value for key, value in parameters.items() if key not in from_host
    }
    problems = plugins.check(plural, table, f"[{KINDS[plural]}]")
    problems += [
        f"[{KINDS[plural]}] {key}: is required ({GIVEN[key]})."
        for key, p in requested.items()
        if p.default is inspect.Parameter.empty and key not in from_host
    ]
    if problems:
        raise RecipeError(problems, f"{name}, as create() was asked for it,")
    return plugins.build(plural, table, from_host)


def _plural(kind: str) -> str:
    """Return a kind as `KINDS` has it, of its singular or plural."""
    for plural, singular in KINDS.items():
        if kind in (plural, singular):
            return plural
    singulars = list(KINDS.values())
    raise PluginError(
        f"There is no kind '{kind}' (known: {', '.join(singulars)}).{did_you_mean(kind, singulars)}"
    )
