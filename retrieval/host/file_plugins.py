"""A plugin that is a file or a folder: what belongs to it, what its content is, how it is imported and copied.

`my_loss.py` is a plugin, and so is the folder `my_plugin/` with an `__init__.py`. Either imports its neighbours by
their plain names (`import helpers`), wherever the command runs: each plugin's modules are its own, so that two plugins,
or two versions of one, may each have a `helpers.py`.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.machinery
import importlib.util
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from retrieval.errors import PluginError

PREFIX = "retrieval_file_plugin_"
"""What the name of such a plugin's module begins with; its neighbours' are below it."""

MOST_FILES, MOST_BYTES = 1_000, 64 << 20
"""A folder with more is refused."""


def is_file_plugin(item: str) -> bool:
    """Whether a recipe's or `--plugin`'s word is a file (`x.py`) or a folder (`x/`), and not a module's name."""
    return item.endswith((".py", "/", os.sep))


@dataclass(frozen=True)
class FilePlugin:
    """A plugin in a file or a folder.

    Attributes:
        path: the file, or the folder.
    """

    path: Path

    @classmethod
    def at(cls, item: str) -> FilePlugin:
        """Return the plugin that a word names.

        Raises:
            PluginError: there is no such file, the folder has no `__init__.py`, or its name is not a Python identifier.
        """
        path = Path(item).resolve()
        if item.endswith(".py"):
            if not path.is_file():
                raise PluginError(f"The plugin file {item} does not exist.")
        elif not path.is_dir():
            raise PluginError(f"The plugin folder {item} does not exist.")
        elif not (path / "__init__.py").is_file():
            raise PluginError(
                f"The plugin folder {item} has no __init__.py, which is where its hooks belong."
            )
        if not path.stem.isidentifier():
            raise PluginError(
                f"The plugin {'file' if path.suffix else 'folder'} {item} must be named like a Python identifier: its name is the plugin's name."
            )
        return cls(path)

    @property
    def name(self) -> str:
        """The plugin's name."""
        return self.path.stem

    @property
    def is_folder(self) -> bool:
        """Whether it is a folder."""
        return not self.path.name.endswith(".py")

    @cached_property
    def home(self) -> Path:
        """The folder that its own modules are looked for in."""
        return self.path if self.is_folder else self.path.parent

    @cached_property
    def entry(self) -> Path:
        """The file with its hooks."""
        return self.path / "__init__.py" if self.is_folder else self.path

    @cached_property
    def files(self) -> dict[str, Path]:
        """All that belongs to it, by the path below `home`: the whole folder, or the file and the neighbours that it imports.

        Raises:
            PluginError: a file is not Python, or cannot be read.
        """
        if self.is_folder:
            return _below(self.path, self.path)
        found: dict[str, Path] = {}
        waiting = [self.entry]
        while waiting:
            file = waiting.pop()
            relative = file.relative_to(self.home).as_posix()
            if relative in found:
                continue
            found[relative] = file
            for name in _imported(_parsed(file), relative=file.parent == self.home):
                neighbour = self.neighbour(name)
                if neighbour is not None and neighbour.is_dir():
                    inside = _below(neighbour, self.home)
                    waiting += [each for each in inside.values() if each.suffix == ".py"]
                    found |= {name: each for name, each in inside.items() if each.suffix != ".py"}
                elif neighbour is not None:
                    waiting.append(neighbour)
        return dict(sorted(found.items()))

    @property
    def sources(self) -> list[str]:
        """Which of `files` are programs."""
        return [name for name in self.files if name.endswith(".py")]

    @cached_property
    def sums(self) -> dict[str, str]:
        """The SHA-256 of each of `files`."""
        try:
            return {name: hashlib.sha256(file.read_bytes()).hexdigest() for name, file in self.files.items()}
        except OSError as error:
            raise _unreadable(error) from error

    def neighbour(self, name: str) -> Path | None:
        """Return the file or folder beside it that `import name` means, or None where that is some other module.

        What is installed, or belongs to Python, keeps its name.
        """
        file, folder = self.home / f"{name}.py", self.home / name
        found = file if file.is_file() else folder if (folder / "__init__.py").is_file() else None
        if found is None or name in sys.stdlib_module_names or name == "retrieval":
            return None
        own = found / "__init__.py" if found.is_dir() else found
        try:
            elsewhere = importlib.machinery.PathFinder.find_spec(name)
        except (ImportError, ValueError):
            elsewhere = None
        if elsewhere is not None and elsewhere.origin and not _same(Path(elsewhere.origin), own):
            return None
        return found

    def scoped(self, name: str) -> str | None:
        """Return what `import name` means in the plugin's own modules, where it is one of these; else None."""
        top, dot, rest = name.partition(".")
        if top == self.name and (self.is_folder or not dot):
            return PREFIX + self.name + dot + rest
        return None if self.neighbour(top) is None else f"{PREFIX}{self.name}.{name}"

    def load(self) -> ModuleType:
        """Import it, anew each time, and return its module.

        Raises:
            Exception: whatever its code raises.
        """
        if _Finder not in sys.meta_path:
            sys.meta_path.insert(0, _Finder)  # before the one that knows nothing of neighbours
        root = PREFIX + self.name
        _forget(root)
        spec = importlib.util.spec_from_file_location(
            root,
            self.entry,
            loader=_Loader(root, str(self.entry), self),
            submodule_search_locations=[str(self.home)],
        )
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[root] = module  # dataclasses and pickling of the plugin's classes look it up
        try:
            spec.loader.exec_module(module)
        except BaseException:
            _forget(root)
            raise
        return module

    def copy(self, folder: Path) -> Path:
        """Copy all that belongs to it into a folder, each file whole or not at all, and return the copy's file or folder.

        A file alone becomes `folder/NAME.py`; one with neighbours `folder/NAME/NAME.py`, with them beside it; a folder
        `folder/NAME`. What an earlier copy had besides is removed.

        Raises:
            OSError: the disk refuses.
        """
        from retrieval.host.files import whole_file  # `--help` loads plugins, and writes nothing

        alone = not self.is_folder and len(self.files) == 1
        target = folder if alone else folder / self.name
        for relative, file in self.files.items():
            place = target / relative
            place.parent.mkdir(parents=True, exist_ok=True)
            with whole_file(place) as temporary:
                shutil.copyfile(file, temporary)
        if alone:
            shutil.rmtree(folder / self.name, ignore_errors=True)
        else:
            (folder / f"{self.name}.py").unlink(missing_ok=True)
            for file in set(_below(target, target).values()) - {target / name for name in self.files}:
                file.unlink()
        return target if self.is_folder else target / self.path.name


class _Loader(importlib.machinery.SourceFileLoader):
    """Loads a plugin's module, in which the plain names of neighbours mean the plugin's own."""

    def __init__(self, fullname: str, path: str, plugin: FilePlugin) -> None:
        super().__init__(fullname, path)
        self.plugin = plugin

    def get_code(self, fullname: str) -> CodeType:
        """Compile the file itself: cached bytecode, of whatever origin, knows nothing of neighbours."""
        path = self.get_filename(fullname)
        tree = _Scoped(self.plugin).visit(ast.parse(self.get_data(path), path))
        code: CodeType = compile(ast.fix_missing_locations(tree), path, "exec", dont_inherit=True)
        return code


class _Finder:
    """Finds the modules below a loaded file plugin."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None, target: Any = None) -> Any:
        """See `importlib.abc.MetaPathFinder`."""
        if path is None or not name.startswith(PREFIX):
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        loader = getattr(sys.modules[name.partition(".")[0]].__spec__, "loader", None)
        if spec is not None and spec.origin:
            if not isinstance(spec.loader, importlib.machinery.SourceFileLoader) or not isinstance(
                loader, _Loader
            ):
                raise ImportError(f"{spec.origin} is not Python source, and a file plugin's modules are")
            spec.loader = _Loader(name, spec.origin, loader.plugin)
        return spec


class _Scoped(ast.NodeTransformer):
    """Rewrites `import helpers` to `import ROOT.helpers as helpers`, where that is a neighbour."""

    def __init__(self, plugin: FilePlugin) -> None:
        self.plugin = plugin

    def visit_Import(self, node: ast.Import) -> ast.Import:
        """`import a`, `import a.b`, `import a.b as c`."""
        names = []
        for alias in node.names:
            own = self.plugin.scoped(alias.name)
            top = alias.name.partition(".")[0]
            if own is None:
                names.append(alias)
            elif alias.asname or top == alias.name:
                names.append(ast.alias(own, alias.asname or top))
            else:  # `import a.b` loads both and binds `a`
                names += [ast.alias(own), ast.alias(self.plugin.scoped(top) or top, top)]
        return ast.copy_location(ast.Import(names), node)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> ast.ImportFrom:
        """`from a.b import c`; a relative import is the plugin's own already."""
        own = self.plugin.scoped(node.module) if node.module and not node.level else None
        return node if own is None else ast.copy_location(ast.ImportFrom(own, node.names, 0), node)


def _imported(tree: ast.Module, relative: bool) -> Iterator[str]:
    """Yield the first word of every module that is imported, at whatever depth of the code."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and (not node.level or relative):
            names = [node.module] if node.module else [alias.name for alias in node.names]
            yield from (name.partition(".")[0] for name in names)


def _parsed(file: Path) -> ast.Module:
    try:
        return ast.parse(file.read_bytes(), str(file))
    except OSError as error:
        raise _unreadable(error) from error
    except (SyntaxError, ValueError) as error:  # ValueError: null bytes
        line = getattr(error, "lineno", None)
        where = f"{file}, line {line}" if line else str(file)
        raise PluginError(
            f"The plugin file {where} is not Python: {getattr(error, 'msg', error)}."
        ) from error


def _below(folder: Path, home: Path) -> dict[str, Path]:
    """Return the files in a folder, by their paths below `home`; what is hidden or compiled is left out.

    Raises:
        PluginError: there are too many of them, or they are too large: it is something else than a plugin.
    """
    found: dict[str, Path] = {}
    size = 0
    for place, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith((".", "__pycache__")))
        for name in sorted(names):
            file = Path(place, name)
            if name.startswith(".") or name.endswith((".pyc", ".tmp")) or not file.is_file():
                continue
            found[file.relative_to(home).as_posix()] = file
            size += file.stat().st_size
            if len(found) > MOST_FILES or size > MOST_BYTES:
                raise PluginError(
                    f"The plugin folder {folder} holds more than {MOST_FILES:,} files or {MOST_BYTES >> 20} MB, all of which "
                    "would be copied into each run. Keep data elsewhere."
                )
    return found


def _forget(root: str) -> None:
    for name in [name for name in sys.modules if name == root or name.startswith(f"{root}.")]:
        del sys.modules[name]


def _same(one: Path, other: Path) -> bool:
    try:
        return one.samefile(other)
    except OSError:
        return False


def _unreadable(error: OSError) -> PluginError:
    return PluginError(f"The plugin file {error.filename} cannot be read: {error.strerror or error}.")
