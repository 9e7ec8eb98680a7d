"""Read and check recipes in TOML or Python; one error lists every problem.

The classes in `retrieval.recipe.tables` define the host's own tables. Tables that name a plugin's
part (`Component`) are checked against the signature of its factory.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tomli_w

from retrieval.errors import (
    DataError,
    PluginError,
    RecipeError,
    RetrievalError,
    did_you_mean,
    quantity,
)
from retrieval.host.factory import COMPONENTS
from retrieval.host.importing import is_file_plugin, require_allowed
from retrieval.host.plugins import Plugins, load_plugins
from retrieval.host.python_parts import WORDS, named_object, object_name, objects_in
from retrieval.host.values import KeyPath, check_values, shown
from retrieval.recipe.tables import Section, Tables, host_keys

if TYPE_CHECKING:
    from retrieval.base.folder_kinds import StrPath


class Recipe(Tables):
    """A checked recipe, written in Python.

    Its arguments are the tables of a TOML file, each a dictionary::

        retrieval.Recipe(
            data={"name": "core.image_folder", "folder": "photos"},
            split={"by": "class"},
            sampler={"classes": 8, "items": 4},
            backbone={"name": "core.convnet"},
            loss={"name": "pml.triplet_margin", "margin": 0.1},
            train={"epochs": 20},
        )

    A part may also be a Python object: `backbone=MyModule()`, as in `retrieval.train`. The checks
    are the same as for a file. `read_recipe` returns this class too.

    Args:
        tables: `name`, `seed`, `plugins`, `data`, `split`, `backbone`, `loss` and so on. `phase`
            is a list of the `[[phase]]` tables.

    Raises:
        RecipeError: the recipe is invalid; the message lists every problem.
        PluginError: a plugin cannot be loaded.
    """

    def __init__(self, /, **tables: Any) -> None:
        checked = read_recipe(tables)
        super().__init__(**checked.model_dump(exclude_unset=True))
        self._loaded = checked._loaded


def read_recipe(
    recipe: StrPath | Mapping[str, Any] | Tables,
    overrides: Sequence[str] = (),
    plugins: Sequence[str] = (),
    *,
    objects: Mapping[str, Any] | None = None,
) -> Recipe:
    """Read and check a recipe.

    Args:
        recipe: path of a TOML file, a dictionary of tables (whose parts may be Python objects), or
            a recipe to change.
        overrides: changes as `key.path=value` text, with the value in TOML (a bare word is text).
        plugins: additional plugin files, folders or modules, as from `--plugin`.
        objects: Python objects that replace named parts, by table.

    Returns:
        The recipe with its loaded plugins and with absolute paths of plugin files.

    Raises:
        RecipeError: the recipe is invalid; the message lists every problem.
        PluginError: a plugin cannot be loaded, or the recipe brings a plugin that the user has not
            allowed (see `retrieval.host.importing`).
    """
    recipe, objects = apart(recipe, objects)
    table, brought = read_table(recipe, overrides, plugins)
    if not isinstance(recipe, str | os.PathLike):
        return check_recipe(table, objects=objects)
    # before the checks, which import the plugins and so run their code
    require_allowed(brought, Path(recipe))
    return check_recipe(table, str(recipe), objects)


def apart(
    recipe: StrPath | Mapping[str, Any] | Tables, objects: Mapping[str, Any] | None
) -> tuple[StrPath | Mapping[str, Any] | Tables, dict[str, Any]]:
    """Return a recipe without its objects, and all objects; `objects` take precedence."""
    if isinstance(recipe, Mapping):
        inside = objects_in(recipe)
        recipe = {name: value for name, value in recipe.items() if name not in inside}
    else:
        inside = getattr(recipe, "objects", {})
    return recipe, {**inside, **(objects or {})}


def read_table(
    recipe: StrPath | Mapping[str, Any] | Tables,
    overrides: Sequence[str] = (),
    plugins: Sequence[str] = (),
) -> tuple[dict[str, Any], list[str]]:
    """Read a recipe without checking it; see `read_recipe` for the arguments.

    Returns:
        The tables, and the plugins that the recipe names and the caller does not.
    """
    if isinstance(recipe, str | os.PathLike):
        path = Path(recipe)
    else:
        path = Path("recipe")
    if isinstance(recipe, Tables):
        table: dict[str, Any] = recipe.model_dump(exclude_unset=True)
    elif isinstance(recipe, Mapping):
        table = _without_none(recipe)
    else:
        table = _parsed(path)
    in_recipe = table.get("plugins")
    # A copy, because overrides change the list in place.
    in_recipe = [*in_recipe] if isinstance(in_recipe, list) else []
    apply_overrides(table, overrides, COMPONENTS)
    named = table.get("plugins", [])
    if not isinstance(named, list) or not (named or plugins):
        return table, []
    from_caller = [_beside(Path(), item) for item in plugins]
    paths = {item: _beside(path, item) for item in named if isinstance(item, str)}
    located = [paths[item] if isinstance(item, str) else item for item in named]
    table["plugins"] = located + from_caller
    brought = [
        path for item, path in paths.items() if item in in_recipe and path not in from_caller
    ]
    return table, brought


def _without_none(value: Any) -> Any:
    """Return a copy of tables without the keys whose value is None, which TOML cannot write."""
    if isinstance(value, Mapping):
        return {k: _without_none(v) for k, v in value.items() if v is not None}
    if isinstance(value, list | tuple):
        return [_without_none(v) for v in value]
    return value


def _parsed(path: Path) -> dict[str, Any]:
    """Return the content of a TOML file."""
    try:
        # "utf-8-sig", because some editors begin a file with a byte-order mark.
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise RecipeError(f"it cannot be read: {reason}.", str(path)) from None
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # ValueError also for a number with many digits
        if isinstance(error, RecursionError):
            reason = "it is nested too deeply"
        else:
            reason = str(error)
        raise RecipeError(f"it is not valid TOML: {reason}.", str(path)) from None


@contextmanager
def naming(path: StrPath) -> Iterator[None]:
    """Context manager that adds the recipe's path to errors raised while its parts are built."""
    try:
        yield
    except RecipeError as error:
        # an inner context or the reader has named the file already
        if error.where is not None:
            raise
        raise RecipeError(error.problems, str(path)) from error
    except (DataError, PluginError) as error:
        if not str(error).startswith("["):  # not about a table of the recipe
            raise
        raise type(error)(f"{path}: {error}") from error


def check_recipe(
    table: Mapping[str, Any],
    where: str | None = None,
    objects: Mapping[str, Any] | None = None,
    plugins: Plugins | None = None,
) -> Recipe:
    """Return the checked recipe of a table that was read from the file `where`.

    `objects` are as in `read_recipe`. `plugins` are the loaded plugins; by default, the installed
    plugins and those that the recipe names are loaded.
    """
    # imports torch, which reading a recipe without checking it does without
    from retrieval.recipe.rules import check_names, check_together, option_hint

    objects = objects or {}
    table = with_objects(table, objects)
    recipe, faults = read_tables(table)
    problems = [
        _bracketed(fault) + option_hint(recipe, table, path)
        for path, fault in faults.items()
        # `plugins.check` reports a missing or wrong name.
        if not (path[0] in COMPONENTS and path[1:] == ("name",))
    ]
    extra = table.get("plugins", [])
    try:
        if plugins is None:
            if isinstance(extra, list):
                named = [p for p in extra if isinstance(p, str)]
            else:
                named = []
            plugins = load_plugins(named)
    except RetrievalError as error:
        if problems:
            raise RecipeError([*problems, str(error)], where) from error
        raise
    plugins.give(objects)
    for name, kind in COMPONENTS.items():
        values = table.get(name)
        if isinstance(values, Mapping):
            values = {k: v for k, v in values.items() if k not in host_keys(name)}
            if name == "sampler":
                values = {"name": recipe.sampler.name, **values}
            problems += plugins.check(kind, values, f"[{name}]", host_keys(name))
    recipe = recipe.with_plugins(plugins)
    problems += check_names(recipe)
    problems += check_together(recipe, {name for name in COMPONENTS if name in table})
    if problems:
        raise RecipeError(dict.fromkeys(problems), where)
    # `Recipe(…)` would read and check the tables again
    return Recipe.model_construct(recipe.model_fields_set, **dict(recipe)).with_plugins(plugins)


def with_objects(table: Mapping[str, Any], objects: Mapping[str, Any]) -> dict[str, Any]:
    """Return a recipe's table with objects in place of parts; keep the keys that the host reads."""
    changed = dict(table)
    for name, value in objects.items():
        before = table.get(name)
        if name == "augmentation":
            before = before or {}
            listed = before.get("transforms", [])
            if object_name(value) in listed:
                added = []
            else:
                added = [object_name(value)]
            changed[name] = {**before, "transforms": [*listed, *added]}
            continue
        keys: set[str] = set()
        if isinstance(before, Mapping):
            keys = host_keys(name) & before.keys()
        changed[name] = {"name": object_name(value), **{key: table[name][key] for key in keys}}
    return changed


def read_tables(table: Mapping[str, Any]) -> tuple[Tables, dict[KeyPath, str]]:
    """Return the recipe and the problems of its tables by key path.

    If there are problems, the recipe holds only the valid entries, so that later checks can run.
    """
    values, faults = check_values(Tables, table)
    if faults:
        valid = {"data": {}, "backbone": {}, **_valid(table, faults)}
        values, rest = check_values(Tables, valid)
        if rest:  # an omitted entry caused another problem, such as a list that is too short
            valid = {"data": {}, "backbone": {}, **_valid(valid, {path[:1] for path in rest})}
            values, _ = check_values(Tables, valid)
    # the fault says that a table is needed, and this sentence how to write it
    for name in COMPONENTS:
        if isinstance(table.get(name), str) and (name,) in faults:
            text = shown(table[name])
            faults[name,] += (
                f' Write: [{name}] name = {text}, or in Python {name}={{"name": {text}}}.'
            )
    return Tables(**values), faults


def _valid(table: Mapping[Any, Any], wrong: Iterable[KeyPath]) -> dict[Any, Any]:
    """Return a copy of a table without its wrong entries; a list of values counts as one entry."""
    valid: dict[Any, Any] = {}
    for key, value in table.items():
        inside = {path[1:] for path in wrong if str(path[0]) == str(key)}
        if not inside:
            valid[key] = value
        elif () not in inside and isinstance(value, Mapping):
            valid[key] = _valid(value, inside)
        elif () not in inside and isinstance(value, list) and isinstance(value[0], Mapping):
            valid[key] = [*_valid(dict(enumerate(value)), inside).values()]
    return valid


def _bracketed(problem: str) -> str:
    """Return `[head] hidden: …` for `head.hidden: …`, the notation of the file."""
    key, _, rest = problem.partition(": ")
    table, dot, inner = key.partition(".")
    if table == "phase":
        name = f"[[{table}]]"
    else:
        name = f"[{table}]"
    if dot:
        return f"{name} {inner}: {rest}"
    field = Tables.model_fields.get(table)
    is_table = table in (*COMPONENTS, "phase") or isinstance(
        field and field.annotation, type(Section)
    )
    if is_table or rest.startswith("there is no such table"):
        return f"{name}: {rest}"
    return problem


def _beside(recipe: Path, item: str) -> str:
    """Return the absolute path of a plugin file beside the recipe, or in the working folder."""
    if not is_file_plugin(item):
        return item
    path = recipe.parent / item
    if Path(item).exists() and not path.exists():
        path = Path(item)
    if item.endswith(".py"):
        return str(path.resolve())
    return f"{path.resolve()}/"


def to_toml(recipe: Tables) -> str:
    """Return the recipe as TOML without defaults; a comment names each Python object."""
    tables = _without_none(recipe.model_dump(exclude_unset=True))
    notes = [
        f"# [{table}] {name} was made in Python. Open this run with the same object: {word}=…\n"
        for table, word in WORDS.items()
        if (name := named_object(tables, table))
    ]
    return "".join(notes) + tomli_w.dumps(tables)


def apply_overrides(
    table: dict[str, Any], overrides: Sequence[str], components: Collection[str] = ()
) -> None:
    """Apply `key.path=value` texts to a recipe's table, in place.

    `key.path=none` removes a key that the recipe sets, so that its default applies. `components`
    are the tables of parts: a new name, such as `loss.name=…`, first removes the parameters of the
    old part, and `loss=none` removes the table. Without a loss, miner and generator go too.

    Raises:
        RecipeError: the message lists the texts that cannot be applied.
    """
    changes: list[tuple[str, str, str]] = []
    for text in overrides:
        key, sep, value = (part.strip() for part in text.partition("="))
        if key in components and value.strip("'\"") == "none":
            for component in ("loss", "miner", "generator") if key == "loss" else (key,):
                table.pop(component, None)
        else:
            changes.append((text, key if sep else "", value))
    # names first, whatever the order of the texts: a new name removes the old part's parameters,
    # but not those that the same command sets
    for _, key, value in changes:
        component, _, last = key.partition(".")
        part = table.get(component)
        if component not in components or last != "name" or not isinstance(part, dict):
            continue
        if part.get("name") != value.strip("'\""):
            keys = ("name", *host_keys(component))
            table[component] = {key: part[key] for key in keys if key in part}
    problems = [
        f"The change {text}: {problem}"
        for text, key, value in changes
        if (problem := _override(table, key, value))
    ]
    if problems:
        raise RecipeError(problems, "The command line")


def _override(table: dict[str, Any], key: str, value: str) -> str | None:
    """Apply one override; return its problem, or None."""
    steps = [step.strip() for step in key.split(".")]
    if not all(steps):
        return "write it as table.key=value."
    node: Any = table
    outer = ""
    for step, next_step in pairwise(steps):
        if outer:
            path = f"{outer}.{step}"
        else:
            path = step
        if isinstance(node, list):
            if not step.isdigit() or int(step) >= len(node):
                entries = quantity(len(node), "entry", "entries")
                return f"{outer} has {entries}, numbered from 0; '{step}' is none of them."
            node = node[int(step)]
        elif next_step.isdigit() and step not in node:
            return f"the recipe has no list '{path}'."
        elif value == "none":
            node = node.get(step, {})
        else:
            node = node.setdefault(step, {})
        if not isinstance(node, dict | list):
            return f"{path} is {shown(node)}, not a table, so no key can be set in it."
        outer = path
    last = steps[-1]
    if isinstance(node, list):
        if last.isdigit() and int(last) < len(node) and not isinstance(node[int(last)], dict):
            node[int(last)] = _toml(value)
            return None
        return (
            f"{outer} is a list; name an entry's key by the entry's number, as in"
            f" {outer}.0.{last}=…"
        )
    if value != "none":
        node[last] = _toml(value)
    elif node.pop(last, None) is None:
        known = did_you_mean(last, node)
        return f"the recipe does not set this key, so it cannot be removed.{known}"
    return None


def _toml(value: str) -> Any:
    """Return the value of an override; a bare word is text."""
    try:
        parsed = tomllib.loads(f"value = {value}")
    except (ValueError, RecursionError):
        return value
    # a value with a line break could bring further keys
    if len(parsed) == 1:
        return parsed["value"]
    return value
