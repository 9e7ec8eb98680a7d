"""Import what is a plugin: an entry point's module, a file, or a module by its name; each fault is
one sentence.
"""

from __future__ import annotations

import importlib
import inspect
import re
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from retrieval.errors import PluginError, did_you_mean
from retrieval.host import hookspecs
from retrieval.host.file_plugins import FilePlugin, is_file_plugin


@dataclass(frozen=True)
class PluginSource:
    """Where a plugin comes from: a distribution with its version, a file, or a module."""

    plugin: str
    origin: str


def name_of(item: str) -> PluginSource:
    """Return the name that a file, folder or module gives its plugin, and what to call it in a
    sentence.
    """
    if is_file_plugin(item):
        path = Path(item).resolve()
        return PluginSource(path.stem, f"{'file' if item.endswith('.py') else 'folder'} {path}")
    return PluginSource(item.rpartition(".")[2], f"module {item}")


def import_plugin(source: PluginSource, load: Callable[[], Any]) -> ModuleType:
    """Return a plugin's module.

    Raises:
        PluginError: it cannot be imported, with the line at fault, or is not a module.
    """
    try:
        module = load()
    except PluginError:
        raise
    except (Exception, SystemExit) as error:
        place = ""
        for frame in traceback.extract_tb(error.__traceback__):
            # the machinery of importing itself is no place to look at
            if not frame.filename.startswith("<") and frame.filename != importlib.__file__:
                place = f" ({frame.filename}, line {frame.lineno})"
        if isinstance(error, SyntaxError):
            place = f" ({error.filename}, line {error.lineno})"
        raise PluginError(
            f"The plugin '{source.plugin}' ({source.origin}) cannot be imported:"
            f" {reason(error)}{place}. Mend it, or leave it out with"
            f" RETRIEVAL_BLOCK={source.plugin}."
        ) from error
    if not isinstance(module, ModuleType):
        raise PluginError(
            f"The plugin '{source.plugin}' ({source.origin}) is an object of type"
            f" {type(module).__name__}; its entry point must name a module."
        )
    return module


def import_extra(item: str) -> ModuleType:
    """Return the module of a plugin's file or folder, or of that name.

    Raises:
        PluginError: there is none.
    """
    if is_file_plugin(item):
        return FilePlugin.at(item).load()
    try:
        return importlib.import_module(item)
    except (ModuleNotFoundError, TypeError, ValueError) as error:
        if isinstance(error, ModuleNotFoundError) and error.name not in (
            item,
            item.partition(".")[0],
        ):
            raise  # the module is there; what it imports is not
        raise PluginError(
            f"There is no module '{item}' to load as a plugin. A file's name must end in .py, a"
            " folder's in /."
        ) from error


def refuse_misspelt(source: PluginSource, module: ModuleType) -> None:
    """Refuse a hook that does not exist, and a function named like a hook that lacks its mark."""
    known = [name for name in vars(hookspecs) if name.startswith("retrieval_")]
    for name, value in list(vars(module).items()):
        marked = getattr(value, "retrieval_impl", None)
        if isinstance(marked, dict):
            hook = marked.get("specname") or name
            if hook not in known:
                raise PluginError(
                    f"The plugin '{source.plugin}' ({source.origin}) marks '{hook}' as a hook, and"
                    f" there is no such hook.{did_you_mean(hook, known)}"
                )
        elif name in known and inspect.isfunction(value):
            raise PluginError(
                f"The plugin '{source.plugin}' ({source.origin}) defines {name} without"
                " @retrieval.hookimpl above it, so it would never be called. Add that line, or"
                " rename the function."
            )


def misfit(error: Exception) -> str:
    """What pluggy says of a hook with other parameters than its specification, in one sentence."""
    found = re.search(r"hookimpl definition: (\w+)(\(.*\))", str(error))
    if not found:
        return " ".join(str(error).split()).rstrip(".")
    asked = inspect.signature(getattr(hookspecs, found[1])).parameters
    return f"it defines {found[1]}{found[2]}, and the host calls {found[1]}({', '.join(asked)})"


def reason(error: BaseException) -> str:
    """An exception's kind and text, on one line, without the full stop."""
    text = str(error.msg if isinstance(error, SyntaxError) else error)
    return f"{type(error).__name__}: {' '.join(text.split())}".rstrip(": .")
