"""Loading plugins from entry points, files and modules; a broken one gives one sentence."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from refusals import refusal
from retrieval.errors import PluginError
from retrieval.host.plugins import load_plugins

LOSS = '''
from retrieval.plugin import hookimpl

class Plain:
    """A loss."""
    def __call__(self, embeddings, labels, indices_tuple=None, ref_emb=None, ref_labels=None):
        return embeddings.sum()

@hookimpl
def retrieval_losses():
    return {"plain": Plain}
'''


def write(folder: Path, name: str, code: str) -> str:
    path = folder / name
    path.write_text(code, encoding="utf-8")
    return str(path)


def refused(*items: str, **kwargs: Any) -> str:
    sentence = refusal(PluginError, load_plugins, items, **kwargs)
    assert "\n" not in sentence and sentence.endswith((".", "?"))
    return sentence


def test_a_third_party_distribution_is_loaded(tmp_path, install, monkeypatch):
    install(tmp_path, "retrieval-acme", "acme", "host_acme", LOSS, version="2.1")
    monkeypatch.syspath_prepend(tmp_path)
    plugins = load_plugins()
    assert ("acme", "retrieval-acme 2.1") in [(s.plugin, s.origin) for s in plugins.sources]
    assert plugins.find("losses", "acme.plain").make.__name__ == "Plain"
    assert list(plugins.factories("losses")) == sorted(plugins.factories("losses"))


def test_two_distributions_with_one_name_are_refused_before_loading(tmp_path, install, process):
    shout = "print('LOADED')\n"
    install(tmp_path, "first-acme", "acme", "first_acme", shout, version="1.2")
    install(tmp_path, "second-acme", "acme", "second_acme", shout, version="3.4")
    done = process("-m", "retrieval.cli", "plugins", "list", path=tmp_path)
    assert done.code == 2
    assert "first-acme 1.2" in done.err and "second-acme 3.4" in done.err and "'acme'" in done.err
    assert "LOADED" not in done.out + done.err and "Traceback" not in done.err
    listed = "from retrieval.host.plugins import load_plugins as load; print(load().sources)"
    blocked = process("-c", listed, path=tmp_path, RETRIEVAL_BLOCK="acme")
    assert blocked.code == 0 and "'acme'" not in blocked.out and "'pml'" in blocked.out


def test_a_distribution_installed_twice_is_loaded_once(tmp_path, install, monkeypatch):
    install(tmp_path / "a", "retrieval-twice", "twice", "host_twice", LOSS)
    install(tmp_path / "b", "Retrieval.Twice", "twice", "host_twice", LOSS)
    for folder in "ab":
        monkeypatch.syspath_prepend(tmp_path / folder)
    assert [s.plugin for s in load_plugins().sources].count("twice") == 1


def test_blocked_plugins_are_left_out(tmp_path, monkeypatch):
    file = write(tmp_path, "mine.py", "raise RuntimeError('loaded')")
    monkeypatch.setenv("RETRIEVAL_BLOCK", " pml , mine ")
    plugins = load_plugins([file])
    assert {"pml", "mine"}.isdisjoint(s.plugin for s in plugins.sources)
    sources = load_plugins(block=["core"]).sources  # the argument replaces the variable
    assert "pml" in {s.plugin for s in sources}
    with pytest.raises(PluginError, match=r"No plugin 'pml' is loaded \(loaded: .*core"):
        plugins.find("losses", "pml.contrastive")


def test_a_file_and_a_module_serve_as_plugins(tmp_path, monkeypatch):
    file = write(tmp_path, "from_file.py", LOSS)
    write(tmp_path, "host_from_module.py", LOSS)
    monkeypatch.syspath_prepend(tmp_path)
    plugins = load_plugins([file, "host_from_module", file])  # the second `file` is ignored
    assert plugins.find("losses", "from_file.plain")
    assert plugins.find("losses", "host_from_module.plain")
    origins = [source.origin for source in plugins.sources[-2:]]
    assert origins == [f"file {file}", "module host_from_module"]


DATA = '''
from __future__ import annotations
from dataclasses import dataclass
from retrieval.plugin import hookimpl

@dataclass
class Data:
    """Items."""
    size: int = 3

retrieval_datasets = hookimpl(lambda: {"data": Data})
'''


def test_a_dataclass_in_a_file_plugin_resolves_its_types(tmp_path):
    plugins = load_plugins([write(tmp_path, "datas.py", DATA)])
    assert plugins.build("datasets", {"name": "datas.data", "size": 5}).size == 5


@pytest.mark.parametrize(
    ("name", "code", "words"),
    [
        ("raises", "\nraise RuntimeError('no luck')", ["RuntimeError: no luck", "line 2"]),
        ("syntax", "x = 1\ndef f(:\n", ["SyntaxError", "line 2"]),
        ("leaves", "import sys\nsys.exit(3)", ["SystemExit: 3", "line 2"]),
        ("needs", "import surely_not_installed", ["No module named 'surely_not_in", "line 1"]),
        (
            "deep",
            "def inner():\n    return {}['key']\ninner()",
            ["KeyError: 'key'", "line 2", "RETRIEVAL_BLOCK=deep"],
        ),
    ],
)
def test_a_failed_import_names_the_plugin_and_the_line(tmp_path, name, code, words):
    sentence = refused(write(tmp_path, f"{name}.py", code))
    for word in (f"'{name}'", f"{name}.py", *words):
        assert word in sentence, sentence
    assert f"retrieval_file_plugin_{name}" not in sys.modules


def test_missing_and_misnamed_plugins_are_refused(tmp_path, monkeypatch):
    assert "nowhere.py does not exist" in refused(str(tmp_path / "nowhere.py"))
    assert "Python identifier" in refused(write(tmp_path, "my-loss.py", LOSS))
    for module in ("surely_not_there", "surely.not.there", "json.nowhere", "", ".relative"):
        assert f"There is no module '{module}'" in refused(module)
    write(tmp_path, "whose_code_fails.py", "int('x')")
    monkeypatch.syspath_prepend(tmp_path)
    assert "invalid literal for int()" in refused("whose_code_fails")
    (tmp_path / "folder.py").mkdir()
    assert "does not exist" in refused(str(tmp_path / "folder.py"))


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("losses():", "losess():", ["'hooks'", "'retrieval_losess'", "mean 'retrieval_losses'?"]),
        (
            "@hookimpl",
            "@hookimpl(specname='retrieval_loss')",
            ["'retrieval_loss'", "Did you mean 'retrieval_losses'?"],
        ),
        ("@hookimpl", "", ["retrieval_losses without @retrieval.plugin.hookimpl"]),
        ("losses():", "run_end(run, epochs):", ["(run, epochs)", "{'epochs'} are declared"]),
    ],
)
def test_wrong_hooks_are_refused(tmp_path, old, new, words):
    sentence = refused(write(tmp_path, "hooks.py", LOSS.replace(old, new)))
    assert all(word in sentence for word in words), sentence


def test_duplicate_names_and_modules_are_refused(tmp_path, install, monkeypatch):
    (tmp_path / "other").mkdir()
    first, second = write(tmp_path, "same.py", LOSS), write(tmp_path / "other", "same.py", LOSS)
    sentence = refused(first, second)
    assert "'same'" in sentence and first in sentence and second in sentence
    assert "Two plugins are called 'core'" in refused(write(tmp_path, "core.py", LOSS))
    install(tmp_path, "retrieval-once", "once", "host_once", LOSS)
    monkeypatch.syspath_prepend(tmp_path)
    assert "is loaded already, as 'once'" in refused("host_once")


def test_an_entry_point_must_name_a_module(tmp_path, install, monkeypatch):
    install(tmp_path, "retrieval-odd", "odd", "host_odd", "thing = 3\n")
    points = tmp_path / "retrieval_odd-1.0.dist-info" / "entry_points.txt"
    points.write_text("[retrieval]\nodd = host_odd:thing\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert "of type int; its entry point must name a module" in refused()


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("return [1]", ["'gives'", "returned list from retrieval_losses"]),
        ("return {'x': 3}", ["'gives.x'", "object of type int; a factory is a class"]),
        ("return {'no-name': print}", ["'gives.no-name'", "Python identifier"]),
        ("return {3: print}", ["'gives.3'", "Python identifier"]),
        ("return 1 / 0", ["failed in retrieval_losses", "ZeroDivisionError: division by zero"]),
        ("return {'x': 'json'}", ["'gives.x'", "object of type module"]),
        ("return {'x': 'surely_not_installed:Loss'}", ["'gives'", "surely_not_installed"]),
        ("return {'x': 'json:Loss'}", ["'gives'", "'json'", "'Loss'"]),
        ("import surely_not_installed", ["failed in retrieval_losses", "surely_not_installed"]),
    ],
)
def test_a_wrong_result_of_a_factory_hook_disables_it(tmp_path, body, words):
    code = LOSS.replace('return {"plain": Plain}', body)
    plugins = load_plugins([write(tmp_path, "gives.py", code)])
    assert not any(name.startswith("gives.") for name in plugins.factories("losses"))
    (sentence,) = plugins.disabled("losses").values()
    assert all(word in sentence for word in words), sentence
    (name,) = plugins.disabled("losses")
    assert refusal(PluginError, plugins.find, "losses", name) == sentence


def test_a_plugin_without_torch_says_what_to_install(tmp_path, process):
    code = "raise ModuleNotFoundError('No module named torch', name='torch')"
    (tmp_path / "torch.py").write_text(code)
    done = process("-m", "retrieval.cli", "plugins", "list", "--kind", "losses", path=tmp_path)
    assert done.code == 2 and "Traceback" not in done.err
    assert "pip install 'embedding-retrieval[train]'" in done.err


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("pml.multi_similarty", ["Did you mean 'pml.multi_similarity'?"]),
        ("circle", ["'pml.circle'?"]),
        ("contrastive", ["'daml.contrastive'", "'pml.contrastive'"]),
        ("pmll.circle", ["No plugin 'pmll' is loaded", "Did you mean 'pml.circle'?"]),
        ("core.digits", ["'core.digits' is a dataset"]),
        ("pml.zzzzz", ["retrieval plugins list --kind losses"]),
        ("zz.zzzzz", ["No plugin 'zz' is loaded"]),
    ],
)
def test_an_unknown_name_suggests_the_closest(name, words):
    text = refusal(PluginError, load_plugins().find, "losses", name)
    assert all(word in text for word in words), text
