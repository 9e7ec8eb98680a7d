"""`import retrieval` offers exactly these names, imports little, and shows types to checkers."""

import inspect
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import retrieval

ROOT = Path(__file__).parents[2]

VERBS = {"as_dataset", "check_data", "compare", "create", "evaluate", "load", "names"}
VERBS |= {"read_recipe", "report", "serve", "train"}
CLASSES = {"Encoder", "Index", "Recipe", "Run"}
MODULES = {"errors", "plot", "plugin", "results"}
HELP = {"__version__"}


def test_dir_shows_exactly_the_public_names():
    assert set(dir(retrieval)) == VERBS | CLASSES | MODULES | HELP
    assert set(retrieval.__all__) == set(dir(retrieval)) and len(retrieval.__all__) <= 20


def test_every_name_loads():
    for name in VERBS | CLASSES | MODULES | HELP:
        assert getattr(retrieval, name) is not None
    for module in (retrieval.plugin, retrieval.results):
        assert module.__all__ and all(hasattr(module, name) for name in module.__all__)
    with pytest.raises(AttributeError, match="no attribute 'trian'") as missing:
        retrieval.trian  # noqa: B018
    assert missing.value.name == "trian" and missing.value.obj is retrieval  # Python suggests by it


def test_the_serving_half_needs_no_torch(process):
    code = "import retrieval, sys; retrieval.Index.create, retrieval.Encoder, retrieval.load; "
    assert process("-c", code + "print('torch' in sys.modules)").out.split() == ["False"]


def returned(owner: Any) -> set[str]:
    """Return the names of types that an object's public methods, or a function, return."""
    functions = (
        [owner]
        if inspect.isfunction(owner)
        else [
            getattr(value, "__func__", value)
            for name, value in inspect.getmembers(owner)
            if callable(value) and not name.startswith("_") and name in dir(owner)
        ]
    )
    texts = [str(getattr(function, "__annotations__", {}).get("return")) for function in functions]
    return {name for text in texts for name in re.findall(r"\b[A-Z]\w+", text)}


def test_all_that_is_returned_is_public():
    names = {name for item in (*VERBS, *CLASSES) for name in returned(getattr(retrieval, item))}
    arrays = {"Embeddings", "Floats", "Floats32", "NDArray"}
    standard = {"AbstractContextManager", "Any", "Dict", "Iterator", "None", "Path", "Self"}
    public = {*retrieval.__all__, *retrieval.results.__all__, *retrieval.plugin.__all__}
    assert {"RunEvaluation", "Migrated", "BundleEncoder"} <= names
    assert not names - public - arrays - standard


def test_a_bare_install_names_what_it_lacks(process):
    bare = """
import importlib.abc, sys
class Bare(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "faiss", "onnxruntime", "sklearn", "starlette"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Bare())
import importlib.util
real = importlib.util.find_spec
def find_spec(name, package=None):
    try:
        return real(name, package)
    except ModuleNotFoundError:
        return None
importlib.util.find_spec = find_spec
"""
    says = r"needs torch, .*pip install 'embedding-retrieval\[cpu,train,serve\]'"
    done = process("-c", bare + "import retrieval; retrieval.load('core.convnet')")
    assert re.search(rf"MissingDependency: .*{says}", done.err)
    call = "sys.argv = ['retrieval', 'demo']\nfrom retrieval.cli.app import main\nmain()"
    done = process("-c", bare + call)
    assert done.code == 2 and re.search(f"^Error: this command {says}", done.err)
    assert "Traceback" not in done.err


TYPED = """
from pathlib import Path
from typing import Any, assert_type
import retrieval
from retrieval.results import BundleEncoder

run = retrieval.train("recipe.toml", "runs/a", progress=False)
assert_type(run, retrieval.Run)
assert_type(run.evaluate(side="test"), retrieval.results.RunEvaluation)
encoder = run.export("bundle")
assert_type(encoder, BundleEncoder)
index = retrieval.Index.create(Path("photos.index"), "photos", model=encoder)
assert_type(index, retrieval.Index)
assert_type(retrieval.Index.open("photos.index"), retrieval.Index)
assert_type(index.search("query.jpg"), retrieval.results.Hits)
assert_type(index.add(images=[b""], ids=["a"]), retrieval.results.Added)
assert_type(retrieval.report(["runs/a", run.path], map="pca"), Path)
assert_type(retrieval.check_data("photos", model="bundle").clean, bool)
assert_type(retrieval.compare([Path("a.toml"), "b.toml"], seeds=3, progress=False).conclusion, str)
assert_type(retrieval.names("loss"), list[str])
assert_type(retrieval.create("loss", "pml.triplet_margin", margin=0.1), Any)
assert_type(retrieval.read_recipe({"data": {}}), retrieval.Recipe)
assert_type(retrieval.Recipe(data={}), retrieval.Recipe)
assert_type(retrieval.__version__, str)
error: retrieval.errors.RetrievalError = retrieval.errors.RecipeError(["x"])
contracts: tuple[type, ...] = (retrieval.plugin.Backbone, retrieval.plugin.Combiner)
reveal_type(retrieval.evaluate)
reveal_type(retrieval.serve)
reveal_type(retrieval.plugin.CheckedLoss)
reveal_type(retrieval.trian)
"""


def test_a_type_checker_sees_the_types(tmp_path):
    file = tmp_path / "typed.py"
    file.write_text(TYPED, encoding="utf-8")
    # In the repository's folder, mypy uses setup.cfg and one cache for all such tests.
    command = [sys.executable, "-m", "mypy", str(file)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500)
    lines = done.stdout.splitlines()
    errors = [line for line in lines if ": error:" in line]
    assert len(errors) == 1 and 'Module has no attribute "trian"' in errors[0], done.stdout
    revealed = [line.partition("Revealed type is ")[2] for line in lines if "Revealed type" in line]
    assert len(revealed) == 4 and all("def (" in text for text in revealed[:3])


def test_opening_a_run_takes_every_part_that_an_object_can_replace():
    from retrieval.run.folder import WORDS, objects_of

    assert objects_of(**dict.fromkeys(WORDS.values())) == {}
    with pytest.raises(TypeError, match=r"no part 'losss' .*The parts are dataset, .*loss"):
        objects_of(losss=None)
