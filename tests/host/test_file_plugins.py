"""A plugin in a file or a folder: its neighbours are its own, and all of it can be copied."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest
from retrieval.errors import PluginError
from retrieval.host.file_plugins import FilePlugin
from retrieval.host.plugins import load_plugins
from retrieval.recipe.read import read_table

PLUGIN = '''
"""A plugin with neighbours."""
import json
import helpers
import kit.inner
from helpers import value as taken
from kit import inner as other
from retrieval import hookimpl
from . import helpers as relative


def lazily():
    from later import late
    return late()


@hookimpl
def retrieval_metrics():
    return {}
'''


def write(folder: Path, value: int) -> Path:
    """A plugin file, two neighbours, one that is imported when it is called, and a package."""
    (folder / "kit").mkdir(parents=True)
    (folder / "my_plugin.py").write_text(PLUGIN)
    (folder / "helpers.py").write_text(f"import later\nvalue = {value}\n")
    (folder / "later.py").write_text(f"def late():\n    import helpers\n    return helpers.value + {value}\n")
    (folder / "kit" / "__init__.py").write_text("import helpers\n")
    (folder / "kit" / "inner.py").write_text(
        "from helpers import value\nfrom . import helpers as _\n".splitlines()[0]
    )
    (folder / "kit" / "words.txt").write_text("data")
    (folder / "unrelated.py").write_text("raise RuntimeError('nobody asked for this')")
    (folder / "json.py").write_text("raise RuntimeError('this is not json')")
    return folder / "my_plugin.py"


def test_neighbours_are_imported_whatever_the_working_folder_and_each_plugin_has_its_own(
    tmp_path: Path,
) -> None:
    path, before = list(sys.path), set(sys.modules)
    modules = [FilePlugin.at(str(write(tmp_path / str(value), value))).load() for value in (1, 2)]
    for value, module in enumerate(modules, 1):
        assert module.helpers.value == module.taken == module.relative.value == value
        assert module.kit.inner.value == module.other.value == value
        assert module.json.dumps(value) == str(value)
    assert modules[1].lazily() == 4
    assert sys.path == path
    assert {name.partition(".")[0] for name in set(sys.modules) - before} <= {
        "retrieval_file_plugin_my_plugin"
    }


def test_what_a_file_imports_belongs_to_it_and_nothing_else(tmp_path: Path) -> None:
    plugin = FilePlugin.at(str(write(tmp_path, 3)))
    names = ["helpers.py", "kit/__init__.py", "kit/inner.py", "kit/words.txt", "later.py", "my_plugin.py"]
    assert list(plugin.files) == names
    before = plugin.sums
    (tmp_path / "later.py").write_text("def late():\n    return 0\n")
    after = FilePlugin.at(str(plugin.path)).sums
    assert [name for name in names if before[name] != after[name]] == ["later.py"]


@pytest.mark.parametrize("as_folder", [False, True])
def test_a_copy_works_without_what_it_was_copied_from(tmp_path: Path, as_folder: bool) -> None:
    write(tmp_path / "mine" / "my_plugin", 5)
    item = str(tmp_path / "mine" / "my_plugin" / "my_plugin.py")
    if as_folder:
        Path(item).rename(tmp_path / "mine" / "my_plugin" / "__init__.py")
        item = str(tmp_path / "mine" / "my_plugin") + "/"
    copied = FilePlugin.at(item).copy(tmp_path / "run" / "plugins")
    stale = copied / "gone.py" if as_folder else copied.with_name("gone.py")
    stale.write_text("raise RuntimeError")
    assert FilePlugin.at(item).copy(tmp_path / "run" / "plugins") == copied  # again, into the same place
    assert not stale.exists()
    sums = FilePlugin.at(item).sums
    shutil.rmtree(tmp_path / "mine")
    copy = FilePlugin.at(str(copied) + "/" * as_folder)
    assert copy.sums == sums
    assert copy.load().lazily() == 10
    assert (copied if as_folder else copied.parent).name == "my_plugin"


def test_a_file_alone_is_copied_as_a_file_in_the_place_of_one_with_neighbours(tmp_path: Path) -> None:
    path = write(tmp_path / "mine", 1)
    assert FilePlugin.at(str(path)).copy(tmp_path / "run") == tmp_path / "run" / "my_plugin" / "my_plugin.py"
    path.write_text("value = 1\n")
    assert FilePlugin.at(str(path)).copy(tmp_path / "run") == tmp_path / "run" / "my_plugin.py"
    assert [place.name for place in (tmp_path / "run").iterdir()] == ["my_plugin.py"]


def test_a_folder_imports_itself_by_its_name_and_is_a_plugin_by_its_name(tmp_path: Path) -> None:
    folder = tmp_path / "shapes"
    (folder / "inside").mkdir(parents=True)
    (folder / "__init__.py").write_text(
        "from retrieval import hookimpl\nfrom shapes.inside.parts import Rank\n\n@hookimpl\ndef retrieval_metrics():\n    return {'rank': Rank}\n"
    )
    (folder / "inside" / "__init__.py").write_text("")
    (folder / "inside" / "parts.py").write_text('class Rank:\n    """A figure."""\n    depth = 1\n')
    plugins = load_plugins([f"{folder}/"])
    assert "shapes.rank" in plugins.factories("metrics")
    assert [source.origin for source in plugins.sources if source.plugin == "shapes"] == [f"folder {folder}"]


def test_a_recipe_finds_a_folder_beside_itself(tmp_path: Path) -> None:
    (tmp_path / "shapes").mkdir()
    (tmp_path / "recipe.toml").write_text('plugins = ["shapes/", "retrieval_core"]')
    assert read_table(tmp_path / "recipe.toml")[0]["plugins"] == [
        f"{tmp_path / 'shapes'}/",
        "retrieval_core",
    ]


def test_what_is_no_plugin_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(PluginError, match=r"empty/ has no __init__\.py"):
        load_plugins([f"{tmp_path / 'empty'}/"])
    with pytest.raises(PluginError, match=r"folder .*none/ does not exist"):
        load_plugins([f"{tmp_path / 'none'}/"])
    (tmp_path / "odd.py").write_text("import helpers\n")
    (tmp_path / "helpers.py").write_text("def f(:\n")
    with pytest.raises(PluginError, match=r"helpers\.py, line 1"):
        FilePlugin.at(str(tmp_path / "odd.py")).sums  # noqa: B018
    (tmp_path / "empty" / "__init__.py").write_text("")
    for i in range(1_001):
        (tmp_path / "empty" / f"{i}.txt").touch()
    with pytest.raises(PluginError, match=r"more than 1,000 files"):
        FilePlugin.at(f"{tmp_path / 'empty'}/").files  # noqa: B018
