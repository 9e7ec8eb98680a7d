"""Import what is a plugin: an entry point's module, a file, or a module by its name; each fault is one sentence."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import re
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from retrieval import hookspecs
from retrieval.errors import PluginError, did_you_mean


@dataclass(frozen=True)
class Source:
    """Where a plugin comes from: a distribution with its version, a file, or a module."""

    plugin: str
    origin: str


def name_of(item: str) -> Source:
    """Return the name that a file or module gives its plugin, and what to call it in a sentence."""
    if item.endswith(".py"):
        return Source(Path(item).stem, f"file {Path(item).resolve()}")
    return Source(item.rpartition(".")[2], f"module {item}")


def import_plugin(source: Source, load: Callable[[], Any]) -> ModuleType:
    """Return a plugin's module.

    Raises:
        PluginError: it cannot be imported, with the line at fault, or is no module.
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
            f"The plugin '{source.plugin}' ({source.origin}) cannot be imported: {reason(error)}{place}. "
            f"Mend it, or leave it out with RETRIEVAL_BLOCK={source.plugin}."
        ) from error
    if not isinstance(module, ModuleType):
        raise PluginError(
            f"The plugin '{source.plugin}' ({source.origin}) is an object of type {type(module).__name__}; its entry point must name a module."
        )
    return module


class _FromSource(SourceFileLoader):
    """Runs what a file says, never the bytecode beside it, which may be another's and was not looked at."""

    def get_code(self, fullname: str) -> CodeType:
        """Return the compiled source."""
        return self.source_to_code(self.get_data(self.path), self.path)


def import_extra(item: str) -> ModuleType:
    """Return the module of a plugin's file, or of that name.

    Raises:
        PluginError: there is none.
    """
    if not item.endswith(".py"):
        try:
            return importlib.import_module(item)
        except (ModuleNotFoundError, TypeError, ValueError) as error:
            if isinstance(error, ModuleNotFoundError) and error.name not in (item, item.partition(".")[0]):
                raise  # the module is there; what it imports is not
            raise PluginError(
                f"There is no module '{item}' to load as a plugin. A file's name must end in .py."
            ) from error
    path = Path(item)
    if not path.is_file():
        raise PluginError(f"The plugin file {item} does not exist.")
    if not path.stem.isidentifier():
        raise PluginError(
            f"The plugin file {item} must be named like a Python identifier: its name is the plugin's name."
        )
    module_name = f"retrieval_file_plugin_{path.stem}"
    spec = importlib.util.spec_from_file_location(
        module_name, path, loader=_FromSource(module_name, str(path))
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module  # dataclasses and pickling of the plugin's classes look it up
    try:
        spec.loader.exec_module(module)
    except BaseException:
        sys.modules.pop(module_name, None)
        raise
    return module


def refuse_misspelt(source: Source, module: ModuleType) -> None:
    """Refuse a hook that does not exist, and a function named like a hook that lacks its mark."""
    known = [name for name in vars(hookspecs) if name.startswith("retrieval_")]
    for name, value in list(vars(module).items()):
        marked = getattr(value, "retrieval_impl", None)
        if isinstance(marked, dict):
            hook = marked.get("specname") or name
            if hook not in known:
                raise PluginError(
                    f"The plugin '{source.plugin}' ({source.origin}) marks '{hook}' as a hook, and there is no such hook."
                    f"{did_you_mean(hook, known)}"
                )
        elif name in known and inspect.isfunction(value):
            raise PluginError(
                f"The plugin '{source.plugin}' ({source.origin}) defines {name} without @retrieval.hookimpl above it, so it "
                f"would never be called. Add that line, or rename the function."
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
