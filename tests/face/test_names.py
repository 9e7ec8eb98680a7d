"""What `import retrieval` offers: exactly these names, lightly, with their types."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import retrieval

ROOT = Path(__file__).parents[2]

VERBS = {
    "build_index",
    "check_data",
    "compare",
    "create",
    "evaluate",
    "evaluate_run",
    "export_backbone",
    "export_run",
    "load_run",
    "names",
    "open_bundle",
    "open_index",
    "read_recipe",
    "report",
    "serve",
    "train",
    "verify_run",
}
CLASSES = {"AsyncClient", "Bundle", "Client", "Index", "Recipe", "Run"}
CONTRACTS = {
    "Backbone",
    "Combiner",
    "Dataset",
    "Generator",
    "IndexBackend",
    "Item",
    "Learner",
    "Loss",
    "Metric",
    "Miner",
    "Preprocessing",
    "Store",
    "Subspace",
    "TrackedRun",
    "Tracker",
    "Transform",
    "TripletIndices",
}
HELP = {
    "CheckedLoss",
    "LinearMap",
    "Part",
    "__version__",
    "client",
    "hookimpl",
    "plot",
    "stores",
    "testing",
    "traits",
}
ERRORS = {
    "BundleError",
    "DataError",
    "MissingDependency",
    "PluginError",
    "RecipeError",
    "RetrievalError",
    "ServerError",
    "StoreError",
}


def test_dir_shows_exactly_the_face() -> None:
    assert set(dir(retrieval)) == VERBS | CLASSES | CONTRACTS | HELP | ERRORS
    assert set(retrieval.__all__) == set(dir(retrieval))


def test_every_name_loads() -> None:
    for name in dir(retrieval):
        value = getattr(retrieval, name)
        assert callable(value) or name in (
            "client",
            "plot",
            "stores",
            "testing",
            "__version__",
            "TripletIndices",
            "hookimpl",
        )
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        retrieval.trian  # noqa: B018


@pytest.mark.parametrize("name", sorted(VERBS))
def test_each_function_says_what_it_does(name: str) -> None:
    text = getattr(retrieval, name).__doc__
    assert text and text.splitlines()[0].endswith(".")


def test_importing_and_listing_are_light(process: Callable[..., Any]) -> None:
    done = process("-c", "import retrieval, sys; dir(retrieval); print(*sorted(sys.modules))")
    assert done.code == 0, done.err
    assert not {"torch", "faiss", "numpy", "pydantic", "PIL", "sklearn"} & set(done.out.split())


def test_the_serving_half_needs_no_torch(process: Callable[..., Any]) -> None:
    code = (
        "import retrieval, sys; retrieval.open_index, retrieval.build_index, retrieval.open_bundle;"
        " print('torch' in sys.modules)"
    )
    assert process("-c", code).out.split() == ["False"]


TYPED = """
from pathlib import Path
from typing import Any, assert_type
import retrieval

run = retrieval.train("recipe.toml", "runs/a", progress=False)
assert_type(run, retrieval.Run)
assert_type(retrieval.load_run(Path("runs/a")), retrieval.Run)
bundle = retrieval.export_run(run, "bundle")
assert_type(bundle, retrieval.Bundle)
assert_type(retrieval.export_backbone("core.efficientnet_lite0", "bundle", whiten="photos"), retrieval.Bundle)
assert_type(retrieval.open_bundle("bundle"), retrieval.Bundle)
index = retrieval.build_index(bundle, "photos", Path("photos.index"))
opened: retrieval.Index = index
reveal_type(index)
assert_type(retrieval.open_index("photos.index"), retrieval.Index)
assert_type(retrieval.report(["runs/a", run.path], map="pca"), Path)
assert_type(retrieval.check_data("photos", model=bundle).clean, bool)
assert_type(retrieval.compare([Path("a.toml"), "b.toml"], seeds=3, progress=False).conclusion, str)
assert_type(retrieval.names("loss"), list[str])
assert_type(retrieval.create("loss", "pml.triplet_margin", margin=0.1), Any)
assert_type(retrieval.read_recipe({"data": {}}), retrieval.Recipe)
assert_type(retrieval.Recipe(data={}), retrieval.Recipe)
assert_type(retrieval.__version__, str)
error: retrieval.RetrievalError = retrieval.RecipeError(["x"])
contracts: tuple[type, ...] = (retrieval.Backbone, retrieval.Combiner, retrieval.Dataset, retrieval.Generator)
reveal_type(retrieval.evaluate)
reveal_type(retrieval.evaluate_run)
reveal_type(retrieval.verify_run)
reveal_type(retrieval.serve)
reveal_type(retrieval.compare)
reveal_type(retrieval.report)
reveal_type(retrieval.CheckedLoss)
reveal_type(retrieval.LinearMap)
reveal_type(retrieval.trian)
"""


def test_a_type_checker_sees_the_types(tmp_path: Path) -> None:
    file = tmp_path / "typed.py"
    file.write_text(TYPED, encoding="utf-8")
    command = [
        sys.executable,
        "-m",
        "mypy",
        str(file),
    ]  # as setup.cfg says: what was read of torch serves all such tests
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500)
    said = done.stdout.splitlines()
    errors = [line for line in said if ": error:" in line]
    assert len(errors) == 1 and 'Module has no attribute "trian"' in errors[0], done.stdout
    revealed = [line.partition("Revealed type is ")[2] for line in said if "Revealed type" in line]
    assert len(revealed) == 10 and "Index" in revealed[0] and "Any" not in revealed[5]
    assert all("def (" in text for text in revealed[1:9])
