"""`from retrieval_anml import LANML`: public names load on first use."""

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
    """The names, with their modules, that load on first use, and those for type checkers."""
    path = ROOT / "plugins" / f"retrieval_{plugin}" / "__init__.py"
    nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    calls = [node for node in nodes if isinstance(node, ast.Call)]
    (homes,) = (ast.literal_eval(c.args[1]) for c in calls if ast.unparse(c.func) == "lazy")
    told = {
        (str(node.module), name.name)
        for node in nodes
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("retrieval_")
        for name in node.names
        if name.asname == name.name  # it is exported
    }
    return {(module, name) for module, listed in homes.items() for name in listed}, told


def test_every_plugin_with_names_is_tried():
    inits = (ROOT / "plugins").glob("*/__init__.py")
    lazily = {p.parent.name for p in inits if " = lazy(" in p.read_text("utf-8")}
    assert lazily == {f"retrieval_{plugin}" for plugin in ONE_OF_EACH}


@each
def test_what_loads_is_what_type_checkers_see(plugin):
    loads, told = names(plugin)
    assert loads == told and ONE_OF_EACH[plugin] in {name for _, name in loads}
    package = importlib.import_module(f"retrieval_{plugin}")
    for module, name in loads:
        assert getattr(package, name) is getattr(importlib.import_module(module), name)
        assert name in dir(package)
