"""Imports go down the floors, without circles; plugins are independent; heavy imports are late."""

from __future__ import annotations

import ast
import json
import shutil
from collections.abc import Callable, Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any

import retrieval.helpers
import retrieval.plugin

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "retrieval"
PLUGINS = ROOT / "plugins"
FLOORS = [
    {"errors"},
    {"base"},
    {"host"},
    {"images"},
    {"bundle"},
    {"store"},
    {"index"},
    {"feedback"},
    {"model"},
    {"metrics"},
    {"recipe"},
    {"data"},
    {"run"},
    {"evaluation", "export"},
    {"training"},
    {"cli"},
    {"client", "helpers", "plot", "plugin", "results"},
    {"__init__"},
]
"""Floors, lowest first. A module imports only from lower floors and its own folder, which includes
imports in functions and for type checkers.
"""

PUBLIC = {
    "retrieval.errors",
    "retrieval.base.arrays",
    "retrieval.helpers",
    "retrieval.plugin",
    "retrieval.results",
}
SERVING = {"errors", "base", "host", "images", "bundle", "store", "index", "feedback"}
TRAINING = {"model", "metrics", "recipe", "data", "run", "evaluation", "export", "training"}
MOST_ENTRIES, MOST_INNER, MOST_FACE = 23, 10, 36
FACES = {"retrieval", "retrieval.client", "retrieval.results"}
"""Modules of public names, which name the modules of applications as text or for type checkers."""
APPLICATIONS = {
    *("retrieval_engines", "retrieval_exports", "retrieval_feedback", "retrieval_hub"),
    *("retrieval_lab", "retrieval_mcp", "retrieval_server"),
}
"""Plugins of this distribution that are built on the rooms; the others import only `PUBLIC`."""
INNER = {
    "retrieval.data.loading": {"retrieval_samplers"},
    "retrieval.metrics.recall_map_ndcg": {"retrieval_metrics"},
    "retrieval.model.loss_division": {"Shard", "world_of"},
    "retrieval.store.backends": {"retrieval_indexes"},
    "retrieval.index.read_embeddings": {"in_memory"},
    "retrieval.index.sources": {"collect", "npz_file"},
    "retrieval.store.find_store": {"retrieval_stores"},
}
"""Names that plugins import from other modules than `PUBLIC`."""


def modules(root: Path) -> Iterator[tuple[str, Path]]:
    """Yield every module below a folder: its dotted name and its path."""
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root.parent).with_suffix("").parts
        yield ".".join(parts).removesuffix(".__init__"), path


def imports(path: Path, above: Path, of: Callable = lambda tree: tree) -> Iterator[tuple[str, str]]:
    """Yield each imported module of a file with the imported name ("" for the module itself)."""
    for node in ast.walk(of(ast.parse(path.read_text(encoding="utf-8")))):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively"
            # `from retrieval.run import checkpoint` imports a module; `from retrieval.plugin import
            # hookimpl` imports a name.
            for alias in node.names:
                home = above.joinpath(*(node.module or "").split("."), alias.name)
                is_module = (home / "__init__.py").is_file() or home.with_suffix(".py").is_file()
                module = f"{node.module}.{alias.name}" if is_module else str(node.module)
                yield module, "" if is_module else alias.name


def folder(module: str) -> str:
    """`retrieval.training.trainer` → `training`."""
    return module.split(".")[1] if "." in module else "__init__"


def rising(package: Path) -> list[str]:
    """Return the imports of a package that do not go down, each as a sentence."""
    floor = {name: number for number, names in enumerate(FLOORS) for name in names}
    return [
        f"{module} imports {target}"
        for module, path in modules(package)
        for target, _ in imports(path, package.parent)
        if target.partition(".")[0] == "retrieval"
        and folder(target) != folder(module)
        and floor[folder(target)] >= floor[folder(module)]
    ]


class Running(ast.NodeTransformer):
    """Drops the blocks that only type checkers read, where circles are allowed."""

    def visit_If(self, node: ast.If) -> ast.AST | None:
        return None if ast.unparse(node.test) == "TYPE_CHECKING" else self.generic_visit(node)


def circle(package: Path) -> list[str]:
    """Return a circle of a package's modules that import each other at run time, or []."""
    graph = {}
    for module, path in modules(package):
        targets = {target for target, _ in imports(path, package.parent, Running().visit)}
        graph[module] = {t for t in targets if t != module and t.startswith(package.name)}
    try:
        list(TopologicalSorter(graph).static_order())
    except CycleError as error:
        return list(error.args[1])
    return []


def test_every_folder_is_a_floor():
    names = {path.stem for path in PACKAGE.iterdir()} - {"py", "__pycache__"}
    assert names == set().union(*FLOORS) and len(names) <= MOST_ENTRIES


def test_imports_go_down():
    assert not rising(PACKAGE)


def test_an_upward_import_is_detected(tmp_path):
    copy = Path(shutil.copytree(PACKAGE, tmp_path / "retrieval"))
    with (copy / "bundle" / "distances.py").open("a") as file:
        file.write("\ndef late() -> None:\n    from retrieval.model.model import Model\n")
    assert rising(copy) == ["retrieval.bundle.distances imports retrieval.model.model"]


def test_no_modules_import_each_other_in_a_circle():
    assert not circle(PACKAGE)
    for plugin in plugins():
        assert not circle(PLUGINS / plugin)


def test_a_circle_is_detected(tmp_path):
    copy = Path(shutil.copytree(PACKAGE, tmp_path / "retrieval"))
    with (copy / "recipe" / "tables.py").open("a") as file:
        file.write("\ndef late() -> None:\n    from retrieval.recipe.read import read_recipe\n")
    assert {"retrieval.recipe.tables", "retrieval.recipe.read"} <= set(circle(copy))


def plugins() -> set[str]:
    return {path.name for path in PLUGINS.iterdir() if (path / "__init__.py").is_file()}


def test_the_rooms_import_no_plugin_and_plugins_not_each_other():
    names = plugins()
    assert {"retrieval_core", "retrieval_pml"} <= names
    for root in (PACKAGE, *(PLUGINS / name for name in names)):
        for module, path in modules(root):
            targets = {target.partition(".")[0] for target, _ in imports(path, PLUGINS)}
            allowed = {root.name, *(APPLICATIONS if module in FACES else ())}
            foreign = targets & ({*names, "plugins"} - allowed)
            assert not foreign, f"{module} imports {foreign}"


def test_plugins_import_the_face_and_what_is_listed():
    used = {
        (target, name)
        for plugin in plugins() - APPLICATIONS
        for _, path in modules(PLUGINS / plugin)
        for target, name in imports(path, ROOT)
        if target.startswith("retrieval.") and target not in PUBLIC
    }
    allowed = {(module, name) for module, names in INNER.items() for name in names}
    assert len(allowed) <= MOST_INNER
    assert not used - allowed, "import it from `retrieval.plugin` or `.helpers`, or add it to INNER"
    assert not allowed - used, "no plugin imports it; remove it from INNER"


def test_authors_need_few_names_and_plugins_use_every_helper():
    assert len(retrieval.plugin.__all__) <= MOST_FACE
    used = {
        name
        for plugin in plugins()
        for _, path in modules(PLUGINS / plugin)
        for target, name in imports(path, ROOT)
        if target == "retrieval.helpers"
    }
    assert used == set(retrieval.helpers.__all__)


HEAVY = {"torch", "torchvision", "pytorch_metric_learning", "onnx", "onnxruntime", "faiss"}
HEAVY |= {"sklearn", "scipy", "numpy", "PIL", "matplotlib", "accelerate", "pydantic"}
HEAVY |= {"docstring_parser", "starlette", "uvicorn", "tqdm"}
SHOW = "import json, sys; print(json.dumps(sorted(sys.modules)))"


def loaded(process: Callable[..., Any], code: str) -> set[str]:
    """Return the modules that a new process has loaded after running some code."""
    done = process("-c", f"{code}\n{SHOW}")
    assert done.code == 0, done.err
    return set(json.loads(done.out.splitlines()[-1]))


def test_import_retrieval_is_light(process):
    modules = loaded(process, "import retrieval; dir(retrieval)")
    assert not modules & HEAVY
    light = {"errors", "base", "base.machine", "base.lazy"}
    assert {m for m in modules if m.startswith("retrieval.")} == {f"retrieval.{m}" for m in light}


def test_help_is_light(process):
    code = """
import io, contextlib, sys
from retrieval.cli.app import COMMANDS, main
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
"""  # noqa: E501
    assert not loaded(process, code) & HEAVY


def test_the_serving_side_never_imports_the_training_side(process):
    low = [name for name, _ in modules(PACKAGE) if folder(name) in SERVING]
    server = [name for name, _ in modules(PLUGINS / "retrieval_server")]
    low += [name for name in server if not name.endswith(".commands")]  # these are part of `cli`
    assert len(low) > 90
    names = loaded(process, "\n".join(f"import {name}" for name in low))
    training = {"torch", "torchvision", "pytorch_metric_learning", "sklearn", "accelerate"}
    assert not names & {*training, "matplotlib"}
    assert not {folder(m) for m in names if m.startswith("retrieval.")} & {*TRAINING, "cli"}
    others = plugins() - {"retrieval_server"}
    assert not {name.partition(".")[0] for name in names} & others


def test_loading_plugins_and_reading_recipes_loads_no_torch(process):
    modules = "retrieval.recipe.read, retrieval.host.describe, retrieval.host.scaffold"
    names = loaded(process, f"import {modules}; retrieval.host.plugins.load_plugins()")
    assert {"retrieval_core", "retrieval_pml"} <= names
    assert not names & {"torch", "sklearn", "numpy", "PIL"} and "plugins" not in names


def test_a_built_in_back_end_needs_no_other_plugin_and_no_torch(process):
    code = """
from retrieval.store.backends import make_backend
for name in ("flat", "hnsw", "ivf"):
    assert type(make_backend(name, {})) is type(make_backend(f"core.{name}", {})), name
"""
    names = loaded(process, code)
    assert "retrieval.store.backends" in names
    assert not {m for m in names if m.startswith("retrieval_")} and not names & {"torch", "sklearn"}
