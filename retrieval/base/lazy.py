"""Import a package's names on first use."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
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
