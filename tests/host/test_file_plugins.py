"""Plugins in files and folders: imports, copies, errors. A folder is a package."""

from __future__ import annotations

import importlib.util
import py_compile
import shutil
import sys
from pathlib import Path

import pytest
from retrieval.errors import PluginError
from retrieval.host.importing import FilePlugin
from retrieval.host.plugins import load_plugins
from retrieval.recipe.read import read_table

PLUGIN = '''
"""A plugin of several modules."""
import json
from retrieval.plugin import hookimpl
from . import helpers
from .kit.inner import value as taken


def lazily():
    from .later import late
    return late()


retrieval_metrics = hookimpl(lambda: {"rank": taken and helpers.Rank})
'''


def write(folder: Path, value: int) -> str:
    """Write a plugin folder with modules (one of them imported late), a subpackage and data."""
    (folder / "kit").mkdir(parents=True)
    (folder / "__init__.py").write_text(PLUGIN)
    (folder / "helpers.py").write_text(
        f'from . import later\nvalue = {value}\n\nclass Rank:\n    """A metric."""\n    depth = 1\n'
    )
    (folder / "later.py").write_text(
        f"def late():\n    from . import helpers\n    return helpers.value + {value}\n"
    )
    (folder / "kit" / "__init__.py").write_text("")
    (folder / "kit" / "inner.py").write_text("from ..helpers import value\n")
    (folder / "kit" / "words.txt").write_text("data")
    (folder / "json.py").write_text("raise RuntimeError('this is not json')")
    return f"{folder}/"


def refused(item: Path | str, message: str) -> None:
    with pytest.raises(PluginError, match=message):
        load_plugins([str(item)])


def test_each_folder_is_a_package_with_its_own_modules(tmp_path):
    path, before = list(sys.path), set(sys.modules)
    for value in (1, 2):
        module = FilePlugin.from_name(write(tmp_path / str(value) / "my_plugin", value)).load()
        assert module.helpers.value == module.taken == value
        assert module.json.dumps(value) == str(value) and module.lazily() == 2 * value
    assert sys.path == path
    new = {name.partition(".")[0] for name in set(sys.modules) - before}
    assert new <= {"retrieval", "retrieval_file_plugin_my_plugin"}  # it imports retrieval.plugin


def test_cached_bytecode_never_runs(tmp_path):
    item = write(tmp_path / "my_plugin", 4)
    evil, alone = tmp_path / "evil.py", tmp_path / "alone.py"
    evil.write_text("value = 666")
    alone.write_text("value = 5")
    modules = ("my_plugin/__init__.py", "my_plugin/helpers.py", "my_plugin/kit/inner.py")
    for module in (*modules, "alone.py"):
        compiled = importlib.util.cache_from_source(str(tmp_path / module))
        unchecked = py_compile.PycInvalidationMode.UNCHECKED_HASH
        py_compile.compile(str(evil), compiled, invalidation_mode=unchecked)
    module = FilePlugin.from_name(item).load()
    assert module.helpers.value == module.taken == 4
    assert FilePlugin.from_name(str(alone)).load().value == 5


def test_a_folder_plugin_includes_its_files_and_a_file_plugin_only_itself(tmp_path):
    plugin = FilePlugin.from_name(write(tmp_path / "my_plugin", 3))
    names = ["__init__.py", "helpers.py", "json.py", "later.py"]
    names += ["kit/__init__.py", "kit/inner.py", "kit/words.txt"]
    assert list(plugin.files) == names
    before = plugin.sums
    (tmp_path / "my_plugin" / "later.py").write_text("def late():\n    return 0\n")
    after = FilePlugin.from_name(f"{plugin.path}/").sums
    assert [name for name in names if before[name] != after[name]] == ["later.py"]
    alone = FilePlugin.from_name(str(tmp_path / "my_plugin" / "later.py"))
    assert list(alone.files) == ["later.py"]


def test_a_copied_folder_works_without_the_original(tmp_path):
    item = write(tmp_path / "mine" / "my_plugin", 5)
    copied = FilePlugin.from_name(item).copy(tmp_path / "run" / "plugins")
    (copied / "gone.py").write_text("raise RuntimeError")
    # A second copy replaces the first.
    assert FilePlugin.from_name(item).copy(tmp_path / "run" / "plugins") == copied
    assert not (copied / "gone.py").exists()
    sums = FilePlugin.from_name(item).sums
    shutil.rmtree(tmp_path / "mine")
    copy = FilePlugin.from_name(f"{copied}/")
    assert copy.sums == sums and copied.name == "my_plugin"
    assert copy.load().lazily() == 10


def test_a_file_is_copied_alone(tmp_path):
    path = tmp_path / "my_plugin.py"
    path.write_text("value = 1\n")
    (tmp_path / "helpers.py").write_text("")
    copied = FilePlugin.from_name(str(path)).copy(tmp_path / "run")
    assert copied == tmp_path / "run" / "my_plugin.py"
    assert [place.name for place in (tmp_path / "run").iterdir()] == ["my_plugin.py"]


def test_absolute_imports_of_neighbours_are_explained(tmp_path):
    (tmp_path / "helpers_beside.py").write_text("")
    (tmp_path / "alone.py").write_text("import helpers_beside\n")
    message = (
        r"its neighbour.*Make a folder.*alone\.py as its __init__\.py.*`from \. import helpers_"
    )
    refused(tmp_path / "alone.py", message)
    for line, module in (
        ("import shapes.parts_inside", "MODULE"),
        ("from parts_inside import x", "parts_inside"),
    ):
        (tmp_path / "shapes").mkdir(exist_ok=True)
        (tmp_path / "shapes" / "__init__.py").write_text(line)
        (tmp_path / "shapes" / "parts_inside.py").write_text("x = 1")
        refused(
            f"{tmp_path / 'shapes'}/",
            rf"its neighbour '.*' as a top-level module\. Write `from \. import {module}`",
        )
    (tmp_path / "alone.py").write_text("import nowhere_at_all\n")
    refused(tmp_path / "alone.py", "No module named 'nowhere_at_all'")


def test_a_recipe_finds_a_folder_beside_itself(tmp_path):
    (tmp_path / "shapes").mkdir()
    (tmp_path / "recipe.toml").write_text('plugins = ["shapes/", "retrieval_core"]')
    plugins = read_table(tmp_path / "recipe.toml")[0]["plugins"]
    assert plugins == [f"{tmp_path / 'shapes'}/", "retrieval_core"]


def test_broken_plugins_are_refused(tmp_path):
    empty = f"{tmp_path / 'empty'}/"
    Path(empty).mkdir()
    refused(empty, r"empty/ has no __init__\.py")
    refused(f"{tmp_path / 'none'}/", r"folder .*none/ does not exist")
    (tmp_path / "odd.py").write_text("def f(:\n")
    refused(tmp_path / "odd.py", r"odd\.py, line 1")
    Path(empty, "__init__.py").write_text("")
    refused(empty, r"'empty' .* marks no hook.*retrieval_losses")
    with Path(empty, "vectors.npy").open("wb") as file:
        file.truncate(65 << 20)
    refused(empty, "more than 1,000 files or 64 MB")
    Path(empty, "vectors.npy").unlink()
    for i in range(1_001):
        Path(empty, f"{i}.txt").touch()
    refused(empty, "more than 1,000 files or 64 MB")
