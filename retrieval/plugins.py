"""Load plugins, refuse clashes, find factories and build what a recipe names.

Plugins come from the entry-point group `retrieval` (bundled and third-party alike), and from files or modules that
a recipe or `--plugin` names. `RETRIEVAL_BLOCK=acme,other` leaves plugins out.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import EntryPoint, distributions
from pathlib import Path
from types import ModuleType
from typing import Any

import pluggy

from retrieval import hookspecs
from retrieval.errors import MissingDependency, PluginError, RecipeError, did_you_mean
from retrieval.factory import GIVEN, KINDS, Factory, Parameter

GROUP = "retrieval"


@dataclass(frozen=True)
class Source:
    """Where a plugin comes from: a distribution with its version, a file, or a module."""

    plugin: str
    origin: str


class Plugins:
    """The loaded plugins. Make one with `load_plugins`; there is no global one."""

    def __init__(self, manager: pluggy.PluginManager, sources: list[Source]) -> None:
        self.manager = manager
        self.sources = sources
        self._factories: dict[str, dict[str, Factory]] = {}

    @property
    def hook(self) -> Any:
        """The hooks to call, as pluggy gives them."""
        return self.manager.hook

    def factories(self, kind: str) -> dict[str, Factory]:
        """Return every factory of a kind by its full name, sorted.

        Raises:
            PluginError: a hook fails, returns no mapping, or offers a factory that breaks the rules.
        """
        if kind not in self._factories:
            found: dict[str, Factory] = {}
            for impl in getattr(self.hook, f"retrieval_{kind}").get_hookimpls():
                for short, make in self._call(impl.plugin_name, kind, impl.function).items():
                    name = f"{impl.plugin_name}.{short}"
                    found[name] = Factory.read(kind, name, make)
            self._factories[kind] = dict(sorted(found.items()))
        return self._factories[kind]

    def _call(self, plugin: str, kind: str, function: Any) -> Mapping[str, Any]:
        hook = f"retrieval_{kind}"
        try:
            made = function()
        except ImportError as error:
            if error.name and error.name.partition(".")[0] in (
                "torch",
                "torchvision",
                "pytorch_metric_learning",
                "sklearn",
            ):
                raise MissingDependency(
                    f"The plugin '{plugin}' needs {error.name} for its {kind}. Install it: pip install 'retrieval[train]'."
                ) from error
            raise PluginError(f"The plugin '{plugin}' failed in {hook}: {error}.") from error
        except Exception as error:
            raise PluginError(
                f"The plugin '{plugin}' failed in {hook}: {type(error).__name__}: {error}."
            ) from error
        if not isinstance(made, Mapping):
            raise PluginError(
                f"The plugin '{plugin}' returned {type(made).__name__} from {hook}; it must return {{name: factory}}."
            )
        for short, make in made.items():
            if not (isinstance(short, str) and short.isidentifier() and callable(make)):
                raise PluginError(
                    f"The plugin '{plugin}' offers {short!r} in {hook}; a name must be a Python identifier and its factory callable."
                )
        return made

    def find(self, kind: str, name: str) -> Factory:
        """Return a factory by its full name.

        Raises:
            PluginError: there is none; the sentence suggests the closest.
        """
        known = self.factories(kind)
        if name in known:
            return known[name]
        plugin = name.partition(".")[0]
        if "." in name and plugin not in {s.plugin for s in self.sources}:
            hint = (
                did_you_mean(name, known)
                or f" No plugin '{plugin}' is loaded (loaded: {', '.join(sorted(s.plugin for s in self.sources))})."
            )
        else:
            hint = did_you_mean(name, known) or f" 'retrieval plugins list' shows all {len(known)}."
        raise PluginError(f"There is no {KINDS[kind]} '{name}'.{hint}")

    def check(self, kind: str, values: Mapping[str, Any], where: str) -> list[str]:
        """Return every problem of a table `{name = …, parameters}`, nested parts included."""
        return [problem for problem in self._check(kind, values, where)]

    def _check(self, kind: str, values: Any, where: str) -> Iterator[str]:
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

    def build(self, kind: str, values: Mapping[str, Any], given: Mapping[str, Any] | None = None) -> Any:
        """Build what a table `{name = …, parameters}` describes, its parts first.

        Args:
            kind: one of `KINDS`.
            values: the recipe's table.
            given: what the host knows (`factory.GIVEN`); passed on to every factory that names it.

        Raises:
            PluginError: the name is unknown.
            RecipeError: the values do not fit, or the factory refuses them.
        """
        given = given or {}
        table = _table(values) or {}
        factory = self.find(kind, str(table.get("name")))
        checked, problems = factory.check({k: v for k, v in table.items() if k != "name"}, f"[{KINDS[kind]}]")
        if problems:
            raise RecipeError(problems)
        for p in factory.parameters:
            if p.name in GIVEN and given.get(p.name) is not None:
                checked[p.name] = given[p.name]
            elif p.part and p.name in checked:
                made = [self.build(p.part, part, given) for _, part in _parts(p, checked[p.name], p.name)]
                checked[p.name] = made if p.many else made[0]
            elif p.given and p.default is inspect.Parameter.empty:
                raise PluginError(
                    f"{factory.name} asks the host for '{p.name}' ({GIVEN[p.name]}), which it does not know here."
                )
        return factory.build(checked)


def _table(values: Any) -> dict[str, Any] | None:
    if isinstance(values, str):
        return {"name": values}
    return dict(values) if isinstance(values, Mapping) else None


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
        block: plugin names to leave out; by default those in `RETRIEVAL_BLOCK`, separated by commas.

    Raises:
        PluginError: two distributions claim one name, a plugin cannot be imported, or it misspells a hook.
    """
    if block is None:
        block = [name.strip() for name in os.environ.get("RETRIEVAL_BLOCK", "").split(",")]
    blocked = {name for name in block if name}
    manager = pluggy.PluginManager("retrieval")
    manager.add_hookspecs(hookspecs)
    sources: list[Source] = []

    def register(name: str, module: ModuleType, origin: str) -> None:
        clash = next((s for s in sources if s.plugin == name), None)
        if clash:
            raise PluginError(
                f"Two plugins are called '{name}': {clash.origin} and {origin}. Rename one, or set RETRIEVAL_BLOCK={name}."
            )
        try:
            manager.register(module, name)
        except (ValueError, pluggy.PluginValidationError) as error:
            raise PluginError(
                f"The plugin '{name}' ({origin}) does not fit its hooks: {_first_line(error)}"
            ) from error
        sources.append(Source(name, origin))

    for name, (entry, origin) in sorted(_entry_points(blocked).items()):
        register(name, _import(name, origin, lambda entry=entry: entry.load()), origin)
    for item in extra:
        name = Path(item).stem if item.endswith(".py") else item.rpartition(".")[2]
        if name in blocked:
            continue
        origin = str(Path(item).resolve()) if item.endswith(".py") else f"module {item}"
        register(name, _import(name, origin, lambda item=item: _import_extra(item)), origin)
    _refuse_misspelt(manager, sources)
    return Plugins(manager, sources)


def _entry_points(blocked: set[str]) -> dict[str, tuple[EntryPoint, str]]:
    found: dict[str, tuple[EntryPoint, str]] = {}
    seen: set[str] = set()
    for distribution in distributions():
        project = (distribution.name or "").lower().replace("_", "-")
        if project in seen:  # an editable install may be listed twice
            continue
        seen.add(project)
        for entry in distribution.entry_points:
            if entry.group != GROUP or entry.name in blocked:
                continue
            origin = f"{distribution.name} {distribution.version}"
            if entry.name in found:
                raise PluginError(
                    f"Two installed packages claim the plugin name '{entry.name}': {found[entry.name][1]} and {origin}. "
                    f"Uninstall one, or leave the name out with RETRIEVAL_BLOCK={entry.name}."
                )
            found[entry.name] = (entry, origin)
    return found


def _import(name: str, origin: str, load: Any) -> ModuleType:
    try:
        module = load()
    except PluginError:
        raise
    except Exception as error:
        frame = error.__traceback__
        while frame and frame.tb_next:
            frame = frame.tb_next
        place = f" ({frame.tb_frame.f_code.co_filename}, line {frame.tb_lineno})" if frame else ""
        if isinstance(error, SyntaxError):
            place = f" ({error.filename}, line {error.lineno})"
        raise PluginError(
            f"The plugin '{name}' from {origin} cannot be imported: {type(error).__name__}: {_first_line(error)}{place}. "
            f"Mend it, or leave it out with RETRIEVAL_BLOCK={name}."
        ) from error
    if not isinstance(module, ModuleType):
        raise PluginError(
            f"The plugin '{name}' from {origin} is a {type(module).__name__}; its entry point must name a module."
        )
    return module


def _import_extra(item: str) -> ModuleType:
    if not item.endswith(".py"):
        return importlib.import_module(item)
    path = Path(item)
    if not path.is_file():
        raise PluginError(f"The plugin file {item} does not exist.")
    if not path.stem.isidentifier():
        raise PluginError(
            f"The plugin file {item} must be named like a Python identifier: its name is the plugin's name."
        )
    module_name = f"retrieval_file_plugin_{path.stem}"
    spec = importlib.util.spec_from_file_location(module_name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module  # dataclasses and pickling of the plugin's classes look it up
    try:
        spec.loader.exec_module(module)
    except BaseException:
        sys.modules.pop(module_name, None)
        raise
    return module


def _refuse_misspelt(manager: pluggy.PluginManager, sources: list[Source]) -> None:
    known = [name for name in vars(hookspecs) if name.startswith("retrieval_")]
    for source in sources:
        module = manager.get_plugin(source.plugin)
        for name, value in list(vars(module).items()):
            marked = getattr(value, "retrieval_impl", None)
            if marked and name not in known and not marked.get("specname"):
                raise PluginError(
                    f"The plugin '{source.plugin}' ({source.origin}) marks '{name}' as a hook, and there is no such hook.{did_you_mean(name, known)}"
                )
    try:
        manager.check_pending()
    except pluggy.PluginValidationError as error:
        raise PluginError(f"A plugin implements a hook that does not exist: {_first_line(error)}") from error


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
