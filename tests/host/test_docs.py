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
    assert marked == HOOKS and len(HOOKS) == 20


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


@pytest.mark.parametrize("page", ["hooks.md", "recipe.md", "plugins.md", "floors.svg", "openapi.json"])
def test_the_committed_pages_are_what_the_code_gives(page: str, generate: ModuleType) -> None:
    assert set(generate.PAGES) == {"hooks.md", "recipe.md", "plugins.md", "floors.svg", "openapi.json"}
    assert (ROOT / "docs" / page).read_text(encoding="utf-8") == generate.PAGES[page](), (
        "run: python docs/generate.py"
    )


def test_the_diagram_shows_each_floor_and_who_imports_whom(generate: ModuleType, tmp_path: Path) -> None:
    drawn = (ROOT / "docs" / "floors.svg").read_text(encoding="utf-8")
    for folder in (
        path.name for path in (ROOT / "retrieval").iterdir() if path.is_dir() and path.name != "__pycache__"
    ):
        assert f">{folder}</text>" in drawn
    assert (
        "<title>training imports evaluation</title>" in drawn
        and "<title>serving imports client</title>" in drawn
    )
    assert "<title>run imports training</title>" not in drawn
    for file in ("errors.py", "host/__init__.py", "cli/__init__.py"):
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text('"""Its purpose. More."""\n')
    (tmp_path / "cli" / "app.py").write_text(
        "def late():\n    from retrieval.host.a import b\n\nimport retrieval.errors\n"
    )
    small = generate._load(ROOT / "docs" / "floors.py").draw(tmp_path, [{"errors"}, {"host"}, {"cli"}])
    assert small.count("<title>") == 2 and small.count(">Its purpose</text>") == 3
