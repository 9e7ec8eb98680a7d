"""A reader can follow the pages: files, code and commands work, and answers are as shown."""

import contextlib
import inspect
import io
import json
import pkgutil
import re
import runpy
import shutil
import tomllib
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
import retrieval
from retrieval.bundle.bundle import Bundle
from retrieval.errors import RecipeError
from retrieval.host.factory import COMPONENTS, KINDS
from retrieval.model.contracts import Combiner
from retrieval.recipe.read import Recipe, read_recipe
from retrieval.run.open import Run
from retrieval.store.filters import filter_from_json, parse_filter

from retrieval_server.openapi import document
from retrieval_server.routes import Routes


def test_python_blocks_compile(python_block):
    compile(python_block.body, str(python_block), "exec")


def test_toml_blocks_are_recipes_or_tables_of_one(toml_block):
    table = tomllib.loads(toml_block.body)
    unknown = set(table) - set(Recipe.model_fields)
    assert table and not unknown
    for name, value in table.items():
        field = Recipe.model_fields[name]
        keys = getattr(field.annotation, "model_fields", None)
        if keys is not None and name not in COMPONENTS:  # a component's keys are its parameters
            assert set(value) <= set(keys), f"{toml_block}: [{name}] has {set(value) - set(keys)}"


def test_tutorial(tutorial, root):
    lines = tutorial.ran
    for word in ("check", "train", "evaluate", "export", "index", "search", "serve"):
        assert any(line.startswith(f"retrieval {word} ") for line in lines), word
    assert any("--set" in line for line in lines)
    assert any(line.startswith("curl ") for line in lines)
    with contextlib.chdir(tutorial.folder):  # the recipe's paths are relative to it
        splits = Run.open(Path("runs", "photos")).splits
        second = Run.open(Path("runs", "beta20")).recipe
        bundle = Bundle.open(Path("runs", "photos", "bundle"))
    sizes = [len(part) for part in (splits.train, splits.validation, splits.query)]
    assert sizes == [1007, 250, 539]
    assert set(bundle.manifest.variants) == {"int8"}
    assert second.loss is not None and second.loss.parameters["beta"] == 20 and second.seed == 1


def test_tutorial_shows_the_real_messages(tutorial, root, blocks):
    bodies = [block.body for block in blocks(root / "docs" / "tutorial.md")]
    recipe = (tutorial.folder / "photos.toml").read_text(encoding="utf-8")
    for word in ("embedding_size", "multi_similarity"):
        recipe = recipe.replace(word, word.replace("dd", "d").replace("rity", "rty"))
    (tutorial.folder / "wrong.toml").write_text(recipe, encoding="utf-8")
    with contextlib.chdir(tutorial.folder):
        with pytest.raises(RecipeError) as refused:
            read_recipe(Path("wrong.toml"))
        checked = tutorial.call(["check", "photos.toml"], "tutorial.md").splitlines()
    assert f"Error: {refused.value}\n" in bodies
    shown = next(body for body in bodies if body.startswith("data: ")).splitlines()
    assert checked[:2] == shown[:2] and checked[-1] == shown[-1]


def test_researcher(reader, root, shown):
    reader.follow(root / "docs" / "researcher.md")
    runs = {path.name for path in (reader.folder / "runs").iterdir()}
    assert runs == {"soft", "mined", "parts", "nearer", "mrr", "scaled", "seed1", "seed2"}
    shown(reader.folder / "researcher_map.png", "researcher_map.png")
    bundle = Bundle.open(reader.folder / "runs" / "parts" / "bundle")
    assert bundle.manifest.rescorer is not None and not bundle.manifest.distance.exact


def test_engineer(after_tutorial, root, shown):
    # The page trains these runs again from the start.
    for name in ("runs/photos", "runs/beta20"):
        shutil.rmtree(after_tutorial.folder / name)
    after_tutorial.follow(root / "docs" / "engineer.md")
    manifest = Bundle.open(after_tutorial.folder / "runs" / "photos" / "bundle").manifest
    assert set(manifest.variants) == {"fp16", "int8"} and manifest.evaluation
    for name, most in (("engineer_curves.png", 12), ("engineer_neighbours.png", 30)):
        shown(after_tutorial.folder / name, name, most)
    tomllib.loads((after_tutorial.folder / "frozen.toml").read_text(encoding="utf-8"))


def test_operator(after_tutorial, root):
    shutil.rmtree(after_tutorial.folder / "photos.index")
    after_tutorial.follow(root / "docs" / "operator.md")
    assert sum(line.startswith("curl ") for line in after_tutorial.ran) >= 2


def test_http(after_tutorial, root):
    after_tutorial.follow(root / "docs" / "http.md")
    assert (after_tutorial.folder / "nearest.png").read_bytes().startswith(b"\x89PNG")
    assert (after_tutorial.folder / "small.jpg").read_bytes().startswith(b"\xff\xd8\xff")
    assert sum(line.startswith("curl ") for line in after_tutorial.ran) >= 14
    assert sum(line.startswith("retrieval push ") for line in after_tutorial.ran) == 1
    described = {path for path in document(Routes)["paths"] if "{index}" not in path}
    shown = (root / "docs" / "http.md").read_text(encoding="utf-8")
    assert all(path in shown for path in described if not path.startswith("/v1/item/"))


def test_bundle_and_metrics(after_tutorial, reader, root):
    after_tutorial.follow(root / "docs" / "bundle.md")
    reader.follow(root / "docs" / "metrics.md")


def test_identity(after_tutorial, root, monkeypatch):
    monkeypatch.syspath_prepend(after_tutorial.folder)  # as for a script in it
    after_tutorial.follow(root / "docs" / "identity.md")
    assert (after_tutorial.folder / "vectors" / "part-000000.parquet").is_file()


def test_elsewhere(after_tutorial, root):
    after_tutorial.follow(root / "docs" / "elsewhere.md")
    for name in ("items.parquet", "atlas.parquet", "fiftyone/labels.json"):
        assert (after_tutorial.folder / name).is_file()


def notebook(reader: Any, blocks: list[Any]) -> tuple[list[str], list[str]]:
    """Run a page's blocks in one namespace; return the outputs, and the outputs that it shows."""
    names: dict[str, Any] = {}
    printed, shown = [], []
    with contextlib.chdir(reader.folder):
        for block in blocks:
            if block.language == "python":
                with contextlib.redirect_stdout(io.StringIO()) as out:
                    exec(compile(block.body, str(block), "exec"), names)
                printed += [out.getvalue()] if out.getvalue() else []
            elif block.language == "text":
                shown.append(block.body)
            else:
                reader.do(block)
    return printed, shown


def test_learners(reader, root, blocks):
    printed, shown = notebook(reader, blocks(root / "docs" / "learners.md"))
    assert printed == shown and len(shown) == 5
    assert (reader.folder / "learners_map.png").read_bytes().startswith(b"\x89PNG")
    assert Bundle.open(reader.folder / "digits_nca.bundle").manifest.distance.exact
    run = Run.open(reader.folder / "runs" / "digits_nca")
    assert run.recipe.learner is not None and run.recipe.learner.parameters["random_state"] == 1


def test_python(reader, root, blocks):
    page = blocks(root / "docs" / "python.md")
    *tour, own = ([*filter(None, b.body.splitlines())] for b in page if b.language == "python")
    assert sum(map(len, tour)) <= 30 and len(own) <= 24
    printed, shown = notebook(reader, page)
    hidden = re.compile(r"\d+| \(best\)")  # training results differ between machines
    assert [hidden.sub("", text) for text in printed] == [hidden.sub("", text) for text in shown]
    assert len(list(reader.folder.glob("python_*.png"))) == 3


def test_errors_shows_what_its_code_prints(reader, root, blocks):
    page = root / "docs" / "errors.md"
    with contextlib.redirect_stdout(io.StringIO()) as out:
        reader.follow(page)
    assert out.getvalue() == next(block.body for block in blocks(page) if block.language == "text")


def test_indexes_shows_text_and_json_of_the_same_filter(root):
    page = (root / "docs" / "indexes.md").read_text("utf-8")
    rows = re.findall(r"^\| `([^|]+)` \| (`\{.+`) \|", page, re.M)
    assert len(rows) == 9
    for text, forms in rows:
        for form in re.findall(r"`(\{.*?\})`", forms):
            assert filter_from_json(json.loads(form)) == parse_filter(text), text


def test_the_migration_tables_name_existing_functions(root):
    import pytorch_metric_learning as theirs
    from retrieval.host.plugins import load_plugins

    page = (root / "docs" / "migrating.md").read_text(encoding="utf-8")
    plugins = load_plugins()
    offered = {name for kind in KINDS for name in plugins.factories(kind)}
    named = set(re.findall(r"\b(?:core|pml)\.\w+", page))
    assert len(named) >= 8 and named <= offered
    for name in {*re.findall(r"\bretrieval\.((?:\w+\.)*\w+)", page)}:
        assert attrgetter(name)(retrieval), name
    assert all(hasattr(retrieval.Run, name) for name in re.findall(r"\brun\.(\w+)", page))
    section = page[page.index("## pytorch") : page.index("## Open Metric")]
    calls = re.findall(r"^\| `((?:\w+\.)+)(\w+)\(", section, re.M)
    assert len(calls) >= 9
    for module, name in calls:
        owner = pkgutil.resolve_name(f"{theirs.__name__}.{module.rstrip('.')}")
        assert hasattr(owner, name), (module, name)


def test_the_notebook_is_the_executed_python_page(root):
    cells_of = runpy.run_path(str(root / "docs" / "notebook.py"))["cells"]
    file = root / "docs" / "python.ipynb"
    cells = json.loads(file.read_text(encoding="utf-8"))["cells"]
    own = [(cell["cell_type"], "".join(cell["source"])) for cell in cells]
    page = (root / "docs" / "python.md").read_text(encoding="utf-8")
    assert own == cells_of(page), "python.md changed: run python docs/notebook.py"
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    shown = [output for cell in code for output in cell["outputs"]]
    assert sum("image/png" in output.get("data", {}) for output in shown) == 3
    assert not any(output["output_type"] == "error" for output in shown)
    assert file.stat().st_size < 300_000


def test_the_combiners_table_has_every_method_of_the_contract(root):
    page = (root / "docs" / "researcher.md").read_text(encoding="utf-8")
    part = page[page.index("You must write three methods") : page.index("## A generator")]
    rows = re.findall(r"^\| (`.+?) \| (.+?) \|$", part, re.M)
    named = {n: when for names, when in rows for n in re.findall(r"`(\w+)", names)}
    assert set(named) == {name for name in vars(Combiner) if not name.startswith("_")}
    source = inspect.getsource(Combiner)
    bare = {
        name
        for name in named
        if "raise _missing(" in source.partition(f"def {name}(")[2].partition("    def ")[0]
    }
    always = {name for name, when in named.items() if "always" in when}
    assert always == bare == {"build_head", "compute_mat", "pairwise_distance"}
