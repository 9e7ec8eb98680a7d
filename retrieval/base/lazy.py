"""Import a package's names on first use."""

from __future__ import annotations

import builtins
import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from retrieval.errors import MissingDependency


def lazy(
    package: str,
    homes: Mapping[str, Any] | Sequence[Mapping[str, Any]],
    modules: Mapping[str, str] | None = None,
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return a package's `__getattr__` and `__dir__`, which import names on first use.

    Args:
        package: the package's name.
        homes: a table that maps modules to the names that they define, or a table that a factory
            hook returns (values `MODULE:NAME`), or a list of such tables.
        modules: further names, and the modules that they stand for.
    """
    home: dict[str, str] = {}
    tables: Sequence[Mapping[str, Any]] = [homes] if isinstance(homes, Mapping) else homes
    for key, value in (entry for table in tables for entry in table.items()):
        if isinstance(value, str):
            module, _, name = value.partition(":")
            home[name] = module
        else:
            home |= dict.fromkeys(value, key)
    modules = modules or {}

    def getter(name: str) -> Any:
        if name in modules:
            value: Any = importlib.import_module(modules[name])
        elif name in home:
            try:
                value = getattr(importlib.import_module(home[name]), name)
            except ModuleNotFoundError as error:
                if (error.name or "").startswith("retrieval"):
                    raise
                raise MissingDependency(
                    f"{package}.{name} needs {error.name}, {how_to_have(error.name or '')}"
                ) from error
        else:
            raise AttributeError(
                f"module '{package}' has no attribute '{name}'", name=name, obj=sys.modules[package]
            )
        # Later look-ups skip this function.
        setattr(sys.modules[package], name, value)
        return value

    return getter, lambda: sorted({*home, *modules, *vars(sys.modules[package])})


def lazy_names(
    package: str, modules: Mapping[str, str] | None = None
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return a module's `__getattr__`, `__dir__` and `__all__`, read from the module's own source.

    The names are those that its block `if TYPE_CHECKING:` imports as `from m import X as X`; see
    `lazy` for `modules`.
    """
    import ast

    source = Path(sys.modules[package].__file__ or "").read_text(encoding="utf-8")
    blocks = [node for node in ast.parse(source).body if isinstance(node, ast.If)]
    block = next(node for node in blocks if ast.unparse(node.test) == "TYPE_CHECKING")
    homes = {
        alias.name: f"{node.module}:{alias.name}"
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.asname  # X as X
    }
    return *lazy(package, homes, modules), sorted({*homes, *(modules or ())})


def defer_import(module: str, importer: str) -> None:
    """Let the statement `import package.module` of one other module import only the package.

    The package must import the module itself when its attribute is first read, as SciPy does.
    Other importers of the module are not affected, in any thread.

    Args:
        module: full name of the module to import later.
        importer: full name of the module with the statement, if it is not imported yet.
    """
    sys.meta_path.insert(0, _DeferringFinder(module, importer))


class _DeferringFinder(MetaPathFinder):
    """Finds one module, and loads it as `defer_import` says."""

    def __init__(self, module: str, importer: str) -> None:
        self.module = module
        self.importer = importer

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self.importer:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            spec.loader = _DeferringLoader(fullname, spec.loader.path)
            spec.loader.deferred = self.module
        return spec


class _DeferringLoader(SourceFileLoader):
    deferred: str

    def exec_module(self, module: ModuleType) -> None:
        def import_(name: str, *values: Any, **options: Any) -> Any:
            if name == self.deferred:
                name = name.rpartition(".")[0]
            return builtins.__import__(name, *values, **options)

        # An `import` statement calls the function of this name among its module's built-ins.
        vars(module)["__builtins__"] = vars(builtins) | {"__import__": import_}
        super().exec_module(module)


def how_to_have(module: str) -> str:
    """Return what to install for a missing module, as the end of a sentence that names it."""
    root, _, inner = module.partition(".")
    if inner and find_spec(root) is not None:
        return (
            f"which the installed {root} lacks: it is too old or damaged. `retrieval doctor` says"
            " what versions are needed."
        )
    if not any(map(find_spec, ("torch", "onnxruntime", "faiss"))):
        return (
            "and only the base of the package is installed. Install what you use: pip install"
            " 'embedding-retrieval[cpu,train,serve]' installs everything; write gpu instead of cpu"
            " for a CUDA device, and leave out train where models are only served."
        )
    extras = {
        "faiss": "cpu",
        "httpx": "client",
        "onnxruntime": "cpu",
        "starlette": "serve",
        "uvicorn": "serve",
        "multipart": "serve",
        "timm": "timm",
        "tokenizers": "serve",
    }
    return (
        "which is not installed. Install it: pip install"
        f" 'embedding-retrieval[{extras.get(root, 'train')}]'."
    )
