"""`from retrieval_anml import LANML`: each plugin's public names load on first use, and type
checkers see what they are.
"""

from __future__ import annotations

import ast
import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ONE_OF_EACH = {
    "aml": "GMML",
    "anml": "LANML",
    "core": "PCA",
    "daml": "TripletLoss",
    "metric_learn": "LMNN",
    "oahu": "OAHU",
    "sets": "cub200",
}
each = pytest.mark.parametrize("plugin", ONE_OF_EACH)


def names(plugin: str) -> tuple[set[tuple[str, str]], set[tuple[str, str]]]:
    """The names, with their modules, that load on first use, and those that type checkers are told
    of.
    """
    tree = ast.parse(
        (ROOT / "plugins" / f"retrieval_{plugin}" / "__init__.py").read_text(encoding="utf-8")
    )
    homes, told = {}, set()
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id == "lazy"
        ):
            homes = ast.literal_eval(node.args[1])
        if (
            isinstance(node, ast.If)
            and isinstance(node.test, ast.Name)
            and node.test.id == "TYPE_CHECKING"
        ):
            for line in node.body:
                if isinstance(line, ast.ImportFrom) and str(line.module).startswith("retrieval_"):
                    assert all(name.asname == name.name for name in line.names), (
                        "say `X as X`: it is exported"
                    )
                    told |= {(str(line.module), name.name) for name in line.names}
    return {(module, name) for module, each in homes.items() for name in each}, told


def test_every_plugin_with_names_is_tried() -> None:
    lazily = {
        p.parent.name
        for p in (ROOT / "plugins").glob("*/__init__.py")
        if " = lazy(" in p.read_text("utf-8")
    }
    assert lazily == {f"retrieval_{plugin}" for plugin in ONE_OF_EACH}


@each
def test_what_loads_is_what_type_checkers_see(plugin: str) -> None:
    loads, told = names(plugin)
    assert loads == told and ONE_OF_EACH[plugin] in {name for _, name in loads}
    package = importlib.import_module(f"retrieval_{plugin}")
    for module, name in loads:
        assert getattr(package, name) is getattr(importlib.import_module(module), name)
        assert name in dir(package)
