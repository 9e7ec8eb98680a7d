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


def told(plugin: str) -> set[tuple[str, str]]:
    """The names for type checkers, with their modules."""
    path = ROOT / "plugins" / f"retrieval_{plugin}" / "__init__.py"
    return {
        (str(node.module), name.name)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("retrieval_")
        for name in node.names
        if name.asname == name.name  # it is exported
    }


def test_every_plugin_with_names_is_tried():
    lazily = {
        p.parent.name
        for p in (ROOT / "plugins").glob("*/__init__.py")
        if " = lazy(" in p.read_text("utf-8")
    }
    assert lazily == {f"retrieval_{plugin}" for plugin in ONE_OF_EACH}


@each
def test_what_loads_is_what_type_checkers_see(plugin):
    package = importlib.import_module(f"retrieval_{plugin}")
    values = {name: getattr(package, name) for name in dir(package)}
    loads = {(getattr(value, "__module__", None), name) for name, value in values.items()}
    loads = {(home, name) for home, name in loads if str(home).startswith(f"{package.__name__}.")}
    assert loads == told(plugin) and ONE_OF_EACH[plugin] in values
