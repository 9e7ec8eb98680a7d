"""Import plugins: entry points, files, folders, and modules by name.

A plugin can be a file, `my_loss.py`, or a folder with an `__init__.py`, `my_plugin/`. A folder is
an ordinary package: its modules use relative imports (`from . import layers`).

A plugin is a program, so opening somebody's recipe could run their code with the user's rights. The
user allows such plugins with `--allow-plugins`, by an answer on a terminal, or with
RETRIEVAL_ALLOW_PLUGINS=1 in the environment, which child processes inherit. Installed plugins and
plugins passed with `--plugin` need no permission.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import importlib.machinery
import importlib.util
import inspect
import os
import shutil
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any

from retrieval.errors import PluginError, did_you_mean
from retrieval.host import hookspecs

# Prefix of a file or folder plugin's module name, so that the plugin hides no other module.
PREFIX = "retrieval_file_plugin_"

# Most files and bytes of a plugin folder, which is read into memory and copied into each run.
MAX_FILES = 1_000
MAX_BYTES = 64 << 20


def is_file_plugin(item: str) -> bool:
    """Return whether a plugin is named as a file (`x.py`) or folder (`x/`), not as a module."""
    return item.endswith((".py", "/", os.sep))


@dataclass(frozen=True)
class FilePlugin:
    """A plugin in the file or folder `path`."""

    path: Path

    @classmethod
    def from_name(cls, item: str) -> FilePlugin:
        """Return the plugin at a path, `x.py` or `x/`."""
        path = Path(item).resolve()
        is_file = item.endswith(".py")
        subject = f"The plugin {'file' if is_file else 'folder'} {item}"
        if not (path.is_file() if is_file else path.is_dir()):
            raise PluginError(f"{subject} does not exist.")
        if not (is_file or (path / "__init__.py").is_file()):
            raise PluginError(f"{subject} has no __init__.py, where its hooks belong.")
        if not path.stem.isidentifier():
            raise PluginError(
                f"{subject} must be named like a Python identifier: its name is the plugin's name."
            )
        return cls(path)

    @property
    def name(self) -> str:
        """The plugin's name."""
        return self.path.stem

    @property
    def is_folder(self) -> bool:
        """True for a folder."""
        return self.path.suffix != ".py"

    @cached_property
    def files(self) -> dict[str, Path]:
        """The plugin's file, or all files of its folder that are not hidden, by relative path."""
        if not self.is_folder:
            return {self.path.name: self.path}
        files: dict[str, Path] = {}
        size = 0
        for parent, folders, names in os.walk(self.path):
            # In place: os.walk enters what remains in the list, in its order.
            folders[:] = sorted(f for f in folders if not f.startswith((".", "__pycache__")))
            for name in sorted(names):
                file = Path(parent, name)
                is_hidden = name.startswith(".") or name.endswith((".pyc", ".tmp"))
                if not is_hidden and file.is_file():
                    files[file.relative_to(self.path).as_posix()] = file
                    size += file.stat().st_size
                if len(files) > MAX_FILES or size > MAX_BYTES:
                    raise PluginError(
                        f"The plugin folder {self.path} holds more than {MAX_FILES:,} files or"
                        f" {MAX_BYTES >> 20} MB. Keep data elsewhere: a run copies the folder."
                    )
        return files

    @cached_property
    def sums(self) -> dict[str, str]:
        """The SHA-256 of each of `files`."""
        try:
            contents = {name: file.read_bytes() for name, file in self.files.items()}
        except OSError as error:
            raise PluginError(
                f"The plugin file {error.filename} cannot be read: {error.strerror or error}."
            ) from error
        return {name: hashlib.sha256(content).hexdigest() for name, content in contents.items()}

    def load(self) -> ModuleType:
        """Import the plugin anew on each call and return its module."""
        root = PREFIX + self.name
        _forget(root)
        entry = self.path
        inner = None
        if self.is_folder:
            entry = self.path / "__init__.py"
            inner = [str(self.path)]
            # These finders make Python import the modules inside the folder with `_Loader` too.
            for folder in {str(file.parent) for file in self.files.values()}:
                finder = importlib.machinery.FileFinder(folder, (_Loader, [".py"]))
                sys.path_importer_cache[folder] = finder
        spec = importlib.util.spec_from_file_location(
            root, entry, loader=_Loader(root, str(entry)), submodule_search_locations=inner
        )
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        # Dataclasses, and pickling the plugin's classes, look the module up by its name.
        sys.modules[root] = module
        try:
            spec.loader.exec_module(module)
        except BaseException as error:
            _forget(root)
            if isinstance(error, ModuleNotFoundError):
                self._explain(error)
            raise
        return module

    def _explain(self, error: ModuleNotFoundError) -> None:
        """Raise a `PluginError` if the missing module lies in or beside the plugin."""
        top = (error.name or "").partition(".")[0]
        home = self.path if self.is_folder else self.path.parent
        is_beside = (home / f"{top}.py").is_file() or (home / top / "__init__.py").is_file()
        if top and (is_beside or top == self.name):
            write = f"Make a folder of both, with {self.path.name} as its __init__.py, and write"
            if self.is_folder:
                write = "Write"
            neighbour = "MODULE" if top == self.name else top
            raise PluginError(
                f"The plugin {self.path} imports its neighbour '{error.name}' as a top-level"
                f" module. {write} `from . import {neighbour}`."
            ) from error

    def copy(self, folder: Path) -> Path:
        """Copy the plugin into a folder atomically, replacing an earlier copy; return its path."""
        # Imported here because `--help` loads plugins but writes no files.
        from retrieval.base.files import whole_file, whole_folder

        target = folder / self.path.name
        if not self.is_folder:
            folder.mkdir(parents=True, exist_ok=True)
            with whole_file(target) as temporary:
                shutil.copyfile(self.path, temporary)
            return target
        occupied = PluginError(f"{target} exists.")
        with whole_folder(target, replace=True, exists_error=occupied) as temporary:
            for relative, file in self.files.items():
                (temporary / relative).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(file, temporary / relative)
        return target


class _Loader(importlib.machinery.SourceFileLoader):
    """Compiles the source each time. Cached bytecode could be somebody else's code."""

    def get_code(self, fullname: str) -> Any:
        path = self.get_filename(fullname)
        return self.source_to_code(self.get_data(path), path)


def _forget(root: str) -> None:
    for name in [name for name in sys.modules if name == root or name.startswith(f"{root}.")]:
        del sys.modules[name]


@dataclass(frozen=True)
class PluginSource:
    """Where a plugin comes from: a distribution with its version, a file, or a module."""

    plugin: str
    origin: str

    @property
    def subject(self) -> str:
        """The plugin with its origin, as the beginning of a sentence."""
        return f"The plugin '{self.plugin}' ({self.origin})"


def source_of(item: str) -> PluginSource:
    """Return the name and origin of a plugin: a file, a folder or a module."""
    if is_file_plugin(item):
        path = Path(item).resolve()
        return PluginSource(path.stem, f"{'file' if item.endswith('.py') else 'folder'} {path}")
    return PluginSource(item.rpartition(".")[2], f"module {item}")


def import_plugin(source: PluginSource, load: Callable[[], Any]) -> ModuleType:
    """Return a plugin's module; any error while importing it becomes a `PluginError`."""
    try:
        module = load()
    except PluginError:
        raise
    except (Exception, SystemExit) as error:
        # Frames of the import machinery itself are skipped.
        frames: list[tuple[str | None, int | None]] = [
            (frame.filename, frame.lineno)
            for frame in traceback.extract_tb(error.__traceback__)
            if not frame.filename.startswith("<") and frame.filename != importlib.__file__
        ]
        # The traceback of a syntax error ends where the file was compiled.
        if isinstance(error, SyntaxError):
            frames.append((error.filename, error.lineno))
        where = ""
        if frames:
            file, line = frames[-1]
            where = f" ({file}, line {line})"
        raise PluginError(
            f"{source.subject} cannot be imported: {reason(error)}{where}. Correct it, or leave it"
            f" out with RETRIEVAL_BLOCK={source.plugin}."
        ) from error
    if not isinstance(module, ModuleType):
        raise PluginError(
            f"{source.subject} is an object of type {type(module).__name__}; its entry point must"
            " name a module."
        )
    return module


def import_extra(item: str) -> ModuleType:
    """Import and return the module of a plugin that is named as a file, folder or module."""
    if is_file_plugin(item):
        return FilePlugin.from_name(item).load()
    missing = PluginError(
        f"There is no module '{item}' to load as a plugin. A file's name must end in .py, a"
        " folder's in /."
    )
    if not all(item.split(".")):
        raise missing
    try:
        return importlib.import_module(item)
    except ModuleNotFoundError as error:
        if f"{item}.".startswith(f"{error.name}."):
            raise missing from error
        raise  # the module exists, but one of its imports is missing


def refuse_misspelt(source: PluginSource, module: ModuleType) -> None:
    """Raise a `PluginError` for an unknown hook, or a function named like a hook but not marked.

    A plugin that is named as a file, folder or module must also mark at least one hook.
    """
    hooks = [name for name in vars(hookspecs) if name.startswith("retrieval_")]
    marks = {}
    for name, value in list(vars(module).items()):
        mark = getattr(value, "retrieval_impl", None)
        if isinstance(mark, dict):
            marks[name] = mark.get("specname") or name
    for hook in marks.values():
        if hook not in hooks:
            raise PluginError(
                f"{source.subject} marks '{hook}' as a hook, and there is no such hook."
                f"{did_you_mean(hook, hooks)}"
            )
    for name in hooks:
        if name not in marks and inspect.isfunction(vars(module).get(name)):
            raise PluginError(
                f"{source.subject} defines {name} without @retrieval.plugin.hookimpl above it, so"
                " it would never be called. Add that line, or rename the function."
            )
    if not marks and source.origin.startswith(("file ", "folder ", "module ")):
        raise PluginError(
            f"{source.subject} marks no hook, so it offers nothing. Define a function such as"
            " retrieval_losses, with @retrieval.plugin.hookimpl above it."
        )


def reason(error: BaseException) -> str:
    """Return an exception's class and message on one line, without the final period."""
    text = str(error.msg if isinstance(error, SyntaxError) else error)
    return f"{type(error).__name__}: {' '.join(text.split())}".rstrip(": .")


# --- permission to run the plugin files that come with a recipe or a run's folder

ALLOW = "RETRIEVAL_ALLOW_PLUGINS"
_YES = "1"

Ask = Callable[[str], bool]
_ask: ContextVar[Ask | None] = ContextVar("ask", default=None)


@contextlib.contextmanager
def answering(ask: Ask | None, allowed: bool = False) -> Iterator[None]:
    """Context manager that sets who decides whether plugins may run.

    Args:
        ask: called with a sentence that names the files; returns whether the files may run.
            `None` refuses them.
        allowed: whether plugins may run without asking.
    """
    token = _ask.set(ask)
    setting = os.environ.get(ALLOW)
    if allowed:
        os.environ[ALLOW] = _YES
    try:
        yield
    finally:
        _ask.reset(token)
        if setting is None:
            os.environ.pop(ALLOW, None)
        else:
            os.environ[ALLOW] = setting


def require_allowed(items: Sequence[str], where: Path) -> None:
    """Raise a `PluginError` unless the user allows the plugin files that a recipe brings."""
    if os.environ.get(ALLOW) == _YES:
        return
    files = dict.fromkeys(file for item in items for file in _sources(item, where.parent))
    if not files:
        return
    what = "a plugin file that runs"
    them = "it"
    if len(files) > 1:
        what = "plugin files that run"
        them = "them"
    brings = f"{where} brings {what} with your rights: {', '.join(map(str, files))}."
    ask = _ask.get()
    if ask is None or not ask(brings):
        raise PluginError(
            f"{brings} Nothing was run. Read {them}, then repeat the command"
            f" with --allow-plugins (in Python with {ALLOW}=1 in the environment)."
        )
    # Ask once: the answer holds for the command's other recipes and its child processes.
    os.environ[ALLOW] = _YES


def _sources(item: str, recipe_folder: Path) -> list[Path]:
    """Return the files that loading a plugin runs, and a package's folder.

    A module counts only if it lies in the working folder or beside the recipe, not if it is
    installed.
    """
    if is_file_plugin(item):
        if not Path(item).exists():
            return []  # loading it reports the missing file
        return [file for file in FilePlugin.from_name(item).files.values() if file.suffix == ".py"]
    name = item.partition(".")[0]
    if name in sys.modules or not name.isidentifier():
        return []
    try:
        spec = importlib.util.find_spec(name)  # imports nothing, as the name has no dots
    except (ImportError, ValueError):
        return []
    if spec is None:
        return []
    local = [Path.cwd().resolve(), recipe_folder.resolve()]
    # A virtual environment often lies in the working folder.
    schemes = ("stdlib", "purelib", "platlib")
    installed = [Path(sysconfig.get_path(scheme)).resolve() for scheme in schemes]
    paths = []
    for location in (spec.origin, *(spec.submodule_search_locations or ())):
        # The origin of a built-in module is the text "built-in".
        if not location or not Path(location).exists():
            continue
        path = Path(location).resolve()
        is_local = any(map(path.is_relative_to, local))
        if is_local and not any(map(path.is_relative_to, installed)):
            paths.append(path)
    return paths
