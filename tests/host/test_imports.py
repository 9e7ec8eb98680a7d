"""Who imports whom: one way, the serving side without the training side, plugins without each other, and nothing early."""

from __future__ import annotations

import ast
import json
from collections.abc import Callable, Iterator
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "retrieval"
PLUGINS = ROOT / "plugins"

HOST = {
    "errors",
    "hookspecs",
    "values",
    "signature",
    "factory",
    "file_plugins",
    "importing",
    "trust",
    "plugins",
    "plugin_calls",
}
TRAINING = {
    "contracts",
    "guard",
    "products",
    "model",
    "data",
    "encode",
    "recipe",
    "tables",
    "rules",
    "overrides",
    "train",
    "evaluate",
    "export",
}
ALLOWED: dict[str, set[str]] = {
    # what every side stands on
    "errors": set(),
    "locks": {"errors"},
    "snapshot": {"errors"},
    "strict_json": {"errors"},
    "hookspecs": set(),
    "values": {"errors"},
    "file_plugins": {"errors"},
    "merging": set(),
    "renaming": {"errors"},
    "plugin_calls": {"errors"},
    "progress": {"errors"},
    "image_files": {"errors", "images"},
    "places": set(),
    "columns": set(),
    "signature": set(),
    "factory": {"errors", "signature", "values"},
    "importing": {"errors", "hookspecs", "file_plugins"},
    "trust": {"errors", "file_plugins"},
    "plugins": {"errors", "hookspecs", "factory", "importing"},
    # the training side
    "overrides": {"errors", "values"},
    "tables": set(),
    "recipe": {"errors", "values", "factory", "file_plugins", "plugins", "overrides", "tables", "trust"},
    "rules": {"errors", "factory", "plugins"},
    "contracts": {"errors", "images"},
    "guard": {"contracts", "errors", "plugin_calls"},
    "products": {"contracts", "errors", "guard", "images", "plugin_calls"},
    "precision": set(),
    "model": {"contracts", "images", "precision"},
    "loss": {"errors", "factory", "precision"},
    "linear": set(),
    "linear_head": set(),
    "data": {"errors", "image_files", "images", "contracts", "data", "progress"},
    "encode": {"contracts", "data", "model", "progress"},
    "evaluate": {
        "errors",
        "contracts",
        "data",
        "encode",
        "evaluate",
        "merging",
        "model",
        "plugins",
        "products",
        "recipe",
        "train",
    },
    "train": HOST | TRAINING | {"images", "locks", "places", "progress"},
    "export": HOST
    | TRAINING
    | {"images", "locks", "manifest", "strict_json", "bundle", "merging", "renaming"},
    # the serving side
    "screening": {"errors", "screening"},
    "images": {"errors", "screening"},
    "memory": set(),
    "decoder_process": {"errors", "images", "memory"},
    "decoder_worker": {"errors", "images", "decoder_process"},
    "decoders": {"errors", "images", "decoder_process", "decoder_worker"},
    "runtime": {"errors"},
    "doctor": {"runtime"},
    "manifest": {"errors", "images", "snapshot", "strict_json", "places"},
    "graphs": set(),
    "signatures": {"errors", "runtime", "snapshot"},
    "sessions": {"errors", "graphs", "manifest", "runtime", "snapshot"},
    "bundle": {"errors", "images", "manifest", "sessions", "snapshot"},
    "index": {
        "errors",
        "images",
        "decoders",
        "locks",
        "snapshot",
        "strict_json",
        "manifest",
        "bundle",
        "merging",
        "runtime",
        "index",
        "columns",
        "plugin_calls",
        "renaming",
        "places",
        "progress",
        "image_files",
    },
    "serve": {
        "errors",
        "images",
        "decoders",
        "memory",
        "bundle",
        "index",
        "runtime",
        "server_settings",
        "serve",
    },
    "server_settings": set(),
    # what the command line is made of
    "describe": HOST | {"recipe"},
    "scaffold": HOST,
    "demo": {"errors", "images", "train", "bundle", "index"},
    "commands": {"commands", "errors", "server_settings"},
    "cli": {"errors"},
    "__init__": {"hookspecs"},
}
"""The parts of the host, and what each may import when it is imported itself."""

LAZY: dict[str, set[str]] = {
    "linear": {"linear_head"},  # the model's head, made with torch
    "recipe": {"rules"},
    "rules": {"evaluate", "train"},  # the names of metrics, optimisers and schedules
    "evaluate": {"bundle"},  # a bundle beside the run
    "export": {"runtime"},
    "index": {"factory", "plugins", "trust", "signatures"},
    "bundle": {"signatures"},
    "signatures": {"bundle", "index"},  # a plugin's back end, only when one is named
    "demo": {"recipe", "evaluate", "export"},
    "cli": {"plugins", "__init__"},
    "commands": HOST
    | TRAINING
    | {
        "describe",
        "scaffold",
        "demo",
        "doctor",
        "images",
        "bundle",
        "index",
        "serve",
        "signatures",
        "runtime",
        "places",
        "progress",
    },
}
"""What a function in each may import besides, when it is called."""

SERVING = [
    "plugin_calls",
    "renaming",
    "columns",
    "image_files",
    "places",
    "progress",
    "errors",
    "locks",
    "snapshot",
    "strict_json",
    "graphs",
    "sessions",
    "screening",
    "images",
    "memory",
    "decoder_process",
    "decoders",
    "runtime",
    "manifest",
    "bundle",
    "index",
    "server_settings",
    "serve",
]


def modules(root: Path) -> Iterator[tuple[str, Path]]:
    """Every module below a folder, by its dotted name."""
    for path in sorted(root.rglob("*.py")):
        yield ".".join(path.relative_to(root.parent).with_suffix("").parts).removesuffix(".__init__"), path


def imports(path: Path) -> Iterator[tuple[str, bool]]:
    """The modules that a file imports, and whether only in a function; what only type checkers see is left out."""

    def visit(node: ast.AST, lazy: bool) -> Iterator[tuple[str, bool]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test):
                continue
            if isinstance(child, ast.Import):
                yield from ((alias.name, lazy) for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                assert child.level == 0, f"{path} imports relatively"
                # `from retrieval.train import checkpoint` imports a module, `from retrieval import hookimpl` a name
                for alias in child.names:
                    home = PACKAGE.parent.joinpath(*(child.module or "").split("."), alias.name)
                    is_module = home.is_dir() or home.with_suffix(".py").is_file()
                    yield f"{child.module}.{alias.name}" if is_module else str(child.module), lazy
            else:
                yield from visit(
                    child, lazy or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
                )

    return visit(ast.parse(path.read_text(encoding="utf-8")), False)


def part(module: str) -> str:
    """`retrieval.train.run` → `train`."""
    return module.split(".")[1] if "." in module else "__init__"


def test_the_rules_name_every_part_of_the_host() -> None:
    found = {part(name) for name, _ in modules(PACKAGE)}
    assert found == set(ALLOWED), "a new part: say in ALLOWED what it may import"


@pytest.mark.parametrize("name", sorted(ALLOWED))
def test_imports_go_one_way(name: str) -> None:
    wrong = [
        f"{module} imports {target}{' in a function' if lazy else ''}"
        for module, path in modules(PACKAGE)
        if part(module) == name
        for target, lazy in imports(path)
        if target.partition(".")[0] == "retrieval"
        and part(target) not in ALLOWED[name] | (LAZY.get(name, set()) if lazy else set())
        and not (part(target) == "__init__" and name == "plugins")  # `from retrieval import hookspecs`
    ]
    assert not wrong, "\n".join(wrong)


def test_no_module_imports_itself_in_a_circle() -> None:
    graph = {
        module: {t for t, lazy in imports(path) if not lazy and t.startswith("retrieval.") and t != module}
        for module, path in modules(PACKAGE)
    }
    order = list(TopologicalSorter(graph).static_order())  # raises CycleError, which names the circle
    assert order.index("retrieval.errors") < order.index("retrieval.cli")


def test_the_host_imports_no_plugin_and_plugins_not_each_other() -> None:
    names = {path.name for path in PLUGINS.iterdir() if (path / "__init__.py").is_file()}
    assert {"retrieval_core", "retrieval_pml"} <= names
    for module, path in [*modules(PACKAGE), *(m for name in names for m in modules(PLUGINS / name))]:
        own = module.partition(".")[0]
        foreign = {t.partition(".")[0] for t, _ in imports(path)} & (names - {own})
        assert not foreign, f"{module} imports {foreign}"
        assert "plugins" not in {t.partition(".")[0] for t, _ in imports(path)}


HEAVY = {"torch", "torchvision", "pytorch_metric_learning", "onnx", "onnxruntime", "faiss", "sklearn", "scipy", "numpy",
         "PIL", "matplotlib", "accelerate", "pydantic", "docstring_parser", "starlette", "uvicorn", "tqdm"}  # fmt: skip
SHOW = "import json, sys; print(json.dumps(sorted(sys.modules)))"


def loaded(process: Callable[..., Any], code: str) -> set[str]:
    done = process("-c", f"{code}\n{SHOW}")
    assert done.code == 0, done.err
    return set(json.loads(done.out.splitlines()[-1]))


def test_import_retrieval_is_light(process: Callable[..., Any]) -> None:
    found = loaded(process, "import retrieval; retrieval.hookimpl")
    assert not found & HEAVY
    assert {m for m in found if m.startswith("retrieval.")} == {"retrieval.hookspecs"}


def test_help_is_light(process: Callable[..., Any]) -> None:
    code = """
import io, contextlib, sys
from retrieval.cli import COMMANDS, main
calls = [[], ["--help"], ["--version"], *([name, "--help"] for name in COMMANDS)]
calls += [["plugins", name, "--help"] for name in ("list", "show", "new")]
for call in calls:
    sys.argv = ["retrieval", *call]
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        try:
            main()
        except SystemExit as left:
            assert left.code == (2 if call == [] else 0), (call, left.code, err.getvalue())
    assert "Usage:" in out.getvalue() + err.getvalue() or "version" in out.getvalue(), call
"""
    assert not loaded(process, code) & HEAVY


def test_the_serving_side_never_imports_the_training_side(process: Callable[..., Any]) -> None:
    names = [name for name, _ in modules(PACKAGE) if part(name) in SERVING]
    assert len(names) > 12
    found = loaded(process, "\n".join(f"import {name}" for name in names))
    assert not found & {
        "torch",
        "torchvision",
        "pytorch_metric_learning",
        "sklearn",
        "accelerate",
        "matplotlib",
    }
    assert not {part(m) for m in found if m.startswith("retrieval.")} & {
        *TRAINING,
        "commands",
        "cli",
        "plugins",
    }
    assert not {m for m in found if m.startswith("retrieval_")}


def test_loading_plugins_and_reading_recipes_loads_no_torch(process: Callable[..., Any]) -> None:
    code = "import retrieval.recipe, retrieval.describe, retrieval.scaffold\nretrieval.plugins.load_plugins()"
    found = loaded(process, code)
    assert {"retrieval_core", "retrieval_pml"} <= found
    assert not found & {"torch", "sklearn", "numpy", "PIL"} and "plugins" not in found
