"""The pages that are generated from the code: hooks, bundled plugins, floors."""

from __future__ import annotations

import importlib.util
import inspect
from pathlib import Path

import pytest
from retrieval.host import hookspecs
from retrieval.host.factory import KINDS

ROOT = Path(__file__).parents[2]
HOOKS = [name for name in vars(hookspecs) if name.startswith("retrieval_")]


@pytest.fixture(scope="module")
def generate():
    spec = importlib.util.spec_from_file_location("docs_generate", ROOT / "docs" / "generate.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def generated(generate):
    pages: dict[str, str] = generate.pages()
    return pages


def test_all_hooks_are_found():
    marked = [name for name, value in vars(hookspecs).items() if hasattr(value, "retrieval_spec")]
    assert marked == HOOKS and len(HOOKS) == 26


@pytest.mark.parametrize("hook", HOOKS)
def test_every_hook_is_documented_with_its_signature(hook, generated):
    text = generated["hooks.md"]
    function = getattr(hookspecs, hook)
    signature = str(inspect.signature(function)).replace("'", "")
    code = f"```python\ndef {hook}{signature}\n```"
    assert f"## {hook}\n\n{code}\n\n{inspect.cleandoc(function.__doc__)}" in text
    assert function.__doc__.startswith("Called ")


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "trackers"])
def test_every_bundled_plugin_is_on_the_page_of_its_kind(kind, generate, generated):
    text = generated[f"plugins/{kind}.md"]
    for name, factory in generate.bundled().factories(kind).items():
        assert f"\n## {name}\n\n{factory.description}\n" in text
        for parameter in factory.parameters:
            assert f"| `{parameter.name}` |" in text
    assert f"](plugins/{kind}.md)" in generated["plugins.md"]


def test_the_diagram_shows_each_floor_and_who_imports_whom(generated):
    drawn = generated["floors.svg"]
    for path in (ROOT / "retrieval").glob("*/__init__.py"):
        assert f">{path.parent.name}</text>" in drawn
    assert "<title>training imports evaluation</title>" in drawn
    assert "<title>index imports store</title>" in drawn
    assert "<title>run imports training</title>" not in drawn
