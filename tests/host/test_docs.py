"""Every hook is documented with its signature and named in a test; the generated pages are those of the code."""

from __future__ import annotations

import importlib.util
import inspect
from pathlib import Path
from types import ModuleType

import pytest
from retrieval.host import hookspecs

ROOT = Path(__file__).parents[2]
HOOKS = [name for name in vars(hookspecs) if name.startswith("retrieval_")]


@pytest.fixture(scope="module")
def generate() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_generate", ROOT / "docs" / "generate.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_all_hooks_are_found() -> None:
    marked = [name for name, value in vars(hookspecs).items() if hasattr(value, "retrieval_spec")]
    assert marked == HOOKS and len(HOOKS) == 16


@pytest.mark.parametrize("hook", HOOKS)
def test_every_hook_is_documented_with_its_signature(hook: str) -> None:
    text = (ROOT / "docs" / "hooks.md").read_text(encoding="utf-8")
    function = getattr(hookspecs, hook)
    signature = str(inspect.signature(function)).replace("'", "")
    assert (
        f"## {hook}\n\n```python\ndef {hook}{signature}\n```\n\n{inspect.cleandoc(function.__doc__)}" in text
    )
    assert function.__doc__.startswith("Called ")


@pytest.mark.parametrize("hook", HOOKS)
def test_every_hook_is_implemented_in_a_test(hook: str) -> None:
    assert any(
        f"def {hook}(" in path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("*.py")
    ), f"no test implements {hook}"


@pytest.mark.parametrize("page", ["hooks.md", "recipe.md", "plugins.md"])
def test_the_committed_pages_are_what_the_code_gives(page: str, generate: ModuleType) -> None:
    assert set(generate.PAGES) == {"hooks.md", "recipe.md", "plugins.md"}
    assert (ROOT / "docs" / page).read_text(encoding="utf-8") == generate.PAGES[page](), (
        "run: python docs/generate.py"
    )
