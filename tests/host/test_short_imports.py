"""`from retrieval_anml import LANML`: each plugin's public names load on first use, and type
checkers see what they are.
"""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
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


def test_mypy_sees_the_classes(tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    lines = [f"from retrieval_{plugin} import {name}" for plugin, name in ONE_OF_EACH.items()]
    lines += [f"reveal_type({name})" for name in ONE_OF_EACH.values()]
    lines += ["LANML(gamma_one=1.0)", 'PCA(n_components="3")']
    script = tmp_path / "script.py"
    script.write_text("\n".join(lines) + "\n", encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "mypy", str(script)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=500,
    )
    out, err = done.stdout, done.stderr
    for plugin, name in ONE_OF_EACH.items():
        module = next(module for module, each in names(plugin)[0] if each == name)
        shown = (
            f"-> {module}.{name}" if name[0].isupper() else "-> retrieval.model.contracts.Dataset"
        )
        assert any("Revealed type" in line and shown in line for line in out.splitlines()), (
            out + err
        )
    assert 'Unexpected keyword argument "gamma_one" for "LANML"' in out
    assert 'Argument "n_components" to "PCA" has incompatible type "str"' in out
